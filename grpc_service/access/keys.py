"""API keys: the file that lists them, with their holders and what each holder may do.

Each line of the file is a key: ``NAME KEY [SETTING=VALUE …]``, with the settings of `KeyLimits`; a
``#`` begins a comment. Several lines with one name are keys of one holder, such as an old and a new
one; the holder has the settings of the last such line. The line ``* SETTING=VALUE …``, wherever it
is, has the settings of lines that do not set them, except a role and ``delegate``; behind it come
``--key-max-requests`` and ``--key-max-queued-tokens``.

A line without ``role`` is a user's if any line of the file has one of `SINCE_ROLES`, and an
operator's otherwise. A file without any is of a time when every key could operate the server: its
scripts that drain, and its one team, go on as before, and the log says so at the start. Whoever
writes the first of them has users and operators in mind, and then a line that says nothing gets the
fewer rights; for the same reason a file that is read again and has lost the last of them is wrong.

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
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from engine.requests.quota import Quota, UseLimits
from grpc_service.addresses import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from grpc_service.app.server_config import ServerConfig

KEY_CHARS_MIN = 16  # guess: a random key of this length is not found by trying
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
KEY = re.compile(r"[!-~]+")
DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
log = logging.getLogger(__name__)
ROLES = ("user", "operator")
SINCE_ROLES = ("role", "weight", "delegate", "max_priority")  # settings as old as roles
DEFAULTS = "*"  # the name of the line of defaults, which no key can have
PRIORITIES = (-(2**31), 2**31 - 1)
WEIGHT_MAX = 1000  # a holder with more than that beside others with 1 leaves them nothing


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The settings of a key's holder (`Quota`). A limit of None means no limit; a ``role`` of ""
    means that the line has none. ``knows_roles``: the line has one of `SINCE_ROLES`."""

    max_requests: int | None = None
    max_queued_tokens: int | None = None
    max_choices: int | None = None
    max_tokens_per_minute: int | None = None
    max_kv_blocks: int | None = None
    max_tokenizer_seconds_per_minute: float | None = None
    max_priority: int | None = None
    weight: int = 1
    role: str = ""
    delegate: bool = False
    knows_roles: bool = False


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
        self._has_roles = False
        self.reload()

    def reload(self) -> int:
        """Read the file again and return its number of keys. Calls that run go on, even if their
        keys are gone.

        Raises:
            ConfigError: as at creation, or the file had roles and has none. The keys stay as they
                were.
        """
        lines = list(_lines(self._path, self._defaults))
        if not lines:
            raise ConfigError(f"--api-key-file {self._path} holds no key")
        digests = [digest for _, digest, _ in lines]
        if len(set(digests)) < len(digests):
            raise ConfigError(f"--api-key-file {self._path} holds a key twice")
        has_roles = any(limits.knows_roles for _, _, limits in lines)
        if self._has_roles and not has_roles:
            raise ConfigError(
                f"--api-key-file {self._path} has no role= any more, so that every key would "
                "operate the server; that needs a restart, or role=operator in every line"
            )
        quotas = {name: self._quotas.get(name) or Quota(name) for name, _, _ in lines}
        for name, _, limits in lines:
            holder = quotas[name]  # a later line of the name decides
            holder.max_requests = limits.max_requests
            holder.max_queued_tokens = limits.max_queued_tokens
            holder.max_priority = limits.max_priority
            holder.limits = UseLimits(*[getattr(limits, name) for name in UseLimits._fields])
            holder.weight = limits.weight
            holder.may_delegate = limits.delegate
            holder.is_operator = limits.role == "operator" or not has_roles
        if not has_roles:
            log.warning(
                "--api-key-file %s: every key may operate the server, as no line has a role=",
                self._path,
            )
        self._has_roles = has_roles
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
    entries = [(number, line.partition("#")[0].split()) for number, line in enumerate(lines, 1)]
    # The line of defaults counts for those before it, too.
    for number, words in sorted(entries, key=lambda entry: entry[1][:1] != [DEFAULTS]):
        try:
            if words[:1] == [DEFAULTS]:
                defaults = _defaults(words[1:], defaults)
            elif words:
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
    return name, _digest(key.encode()), _limits(settings, defaults)


def _defaults(settings: list[str], defaults: KeyLimits) -> KeyLimits:
    """Parse the line of defaults. Raises ValueError."""
    limits = _limits(settings, defaults)
    if limits.role or limits.delegate:
        raise ValueError("role= and delegate= are for a key's own line")
    return limits


def _limits(settings: list[str], defaults: KeyLimits) -> KeyLimits:
    """Parse settings. Raises ValueError."""
    limits = defaults
    for setting in settings:
        field, _, value = setting.partition("=")
        if field not in KEY_SETTINGS:
            raise ValueError(f"after the key come {'=, '.join(KEY_SETTINGS)}=")
        parse, told = KEY_SETTINGS[field]
        parsed = parse(value)
        if parsed is None:
            raise ValueError(f"{field}= must be {told}")
        limits = replace(limits, **{field: parsed})
        limits = replace(limits, knows_roles=limits.knows_roles or field in SINCE_ROLES)
    return limits


def _number(value: str, low: int, high: int) -> int | None:
    """Return the number, None if the value is none in this range."""
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        return None
    return int(value) if low <= int(value) <= high else None


def _count(value: str) -> int | None:
    return _number(value, 1, 2**63)


def _seconds(value: str) -> float | None:
    seconds = float(value) if DECIMAL.fullmatch(value) else 0.0
    return seconds or None


# The settings of a line: how a value is read, None if it is wrong, and what a right one is.
KEY_SETTINGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_requests": (_count, "a number of at least 1"),
    "max_queued_tokens": (_count, "a number of at least 1"),
    "max_choices": (_count, "a number of at least 1"),
    "max_tokens_per_minute": (_count, "a number of at least 1"),
    "max_kv_blocks": (_count, "a number of at least 1"),
    "max_tokenizer_seconds_per_minute": (_seconds, "a number above 0, such as 2.5"),
    "max_priority": (lambda value: _number(value, *PRIORITIES), "a number of 32 bits"),
    "weight": (lambda value: _number(value, 1, WEIGHT_MAX), f"a number from 1 to {WEIGHT_MAX}"),
    "role": (lambda value: value if value in ROLES else None, " or ".join(ROLES)),
    "delegate": ({"true": True, "false": False}.get, "true or false"),
}
