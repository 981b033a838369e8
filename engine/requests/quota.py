"""Holders: those among whom a server is shared, with their limits, their weights and their counts.

Rule 1: `Quota.enter` and `Quota.leave` are called on one thread, the server's; `Quota.queue` and
`Quota.unqueue` on one thread, the engine's. Neither thread reads the other's count. The limits may
be set from any thread. Rule 2: every count that is raised is lowered exactly once, however the
request ends.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from engine.core.common.waiting_queue import BACKGROUND
from engine.errors import InvalidRequest, Overloaded

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

RETRY_AFTER_S = 1.0  # retry-after of Overloaded; a guess: by then a request of the holder has ended


class UseLimits(NamedTuple):
    """What a holder's requests may take; None: as much as there is.

    ``max_choices`` run at a time: a request has n of them, a drawing its images, any other one.
    ``max_tokens_per_minute`` are computed, prompt and completion without what was cached, and
    tokenizers and templates work ``max_tokenizer_seconds_per_minute`` for them: a request begins if
    less was used. ``max_kv_blocks`` are those that its requests may need, at most.
    """

    max_choices: int | None = None
    max_tokens_per_minute: int | None = None
    max_kv_blocks: int | None = None
    max_tokenizer_seconds_per_minute: float | None = None


NO_LIMITS = UseLimits()


class MinuteUse:
    """How much of something a holder has used of late. In each minute, as much as the limit is
    forgotten. Times are on Trio's clock."""

    __slots__ = ("_at", "_used")

    def __init__(self) -> None:
        self._used = self._at = 0.0

    def add(self, amount: float, limit: float | None, now: float) -> None:
        """Count ``amount``, if it is limited."""
        if limit is not None:
            self._used, self._at = self._left(limit, now) + amount, now

    def check(self, limit: float | None, what: str, now: float) -> None:
        """Check that less was used than the limit, of which ``what`` is the unit for messages.

        Raises:
            Overloaded: The limit is used up. The error says after how many seconds it is not.
        """
        if limit is not None and (excess := self._left(limit, now) - limit) >= 0:
            raise Overloaded(
                f"this key has used its {limit:.12g} {what} a minute",
                retry_after_s=max(RETRY_AFTER_S, 60.0 * excess / limit),
            )

    def _left(self, limit: float, now: float) -> float:
        return max(0.0, self._used - (now - self._at) * limit / 60.0)


