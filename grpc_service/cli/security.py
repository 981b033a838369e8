"""The flags of the client commands for a server with TLS or keys, and the client made from them.

Rule 1: a key comes from a file or from the environment, never from an argument, which every user
of the machine could read. Rule 2: grpc is imported only when a client is made.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from grpc_service.client import Client

KEY_VARIABLE = "TRIOLET_API_KEY"


def add_security_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `open_client` reads."""
    parser.add_argument(
        "--tls",
        action="store_true",
        help="encrypt; a public authority signed the server's certificate",
    )
    for flag, what in (
        (
            "--tls-ca",
            "PEM file of the authority that signed the server's certificate; implies --tls",
        ),
        ("--tls-cert", "PEM file of this client's certificate, for a server that asks for one"),
        ("--tls-key", "PEM file of that certificate's private key"),
        ("--api-key-file", f"file whose first word is the key (default: that in ${KEY_VARIABLE})"),
    ):
        parser.add_argument(flag, default="", metavar="FILE", help=what)


def open_client(args: argparse.Namespace) -> Client:
    """Return a client of the server at ``args.server``, with the TLS files and the key that the
    arguments name.

    Raises:
        ConfigError: a file cannot be read, or does not hold what its flag names.
    """
    from grpc_service.client import Client, PemError, Tls

    key = key_of(args)
    if bool(args.tls_cert) != bool(args.tls_key):
        raise ConfigError("--tls-cert and --tls-key go together")
    is_encrypted = args.tls or args.tls_ca or args.tls_cert
    tls = Tls(args.tls_ca, args.tls_cert, args.tls_key) if is_encrypted else None
    flags = {args.tls_ca: "--tls-ca", args.tls_key: "--tls-key", args.tls_cert: "--tls-cert"}
    try:
        return Client(args.server, api_key=key, tls=tls)
    except PemError as error:
        raise ConfigError(f"{flags[error.file]} {error}") from None


def key_of(args: argparse.Namespace) -> str:
    """Return the API key that calls send, "" for none."""
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
