"""The commands that make one call with one answer: ``triolet tokenize``, ``stats``, ``explain``,
``pause``, ``resume``, ``drain``, ``abort`` and ``reset-prefix-cache``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration

from grpc_service.app.statistics import lines_of
from grpc_service.cli.client import run_client
from grpc_service.cli.texts import fitted
from grpc_service.client import messages

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from google.protobuf.message import Message

    from grpc_service.client import Client


def tokenize(args: argparse.Namespace) -> int:
    """Print the tokens of a text, or with --detokenize the text of ids. Return the exit code."""
    if (args.text is None) == (args.detokenize is None):
        print("triolet: tokenize needs either a text or --detokenize with ids", file=sys.stderr)
        return 2

    if args.detokenize is not None:
        ids = messages.DetokenizeRequest(model=args.model, ids=args.detokenize)
        return _ask(args, lambda client: client.detokenize, ids, lambda answer: print(answer.text))
    request = messages.TokenizeRequest(
        model=args.model,
        text=sys.stdin.read().removesuffix("\n") if args.text == "-" else args.text,
        add_special_tokens=False if args.no_special_tokens else None,
    )
    return _ask(args, lambda client: client.tokenize, request, print_tokens)


def stats(args: argparse.Namespace) -> int:
    """Print the server's figures. Return the exit code."""
    return _ask(
        args,
        lambda client: client.control.get_stats,
        None,
        lambda answer: print("\n".join(lines_of(answer))),
    )


def pause(args: argparse.Namespace) -> int:
    """Pause one model or all. Return the exit code."""
    request = messages.PauseRequest(mode=f"PAUSE_MODE_{args.mode.upper()}", model=args.model)
    return _ask(args, lambda client: client.control.pause, request, "paused")


def resume(args: argparse.Namespace) -> int:
    """End a pause. Return the exit code."""
    request = messages.ResumeRequest(model=args.model)
    return _ask(args, lambda client: client.control.resume, request, "resumed")


def reset_prefix_cache(args: argparse.Namespace) -> int:
    """Forget the cached prefixes of one model or all. Return the exit code."""
    request = messages.ResetPrefixCacheRequest(model=args.model)
    done = "forgot every cached prefix"
    return _ask(args, lambda client: client.control.reset_prefix_cache, request, done)


DRAINED = "drained; the process stays up, and accepts no connections until it is started again"


def drain(args: argparse.Namespace) -> int:
    """Wait until the server has finished or cut its requests. Return the exit code."""
    request = messages.DrainRequest(timeout=duration_of(args.cut_after))
    return _ask(args, lambda client: client.control.drain, request, DRAINED)


def explain(args: argparse.Namespace) -> int:
    """Print what a live request does and waits for. Return the exit code."""
    request = messages.ExplainRequest(request_id=args.request_id)
    return _ask(args, lambda client: client.control.explain, request, print_explanation)


def usage(args: argparse.Namespace) -> int:
    """Print what ended requests have used, by holder and model. Return the exit code."""
    request = messages.GetUsageRequest(model=args.model, holder=args.holder)
    if args.since is not None:
        request.since.FromDatetime(args.since)
    return _ask(args, lambda client: client.control.get_usage, request, print_usage)


def abort(args: argparse.Namespace) -> int:
    """End requests by their ids, and print the outcome of each. Return the exit code."""
    request = messages.AbortRequest(request_ids=args.request_ids)
    return _ask(args, lambda client: client.control.abort, request, print_aborts)


def _ask(
    args: argparse.Namespace,
    method: Callable[[Client], Callable[..., Any]],
    request: Message | None,
    shown: Callable[[Any], None] | str,
) -> int:
    """Call a method of the client and show its answer. Return the exit code."""
    given = () if request is None else (request,)
    return run_client(
        args, lambda client: show(args, method(client)(*given, timeout=args.timeout), shown)
    )


