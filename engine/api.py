"""The engine as a Trio program sees it.

    async with open_engine(config) as engine:
        async with engine.generate(GenerateRequest(text="Once upon a time")) as stream:
            async for event in stream:
                ...

Rule 1: leaving ``generate``'s block ends the generation, leaving ``open_engine``'s drains.
Rule 2: what a client can be told is raised as a `TrioletError`; all else is a bug of ours.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import trio

from engine.config import EngineConfig
from engine.core.events import Pause, PauseMode, ResetPrefixCache, Resume
from engine.core.types import EndReason
from engine.errors import InvalidRequest, RequestCancelled, RequestTooLarge, ShuttingDown
from engine.pool import Pool
from engine.quota import NOWHERE, Origin
from engine.status import LEVELS, Capability, Counts, EngineStatistics, ModelState, ReplicaCounts
from engine.supervisor import Supervisor
from engine.telemetry import EngineTelemetry, ReplicaSnapshot
from engine.threads import Threads, WorkerThreads
from engine.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from engine.config import ModelConfig
    from engine.core.plan import TokenSpan
    from engine.core.types import Explanation
    from engine.encode_requests import (
        AnyRequest,
        EmbedEvent,
        EmbedRequest,
        EncodeRequests,
        RerankEvent,
        RerankRequest,
    )
    from engine.encoding import Encoding
    from engine.entry import Entry
    from engine.generation import Generation, Lifetime
    from engine.load_watch import LoadWatch
    from engine.loop import Deliveries
    from engine.pool import FindCapability, RunnerFactory
    from engine.replica import AnyRunner, OnEvent, Replica
    from engine.requests import Chat, GenerateRequest, StreamEvent
    from engine.status import AbortOutcome, ModelStatus


EventT = TypeVar("EventT")

TOKENIZE_TOKENS_MAX = 100_000  # guess: about 3 MiB of answer, half a second to build


class Stream(Generic[EventT]):
    """The events of one request: Started; Tokens, or an Embedding or Score for each input; and one
    Finished per choice.

    Iterating ends after the last event of a request that succeeded, and raises its
    `TrioletError` after the last event of one that did not.
    """

    def __init__(self, generation: Lifetime[Any]) -> None:
        self._generation = generation

    @property
    def request_id(self) -> str:
        return self._generation.request_id

    def __aiter__(self) -> Stream[EventT]:
        return self

    async def __anext__(self) -> EventT:
        try:
            event: EventT = await self._generation.receive()
            return event
        except trio.EndOfChannel:
            if self._generation.error is not None:
                raise self._generation.error from None
            raise StopAsyncIteration from None
        except trio.ClosedResourceError:
            raise RequestCancelled("the block of the stream was left") from None


class Engine:
    """A running engine; made by `open_engine`. All methods belong to its Trio thread."""

    def __init__(self, config: EngineConfig, pool: Pool, supervisor: Supervisor) -> None:
        self.config = config
        self._pool = pool
        self._supervisor = supervisor

    # ---- generating and encoding

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Stream[StreamEvent]]:
        """Run a request; a refusal is raised at the first event.

        Cancellation, or leaving the block early: the generation ends; its blocks are free
        after at most one step.
        """
        with self._streaming(request) as generation:
            yield Stream(generation)

    @asynccontextmanager
    async def embed(self, request: EmbedRequest) -> AsyncIterator[Stream[EmbedEvent]]:
        """Make one vector per input, each sent as it is ready; a refusal is raised at the first
        event, before any of them.

        Cancellation, or leaving the block early: the request ends, and is out of the encoder
        after at most one step.
        """
        with self._streaming(request) as encoding:
            yield Stream(encoding)

    @asynccontextmanager
    async def rerank(self, request: RerankRequest) -> AsyncIterator[Stream[RerankEvent]]:
        """Score every document; as `embed`. With ``top_n`` the scores come sorted, at the end."""
        with self._streaming(request) as encoding:
            yield Stream(encoding)

    @contextmanager
    def _streaming(self, request: AnyRequest) -> Iterator[Lifetime[Any]]:
        lifetime = self._supervisor.submit(request, buffer=self.config.in_process_buffer)
        try:
            yield lifetime
        finally:
            lifetime.close_reader()

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
    ) -> Generation | Encoding:
        """Start a request of any kind whose reader the caller drives (`Lifetime`). Never waits."""
        return self._supervisor.submit(request, buffer=buffer, arrived_at=arrived_at, origin=origin)

    # ---- text and tokens

    async def tokenize(
        self,
        model: str,
        *,
        text: str | None = None,
        chat: Chat | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[tuple[TokenSpan, ...], int]:
        """The tokens of a text or of a chat as its template renders it, with the characters
        each came from; and the model's max_model_len.

        Raises:
            InvalidRequest: not exactly one input. RequestTooLarge: more tokens than one answer
                holds. And as `Pool.lease`.
        """
        if (text is None) == (chat is None):
            raise InvalidRequest.of("input", "set exactly one of text and chat")
        async with self._pool.lease(model, _text_if_unnamed(model)) as replica:
            add = add_special_tokens
            if chat is not None:
                text = await self._supervisor.prompts.render_chat(replica, chat)
                add = bool(add)
            prompts, text, adds = self._supervisor.prompts, text or "", add is not False
            # ids first: they are cheap to make, and tell whether the rest can be answered
            if chat is not None:
                count = len(await prompts.chat_ids(replica, text, adds))
            else:
                count = len(await prompts.tokenize(replica, text, add_special_tokens=adds))
            if count > TOKENIZE_TOKENS_MAX:
                raise RequestTooLarge.of(
                    "text" if chat is None else "chat",
                    f"has {count} tokens, of at most {TOKENIZE_TOKENS_MAX} in one answer",
                )
            spans = await prompts.encode_spans(replica, text, add_special_tokens=adds)
            return spans, replica.info.max_model_len

    async def detokenize(
        self, model: str, ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """The text of token ids.

        Raises:
            InvalidRequest: an id outside the vocabulary. And as `Pool.lease`.
        """
        async with self._pool.lease(model, _text_if_unnamed(model)) as replica:
            return await self._supervisor.prompts.decode(
                replica, ids, skip_special_tokens=skip_special_tokens
            )

    # ---- views

    def list_models(self) -> tuple[ModelStatus, ...]:
        """Every configured model, in the order of the configuration."""
        return tuple(self._pool.status(entry) for entry in self._pool.entries.values())

    def get_model(self, name: str) -> ModelStatus:
        """One model, by name or alias.

        Raises:
            ModelNotFound: no such model.
        """
        return self._pool.status(self._pool.entry(name))

    async def wait_ready(self, name: str = "") -> None:
        """Wait until a model is ready.

        Raises:
            SpawnFailed, SpawnTimeout, ModelNotFound: as `Pool.lease`.
        """
        async with self._pool.lease(name):
            pass

    def statistics(self) -> EngineStatistics:
        """The counters as they stand; never waits for a step."""
        replicas = tuple(
            ReplicaCounts(
                entry.config.name,
                replica.replica_id,
                ModelState.DEGRADED if replica.loop.is_hung else replica.state,
                _replica_counts(replica),
                "" if entry.pause is None else entry.pause.mode.value,
            )
            for entry in self._pool.entries.values()
            for replica in entry.replicas
        ) + tuple(
            ReplicaCounts(entry.config.name, replica_id, ModelState.DEGRADED, Counts())
            for entry in self._pool.entries.values()
            for replica_id in entry.degraded_ids
        )
        totals = _sum([replica.counts for replica in replicas])
        totals["requests_total"] = self._supervisor.metrics.requests_total
        totals["memory_reserved"] = self._pool.memory.total_reserved
        totals["memory_limit"] = self._pool.memory.total_limit
        return EngineStatistics(Counts(**totals), replicas)

    def telemetry(self) -> EngineTelemetry:
        """`statistics`, and how long things took; never waits for a step."""
        replicas = [one for entry in self._pool.entries.values() for one in entry.replicas]
        early = self._supervisor.metrics.early_ends
        return EngineTelemetry(
            self.statistics(),
            tuple(
                ReplicaSnapshot(
                    replica.model,
                    replica.replica_id,
                    getattr(replica.loop.scheduler.statistics(), "plans_discarded", 0),
                    replica.loop.telemetry.snapshot() if replica.loop.telemetry else None,
                    replica.process.rss_bytes() if replica.process else None,
                )
                for replica in replicas
            ),
            models={one.name: one.can_be_asked for one in self.list_models()},
            deaths={one.config.name: one.num_deaths for one in self._pool.entries.values()},
            degraded={one.config.name: one.num_degraded for one in self._pool.entries.values()},
            deadlines_missed={
                phase: count
                for (phase, reason), count in early.items()
                if reason == EndReason.DEADLINE.value
            },
            num_draining=self.num_live if self.is_draining else 0,
        )

    def progress(self) -> Sequence[Entry]:
        """The pool's entries, for showing how far loads are."""
        return tuple(self._pool.entries.values())

    @property
    def deliveries(self) -> Deliveries:
        """Told whenever events go out to their requests: for whoever carries them on."""
        return self._pool.deliveries

    # ---- operating

    def watch_load(self, name: str, replicas: int | None = None) -> LoadWatch:
        """Load a model, or more replicas of it, and tell how far that is (`Pool.watch_load`).
        Never waits.

        Raises:
            ModelNotFound: no such model. ShuttingDown, NoWorkers: it cannot be loaded now.
        """
        return self._pool.watch_load(name, replicas)

    async def load_model(self, name: str, replicas: int | None = None) -> ModelStatus:
        """Load a model, or more replicas of it, as far as there is room, and wait for that.

        Raises:
            SpawnFailed, MemoryExhausted: it failed. And as `watch_load`.
        Cancellation: the load goes on.
        """
        watch = self.watch_load(name, replicas)
        while await watch.next() is not None:
            pass
        return self.get_model(name)

    async def unload_model(self, name: str, drain_s: float | None = None) -> None:
        """Take a model out of memory (`Pool.unload`); ``drain_s`` None: the drain timeout.

        Raises:
            ModelNotFound: no such model. ShuttingDown: everything is being unloaded.
        Cancellation: the unload goes on.
        """
        limit = self.config.drain_timeout_s if drain_s is None else drain_s
        await self._pool.unload(name, limit)

    def pause(self, mode: PauseMode, model: str = "") -> None:
        """Pause a model's scheduler, or every one's (D19). Pausing again changes the mode.

        Raises:
            ModelNotFound: no such model.
        """
        self._pool.post(Pause(mode), model)

    def resume(self, model: str = "") -> None:
        """Undo `pause`; without one, nothing.

        Raises:
            ModelNotFound: no such model. ShuttingDown: there is nothing to resume any more.
        """
        if self.is_draining:
            raise ShuttingDown("the server was drained, which resume does not undo; start it again")
        self._pool.post(Resume(), model)

    def reset_prefix_cache(self, model: str = "") -> None:
        """Forget every cached prefix of a model, or of all. Raises as `pause`."""
        self._pool.post(ResetPrefixCache(), model)

    def abort(self, request_id: str) -> AbortOutcome:
        """End a request by the operator's will (`Supervisor.abort`)."""
        return self._supervisor.abort(request_id)

    def explain(self, request_id: str) -> Explanation:
        """Why a live request is where it is (`Supervisor.explain`).

        Raises:
            RequestNotFound: no such request is live.
        """
        return self._supervisor.explain(request_id)

    # ---- the end

    def refuse_new(self) -> None:
        """Refuse new requests from now on; running ones go on. `drain` ends them."""
        self._supervisor.refuse_new()

    async def drain(self, timeout_s: float | None = None) -> int:
        """Refuse new requests, let running ones finish for up to ``timeout_s`` seconds (the
        configured drain timeout), cut the rest. The number cut, by earlier drains too.

        Cancellation: cuts the rest at once.
        """
        limit = self.config.drain_timeout_s if timeout_s is None else timeout_s
        return await self._supervisor.drain(limit)

    async def wait_idle(self) -> None:
        """Wait until no request is live and every scheduler has let go of its last step."""
        await self._supervisor.wait_idle()
        for entry in self._pool.entries.values():
            for replica in list(entry.replicas):
                await replica.loop.wait_idle()

    async def drain_in_background(self, timeout_s: float | None = None) -> None:
        """As `drain`, for a caller that may leave: cancelling ends only its waiting."""
        limit = self.config.drain_timeout_s if timeout_s is None else timeout_s
        await self._supervisor.drain_in_background(limit)

    @property
    def is_draining(self) -> bool:
        return self._supervisor.is_draining

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return self._supervisor.num_live


