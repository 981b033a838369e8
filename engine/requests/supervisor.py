"""Supervises requests: each has one task and one cancel scope, from submit to its last event.

Rule 1: every early end is one `RequestStream.cancel(reason)`; the first reason wins.
Rule 2: a request's client gets the end at once, and the engine frees the request's resources within
one step: closing a stream never waits for the step in flight.
Rule 3: this file decides which requests may be live; `engine.requests.serving` takes each from the
lease of a replica to its end. Rule 4: a request's name is its holder and its id. No holder learns
from an answer which ids others use, and an operator's id means the requests of all holders with it.
"""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from engine import logs
from engine.core.common.phases import Phase
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
from engine.requests.progress import ProgressReports
from engine.requests.quota import NOWHERE, Origin
from engine.requests.serving import FeedServing, Serving
from engine.requests.stream import StreamOptions, num_asked
from engine.requests.tasks import RequestTasks
from engine.requests.tokenizing import Tokenizing
from engine.requests.usage import Usage
from engine.status import AbortOutcome, LiveRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from engine.config import EngineConfig
    from engine.images.decoder import DecodeImage
    from engine.pool.pool import Pool
    from engine.replica.threads import Threads
    from engine.requests.kind import ClientRequest, RequestKind
    from engine.requests.readers import Reader
    from engine.requests.stream import RequestStream

    Name = tuple[str, str]  # a request's holder and its id

log = logging.getLogger(__name__)

# How long an abort that comes before its request is remembered, and how many of these aborts are
# remembered. Both are guesses; control.proto states them at Abort.
ABORT_MEMORY_S = 60.0
ABORT_MEMORY_MAX = 10_000

WAITING_FOR = {  # what a request waits for, by its phase, before the core knows of it
    Phase.LOAD: "model load",
    Phase.TOKENIZE: "its tokens, which are being made",
    Phase.DECODE_IMAGE: "its images, which are being decoded",
    Phase.COMPILE: "its constraint, which is being compiled",
    Phase.WRITE: "its images, which are being written, or its reader, which has not taken them",
}


