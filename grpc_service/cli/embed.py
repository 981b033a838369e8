"""``triolet embed``: turns texts and images into vectors, and shows how similar they are.

Rule: --json prints every number, one line per text or image, in their order, the images after the
texts. Without it, the output is a table for people.
"""

from __future__ import annotations

import math
import operator
import sys
from typing import TYPE_CHECKING

from grpc_service.cli.client import run_client
from grpc_service.cli.query import print_json, print_table, print_texts
from grpc_service.cli.texts import (
    ImageFile,
    images_of,
    in_order,
    progress,
    results_of,
    texts_of,
)
from grpc_service.client import messages

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from grpc_service.client import Client, Stream

    Response = messages.EmbedResponse
    Input = str | ImageFile

MATRIX_MAX = 10  # the most texts of which the similarities of all pairs are shown
NUMBERS_SHOWN = 4
NEAREST_MAX = 300  # the most texts that are compared in Python: 0.7 s for vectors of 384 numbers


def run(args: argparse.Namespace) -> int:
    """Embed the texts and images and print the vectors. Return the exit code."""
    images = images_of(args.images, hint="; texts come before --image")
    has_texts = args.texts or args.file is not None or not images
    inputs: list[Input] = [
        *(texts_of(args.texts, args.file, "texts") if has_texts else ()),
        *images,
    ]

    def job(client: Client) -> None:
        def ask(part: Sequence[Input], timeout_s: float | None) -> Stream[Response]:
            return client.embed(request_of(args, part), timeout=timeout_s)

        is_quiet = args.json and sys.stdout.isatty()  # a progress bar would stand among the lines
        with progress("embedding", len(inputs), is_quiet=is_quiet) as advance:
            responses: Iterator[Response] = in_order(
                named(results_of(inputs, ask, args.timeout, advance))
            )
            if args.json:
                for vector in responses:
                    print_json(vector)
                return
            vectors = list(responses)
        print_vectors(inputs, vectors)

    return run_client(args, job)


def request_of(args: argparse.Namespace, inputs: Sequence[Input]) -> messages.EmbedRequest:
    """Return the request. Flags that are not given stay unset, so that the model's own defaults
    apply."""
    return messages.EmbedRequest(
        model=args.model,
        inputs=[
            messages.EmbedInput(image=input_.read())
            if isinstance(input_, ImageFile)
            else messages.EmbedInput(text=input_)
            for input_ in inputs
        ],
        dimensions=args.dimensions,
        normalize=args.normalize,
        prompt_name=args.prompt_name,
        truncate=args.truncate,
    )


def named(vectors: Iterable[Response]) -> Iterator[Response]:
    """Yield the vectors as they come, each with the model's name, which only the first message of
    a call has."""
    model = ""
    for vector in vectors:
        model = vector.model = vector.model or model
        yield vector


def print_vectors(inputs: Sequence[Input], vectors: Sequence[Response]) -> None:
    """Print one line per text or image, and then the similarities of all pairs. With more than
    `MATRIX_MAX`, each line has the nearest text instead."""
    texts = [input_.path if isinstance(input_, ImageFile) else input_ for input_ in inputs]
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
    print_texts((*head, "TEXT"), rows, texts)
    if 1 < len(texts) <= MATRIX_MAX:
        print("\ncosine similarity")
        _print_matrix(units)
    print(f"\n{_counted(len(texts))} of {len(units[0])} numbers by {vectors[0].model}")
    if len(texts) > NEAREST_MAX:
        print(f"Similarities are shown for at most {NEAREST_MAX} texts; --json prints the vectors.")


def _counted(number: int) -> str:
    return "1 vector" if number == 1 else f"{number} vectors"


def _scaled(values: Iterable[float], length: float) -> list[float]:
    return [value / length for value in values] if length else list(values)


def _print_matrix(units: Sequence[Sequence[float]]) -> None:
    places = [str(place) for place in range(len(units))]
    rows = [[_cosine(_product(row, column)) for column in units] for row in units]
    print_table(("", *places), [[place, *row] for place, row in zip(places, rows, strict=True)])


def _nearest(units: Sequence[Sequence[float]]) -> Iterator[str]:
    """Yield for each text the place of the most similar other text, and the cosine."""
    best = [(-2.0, 0)] * len(units)  # below every cosine
    for place, unit in enumerate(units):
        for other in range(place):
            cosine = _product(unit, units[other])
            best[place] = max(best[place], (cosine, -other))
            best[other] = max(best[other], (cosine, -place))
    for cosine, other in best:
        yield f"{-other} ({_cosine(cosine)})"


def _product(vector: Iterable[float], other: Iterable[float]) -> float:
    return float(sum(map(operator.mul, vector, other)))


def _cosine(number: float) -> str:
    """Return a cosine as a text with three decimals, never "-0.000"."""
    return f"{round(number, 3) + 0.0:.3f}"
