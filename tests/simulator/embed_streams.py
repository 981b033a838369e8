"""Worlds of one EmbedStream each: its inputs, its client, and how it ends are drawn from a seed.

The windows are small, so that every world meets their ends. The watcher sees what the client sees,
and how far the source was read.
"""

import random
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import trio

from engine.config import ModelConfig
from engine.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ReaderStalled,
    RequestAborted,
    RequestCancelled,
    ShuttingDown,
    TrioletError,
    WorkerLost,
)
from engine.requests.encode import feed
from engine.requests.encode.values import (
    Embedding,
    EmbedRequest,
    EmbedStreamRequest,
    IndexedInput,
    InputFault,
)
from engine.requests.quota import Origin, Quota, UseLimits
from engine.requests.text.values import Started
from engine.status import Capability
from engine.worker.fakes.encode import FakeEncoder, vector_of
from engine.worker.fakes.text import FakeScript
from tests.simulator.bill_watch import BillWatch
from tests.simulator.determinism import run_deterministically
from tests.simulator.watch import Violation
from tests.support.virtual_engine import fake_engine

SMALL = {
    **{"WINDOW_INPUTS": 16, "WINDOW_BYTES": 2000, "CHUNK_INPUTS": 5, "CHUNK_BYTES": 600},
    **{"CHUNKS_MAX": 3},
}
POISON = 666  # a step with this token fails
MAX_LEN = 12
STEP_S, STALL_S = 0.05, 2.0
PATIENCE_S = 500.0  # in virtual time: a stream that takes longer hangs
# The ends of a stream, and the errors that they may have.
ENDS = {
    "its own": (),
    "cancel": (RequestCancelled,),
    "deadline": (DeadlineExceeded,),
    "abort": (RequestAborted,),
    "drain": (ShuttingDown,),
    "stall": (ReaderStalled,),
    "source": (InvalidRequest,),
    "death": (WorkerLost,),
}


@dataclass
class World:
    """The inputs, each with the ids of its vector or the reason of its error, and the client.
    ``others`` are requests beside the stream; with them the queue may be full."""

    items: list[IndexedInput]
    wants: dict[int, list[float] | str]
    parts: list[int]  # the number of inputs in each message
    end: str
    end_at_s: float
    dies_at: int  # the step at which the worker dies, if that is the end
    delays: random.Random
    others: list[int] = field(default_factory=list)


def draw(seed: int) -> World:
    """Draw a world."""
    rng = random.Random(seed)
    count = rng.choice([0, 1, rng.randint(2, 12), rng.randint(20, 120)])
    items, wants = [], {}
    is_clean = rng.random() < 0.3
    poisons = 2
    for place in range(count):
        index = 3 * place + 1000
        kind = (
            "good"
            if is_clean or rng.random() < 0.8
            else rng.choice(["none", "empty", "far", "text", "long", "poison"])
        )
        ids = tuple(rng.randint(1, 600) for _ in range(rng.randint(1, MAX_LEN)))
        want: list[float] | str = "INVALID_REQUEST"
        given: object = ids
        if kind == "none":
            given = None
        elif kind == "empty":
            given = rng.choice(["", ()])
        elif kind == "far":
            given = (*ids, 1000)
        elif kind == "text":
            given = "\ud800"
        elif kind == "long":
            given, want = (5,) * (MAX_LEN + 1), "REQUEST_TOO_LARGE"
        elif kind == "poison" and poisons:
            poisons -= 1
            given, want = (POISON,), "STEP_FAILED"
        else:
            want = vector_of(ids)
            if rng.random() < 0.3:
                given = "".join(f"<{one}>" for one in ids)
        items.append(IndexedInput(index, given))
        wants[index] = want
    parts, left = [], count
    while left or rng.random() < 0.2:
        parts.append(min(left, rng.choice([0, 1, 1, 3, rng.randint(1, 20)])))
        left -= parts[-1]
    end = rng.choice(["its own"] * 6 + [*ENDS])
    others = [rng.randint(1, 20) for _ in range(rng.randint(1, 12))] if rng.random() < 0.4 else []
    end_at_s = rng.choice([0.0, rng.uniform(0, 0.3), rng.uniform(0, 5)])
    dies_at = rng.choice([1, rng.randint(1, 6), rng.randint(2, 30)])
    return World(items, wants, parts, end, end_at_s, dies_at, random.Random(seed), others)


