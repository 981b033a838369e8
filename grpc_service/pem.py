"""Reads and checks PEM files, of servers and of clients.

A broken file is found before the first connection. Without the check it would show at the first
handshake, with OpenSSL's words, or not at all.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

SOON_S = 14 * 86_400.0  # guess: time to notice and to act; Let's Encrypt renews 30 days before
SOON_SHARE = 1 / 3  # with this share of the validity left, cert-manager and Let's Encrypt renew
_CERTIFICATE = re.compile(
    "-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL | re.ASCII
)
_VERSION, _SHORT_TIME = 0xA0, 0x17  # tags of DER. Source: X.690; RFC 5280, 4.1.


class Validity(NamedTuple):
    """When the certificates of a file are valid, all together. ``expires_soon`` and ``is_valid``
    hold at the time given to `validity_of`; ``sentence`` is the most urgent fact, for a message."""

    is_valid: bool
    expires_soon: bool
    sentence: str


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


def validity_of(file: str, now: float) -> Validity:
    """Return how long the certificates of a PEM file are valid; ``now`` is in seconds since 1970.

    Raises:
        PemError: the file cannot be read, or holds no PEM certificate.
    """
    certificates = _CERTIFICATE.findall(_read(file).decode("latin-1"))
    try:
        periods = [_validity_period(ssl.PEM_cert_to_DER_cert(data)) for data in certificates]
    except (ValueError, IndexError, StopIteration):
        periods = []
    if not periods:
        raise PemError(file, "holds no PEM certificate")
    begins, ends = max(begin for begin, _ in periods), min(end for _, end in periods)
    if ends <= now:
        return Validity(False, False, f"has expired on {_day(ends)}")
    if begins > now:
        return Validity(False, False, f"is not valid before {_day(begins)}")
    if any(end - now < min(SOON_S, (end - begin) * SOON_SHARE) for begin, end in periods):
        return Validity(True, True, f"expires on {_day(ends)}")
    return Validity(True, False, f"valid until {_day(ends)}")


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"


def _validity_period(certificate: bytes) -> tuple[float, float]:
    """Return notBefore and notAfter of a certificate in DER, in seconds since 1970."""
    _, content = next(_fields(certificate))
    _, to_be_signed = next(_fields(content))
    # An optional version, the serial number, the signature's algorithm, the issuer, the validity.
    _, _, _, validity, *_ = (field for tag, field in _fields(to_be_signed) if tag != _VERSION)
    not_before, not_after = (_seconds(tag, digits) for tag, digits in _fields(validity))
    return not_before, not_after


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tags and contents of fields in DER that stand one after the other."""
    at = 0
    while at < len(data):
        tag, size, at = data[at], data[at + 1], at + 2
        if size & 0x80:
            width = size & 0x7F
            size, at = int.from_bytes(data[at : at + width], "big"), at + width
        yield tag, data[at : at + size]
        at += size


def _seconds(tag: int, digits: bytes) -> float:
    """Return a time of DER. Two digits of a year stand for 1950 to 2049."""
    text = digits.decode("ascii")
    if tag == _SHORT_TIME:
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise PemError(file, f"cannot be read: {error.strerror}") from None
