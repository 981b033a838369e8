"""The memory governor: who gets room for what, and who goes to make it (D16).

Rule 1: nothing is awaited between a look at the books and the reservation, so that several cold
starts together never pass the limit (R120). Rule 2: room is made for a model that nothing serves
yet, and only then: what is idle goes first, least recently used before the rest, then the spare
replicas of busy models (R135). A model's only replica with requests on it is never taken.
Rule 3: room that is being made is pledged to whoever it is made for.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import trio

from engine.errors import MemoryExhausted
from engine.memory import CPU, plan_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.core.plan import MemoryEstimate
    from engine.entry import Entry, Load
    from engine.memory import MemoryBooks, Reservation
    from engine.replica import Replica

log = logging.getLogger(__name__)


class Governor:
    """Grants memory to loads. ``on_change`` hears when a replica is retired."""

    def __init__(
        self, memory: MemoryBooks, entries: Sequence[Entry], on_change: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._entries = entries
        self._on_change = on_change
        self._pledges: dict[Load, MemoryEstimate] = {}
        self._freed = trio.Event()
        self._went_idle = trio.Event()
        self._is_closing = False

    # ---- what the pool tells

    def tell_freed(self) -> None:
        """Something reserved was given back."""
        self._freed.set()
        self._freed = trio.Event()

    def tell_idle(self, replica: Replica) -> None:
        """Nobody holds the replica any more."""
        self._went_idle.set()

    def close(self) -> None:
        """End `evict_idle`."""
        self._is_closing = True
        self._went_idle.set()

    async def wait_freed(self) -> None:
        """Wait until something is given back."""
        await self._freed.wait()

    # ---- reserving

    async def reserve(
        self, entry: Entry, load: Load, needs: Sequence[MemoryEstimate]
    ) -> list[Reservation | None]:
        """Reserve for as many of ``needs`` as fit, and for one at least if nothing serves the
        model yet; None for the others, in the order of ``needs``.

        Raises:
            MemoryExhausted: not even one fits, and none can be made to. Nothing is reserved.
        Cancellation: nothing is reserved; what was retired to make room stays so.
        """
        try:
            while True:
                granted = self._grant(entry, load, needs)
                if any(granted) or entry.ready:
                    break
                self._pledges[load] = needs[0]
                await self._make_room(entry, load, needs[0])
        finally:
            self._pledges.pop(load, None)
        if not all(granted):
            log.warning(
                "%s gets %d of %d replicas: there is no memory for more",
                *(entry.config.name, len(granted) - granted.count(None), len(granted)),
            )
        return granted

    def _grant(
        self, entry: Entry, load: Load, needs: Sequence[MemoryEstimate]
    ) -> list[Reservation | None]:
        """Never waits (rule 1)."""
        granted: list[Reservation | None] = []
        for need in needs:
            self._memory.know(need.device, need.limit)
            reserved = self._memory.reserved(need.device) + self._pledged(need.device, load)
            limit = self._memory.limit(need.device)
            fits = plan_workers(reserved, need.num_bytes, limit, wanted=1)
            name = entry.config.name
            granted.append(
                self._memory.reserve(name, need.device, need.num_bytes) if fits else None
            )
        return granted

    def _pledged(self, device: str, load: Load) -> int:
        """Bytes of a device that become free for other loads than this one."""
        return sum(
            need.num_bytes
            for other, need in self._pledges.items()
            if other is not load and need.device == device
        )

    async def _make_room(self, entry: Entry, load: Load, need: MemoryEstimate) -> None:
        """Retire what may be for ``need``, and wait until something is free.

        Raises:
            MemoryExhausted: there will not be room, whatever is retired. Nothing was.
        """
        held = [
            (other, replica)
            for other in self._entries
            for replica in other.replicas
            if replica.reservation.device == need.device
        ]
        # below 0 where more was measured than the limit is
        coming = self._memory.limit(need.device) - self._memory.reserved(need.device)
        coming -= self._pledged(need.device, load)
        coming += sum(one.reservation.num_bytes for _, one in held if one.is_retired)
        may_go = victims(entry, held) if load.may_evict else []
        chosen = []
        for replica in may_go:
            if coming < need.num_bytes:
                coming += replica.reservation.num_bytes
                chosen.append(replica)
        if coming < need.num_bytes:
            raise self._exhausted(entry, need, may_go)
        for replica in chosen:
            log.info("%s makes room for %s", replica.model, entry.config.name)
            replica.retire()
        self._on_change()
        await self._freed.wait()

    def _exhausted(
        self, entry: Entry, need: MemoryEstimate, may_go: Sequence[Replica]
    ) -> MemoryExhausted:
        reserved, limit = self._memory.reserved(need.device), self._memory.limit(need.device)
        names = ", ".join(f"{one.model} ({_mib(one.reservation.num_bytes)})" for one in may_go)
        never_fits = need.num_bytes > limit
        ways = ["raise --memory-limit"] * (need.device == CPU)
        ways += ["lower --kv-cache-memory"] * (not entry.is_encoder)
        return MemoryExhausted(
            f"Memory limit reached for {entry.config.name}: it needs {_mib(need.num_bytes)} on "
            f"{need.device}, where {_mib(reserved)} of {_mib(limit)} are reserved; "
            f"{f'evicting {names} would not do' if names else 'nothing can be evicted'}"
            + (f"; {' or '.join(ways)}" if never_fits and ways else ""),
            retry_after_s=None if never_fits else 5.0,
        )

    # ---- idling

    async def evict_idle(self, ttl_s: float) -> None:
        """Retire replicas that nobody has held for ``ttl_s`` seconds, until closed. Wakes up when
        one is due, or as the last lease of one ends."""
        while not self._is_closing:
            due = self._retire_idle(trio.current_time(), ttl_s)
            with trio.move_on_at(due):
                await self._went_idle.wait()
            self._went_idle = trio.Event()

    def _retire_idle(self, now: float, ttl_s: float) -> float:
        """When the next is due."""
        due = math.inf
        for entry in self._entries:
            for replica in entry.ready:
                if replica.num_leases:
                    continue
                if replica.idle_since + ttl_s > now:
                    due = min(due, replica.idle_since + ttl_s)
                    continue
                if entry.num_waiting:  # they hold it next
                    continue
                log.info("%s was idle for %g s", replica.model, ttl_s)
                replica.retire()
                self._on_change()
        return due


def victims(entry: Entry, held: Sequence[tuple[Entry, Replica]]) -> list[Replica]:
    """What may go to make room for a model, in order (rule 2). ``held``: every replica on its
    device, with its model."""
    others = [
        (other, replica) for other, replica in held if other is not entry and not replica.is_retired
    ]
    idle = [one for other, one in others if not one.num_leases and not other.num_waiting]
    idle.sort(key=lambda replica: replica.idle_since)
    left = {other.config.name: len(other.ready) for other, _ in others}
    for replica in idle:
        left[replica.model] -= 1
    spare = []
    for _, replica in sorted(others, key=lambda pair: pair[1].num_leases):
        if replica not in idle and left[replica.model] > 1:
            left[replica.model] -= 1
            spare.append(replica)
    return idle + spare


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
