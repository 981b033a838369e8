"""EmbedStream in virtual time: drawn inputs, clients and ends, planted bugs, and full steps."""

import pytest
import trio

from engine.config import ModelConfig
from engine.core.common.types import EndReason
from engine.errors import InvalidRequest, ModelNotFound, ShuttingDown, StepFailed
from engine.requests import bill
from engine.requests.encode import feed
from engine.requests.encode.values import (
    Embedding,
    EmbedRequest,
    EmbedStreamRequest,
    IndexedInput,
    InputFault,
)
from engine.requests.quota import Origin, Quota, UseLimits
from engine.status import Capability
from engine.worker.fakes.encode import FakeEncoder
from engine.worker.fakes.text import FakeScript
from tests.simulator.determinism import run_deterministically
from tests.simulator.embed_streams import ENDS, draw, run_world
from tests.simulator.mutants import Mutant, planted
from tests.simulator.workload import draw_world
from tests.support.virtual_engine import fake_engine, read_all

pytestmark = pytest.mark.usefixtures("quiet")
NUM_WORLDS = 120
MUTANTS = (
    Mutant(
        "the window is not given back",
        feed.EmbedFeed.release,
        "self._num_open -= num_messages",
        "pass",
    ),
    Mutant(
        "half of a failed chunk is lost",
        feed.EmbedFeed._halve,
        "[list(left[:middle]), list(left[middle:])]",
        "[list(left[:middle])]",
    ),
    Mutant(
        "the source is read without a bound",
        feed.EmbedFeed._read,
        "self._num_open >= WINDOW_INPUTS or self._open_bytes >= WINDOW_BYTES",
        "False",
    ),
    Mutant(
        "what a refused chunk has beside is lost",
        feed.EmbedFeed._sort_out,
        "if place not in faults]",
        "if False]",
    ),
    Mutant(
        "a chunk that found the queue full is lost",
        feed.EmbedFeed._settle,
        "self._again.append(left)",
        "pass",
    ),
    Mutant(
        "a vector has its place in the chunk for its index",
        feed._Chunk.push,
        "event._replace(index=self.items[event.index].index)",
        "event",
    ),
    Mutant(
        "chunks have records of their own",
        feed.EmbedFeed._submit_chunk,
        "part_of=self, ",
        "",
    ),
    Mutant(
        "what chunks cost is in no record",
        bill.Bill.add_part,
        "self.meter.step_s += used.step_s",
        "pass",
    ),
    Mutant(
        "chunks outlive their stream",
        feed.EmbedFeed.serve,
        "chunk.stream.cancel(self.reason or otherwise)",
        "pass",
    ),
    Mutant(
        "an input that is not set has no result",
        feed.EmbedFeed._take_inputs,
        "self._give_fault(item, InvalidRequest.reason, what)",
        "pass",
    ),
    Mutant(
        "a stream ends before its last chunk",
        feed.EmbedFeed._is_done,
        "if self._chunks or self._ended:",
        "if False:",
    ),
    Mutant(
        "nobody notices a reader that has stopped",
        feed.EmbedFeed._stalls_at,
        "self._released_at + self._stall_timeout_s",
        "math.inf",
    ),
    Mutant(
        "the bytes of a chunk are never given back",
        feed.EmbedFeed._settle,
        "self._open_bytes -= chunk.num_bytes - sum(item.num_bytes for item in left)",
        "pass",
    ),
)


@pytest.mark.parametrize("seed", range(NUM_WORLDS))
def test_each_input_has_its_one_result_however_the_stream_ends(seed):
    run_world(seed)


def test_the_worlds_have_every_end():
    worlds = [draw(seed) for seed in range(NUM_WORLDS)]
    assert {world.end for world in worlds} == set(ENDS)
    assert {0, 1} <= {len(world.items) for world in worlds}
    assert any(world.others for world in worlds)


def test_worlds_of_every_kind_draw_streams_with_every_end():
    worlds = [draw_world(seed, num_requests=60) for seed in range(80)]
    fed = [
        (client, world)
        for world in worlds
        for client in world.clients
        if isinstance(client.request, EmbedStreamRequest)
    ]
    ends = {
        "leaves": any(one.leave_after is not None for one, _ in fed),
        "is cancelled": any(one.cancel_at_s is not None and not one.aborts for one, _ in fed),
        "is aborted": any(one.aborts for one, _ in fed),
        "stalls": any(one.stall_after is not None for one, _ in fed),
        "has a deadline": any(one.request.timeout_s is not None for one, _ in fed),
        "breaks its own side": any(one.must_fail for one, _ in fed),
        "sees a drain": any(world.drain_at_s is not None for _, world in fed),
        "sees deaths": any(world.pool.death_share for _, world in fed),
        "is over the wire": any(one.over_wire for one, _ in fed),
        "is in process": any(not one.over_wire for one, _ in fed),
    }
    assert [end for end, is_drawn in ends.items() if not is_drawn] == []


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.title)
def test_a_bug_in_a_feed_is_found(mutant):
    with planted(mutant):
        for seed in range(NUM_WORLDS):
            try:
                run_world(seed)
            except Exception:
                return
    pytest.fail("no world shows the bug")


def run(body, *, script=None, capability=Capability.TEXT_EMBEDDING, **config):
    """Run ``body(engine, runners)`` with one encoder in virtual time."""
    runners = []

    def make(script):
        runners.append(FakeEncoder(capability, script=script))
        return runners[-1]

    async def main():
        models = (ModelConfig("emb", capability=capability),)
        script_ = script or FakeScript(step_s=0.01)
        with trio.fail_after(1000):
            async with fake_engine(script_, make, models=models, **config) as engine:
                await body(engine, runners)
                await engine.wait_idle()

    run_deterministically(main, 0)


