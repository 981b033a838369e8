"""Run a drawn world and watch its readers from outside.

The watchers know nothing of the scheduler: they see what readers see, and the engine's counters at
the end. Each violation that they raise breaks an invariant of engine/README.md.
"""

import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import trio

from engine.api.engine import KINDS, Engine, open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.common.core import Plan
from engine.core.common.events import Journaled, PauseMode
from engine.core.common.types import EndReason
from engine.core.text.types import Constraint
from engine.errors import (
    EngineBug,
    InvalidRequest,
    MemoryExhausted,
    ModelNotFound,
    NoWorkers,
    RequestNotFound,
    ShuttingDown,
    SpawnFailed,
    SpawnTimeout,
    WorkerLost,
)
from engine.replica.replica import AnyRunner, ProcessWorker
from engine.requests.detached import DetachedStreams
from engine.requests.encode.prepare import InputPreparer
from engine.requests.encode.values import EmbedStreamRequest
from engine.requests.image_generation.prepare import ImageGenerationPreparer
from engine.requests.image_generation.values import DrawRequest
from engine.requests.quota import Origin, Quota
from engine.requests.stream import RequestStream
from engine.requests.supervisor import ABORT_MEMORY_S
from engine.requests.text.chat_values import Chat
from engine.requests.text.prepare import TextPreparer
from engine.requests.text.stream import TextStream
from engine.requests.text.values import GenerateRequest
from engine.status import AbortOutcome, Capability
from engine.worker.fakes.text import FakeScript
from grpc_service.access.unread_calls import UNREAD_CALLS_MAX, UnreadCalls
from grpc_service.services.backend import Backend
from grpc_service.services.call_writer import CallWriter
from tests.simulator import (
    adapters,
    counting,
    embed_feeds,
    http_door,
    pool_faults,
    resumption,
    thinking,
    vision,
)
from tests.simulator import image_generation_clients as drawings
from tests.simulator.bill_watch import BillWatch
from tests.simulator.clients import BAD_FORM, FRAGILE, MODEL, SLEEPY
from tests.simulator.determinism import VirtualThreads, run_deterministically
from tests.simulator.drafters import drafter_of_world, model_of_world
from tests.simulator.encode_clients import EMBEDDER, RERANKER
from tests.simulator.encode_oracle import APART, LABELLERS, MAX_INPUT_LEN
from tests.simulator.oracle import echo_of, expected_output, is_end, prompt_of
from tests.simulator.readers import (
    SLACK_S,
    DrawnBug,
    EncodeReader,
    ListReader,
    Reader,
    SimulatedCall,
    SimulatedConnection,
    TextReader,
    read,
    serve,
)
from tests.simulator.watch import CoreWatch, Outcome, Violation
from tests.simulator.workers import (
    BreakingArtist,
    BreakingCounter,
    BreakingEncoder,
    BreakingRunner,
    GroupWorker,
    VirtualWatchdog,
    WorkerProcess,
)
from tests.simulator.workload import Client, World, draw_world

AnyFake: TypeAlias = BreakingRunner | BreakingEncoder | BreakingArtist
PATIENCE_S = 200_000.0  # virtual seconds, far more than any world's work; then a request starves
REFUSALS = (
    *(NoWorkers, MemoryExhausted, ModelNotFound, SpawnFailed, SpawnTimeout, ShuttingDown),
    *(EngineBug, WorkerLost),
)
LOAD_ERRORS: dict[str, type[BaseException]] = {
    "refused": SpawnFailed,
    "raised": RuntimeError,
    "exited": SystemExit,
}
BOUNDS_OF_UNREAD = (  # most calls with unread answers, of a connection and in all; mostly small
    *((0, UNREAD_CALLS_MAX), (1, UNREAD_CALLS_MAX)),
    *((64, 0), (64, 1), (64, UNREAD_CALLS_MAX)),
)
MOMENT_S = 1e-6  # more than the rounding error of a jump of the clock
SLEEPY_LOAD_S = 45.0  # longer than the 30 s that requests wait for a load


@dataclass
class SimulatedRpc:
    """The record of a simulated client's call (`grpc_service.access.rpc_record.Rpc`)."""

    call: SimulatedCall
    stream: RequestStream[Any] | None = None


def _reader_of(client: Client, num_clients: int) -> Reader:
    """Return a reader for a client's request, in a world of so many clients."""
    match client.request:
        case GenerateRequest():
            return TextReader(client, num_clients=num_clients)
        case DrawRequest():
            return drawings.DrawReader(client)
        case counting.Count():
            return ListReader(client)
        case EmbedStreamRequest():
            return embed_feeds.FeedReader(client)
    return EncodeReader(client)