def show(args: argparse.Namespace, answer: Message, shown: Callable[[Any], None] | str) -> None:
    """Print an answer: as JSON with --json, else by the function ``shown``, or as that text."""
    if args.json:
        print_json(answer)
    elif isinstance(shown, str):
        print(shown)
    else:
        shown(answer)


def duration_of(seconds: float | None) -> Duration | None:
    """Return seconds as a field of a request; None leaves it unset."""
    if seconds is None:
        return None
    duration = Duration()
    duration.FromMicroseconds(int(seconds * 1e6))
    return duration


def print_explanation(answer: messages.ExplainResponse) -> None:
    """Print a line for each fact in the answer of Explain."""
    rows = [("state", answer.state.lower())]
    if answer.waiting_for:
        rows.append(("waits for", answer.waiting_for))
    if answer.position:
        soon = ""
        if answer.HasField("estimate"):
            soon = f", starts in about {answer.estimate.ToTimedelta().total_seconds():.3g} s"
        rows.append(("in queue", f"place {answer.position}{soon}"))
    rows.append(("computed", f"{answer.computed_tokens} tokens, in {answer.blocks} blocks"))
    if parked := answer.parked.ToTimedelta().total_seconds():
        rows.append(("parked", f"{parked:.3g} s so far"))
    for draft in answer.drafts:
        share = f"{draft.accepted_tokens} of {draft.drafted_tokens} tokens were right"
        rows.append(("drafts", f"by {draft.drafter}: {share}"))
    for name, text in rows:
        print(f"{name:<10}{text}")


def print_json(message: Message) -> None:
    """Print a message in protobuf's JSON mapping, including fields that are 0."""
    print(
        json.dumps(
            json_format.MessageToDict(
                message,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            ),
            ensure_ascii=False,
        ),
        flush=True,
    )


def print_tokens(answer: messages.TokenizeResponse) -> None:
    """Print a table of the tokens, and how many there are."""
    rows = [
        (str(t.id), f"{t.start}–{t.end}", json.dumps(t.text, ensure_ascii=False))
        for t in answer.tokens
    ]
    print_table(("ID", "PLACE", "TEXT"), rows)
    print(f"{len(answer.tokens)} of at most {answer.max_model_len} tokens")


OUTCOMES = {
    messages.ABORT_OUTCOME_ABORTED: "aborted",
    messages.ABORT_OUTCOME_ALREADY_ENDED: "had already ended",
    messages.ABORT_OUTCOME_REMEMBERED: "not known; if it arrives within 60 s, it will be aborted",
}


def print_aborts(answer: messages.AbortResponse) -> None:
    """Print the outcome of each abort."""
    for result in answer.results:
        print(f"{result.request_id}: {OUTCOMES.get(result.outcome, 'unknown outcome')}")


USED = ("prompt_tokens", "cached_tokens", "completion_tokens", "undelivered")


def print_usage(answer: messages.GetUsageResponse) -> None:
    """Print since when requests are counted, and a line for each holder and model."""
    print(f"since {answer.since.ToJsonString()}")
    head = (
        "holder",
        "model",
        "requests",
        "prompt",
        "cached",
        "completion",
        "undelivered",
        "step s",
    )
    rows = [
        [
            *(sums.holder or "-", sums.model or "-", str(sums.requests)),
            *(str(getattr(sums.usage, name)) for name in USED),
            f"{sums.usage.step.ToMicroseconds() / 1e6:.3f}",
        ]
        for sums in answer.sums
    ]
    print_table(head, rows)


def print_texts(head: Sequence[str], rows: Sequence[list[str]], texts: Sequence[str]) -> None:
    """Print a table whose last column has texts. On a terminal the texts are cut to the width that
    the other columns leave."""
    *others, _ = head
    taken = sum(max(map(len, column)) + 2 for column in zip(others, *rows, strict=True))
    print_table(head, [[*row, fitted(text, taken)] for row, text in zip(rows, texts, strict=True)])


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose columns are as wide as their widest cells."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
