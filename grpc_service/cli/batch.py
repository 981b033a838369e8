"""``triolet batch``: computes a file of requests as background work.

Rule 1: threads send the requests, each one call at a time, so only so many are in flight. Rule 2: a
server that is not there, drains or has a full queue is waited for; every other error is the
request's result.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from google.protobuf import json_format

from grpc_service.cli.bars import bar
from grpc_service.cli.batch_files import Requests, keep, open_journal, write_results
from grpc_service.cli.client import EXIT_FAILED, run_client
from grpc_service.cli.interrupts import raise_on_ctrl_c
from grpc_service.cli.security import key_of
from grpc_service.client import AlreadyExists, CallError, Unavailable, messages

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from grpc_service.cli.results_file import ResultsFile
    from grpc_service.client import Client

PATIENCE_S = 300.0  # seconds without any result after which a server that is away is given up
WAIT_S = 1.0  # seconds until the next try, if the server does not say how many
RETRIED = (429, 503)
STALE_S = 30.0  # seconds in which a server may take note that the command's first try was killed


class Away(Exception):
    """The server cannot take a request now. ``wait_s`` is how long to wait."""

    def __init__(self, why: str, wait_s: float | None) -> None:
        super().__init__(why)
        self.wait_s = wait_s or WAIT_S


class GaveUp(Exception):
    """The server was away too long."""


def run(args: argparse.Namespace) -> int:
    """Compute a file of requests. Return the exit code: 1 if some of them have errors.

    Raises:
        ConfigError: the file or what lies where the results go is wrong.
    """
    raise_on_ctrl_c()
    requests = Requests(args.file)
    output = os.path.expanduser(args.output)
    results = output or f"{requests.path}.results.jsonl"
    errors = f"{output}.errors" if output else f"{requests.path}.errors.jsonl"
    with open_journal(requests, args.model, results, errors) as journal:
        work = _Batch(args, requests, journal)
        try:
            code = 0 if work.is_whole else run_client(args, work.run)
        except GaveUp as error:
            print(f"triolet: {error}", file=sys.stderr)
            code = EXIT_FAILED
        if work.is_whole:
            num_errors = write_results(journal, results, errors)
            told = f"{requests.count} requests, {num_errors} errors; {results}"
            print(f"triolet: {told}", file=sys.stderr)
            return EXIT_FAILED if num_errors else code
        print(
            f"triolet: {len(journal.done)} of {requests.count} requests are done; the same "
            "command goes on",
            file=sys.stderr,
        )
        return code or EXIT_FAILED


class _Batch:
    """One run over what is left of a file."""

    def __init__(self, args: argparse.Namespace, requests: Requests, journal: ResultsFile) -> None:
        self._args, self._requests, self._journal = args, requests, journal
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._left: Iterator[tuple[int, Any]] = iter(())
        self._failure: BaseException | None = None
        self._result_at = time.monotonic()
        self._connections: set[http.client.HTTPConnection] = set()

    @property
    def is_whole(self) -> bool:
        """Whether every request has a result."""
        return len(self._journal.done) == self._requests.count

    def run(self, client: Client) -> None:
        """Send what is left, and keep each result.

        Raises:
            CallError: the server was away too long, or refuses this client.
        """
        done = self._journal.done
        if not self._requests.is_openai:
            client.models.list_models(timeout=10)  # a wrong address or key is told at once
        else:
            self._look_for_port()
        self._left = ((place, one) for place, one in self._requests if place not in done)
        with bar("computing", self._requests.count) as update:
            update(completed=len(done))
            threads = [
                threading.Thread(target=self._work, args=(client, update), daemon=True)
                for _ in range(min(self._args.parallel, self._requests.count))
            ]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    while thread.is_alive():
                        thread.join(0.5)
            finally:
                self._stopped.set()
                if any(thread.is_alive() for thread in threads):
                    client.close()  # ends the calls of the threads
                    for connection in list(self._connections):
                        connection.close()
        if self._failure is not None:
            raise self._failure

    def _work(self, client: Client, update: Any) -> None:
        connection = self._connect() if self._requests.is_openai else None
        try:
            while not self._stopped.is_set():
                with self._lock:
                    place, given = next(self._left, (-1, None))
                if given is None:
                    return
                result, ok = self._until_done(client, connection, given, place)
                with self._lock:
                    if not self._stopped.is_set():
                        keep(self._journal, place, result, ok=ok)
                        self._result_at = time.monotonic()
                        update(advance=1)
        except BaseException as error:
            if not self._stopped.is_set():
                self._failure = error
            self._stopped.set()

    def _look_for_port(self) -> None:
        connection = self._connect()
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            what = "--openai-port of `triolet serve` opens the HTTP port, and --url names it"
            raise GaveUp(f"{self._args.url} does not answer ({error}); {what}") from error
        finally:
            connection.close()

    def _until_done(
        self,
        client: Client,
        connection: http.client.HTTPConnection | None,
        given: dict[str, Any],
        place: int,
    ) -> tuple[dict[str, Any], bool]:
        stale_until = time.monotonic() + STALE_S
        while True:
            is_new = time.monotonic() < stale_until
            try:
                if connection is None:
                    return _generate(client, given, place, self._args, is_new=is_new)
                return _post(connection, given, place, self._args)
            except Away as away:
                if time.monotonic() - self._result_at > PATIENCE_S:
                    raise GaveUp(f"the server is away: {away}") from away
                if self._stopped.wait(away.wait_s):
                    raise

    def _connect(self) -> http.client.HTTPConnection:
        url = urlsplit(self._args.url)
        host, port = url.hostname or "", url.port
        made: http.client.HTTPConnection
        if url.scheme == "https":
            trusted = ssl.create_default_context(cafile=self._args.tls_ca or None)
            made = http.client.HTTPSConnection(host, port, context=trusted)
        else:
            made = http.client.HTTPConnection(host, port)
        self._connections.add(made)
        return made


def _generate(
    client: Client, given: dict[str, Any], place: int, args: argparse.Namespace, *, is_new: bool
) -> tuple[dict[str, Any], bool]:
    """Return the result of a GenerateRequest, and whether it is one; else it is an error. Its id
    may still be that of a call of a command that was killed, if ``is_new``."""
    request = json_format.ParseDict(given, messages.GenerateRequest())
    request.background = True
    request.model = request.model or args.model
    named: dict[str, Any] = {"index": place, "request_id": request.request_id}
    parts: dict[int, list[messages.Delta]] = {}
    ends: dict[int, messages.Finished] = {}
    try:
        with client.generate(request, timeout=args.timeout) as stream:
            for event in stream:
                if event.HasField("delta"):
                    parts.setdefault(event.delta.choice, []).append(event.delta)
                elif event.HasField("finished"):
                    ends[event.finished.choice] = event.finished
    except CallError as error:
        is_stale = is_new and isinstance(error, AlreadyExists)
        if error.is_retryable or is_stale or isinstance(error, Unavailable):
            raise Away(str(error), error.retry_after_s) from error
        fields = [{"field": one.field, "description": one.description} for one in error.violations]
        told = {"code": error.code.name, "reason": error.reason, "message": str(error)}
        return {**named, "error": {**told, "fields": fields}}, False
    choices = [_choice(parts.get(index, []), end) for index, end in sorted(ends.items())]
    return {**named, "choices": choices}, True


def _choice(parts: list[messages.Delta], end: messages.Finished) -> dict[str, Any]:
    whole = messages.Delta()
    for part in parts:
        whole.MergeFrom(part)  # lists grow, and texts are joined below
    whole.text = "".join([part.text for part in parts])
    whole.reasoning = "".join([part.reasoning for part in parts])
    made: dict[str, Any] = json_format.MessageToDict(whole, preserving_proto_field_name=True)
    ended = json_format.MessageToDict(end, preserving_proto_field_name=True)
    ended.pop("timings", None)
    return {"text": "", **made, **ended}


def _post(
    connection: http.client.HTTPConnection,
    given: dict[str, Any],
    place: int,
    args: argparse.Namespace,
) -> tuple[dict[str, Any], bool]:
    """Return the result of a request of OpenAI's form, and whether it succeeded."""
    body = {**given["body"], "service_tier": "flex"}
    headers = {"Content-Type": "application/json"}
    if key := key_of(args):
        headers["Authorization"] = f"Bearer {key}"
    if args.timeout is not None:
        headers["X-Request-Timeout"] = f"{args.timeout:g}"
    path = urlsplit(args.url).path.rstrip("/").removesuffix("/v1") + given["url"]
    try:
        connection.request("POST", path, json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise Away(f"{args.url}: {error}", None) from error
    after = answer.headers.get("Retry-After", "")
    if answer.status in RETRIED and after.isdigit():
        raise Away(f"{args.url}: {answer.status}", float(after))
    try:
        told = json.loads(content)
    except ValueError:
        told = content.decode("utf-8", "replace")
    response = {
        "status_code": answer.status,
        "request_id": answer.headers.get("X-Request-Id", ""),
        "body": told,
    }
    result = {"id": f"batch_req_{place}", "custom_id": given["custom_id"], "response": response}
    return {**result, "error": None}, answer.status == 200
