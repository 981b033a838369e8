"""The commands of one question and one answer: ``triolet tokenize``, ``stats``, and the
operating ones, ``pause``, ``resume``, ``drain``, ``abort`` and ``reset-prefix-cache``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from grpc_service._generated.triolet.v1 import (
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from grpc_service.cli.client import run_client
from grpc_service.cli.statistics import lines_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    import grpc
    from google.protobuf.message import Message


def tokenize(args: argparse.Namespace) -> int:
    """Tokens of a text, or with --detokenize the text of ids. Returns the exit code."""
    if (args.text is None) == (args.detokenize is None):
        print("triolet tokenize: give either a text or --detokenize with ids", file=sys.stderr)
        return 2

    def split(channel: grpc.Channel) -> Any:
        request = inference_pb2.TokenizeRequest(
            model=args.model,
            text=sys.stdin.read().removesuffix("\n") if args.text == "-" else args.text,
            add_special_tokens=False if args.no_special_tokens else None,
        )
        return inference_pb2_grpc.InferenceStub(channel).Tokenize(request, timeout=args.timeout)

    def join(channel: grpc.Channel) -> Any:
        request = inference_pb2.DetokenizeRequest(model=args.model, ids=args.detokenize)
        return inference_pb2_grpc.InferenceStub(channel).Detokenize(request, timeout=args.timeout)

    if args.detokenize is not None:
        return _show(args, join, lambda answer: print(answer.text))
    return _show(args, split, print_tokens)


def stats(args: argparse.Namespace) -> int:
    """Returns the exit code."""

    def ask(channel: grpc.Channel) -> Any:
        stub = control_pb2_grpc.ControlStub(channel)
        return stub.GetStats(control_pb2.GetStatsRequest(), timeout=args.timeout)

    return _show(args, ask, print_stats)


def pause(args: argparse.Namespace) -> int:
    """Pause the scheduler of one model or all. Returns the exit code."""
    request = control_pb2.PauseRequest(mode=f"PAUSE_MODE_{args.mode.upper()}", model=args.model)
    return _operate(args, lambda stub: stub.Pause(request, timeout=args.timeout), "paused")


def resume(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    request = control_pb2.ResumeRequest(model=args.model)
    return _operate(args, lambda stub: stub.Resume(request, timeout=args.timeout), "resumed")


def reset_prefix_cache(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    request = control_pb2.ResetPrefixCacheRequest(model=args.model)
    return _operate(
        args, lambda stub: stub.ResetPrefixCache(request, timeout=args.timeout), "forgotten"
    )


DRAINED = "drained; the server stays up and refuses new requests until it is started again"


def drain(args: argparse.Namespace) -> int:
    """Wait until the server has finished or cut its requests. Returns the exit code."""
    request = control_pb2.DrainRequest()
    if args.cut_after is not None:
        request.timeout.FromMicroseconds(int(args.cut_after * 1e6))
    return _operate(args, lambda stub: stub.Drain(request, timeout=args.timeout), DRAINED)


def explain(args: argparse.Namespace) -> int:
    """Say what a live request does and waits for. Returns the exit code."""

    def ask(channel: grpc.Channel) -> Any:
        request = control_pb2.ExplainRequest(request_id=args.request_id)
        return control_pb2_grpc.ControlStub(channel).Explain(request, timeout=args.timeout)

    return _show(args, ask, print_explanation)


def print_explanation(answer: control_pb2.ExplainResponse) -> None:
    """A line for each thing that there is to say."""
    rows = [("state", answer.state.lower())]
    if answer.waiting_for:
        rows.append(("waits for", answer.waiting_for))
    if answer.position:
        soon = ""
        if answer.HasField("estimate"):
            soon = f", starts in about {answer.estimate.ToTimedelta().total_seconds():.3g} s"
        rows.append(("in line", f"place {answer.position}{soon}"))
    rows.append(("computed", f"{answer.computed_tokens} tokens, in {answer.blocks} blocks"))
    if parked := answer.parked.ToTimedelta().total_seconds():
        rows.append(("parked", f"{parked:.3g} s so far"))
    for name, text in rows:
        print(f"{name:<10}{text}")


def abort(args: argparse.Namespace) -> int:
    """End requests by id; prints what became of each. Returns the exit code."""

    def ask(channel: grpc.Channel) -> Any:
        request = control_pb2.AbortRequest(request_ids=args.request_ids)
        return control_pb2_grpc.ControlStub(channel).Abort(request, timeout=args.timeout)

    return _show(args, ask, print_aborts)


def _operate(
    args: argparse.Namespace, ask: Callable[[control_pb2_grpc.ControlStub], Message], done: str
) -> int:
    return _show(
        args, lambda channel: ask(control_pb2_grpc.ControlStub(channel)), lambda _: print(done)
    )


def _show(
    args: argparse.Namespace,
    ask: Callable[[grpc.Channel], Any],
    show: Callable[[Any], None],
) -> int:
    """Ask the server and show its answer, in JSON if that is wanted. The exit code."""

    def job(channel: grpc.Channel) -> None:
        answer = ask(channel)
        if args.json:
            print_json(answer)
        else:
            show(answer)

    return run_client(args, job)


def print_json(message: Message) -> None:
    """Proto's own mapping, zeros included."""
    print(
        json.dumps(
            json_format.MessageToDict(
                message,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            ),
            ensure_ascii=False,
        )
    )


def print_tokens(answer: inference_pb2.TokenizeResponse) -> None:
    rows = [
        (str(t.id), f"{t.start}–{t.end}", json.dumps(t.text, ensure_ascii=False))
        for t in answer.tokens
    ]
    print_table(("ID", "PLACE", "TEXT"), rows)
    print(f"{len(answer.tokens)} of at most {answer.max_model_len} tokens")


def print_stats(answer: control_pb2.GetStatsResponse) -> None:
    print("\n".join(lines_of(answer)))


OUTCOMES = {
    control_pb2.ABORT_OUTCOME_ABORTED: "aborted",
    control_pb2.ABORT_OUTCOME_ALREADY_ENDED: "had ended already",
    control_pb2.ABORT_OUTCOME_REMEMBERED: (
        "not known; if it arrives within 60 s, it is aborted then"
    ),
}


def print_aborts(answer: control_pb2.AbortResponse) -> None:
    for result in answer.results:
        print(f"{result.request_id}: {OUTCOMES.get(result.outcome, 'unknown outcome')}")


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