class Quota:
    """The limits and counts of one holder (a limit of None: unlimited). Logs show ``name``.

    ``limits`` bound what its requests take; ``num_choices`` of them run, with room for
    ``num_blocks`` KV blocks.
    ``max_priority`` is the most urgent priority, which is the lowest number, that its requests may
    have. ``weight`` is its part of a shared server beside other holders. ``is_operator``: it may
    operate the server. ``may_delegate``: it may call for others (`delegated`), whose ``gateway`` it
    then is. The requests of those count against its limits.
    """

    __slots__ = (
        "__weakref__",
        "_delegated",
        "_tokenizer_s",
        "_tokens",
        "gateway",
        "is_operator",
        "limits",
        "max_priority",
        "max_queued_tokens",
        "max_requests",
        "may_delegate",
        "name",
        "num_blocks",
        "num_choices",
        "num_requests",
        "queued_tokens",
        "weight",
    )

    def __init__(
        self,
        name: str,
        *,
        max_requests: int | None = None,
        max_queued_tokens: int | None = None,
        max_priority: int | None = None,
        weight: int = 1,
        gateway: Quota | None = None,
    ) -> None:
        self.name = name
        self.max_requests = max_requests
        self.max_queued_tokens = max_queued_tokens
        self.max_priority = max_priority
        self.weight = weight
        self.is_operator = self.may_delegate = False
        self.gateway = gateway
        self.num_requests = 0
        self.queued_tokens = 0
        self.limits = NO_LIMITS
        self.num_choices = self.num_blocks = 0
        self._tokens, self._tokenizer_s = MinuteUse(), MinuteUse()
        # A holder for whom this one calls is kept only while a call or a request refers to it.
        self._delegated: WeakValueDictionary[str, Quota] = WeakValueDictionary()

    @property
    def counted(self) -> Quota:
        """The holder against whose limits the requests count."""
        return self.gateway or self

    def delegated(self, name: str) -> Quota:
        """Return the holder ``name`` for whom this one calls. It has this one's weight and most
        urgent priority, and operates nothing. Names of different gateways never meet."""
        found = self._delegated.get(name)
        if found is None:
            found = self._delegated[name] = Quota(f"{self.name}/{name}", gateway=self)
        found.max_priority, found.weight = self.max_priority, self.weight  # may have changed
        return found

    def enter(self, count: int = 1) -> None:
        """Count ``count`` requests that start.

        Raises:
            Overloaded: The holder would run more requests than it may. Nothing was counted.
        """
        limit = self.max_requests
        if limit is not None and self.num_requests + count > limit:
            told = f"this key already runs its limit of {limit} concurrent requests"
            if self.num_requests < limit:
                told = f"this key runs {self.num_requests} of at most {limit} concurrent requests"
                told += f", and this call has {count}"
            raise Overloaded(told, retry_after_s=RETRY_AFTER_S)
        self.num_requests += count

    def leave(self, count: int = 1) -> None:
        """Count the end of ``count`` requests that `enter` counted."""
        self.num_requests -= count

    def misfit(self, priority: int | None, num_choices: int) -> InvalidRequest | None:
        """Return why this holder may never have a request of this priority and number of choices,
        however long it waits; None if it may."""
        urgent, most = self.max_priority, self.counted.limits.max_choices
        if urgent is not None and priority is not None and priority < urgent:
            what = f"is {priority}, but this key's requests may have {urgent} or more"
            return InvalidRequest.of("priority", what)
        if most is not None and num_choices > most:
            what = f"is {num_choices}, but this key runs at most {most} choices"
            return InvalidRequest.of("n", what)
        return None

    def begin(self, num_choices: int, now: float) -> None:
        """Count the choices of a request that starts ``now``, on Trio's clock, until `end`.

        Raises:
            Overloaded: The holder would run more choices than it may, or has used what it may in a
                minute. Nothing was counted.
        """
        limits, running = self.limits, self.num_choices
        if limits.max_choices is not None and running + num_choices > limits.max_choices:
            raise Overloaded(
                f"this key runs {running} of at most {limits.max_choices} choices, and this "
                f"request has {num_choices}",
                retry_after_s=RETRY_AFTER_S,
            )
        self._tokens.check(limits.max_tokens_per_minute, "tokens", now)
        self.check_tokenizer(now)
        self.num_choices += num_choices

    def end(self, num_choices: int) -> None:
        """Count the end of a request that `begin` counted."""
        self.num_choices -= num_choices

    def spend(self, num_tokens: int, now: float) -> None:
        """Count tokens that were computed, if they are limited."""
        self._tokens.add(num_tokens, self.limits.max_tokens_per_minute, now)

    def spend_tokenizer(self, seconds: float, now: float) -> None:
        """Count seconds for which a tokenizer or a template worked, if they are limited."""
        self._tokenizer_s.add(seconds, self.limits.max_tokenizer_seconds_per_minute, now)

    def check_tokenizer(self, now: float) -> None:
        """Raise Overloaded if the holder has used the tokenizer's seconds of its minute."""
        most = self.limits.max_tokenizer_seconds_per_minute
        self._tokenizer_s.check(most, "seconds of tokenizers", now)

    @contextmanager
    def holding_blocks(self, num_blocks: int) -> Iterator[None]:
        """Count the KV blocks that a request may need, while the block lasts. A single request may
        exceed the limit if the holder has no other.

        Raises:
            Overloaded: The holder's requests may need more than their limit.
        """
        most = self.limits.max_kv_blocks
        if most is not None and self.num_blocks and self.num_blocks + num_blocks > most:
            raise Overloaded(
                f"this key's requests may need {self.num_blocks} KV blocks of at most {most}, and "
                f"this one {num_blocks}",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_blocks += num_blocks
        try:
            yield
        finally:
            self.num_blocks -= num_blocks

    def queue(self, num_tokens: int) -> None:
        """Count a prompt of ``num_tokens`` that waits for its first token. A single prompt may
        exceed the limit if no other prompt of the holder waits; the engine's queue has the same
        exception.

        Raises:
            Overloaded: The holder's waiting prompts and this one exceed the limit. Nothing was
                counted.
        """
        limit = self.max_queued_tokens
        if limit is not None and self.queued_tokens and self.queued_tokens + num_tokens > limit:
            raise Overloaded(
                f"this key has {self.queued_tokens} prompt tokens waiting, of at most {limit}",
                retry_after_s=RETRY_AFTER_S,
            )
        self.queued_tokens += num_tokens

    def unqueue(self, num_tokens: int) -> None:
        """End the wait of a prompt that `queue` counted."""
        self.queued_tokens -= num_tokens


class QueuedTokens:
    """The prompt tokens that one request has waiting, counted against its quota, if it has one,
    while its client is connected."""

    __slots__ = ("_is_there", "_num_tokens", "_quota")

    def __init__(self, quota: Quota | None) -> None:
        self._quota = quota and quota.counted
        self._num_tokens = 0
        self._is_there = True

    def add(self, num_tokens: int) -> None:
        """Count the request's prompt of ``num_tokens`` tokens as waiting.

        Raises:
            Overloaded: the quota allows no more (`Quota.queue`); nothing was counted.
        """
        if self._quota is not None:
            if self._is_there:
                self._quota.queue(num_tokens)
            self._num_tokens = num_tokens

    def remove(self) -> None:
        """Count the prompt as waiting no more. Idempotent."""
        if self._quota is not None and self._is_there:
            self._quota.unqueue(self._num_tokens)
        self._num_tokens = 0

    def note_client(self, *, is_there: bool) -> None:
        """Count the prompt only while its client is connected: otherwise the requests of other
        clients go first. Never refuses; idempotent."""
        if self._quota is not None and is_there != self._is_there:
            self._quota.queued_tokens += self._num_tokens if is_there else -self._num_tokens
        self._is_there = is_there


class QuotaCount:
    """Counts a stream that waits for its client, or that a call has attached to, as a request of
    its holder. Both methods are idempotent, and never refuse."""

    __slots__ = ("_is_held", "_quota")

    def __init__(self, quota: Quota | None) -> None:
        self._quota = quota and quota.counted
        self._is_held = False

    def hold(self) -> None:
        """Count the request."""
        if self._quota is not None and not self._is_held:
            self._is_held = True
            self._quota.num_requests += 1

    def release(self) -> None:
        """Count the request no more."""
        if self._quota is not None and self._is_held:
            self._is_held = False
            self._quota.num_requests -= 1


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from. ``fallback_id`` is a unique id for a request that has none of its
    own ("": the engine makes one). The request is counted against ``quota``. ``address`` is the
    client's, without a port ("": unknown)."""

    fallback_id: str = ""
    quota: Quota | None = None
    address: str = ""

    @property
    def party(self) -> Hashable:
        """The party of a fair share: the key's holder or, without a key, the address."""
        return self.quota or self.address

    @property
    def holder(self) -> str:
        """The name of the holder among whom the server is shared; "" for all without a name."""
        return "" if self.quota is None else self.quota.name

    def priority_of(self, asked: int | None, *, is_background: bool = False) -> int:
        """Return a request's priority: the one it asks for, or else the one nearest to 0 that its
        holder may have; of background work on a level of its own."""
        most = None if self.quota is None else self.quota.max_priority
        priority = asked if asked is not None else max(0, most or 0)
        return priority + BACKGROUND * is_background

    @property
    def weight(self) -> int:
        """The holder's part of a shared server beside other holders."""
        return 1 if self.quota is None else self.quota.weight


NOWHERE = Origin()
