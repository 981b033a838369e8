"""``triolet embed --file FILE --output OUT``: the vectors of any number of lines, in little memory.

The lines go through one EmbedStream, and each result is a line of OUT as soon as it comes, in any
order; `grpc_service.cli.results_file` lets the same command go on where an earlier one was killed.
"""

from __future__ import annotations

import base64
import codecs
import hashlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING

from google.protobuf import json_format

from engine.errors import ConfigError, RequestTooLarge
from engine.requests.encode.values import MAX_INPUTS
from grpc_service.cli.bars import bar
from grpc_service.cli.client import explain, run_client
from grpc_service.cli.results_file import ResultsFile
from grpc_service.client import CallError, messages
from grpc_service.client.errors import RETRY_CODES
from grpc_service.client.resumption import RESUME_S

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from grpc_service.cli.results_file import Indices
    from grpc_service.client import Client

PART_BYTES = 2**16  # of the lines of a message. Guess: a usual window
READ_BYTES = 2**20
PAUSE_S = 1.0  # before another call, if the server does not say how long
FAULTS_SHOWN = 5  # lines without a vector that are named


def run_file(args: argparse.Namespace, parameters: messages.EmbedRequest) -> int:
    """Embed the lines of a file into ``args.output``. Return the exit code: 1 if lines have no
    vector.

    Raises:
        ConfigError: the files cannot be used.
    """
    if args.file in (None, "-"):
        raise ConfigError("--output needs --file FILE: to go on, the file is read again")
    if args.texts or args.images or args.json:
        raise ConfigError("--output takes the lines of --file alone, and writes JSON itself")
    total, digest = _measure(args.file)
    options = json_format.MessageToDict(parameters, preserving_proto_field_name=True)
    about = {f"--{name.replace('_', '-')}": given for name, given in options.items()}
    about["input file"] = digest
    faults: list[str] = []
    with ResultsFile(args.output, about) as results:
        parameters.model = results.noted.get("model", parameters.model)
        code = run_client(
            args, lambda client: _embed(client, args, parameters, results, total, faults)
        )
        if code == 0:
            results.finish()
        elif num_done := len(results.done):
            print(
                f"triolet: {num_done} of {total} lines have results; the same command goes on",
                file=sys.stderr,
            )
    for fault in faults[:FAULTS_SHOWN]:
        print(f"triolet: {fault}", file=sys.stderr)
    if len(faults) > FAULTS_SHOWN:
        print(f"triolet: and {len(faults) - FAULTS_SHOWN} more", file=sys.stderr)
    return code or bool(faults)


