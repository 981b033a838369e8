"""Serves the requests of one kind of work, each from the lease of a replica to its end.

Rule 1: a request whose replica dies before it has begun to compute the request goes to another
replica, as it was prepared. Rule 2: blocks belong to the core. A request's task only waits; it
forwards no token. Rule 3: while a request runs, only its stream refers to it, and drops a large
input: a prompt of megabytes may have been cut to a few tokens.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.core.common.phases import Phase
from engine.core.common.types import EndReason
from engine.errors import ShuttingDown, WorkerLost
from engine.requests.prepared import Assignment, Prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from engine.core.common.types import RequestId
    from engine.pool.leases import Lease
    from engine.pool.pool import Pool
    from engine.requests.kind import Preparer, RequestKind
    from engine.requests.progress import ProgressReports
    from engine.requests.stream import RequestStream, StreamOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """Serves the requests of ``kind`` over a pool. Belongs to the Trio thread. ``spare_images``
    cancels a request whose client is away, so that the memory of its images is freed.
    ``shares_prefixes``: holders share cached prefixes."""

    kind: RequestKind
    preparer: Preparer
    pool: Pool
    reports: ProgressReports
    spare_images: Callable[[Set[RequestId]], RequestId | None]
    shares_prefixes: bool

    async def serve(self, stream: RequestStream[Any]) -> None:
        """Serve a stream's request until the stream is closed.

        Raises:
            TrioletError: the request cannot run; its stream is not closed.
        Cancellation: ends the request at its replica.
        """
        with ExitStack() as held:
            if stream.wants_progress:
                held.enter_context(self.reports.reporting_to(stream))
            await self._serve_once(stream, held)
            while stream.take_moving():
                log.info("the request joins another queue, because its worker was lost")
                await self._serve_once(stream, held)

    async def _serve_once(self, stream: RequestStream[Any], held: ExitStack) -> None:
        """Serve a request on one replica, until its stream is closed or has to change its
        replica. ``held`` gives back the resources taken for it. Raises and cancellation as
        `serve`."""
        stream.enter(Phase.LOAD)
        cut = partial(stream.cancel, EndReason.ABORTED)
        async with self.pool.leases.lease(
            stream.request.model, stream.request.capability, cut, lambda: stream.tokens_done
        ) as lease:
            try:
                await self._serve_at(lease, stream, held)
            except WorkerLost as error:  # the replica died before the request was in its queue
                stream.lose_replica(error, has_begun=False)
            except ShuttingDown:  # raised by a runner closed after its worker's death
                cause = None if stream.replica is None else stream.replica.loop.cause_of_death
                if not isinstance(cause, WorkerLost):
                    raise
                stream.lose_replica(cause, has_begun=False)

    async def _serve_at(self, lease: Lease, stream: RequestStream[Any], held: ExitStack) -> None:
        stream.enter(Phase.TOKENIZE, lease.model)
        prepared = stream.prepared
        if prepared is None:
            prepared = await self._prepare(lease, stream, held)
            if stream.holder is not None:
                blocks = lease.replica.blocks_of(prepared.request)
                held.enter_context(stream.holder.counted.holding_blocks(blocks))
        prepared = prepared.with_adapter(lease.adapter)
        with self.pool.leases.reroute(lease, prepared.request) as replica:
            await stream.run(prepared, replica)

    async def _prepare(
        self, lease: Lease, stream: RequestStream[Any], held: ExitStack
    ) -> Prepared[Any]:
        """Return the stream's request, prepared. ``held`` gives back the memory that was taken for
        it; if preparing fails, that is given back at once. Raises and cancellation as `serve`."""
        with ExitStack() as taken:
            assignment = Assignment(
                stream.request,
                lease.replica,
                core_id=stream.core_id,
                arrival=stream.started_at,
                scope=stream.scope,
                origin=stream.origin,
                cache_owner="" if self.shares_prefixes else stream.origin.holder,
                seed=stream.seed,
                adapter=lease.adapter,
                held=taken,
                report=stream.enter,
                spare_images=self.spare_images,
            )
            prepared = await self.preparer.prepare(assignment)
            held.push(taken.pop_all())
            return prepared


@dataclass(frozen=True, slots=True)
class FeedServing:
    """Serves requests whose inputs run in other requests. ``make`` makes their streams, which
    ``submit`` those requests; it is `Supervisor.submit`."""

    make: Callable[..., Any]
    submit: Callable[..., RequestStream[Any]]
    stall_timeout_s: float

    @property
    def kind(self) -> FeedServing:
        """What makes the streams."""
        return self

    def make_stream(self, request: Any, options: StreamOptions[Any]) -> RequestStream[Any]:
        """Return the stream of a new request."""
        stream: RequestStream[Any] = self.make(request, options, self.submit, self.stall_timeout_s)
        return stream

    async def serve(self, stream: Any) -> None:
        """Serve a stream's request until the stream is closed. Raises and cancellation as
        `Serving.serve`."""
        await stream.serve()
