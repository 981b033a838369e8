"""Images in virtual time: how they are decoded, whom they keep waiting, and what they hold."""

import random
from contextlib import suppress
from functools import partial

import pytest
import trio

from engine.api.handles import Encoder
from engine.config import EngineConfig, ModelConfig
from engine.core.common.types import EndReason
from engine.errors import InvalidRequest, Overloaded, RequestTooLarge, TrioletError
from engine.requests import image_memory
from engine.requests.encode.values import Embedding, EmbedRequest
from engine.requests.image_memory import ImageMemory
from engine.requests.quota import Origin, Quota
from engine.requests.readers import Leaving
from engine.requests.text.chat_values import Chat
from engine.requests.text.values import GenerateRequest
from engine.requests.tokenizing import Tokenizing
from engine.status import Capability
from engine.worker.fakes.encode import IMAGE_TOKENS, FakeEncoder, vector_of
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.simulator.determinism import run_deterministically
from tests.simulator.encode_oracle import image_file
from tests.simulator.mutants import Mutant, planted
from tests.support.bodies import run_by
from tests.support.virtual_engine import SilentReader, fake_engine, read_all

DECODE_S, STEP_S = 0.1, 0.01
ONE = {"max_tokens": 1}
PIXELS = [bytes([number, 7] * 24) for number in range(200)]
FILES = [image_file(pixels) for pixels in PIXELS]
MODEL = ModelConfig("clip", capability=Capability.IMAGE_EMBEDDING)
CONFIG = EngineConfig(models=(MODEL,), check_level=2)


def run(body, seed=0, *, image_bytes=None):
    """Run ``body(engine, memory)`` with a fake model of images; afterwards nothing may be held."""
    script = FakeScript(step_s=STEP_S, decode_s=DECODE_S)

    async def main():
        make = partial(FakeEncoder, Capability.IMAGE_EMBEDDING)
        async with fake_engine(script, make, models=(MODEL,)) as engine:
            preparer = engine._supervisor._servings[EmbedRequest].preparer
            if image_bytes is not None:
                preparer.image_memory = ImageMemory(image_bytes)
            await body(engine, preparer.image_memory)
            await engine.wait_idle()
            assert preparer.image_memory.num_bytes == 0

    run_deterministically(main, seed)


in_engine = partial(run_by, run)


async def embed(engine, inputs, **fields):
    """Return the results of an Embed, in the order of its inputs."""
    found = {}
    async with engine.embed(EmbedRequest(inputs=tuple(inputs), **fields)) as stream:
        async for event in stream:
            if isinstance(event, Embedding):
                found[event.index] = event
    return [found[index] for index in range(len(inputs))]


@in_engine()
async def test_texts_and_images_of_one_request_get_their_own_vectors(engine, memory):
    got = await embed(engine, ["a", FILES[3], (5, 6), FILES[4], bytearray(FILES[3])])
    tokens = [(98,), PIXELS[3], (5, 6), PIXELS[4], PIXELS[3]]
    assert [list(one.values) for one in got] == [vector_of(ids) for ids in tokens]
    assert [one.tokens for one in got] == [1, IMAGE_TOKENS, 2, IMAGE_TOKENS, IMAGE_TOKENS]


@in_engine()
async def test_an_encoder_takes_texts_and_images(engine, memory):
    async with Encoder(engine, "clip") as encoder:
        got = await encoder.embed(["a", FILES[0]])
        assert [list(one) for one in got] == [vector_of((98,)), vector_of(PIXELS[0])]
        with pytest.raises(TypeError, match="for one image, give"):
            encoder.embed(FILES[0])


@in_engine()
async def test_every_bad_image_is_named(engine, memory):
    with pytest.raises(InvalidRequest) as caught:
        await embed(engine, [FILES[0], b"nonsense", "a", FILES[1][:-30]])
    fields = [one.field for one in caught.value.violations]
    assert fields == ["inputs[1].image", "inputs[3].image"]
    assert engine.statistics().totals.step_count == 0


@in_engine(image_bytes=4 * 5 * 48)
async def test_a_request_with_more_images_than_it_may_hold_is_refused(engine, memory):
    with pytest.raises(RequestTooLarge, match="has 6 images, of at most 5 in one request"):
        await embed(engine, FILES[:6])
    assert len(await embed(engine, FILES[:5])) == 5


@in_engine()
async def test_requests_take_turns_at_decoding_and_a_text_waits_for_none(engine, memory):
    """Red if a request's images are decoded in one job, or if texts wait for the images'
    limiter."""
    ends = {}

    async def one(name, inputs):
        await embed(engine, inputs)
        ends[name] = trio.current_time()

    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, "many", FILES[:50])
        nursery.start_soon(one, "single", FILES[:1])
        await trio.sleep(1.5 * DECODE_S)
        nursery.start_soon(one, "text", ["a"])
        nursery.start_soon(one, "long text", ["a" * 5000])
    assert ends["single"] - start < 4 * DECODE_S
    assert ends["text"] - start < 2 * DECODE_S
    assert ends["long text"] - start < 2 * DECODE_S
    assert ends["many"] - start > 50 * DECODE_S


