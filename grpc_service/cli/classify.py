"""``triolet classify``: labels texts, or finds entities in them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from grpc_service.cli.client import run_client
from grpc_service.cli.query import print_json, print_texts
from grpc_service.cli.texts import fitted, in_order, progress, results_of, texts_of
from grpc_service.client import messages

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from grpc_service.client import Client, Stream

    Response = messages.ClassifyResponse

LABELS_SHOWN = 3
NO_ENTITY = "-"


def run(args: argparse.Namespace) -> int:
    """Classify the texts and print the labels or entities. Return the exit code."""
    texts = texts_of(args.texts, args.file, "texts")

    def job(client: Client) -> None:
        def ask(part: Sequence[str], timeout_s: float | None) -> Stream[Response]:
            return client.classify(request_of(args, part), timeout=timeout_s)

        is_quiet = args.json and sys.stdout.isatty()  # a progress bar would stand among the lines
        with progress("classifying", len(texts), is_quiet=is_quiet) as advance:
            responses: Iterator[Response] = in_order(results_of(texts, ask, args.timeout, advance))
            if args.json:
                for response in responses:
                    print_json(response)
                return
            found = list(responses)
        show = print_entities if args.aggregation else print_labels
        show(texts, found)

    return run_client(args, job)


def request_of(args: argparse.Namespace, texts: Sequence[str]) -> messages.ClassifyRequest:
    """Return the request. Flags that are not given stay unset, so that the model's own defaults
    apply."""
    second = args.pair
    return messages.ClassifyRequest(
        model=args.model,
        inputs=[
            messages.ClassifyInput(text=text)
            if second is None
            else messages.ClassifyInput(pair=messages.TextPair(text=text, text_pair=second))
            for text in texts
        ],
        activation=args.activation and f"ACTIVATION_{args.activation.upper()}",
        top_k=args.top_k,
        aggregation=args.aggregation and f"AGGREGATION_{args.aggregation.upper()}",
        truncate=args.truncate,
    )


def print_labels(texts: Sequence[str], found: Sequence[Response]) -> None:
    """Print one line per text with its best labels."""
    rows = []
    for response in found:
        best = [f"{one.label} {one.score:.4f}" for one in response.labels[:LABELS_SHOWN]]
        more = ", …" if len(response.labels) > LABELS_SHOWN else ""
        rows.append([str(response.index), ", ".join(best) + more])
    print_texts(("INDEX", "LABELS", "TEXT"), rows, texts)


def print_entities(texts: Sequence[str], found: Sequence[Response]) -> None:
    """Print one line per entity, after the index of its text."""
    rows, parts = [], []
    for response in found:
        text = texts[response.index]
        for one in response.entities:
            place = f"{one.start}-{one.end}"
            rows.append([str(response.index), one.label, f"{one.score:.4f}", place])
            parts.append(text[one.start : one.end])
        if not response.entities:
            rows.append([str(response.index), *[NO_ENTITY] * 3])
            parts.append(fitted(text, 40))
    print_texts(("INDEX", "LABEL", "SCORE", "CHARACTERS", "TEXT"), rows, parts)
