"""What one holder of a key has at once: requests that run, prompt tokens that wait.

Rule 1: `enter` and `leave` belong to one thread, the front's, and `queue` and `unqueue` to
another, the engine's; neither reads the other's count. Limits are set from anywhere. Rule 2: what
is taken is given back exactly once, whatever way the request ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import Overloaded

RETRY_AFTER_S = 1.0  # guess: one of the holder's own requests is soon done


class Quota:
    """One holder's counts and limits (None: no limit). ``name`` is the holder's, for logs."""

    __slots__ = ("max_queued_tokens", "max_requests", "name", "num_requests", "queued_tokens")

    def __init__(
        self, name: str, *, max_requests: int | None = None, max_queued_tokens: int | None = None
    ) -> None:
        self.name = name
        self.max_requests = max_requests
        self.max_queued_tokens = max_queued_tokens
        self.num_requests = 0
        self.queued_tokens = 0

    def enter(self) -> None:
        """One more request runs.

        Raises:
            Overloaded: the holder has as many as it may; nothing was counted.
        """
        if self.max_requests is not None and self.num_requests >= self.max_requests:
            raise Overloaded(
                f"this key has its {self.max_requests} concurrent requests",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_requests += 1

    def leave(self) -> None:
        """One that entered has ended."""
        self.num_requests -= 1

    def queue(self, num_tokens: int) -> None:
        """A prompt of so many tokens waits for its first answer. One prompt may be larger than
        the limit if nothing else waits, as in the queue itself.

        Raises:
            Overloaded: with those that wait it would be more than the holder may have; nothing was
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
        """A prompt that was queued waits no more."""
        self.queued_tokens -= num_tokens


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from. ``fallback_id`` is its id if it brings none, and nobody else's
    ("": the engine makes one); what it has at once is counted against ``quota``."""

    fallback_id: str = ""
    quota: Quota | None = None


NOWHERE = Origin()
