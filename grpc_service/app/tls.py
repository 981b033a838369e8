"""The server's TLS: files in, an SSL context out.

Rule 1: a broken file is reported at start, in one sentence that names its flag; otherwise it would
show at the first handshake, or not at all. Rule 2: a server with --client-ca takes no connection
without a certificate that this authority signed. The authority may be one below a root, as at
grpcio's server.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from grpc_service.pem import PemError, read_authority, read_pair, validity_of
from grpc_service.rpc.sockets import H2

if TYPE_CHECKING:
    from grpc_service.app.server_config import ServerConfig


def server_context(config: ServerConfig, alpn: str = H2) -> ssl.SSLContext | None:
    """Return the context of the server's connections, which speak ``alpn``; None for a server
    without TLS.

    Raises:
        ConfigError: a file cannot be read, is not PEM, or key and certificate do not match.
    """
    if not config.tls_cert:
        return None
    try:
        read_pair(config.tls_cert, config.tls_key)
    except PemError as error:
        flag = "--tls-cert" if error.file == config.tls_cert else "--tls-key"
        raise ConfigError(f"{flag} {error}") from None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    context.set_alpn_protocols([alpn])
    if config.client_ca:
        try:
            read_authority(config.client_ca)
        except PemError as error:
            raise ConfigError(f"--client-ca {error}") from None
        context.load_verify_locations(config.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def certificate_warnings(config: ServerConfig, now: float) -> list[str]:
    """Return a sentence for each file whose certificates are not valid ``now`` (seconds since
    1970), or expire soon. The files are those that `server_context` has read."""
    warnings = []
    for flag, file, failing in (
        ("--tls-cert", config.tls_cert, "clients"),
        ("--client-ca", config.client_ca, "connections of clients"),
    ):
        validity = validity_of(file, now) if file else None
        if validity is not None and not validity.is_valid:
            warnings.append(f"{flag} {file} {validity.sentence}; {failing} that check it fail")
        elif validity is not None and validity.expires_soon:
            warnings.append(f"{flag} {file} {validity.sentence}; a new one needs a restart")
    return warnings