def source_of(*parts):
    """Return a source of these messages, each a list of inputs."""
    left = iter(enumerate(one) for one in parts)
    count = 0

    async def source():
        nonlocal count
        part = next(left, None)
        if part is None:
            return None
        made = [IndexedInput(count + place, one) for place, one in part]
        count += len(made)
        return made

    return source


def ask(engine, *parts, quota=None, **fields):
    request = EmbedStreamRequest(EmbedRequest(check=False, **fields), source_of(*parts))
    return engine.submit(request, buffer=4, origin=Origin(quota=quota))


@pytest.mark.parametrize("size", [1, 7, 600])
def test_steps_are_as_full_as_those_of_embed(size):
    """Also if the client sends one input in each message."""
    inputs = [(number % 50 + 1,) * (number % 8 + 1) for number in range(3000)]

    async def body(engine, runners):
        parts = [inputs[begin : begin + size] for begin in range(0, len(inputs), size)]
        events = await read_all(ask(engine, *parts))
        assert sum(isinstance(event, Embedding) for event in events) == len(inputs)
        steps = runners[0].steps
        for begin in range(0, len(inputs), 1000):
            request = EmbedRequest(inputs=tuple(inputs[begin : begin + 1000]))
            async with engine.embed(request) as stream:
                async for _ in stream:
                    pass
        assert steps <= 1.15 * (runners[0].steps - steps) + 2, (steps, runners[0].steps)

    run(body, max_num_seqs=64, max_num_batched_tokens=512, in_process_buffer=4096)


def test_parameters_are_checked_without_inputs_and_by_the_model():
    async def body(engine, _):
        for fields, name in (
            ({"kind": "odd"}, "parameters.kind"),
            ({"inputs": ("a",)}, "parameters.inputs"),
            ({"dimensions": 99}, "parameters.dimensions"),
            ({"prompt_name": "nobody's"}, "parameters.prompt_name"),
        ):
            stream = ask(engine, [(1,), (2,)], **fields)
            await read_all(stream)
            assert isinstance(stream.error, InvalidRequest), fields
            assert [one.field for one in stream.error.violations] == [name]
        stream = ask(engine, [(1,)], model="nobody")
        await read_all(stream)
        assert isinstance(stream.error, ModelNotFound)

    run(body)


def test_a_model_that_fails_on_everything_ends_the_stream_soon():
    script = FakeScript(step_s=0.01, encode_fault=lambda plan: RuntimeError("broken"))

    async def body(engine, runners):
        stream = ask(engine, *[[(1,)] * 500] * 20)
        events = await read_all(stream)
        assert isinstance(stream.error, StepFailed)
        assert len(events) < 50
        assert runners[0].steps < 10 * feed.FAILURES_MAX * feed.CHUNKS_MAX * 64

    run(body, script=script)


def test_images_that_the_streams_model_does_not_take_have_errors_beside_texts():
    async def body(engine, _):
        stream = ask(engine, [(1,)], [b"no image", (2,)], [b"nor this"])
        results = [one for one in await read_all(stream) if hasattr(one, "index")]
        assert stream.error is None
        assert {one.index: type(one) for one in results} == {
            **{0: Embedding, 1: InputFault, 2: Embedding, 3: InputFault}
        }

    run(body)


def test_an_operator_finds_the_stream_by_its_id():
    async def body(engine, _):
        stream = ask(engine, [(1,)], request_id="mine", model="emb")
        endless = trio.Event()

        async def source():
            await endless.wait()

        other = engine.submit(
            EmbedStreamRequest(EmbedRequest(request_id="endless", check=False), source), buffer=4
        )
        await trio.sleep(1)
        assert "endless" in [one.request_id for one in engine.list_live(10)]
        assert engine.explain("endless").state
        assert (await read_all(stream))[0].model == "emb"
        engine.abort("endless")
        await read_all(other)
        assert other.reason is EndReason.ABORTED

    run(body)


def test_a_stream_is_one_request_of_its_key_whatever_it_runs_in():
    """The old fault: a key of one choice was refused every stream, as its chunks counted, too; and
    they were listed."""
    quota = Quota("ann")
    quota.limits = UseLimits(max_choices=1)

    async def body(engine, _):
        stream = ask(engine, *[[(1,)] * 500] * 8, quota=quota, request_id="mine")
        await trio.sleep(0.02)
        assert engine.statistics().totals.running
        assert [one.request_id for one in engine.list_live(10)] == ["mine"]
        assert (engine.num_live, engine.num_live_of("ann"), engine.num_live_of(None)) == (1, 1, 1)
        events = await read_all(stream)
        assert stream.error is None
        assert sum(isinstance(event, Embedding) for event in events) == 4000
        assert quota.num_choices == 0

    run(body)


def test_the_tokens_of_a_minute_bound_a_stream_while_it_runs():
    """The old fault: they were counted at its end, however long it was."""
    quota = Quota("ann")
    quota.limits = UseLimits(max_tokens_per_minute=600)

    async def body(engine, _):
        began = trio.current_time()
        events = await read_all(ask(engine, *[[(1,)] * 600] * 10, quota=quota))
        assert sum(isinstance(event, Embedding) for event in events) == 6000
        most_ahead = 600 + feed.CHUNKS_MAX * feed.CHUNK_INPUTS
        assert trio.current_time() - began >= 60 * (6000 - most_ahead) / 600

    run(body)


def test_a_drain_counts_a_stream_once():
    async def body(engine, _):
        stream = ask(engine, *[[(1,)] * 500] * 8)
        await trio.sleep(0.02)
        assert await engine.drain(0.0) == 1
        await read_all(stream)
        assert isinstance(stream.error, ShuttingDown)

    run(body)
