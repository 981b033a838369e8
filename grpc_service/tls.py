"""TLS of the server and of its clients: files in, credentials out.

Rule 1: what is wrong with a file is said at start, in one sentence that names the flag: else
it would show at the first handshake, or not at all. Rule 2: a server with --client-ca
takes no connection without a certificate of that authority's.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from engine.errors import ConfigError

if TYPE_CHECKING:
    from grpc_service.config import ServerConfig


def server_context(config: ServerConfig) -> ssl.SSLContext | None:
    """None: the server speaks without TLS.

    Raises:
        ConfigError: a file cannot be read, is not PEM, or key and certificate do not match.
    """
    if not config.tls_cert:
        return None
    _pair(config.tls_cert, config.tls_key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    context.set_alpn_protocols(["h2"])
    if config.client_ca:
        _authority("--client-ca", config.client_ca)
        context.load_verify_locations(config.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def channel_credentials(
    *, authority: str = "", certificate: str = "", key: str = ""
) -> grpc.ChannelCredentials:
    """A client's: ``authority`` vouches for the server ("": those that grpc brings along),
    ``certificate`` and ``key`` are the client's own, for a server that asks for one.

    Raises:
        ConfigError: as `server_context`; or one of certificate and key is given alone.
    """
    if bool(certificate) != bool(key):
        raise ConfigError("--tls-cert and --tls-key go together")
    roots = _authority("--tls-ca", authority) if authority else None
    if not certificate:
        return grpc.ssl_channel_credentials(roots)
    private_key, chain = _pair(certificate, key)
    return grpc.ssl_channel_credentials(roots, private_key, chain)


def _pair(certificate: str, key: str) -> tuple[bytes, bytes]:
    """Private key and certificate chain, in grpc's order."""
    chain, private_key = _read("--tls-cert", certificate), _read("--tls-key", key)
    try:
        # a password is asked for on the terminal, unless one is given: no service has one to type
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError, OSError):
        raise ConfigError(
            f"--tls-cert {certificate} and --tls-key {key} are no PEM certificate and its key, "
            "without a password"
        ) from None
    return private_key, chain


def _authority(flag: str, path: str) -> bytes:
    data = _read(flag, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"{flag} {path} holds no PEM certificate") from None
    return data


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from None
