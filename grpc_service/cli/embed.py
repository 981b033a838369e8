"""``triolet embed``: turns texts and images into vectors, and shows how similar they are.

Rule: --json prints every number, one line per text or image, in their order, the images after the
texts. Without it, the output is a table for people.
"""

from __future__ import annotations

import json
import math
import operator
import os
import struct
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from grpc_service.cli.client import run_client
from grpc_service.cli.embed_file import run_file
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
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from grpc_service.client import Client, Stream

    Response = messages.EmbedResponse
    Input = str | ImageFile

MATRIX_MAX = 10  # the most texts of which the similarities of all pairs are shown
NUMBERS_SHOWN = 4
NEAREST_MAX = 300  # the most texts that are compared in Python: 0.7 s for vectors of 384 numbers


def run(args: argparse.Namespace) -> int:
    """Embed the texts and images and print the vectors. Return the exit code."""
    ranges = read_ranges(args.ranges)
    if args.output is not None:
        return run_file(args, request_of(args, (), ranges))
    images = images_of(args.images, hint="; texts come before --image")
    has_texts = args.texts or args.file is not None or not images
    inputs: list[Input] = [
        *(texts_of(args.texts, args.file, "texts") if has_texts else ()),
        *images,
    ]

    def job(client: Client) -> None:
        def ask(part: Sequence[Input], timeout_s: float | None) -> Stream[Response]:
            return client.embed(request_of(args, part, ranges), timeout=timeout_s)

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
        if args.kind == "sparse":
            print_sparse(inputs, vectors)
        elif args.kind == "multi-vector":
            print_rows(inputs, vectors, args.precision)
        else:
            print_vectors(inputs, vectors, args.precision)

    return run_client(args, job)


def read_ranges(file: str | None) -> dict[str, Any] | None:
    """Return the ranges that a file has; None without a file.

    Raises:
        ConfigError: it cannot be read, or has another form.
    """
    if file is None:
        return None
    try:
        ranges = json.loads(Path(os.path.expanduser(file)).read_text("utf-8"))
        messages.VectorRanges(**ranges)
    except OSError as error:
        raise ConfigError(f"--ranges {file} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError):
        raise ConfigError(
            f'--ranges {file} is not JSON of the form {{"low": [numbers], "high": [numbers]}}'
        ) from None
    return dict(ranges)


def request_of(
    args: argparse.Namespace, inputs: Sequence[Input], ranges: dict[str, Any] | None = None
) -> messages.EmbedRequest:
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
        precision=args.precision and f"PRECISION_{args.precision.upper()}",
        ranges=ranges,
        kind=args.kind and f"VECTOR_KIND_{args.kind.upper().replace('-', '_')}",
        top_k=args.top_k,
        threshold=args.threshold,
    )


def numbers_of(vector: Response, precision: str | None) -> Sequence[float]:
    """Return the numbers of a vector; of a binary one, 1 and -1 for the bits."""
    data = vector.packed
    if precision in (None, "float32"):
        return vector.values
    if precision == "float16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    if str(precision).endswith("binary"):
        flip = 0 if precision == "ubinary" else 128  # in two's complement, 128 less flips a bit
        bits = range(7, -1, -1)
        return [1 if (byte ^ flip) >> bit & 1 else -1 for byte in data for bit in bits]
    return array("B" if precision == "uint8" else "b", data)


def named(vectors: Iterable[Response]) -> Iterator[Response]:
    """Yield the vectors as they come, each with the model's name, which only the first message of
    a call has."""
    model = ""
    for vector in vectors:
        model = vector.model = vector.model or model
        yield vector


def print_vectors(
    inputs: Sequence[Input], vectors: Sequence[Response], precision: str | None = None
) -> None:
    """Print one line per text or image, and then the similarities of all pairs. With more than
    `MATRIX_MAX`, each line has the nearest text instead."""
    texts = _shown(inputs)
    numbers = [numbers_of(vector, precision) for vector in vectors]
    lengths = [math.hypot(*values) for values in numbers]
    units = [_scaled(values, length) for values, length in zip(numbers, lengths, strict=True)]
    head = ["INDEX", "TOKENS", "LENGTH", "FIRST NUMBERS"]
    rows = []
    for place, vector in enumerate(vectors):
        shown = " ".join(f"{number:+.3f}" for number in numbers[place][:NUMBERS_SHOWN])
        more = " …" if len(numbers[place]) > NUMBERS_SHOWN else ""
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


def print_sparse(inputs: Sequence[Input], vectors: Sequence[Response]) -> None:
    """Print one line per text with its greatest weights, and then the products of all pairs."""
    weights = [dict(zip(one.sparse.indices, one.sparse.weights, strict=True)) for one in vectors]
    rows = []
    for place, (vector, own) in enumerate(zip(vectors, weights, strict=True)):
        best = sorted(own, key=lambda index: -own[index])[:NUMBERS_SHOWN]
        shown = " ".join(f"{index}:{own[index]:.3f}" for index in best)
        rows.append([str(place), str(vector.tokens), str(len(own)), shown])
    print_texts(("INDEX", "TOKENS", "WEIGHTS", "GREATEST", "TEXT"), rows, _shown(inputs))
    if 1 < len(weights) <= MATRIX_MAX:
        print("\ndot product")
        _print_matrix(
            weights, lambda one, other: sum(one[at] * other[at] for at in one if at in other)
        )
    print(f"\n{_counted(len(weights))} by {vectors[0].model}")


def print_rows(inputs: Sequence[Input], vectors: Sequence[Response], precision: str | None) -> None:
    """Print one line per text with the number of its vectors and the first numbers of the first."""
    rows = []
    for place, vector in enumerate(vectors):
        first = numbers_of(vector, precision)[:NUMBERS_SHOWN]
        shown = " ".join(f"{number:+.3f}" for number in first)
        rows.append([str(place), str(vector.tokens), str(vector.rows), shown])
    print_texts(("INDEX", "TOKENS", "VECTORS", "FIRST NUMBERS", "TEXT"), rows, _shown(inputs))
    count = sum(vector.rows for vector in vectors)
    print(f"\n{_counted(count)} of {_counted_texts(len(vectors))} by {vectors[0].model}")


def _counted_texts(number: int) -> str:
    return "1 text" if number == 1 else f"{number} texts"


def _shown(inputs: Sequence[Input]) -> list[str]:
    return [input_.path if isinstance(input_, ImageFile) else input_ for input_ in inputs]


def _counted(number: int) -> str:
    return "1 vector" if number == 1 else f"{number} vectors"


def _scaled(values: Iterable[float], length: float) -> list[float]:
    return [value / length for value in values] if length else list(values)


def _print_matrix(units: Sequence[Any], product: Callable[[Any, Any], float] | None = None) -> None:
    product = product or _product
    places = [str(place) for place in range(len(units))]
    rows = [[_cosine(product(row, column)) for column in units] for row in units]
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