@pytest.mark.parametrize("seed", range(3))
@run_by(run_deterministically)
async def test_images_of_a_request_whose_client_is_away_keep_no_other_waiting(*, seed):
    """Red if such a request keeps its images' memory until its resume window ends: beside a busy
    model it is not computed, and every other chat with images would wait, up to an hour."""
    script = FakeScript(step_s=STEP_S, decode_s=DECODE_S)
    runner = FakeRunner(script=script, max_model_len=4096, sees=True)

    def asking(max_tokens=5, image=FILES[0], **fields):
        parts = [{"type": "image", "image": image}] if image else [{"type": "text", "text": "a"}]
        chat = Chat(({"role": "user", "content": parts},))
        sampling = {"max_tokens": max_tokens, "ignore_eos": True}
        return GenerateRequest(chat=chat, sampling=sampling, **fields)

    async with fake_engine(script, lambda script: runner) as engine:
        memory = engine._supervisor._servings[GenerateRequest].preparer.image_memory
        memory._max_bytes = runner.info.images.max_bytes
        async with engine.generate(asking(2000, image=None)) as busy:
            await anext(busy)
            hoarder = asking(2000, resume_window_s=3600.0)
            lost = engine.submit(hoarder, buffer=4, reader=(reader := SilentReader()))
            await trio.sleep(3 * DECODE_S)
            lost.leave(reader, trio.current_time(), Leaving(is_lost=True))
            assert memory.num_bytes
            with trio.fail_after(9 * DECODE_S):
                assert len(await engine.complete(asking())) > 0
            assert lost.reason is EndReason.CANCELLED
        await engine.wait_idle()
        assert not memory.num_bytes


@pytest.mark.parametrize("shares", [False, True])
@run_by(run_deterministically, 0)
async def test_no_time_tells_a_holder_which_images_others_have_sent(*, shares):
    """Red if holders share decoded images, or images' encodings."""
    script, runners = FakeScript(step_s=STEP_S, decode_s=DECODE_S), []
    parts = [{"type": "image", "image": FILES[0]}, {"type": "text", "text": "<5>"}]
    asked = GenerateRequest(chat=Chat(({"role": "user", "content": parts},)), sampling=ONE)

    async def seconds(engine, holder):
        started = trio.current_time()
        stream = engine.submit(asked, buffer=9, origin=Origin(quota=Quota(holder)))
        await read_all(stream)
        assert stream.error is None
        took = trio.current_time() - started
        await engine.wait_idle()
        return took, runners[0].tower.num_encoded

    def make(script):
        runners.append(FakeRunner(script=script, sees=True))
        return runners[-1]

    async with fake_engine(script, make, share_prefixes=shares) as engine:
        first, _ = await seconds(engine, "ann")
        again, num_encoded = await seconds(engine, "ann")
        assert again < first - DECODE_S / 2
        assert num_encoded == 1
        theirs, num_encoded = await seconds(engine, "ben")
        assert theirs == pytest.approx(again if shares else first)
        assert num_encoded == (1 if shares else 2)


@in_engine()
async def test_files_of_more_bytes_than_all_requests_may_have_are_refused(
    engine, memory, *, monkeypatch
):
    """Red if files fill the memory while they wait to be decoded."""
    monkeypatch.setattr(image_memory, "FILE_BYTES_MAX", 3 * len(FILES[0]))
    assert len(await embed(engine, FILES[:1] * 5)) == 5, "alone, a request may have any size"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(embed, engine, FILES[:1] * 2)
        await trio.sleep(DECODE_S / 2)
        with pytest.raises(Overloaded, match="images of all requests would exceed"):
            await embed(engine, FILES[:1] * 2)
        assert len(await embed(engine, FILES[:1])) == 1
        assert len(await embed(engine, ["a"])) == 1


def test_memory_for_images_is_waited_for_and_given_back():
    async def body(engine, memory):
        peak = 0

        async def one():
            nonlocal peak
            await embed(engine, FILES[:4])
            peak = max(peak, memory.num_bytes)

        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(one)
        assert peak <= 16 * 48

    run(body, image_bytes=16 * 48)


# The planted bug: all images of a request are one job.
READ_ALL = "lambda: [read(each) for _, each in files][0]"


def leave_at_any_instant(seed):
    """Run requests that leave while their images wait for memory, are decoded, are encoded, or are
    read. Afterwards a request must be served at once."""
    rng = random.Random(seed)

    async def body(engine, memory):
        async def one(count, leaves_at, timeout_s):
            with trio.move_on_after(leaves_at), suppress(TrioletError):
                await embed(engine, FILES[:count], timeout_s=timeout_s)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                patience = rng.uniform(0, 60 * DECODE_S)
                leaves = rng.random() < 0.5
                nursery.start_soon(
                    one,
                    rng.randint(1, 4),
                    patience if leaves else 1e6,
                    None if leaves else patience,
                )
        with trio.fail_after(4 * DECODE_S):
            assert len(await embed(engine, FILES[:2])) == 2

    run(body, seed, image_bytes=16 * 48)


def leave_at_all_instants():
    for seed in range(30):
        leave_at_any_instant(seed)


@pytest.mark.parametrize("seed", range(30))
def test_a_request_that_leaves_at_any_instant_gives_its_memory_back(seed):
    leave_at_any_instant(seed)


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        (ImageMemory.take, "self._waiting.remove(waiter)", "pass"),
        (ImageMemory._give_back, "self.num_bytes -= num_bytes", "pass"),
        (Tokenizing.read_images, "partial(read, data)", READ_ALL),
    ],
)
def test_a_planted_leak_is_found(function, old, new):
    leak = Mutant(f"{new} for {old}", function, old, new)
    with planted(leak), pytest.raises((AssertionError, trio.TooSlowError, BaseExceptionGroup)):
        leave_at_all_instants()
