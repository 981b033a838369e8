"""Which request holds which replica: the wait for a load, the choice of a replica, the lease."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from engine.errors import SpawnTimeout
from engine.pool.load_errors import error_for_request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from engine.config import EngineConfig
    from engine.pool.adapter_version import AdapterVersion
    from engine.pool.entry import Entry, Load
    from engine.pool.loads import Loads
    from engine.pool.registry import Registry
    from engine.replica.replica import AnyReplica
    from engine.status import Capability


TIMEOUT_RETRY_S = 5.0  # retry-after of SpawnTimeout; a guess: by then the load may have ended


class Lease(NamedTuple):
    """A request's right to a replica, and to the adapter that it is computed with.

    ``cut`` cancels the holder's request. ``model`` is the name of the model or of its adapter.
    ``adapter`` is the digest of the adapter, and ``version`` the adapter itself; without an adapter
    they are "" and None.
    """

    replica: AnyReplica
    cut: Callable[[], None]
    model: str
    adapter: str = ""
    version: AdapterVersion | None = None


class Leases:
    """Leases replicas to requests. Belongs to the Trio thread."""

    def __init__(self, config: EngineConfig, registry: Registry, loads: Loads) -> None:
        self._routing = config.routing
        self._spawn_timeout_s = config.spawn_timeout_s
        self._registry = registry
        self._loads = loads

    @asynccontextmanager
    async def acquire(
        self,
        name: str,
        capability: Capability | None = None,
        cut: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[AnyReplica]:
        """Hold a replica of a model while the block runs. A cold model is loaded first, once for
        all waiting requests. ``cut`` is called if the model is unloaded; it must end the block.

        Raises:
            ModelNotFound, InvalidRequest, ShuttingDown, NoWorkers: `Loads.ensure` refuses the name.
            SpawnFailed, MemoryExhausted: the load failed, or found no memory. Each waiter gets an
                error of its own, chained to the cause.
            SpawnTimeout: the load takes longer than requests wait. The load goes on.
        Cancellation: ends the wait, and the load goes on; inside the block, ends the lease.
        """
        replica, _ = await self._wait_for_replica(name, capability)
        with replica.leased(cut):
            yield replica

    @asynccontextmanager
    async def lease(
        self,
        name: str,
        capability: Capability,
        cut: Callable[[], None],
        tokens: Callable[[], int],
    ) -> AsyncIterator[Lease]:
        """Hold a replica for a request while the block runs, and the adapter if ``name`` names one.
        ``tokens`` returns how many tokens the request has got. All else is as in `acquire`."""
        replica, version = await self._wait_for_replica(name, capability)
        with replica.leased(cut):
            if version is None:
                yield Lease(replica, cut, replica.model)
                return
            with version.leased(cut, tokens):
                digest = replica.adapters[version].digest
                yield Lease(replica, cut, version.name, digest, version)

    @contextmanager
    def reroute(self, lease: Lease, request: Any) -> Iterator[AnyReplica]:
        """Hold the replica on which a request will run, now that its tokens are known: the leased
        one, or another that has more of the prompt cached. ``request`` is a `CoreRequest`."""
        entry, better = self._registry.entries[lease.replica.model], None
        if self._routing == "prefix" and entry.traits.has_kv_cache:
            better = entry.pick_by_prefix(request, lease.version)
        if better is None or better is lease.replica:
            yield lease.replica
            return
        with better.leased(lease.cut):
            yield better

    async def _wait_for_replica(
        self, name: str, capability: Capability | None
    ) -> tuple[AnyReplica, AdapterVersion | None]:
        """Return a ready replica and the adapter with this name, without a checkpoint if a replica
        is ready. The caller must lease the replica and the adapter before it awaits anything."""
        deadline = trio.current_time() + self._spawn_timeout_s
        while True:
            entry = self._loads.ensure(name, capability)
            version = self._registry.find_adapter(name)
            replica = entry.pick(self._routing, version)
            if replica is not None:
                entry.last_used = time.time()
                return replica, version
            if version is not None and entry.ready:
                raise error_for_request(version.name, version.error)
            assert entry.load is not None
            await self._wait_settled(entry, entry.load, deadline)

    async def _wait_settled(self, entry: Entry, load: Load, deadline: float) -> None:
        """Wait until a replica of a load serves.

        Raises:
            TrioletError: no replica will serve, or the deadline, on Trio's clock, has passed.
        Cancellation: ends the wait; the load goes on.
        """
        entry.num_waiting += 1
        try:
            with trio.move_on_at(deadline) as scope:
                await load.settled.wait()
        finally:
            entry.num_waiting -= 1
        if scope.cancelled_caught:
            raise SpawnTimeout(
                f"{entry.config.name} is still loading after {self._spawn_timeout_s:g} s; "
                "its load goes on",
                retry_after_s=TIMEOUT_RETRY_S,
            )
        if load.cause is not None:
            raise error_for_request(entry.config.name, load.cause)