def _measure(file: str) -> tuple[int, str]:
    """Return the number of lines of a file, and a digest of its bytes.

    Raises:
        ConfigError: the file cannot be read, is empty, or is not UTF-8.
    """
    digest, num_lines, last = hashlib.sha256(), 0, b""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with open(os.path.expanduser(file), "rb") as opened:
            while part := opened.read(READ_BYTES):
                digest.update(part)
                decoder.decode(part)
                num_lines += part.count(b"\n")
                last = part[-1:]
            decoder.decode(b"", final=True)
    except OSError as error:
        raise ConfigError(f"--file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        number = num_lines + 1 + error.object.count(b"\n", 0, error.start)
        raise ConfigError(f"line {number} of {file} is not UTF-8") from None
    if not last:
        raise ConfigError(f"there are no texts in {file}")
    return num_lines + (last != b"\n"), digest.hexdigest()


def _embed(
    client: Client,
    args: argparse.Namespace,
    parameters: messages.EmbedRequest,
    results: ResultsFile,
    total: int,
    faults: list[str],
) -> None:
    """Embed the lines that have no result yet. If the server goes away after results have come,
    go on in another call.

    Raises:
        CallError: a call failed, and another one would fail alike.
    """
    end = None if args.timeout is None else time.monotonic() + args.timeout
    started_at = last_at = time.monotonic()
    num_before = len(results.done)
    with bar("embedding", total) as update:
        while len(results.done) < total:
            left_s = None if end is None else max(0.0, end - time.monotonic())
            requests = _Requests(args.file, parameters, results.done, total)
            try:
                with client.embed_stream(requests, timeout=left_s) as stream:
                    for answer in stream:
                        _keep(answer, results, faults)
                        last_at = time.monotonic()
                        seconds = last_at - started_at
                        rate = (len(results.done) - num_before) / max(seconds, 1e-9)
                        update(
                            completed=len(results.done),
                            description=f"embedding, {rate:,.0f} texts/s",
                        )
            except CallError as error:
                if requests.error is not None:
                    raise requests.error from None
                if (index := requests.too_large(error)) is not None:
                    _add_fault(results, faults, index, error.reason, str(error))
                    last_at = time.monotonic()
                    continue
                is_over = time.monotonic() > last_at + RESUME_S
                if is_over or len(results.done) == num_before or error.code not in RETRY_CODES:
                    raise
                pause_s = error.retry_after_s or PAUSE_S
                why = explain(error, args.server, args.timeout)
                print(f"triolet: {why}; going on in {pause_s:g} s", file=sys.stderr)
                time.sleep(pause_s)
                continue
            if requests.error is not None:
                raise requests.error
            if len(results.done) < total:
                raise ConfigError(f"{args.file} has changed while it was read")
    seconds = time.monotonic() - started_at
    num_new = len(results.done) - num_before
    print(
        f"{total} lines, {num_new} of them now, in {seconds:.1f} s: "
        f"{num_new / max(seconds, 1e-9):,.0f} texts/s",
        file=sys.stderr,
    )


def _keep(answer: messages.EmbedStreamResponse, results: ResultsFile, faults: list[str]) -> None:
    for vector in answer.vectors:
        if vector.model and "model" not in results.noted:
            results.note("model", vector.model)
        results.add(vector.index, _fields_of(vector))
    for error in answer.errors:
        _add_fault(results, faults, error.index, error.reason, error.message)
    results.flush()


def _add_fault(
    results: ResultsFile, faults: list[str], index: int, reason: str, message: str
) -> None:
    fields = json.dumps({"reason": reason, "message": message}, ensure_ascii=False)
    results.add(index, f'"error": {fields}')
    faults.append(f"line {index + 1} has no vector: {message}")


def _fields_of(vector: messages.EmbedResponse) -> str:
    """Return the fields of a vector's line, with the names of `--json`."""
    fields = f'"tokens": {vector.tokens}'
    if vector.HasField("rows"):
        fields += f', "rows": {vector.rows}'
    if vector.HasField("sparse"):
        indices = json.dumps(list(vector.sparse.indices))
        weights = _numbers(tuple(vector.sparse.weights))
        return f'{fields}, "sparse": {{"indices": {indices}, "weights": {weights}}}'
    if vector.packed:
        return f'{fields}, "packed": "{base64.b64encode(vector.packed).decode()}"'
    return f'{fields}, "values": {_numbers(tuple(vector.values))}'


def _numbers(values: tuple[float, ...]) -> str:
    """Return numbers in nine digits, which tell every float32 from others."""
    return f"[{', '.join(['%.9g'] * len(values)) % values}]"


class _Requests:
    """The messages of one call, made as grpc takes them. ``error`` is why the file could not be
    read on; grpc's own thread, which reads, cannot raise it."""

    def __init__(
        self, file: str, parameters: messages.EmbedRequest, done: Indices, total: int
    ) -> None:
        self._file = file
        self._parameters = parameters
        self._done = done
        self._total = total
        self._longest = (0, 0)  # the bytes and the place of the longest line that was sent
        self.error: ConfigError | None = None

    def too_large(self, error: CallError) -> int | None:
        """Return the place of the line that the server has not taken because a message was larger
        than it takes; None if the call's ``error`` is another one. Such a line is a message of its
        own."""
        is_size = error.reason == RequestTooLarge.reason and not error.violations
        return self._longest[1] if is_size and self._longest[0] > PART_BYTES else None

    def __iter__(self) -> Iterator[messages.EmbedStreamRequest]:
        yield messages.EmbedStreamRequest(parameters=self._parameters)
        try:
            yield from self._parts()
        except ConfigError as error:
            self.error = error

    def _parts(self) -> Iterator[messages.EmbedStreamRequest]:
        part: list[messages.EmbedStreamInput] = []
        num_bytes = 0
        for index, text in self._lines():
            if part and (num_bytes + len(text) > PART_BYTES or len(part) == MAX_INPUTS):
                yield messages.EmbedStreamRequest(inputs=part)
                part, num_bytes = [], 0
            part.append(messages.EmbedStreamInput(index=index, input={"text": text}))
            num_bytes += len(text)
        if part:
            yield messages.EmbedStreamRequest(inputs=part)

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Yield the lines that have no result, with their places.

        Raises:
            ConfigError: the file cannot be read, or has changed.
        """
        try:
            with open(os.path.expanduser(self._file), "rb") as opened:
                for index, line in zip(range(self._total), opened, strict=False):
                    if index not in self._done:
                        self._longest = max(self._longest, (len(line), index))
                        yield index, line.removesuffix(b"\n").decode()
        except OSError as error:
            raise ConfigError(f"--file {self._file} cannot be read: {error.strerror}") from None
        except UnicodeError:
            raise ConfigError(f"{self._file} has changed while it was read") from None