def _replica_counts(replica: Replica) -> Counts:
    stats = replica.loop.scheduler.statistics()
    names = {field.name for field in fields(Counts)}
    known = {name: value for name, value in asdict(stats).items() if name in names}
    if replica.loop.has_died:  # what it held has gone with it; its worker is still being closed
        known |= dict.fromkeys(LEVELS & known.keys(), 0)
    return Counts(**known, memory_reserved=replica.reservation.num_bytes)


def _sum(counts: Sequence[Counts]) -> dict[str, Any]:
    names = [field.name for field in fields(Counts) if field.name != "requests_total"]
    return {name: sum(getattr(count, name) for count in counts) for name in names}


def _text_if_unnamed(model: str) -> Capability | None:
    """Whose tokens are meant: for no name, those of the first model that generates text."""
    return None if model else Capability.TEXT_TO_TEXT


def make_torch_runner(model: ModelConfig, config: EngineConfig) -> AnyRunner:
    """The runner of a text model from transformers, or of an encoder from sentence-transformers;
    imports torch when it loads."""
    from engine.model.factory import make_runner

    return make_runner(model, config)


def _unknown_capability(model: ModelConfig) -> None:
    return None


def capability_by_files(model: ModelConfig) -> Capability | None:
    """What a model is for, by the files that are here; None: they are not."""
    from engine.model.capability import find

    return find(model.model, model.revision)