class Simulation:
    """One world's run. ``over_http``: the clients over the wire come by the HTTP port, except those
    that may attach to their streams, and those that send streams."""

    def __init__(self, world: World, *, over_http: bool = False) -> None:
        self.world = world
        self._over_http = over_http
        self._front: http_door.Front
        self.outcome = Outcome(world.seed)
        self._threads = VirtualThreads()
        self._watchdog = VirtualWatchdog(world.config.step_timeout_s)
        self._workers: list[tuple[str, WorkerProcess]] = []  # each with its model's name
        self._rng = random.Random(world.seed ^ 0x5EED)
        self._image_rng = random.Random(world.seed ^ 0x1A6E)
        self._group_rng = random.Random(world.seed ^ 0x6A0E)
        self._generations: list[RequestStream[Any]] = []
        self._watch = CoreWatch(len(world.clients), self.outcome, self._generations)
        self._bills = BillWatch()
        self._writers: list[CallWriter] = []  # the writers of calls over the wire
        self._windows = random.Random(world.seed ^ 0x31D0)
        most, self._most_unread_in_all = BOUNDS_OF_UNREAD[world.seed % len(BOUNDS_OF_UNREAD)]
        self._connections = [SimulatedConnection(number == 0, most) for number in range(8)]
        self._engine: Engine | None = None
        self._quota = Quota("clients in process", max_queued_tokens=world.quota_tokens)
        draws = random.Random(f"holders {world.seed}")  # other draws stay the same
        self._holders = [  # of the clients over the wire
            Quota(f"holder {number}", weight=draws.choice([1, 1, 3]))
            for number in range(draws.choice([1, 2, 7]))
        ]
        self._aborted_at: dict[str, float] = {}
        self._has_been_full = False  # a full engine may end streams that wait for clients
        self._num_asked = 0  # requests over HTTP
        self._num_continued = 0  # requests that continue a cut stream
        self._load_failures = Counter(dict(world.pool.load_failures))
        self._adapter_names = adapters.Names()
        self._names = Counter(client.request.request_id for client in world.clients)
        self._markers = thinking.MARKERS if thinking.FAULT in world.faults else {}
        self._cut_at = math.inf if world.cancelled_at_s is None else world.cancelled_at_s

    def run(self) -> Outcome:
        """Run the world to its end.

        Raises:
            Violation, or whatever the engine raised.
        """
        files = drawings.slow_files(self._threads.note_sleep, 2.5 * self.world.step_s)
        windows = embed_feeds.small_windows()
        with self._watch.watch_schedulers(), self._bills.watch_loops(), files, windows:
            try:
                run_deterministically(self._main, self.world.seed)
            finally:
                if self._watch.violation is not None:
                    raise self._watch.violation
        return self.outcome

    def _make_runner(self, model: ModelConfig, config: EngineConfig) -> AnyRunner:
        runner = self._make_fake(model)
        if pool_faults.FAULT not in self.world.faults:
            return runner
        worker = self._make_worker(runner)
        self._workers.append((model.name, worker))
        assert isinstance(worker, ProcessWorker)
        return worker  # by `__getattr__` it has the runner's other methods

    def _make_worker(self, runner: AnyFake) -> WorkerProcess:
        num_ranks = self.world.pool.num_ranks
        if num_ranks == 1 or not isinstance(runner, BreakingRunner):
            return WorkerProcess(runner, self._draw_death)
        return GroupWorker(
            runner,
            num_ranks,
            self._draw_death,
            self._draw_rank_failures,
            self._threads.note_sleep,
            self._note_violation,
        )

    def _note_violation(self, what: str) -> None:
        self._watch.violation = self._watch.violation or Violation(what)

    def _make_fake(self, model: ModelConfig) -> AnyFake:
        world = self.world
        script = FakeScript(
            step_s=world.step_s,
            token_s=world.token_s,
            load_s=SLEEPY_LOAD_S if model.name == SLEEPY else 0.5,
            encode_s=5 * world.step_s,
            decode_s=world.step_s / 5,
            image_s=world.step_s / 10,
            chat_template="<think></think><tool_call></tool_call>",  # the parser looks for both
            load_error=self._draw_load_error(model.name),
            markers=self._markers,
            eos_at=is_end if world.has_ends else None,
            sleep=self._threads.note_sleep,
            plan_fault=self._draw_fault,
            sample_fault=partial(self._draw_row_fault, world.row_fault_share / 10),
            compile=self._compile,
            adapters=adapters.scripted(),
            adapter_s=2 * world.step_s,
            draft=drafter_of_world(world.seed),
            draft_model=model_of_world(world.seed),
        )
        if model.name in (EMBEDDER, RERANKER, *APART, *LABELLERS):
            embeds = Capability.IMAGE_EMBEDDING if world.has_images else Capability.TEXT_EMBEDDING
            kinds = {EMBEDDER: embeds, RERANKER: Capability.RERANK, **APART, **LABELLERS}
            kind = kinds[model.name]
            # encode requests have few rows and steps, so that more of these must fail
            script.encode_fault = partial(self._draw_fault, times=3.0)
            script.sample_fault = partial(self._draw_row_fault, world.row_fault_share)
            encoder = BreakingEncoder(kind, max_model_len=MAX_INPUT_LEN, script=script)
            encoder.broken_at = world.broken_at_step
            return encoder
        if model.name in (drawings.MODEL, counting.MODEL):
            rng = self._image_rng  # of its own: the steps of other models draw the same without it
            script.image_fault = partial(self._draw_fault, rng=rng)
            script.sample_fault = partial(self._draw_row_fault, world.row_fault_share, rng)
            make = BreakingArtist if model.name == drawings.MODEL else BreakingCounter
            artist = make(script=script)
            artist.broken_at = world.broken_at_step
            return artist
        runner = BreakingRunner(
            num_blocks=world.num_blocks,
            block_size=world.block_size,
            max_model_len=world.config.max_model_len or 0,
            script=script,
            sees=vision.FAULT in world.faults and model.name == MODEL,
            num_states=world.num_states,
        )
        runner.broken_at = world.broken_at_step
        return runner

    def _draw_load_error(self, name: str) -> BaseException | None:
        if name == FRAGILE or self._load_failures[name] > 0:
            self._load_failures[name] -= 1
            return LOAD_ERRORS[self.world.load_error]("drawn")
        return None

    # ---- faults, drawn as they come up

    def _draw_fault(
        self, plan: Plan, times: float = 1.0, rng: random.Random | None = None
    ) -> BaseException | None:
        """Return what a step raises, if anything. ``times`` multiplies the world's shares of
        faults."""
        world, rng = self.world, rng or self._rng
        if rng.random() < world.hiccup_share:
            self._threads.note_sleep(50 * world.step_s)
        if rng.random() < min(0.5, times * world.oom_share):
            return MemoryError("drawn")
        if rng.random() < times * world.step_fault_share:
            return RuntimeError("drawn")
        return None

    def _draw_death(self, worker: WorkerProcess) -> None:
        """Draw whether the worker dies in this step, at once or because the step hangs."""
        share, rng = self.world.pool.death_share, self._rng
        if not share or rng.random() >= share:
            return
        self._watch.note_death()
        if rng.random() < pool_faults.HANG_SHARE:
            self._threads.note_wait(partial(self._hang, worker))
            raise worker.lost()
        worker.kill("drawn")

    def _draw_rank_failures(self, num_ranks: int) -> dict[int, bool]:
        """Draw which ranks fail by themselves in a step, and whether before their collective."""
        rng = self._group_rng
        share = self.world.pool.death_share * pool_faults.RANK_FAILURE_SHARE
        if rng.random() >= share:
            return {}
        failures = {rank: rng.random() < 0.5 for rank in range(num_ranks) if rng.random() < 0.7}
        if len(failures) < num_ranks or len(set(failures.values())) > 1:
            self._watch.note_death()
        return failures

    async def _hang(self, worker: WorkerProcess) -> None:
        """Do nothing, as a hung step, until the watchdog has the worker killed."""
        await trio.sleep(self._watchdog.limit_s)
        self._watchdog.look()
        if not worker.is_dead:
            self._watch.violation = Violation("a worker whose step hangs was not killed")

    def _kill(self, model: str, number: int) -> None:
        """Kill one of the model's living workers, at whatever moment."""
        alive = [worker for name, worker in self._workers if name == model and not worker.is_dead]
        if alive:
            self._watch.note_death()
            worker = alive[number % len(alive)]
            if isinstance(worker, GroupWorker):
                worker.kill_rank(number)
            else:
                worker.kill("drawn")

    def _draw_row_fault(self, share: float, rng: random.Random | None = None) -> str | None:
        return "sample" if (rng or self._rng).random() < share else None

    def _compile(self, constraint: Constraint) -> None:
        self._threads.note_sleep(20 * self.world.step_s)
        if constraint.source == BAD_FORM:
            raise InvalidRequest.of(constraint.field, "drawn")

    # ---- the world

    async def _main(self) -> None:
        with trio.CancelScope(deadline=self._cut_at) as scope:
            await self._serve()
        for generation in self._generations:
            if not generation.is_closed:
                raise Violation(f"{generation} outlives the engine")
        for writer in self._writers:
            if not writer.has_left:
                raise Violation(f"{writer} was not left")
        if self._engine is not None and (left := self._engine.statistics().totals.memory_reserved):
            raise Violation(f"{left} bytes are reserved by nobody")
        self._bills.check_all_have(self._generations)
        if scope.cancelled_caught:
            self.outcome.ends["cut"] += sum(
                getattr(g.error, "reason", "") == "SHUTTING_DOWN" for g in self._generations
            )

    async def _serve(self) -> None:
        world = self.world
        async with open_engine(
            world.config,
            kinds=(*KINDS, counting.CountKind()) if counting.FAULT in world.faults else KINDS,
            make_runner=self._make_runner,
            threads=self._threads,
            watchdog=self._watchdog,
            on_event=self._note,
            on_change=self._look_at_change,
        ) as engine:
            self._engine = engine
            self._bills.follow(engine)
            make_place = partial(self._make_place, engine.detached)
            engine.detached.make_place = make_place  # type: ignore[method-assign]
            backend = Backend(engine, self._unread_calls())
            async with self._opened(engine, backend), trio.open_nursery() as nursery:
                for client in world.clients:
                    nursery.start_soon(self._client, engine, backend, client)
                    if client.abort_before_s is not None:
                        nursery.start_soon(self._abort_early, engine, client)
                nursery.start_soon(self._operate, engine, backend)
                for operation in world.pool.operations:
                    nursery.start_soon(self._move_model, engine, *operation)
                for change in world.adapters:
                    nursery.start_soon(self._change_adapter, engine, change)
            with trio.fail_after(PATIENCE_S):
                await engine.wait_idle()
            self._check_ended(engine)
            if resumption.FAULT in world.faults:
                await trio.sleep(resumption.WINDOW_MAX_S + SLACK_S)  # of streams that have ended
            self._check_idle(engine)
            if backend.unread_calls.count():
                raise Violation(f"{backend.unread_calls.count()} unread_calls without a handler")
        self.outcome.statistics = engine.statistics().totals
        for client in [one for one in world.clients if not one.must_fail][:1]:
            for request in (client.request, replace(client.request, request_id="")):
                late = engine.submit(request, buffer=2)
                if getattr(late.error, "reason", "") != "SHUTTING_DOWN":
                    raise Violation(f"{late} was accepted by a closed engine")

    @asynccontextmanager
    async def _opened(self, engine: Engine, backend: Backend) -> AsyncIterator[None]:
        """Have the HTTP door, if this world has one, while the block runs."""
        if not self._over_http:
            yield
            return
        self._front = http_door.Front(engine, backend.unread_calls, self._writers.append)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._front.run)
            yield
            nursery.cancel_scope.cancel(reason="no client is left")

    def _check_ended(self, engine: Engine) -> None:
        """Check that an abort of the last request that succeeded finds it ended."""
        ended = [one for one in self._generations if one.closed_at and one.error is None]
        last = max(ended, key=lambda one: one.closed_at or 0.0, default=None)
        if last is None or trio.current_time() >= (last.closed_at or 0.0) + ABORT_MEMORY_S:
            return
        if (outcome := engine.abort(last.request_id)) is not AbortOutcome.ALREADY_ENDED:
            raise Violation(f"{last}: after its end, an abort found it {outcome}")

    def _note(self, event: Journaled) -> None:
        """Watch the inputs and outputs of cores. At each plan, have one request explained, in turn;
        this draws no numbers and wakes no task.
        """
        self._watch.note(event)
        if self._engine is None or not self._generations:
            return
        plan_id = getattr(event, "plan_id", None)  # only plans have one
        if plan_id is None:
            return
        generation = self._generations[plan_id % len(self._generations)]
        try:
            said = self._engine.explain(generation.request_id)
        except RequestNotFound:
            broken = "" if generation.is_closed else "is live and cannot be explained"
        else:
            waits = said.state == "RUNNING" or bool(said.waiting_for)
            broken = "" if waits else f"waits for nothing: {said}"
        if broken:
            self._watch.violation = self._watch.violation or Violation(f"{generation} {broken}")
            raise self._watch.violation

    async def _operate(self, engine: Engine, backend: Backend) -> None:
        for at, operation in self.world.operations:
            await trio.sleep_until(at)
            verb, _, mode = operation.partition(" ")
            if verb == "pause":
                engine.pause(PauseMode(mode))
            elif verb == "resume":
                engine.resume()
            elif verb == "reset":
                engine.reset_prefix_cache()
            else:
                await self._look(backend)
        if self.world.drain_at_s is not None:
            await trio.sleep_until(self.world.drain_at_s)
            engine.resume()
            await self._drain(engine)

    async def _move_model(
        self, engine: Engine, at: float, verb: str, model: str, number: float
    ) -> None:
        """Load, unload or kill as the operator would; the engine may refuse it."""
        await trio.sleep_until(at)
        if verb == "kill":
            return self._kill(model, int(number))
        with suppress(NoWorkers, MemoryExhausted, SpawnFailed, ShuttingDown, EngineBug):
            if verb == "load":
                await engine.load_model(model, int(number))
            else:
                await engine.unload_model(model, number)

    async def _change_adapter(self, engine: Engine, change: adapters.Operation) -> None:
        """Load or unload an adapter as the operator would; the engine may refuse it."""
        await trio.sleep_until(change.at_s)
        with suppress(*REFUSALS):
            if change.directory:
                aliases = (adapters.ALIAS,) if change.name == adapters.NAMES[0] else ()
                await engine.adapters.load(change.name, change.directory, aliases=aliases)
            else:
                await engine.adapters.unload(change.name, change.drain_s)

    def _look_at_change(self) -> None:
        if self._engine is None:
            return
        self._adapter_names.note(self._engine, trio.current_time())
        totals = self._engine.statistics().totals
        if totals.memory_reserved > totals.memory_limit:
            self._watch.violation = self._watch.violation or Violation(f"too much: {totals}")
            raise self._watch.violation

    async def _drain(self, engine: Engine) -> None:
        limit = self.world.drain_timeout_s
        until = trio.current_time() + limit
        if self.world.drain_is_left:
            with trio.move_on_after(limit / 2):
                await engine.drain_in_background(limit)
            await engine.drain_in_background(limit)
        else:
            await engine.drain(limit)
        if not engine.is_draining or trio.current_time() > until:
            raise Violation(f"drained until {trio.current_time()} instead of {until}")

    async def _look(self, backend: Backend) -> None:
        """Make an operator's calls over the wire. None may disturb the world, or fail for another
        reason than a missing model."""
        is_served = pool_faults.FAULT not in self.world.faults
        if self.world.drain_at_s is None and self.world.broken_at_step is None and is_served:
            await self._look_at_tokens(backend.engine)
        statistics = backend.statistics().totals
        if backend.telemetry().statistics.totals != statistics:
            raise Violation(f"the telemetry has other counts: {statistics}")
        if statistics.free_blocks > statistics.total_blocks:
            raise Violation(f"more blocks free than there are: {statistics}")
        if statistics.free_states > statistics.total_states:
            raise Violation(f"more state slots free than there are: {statistics}")
        for holder in (self._quota, *self._holders):
            self._look_as_user(backend.engine, holder.name)

    def _look_as_user(self, engine: Engine, holder: str) -> None:
        """Ask for a holder: it sees, explains and ends requests of its own alone."""
        live = [one for one in self._generations if not one.is_closed]
        own = {one.request_id for one in live if one.origin.holder == holder}
        listed = {one.request_id for one in engine.list_live(len(live), holder)}
        if listed != own or engine.num_live_of(holder) < len(own):
            raise Violation(f"{holder} has {own} and sees {listed}")
        ever = {x.request_id for x in self._generations if x.origin.holder == holder}
        for name in [one.request_id for one in live]:
            with suppress(RequestNotFound):
                engine.explain(name, holder)
                if name not in ever:
                    raise Violation(f"{name} is explained to {holder}")
            if name not in own:  # the holder may have had a request with this id, which has ended
                with suppress(RequestNotFound):
                    outcomes = engine.abort_all([name], holder)
                    if name not in ever or outcomes != [AbortOutcome.ALREADY_ENDED]:
                        raise Violation(f"{holder} ends {name}")
        for name in sorted((ever - own) - {one.request_id for one in live})[:3]:
            with suppress(RequestNotFound):
                if engine.abort_all([name], holder) != [AbortOutcome.ALREADY_ENDED]:
                    raise Violation(f"{name} of {holder} has ended, and is aborted")

    async def _look_at_tokens(self, engine: Engine) -> None:
        ids = [3, 4] * 700
        text = "".join(f"<{token}>" for token in ids)
        chat = Chat(({"role": "user", "content": text},))
        spans, _ = await engine.tokenize("", text=text)
        of_chat, _ = await engine.tokenize("", chat=chat)
        found = [span.token_id for span in spans], [span.token_id for span in of_chat]
        if found[0] != ids or found[1][-len(ids) :] != ids:
            raise Violation("wrong tokens of a text or a chat")
        if await engine.detokenize("", ids) != text:
            raise Violation("a wrong text of tokens")
        try:
            await engine.detokenize("", [5, 1000])
        except InvalidRequest:
            return
        raise Violation("a text of a token that there is not")

    # ---- clients

    async def _client(self, engine: Engine, backend: Backend, client: Client) -> None:
        await trio.sleep_until(client.arrival_s)
        reader: Reader | None = _reader_of(client, len(self.world.clients))
        while reader is not None:
            stream = await self._read_one(engine, backend, reader)
            following: Reader | None = None
            if reader.has_left and isinstance(reader, TextReader):
                reader = await self._attach(engine, backend, stream, reader)
            if reader.has_left and isinstance(reader, TextReader):
                number = self._num_continued + 1
                following = resumption.continued(reader, trio.current_time(), number)
                self._num_continued += following is not None
            reader = following

    async def _attach(
        self, engine: Engine, backend: Backend, stream: RequestStream[Any], reader: TextReader
    ) -> TextReader:
        """Attach to a stream whose connection was lost, again and again if it is lost again. Return
        the last reader; its ``has_left`` is set if the stream was given up."""
        while reader.has_left and reader.lost_at is not None:
            await trio.sleep(reader.client.away_s)
            for token, holder in ((reader.attach_token, self._quota), ("x", stream.holder)):
                with suppress(RequestNotFound):
                    found = engine.detached.attachable(stream.request_id, token, holder)
                    raise Violation(f"{found}: anybody can attach")
            away_s = trio.current_time() - reader.lost_at
            taken = self._take_up(engine, backend, stream, reader)
            if taken is None:
                self._check_given_up(stream, reader, away_s)
                return reader
            if away_s > (getattr(stream, "resume_window_s", None) or 0.0) + SLACK_S:
                raise Violation(f"{stream}: attached after its window")
            async with trio.open_nursery() as nursery:
                if reader.client.again_s is not None:
                    nursery.start_soon(self._serve_attached, engine, taken)
                    await trio.sleep(reader.client.again_s)
                    again = self._take_up(engine, backend, stream, taken.reader)
                    if again is not None:
                        taken.is_abandoned, taken = True, again
                if reader.client.again_s is None or again is not None:
                    await self._serve_attached(engine, taken)
            assert isinstance(taken.reader, TextReader)
            reader = taken.reader
            if not self._waits(engine, stream):
                await stream.wait_closed()
                self._check_reader(stream, reader)
        return reader

    def _take_up(
        self, engine: Engine, backend: Backend, stream: RequestStream[Any], reader: TextReader
    ) -> SimulatedCall | None:
        """Attach to a stream of which ``reader`` has a part, and return the call; None if the
        stream is gone."""
        following, received = resumption.attached(reader)
        writer, call = self._make_call(backend, following)
        try:
            token = reader.attach_token
            found = engine.detached.attachable(stream.request_id, token, stream.holder)
        except RequestNotFound:
            return None
        if found is not stream:
            raise Violation(f"{stream}: attached to {found}")
        engine.detached.attach(found, writer, received)
        self._writers.append(writer)
        call.stream, call.writer = stream, writer
        following.attach_token = token
        return call

    async def _serve_attached(self, engine: Engine, call: SimulatedCall) -> None:
        """Serve a call of Attach. Cancellation: as `serve`."""
        try:
            await serve(call.writer, call)
        finally:
            assert isinstance(call.stream, TextStream)
            engine.detached.uncount(call.stream)

    def _check_given_up(
        self, stream: RequestStream[Any], reader: TextReader, away_s: float
    ) -> None:
        """Check that a stream which its client cannot attach to was not given up too early."""
        window_s = getattr(stream, "resume_window_s", None) or 0.0
        may_end = bool({"drain", "engine_cancelled", "broken_runner"} & self.world.faults)
        may_end = may_end or self._has_been_full
        was_lost = reader.attach_token and not (stream.is_closed and stream.error is None)
        if was_lost and away_s < window_s - SLACK_S and not may_end:
            raise Violation(f"{stream}: given up {away_s} s after its loss, of {window_s}")

    def _make_place(self, detached: DetachedStreams) -> bool:
        """Note the call; act as `DetachedStreams.make_place`, which a full server calls."""
        self._has_been_full = True
        return DetachedStreams.make_place(detached)

    def _waits(self, engine: Engine, stream: RequestStream[Any]) -> bool:
        """Return whether a stream waits for its client."""
        return engine.detached.is_waiting(stream)

    async def _read_one(
        self, engine: Engine, backend: Backend, reader: Reader
    ) -> RequestStream[Any]:
        """Send a client's request once, and read its stream to the end or to its cut."""
        client = reader.client
        with trio.move_on_after(PATIENCE_S) as scope:
            if client.over_wire:
                generation = await self._call(engine, backend, reader)
            else:
                generation = engine.submit(
                    client.request,
                    buffer=client.buffer,
                    awaits_reader=True,
                    origin=Origin(quota=self._quota),
                )
                self._generations.append(generation)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._wait_for_end, generation, client, client.arrival_s)
                    nursery.start_soon(self._cancel, engine, generation, client)
                    try:
                        await read(generation, reader)
                    finally:
                        generation.close_reader()
                    nursery.cancel_scope.cancel(reason="read to the end")
        if scope.cancelled_caught:
            raise Violation(f"{client.request.request_id} starves")
        if not self._waits(engine, generation):
            self._check_reader(generation, reader)
        return generation

    async def _call(self, engine: Engine, backend: Backend, reader: Reader) -> RequestStream[Any]:
        """Make one RPC: a handler with a scope, which its client may cancel."""
        client, scope = reader.client, trio.CancelScope()
        await trio.sleep(self.world.latency_s)
        if isinstance(reader, TextReader):
            reader.heard_at = trio.current_time()
        is_grpcs_own = isinstance(client.request, EmbedStreamRequest)
        is_grpcs_own |= getattr(client.request, "resume_window_s", None) is not None
        if self._over_http and not is_grpcs_own:
            return await self._ask(engine, backend, reader)
        holder = self._holders[round(1e6 * client.arrival_s) % len(self._holders)]
        holder.enter()
        writer, call = self._open(backend, reader, holder)
        stream = call.stream
        self._generations.append(stream)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_for_end, stream, client, stream.started_at)
            if client.cancel_at_s is not None and not client.aborts:
                nursery.start_soon(self._cancel_call, scope.cancel, stream, client)
            else:
                nursery.start_soon(self._cancel, engine, stream, client)
            try:
                with scope:
                    await serve(writer, call)
            finally:
                holder.leave()
                self._check_cut(stream)
            nursery.cancel_scope.cancel(reason="served to the end")
        if not self._waits(engine, stream):
            await stream.wait_closed()
        if not reader.has_left and reader.error is not stream.error:
            raise Violation(f"{stream}: {stream.error!r} came over as {reader.error!r}")
        return stream

    async def _ask(self, engine: Engine, backend: Backend, reader: Reader) -> RequestStream[Any]:
        """Make one request over HTTP, on a connection that its client may close."""
        client, self._num_asked = reader.client, self._num_asked + 1
        most, unread_calls = self._connections[0].most_unread, backend.unread_calls
        http = http_door.HttpClient(
            self._num_asked,
            reader,
            unread_calls,
            self._is_window_closed,
            most,
            may_fail=bool(self.world.bug_share),
        )
        self._front.take(http)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(http.serve, self._front.door)
            await http.has_begun.wait()
            if reader.leaves_now:
                http.leave()
            stream = http.call.stream
            self._generations.append(stream)
            nursery.start_soon(self._wait_for_end, stream, client, stream.started_at)
            if client.cancel_at_s is not None and not client.aborts:
                nursery.start_soon(self._cancel_call, http.leave, stream, client)
            else:
                nursery.start_soon(self._cancel, engine, stream, client)
            await http.has_ended.wait()
            self._check_cut(stream)
            await stream.wait_closed()
            nursery.cancel_scope.cancel(reason="served to the end")
        if not reader.has_left and reader.error is not stream.error:
            raise Violation(f"{stream}: {stream.error!r} came over as {reader.error!r}")
        return stream

    def _check_cut(self, stream: RequestStream[Any]) -> None:
        if trio.current_time() > self._cut_at + MOMENT_S:
            raise Violation(f"the handler of {stream} outlives its server")

    def _open(
        self, backend: Backend, reader: Reader, holder: Quota
    ) -> tuple[CallWriter, SimulatedCall]:
        """Submit a request of a holder as `Inference` does."""
        writer, call = self._make_call(backend, reader)
        self._writers.append(writer)
        engine = backend.engine
        call.stream = engine.submit(
            reader.client.request,
            buffer=engine.config.stream_buffer,
            reader=writer,
            awaits_reader=True,
            origin=Origin(quota=holder),
        )
        return writer, call

    def _make_call(self, backend: Backend, reader: Reader) -> tuple[CallWriter, SimulatedCall]:
        """Return a call on the next connection, and its writer."""
        connection = self._connections[len(self._writers) % len(self._connections)]
        unread_calls = backend.unread_calls
        call = SimulatedCall(connection, reader, unread_calls, self._is_window_closed)
        is_kept = getattr(reader.client.request, "resume_window_s", None) is not None
        writer = CallWriter(
            SimulatedRpc(call),
            unread_calls,
            call.encode,
            call.encode_short,
            is_kept=is_kept,
        )
        return writer, call

    def _unread_calls(self) -> UnreadCalls:
        """Return the count of unread calls, with the world's bounds."""
        most = self._connections[0].most_unread
        return UnreadCalls(trio.current_time, most=most, most_in_all=self._most_unread_in_all)

    def _is_window_closed(self) -> bool:
        """Return whether a write finds its client's window closed, unless a bug is planted."""
        if self._windows.random() < self.world.bug_share:
            raise DrawnBug
        return self._windows.random() < self.world.closed_share

    async def _wait_for_end(
        self, generation: RequestStream[Any], client: Client, start: float
    ) -> None:
        await generation.wait_closed()
        timeout = client.request.timeout_s
        if timeout is not None and trio.current_time() > start + timeout:
            raise Violation(f"{generation} ended after its deadline")

    async def _cancel(self, engine: Engine, generation: RequestStream[Any], client: Client) -> None:
        if client.cancel_at_s is None:
            return
        await trio.sleep(client.cancel_at_s)
        was_closed = generation.is_closed
        if not client.aborts:
            generation.cancel(EndReason.CANCELLED)
        elif self._names[client.request.request_id] == 1:
            outcome = engine.abort(client.request.request_id)
            if (outcome is AbortOutcome.ABORTED) == was_closed:
                raise Violation(f"{generation}: an abort found it {outcome}")
        else:  # requests share this id, and an abort by id would end all of them
            generation.cancel(EndReason.ABORTED)
        if not was_closed:
            asked = trio.current_time()
            await generation.wait_closed()
            if trio.current_time() != asked:
                raise Violation(f"{generation}: a cancel waited for the engine")

    async def _cancel_call(
        self, leave: Callable[[], object], generation: RequestStream[Any], client: Client
    ) -> None:
        """Let the client leave: its reset cancels the handler."""
        await trio.sleep((client.cancel_at_s or 0.0) + self.world.latency_s)
        leave()
        asked = trio.current_time()
        await generation.wait_closed()
        if trio.current_time() != asked:
            raise Violation(f"{generation}: a client's cancel waited for the engine")

    async def _abort_early(self, engine: Engine, client: Client) -> None:
        """Abort a request before it arrives, as an operator may."""
        await trio.sleep_until(client.arrival_s - (client.abort_before_s or 0.0))
        if self._names[client.request.request_id] == 1:
            outcome = engine.abort(client.request.request_id)
            if outcome is AbortOutcome.REMEMBERED:
                self._aborted_at[client.request.request_id] = trio.current_time()

    # ---- watchers

    def _check_reader(self, generation: RequestStream[Any], reader: Reader) -> None:
        request, error = reader.client.request, generation.error
        self._bills.heard(generation, reader)
        if not generation.is_closed:
            raise Violation(f"{request.request_id}: the reader ended, the request did not")
        reason = "" if error is None else error.reason
        self.outcome.ends[reason or "ok"] += 1
        aborted_at = self._aborted_at.get(request.request_id, math.inf)
        is_remembered = 0 < generation.started_at - aborted_at < ABORT_MEMORY_S
        if is_remembered and reason not in ("ABORTED", "SHUTTING_DOWN"):
            raise Violation(f"{request.request_id}: ended by {error!r} and not by its abort")
        if reader.client.must_fail and not reason:
            raise Violation(f"{request.request_id}: succeeded, though it cannot")
        allowed = self._allowed_ends(reader.client)
        if reason and reason not in allowed:
            raise Violation(f"{request.request_id}: ended by {error!r}, allowed: {allowed}")
        if isinstance(error, EngineBug) and self.world.broken_at_step is None:
            raise Violation(f"{request.request_id}: {error!r}")
        if reason != generation.account(0.0).get("reason", ""):
            raise Violation(f"{generation}: {error!r} is logged as {generation.account(0.0)}")
        if any(v < 0 for v in generation.account(0.0).values() if isinstance(v, float)):
            raise Violation(f"{generation}: negative seconds: {generation.account(0.0)}")
        is_whole = not reason and not reader.has_left
        if isinstance(reader, TextReader) and reader.prompt_tokens is not None:
            self._check_output(reader, generation.origin.holder, is_whole=is_whole)
        elif is_whole:
            reader.check_whole()

    def _adapter_of(self, reader: TextReader, request: GenerateRequest, owner: str) -> str:
        """Return the digest of the adapter that computed a request: of all that its name stood for
        while it ran, the one whose tokens it got."""
        if request.model not in (*adapters.NAMES, adapters.ALIAS):
            return ""
        since = reader.client.arrival_s
        for digest in sorted(
            self._adapter_names.digests(request.model, since, trio.current_time())
        ):
            wanted = [
                expected_output(
                    request,
                    choice,
                    has_ends=self.world.has_ends,
                    adapter=digest,
                    markers=self._markers,
                    owner=owner,
                )
                for choice in reader.tokens
            ]
            got = [tuple(tokens) for tokens in reader.tokens.values()]
            if all(own == one.tokens[: len(own)] for own, one in zip(got, wanted, strict=True)):
                return digest
        raise Violation(f"{request.request_id}: tokens of no content that its name stood for")

    def _check_output(self, reader: TextReader, owner: str, *, is_whole: bool) -> None:
        """Check that each choice got the start of its expected output, or all of it."""
        request = reader.client.request
        assert isinstance(request, GenerateRequest)
        echo = echo_of(request, self._markers)
        name = request.request_id
        if reader.prompt_tokens != len(prompt_of(request)):
            raise Violation(f"{name}: started with {reader.prompt_tokens} tokens")
        adapter, has_ends = self._adapter_of(reader, request, owner), self.world.has_ends
        for choice in range(request.n or 1):
            got = reader.tokens.get(choice, [])
            end = reader.finished.get(choice)
            expected = expected_output(
                request,
                choice,
                has_ends=has_ends,
                adapter=adapter,
                markers=self._markers,
                owner=owner,
            )
            text = echo + expected.text
            if tuple(got) != expected.tokens[: len(got)]:
                raise Violation(f"{name}/{choice}: wrong tokens")
            if not text.startswith(reader.text.get(choice, "")):
                raise Violation(f"{name}/{choice}: wrong text")
            if is_whole and end is None:
                raise Violation(f"{name}/{choice}: succeeded without an end")
            if end is None:
                continue
            if (end.reason, end.matched) != (expected.reason, expected.matched):
                raise Violation(f"{name}/{choice}: {end}, not {expected}")
            if end.usage.reasoning_tokens != expected.num_reasoning:
                raise Violation(f"{name}/{choice}: {end.usage}, not {expected.num_reasoning}")
            heard = request.continuation.choices if request.continuation is not None else ()
            had = heard[choice].token_ids if heard and not heard[choice].finished else ()
            is_new = not (heard and heard[choice].finished)
            if is_new and end.usage.resumed_tokens != len(had):
                raise Violation(f"{name}/{choice}: {end.usage}, but {len(had)} were continued")
            if len(got) != end.usage.completion_tokens or len(got) != len(expected.tokens):
                raise Violation(f"{name}/{choice}: {len(got)} tokens, {end}")
            if reader.text.get(choice, "") != text:
                raise Violation(f"{name}/{choice}: not all of its text")

    def _allowed_ends(self, client: Client) -> set[str]:
        world, request = self.world, client.request
        causes = {
            "CANCELLED": client.leave_after is not None or (client.over_wire and world.bug_share),
            "ABORTED": False,
            "DEADLINE_EXCEEDED": request.timeout_s is not None,
            "DEADLINE_INFEASIBLE": request.timeout_s is not None,
            "READER_STALLED": client.stall_after is not None or client.delay_s,
            "STEP_FAILED": world.row_fault_share
            or world.step_fault_share
            or world.oom_share
            or world.pool.num_ranks > 1,
            "QUEUE_FULL": "bursts" in world.faults,
            "PAUSED": "pauses" in world.faults,
            "SHUTTING_DOWN": world.drain_at_s is not None or world.cancelled_at_s is not None,
            "ENGINE_BUG": world.broken_at_step is not None,
            "DUPLICATE_REQUEST": self._names[request.request_id] > 1,
            "REQUEST_TOO_LARGE": self._may_not_fit(client),
        }
        if client.cancel_at_s is not None:
            causes["ABORTED" if client.aborts else "CANCELLED"] = True
        if client.abort_before_s is not None:
            causes["ABORTED"] = True
        if "pauses" in world.faults:
            causes["ABORTED"] = True
        drawn = client.may_end | {reason for reason, may in causes.items() if may}
        return drawn | (pool_faults.MAY_END if pool_faults.FAULT in world.faults else set())

    def _may_not_fit(self, client: Client) -> bool:
        if not isinstance(client.request, GenerateRequest):
            return False
        n = client.request.n or 1
        can_run = min(self.world.config.max_num_seqs, client.buffer)
        return n > can_run or (n > 1 and "memory_pressure" in self.world.faults)

    def _check_idle(self, engine: Engine) -> None:
        """Check that no blocks, slots, images or tokens are held after all requests have ended."""
        totals = engine.statistics().totals
        if engine.detached.count:
            raise Violation(f"{engine.detached.count} streams wait after their windows")
        if totals.total_blocks != totals.free_blocks:
            raise Violation(f"{totals.total_blocks - totals.free_blocks} blocks are held at rest")
        if totals.total_states != totals.free_states:
            num_held = totals.total_states - totals.free_states
            raise Violation(f"{num_held} state slots are held at rest")
        live = (totals.running, totals.waiting, totals.parked, totals.ending, engine.num_live)
        if any(live):
            raise Violation(f"not idle at the end: {totals}")
        has_lost_steps = self.world.broken_at_step is not None or self._watch.num_deaths > 0
        for generation in self._generations:  # slots promised to a lost step are not given back
            if generation.credit.reserved and not has_lost_steps:
                raise Violation(f"{generation} has slots promised to no step")
        for serving in engine._supervisor._servings.values():
            if serving.reports._num_watched:
                raise Violation(f"{serving.reports._num_watched} reports go on at rest")
            preparer = serving.preparer
            has_images = isinstance(
                preparer, InputPreparer | ImageGenerationPreparer | TextPreparer
            )
            if has_images and (held := preparer.image_memory.num_bytes):
                raise Violation(f"{held} bytes of images are held at rest")
        if files := engine._supervisor.image_files.num_bytes:
            raise Violation(f"{files} bytes of images' files are counted at rest")
        for quota in (self._quota, *self._holders):
            if quota.queued_tokens or quota.num_requests:
                held = f"{quota.num_requests} requests and {quota.queued_tokens} tokens"
                raise Violation(f"{held} of {quota.name} are held at rest")
        ended = totals.requests_total
        counted = sum(getattr(ended, name) for name in ended.__slots__)
        asked = len(self.world.clients) + self._num_continued
        if counted != asked:
            raise Violation(f"{counted} ends counted of {asked} requests")
        self._bills.check(engine, self._generations)


def simulate(
    seed: int,
    *,
    num_requests: int = 200,
    faults: frozenset[str] | None = None,
    over_http: bool = False,
) -> Outcome:
    """Draw and run one world."""
    world = draw_world(seed, num_requests=num_requests, faults=faults)
    return Simulation(world, over_http=over_http).run()


__all__ = ["Outcome", "Simulation", "Violation", "simulate"]