class Watch:
    """What the client of a stream sees."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.num_read = self.num_taken = self.largest = 0
        self.results: dict[int, object] = {}
        self.num_started = 0

    def note_read(self, count: int) -> None:
        """Judge a message that the source has handed out."""
        self.num_read += count
        self.largest = max(self.largest, count)
        ahead = self.num_read - self.num_taken
        if ahead > SMALL["WINDOW_INPUTS"] + self.largest:
            raise Violation(f"{ahead} inputs were read ahead")

    def take(self, event: object) -> None:
        """Judge an event."""
        if isinstance(event, Started):
            self.num_started += 1
            return
        assert isinstance(event, Embedding | InputFault), event
        self.num_taken += 1
        index = event.index
        if index not in self.world.wants:
            raise Violation(f"a result has the unknown index {index}")
        if index in self.results:
            raise Violation(f"input {index} has two results")
        self.results[index] = event
        want = self.world.wants[index]
        got = event.reason if isinstance(event, InputFault) else list(event.values)
        if got != want:
            raise Violation(f"input {index} has {got}, not {want}")
        if isinstance(event, Embedding) and not self.num_started:
            raise Violation("a vector came before Started")

    def judge_end(self, error: TrioletError | None) -> None:
        """Judge how the stream ended."""
        world = self.world
        if error is None:
            missing = set(world.wants) - set(self.results)
            if missing and world.end != "stall":
                raise Violation(f"{len(missing)} inputs have no result: {sorted(missing)[:5]}")
            return
        is_refusal = isinstance(error, Overloaded) and world.others and not self.results
        if not isinstance(error, ENDS[world.end]) and not is_refusal:
            raise Violation(f"the stream ended with {error!r}")


def run_world(seed: int) -> Watch:
    """Run the world of a seed, and return what its client saw."""
    world = draw(seed)
    watch, bills = Watch(world), BillWatch()
    script, num_steps = FakeScript(step_s=STEP_S), 0

    def fault(plan):
        nonlocal num_steps
        num_steps += 1
        if world.end == "death" and num_steps == world.dies_at:
            return WorkerLost("drawn")
        ids = [getattr(row.input, "token_ids", ()) for row in plan.rows]
        return RuntimeError("poison") if any(POISON in one for one in ids) else None

    script.encode_fault = fault
    settings = {
        "models": (ModelConfig("emb", capability=Capability.TEXT_EMBEDDING),),
        "max_num_seqs": 4,
        "max_num_batched_tokens": 40,
        "stall_timeout_s": STALL_S,
        "max_queued_requests": 3 if world.others else 256,
    }

    def make(script):
        return FakeEncoder(Capability.TEXT_EMBEDDING, script=script, max_model_len=MAX_LEN)

    async def main() -> None:
        async with fake_engine(script, make, **settings) as engine:
            bills.follow(engine)
            with trio.fail_after(PATIENCE_S):
                await _run_in(engine, world, watch, bills)

    with pytest.MonkeyPatch.context() as patch, bills.watch_loops():
        for name, value in SMALL.items():
            patch.setattr(feed, name, value)
        run_deterministically(main, seed)
    return watch


async def _run_in(engine, world: World, watch: Watch, bills: BillWatch) -> None:
    quota = Quota("key")
    quota.limits = UseLimits(max_choices=1)  # the call; its chunks are none of the client's
    stream = engine.submit(
        EmbedStreamRequest(
            EmbedRequest(
                request_id="s",
                truncate=False,
                timeout_s=world.end_at_s if world.end == "deadline" else None,
                check=False,
            ),
            _source_of(world, watch),
        ),
        buffer=4,
        awaits_reader=True,
        origin=Origin(quota=quota),
    )
    rest = world.delays

    async def read() -> None:
        while True:
            if world.end == "stall" and watch.num_taken == len(world.items) // 3:
                await stream.wait_closed()
                return
            if rest.random() < 0.2:
                await trio.sleep(rest.uniform(0, 0.4))
            try:
                watch.take(await stream.receive())
            except (trio.EndOfChannel, trio.ClosedResourceError):
                return

    async def end() -> None:
        await trio.sleep(world.end_at_s)
        if world.end == "cancel":
            stream.close_reader()
        elif world.end == "abort":
            engine.abort("s")
        elif world.end == "drain":
            await engine.drain(rest.choice([0.0, 0.2, 30.0]))

    async def ask(count: int) -> None:
        await trio.sleep(rest.uniform(0, 2))
        request = EmbedRequest(inputs=tuple((one + 1,) for one in range(count)))
        with suppress(Overloaded, ShuttingDown, WorkerLost):
            async with engine.embed(request) as answers:
                assert len([one async for one in answers]) == count + 2

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        nursery.start_soon(end)
        for count in world.others:
            nursery.start_soon(ask, count)
        await stream.wait_closed()
        ended_at = trio.current_time()
        watch_end = stream.error
    stream.close_reader()
    watch.judge_end(watch_end)
    if watch_end is not None and not world.others:
        # a request that ends early is gone within the step in flight
        with trio.move_on_at(ended_at + 2 * STEP_S) as waiting:
            await engine.wait_idle()
        if waiting.cancelled_caught:
            raise Violation("requests outlive their stream")
    await engine.wait_idle()
    if quota.num_choices:
        raise Violation(f"{quota.num_choices} choices run of a stream that has ended")
    _check_bills(engine, bills, stream, watch)
    totals = engine.statistics().totals
    assert (totals.running, totals.waiting, totals.parked, totals.ending) == (0,) * 4


def _check_bills(engine, bills: BillWatch, stream, watch: Watch) -> None:
    """Judge the records: one of each call, none of its chunks."""
    if len(bills.records) != 1 + len(watch.world.others):
        raise Violation(f"{len(bills.records)} records of {1 + len(watch.world.others)} calls")
    bills.check_sums(engine)
    [record] = [one for one in bills.records if one.request_id == stream.request_id]
    taken = sum(isinstance(result, Embedding) for result in watch.results.values())
    if record.results - record.undelivered != taken:
        raise Violation(f"{record}: its reader has taken {taken}")


def _source_of(world: World, watch: Watch):
    parts, items = iter(world.parts), iter(world.items)
    breaks_at = len(world.parts) // 2 if world.end == "source" else None
    number = 0

    async def source():
        nonlocal number
        if world.delays.random() < 0.3:
            await trio.sleep(world.delays.uniform(0, 0.5))
        if number == breaks_at:
            raise InvalidRequest.of("", "the message is broken")
        number += 1
        count = next(parts, None)
        if count is None:
            return None
        watch.note_read(count)
        return [next(items) for _ in range(count)]

    return source