@asynccontextmanager
async def open_engine(
    config: EngineConfig | None = None,
    *,
    make_runner: RunnerFactory = make_torch_runner,
    threads: Threads | None = None,
    on_change: Callable[[], None] = lambda: None,
    on_event: OnEvent | None = None,
    watchdog: Watchdog | None = None,
    find_capability: FindCapability | None = None,
) -> AsyncIterator[Engine]:
    """Start an engine; its models load in the background (`Engine.wait_ready`).

    ``make_runner`` and ``threads`` are the seams for fakes and virtual time. ``on_change`` is
    called on the Trio thread whenever a model's state changes, ``on_event`` with everything that
    goes into and out of a scheduler (`engine.core.journal` writes it down). ``watchdog`` is for
    whoever wants more of it than reports of hung steps (`Watchdog.leave`). ``find_capability``
    tells what a model is for before it is loaded, where its configuration does not; None: its
    files do, if ``make_runner`` is our own.

    Cancellation, or an exception from the block: running requests are cut at once; otherwise
    leaving the block drains for the configured time.
    """
    config = config or EngineConfig()
    if watchdog is None and threads is None:  # virtual time has no hung steps
        watchdog = Watchdog(config.step_timeout_s)
    own_threads = WorkerThreads()
    if find_capability is None:
        is_own = make_runner is make_torch_runner
        find_capability = capability_by_files if is_own else _unknown_capability
    threads = threads or own_threads
    pool = Pool(config, make_runner, threads, on_change, on_event, watchdog, find_capability)
    supervisor = Supervisor(config, pool, threads)
    engine = Engine(config, pool, supervisor)
    with closing(own_threads), _running(watchdog):
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            try:
                yield engine
            except BaseException:
                nursery.cancel_scope.cancel(reason="the engine's block raised")
                raise
            await engine.drain()


@contextmanager
def _running(watchdog: Watchdog | None) -> Iterator[None]:
    """Let the watchdog look, and tell this Trio run, while the block lasts."""
    if watchdog is None:
        yield
        return
    token = trio.lowlevel.current_trio_token()

    def tell(callback: Callable[[], None]) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(callback)

    watchdog.start(tell)
    try:
        yield
    finally:
        watchdog.stop()


__all__ = ["Engine", "ModelState", "Stream", "make_torch_runner", "open_engine"]