def _count_at_replica(stream: RequestStream[Any]) -> None:
    """Count the end of a request at its replica."""
    if (replica := stream.replica) is not None:
        replica.processed += stream.error is None
        replica.failed += isinstance(stream.error, (StepFailed, EngineBug, WorkerLost))
        replica.cancelled += stream.reason is EndReason.CANCELLED


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
        self.detached = DetachedStreams(self._tasks)
        self.image_files = ImageFiles(self.detached.image_bytes)
        reports = ProgressReports(self._tasks, pool)
        self._servings: dict[type, Serving] = {}  # by the classes of requests
        self._feeds: dict[type, FeedServing] = {}  # the same of requests that submit others
        for kind in kinds:
            preparer = kind.make_preparer(self.tokenizing, self._tasks)
            serving = Serving(
                kind, preparer, pool, reports, self.detached.spare_images, config.share_prefixes
            )
            self._servings |= dict.fromkeys(kind.request_types, serving)
            for request_type, make in kind.feeds.items():
                feeding = FeedServing(make, self.submit, config.stall_timeout_s)
                self._feeds[request_type] = feeding
        self._live: dict[Name, RequestStream[Any]] = {}
        self._num_live = Counter[str]()  # by holder, of those that have any
        self._serials = itertools.count(1)
        self._take_leave = take_leave
        self.is_draining = self._refuses_new = False
        self._num_cut = 0
        self._background_drain: trio.Event | None = None
        # The queue's bound counts only the requests in it, not those that load, tokenise or are
        # parked; so all live requests have a bound of their own.
        each = config.max_queued_requests + config.max_num_seqs
        self._max_live = each * sum(model.num_replicas for model in config.models)
        self._recently_ended = _RecentIds()
        self._aborts_to_come = _RecentIds()
        self._idle = trio.Event()
        self.metrics = EndCounts()
        self.usage = Usage(time.time())

    @property
    def num_live(self) -> int:
        """Requests whose task has not ended, without the parts of others."""
        return self._num_live.total()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the pool and the requests' tasks until `drain` has ended both.

        Cancellation: cancels every request, and waits for the steps in flight.
        """
        try:
            async with self._tasks.running():
                self._tasks.start(self._run_pool)
                task_status.started()
        finally:
            self.detached.close()  # so that the bills of streams that wait are complete

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
        awaits_reader: bool = False,
        part_of: RequestStream[Any] | None = None,
        arrived_at: float | None = None,
        origin: Origin = NOWHERE,
    ) -> RequestStream[Any]:
        """Start a request and return its stream. Never waits and never raises: if the request is
        refused, its stream has the error.

        ``buffer`` is the number of messages that may wait for the reader. ``arrived_at`` is when
        the request reached the server, on Trio's clock, if that was earlier. ``awaits_reader``: the
        request's bill is complete only when its reader has left (`RequestStream.leave`).
        ``part_of`` is the stream whose bill has this request's, which the counters and the lists
        leave out.
        """
        request_id = request.request_id or origin.fallback_id or uuid.uuid4().hex
        is_part = part_of is not None
        num_choices = 0 if is_part else num_asked(request)
        error = self._refusal(request, request_id, origin, num_choices)
        error = error or _begin(num_choices, origin)
        options = StreamOptions(
            request_id,
            self._core_id(request, request_id),
            buffer,
            reader,
            origin,
            arrived_at=arrived_at,
            timeout_s=request.timeout_s if error is None else None,  # else it may be NaN
            longest_s=self._config.default_deadline_s,
            on_end=self._count if part_of is None else _count_at_replica,
            on_bill=partial(self._note_bill, part_of=part_of),
            awaits_reader=awaits_reader,
            on_loss=self.detached.add,
            on_leave=self.detached.remove,
            is_part=is_part,
        )
        if part_of is not None:
            part_of.bill.open_part()
        stream = self._serving_of(request).kind.make_stream(request, options)
        if error is not None:
            stream.close(error)
            return stream
        name = (origin.holder, request_id)
        self._num_live[origin.holder] += name not in self._live and not is_part
        self._live[name] = stream
        self.image_files.add(request.image_bytes)
        if stream.attach_token:
            self.detached.register(stream)
        log.debug("registered", extra={"request_id": logs.printable(request_id)})
        self._tasks.start(
            self._supervise, stream, request.image_bytes, name=f"request {request_id}"
        )
        return stream

    def _serving_of(self, request: ClientRequest) -> Serving | FeedServing:
        kind = type(request)
        return self._feeds[kind] if kind in self._feeds else self._servings[kind]

    def _refusal(
        self, request: ClientRequest, request_id: str, origin: Origin, num_choices: int
    ) -> TrioletError | None:
        if self._refuses_new:
            return ShuttingDown("the server takes no new requests", retry_after_s=5.0)
        if self._aborts_to_come.take(request_id, origin.holder):
            return RequestAborted("the request was aborted before it arrived")
        live = self._live.get((origin.holder, request_id))
        if live is not None and not live.is_closed:
            return DuplicateRequest(f"request_id {request_id!r} is in use")
        if error := self.image_files.refusal(request.image_bytes):
            return error
        try:
            request.validate()
        except InvalidRequest as invalid:
            return invalid
        quota = origin.quota
        if quota is not None and (misfit := quota.misfit(request.priority, num_choices)):
            prefix = "parameters." if type(request) in self._feeds else ""
            return misfit.renamed(lambda field: prefix + field)
        if not self._tasks.is_open:
            return ShuttingDown("the engine is closed")
        if len(self._live) >= self._max_live and not self.detached.make_place():
            return Overloaded(f"the server holds its {self._max_live} requests", retry_after_s=1.0)
        return None

    def _core_id(self, request: ClientRequest, request_id: str) -> RequestId:
        """Return the core's name for a request, which is never used twice.

        A client may use an id again while a step, a posted command or an undelivered event still
        refers to the first request with that id. The separator is a character that no client's id
        may have (`ClientRequest.validate`).
        """
        if not request.request_id:
            return RequestId(request_id)  # the server made the id for this request alone
        return RequestId(f"{request_id}\x1f{next(self._serials)}")

    def abort_all(
        self, request_ids: Sequence[str], only_of: str | None = None
    ) -> list[AbortOutcome]:
        """End requests, each as `abort`. ``only_of`` is the name of the holder who asks and has to
        have each of them, live or ended a moment ago; None stands for the operator.

        Raises:
            RequestNotFound: the holder lacks one of them, and none was ended. Whether another
                holder has it, or whether it is yet to come, is not told.
        """
        if only_of is not None:
            for request_id in request_ids:
                is_live = (only_of, request_id) in self._live
                if not is_live and not self._recently_ended.has(request_id, only_of):
                    raise _not_found(request_id)
        return [self.abort(request_id, only_of) for request_id in request_ids]

    def abort(self, request_id: str, only_of: str | None = None) -> AbortOutcome:
        """End the requests with an id: now if one is live, otherwise when it arrives, if that is
        within `ABORT_MEMORY_S`. Never waits. Unless ``only_of`` is None, only that holder's request
        is meant."""
        named = self._named(request_id, only_of)
        self.detached.abort(request_id, only_of)
        live = [stream for stream in named if not stream.is_closed]
        for stream in live:
            stream.cancel(EndReason.ABORTED)
        if live:
            return AbortOutcome.ABORTED
        if named or self._recently_ended.has(request_id, only_of):
            return AbortOutcome.ALREADY_ENDED
        self._aborts_to_come.add(request_id, only_of)
        return AbortOutcome.REMEMBERED

    def _named(self, request_id: str, only_of: str | None) -> list[RequestStream[Any]]:
        """Return the requests with an id whose tasks have not ended: a holder's, or with None
        all."""
        holders: Iterable[str] = self._num_live if only_of is None else (only_of,)
        names = [(holder, request_id) for holder in holders]
        return [self._live[name] for name in names if name in self._live]

    def num_live_of(self, only_of: str | None) -> int:
        """Return the number of requests whose task has not ended: a holder's, or with None all."""
        return self.num_live if only_of is None else self._num_live[only_of]

    def list_live(self, most: int, only_of: str | None = None) -> tuple[LiveRequest, ...]:
        """Return the ``most`` oldest of the live requests: a holder's, or with None all. Never
        waits."""
        now = trio.current_time()
        found: list[LiveRequest] = []
        for stream in self._live.values():
            if len(found) == most:
                break
            is_listed = not (stream.is_closed or stream.is_part)
            if is_listed and only_of in (None, stream.origin.holder):
                loop = None if stream.replica is None else stream.replica.loop
                phase = (loop and loop.phase_of(stream.core_id)) or stream.phase
                found.append(
                    LiveRequest(
                        stream.request_id,
                        stream.model,
                        phase.value,
                        stream.tokens_done,
                        now - stream.started_at,
                    )
                )
        return tuple(found)

    def explain(self, request_id: str, only_of: str | None = None) -> Explanation:
        """Return what a live request is doing, and why. Never waits, not even for a step.
        ``only_of`` is as for `abort`.

        Raises:
            RequestNotFound: no such request is live, or it is another holder's.
        """
        named = self._named(request_id, only_of)
        stream = next((one for one in named if not one.is_closed), None)
        if stream is None:
            waiting = self.detached.waiting(request_id, only_of)
            if waiting is None:
                raise _not_found(request_id)
            return self.detached.explain(waiting, Explanation("ENDED"))
        explained = None
        if stream.replica is not None:
            explained = stream.replica.loop.explain(stream.core_id)
        if explained is None:
            explained = Explanation("WAITING", WAITING_FOR.get(stream.phase, "its end"))
        return self.detached.explain(stream, explained)

    # ---- one request's task

    async def _supervise(self, stream: RequestStream[Any], image_bytes: int) -> None:
        logs.request_id.set(logs.printable(stream.request_id))
        try:
            with stream.scope:
                await self._serving_of(stream.request).serve(stream)
            stream.close(stream.early_end())  # without effect if the request has ended by itself
        except TrioletError as error:
            stream.close(error)
        except Exception as error:
            log.exception("the request's task failed")
            stream.close(EngineBug(repr(error)))
        finally:
            if not stream.is_closed:  # the whole engine is being cancelled
                stream.cancel(EndReason.SHUTDOWN)
                stream.close(stream.early_end(EndReason.SHUTDOWN))
            self.image_files.remove(image_bytes)
            if stream.holder is not None:
                stream.holder.counted.end(stream.num_asked)
            self._end(stream)

    def _end(self, stream: RequestStream[Any]) -> None:
        """Forget the request, unless another request has its name by now."""
        holder = stream.origin.holder
        if self._live.get((holder, stream.request_id)) is stream:
            del self._live[holder, stream.request_id]
            self._num_live[holder] -= not stream.is_part
            if not self._num_live[holder]:
                del self._num_live[holder]
        if not stream.is_part:
            self._recently_ended.add(stream.request_id, holder)
        if not self._live:
            self._idle.set()
        log.debug(
            "unregistered: %s after %d tokens",
            "ok" if stream.error is None else stream.error.reason,
            stream.tokens_done,
        )

    def _count(self, stream: RequestStream[Any]) -> None:
        """Count the end of a request, before its reader is notified of it."""
        error = stream.error
        if error is None:
            self.metrics.count_end(EndReason.STOP)
        elif stream.reason is not None or isinstance(error, DeadlineExceeded):
            reason = stream.reason or EndReason.DEADLINE
            self.metrics.count_end(reason, stream.phase.value)
        elif isinstance(error, EngineBug | WorkerLost):
            self.metrics.count_end(EndReason.FAILED, stream.phase.value)
        else:
            self.metrics.count_refusal()
        _count_at_replica(stream)

    def _note_bill(
        self, stream: RequestStream[Any], part_of: RequestStream[Any] | None = None
    ) -> None:
        """Add the record of a request whose bill is complete, or add it to that of the request of
        which it is a part. What was computed counts against the holder's limit at once."""
        record = stream.bill.record(stream)
        if (holder := stream.holder) is not None and type(stream.request) not in self._feeds:
            used = record.prompt_tokens - record.cached_tokens + record.completion_tokens
            if record.step_s:  # else it has left the queue before a step
                holder.counted.spend(used, trio.current_time())
        if stream.replica is None:  # the request may name what the server does not have
            named = self._pool.registry.names_of(stream.model or stream.request.model)
            record = replace(record, model=named[0], adapter=named[1])
        if part_of is None:
            self.usage.add(record)
        else:
            part_of.bill.add_part(part_of, stream)

    # ---- the end of everything

    async def drain(self, timeout_s: float) -> int:
        """Await ``take_leave``, refuse new requests, let running ones finish, all within
        ``timeout_s`` seconds; then cancel those that are left, and end the pool. Return the number
        of requests cancelled, by this drain and any before it.

        Cancellation: the live requests are cancelled at once.
        """
        if not self.is_draining:
            self.is_draining = True
            self.detached.close()
            self._pool.registry.on_change()  # the engine's own state has changed
        try:
            with trio.move_on_after(timeout_s):
                if self._take_leave is not None:
                    await self._take_leave()
                self._refuses_new = True
                await self.wait_idle()
        finally:
            self._refuses_new = True
            cut = [stream for stream in self._live.values() if stream.reason is None]
            for stream in cut:
                stream.cancel(EndReason.SHUTDOWN)
            self._num_cut += sum(not stream.is_part for stream in cut)
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
    oldest are forgotten. Old ids are removed when this object is used, so no timer is needed.

    Each was added for a holder's request, or with None for everybody's.
    """

    def __init__(self) -> None:
        self._added_at: dict[tuple[str | None, str], float] = {}
        self._num_of = Counter[str]()  # by id, the holders for whom it was added

    def add(self, request_id: str, holder: str | None) -> None:
        """Add an id."""
        self._forget_old()
        self._forget((holder, request_id))
        if len(self._added_at) >= ABORT_MEMORY_MAX:
            self._forget(next(iter(self._added_at)))
        self._added_at[holder, request_id] = trio.current_time()
        self._num_of[request_id] += 1

    def take(self, request_id: str, holder: str) -> bool:
        """Return whether the id was added for the holder's request or everybody's; forget it."""
        self._forget_old()
        found = [name for one in (holder, None) if (name := (one, request_id)) in self._added_at]
        for name in found:
            self._forget(name)
        return bool(found)

    def has(self, request_id: str, holder: str | None) -> bool:
        """Return whether the id was added for the holder's request, or with None anybody's."""
        self._forget_old()
        if holder is None:
            return request_id in self._num_of
        return (holder, request_id) in self._added_at

    def _forget_old(self) -> None:
        limit = trio.current_time() - ABORT_MEMORY_S
        while self._added_at:
            oldest = next(iter(self._added_at))
            if self._added_at[oldest] > limit:
                return
            self._forget(oldest)

    def _forget(self, name: tuple[str | None, str]) -> None:
        """Forget an id, if it is known."""
        if self._added_at.pop(name, None) is not None:
            self._num_of[name[1]] -= 1
            if not self._num_of[name[1]]:
                del self._num_of[name[1]]


def _begin(num_choices: int, origin: Origin) -> TrioletError | None:
    """Count a request's choices against its holder's limits, or return why it may not begin."""
    if origin.quota is not None:
        try:
            origin.quota.counted.begin(num_choices, trio.current_time())
        except Overloaded as error:
            return error
    return None


def _not_found(request_id: str) -> RequestNotFound:
    return RequestNotFound(f"no live request has the id {request_id!r}")
