"""The code that client commands share: it opens a client, and explains a failed call in one line.

Rule 1: a command prints its answer to standard output and everything else to standard error.
Rule 2: exit codes are 0, 1 (the call failed), 2 (the command line is wrong) and 130 (Ctrl-C).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from grpc_service.addresses import target_of
from grpc_service.cli.security import KEY_VARIABLE, open_client
from grpc_service.client import (
    CallError,
    DeadlineExceeded,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from google.protobuf.message import Message

    from grpc_service.client import Client
    from grpc_service.client.resumption import OnBreak

MessageT = TypeVar("MessageT", bound="Message")

# How grpc's message begins if no connection was made; UNAVAILABLE has other causes, too.
NEVER_CONNECTED = ("failed to connect", "errors resolving", "DNS resolution failed")
# A part of grpc's message, and what the user of a command can do about it.
WHY_NOT_CONNECTED = (
    ("WRONG_VERSION_NUMBER", "the server at {} does not use TLS: leave out --tls and --tls-ca"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the certificate of the server at {} was signed by an authority that is not trusted here; "
        "name the authority's file by --tls-ca",
    ),
    ("Hostname Verification", "the certificate of the server at {} is for another name"),
    (
        "Socket closed",
        "the server at {} closed the connection: it may want TLS (--tls or --tls-ca), or its "
        "clients need certificates (--tls-cert and --tls-key)",
    ),
    (
        "Unwrap failed",  # grpc's message does not name the TLS alert that it got
        "the server at {} refused this client: its clients need certificates (--tls-cert and "
        "--tls-key)",
    ),
    ("Failed parsing HTTP/2", "what answers at {} is not a gRPC server"),
)
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # what a shell reports of a command that SIGPIPE ended


def run_client(args: argparse.Namespace, job: Callable[[Client], None]) -> int:
    """Run ``job`` with a client of the server at ``args.server``, and return the exit code."""
    try:
        with open_client(args) as client:
            job(client)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The output's reader has closed the pipe. Python's own flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except CallError as error:
        print(f"triolet: {explain(error, args.server, args.timeout)}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def message_from(kind: type[MessageT], args: argparse.Namespace, **others: Any) -> MessageT:
    """Return a message whose fields are the arguments of the same names, and ``others``. A flag
    that is not given leaves its field unset, so that the model's own value applies."""
    names = {field.name for field in kind.DESCRIPTOR.fields}
    return kind(**{name: value for name, value in vars(args).items() if name in names} | others)


def break_note(args: argparse.Namespace) -> OnBreak:
    """Return a function that prints a line when an answer breaks off and is about to go on."""

    def note(error: CallError, delay_s: float) -> None:
        begin = "\n" if sys.stdout.isatty() else ""  # the answer's last line may lack its newline
        why = explain(error, args.server, args.timeout)
        print(f"{begin}triolet: {why}; going on in {delay_s:.1f} s", file=sys.stderr, flush=True)

    return note


def explain(error: CallError, server: str, timeout_s: float | None) -> str:
    """Return one line: what went wrong, which fields are refused, and whether to try again."""
    target = target_of(server)
    if error.reason:
        text = [str(error)]
        listed = [
            f"{v.field}: {v.description}" if v.field else v.description for v in error.violations
        ]
        text += [violation for violation in listed if violation not in text[0]]
        if error.retry_after_s is not None:
            text.append(f"try again in {error.retry_after_s:g} s")
        if isinstance(error, Unauthenticated):
            text.append(f"give one by --api-key-file or in ${KEY_VARIABLE}")
        return " ".join("; ".join(text).split())
    if isinstance(error, Unavailable):
        if str(error).startswith(NEVER_CONNECTED):
            if "://" in target:
                return f"{target} is not an address: --server takes HOST:PORT or unix:PATH, no URL"
            return _not_connected(str(error), target)
        return f"the connection to the server at {target} was lost"
    if isinstance(error, DeadlineExceeded) and timeout_s is not None:
        return f"the server did not finish within {timeout_s:g} s (--timeout)"
    if isinstance(error, Unimplemented):
        return f"the server at {target} does not know this call; is it a Triolet server?"
    return " ".join(f"{error.code.name}: {error}".split())


def _not_connected(message: str, target: str) -> str:
    for words, sentence in WHY_NOT_CONNECTED:
        if words in message:
            return sentence.format(target)
    return f"no server answers at {target}; `triolet serve` starts one"
