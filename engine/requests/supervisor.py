"""Supervises requests: each has one task and one cancel scope, from submit to its last event.

Rule 1: every early end is one `RequestStream.cancel(reason)`; the first reason wins (R204).
Rule 2: a request's client gets the end at once, and the engine frees the request's resources within
one step: closing a stream never waits for the step in flight (R10, R152).
Rule 3: blocks belong to the core. The task only supervises; it forwards no token.

A request's task leases a replica, has the request prepared, submits it to the replica's loop, and
waits for the stream's end. `RequestKind` provides what differs between kinds of work.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from engine import logs
from engine.core.common.events import Submit
from engine.core.common.types import EndReason, Explanation, RequestId
from engine.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineBug,
    InvalidRequest,
    Overloaded,
    RequestAborted,
    RequestNotFound,
    ShuttingDown,
    StepFailed,
    TrioletError,
    WorkerLost,
)
from engine.requests.detached import DetachedStreams
from engine.requests.end_counts import EndCounts
from engine.requests.image_memory import ImageFiles
from engine.requests.quota import NOWHERE, Origin
from engine.requests.stream import StreamOptions, server_deadline
from engine.requests.tasks import RequestTasks
from engine.requests.tokenizing import Tokenizing
from engine.status import AbortOutcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from engine.config import EngineConfig
    from engine.core.common.events import CoreRequest
    from engine.images.decoder import DecodeImage
    from engine.pool.pool import Pool
    from engine.replica.replica import Replica
    from engine.replica.threads import Threads
    from engine.requests.kind import ClientRequest, Preparer, RequestKind
    from engine.requests.stream import Reader, RequestStream

log = logging.getLogger(__name__)

# How long an abort that comes before its request is remembered, and how many of these aborts are
# remembered. Both are guesses; control.proto states them at Abort.
ABORT_MEMORY_S = 60.0
ABORT_MEMORY_MAX = 10_000

WAITING_FOR = {  # what a request waits for, by its phase, before the core knows of it
    "load": "model load",
    "tokenize": "its tokens, which are being made",
    "decode image": "its images, which are being decoded",
    "compile": "its constraint, which is being compiled",
    "write": "its images, which are being written, or its reader, which has not taken them",
}


class Supervisor:
    """Starts and supervises the requests over one pool. Belongs to the Trio thread.

    ``tokenizing`` runs tokenizers, and ``image_files`` counts the bytes of images, both for
    requests and for calls of Tokenize and Detokenize. ``is_draining``: a drain has begun,
    which first awaits ``take_leave``.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: Pool,
        threads: Threads,
        kinds: Iterable[RequestKind],
        image_decoder: DecodeImage,
        take_leave: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._tasks = RequestTasks()
        self.tokenizing = Tokenizing(threads, self._tasks, image_decoder)
        self._kinds: dict[type, RequestKind] = {}
        self._preparers: dict[type, Preparer] = {}
        for kind in kinds:
            preparer = kind.make_preparer(self.tokenizing, self._tasks)
            self._kinds |= dict.fromkeys(kind.request_types, kind)
            self._preparers |= dict.fromkeys(kind.request_types, preparer)
        self._live: dict[str, RequestStream[Any]] = {}
        self._serials = itertools.count(1)
        self._take_leave = take_leave
        self.is_draining = self._refuses_new = False
        self._num_cut = 0
        self._background_drain: trio.Event | None = None
        self.detached = DetachedStreams(self._tasks)
        # The queue's bound counts only the requests in it, not those that load, tokenise or are
        # parked; so all live requests have a bound of their own.
        each = config.max_queued_requests + config.max_num_seqs
        self._max_live = each * sum(model.num_replicas for model in config.models)
        self.image_files = ImageFiles(self.detached.image_bytes)
        self._recently_ended = _RecentIds()
        self._aborts_to_come = _RecentIds()
        self._idle = trio.Event()
        self.metrics = EndCounts()

    @property
    def num_live(self) -> int:
        """Requests whose task has not ended."""
        return len(self._live)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the pool and the requests' tasks until `drain` has ended both.

        Cancellation: cancels every request, and waits for the steps in flight.
        """
        async with self._tasks.running():
            self._tasks.start(self._run_pool)
            task_status.started()

    async def _run_pool(self) -> None:
        try:
            await self._pool.run()
        finally:
            self._tasks.close()  # without models, nothing can be served any more

    # ---- submit

    def submit(
        self,
        request: ClientRequest,
        *,
        buffer: int,
        reader: Reader[Any] | None = None,
        arrived_at: float | None = None,
        origin: Origin = NOWHERE,
    ) -> RequestStream[Any]:
        """Start a request and return its stream. Never waits and never raises: if the request is
        refused, its stream has the error (R59).

        ``buffer`` is the number of messages that may wait for the reader. ``arrived_at`` is when
        the request reached the server, on Trio's clock, if that was earlier.
        """
        kind = self._kinds[type(request)]
        request_id = request.request_id or origin.fallback_id or uuid.uuid4().hex
        error = self._refusal(request, request_id)
        options = StreamOptions(
            request_id,
            self._core_id(request, request_id),
            buffer,
            reader,
            origin,
            self._count if error is None else self._count_refusal,
            self.detached.add,
            self.detached.remove,
        )
        stream = kind.make_stream(request, options)
        if error is not None:
            stream.close(error)
            return stream
        timeout = request.timeout_s
        if timeout is None:
            timeout = self._config.default_deadline_s
        start = stream.started_at if arrived_at is None else arrived_at
        stream.scope.deadline = server_deadline(start, timeout)
        if request.timeout_s is not None:
            stream.client_deadline = start + request.timeout_s
        self._live[request_id] = stream
        self.image_files.add(kind.image_bytes(request))
        self.detached.register(stream)
        log.debug("registered", extra={"request_id": logs.printable(request_id)})
        self._tasks.start(self._supervise, request, stream, name=f"request {request_id}")
        return stream

    def _refusal(self, request: ClientRequest, request_id: str) -> TrioletError | None:
        if self._refuses_new:
            return ShuttingDown("the server takes no new requests", retry_after_s=5.0)
        if self._aborts_to_come.take(request_id):
            return RequestAborted("the request was aborted by the operator before it arrived")
        live = self._live.get(request_id)
        if live is not None and not live.is_closed:
            return DuplicateRequest(f"request_id {request_id!r} is in use")
        if error := self.image_files.refusal(self._kinds[type(request)].image_bytes(request)):
            return error
        try:
            request.validate()
        except InvalidRequest as invalid:
            return invalid
        if len(self._live) >= self._max_live and not self.detached.make_place():
            return Overloaded(f"the server holds its {self._max_live} requests", retry_after_s=1.0)
        return None if self._tasks.is_open else ShuttingDown("the engine is closed")

    def _core_id(self, request: ClientRequest, request_id: str) -> RequestId:
        """Return the core's name for a request, which is never used twice.

        A client may use an id again while a step, a posted command or an undelivered event still
        refers to the first request with that id. The separator is a character that no client's id
        may have (`ClientRequest.validate`).
        """
        if not request.request_id:
            return RequestId(request_id)  # made for this request, so it is unique
        return RequestId(f"{request_id}\x1f{next(self._serials)}")

    def abort(self, request_id: str) -> AbortOutcome:
        """End a request for the operator: now if it is live, otherwise when it arrives, if that is
        within `ABORT_MEMORY_S`. Never waits."""
        stream = self._live.get(request_id)
        self.detached.abort(request_id)
        if stream is not None and not stream.is_closed:
            stream.cancel(EndReason.ABORTED)
            return AbortOutcome.ABORTED
        if stream is not None or request_id in self._recently_ended:
            return AbortOutcome.ALREADY_ENDED
        self._aborts_to_come.add(request_id)
        return AbortOutcome.REMEMBERED

    def explain(self, request_id: str) -> Explanation:
        """Return what a live request is doing, and why. Never waits, not even for a step.

        Raises:
            RequestNotFound: no such request is live.
        """
        stream = self._live.get(request_id)
        if stream is None or stream.is_closed:
            waiting = self.detached.waiting(request_id)
            if waiting is None:
                raise RequestNotFound(f"no live request has the id {request_id!r}")
            return self.detached.explain(waiting, Explanation("ENDED"))
        explained = None
        if stream.replica is not None:
            explained = stream.replica.loop.explain(stream.core_id)
        if explained is None:
            explained = Explanation("WAITING", WAITING_FOR.get(stream.phase, "its end"))
        return self.detached.explain(stream, explained)

    # ---- one request's task

    async def _supervise(self, request: ClientRequest, stream: RequestStream[Any]) -> None:
        logs.request_id.set(logs.printable(stream.request_id))
        try:
            with stream.scope:
                await self._serve(request, stream)
            stream.close(stream.early_end())  # without effect if the request has ended by itself
        except TrioletError as error:
            stream.close(error)
        except Exception as error:
            log.exception("the request's task failed")
            stream.close(EngineBug(repr(error)))
        finally:
            if not stream.is_closed:  # the whole engine is being cancelled
                stream.reason = EndReason.SHUTDOWN
                stream.close(stream.early_end())
            self.image_files.remove(self._kinds[type(request)].image_bytes(request))
            self._end(stream)

    async def _serve(self, request: ClientRequest, stream: RequestStream[Any]) -> None:
        """Serve a request on one replica, or on another one if the first dies before it has begun
        to compute the request."""
        is_to_run = True
        while is_to_run:
            try:
                await self._serve_once(request, stream)
            except WorkerLost as error:  # the replica died before the request was in its queue
                if stream.phase == "load":  # no replica has the request: the model's load failed
                    raise
                stream.lose_replica(error, has_begun=False)
            except ShuttingDown:  # so a runner answers that was closed after its worker's death
                cause = None if stream.replica is None else stream.replica.loop.cause_of_death
                if not isinstance(cause, WorkerLost):
                    raise
                stream.lose_replica(cause, has_begun=False)
            is_to_run = stream.take_moving()
            if is_to_run:
                log.info("the request joins another queue, because its worker was lost")

    async def _serve_once(self, request: ClientRequest, stream: RequestStream[Any]) -> None:
        stream.phase = "load"
        capability = self._kinds[type(request)].capability_for(request)
        preparer = self._preparers[type(request)]
        cut = partial(stream.cancel, EndReason.ABORTED)
        async with self._pool.leases.acquire(request.model, capability, cut) as leased:
            stream.load_s = trio.current_time() - stream.started_at
            stream.phase = "tokenize"
            with ExitStack() as held:
                adapted = self._pool.adapters.leased(
                    request.model, leased, cut, lambda: stream.tokens_done
                )
                stream.model, stream.adapter, version = held.enter_context(adapted)
                prepared = await preparer.prepare(stream, leased, held)
                rerouted = self._pool.leases.reroute(leased, prepared, cut, version)
                replica = held.enter_context(rerouted)
                stream.replica = replica
                holding = preparer.holding(prepared, replica)
                if holding is not None:
                    stream.phase = "compile"
                async with holding or nullcontext():
                    await self._run(stream, replica, prepared)

    async def _run(
        self, stream: RequestStream[Any], replica: Replica[Any, Any], request: CoreRequest
    ) -> None:
        """Run a prepared request, from the queue to its end."""
        stream.phase = "queued"
        stream.queued.add(request.num_tokens)
        replica.loop.submit(Submit(request, stream.credit), stream)
        try:
            with replica.busy_with(request.num_tokens_ahead) as stream.ahead:
                await stream.wait_turn()
        finally:
            stream.phase = replica.loop.phase_of(request.request_id) or stream.phase
            replica.loop.forget(request.request_id)
            if stream.error is not None or not stream.is_closed:
                reason = stream.reason or EndReason.DEADLINE
                since = stream.cancelled_at
                replica.loop.cancel(request.request_id, reason, stream.phase, since)

    def _end(self, stream: RequestStream[Any]) -> None:
        """Forget the request, unless another request has its id by now."""
        if self._live.get(stream.request_id) is stream:
            del self._live[stream.request_id]
        self._recently_ended.add(stream.request_id)
        if not self._live:
            self._idle.set()
        log.debug(
            "unregistered: %s after %d tokens",
            "ok" if stream.error is None else stream.error.reason,
            stream.tokens_done,
        )

    def _count(self, stream: RequestStream[Any]) -> None:
        """Count the end of a request, before its reader is notified of it."""
        replica, error = stream.replica, stream.error
        if error is None:
            self.metrics.count_end(EndReason.STOP)
        elif stream.reason is not None or isinstance(error, DeadlineExceeded):
            reason = stream.reason or EndReason.DEADLINE
            self.metrics.count_end(reason, stream.phase)
        elif isinstance(error, EngineBug | WorkerLost):
            self.metrics.count_end(EndReason.FAILED, stream.phase)
        else:
            self.metrics.count_refusal()
        if replica is not None:
            replica.processed += error is None
            replica.failed += isinstance(error, (StepFailed, EngineBug, WorkerLost))
            replica.cancelled += stream.reason is EndReason.CANCELLED

    def _count_refusal(self, stream: RequestStream[Any]) -> None:
        self.metrics.count_refusal()

    # ---- the end of everything

    async def drain(self, timeout_s: float) -> int:
        """Take leave, refuse new requests, let running ones finish, all within ``timeout_s``
        seconds; then cut the rest, and end the pool. Return the number of requests cut, by this
        drain and any before it.

        Cancellation: the rest is cut at once.
        """
        if not self.is_draining:
            self.is_draining = True
            self.detached.close()
            self._pool.notify()
        try:
            with trio.move_on_after(timeout_s):
                if self._take_leave is not None:
                    await self._take_leave()
                self._refuses_new = True
                await self.wait_idle()
        finally:
            self._refuses_new = True
            cut = [one for one in self._live.values() if one.reason is None]
            for stream in cut:
                stream.cancel(EndReason.SHUTDOWN)
            self._num_cut += len(cut)
            self._pool.close()
        await self.wait_idle()
        return self._num_cut

    async def drain_in_background(self, timeout_s: float) -> None:
        """Start a drain that goes on when its waiters leave, unless one has started; wait for it.

        Cancellation: only the waiting ends.
        """
        if self._background_drain is None:
            self._background_drain = trio.Event()
            if self._tasks.is_open:
                self._tasks.start(self._drain_then_set, timeout_s, self._background_drain)
            else:
                self._background_drain.set()
        await self._background_drain.wait()

    async def _drain_then_set(self, timeout_s: float, done: trio.Event) -> None:
        try:
            await self.drain(timeout_s)
        finally:
            done.set()

    async def wait_idle(self) -> None:
        """Wait until no request is live. Cancellation: ends only the waiting."""
        while self._live:
            if self._idle.is_set():
                self._idle = trio.Event()
            await self._idle.wait()


class _RecentIds:
    """The ids added in the last `ABORT_MEMORY_S`, at most `ABORT_MEMORY_MAX`; beyond that, the
    oldest are forgotten. Old ids are removed when this object is used, so no timer is needed."""

    def __init__(self) -> None:
        self._added_at: dict[str, float] = {}

    def add(self, request_id: str) -> None:
        self._added_at.pop(request_id, None)
        self._forget_old()
        if len(self._added_at) >= ABORT_MEMORY_MAX:
            del self._added_at[next(iter(self._added_at))]
        self._added_at[request_id] = trio.current_time()

    def take(self, request_id: str) -> bool:
        """Return whether the id was added, and forget it."""
        self._forget_old()
        return self._added_at.pop(request_id, None) is not None

    def __contains__(self, request_id: str) -> bool:
        self._forget_old()
        return request_id in self._added_at

    def _forget_old(self) -> None:
        limit = trio.current_time() - ABORT_MEMORY_S
        while self._added_at:
            oldest = next(iter(self._added_at))
            if self._added_at[oldest] > limit:
                return
            del self._added_at[oldest]
