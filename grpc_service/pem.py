"""Reads and checks PEM files, of servers and of clients.

A broken file is found before the first connection. Without the check it would show at the first
handshake, with OpenSSL's words, or not at all.
"""

from __future__ import annotations

import ssl
from pathlib import Path


class PemError(ValueError):
    """A file cannot be read, or does not hold what it should. ``file`` is its path, and the message
    begins with it."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(f"{file} {problem}")
        self.file = file


def read_pair(certificate: str, key: str) -> tuple[bytes, bytes]:
    """Return the private key and the certificate chain, in the order in which grpc takes them.

    Raises:
        PemError: a file cannot be read, is not PEM, has a password, or the two do not match.
    """
    chain, private_key = _read(certificate), _read(key)
    try:
        # Without a password here, OpenSSL would ask for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError, OSError):
        raise PemError(
            certificate, f"and {key} are not a PEM certificate and its key without a password"
        ) from None
    return private_key, chain


def read_authority(file: str) -> bytes:
    """Return the certificates of an authority.

    Raises:
        PemError: the file cannot be read, or holds no PEM certificate.
    """
    data = _read(file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise PemError(file, "holds no PEM certificate") from None
    return data


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise PemError(file, f"cannot be read: {error.strerror}") from None
