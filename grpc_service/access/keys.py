"""API keys: the file that lists them, with their holders and each holder's limits.

Each line of the file is a key: ``NAME KEY [max_requests=N] [max_queued_tokens=N]``; a ``#`` begins
a comment. Several lines with one name are keys of one holder, such as an old and a new one; the
holder's limits are those of the last such line. A limit that a line does not set is the server's
default (``--key-max-requests`` and ``--key-max-queued-tokens``).

Rule 1: only digests are kept, and no key is written anywhere. Rule 2: a client's key is compared
with all keys, each in constant time, so that the time of an answer reveals nothing. Rule 3: a file
with an error changes nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.requests.quota import Quota
from grpc_service.addresses import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grpc_service.app.server_config import ServerConfig

KEY_CHARS_MIN = 16  # guess: a random key of this length is not found by trying
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
KEY = re.compile(r"[!-~]+")
log = logging.getLogger(__name__)
SETTINGS = ("max_requests", "max_queued_tokens")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What the holder of a key may have at once. None means no limit."""

    max_requests: int | None = None
    max_queued_tokens: int | None = None


class KeyRing:
    """The keys of a file, which is read at creation and by `reload`.

    Any thread may call `find`, also during `reload`. A holder keeps its `Quota` with its counts
    when the file is read again.

    Raises:
        ConfigError: the file cannot be read, or one of its lines is wrong. The message has the
            line's number.
    """

    def __init__(self, path: str, defaults: KeyLimits | None = None) -> None:
        self._path = path
        self._defaults = defaults or KeyLimits()
        self._quotas: dict[str, Quota] = {}
        self._entries: tuple[tuple[bytes, Quota], ...] = ()
        self.reload()

    def reload(self) -> int:
        """Read the file again and return its number of keys. Calls that run go on, even if their
        keys are gone.

        Raises:
            ConfigError: as at creation. The keys stay as they were.
        """
        lines = list(_lines(self._path, self._defaults))
        if not lines:
            raise ConfigError(f"--api-key-file {self._path} holds no key")
        digests = [digest for _, digest, _ in lines]
        if len(set(digests)) < len(digests):
            raise ConfigError(f"--api-key-file {self._path} holds a key twice")
        quotas = {name: self._quotas.get(name) or Quota(name) for name, _, _ in lines}
        for name, _, limits in lines:
            quotas[name].max_requests = limits.max_requests
            quotas[name].max_queued_tokens = limits.max_queued_tokens
        self._quotas = quotas
        self._entries = tuple((digest, quotas[name]) for name, digest, _ in lines)
        return len(lines)

    def find(self, key: bytes) -> Quota | None:
        """Return the quota of a key's holder, None for an unknown key, in the same time for
        every key."""
        shown, quota_ = _digest(key), None
        for digest, quota in self._entries:
            if hmac.compare_digest(digest, shown):
                quota_ = quota  # no early exit, so that all keys take the same time
        return quota_


def open_keys(config: ServerConfig) -> KeyRing | None:
    """Return the configured keys; None if none are needed.

    Raises:
        ConfigError: the key file cannot be read, or has an error (`KeyRing`).
    """
    if not config.api_key_file:
        return None
    limits = KeyLimits(config.key_max_requests, config.key_max_queued_tokens)
    keys = KeyRing(config.api_key_file, limits)
    if not (config.tls_cert or config.uds or is_loopback(config.host)):
        log.warning("API keys cross the network unencrypted, because there is no --tls-cert")
    return keys


def reload_keys(keys: KeyRing | None) -> None:
    """Read the keys again, as SIGHUP asks. An error in the file is logged, and the keys stay as
    they were. A server without keys logs that there is nothing to read."""
    if keys is None:
        log.info("SIGHUP changes nothing: without --api-key-file there is no file to read again")
        return
    try:
        log.info("the key file was read again: %d keys", keys.reload())
    except ConfigError as error:
        log.error("the keys stay as they were: %s", error)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _lines(path: str, defaults: KeyLimits) -> Iterator[tuple[str, bytes, KeyLimits]]:
    """Yield name, digest and limits of each key."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"--api-key-file {path} cannot be read: {reason}") from None
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            yield _entry(words, defaults)
        except ValueError as error:
            raise ConfigError(f"--api-key-file {path}, line {number}: {error}") from None


def _entry(words: list[str], defaults: KeyLimits) -> tuple[str, bytes, KeyLimits]:
    """Parse one line. Raises ValueError with a message that contains no key."""
    if len(words) < 2:
        raise ValueError("must have a name and a key")
    name, key, *settings = words
    if not NAME.fullmatch(name):
        raise ValueError("the name must be 1 to 64 letters, digits, dots, dashes or underscores")
    if not KEY.fullmatch(key) or len(key) < KEY_CHARS_MIN:
        raise ValueError(f"the key must have at least {KEY_CHARS_MIN} characters, all of ASCII")
    limits = defaults
    for setting in settings:
        field, _, value = setting.partition("=")
        if field not in SETTINGS or not value.isascii() or not value.isdigit() or int(value) < 1:
            raise ValueError(f"after the key come {' and '.join(f'{name}=N' for name in SETTINGS)}")
        limits = replace(limits, **{field: int(value)})
    return name, _digest(key.encode()), limits
