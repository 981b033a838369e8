"""Runs a drawn world and watches its readers from outside.

The watchers know nothing of the scheduler: they see what readers see, and the books at the end.
Each of their sentences is an invariant of engine/README.md.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import trio

from engine.api import open_engine
from engine.core import journal
from engine.core.events import Finished, PauseMode, Tokens
from engine.core.types import EndReason
from engine.errors import EngineBug, SpawnFailed
from engine.model.fake import FakeRunner, FakeScript
from engine.requests import Started
from tools.simulator.clients import FRAGILE, SLEEPY
from tools.simulator.determinism import VirtualThreads, run_deterministically
from tools.simulator.oracle import echo_of, expected_output, is_end, prompt_of
from tools.simulator.watch import CoreWatch, Outcome, Violation
from tools.simulator.workload import Client, World, draw_world

if TYPE_CHECKING:
    from engine.api import Engine
    from engine.config import EngineConfig, ModelConfig
    from engine.core.plan import StepPlan, StepResult
    from engine.generation import Generation

PATIENCE_S = 200_000.0  # virtual: far above any drawn world's work; beyond it somebody starves
LOAD_ERRORS = {
    "refused": SpawnFailed("drawn"),
    "raised": RuntimeError("drawn"),
    "exited": SystemExit("drawn"),
}
SLEEPY_LOAD_S = 45.0  # above the 30 s its waiters wait


@dataclass
class _Reader:
    """What one client has seen."""

    client: Client
    prompt_tokens: int | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    has_left: bool = False


class BreakingRunner(FakeRunner):
    """A fake that from step ``broken_at`` on answers for fewer rows than it was asked."""

    broken_at: int | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if self.broken_at is None or self.steps <= self.broken_at:
            return result
        return replace(result, plan_id=result.plan_id + 1)  # type: ignore[operator]


class Simulation:
    """One world's run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.outcome = Outcome(world.seed)
        self._threads = VirtualThreads()
        self._rng = random.Random(world.seed ^ 0x5EED)
        self._watch = CoreWatch(world.config, len(world.clients), self.outcome)
        self._generations: list[Generation] = []
        self._names = Counter(client.request.request_id for client in world.clients)

    def run(self) -> Outcome:
        """Run the world to its end.

        Raises:
            Violation, or whatever the engine let out.
        """
        with self._watch.watch_transitions():
            try:
                run_deterministically(self._main, self.world.seed)
            finally:
                if self._watch.violation is not None:
                    raise self._watch.violation
        return self.outcome

    def _make_runner(self, model: ModelConfig, config: EngineConfig) -> FakeRunner:
        world = self.world
        is_fragile, is_sleepy = model.name == FRAGILE, model.name == SLEEPY
        runner = BreakingRunner(
            num_blocks=world.num_blocks,
            block_size=world.block_size,
            max_model_len=world.config.max_model_len or 0,
            script=FakeScript(
                step_s=world.step_s,
                token_s=world.token_s,
                load_s=SLEEPY_LOAD_S if is_sleepy else 0.5,
                load_error=LOAD_ERRORS[world.load_error] if is_fragile else None,
                eos_at=is_end if world.has_ends else None,
                sleep=self._threads.note_sleep,
                plan_fault=self._draw_fault,
                sample_fault=self._draw_row_fault,
            ),
        )
        runner.broken_at = world.broken_at_step
        return runner

    # ---- faults, drawn as they come up

    def _draw_fault(self, plan: StepPlan) -> BaseException | None:
        world, rng = self.world, self._rng
        if rng.random() < world.hiccup_share:
            self._threads.note_sleep(50 * world.step_s)
        if rng.random() < world.oom_share:
            return MemoryError("drawn")
        if rng.random() < world.step_fault_share:
            return RuntimeError("drawn")
        return None

    def _draw_row_fault(self) -> str | None:
        return "sample" if self._rng.random() < self.world.row_fault_share / 10 else None

    # ---- the world

    async def _main(self) -> None:
        cancelled_at = self.world.cancelled_at_s
        with trio.CancelScope(deadline=math.inf if cancelled_at is None else cancelled_at) as scope:
            await self._serve()
        for generation in self._generations:
            if not generation.is_closed:
                raise Violation(f"{generation} outlives the engine")
        if scope.cancelled_caught:
            self.outcome.ends["cut"] += sum(
                getattr(g.error, "reason", "") == "SHUTTING_DOWN" for g in self._generations
            )

    async def _serve(self) -> None:
        world = self.world
        async with open_engine(
            world.config,
            make_runner=self._make_runner,
            threads=self._threads,
            on_event=self._watch.note,
        ) as engine:
            async with trio.open_nursery() as nursery:
                for client in world.clients:
                    nursery.start_soon(self._client, engine, client)
                nursery.start_soon(self._operate, engine)
            with trio.fail_after(PATIENCE_S):
                await engine.wait_idle()
            self._check_idle(engine)
        self.outcome.statistics = engine.statistics().totals
        late = engine.submit(world.clients[0].request, buffer=2) if world.clients else None
        if late is not None and getattr(late.error, "reason", "") != "SHUTTING_DOWN":
            raise Violation(f"{late} was accepted by a closed engine")

    async def _operate(self, engine: Engine) -> None:
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
                await self._look(engine)
        if self.world.drain_at_s is not None:
            await trio.sleep_until(self.world.drain_at_s)
            engine.resume()
            until = trio.current_time() + self.world.drain_timeout_s
            await engine.drain(self.world.drain_timeout_s)
            if not engine.is_draining or trio.current_time() > until:
                raise Violation(f"drained until {trio.current_time()} instead of {until}")

    async def _look(self, engine: Engine) -> None:
        """An operator looks around: none of it may disturb, or fail but for want of a model."""
        if self.world.drain_at_s is None and self.world.broken_at_step is None:
            spans, _ = await engine.tokenize("", text="<3><4>" * 1000)
            if [span.token_id for span in spans] != [3, 4] * 1000:
                raise Violation("wrong tokens of a text")
        statistics = engine.statistics().totals
        if statistics.free_blocks > statistics.total_blocks:
            raise Violation(f"more blocks free than there are: {statistics}")

    async def _client(self, engine: Engine, client: Client) -> None:
        await trio.sleep_until(client.arrival_s)
        generation = engine.submit(client.request, buffer=client.buffer)
        self._generations.append(generation)
        reader = _Reader(client)
        with trio.move_on_after(PATIENCE_S) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._wait_for_end, generation, client)
                if client.cancel_at_s is not None:
                    nursery.start_soon(self._cancel, generation, client)
                read = self._read_batches if client.is_batch else self._read
                await read(generation, reader)
                nursery.cancel_scope.cancel(reason="read to the end")
        if scope.cancelled_caught:
            raise Violation(f"{client.request.request_id} starves: {generation}")
        self._check_reader(generation, reader)

    async def _wait_for_end(self, generation: Generation, client: Client) -> None:
        await generation.wait_closed()
        timeout = client.request.timeout_s
        if timeout is not None and trio.current_time() > client.arrival_s + timeout:
            raise Violation(f"{generation} ended after its deadline")

    async def _cancel(self, generation: Generation, client: Client) -> None:
        await trio.sleep(client.cancel_at_s or 0.0)
        was_closed = generation.is_closed
        generation.cancel(EndReason.ABORTED if client.aborts else EndReason.CANCELLED)
        if not was_closed:
            asked = trio.current_time()
            await generation.wait_closed()
            if trio.current_time() != asked:
                raise Violation(f"{generation}: a cancel waited for the engine")

    # ---- readers

    async def _turn(self, generation: Generation, reader: _Reader, seen: int) -> bool:
        """Do what the reader does after so many events. False: it has left."""
        client = reader.client
        if client.leave_after is not None and seen >= client.leave_after:
            generation.close_reader()
            reader.has_left = True
            await generation.wait_closed()
            return False
        if client.stall_after is not None and seen >= client.stall_after:
            await generation.wait_closed()  # then it reads what was left for it
        return True

    async def _read(self, generation: Generation, reader: _Reader) -> None:
        seen = 0
        while await self._turn(generation, reader, seen):
            try:
                event = await generation.receive()
            except trio.EndOfChannel:
                return
            self._see(reader, event)
            seen += 1
            if reader.client.delay_s:
                await trio.sleep(reader.client.delay_s)

    async def _read_batches(self, generation: Generation, reader: _Reader) -> None:
        """As the gRPC front's courier: told of news, takes all, gives credit back when done."""
        seen, news = 0, trio.Event()

        def on_ready() -> None:
            news.set()

        generation.on_ready = on_ready
        while await self._turn(generation, reader, seen):
            is_closed = generation.is_closed
            batch = generation.take_ready()
            if not batch:
                if is_closed:
                    return
                await news.wait()
                news = trio.Event()
                continue
            for event in batch:
                self._see(reader, event)
            seen += len(batch)
            if reader.client.delay_s:
                await trio.sleep(reader.client.delay_s)
            generation.release(sum(isinstance(event, Tokens) for event in batch))

    # ---- watchers

    def _see(self, reader: _Reader, event: Started | Tokens | Finished) -> None:
        name = reader.client.request.request_id
        if isinstance(event, Started):
            if reader.prompt_tokens is not None or reader.tokens:
                raise Violation(f"{name}: started twice")
            reader.prompt_tokens = event.prompt_tokens
            return
        if reader.prompt_tokens is None or event.choice in reader.finished:
            raise Violation(f"{name}: {journal.line(event)} out of place")
        if isinstance(event, Finished):
            reader.finished[event.choice] = event
        else:
            reader.tokens.setdefault(event.choice, []).extend(event.token_ids)
            text = reader.text.get(event.choice, "")
            reader.text[event.choice] = text + event.text

    def _check_reader(self, generation: Generation, reader: _Reader) -> None:
        request, error = reader.client.request, generation.error
        if not generation.is_closed:
            raise Violation(f"{request.request_id}: its reader ended, it did not")
        reason = "" if error is None else error.reason
        self.outcome.ends[reason or "ok"] += 1
        if reader.client.must_fail and not reason:
            raise Violation(f"{request.request_id}: succeeded, though it cannot")
        allowed = self._allowed_ends(reader.client)
        if reason and reason not in allowed:
            raise Violation(f"{request.request_id}: ended by {error!r}, allowed: {allowed}")
        if isinstance(error, EngineBug) and self.world.broken_at_step is None:
            raise Violation(f"{request.request_id}: {error!r}")
        if reader.prompt_tokens is not None:
            self._check_output(reader, is_whole=not reason and not reader.has_left)

    def _check_output(self, reader: _Reader, *, is_whole: bool) -> None:
        """Each choice got the start of what it must get, or all of it."""
        request, echo = reader.client.request, echo_of(reader.client.request)
        name = request.request_id
        if reader.prompt_tokens != len(prompt_of(request)):
            raise Violation(f"{name}: started with {reader.prompt_tokens} tokens")
        for choice in range(request.n or 1):
            got = reader.tokens.get(choice, [])
            end = reader.finished.get(choice)
            expected = expected_output(request, choice, has_ends=self.world.has_ends)
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
            if len(got) != end.usage.completion_tokens or len(got) != len(expected.tokens):
                raise Violation(f"{name}/{choice}: {len(got)} tokens, {end}")
            if reader.text.get(choice, "") != text:
                raise Violation(f"{name}/{choice}: not all of its text")

    def _allowed_ends(self, client: Client) -> set[str]:
        world, request = self.world, client.request
        causes = {
            "CANCELLED": client.leave_after is not None,
            "ABORTED": False,
            "DEADLINE_EXCEEDED": request.timeout_s is not None,
            "DEADLINE_INFEASIBLE": request.timeout_s is not None,
            "READER_STALLED": client.stall_after is not None or client.delay_s,
            "STEP_FAILED": world.row_fault_share or world.step_fault_share or world.oom_share,
            "QUEUE_FULL": "bursts" in world.faults,
            "PAUSED": "pauses" in world.faults,
            "SHUTTING_DOWN": world.drain_at_s is not None or world.cancelled_at_s is not None,
            "ENGINE_BUG": world.broken_at_step is not None,
            "DUPLICATE_REQUEST": self._names[request.request_id] > 1,
            "REQUEST_TOO_LARGE": self._may_not_fit(client),
        }
        if client.cancel_at_s is not None:
            causes["ABORTED" if client.aborts else "CANCELLED"] = True
        if "pauses" in world.faults:
            causes["ABORTED"] = True
        return client.may_end | {reason for reason, may in causes.items() if may}

    def _may_not_fit(self, client: Client) -> bool:
        n = client.request.n or 1
        can_run = min(self.world.config.max_num_seqs, client.buffer)
        return n > can_run or (n > 1 and "memory_pressure" in self.world.faults)

    def _check_idle(self, engine: Engine) -> None:
        """Every request has ended: nothing is held by anybody."""
        totals = engine.statistics().totals
        if totals.total_blocks != totals.free_blocks:
            raise Violation(f"{totals.total_blocks - totals.free_blocks} blocks are held at rest")
        live = (totals.running, totals.waiting, totals.parked, totals.ending, engine.num_live)
        if any(live):
            raise Violation(f"not idle at the end: {totals}")
        for generation in self._generations:
            if generation.credit.reserved and self.world.broken_at_step is None:
                raise Violation(f"{generation} has slots promised to no step")
        ended = totals.requests_total
        counted = sum(getattr(ended, name) for name in ended.__slots__)
        if counted != len(self.world.clients):
            raise Violation(f"{counted} ends counted of {len(self.world.clients)} requests")


def simulate(
    seed: int, *, num_requests: int = 200, faults: frozenset[str] | None = None
) -> Outcome:
    """Draw and run one world."""
    return Simulation(draw_world(seed, num_requests=num_requests, faults=faults)).run()


__all__ = ["Outcome", "Simulation", "Violation", "simulate"]
