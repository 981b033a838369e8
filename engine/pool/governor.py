"""Which load gets memory, and which replica leaves to make room (D16).

Rule 1: nothing is awaited between reading what is free and reserving it, so that several cold
starts together never pass the limit. Rule 2: room is made only for a model that no replica serves.
Idle replicas leave first, the least recently used first of all, then the spare replicas of busy
models. The only replica of a model never leaves while requests run on it.
Rule 3: memory that is being freed for one load is pledged to it, and no other load may take it.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import trio

from engine.errors import MemoryExhausted
from engine.limits.memory import CPU
from engine.pool.memory import plan_workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.pool.entry import Entry, Load
    from engine.pool.memory import MemoryLedger, Reservation
    from engine.pool.registry import Registry
    from engine.replica.replica import AnyReplica
    from engine.worker.interface import MemoryEstimate

log = logging.getLogger(__name__)

ROOM_RETRY_S = 5.0  # retry-after of MemoryExhausted; a guess: by then a busy replica may be idle


class Governor:
    """Grants memory to loads."""

    def __init__(self, memory: MemoryLedger, registry: Registry) -> None:
        self._memory = memory
        self._entries = tuple(registry.entries.values())
        self._on_change = registry.on_change
        self._pledges: dict[Load, MemoryEstimate] = {}
        self._freed = trio.Event()
        self._went_idle = trio.Event()
        self._is_closing = False

    # ---- what the pool reports

    def notify_freed(self) -> None:
        """Wake the tasks that wait for memory, because a reservation was released."""
        self._freed.set()
        self._freed = trio.Event()

    def notify_idle(self, replica: AnyReplica) -> None:
        """Wake `evict_idle`: the last lease of a replica has ended."""
        self._went_idle.set()

    def close(self) -> None:
        """End `evict_idle`."""
        self._is_closing = True
        self._went_idle.set()

    async def wait_freed(self) -> None:
        """Wait until a reservation is released.

        Cancellation: ends the wait.
        """
        await self._freed.wait()

    # ---- reserving

    async def reserve(
        self, entry: Entry, load: Load, needs: Sequence[MemoryEstimate]
    ) -> list[Reservation | None]:
        """Reserve memory for as many of ``needs`` as fit. Wait until there is room for at least one
        if no replica serves the model.

        Returns the reservations in the order of ``needs``, with None for those that do not fit.

        Raises:
            MemoryExhausted: not one of them fits, whatever is evicted. Nothing is reserved.
        Cancellation: nothing is reserved; replicas that were retired to make room stay retired.
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
                "%s gets %d of %d replicas; there is no memory for more",
                *(entry.config.name, len(granted) - granted.count(None), len(granted)),
            )
        return granted

    def _grant(
        self, entry: Entry, load: Load, needs: Sequence[MemoryEstimate]
    ) -> list[Reservation | None]:
        """Reserve the bytes of each of ``needs`` that fits now. Never waits (rule 1)."""
        granted: list[Reservation | None] = []
        for need in needs:
            for part in need.by_device:
                self._memory.add_device(part.device, part.limit)
            fits = all(self._has_room(part, load) for part in need.by_device)
            wanted = {part.device: part.num_bytes for part in need.by_device}
            granted.append(self._memory.reserve(entry.config.name, wanted) if fits else None)
        return granted

    def grow(self, name: str, reservation: Reservation, num_bytes: int) -> None:
        """Add bytes for an adapter to the reservation of a replica that serves, which has one
        device. No other model is evicted for it.

        Raises:
            MemoryExhausted: the bytes are not free.
        """
        [device] = reservation.by_device
        reserved = self._memory.reserved(device) + self._pledged(device)
        limit = self._memory.limit(device)
        if reserved + num_bytes > limit:
            raise MemoryExhausted(
                f"Memory limit reached for {name}: loading it takes {_mib(num_bytes)} on {device}, "
                f"where {_mib(reserved)} of {_mib(limit)} are reserved; unload another adapter or "
                "model, or raise --memory-limit",
                retry_after_s=ROOM_RETRY_S,
            )
        reservation.change(num_bytes)

    def _has_room(self, need: MemoryEstimate, load: Load) -> bool:
        """Return whether a device has the bytes of ``need`` free for this load."""
        reserved = self._memory.reserved(need.device) + self._pledged(need.device, load)
        limit = self._memory.limit(need.device)
        return plan_workers(reserved, need.num_bytes, limit, wanted=1) == 1

    def _pledged(self, device: str, load: Load | None = None) -> int:
        """Return how many bytes of a device are being freed for other loads than ``load``."""
        return sum(
            part.num_bytes
            for other, need in self._pledges.items()
            for part in need.by_device
            if other is not load and part.device == device
        )

    async def _make_room(self, entry: Entry, load: Load, need: MemoryEstimate) -> None:
        """Retire as many replicas as ``need`` requires, and wait until memory is released.

        Raises:
            MemoryExhausted: there is no room, whatever is retired. Nothing was retired.
        Cancellation: ends the wait; the retired replicas stay retired.
        """
        missing = {part.device: self._missing(part, load) for part in need.by_device}
        held = [
            (other, replica)
            for other in self._entries
            for replica in other.replicas
            if any(replica.reservation.on(device) for device in missing)
        ]
        may_go = victims(entry, held) if load.may_evict else []
        chosen = []
        for replica in may_go:
            own = replica.reservation
            if any(own.on(device) and left > 0 for device, left in missing.items()):
                missing = {device: left - own.on(device) for device, left in missing.items()}
                chosen.append(replica)
        for part in need.by_device:
            if missing[part.device] > 0:
                raise self._exhausted(entry, part, may_go)
        for replica in chosen:
            log.info("%s makes room for %s", replica.model, entry.config.name)
            replica.retire()
        self._on_change()
        await self._freed.wait()

    def _missing(self, need: MemoryEstimate, load: Load) -> int:
        """Return how many of the needed bytes of a device are neither free nor being freed. The
        free bytes may be negative, because loads may have taken more than their estimates."""
        device = need.device
        coming = self._memory.limit(device) - self._memory.reserved(device)
        coming -= self._pledged(device, load)
        coming += sum(
            replica.reservation.on(device)
            for entry in self._entries
            for replica in entry.replicas
            if replica.is_retired
        )
        return need.num_bytes - coming

    def _exhausted(
        self, entry: Entry, need: MemoryEstimate, may_go: Sequence[AnyReplica]
    ) -> MemoryExhausted:
        reserved, limit = self._memory.reserved(need.device), self._memory.limit(need.device)
        names = ", ".join(
            f"{entry.model} ({_mib(entry.reservation.on(need.device))})" for entry in may_go
        )
        never_fits = need.num_bytes > limit
        ways = ["raise --memory-limit"] * (need.device == CPU)
        ways += ["lower --kv-cache-memory"] * entry.traits.has_kv_cache
        return MemoryExhausted(
            f"Memory limit reached for {entry.config.name}: it needs {_mib(need.num_bytes)} on "
            f"{need.device}, where {_mib(reserved)} of {_mib(limit)} are reserved; "
            f"{f'evicting {names} would not free enough' if names else 'nothing can be evicted'}"
            + (f"; {' or '.join(ways)}" if never_fits and ways else ""),
            retry_after_s=None if never_fits else ROOM_RETRY_S,
        )

    # ---- idling

    async def evict_idle(self, ttl_s: float) -> None:
        """Retire replicas that had no lease for ``ttl_s`` seconds, until `close`. Wakes up when a
        replica has been idle for ``ttl_s``, and when the last lease of a replica ends.

        Cancellation: ends the evictions.
        """
        while not self._is_closing:
            due = self._retire_idle(trio.current_time(), ttl_s)
            with trio.move_on_at(due):
                await self._went_idle.wait()
            self._went_idle = trio.Event()

    def _retire_idle(self, now: float, ttl_s: float) -> float:
        """Retire replicas that are idle for too long at ``now``; return when the next one is."""
        due = math.inf
        for entry in self._entries:
            for replica in entry.ready:
                if replica.num_leases:
                    continue
                if replica.idle_since + ttl_s > now:
                    due = min(due, replica.idle_since + ttl_s)
                    continue
                if entry.num_waiting:  # the waiting requests are about to lease a replica
                    continue
                log.info("%s was idle for %g s", replica.model, ttl_s)
                replica.retire()
                self._on_change()
        return due


def victims(entry: Entry, held: Sequence[tuple[Entry, AnyReplica]]) -> list[AnyReplica]:
    """Return the replicas that may leave to make room for a model, in order (rule 2). ``held`` has
    the replicas on the devices that lack memory, each with its model's entry."""
    others = [
        (other, replica) for other, replica in held if other is not entry and not replica.is_retired
    ]
    idle = [entry for other, entry in others if not entry.num_leases and not other.num_waiting]
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
