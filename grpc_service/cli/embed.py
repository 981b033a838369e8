"""``triolet embed``: vectors of texts; for a person, how alike the texts are.

Rule: with --json every number, a line per text in the texts' order; else what can be read.
"""

from __future__ import annotations

import json
import math
import operator
import sys
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from grpc_service._generated.triolet.v1 import inference_pb2, inference_pb2_grpc
from grpc_service.cli.client import run_client
from grpc_service.cli.query import print_table
from grpc_service.cli.texts import fitted, in_order, progress, results_of, texts_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    import grpc

    Response = inference_pb2.EmbedResponse

MATRIX_MAX = 10  # texts whose similarities, all with all, are still a table to read
NUMBERS_SHOWN = 4
NEAREST_MAX = 300  # texts that are compared, all with all, in Python: 0.7 s of 384 numbers


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    texts = texts_of(args.texts, args.file, "texts")

    def job(channel: grpc.Channel) -> None:
        stub = inference_pb2_grpc.InferenceStub(channel)

        def ask(part: Sequence[str], timeout_s: float | None) -> Any:
            return stub.Embed(request_of(args, part), timeout=timeout_s)

        is_quiet = args.json and sys.stdout.isatty()  # lines and a bar would mix
        with progress("embedding", len(texts), is_quiet=is_quiet) as advance:
            found: Iterator[Response] = in_order(
                named(results_of(texts, ask, args.timeout, advance))
            )
            if args.json:
                print_json(found)
                return
            vectors = list(found)
        print_vectors(texts, vectors)

    return run_client(args, job)


def request_of(args: argparse.Namespace, texts: Sequence[str]) -> inference_pb2.EmbedRequest:
    """Flags that are not given stay unset, so that the model's own defaults hold."""
    return inference_pb2.EmbedRequest(
        model=args.model,
        inputs=[inference_pb2.EmbedInput(text=text) for text in texts],
        dimensions=args.dimensions,
        normalize=args.normalize,
        prompt_name=args.prompt_name,
        truncate=args.truncate,
    )


def named(vectors: Iterable[Response]) -> Iterator[Response]:
    """The vectors as they come, the model's name in each; calls tell it in their first message."""
    model = ""
    for vector in vectors:
        model = vector.model = vector.model or model
        yield vector


def print_json(vectors: Iterable[Response]) -> None:
    """A line of JSON per vector, in proto's own mapping."""
    for vector in vectors:
        fields = json_format.MessageToDict(
            vector, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        print(json.dumps(fields, ensure_ascii=False), flush=True)


def print_vectors(texts: Sequence[str], vectors: Sequence[Response]) -> None:
    """A line per text; then all similarities, or of many texts each one's nearest."""
    lengths = [math.hypot(*vector.values) for vector in vectors]
    units = [
        _scaled(vector.values, length) for vector, length in zip(vectors, lengths, strict=True)
    ]
    head = ["INDEX", "TOKENS", "LENGTH", "FIRST NUMBERS"]
    rows = []
    for place, vector in enumerate(vectors):
        shown = " ".join(f"{number:+.3f}" for number in vector.values[:NUMBERS_SHOWN])
        more = " …" if len(vector.values) > NUMBERS_SHOWN else ""
        rows.append([str(place), str(vector.tokens), f"{lengths[place]:.3f}", shown + more])
    if MATRIX_MAX < len(texts) <= NEAREST_MAX:
        head.append("NEAREST")
        for row, nearest in zip(rows, _nearest(units), strict=True):
            row.append(nearest)
    widths = [max(map(len, column)) + 2 for column in zip(head, *rows, strict=True)]
    for row, text in zip(rows, texts, strict=True):
        row.append(fitted(text, sum(widths)))
    print_table((*head, "TEXT"), rows)
    if 1 < len(texts) <= MATRIX_MAX:
        print("\ncosine similarity")
        _print_matrix(units)
    print(f"\n{_counted(len(texts))} of {len(units[0])} numbers by {vectors[0].model}")
    if len(texts) > NEAREST_MAX:
        print(
            f"Of more than {NEAREST_MAX} texts no similarities are shown; --json has the numbers."
        )


def _counted(number: int) -> str:
    return "1 vector" if number == 1 else f"{number} vectors"


def _scaled(values: Iterable[float], length: float) -> list[float]:
    return [value / length for value in values] if length else list(values)


def _print_matrix(units: Sequence[Sequence[float]]) -> None:
    places = [str(place) for place in range(len(units))]
    rows = [[_cosine(_product(row, column)) for column in units] for row in units]
    print_table(("", *places), [[place, *row] for place, row in zip(places, rows, strict=True)])


def _nearest(units: Sequence[Sequence[float]]) -> Iterator[str]:
    """Of each text the other that is most alike: its place and the cosine of their angle."""
    best = [(-2.0, 0)] * len(units)  # below every cosine
    for place, unit in enumerate(units):
        for other in range(place):
            cosine = _product(unit, units[other])
            best[place] = max(best[place], (cosine, -other))
            best[other] = max(best[other], (cosine, -place))
    for cosine, other in best:
        yield f"{-other} ({_cosine(cosine)})"


def _product(one: Iterable[float], other: Iterable[float]) -> float:
    return float(sum(map(operator.mul, one, other)))


def _cosine(number: float) -> str:
    """Without the sign of a zero."""
    return f"{round(number, 3) + 0.0:.3f}"
