"""What requests have used: the record of each, and the sums by holder and model.

Rule 1: each request that was submitted adds one record, whatever its end, and nothing else does.
Rule 2: nothing here is text of a prompt or an answer. Rule 3: the memory is bounded, however many
names a gateway calls for: beyond the bounds, old minutes are added up, and then the holders that
came last are `OTHERS` together. The usage log has every record.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUCKET_S = 60  # seconds whose records are added up
# The most sums of minutes that are kept, and the most holders with models. Guesses: 40 MB.
SUMS_MAX, PAIRS_MAX = 50_000, 10_000
OTHERS = "(others)"  # no key or certificate can have this name
SHOWN_MAX = 64  # holders that metrics show; a guess: each has a time series of each metric


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """What one request has used, which has ended.

    ``holder`` is `Origin.holder`. ``end`` is "OK", or the reason of the request's error;
    ``ended_at`` is in seconds since 1970. ``prompt_tokens`` counts those of an accepted request,
    ``cached_tokens`` of which were not computed. ``completion_tokens`` of a text, or ``results``:
    vectors, scores or images, were made by this request, and ``undelivered`` of them did not reach
    its client. ``images`` are those of the input. ``queue_s`` is the time until the first step, and
    ``step_s`` the request's part of the time of its steps, both in seconds. ``sent_bytes`` are
    those of the answer's messages.
    """

    request_id: str
    holder: str
    model: str
    adapter: str
    operation: str
    end: str
    ended_at: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    results: int = 0
    undelivered: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    reasoning_tokens: int = 0
    images: int = 0
    queue_s: float = 0.0
    step_s: float = 0.0
    sent_bytes: int = 0


class UsageSums(NamedTuple):
    """Sums over the records of ``requests``, ``succeeded`` of which ended with OK. The other fields
    are those of `UsageRecord`."""

    requests: int = 0
    succeeded: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    results: int = 0
    undelivered: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    reasoning_tokens: int = 0
    images: int = 0
    queue_s: float = 0.0
    step_s: float = 0.0
    sent_bytes: int = 0

    def plus(self, other: UsageSums) -> UsageSums:
        """Return the sums of both."""
        return UsageSums._make(map(sum, zip(self, other, strict=True)))


NOTHING = UsageSums()
_FIELDS = UsageSums._fields[2:]
Pair = tuple[str, str]  # a holder and a model


def sums_of(record: UsageRecord) -> UsageSums:
    """Return the sums of one record."""
    values = [getattr(record, name) for name in _FIELDS]
    return UsageSums(1, record.end == "OK", *values)


class _Bucket:
    """The sums of some minutes, by holder and model. ``since`` is in seconds since 1970."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.sums: dict[Pair, UsageSums] = {}

    def add(self, pair: Pair, sums: UsageSums, most: int) -> None:
        if pair not in self.sums and len(self.sums) >= most:
            pair = (OTHERS, pair[1])
        self.sums[pair] = self.sums.get(pair, NOTHING).plus(sums)


_since = attrgetter("since")


class Usage:
    """The use of one engine since its start, at ``since`` seconds after 1970. ``listeners`` are
    called with each record. ``shown`` has the sums of the first `SHOWN_MAX` holders, and of
    `OTHERS`. Belongs to the Trio thread."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.listeners: list[Callable[[UsageRecord], None]] = []
        self.shown: dict[str, UsageSums] = {}
        self._old = _Bucket(since)  # of all minutes that are no more kept apart
        self._recent: list[_Bucket] = []  # the oldest first
        self._num_sums = 0

    def add(self, record: UsageRecord) -> None:
        """Count a record, and tell it to the listeners."""
        sums = sums_of(record)
        is_shown = record.holder in self.shown or len(self.shown) < SHOWN_MAX
        name = record.holder if is_shown else OTHERS
        self.shown[name] = self.shown.get(name, NOTHING).plus(sums)
        minute = max(self.since, record.ended_at // BUCKET_S * BUCKET_S)
        place = bisect.bisect_left(self._recent, minute, key=_since)
        if place == len(self._recent) or self._recent[place].since != minute:
            self._recent.insert(place, _Bucket(minute))  # amid others if the clock was set back
        bucket = self._recent[place]
        before = len(bucket.sums)
        bucket.add((record.holder, record.model), sums, PAIRS_MAX)
        self._num_sums += len(bucket.sums) - before
        while self._num_sums > SUMS_MAX and len(self._recent) > 1:
            oldest = self._recent.pop(0)
            self._num_sums -= len(oldest.sums)
            for pair, sums in oldest.sums.items():
                self._old.add(pair, sums, PAIRS_MAX)
        for listener in self.listeners:
            listener(record)

    def sums(
        self, holder: str | None = None, model: str = "", since: float = 0.0
    ) -> tuple[float, dict[Pair, UsageSums]]:
        """Return the sums by holder and model: of one holder and one model, or with None and "" of
        all; of records since the beginning of the minute of ``since``, in seconds after 1970. Also
        return that time. It is earlier if the minute is not kept apart any more."""
        found: dict[Pair, UsageSums] = {}
        buckets = self._buckets(since)
        begun = max(self.since, since // BUCKET_S * BUCKET_S)
        if buckets and buckets[0] is self._old:
            begun = self.since
        for bucket in buckets:
            for pair, sums in bucket.sums.items():
                if holder in (None, pair[0]) and model in ("", pair[1]):
                    found[pair] = found.get(pair, NOTHING).plus(sums)
        return begun, found

    def _buckets(self, since: float) -> list[_Bucket]:
        if self._old.sums and (not self._recent or since < self._recent[0].since):
            return [self._old, *self._recent]
        minute = since // BUCKET_S * BUCKET_S
        return self._recent[bisect.bisect_left(self._recent, minute, key=_since) :]

    def __iter__(self) -> Iterator[tuple[Pair, UsageSums]]:
        """Iterate over the sums since the start, by holder and model."""
        return iter(self.sums()[1].items())
