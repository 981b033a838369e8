"""Channels to a server: the address, TLS, and the settings of the connection.

A channel is one HTTP/2 connection for all calls of a program, and may be shared among threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, TypedDict

import grpc
import grpc.aio

from grpc_service.addresses import is_loopback, target_of
from grpc_service.client.requests import checked
from grpc_service.pem import read_authority, read_pair

if TYPE_CHECKING:
    from typing import Unpack


RECONNECT_MAX_MS = 2000  # between attempts. Guess: to connect takes less, people wait longer


@dataclass(frozen=True, slots=True)
class Tls:
    """The PEM files of an encrypted connection. ``ca`` is the authority that signed the server's
    certificate; "" stands for the public authorities. ``cert`` and ``key`` are the client's own,
    for a server that asks for a certificate."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            PemError: a file cannot be read, or does not hold what it should.
            ValueError: only one of ``cert`` and ``key`` is given.
        """
        if bool(self.cert) != bool(self.key):
            raise ValueError("a client's certificate and its key must be given together")
        roots = read_authority(self.ca) if self.ca else None
        if not self.cert:
            return grpc.ssl_channel_credentials(roots)
        private_key, chain = read_pair(self.cert, self.key)
        return grpc.ssl_channel_credentials(roots, private_key, chain)


class ChannelSettings(TypedDict, total=False):
    """The settings of a channel beside its address. All are optional.

    tls: the files for an encrypted connection. Without them, the connection is not encrypted.
    max_message_bytes: the largest message that is sent or received. grpc's own default for a
        received message is 4 MiB.
    keepalive_time_s: a connection without traffic for this time is tested by a ping. Triolet's
        servers allow 10 s or more. Without this setting, no ping is sent.
    options: channel options of grpc itself, which override those above.
    """

    tls: Tls | None
    max_message_bytes: int | None
    keepalive_time_s: float | None
    options: Sequence[tuple[str, Any]]


def open_channel(address: str, **settings: Unpack[ChannelSettings]) -> grpc.Channel:
    """Return a channel to ``HOST``, ``HOST:PORT`` or ``unix:PATH``. It connects with the first
    call.

    Raises:
        PemError: a TLS file is wrong.
    """
    return _open(grpc, address, settings)


def open_aio_channel(address: str, **settings: Unpack[ChannelSettings]) -> grpc.aio.Channel:
    """Return a channel for asyncio; otherwise as `open_channel`. Call it where a loop runs.

    Raises:
        PemError: a TLS file is wrong.
    """
    return _open(grpc.aio, address, settings)


def _open(library: Any, address: str, settings: ChannelSettings) -> Any:
    _check(address, settings)
    target, options = target_of(address), _options(address, settings)
    if tls := settings.get("tls"):
        return library.secure_channel(target, tls.credentials(), options=options)
    return library.insecure_channel(target, options=options)


# The types that each setting takes beside None, and their description for errors.
SETTINGS: dict[str, tuple[Any, str]] = {
    "tls": (Tls, "a Tls with the names of its files"),
    "max_message_bytes": (int, "a whole number of bytes"),
    "keepalive_time_s": (Real, "seconds"),
    "options": (Sequence, "a list of pairs of a name and a value"),
}


def _check(address: str, settings: ChannelSettings) -> None:
    """Check the types of a channel's address and settings.

    Raises:
        TypeError: one is wrong, or there is no such setting.
    """
    checked("address", address, str, "a text: HOST, HOST:PORT or unix:PATH")
    for name, value in settings.items():
        if name not in SETTINGS:
            raise TypeError(f"there is no setting {name!r}; there are {', '.join(SETTINGS)}")
        if value is not None:
            checked(name, value, *SETTINGS[name])


def key_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call that shows ``api_key``; no metadata if the key is ""."""
    checked("api_key", api_key, str, "a text")
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _options(address: str, settings: ChannelSettings) -> list[tuple[str, Any]]:
    # grpc's own limit is two minutes: a server that has restarted would not be noticed for so long.
    options: dict[str, Any] = {"grpc.max_reconnect_backoff_ms": RECONNECT_MAX_MS}
    if is_loopback(target_of(address).rpartition(":")[0]):
        # A proxy that the environment names cannot reach this machine's own loopback.
        options["grpc.enable_http_proxy"] = 0
    if size := settings.get("max_message_bytes"):
        options["grpc.max_send_message_length"] = size
        options["grpc.max_receive_message_length"] = size
    if seconds := settings.get("keepalive_time_s"):
        options["grpc.keepalive_time_ms"] = int(seconds * 1000)
        options["grpc.keepalive_permit_without_calls"] = 1
    options.update(settings.get("options", ()))
    return list(options.items())
