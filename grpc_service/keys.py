"""The API keys: a file of them, who holds which, and what each may have at once.

The file has a key a line: ``NAME KEY [max_requests=N] [max_queued_tokens=N]``; what follows a ``#``
is a comment. Lines of one name are one holder's keys, old and new, who has the limits of the last
such line. A limit that no line sets is the server's own (``--key-max-requests`` and so on).

Rule 1: only digests are kept, and no key is ever written anywhere. Rule 2: a key that is shown is
compared with every one there is, each in constant time, so that an answer's time tells nothing.
Rule 3: a file that is wrong changes nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.quota import Quota
from grpc_service.config import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grpc_service.config import ServerConfig

KEY_CHARS_MIN = 16  # a guess at what nobody guesses
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
KEY = re.compile(r"[!-~]+")
log = logging.getLogger(__name__)
LIMITS = ("max_requests", "max_queued_tokens")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the holder of a key may have at once; None: no limit."""

    max_requests: int | None = None
    max_queued_tokens: int | None = None


class KeyRing:
    """The keys of a file, read when this is made and again by `reload`.

    `find` may be called on any thread while another reloads. A holder's `Quota` lives on, with what
    it counts, when the file is read again.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong; it is named by its number.
    """

    def __init__(self, path: str, defaults: Limits | None = None) -> None:
        self._path = path
        self._defaults = defaults or Limits()
        self._quotas: dict[str, Quota] = {}
        self._entries: tuple[tuple[bytes, Quota], ...] = ()
        self.reload()

    def reload(self) -> int:
        """Read the file again; the number of keys. Calls under way go on, whatever became of
        their keys.

        Raises:
            ConfigError: as when it is made; the keys are as before.
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
        """The holder of a key; None: it is nobody's. Takes the same time for every key."""
        shown, found = _digest(key), None
        for digest, quota in self._entries:
            if hmac.compare_digest(digest, shown):
                found = quota  # and on to the last
        return found


def open_keys(config: ServerConfig) -> KeyRing | None:
    """The keys that the configuration names; None: none are needed. Raises as `KeyRing`."""
    if not config.api_key_file:
        return None
    limits = Limits(config.key_max_requests, config.key_max_queued_tokens)
    keys = KeyRing(config.api_key_file, limits)
    if not (config.tls_cert or config.uds or is_loopback(config.host)):
        log.warning("keys cross the network in the clear: there is no --tls-cert")
    return keys


def reload_keys(keys: KeyRing | None) -> None:
    """What SIGHUP does: a file that is wrong is told of, and the keys stay as they are."""
    if keys is None:
        return
    try:
        log.info("the file of keys was read again: %d keys", keys.reload())
    except ConfigError as error:
        log.error("the keys stay as they were: %s", error)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _lines(path: str, defaults: Limits) -> Iterator[tuple[str, bytes, Limits]]:
    """Name, digest and limits of each key."""
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


def _entry(words: list[str], defaults: Limits) -> tuple[str, bytes, Limits]:
    """Raises ValueError, with a sentence that repeats no key."""
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
        if field not in LIMITS or not value.isascii() or not value.isdigit() or int(value) < 1:
            raise ValueError(f"after the key come {' and '.join(f'{one}=N' for one in LIMITS)}")
        limits = replace(limits, **{field: int(value)})
    return name, _digest(key.encode()), limits
