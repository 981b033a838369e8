"""What the client commands share: a channel, and every way a call can fail as one line of text.

Rule 1: a command prints its answer to standard output and everything else to standard error.
Rule 2: exit codes are 0, 1 (the call failed), 2 (the command line is wrong), 130 (Ctrl-C; before
the command has begun, the signal itself, of which a shell makes 130).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import grpc
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status

from grpc_service.cli.security import KEY_VARIABLE, open_channel
from grpc_service.config import DEFAULT_PORT, is_loopback

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from google.protobuf.message import Message

# How grpc begins to tell that there never was a connection; it has no code of its own for that.
NEVER_CONNECTED = ("failed to connect", "errors resolving", "DNS resolution failed")
# What its words for that hold, and what of it the command line can change.
WHY_NOT_CONNECTED = (
    ("WRONG_VERSION_NUMBER", "the server at {} speaks no TLS: leave out --tls and --tls-ca"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the certificate of the server at {} is of no authority that is trusted here: name it by "
        "--tls-ca",
    ),
    ("Hostname Verification", "the certificate of the server at {} is for another name"),
    (
        "Socket closed",
        "the server at {} takes no such connection: it may want TLS (--tls or --tls-ca), or its "
        "clients need certificates (--tls-cert and --tls-key)",
    ),
    (
        "Unwrap failed",  # TLS's alert, which grpc does not tell
        "the server at {} shuts this client out: its clients need certificates (--tls-cert and "
        "--tls-key)",
    ),
    ("Failed parsing HTTP/2", "what answers at {} is no gRPC server"),
)
DETAILS_KEY = "grpc-status-details-bin"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # what a shell reports of a command that SIGPIPE ended


def run_client(args: argparse.Namespace, job: Callable[[grpc.Channel], None]) -> int:
    """Do ``job`` with a channel to ``args.server``; its failures become an exit code."""
    target = target_of(args.server)
    try:
        with open_channel(args, target, _options(target)) as channel:
            job(channel)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; Python's own flush at exit must not say so again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except grpc.RpcError as error:
        print(f"triolet: {explain(error, target, args.timeout)}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def target_of(server: str) -> str:
    """``server`` as grpc takes it; the port may be left out."""
    if server.startswith("unix:") or server.rpartition("]")[2].count(":"):
        return server
    return f"{server}:{DEFAULT_PORT}"


def _options(target: str) -> list[tuple[str, int]]:
    """A proxy named in the environment cannot reach this machine's own loopback."""
    host = target.rpartition(":")[0]
    return [("grpc.enable_http_proxy", 0)] if is_loopback(host) else []


def explain(error: grpc.RpcError, target: str, timeout_s: float | None) -> str:
    """One line: what went wrong, which fields, and whether to try again."""
    details = _details(error)
    if details:
        text = [error.details() or error.code().name]
        text += _violations(details.get("BadRequest"), text[0])
        text += _retry(details.get("RetryInfo"))
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            text.append(f"give one by --api-key-file or in ${KEY_VARIABLE}")
        return " ".join("; ".join(text).split())
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        told = error.details() or ""
        if told.startswith(NEVER_CONNECTED):
            if "://" in target:
                return f"{target} is no address: --server takes HOST:PORT or unix:PATH, no URL"
            return _not_connected(told, target)
        return f"the connection to the server at {target} was lost"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
        return f"the server did not finish within {timeout_s:g} s (--timeout)"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return f"the server at {target} does not know this call; is it a Triolet server?"
    return " ".join(f"{error.code().name}: {error.details()}".split())


def _not_connected(told: str, target: str) -> str:
    for words, sentence in WHY_NOT_CONNECTED:
        if words in told:
            return sentence.format(target)
    return f"no server answers at {target}; `triolet serve` starts one"


def _details(error: grpc.RpcError) -> dict[str, Message]:
    """The google.rpc details by message name; of another server's errors there are none."""
    found: dict[str, Message] = {}
    metadata: Any = error.trailing_metadata() or ()  # pairs, which the stubs do not know
    for key, value in metadata:
        if key != DETAILS_KEY:
            continue
        for packed in Status.FromString(value).details:
            name = packed.TypeName().removeprefix("google.rpc.")
            if name in ("ErrorInfo", "BadRequest", "RetryInfo"):
                found[name] = getattr(error_details_pb2, name)()
                packed.Unpack(found[name])
    return found


def _violations(bad_request: Message | None, told: str) -> list[str]:
    """Violations that the message does not already spell out."""
    listed = getattr(bad_request, "field_violations", ())
    texts = [f"{v.field}: {v.description}" if v.field else v.description for v in listed]
    return [text for text in texts if text not in told]


def _retry(retry_info: Message | None) -> list[str]:
    if retry_info is None:
        return []
    return [f"try again in {retry_info.retry_delay.ToTimedelta().total_seconds():g} s"]  # type: ignore[attr-defined]
