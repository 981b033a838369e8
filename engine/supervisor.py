"""Who owns a request: one task and one cancel scope each, from submit to the last event.

Rule 1: every early end is one `Lifetime.cancel(reason)`; the first reason wins (R204).
Rule 2: the client's end is immediate, the engine's part follows within one step: closing a
generation never waits for the step in flight (R10, R152). Rule 3: blocks belong to the core;
the task only supervises, it forwards no token.

A request's task leases a replica, has the prompt prepared, submits to the loop, and waits for the
generation's end.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, overload

import trio

from engine import logs
from engine.core.events import Submit
from engine.core.types import EndReason, Explanation, Request, RequestId
from engine.encode_inputs import EncodeInputs
from engine.encode_requests import EmbedRequest
from engine.encoding import Encoding
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
from engine.generation import Generation, server_deadline
from engine.metrics import Metrics
from engine.prompts import Prompts
from engine.quota import NOWHERE, Origin
from engine.requests import GenerateRequest
from engine.status import AbortOutcome, Capability

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.core.encode_types import EncodeRequest
    from engine.encode_requests import AnyRequest, EncodeRequests
    from engine.pool import Pool
    from engine.replica import Replica
    from engine.threads import Threads

log = logging.getLogger(__name__)

# An abort that comes before its request is remembered; guesses, told by Abort in control.proto.
ABORT_MEMORY_S = 60.0
ABORT_MEMORY_MAX = 10_000


Live: TypeAlias = Generation | Encoding


class Supervisor:
    """Starts and supervises the requests over one pool."""

    def __init__(self, config: EngineConfig, pool: Pool, threads: Threads) -> None:
        self._config = config
        self._pool = pool
        self._live: dict[str, Live] = {}
        self.prompts = Prompts(threads)
        self._encode_inputs = EncodeInputs(threads)
        self._nursery: trio.Nursery | None = None
        self._serials = itertools.count(1)
        self._is_draining = False
        self._num_cut = 0
        self._background_drain: trio.Event | None = None
        # the queue's bound knows only what waits in it, not what loads, tokenises or is parked
        each = config.max_queued_requests + config.max_num_seqs
        self._max_live = each * sum(model.num_replicas for model in config.models)
        self._recently_ended = _RecentIds()
        self._aborts_to_come = _RecentIds()
        self._idle = trio.Event()
        self.metrics = Metrics()

    @property
    def is_draining(self) -> bool:
        """New requests are refused."""
        return self._is_draining

    @property
    def num_live(self) -> int:
        """Requests whose task has not ended."""
        return len(self._live)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the request tasks and the pool until `drain` has ended both."""
        async with trio.open_nursery() as nursery:
            self._nursery = self.prompts.nursery = self._encode_inputs.nursery = nursery
            nursery.start_soon(self._run_pool)
            task_status.started()

    async def _run_pool(self) -> None:
        try:
            await self._pool.run()
        finally:
            # nothing can be served any more; and while this task is there, the nursery is open
            self._nursery = self.prompts.nursery = self._encode_inputs.nursery = None

    # ---- submit

    @overload
    def submit(
        self,
        request: GenerateRequest,
        *,
        buffer: int,
        arrived_at: float | None = None,
        origin: Origin = NOWHERE,
    ) -> Generation: ...
    @overload
    def submit(
        self,
        request: EncodeRequests,
        *,
        buffer: int,
        arrived_at: float | None = None,
        origin: Origin = NOWHERE,
    ) -> Encoding: ...
    def submit(
        self,
        request: AnyRequest,
        *,
        buffer: int,
        arrived_at: float | None = None,
        origin: Origin = NOWHERE,
    ) -> Live:
        """Start a request; never waits and never raises: a refusal is its ``error`` (R59).

        ``arrived_at``: when it reached the server, on Trio's clock, if that was earlier.
        """
        request_id = request.request_id or origin.fallback_id or uuid.uuid4().hex
        core_id = self._core_id(request, request_id)
        generation: Live = (
            Generation(request, request_id, core_id, buffer)
            if isinstance(request, GenerateRequest)
            else Encoding(request, request_id, core_id, buffer)
        )
        generation.quota = origin.quota
        error = self._refusal(request, request_id)
        if error is not None or self._nursery is None:
            self.metrics.count_refusal()
            generation.close(error or ShuttingDown("the engine is closed"))
            return generation
        timeout = request.timeout_s
        if timeout is None:
            timeout = self._config.default_deadline_s
        start = generation.started_at if arrived_at is None else arrived_at
        generation.scope.deadline = server_deadline(start, timeout)
        if request.timeout_s is not None:
            generation.client_deadline = start + request.timeout_s
        generation.on_end = self._count
        self._live[request_id] = generation
        log.debug("registered", extra={"request_id": logs.printable(request_id)})
        self._nursery.start_soon(self._supervise, generation, name=f"request {request_id}")
        return generation

    def _refusal(self, request: AnyRequest, request_id: str) -> TrioletError | None:
        if self._is_draining:
            return ShuttingDown("the server takes no new requests", retry_after_s=5.0)
        if self._aborts_to_come.take(request_id):
            return RequestAborted("the request was aborted by the operator before it arrived")
        live = self._live.get(request_id)
        if live is not None and not live.is_closed:
            return DuplicateRequest(f"request_id {request_id!r} is in use")
        if len(self._live) >= self._max_live:
            return Overloaded(f"the server holds its {self._max_live} requests", retry_after_s=1.0)
        try:
            request.validate()
        except InvalidRequest as error:
            return error
        return None

    def _core_id(self, request: AnyRequest, request_id: str) -> RequestId:
        """The core's name for a request, never used twice: a client may use its own again while a
        step, a posted command or an undelivered event still speaks of the first. The separator is
        a character that no client's id may have (`GenerateRequest.validate`)."""
        if not request.request_id:
            return RequestId(request_id)  # it is a new one
        return RequestId(f"{request_id}\x1f{next(self._serials)}")

    def abort(self, request_id: str) -> AbortOutcome:
        """End a request by the operator's will: now if it is live; as it arrives, if that is
        within a minute. Never waits."""
        generation = self._live.get(request_id)
        if generation is not None and not generation.is_closed:
            generation.cancel(EndReason.ABORTED)
            return AbortOutcome.ABORTED
        if generation is not None or request_id in self._recently_ended:
            return AbortOutcome.ALREADY_ENDED
        self._aborts_to_come.add(request_id)
        return AbortOutcome.REMEMBERED

    def explain(self, request_id: str) -> Explanation:
        """What a live request is doing, and why. Never waits, not for a step either.

        Raises:
            RequestNotFound: no such request is live.
        """
        generation = self._live.get(request_id)
        if generation is None or generation.is_closed:
            raise RequestNotFound(f"no live request has the id {request_id!r}")
        if generation.replica is not None:
            explained = generation.replica.loop.explain(generation.core_id)
            if explained is not None:
                return explained
        waiting_for = {
            "load": "model load",
            "tokenize": "its tokens, which are being made",
            "compile": "its constraint, which is being compiled",
        }
        return Explanation("WAITING", waiting_for.get(generation.phase, "its end"))

    # ---- one request's task

    async def _supervise(self, generation: Live) -> None:
        logs.request_id.set(logs.printable(generation.request_id))
        try:
            with generation.scope:
                await self._generate(generation)
            generation.close(generation.early_end())  # unless it has ended by itself
        except TrioletError as error:
            generation.close(error)
        except Exception as error:
            log.exception("the request's task failed")
            generation.close(EngineBug(repr(error)))
        finally:
            if not generation.is_closed:  # the whole engine is being cancelled
                generation.reason = EndReason.SHUTDOWN
                generation.close(generation.early_end())
            self._end(generation)

    async def _generate(self, generation: Live) -> None:
        """On one replica after another, should they die before they have begun with it."""
        is_to_run = True
        while is_to_run:
            try:
                await self._generate_once(generation)
            except WorkerLost as error:  # before it was in line
                generation.on_lost(error, has_begun=False)
            is_to_run = generation.take_moving()
            if is_to_run:
                log.info("gets in line again: its worker was lost")

    async def _generate_once(self, generation: Live) -> None:
        generation.phase = "load"
        model, needed = generation.request.model, _needed_by(generation)
        cut = partial(generation.cancel, EndReason.ABORTED)
        async with self._pool.lease(model, needed, cut) as replica:
            generation.model = replica.model
            generation.load_s = trio.current_time() - generation.started_at
            generation.phase = "tokenize"
            request = await self._prepare(generation, replica)
            with self._pool.routed(replica, request, cut) as chosen:
                await self._compile_and_run(generation, chosen, request)

    async def _compile_and_run(
        self, generation: Live, replica: Replica, request: Request | EncodeRequest
    ) -> None:
        generation.replica = replica
        constraint = request.constraint if isinstance(request, Request) else None
        if constraint is None or replica.constraints is None:
            await self._run(generation, replica, request)
            return
        generation.phase = "compile"
        async with replica.constraints.held(constraint, self._nursery):
            await self._run(generation, replica, request)

    async def _run(
        self, generation: Live, replica: Replica, request: Request | EncodeRequest
    ) -> None:
        """From the queue to the end."""
        generation.phase = "queued"
        generation.queue(_num_tokens(request))
        replica.loop.submit(Submit(request, generation.credit), generation)
        try:
            with replica.busy_with(_tokens_ahead(request)):
                await generation.wait_turn()
        finally:
            generation.phase = replica.loop.phase_of(request.request_id) or generation.phase
            replica.loop.forget(request.request_id)
            if generation.error is not None or not generation.is_closed:
                reason = generation.reason or EndReason.DEADLINE
                since = generation.cancelled_at
                replica.loop.cancel(request.request_id, reason, generation.phase, since)

    async def _prepare(self, generation: Live, replica: Replica) -> Request | EncodeRequest:
        if isinstance(generation, Generation):
            return await self.prompts.prepare(generation, replica)
        return await self._encode_inputs.prepare_inputs(generation, replica)

    def _end(self, generation: Live) -> None:
        """Forget the request, unless its id is another's by now."""
        if self._live.get(generation.request_id) is generation:
            del self._live[generation.request_id]
        self._recently_ended.add(generation.request_id)
        if not self._live:
            self._idle.set()
        log.debug(
            "unregistered: %s after %d tokens",
            "ok" if generation.error is None else generation.error.reason,
            generation.tokens_done,
        )

    def _count(self, generation: Live) -> None:
        """Count an end, before anybody hears of it."""
        replica, error = generation.replica, generation.error
        if error is None:
            self.metrics.count_end(EndReason.STOP)
        elif generation.reason is not None or isinstance(error, DeadlineExceeded):
            reason = generation.reason or EndReason.DEADLINE
            self.metrics.count_end(reason, generation.phase)
        elif isinstance(error, EngineBug | WorkerLost):
            self.metrics.count_end(EndReason.FAILED, generation.phase)
        else:
            self.metrics.count_refusal()
        if replica is not None:
            replica.processed += error is None
            replica.failed += isinstance(error, (StepFailed, EngineBug, WorkerLost))
            replica.cancelled += generation.reason is EndReason.CANCELLED

    # ---- the end of everything

    def refuse_new(self) -> None:
        """Refuse new requests from now on."""
        if not self._is_draining:
            self._is_draining = True
            self._pool.notify()

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, let running ones finish for ``timeout_s`` seconds, cut the rest,
        and end the pool. The number of requests cut, by this drain and any before it.

        Cancellation: the rest is cut at once.
        """
        self.refuse_new()
        try:
            with trio.move_on_after(timeout_s):
                await self.wait_idle()
        finally:
            cut = [one for one in self._live.values() if one.reason is None]
            for generation in cut:
                generation.cancel(EndReason.SHUTDOWN)
            self._num_cut += len(cut)
            self._pool.close()
        await self.wait_idle()
        return self._num_cut

    async def drain_in_background(self, timeout_s: float) -> None:
        """Start a drain that goes on whoever waits for it, unless one has started; wait for it.

        Cancellation: only the waiting ends.
        """
        if self._background_drain is None:
            self._background_drain = trio.Event()
            if self._nursery is not None:
                self._nursery.start_soon(self._drain_and_tell, timeout_s, self._background_drain)
            else:
                self._background_drain.set()
        await self._background_drain.wait()

    async def _drain_and_tell(self, timeout_s: float, done: trio.Event) -> None:
        try:
            await self.drain(timeout_s)
        finally:
            done.set()

    async def wait_idle(self) -> None:
        """Wait until no request is live."""
        while self._live:
            if self._idle.is_set():
                self._idle = trio.Event()
            await self._idle.wait()


def _needed_by(generation: Live) -> Capability:
    """What a model must be able to do for a request."""
    if isinstance(generation, Generation):
        return Capability.TEXT_TO_TEXT
    is_embed = isinstance(generation.request, EmbedRequest)
    return Capability.TEXT_EMBEDDING if is_embed else Capability.RERANK


def _num_tokens(request: Request | EncodeRequest) -> int:
    return len(request.prompt) if isinstance(request, Request) else request.num_tokens


def _tokens_ahead(request: Request | EncodeRequest) -> int:
    """Tokens that are to be computed for a request, at most."""
    if isinstance(request, Request):
        return len(request.prompt) + request.n * request.stops.max_tokens
    return request.num_tokens


class _RecentIds:
    """The ids added in the last minute, at most `ABORT_MEMORY_MAX`, oldest forgotten first.
    Looked through when it is used: no timer, no wake-up."""

    def __init__(self) -> None:
        self._added_at: dict[str, float] = {}

    def add(self, request_id: str) -> None:
        self._added_at.pop(request_id, None)
        self._forget_old()
        if len(self._added_at) >= ABORT_MEMORY_MAX:
            del self._added_at[next(iter(self._added_at))]
        self._added_at[request_id] = trio.current_time()

    def take(self, request_id: str) -> bool:
        """Was it added? It is forgotten now."""
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
