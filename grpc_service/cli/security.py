"""What the client commands take for a server with TLS or keys, and the channel they make of it.

Rule 1: a key comes from a file or from the environment, never as an argument, which every user of
the machine could read. Rule 2: nothing of grpc is imported before a channel is wanted.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    import grpc

KEY_VARIABLE = "TRIOLET_API_KEY"


def add_security_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `open_channel`."""
    parser.add_argument(
        "--tls",
        action="store_true",
        help="the server's certificate is one that everybody trusts",
    )
    for flag, what in (
        ("--tls-ca", "PEM file of the authority that vouches for the server; implies --tls"),
        ("--tls-cert", "PEM file of this client's certificate, for a server that asks for one"),
        ("--tls-key", "PEM file of that certificate's private key"),
        ("--api-key-file", f"file whose first word is the key (default: that in ${KEY_VARIABLE})"),
    ):
        parser.add_argument(flag, default="", metavar="FILE", help=what)


@contextmanager
def open_channel(
    args: argparse.Namespace, target: str, options: Sequence[tuple[str, Any]]
) -> Iterator[grpc.Channel]:
    """A channel to ``target`` as the arguments have it, closed when the block is left.

    Raises:
        ConfigError: a file cannot be read, or holds something else.
    """
    import grpc

    key = _key(args)
    if args.tls or args.tls_ca or args.tls_cert or args.tls_key:
        from grpc_service.tls import channel_credentials

        credentials = channel_credentials(
            authority=args.tls_ca, certificate=args.tls_cert, key=args.tls_key
        )
        channel = grpc.secure_channel(target, credentials, options=options)
    else:
        channel = grpc.insecure_channel(target, options=options)
    with channel:
        yield grpc.intercept_channel(channel, _bearer(key)) if key else channel


def _key(args: argparse.Namespace) -> str:
    """The key to show; "": none."""
    if not args.api_key_file:
        return os.environ.get(KEY_VARIABLE, "").strip()
    try:
        words = Path(args.api_key_file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"--api-key-file {args.api_key_file} cannot be read: {reason}") from None
    if not words:
        raise ConfigError(f"--api-key-file {args.api_key_file} is empty")
    return words[0]


def _bearer(key: str) -> Any:
    """A client interceptor that shows ``key`` with every call."""
    import grpc

    class Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            return continuation(_with_key(details), request)

        def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
            return continuation(_with_key(details), request)

    def _with_key(details: Any) -> Any:
        metadata = [*(details.metadata or ()), ("authorization", f"Bearer {key}")]
        return details._replace(metadata=metadata)

    return Bearer()
