"""The files of ``triolet batch``: its requests, and its results.

Rule 1: a file is checked whole before anything is computed. Rule 2: a journal has each result as
soon as it is there, in any order, so that a command that was killed loses only what was in flight
(`grpc_service.cli.results_file`). Results and errors are written in the order of the requests when
the last one is there. Rule 3: the memory that this takes grows by some bytes for each line, not
with what the lines hold.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import IO, TYPE_CHECKING, Any

from google.protobuf import json_format

from engine.errors import ConfigError
from grpc_service.cli.results_file import ResultsFile
from grpc_service.client import messages

if TYPE_CHECKING:
    from collections.abc import Iterator

LINE_BYTES_MAX = 64 * 2**20
FAULTS_SHOWN = 10
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank")
OWN = ("custom_id", "method", "url", "body")  # what OpenAI's form has


class Requests:
    """The requests of a file, one JSON object in each line, empty lines aside: all of OpenAI's form
    (``is_openai``), or all GenerateRequests in proto3's JSON. ``digest`` is that of the file.

    Raises:
        ConfigError: the file cannot be read, or lines of it are wrong; it names the first ones.
    """

    def __init__(self, path: str) -> None:
        self.path = path = os.path.expanduser(path)
        self.is_openai = False
        self.count = 0
        digest, faults, ids = hashlib.sha256(), list[str](), set[bytes]()
        try:
            with open(path, "rb") as file:
                for number, line in _lines(file):
                    digest.update(line)
                    if fault := self._fault_of(line, ids):
                        faults.append(f"line {number} {fault}")
                    self.count += bool(line.strip())
                    if len(faults) == FAULTS_SHOWN:
                        break
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        if faults:
            raise ConfigError(f"{path}: " + "; ".join(faults))
        if not self.count:
            raise ConfigError(f"{path} has no requests")
        self.digest = digest.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield the place and the JSON object of each request."""
        place = 0
        with open(self.path, "rb") as file:
            for _, line in _lines(file):
                if line.strip():
                    yield place, json.loads(line)
                    place += 1

    def _fault_of(self, line: bytes, ids: set[bytes]) -> str:
        """Return what is wrong with a line, or "". ``ids`` are digests of the names so far."""
        if not line.strip():
            return ""
        try:
            given = json.loads(line)
        except RecursionError:
            return "has too many lists in each other"
        except ValueError:
            return "is no JSON" if line.endswith(b"\n") else "is no JSON; the file may be cut short"
        if not isinstance(given, dict):
            return "is not an object"
        is_openai = "body" in given or "url" in given or "custom_id" in given
        if not self.count:
            self.is_openai = is_openai
        if is_openai is not self.is_openai:
            return "is not of the form that the first line has"
        fault = _fault_of_openai(given) if is_openai else _fault_of_own(given)
        name = given.get("custom_id" if is_openai else "request_id") or given.get("requestId")
        if fault or not name:
            return fault
        mark = hashlib.blake2b(str(name).encode("utf-8", "replace"), digest_size=8).digest()
        if mark in ids:
            return f"has the {'custom_id' if is_openai else 'request_id'} of a line before it"
        ids.add(mark)
        return ""


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise ConfigError(f"line {number} has more than {LINE_BYTES_MAX} bytes")
        yield number, line


def _fault_of_openai(given: dict[str, Any]) -> str:
    if unknown := given.keys() - set(OWN):
        return f"has {min(unknown)}, which is not one of {', '.join(OWN)}"
    if not isinstance(given.get("custom_id"), str) or not given["custom_id"]:
        return "has no custom_id that is a text"
    if given.get("method", "POST") != "POST":
        return "has a method that is not POST"
    if given.get("url") not in PATHS:
        return f"has a url that is not one of {', '.join(PATHS)}"
    if not isinstance(given.get("body"), dict):
        return "has no body that is an object"
    return "has a body with stream" if given["body"].get("stream") else ""


def _fault_of_own(given: dict[str, Any]) -> str:
    try:
        json_format.ParseDict(given, messages.GenerateRequest())
    except (json_format.ParseError, ValueError, RecursionError) as error:
        return f"is no GenerateRequest: {str(error).splitlines()[0]}"
    return ""


def open_journal(requests: Requests, model: str, results: str, errors: str) -> ResultsFile:
    """Return the file that has each result as soon as it is there, and goes on after a kill.

    Raises:
        ConfigError: as `ResultsFile`, or results of an earlier batch are in the way.
    """
    path = f"{results}.journal"
    for taken in (results, errors):
        if os.path.exists(taken) and not os.path.exists(path):
            raise ConfigError(f"{taken} is there already, and no journal to go on from")
    about = {"input file": requests.digest}
    return ResultsFile(path, about if requests.is_openai else about | {"--model": model})


def keep(journal: ResultsFile, index: int, result: dict[str, Any], *, ok: bool) -> None:
    """Keep the result of a request, or its error. Raises ConfigError if it cannot be written."""
    journal.add(index, f'"ok": {json.dumps(ok)}, "result": {json.dumps(result)}')
    journal.flush()


def write_results(journal: ResultsFile, results: str, errors: str) -> int:
    """Write all results, and the errors if there are any, in the order of their requests, and
    remove the journal. Return the number of errors.

    Raises:
        ConfigError: they cannot be written; the journal stays.
    """
    made, num_errors = [f"{results}.new", f"{errors}.new"], 0
    journal.sync()
    try:
        with open(made[0], "wb") as good, open(made[1], "wb") as bad:
            for line in journal.in_order():
                record = json.loads(line)
                num_errors += not record["ok"]
                file = good if record["ok"] else bad
                file.write(json.dumps(record["result"]).encode() + b"\n")
            for file in (good, bad):
                file.flush()
                os.fsync(file.fileno())
        os.replace(made[0], results)
        if num_errors:
            os.replace(made[1], errors)
        else:
            os.unlink(made[1])
        journal.remove()
    except OSError as error:
        raise ConfigError(f"{results} cannot be written: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{journal.path} is damaged; remove it to begin anew") from None
    return num_errors
