"""Tokenising, mostly in virtual time: turns of clients, an engine that ends, and exceptions."""

from collections import Counter
from functools import partial

import pytest
import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.text.plan import RowResult
from engine.errors import EngineBug, RequestTooLarge, ShuttingDown, TrioletError
from engine.requests.quota import Origin, Quota
from engine.requests.text.values import GenerateRequest, PromptOptions, SamplingParams
from engine.requests.tokenizing import (
    INLINE_TOKENIZE_CHARS,
    LONG_TEXT_CHARS,
    TOKENIZE_CHARS_MAX,
    TOKENIZE_TOKENS_MAX,
)
from engine.requests.turns import Turns
from engine.worker.fakes.text import FakeRunner, FakeScript
from engine.worker.fakes.tokenizer import FakeTokenizer
from engine.worker.interface import TokenSpan
from tests.simulator.determinism import VirtualThreads, run_deterministically
from tests.simulator.mutants import Mutant, planted
from tests.support.virtual_engine import fake_engine

CONFIG = EngineConfig(models=(ModelConfig("fake"),), check_level=2)
LONG = "a" * INLINE_TOKENIZE_CHARS


class Panic(BaseException):
    """The kind of exception that a panic in a Rust library raises."""


def run(body, seed, encode, pieces=None, **attributes):
    """Run ``body(engine, nursery)`` with a tokenizer that calls ``encode(threads, text)``, has
    these attributes, and encodes long texts as ``pieces`` (`InPieces`) says."""
    threads = VirtualThreads()
    if pieces is not None:
        attributes |= with_pieces(pieces, threads)

    class Tokenizer(FakeTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            return encode(threads, text)

        def span_jobs(self, text, *, add_special_tokens=True):
            def job():
                self.encode(text)
                return self.encode_spans(text)

            return [job]

    tokenizer_class = type("Tokenizer", (Tokenizer,), attributes)

    class Runner(FakeRunner):
        tokenizer = tokenizer_class()

    async def main():
        async with (
            trio.open_nursery() as nursery,
            fake_engine(FakeScript(step_s=0.01), Runner, threads=threads) as engine,
        ):
            await body(engine, nursery)

    run_deterministically(main, seed)


@pytest.mark.parametrize("seed", range(12))
def test_texts_that_wait_while_the_engine_ends_are_tokenised_and_later_ones_refused(seed):
    ends = []

    def encode(threads, text):
        threads.note_sleep(5.0)
        return (1, 2, 3)

    async def body(engine, nursery):
        async def tokenize(after_s):
            await trio.sleep(after_s)
            try:
                await engine.tokenize("", text=LONG)
            except ShuttingDown:
                ends.append(f"error after {after_s}")
            else:
                ends.append(f"answer after {after_s}")

        for after_s in (0, 0, 30):
            nursery.start_soon(tokenize, after_s)
        await trio.sleep(1)  # the engine closes while the first text is tokenised

    run(body, seed, encode)
    assert ends == ["answer after 0", "answer after 0", "error after 30"]


@pytest.mark.parametrize("text", ["p", "p" + LONG])
def test_a_tokenizer_that_panics_ends_its_own_request_and_no_other(text):
    def encode(threads, text):
        if text.startswith("p"):
            raise Panic("planted")
        return (1, 2, 3)

    async def body(engine, nursery):
        request = GenerateRequest(text="x", sampling=SamplingParams(max_tokens=20))
        other = engine.submit(request, buffer=99)
        bad = engine.submit(GenerateRequest(text=text), buffer=99)
        with pytest.raises(EngineBug):
            await engine.tokenize("", text=text)
        with trio.fail_after(10):
            await bad.wait_closed()
            await other.wait_closed()
        assert isinstance(bad.error, EngineBug)
        assert other.error is None

    run(body, 0, encode)


def test_a_short_text_never_waits_for_a_long_one_and_parties_take_turns():
    """One client has ten long texts. Another client's short prompt is tokenised at once, its long
    one when its turn comes. Texts of clients that have left are skipped."""
    seen = []

    def encode(threads, text):
        seen.append(text[0])
        threads.note_sleep(5.0 if len(text) >= LONG_TEXT_CHARS else 0.1)
        return (1, 2, 3)

    async def body(engine, nursery):
        ends = {}

        async def tokenize(name, count, address):
            origin = Origin(address=address)
            await engine.tokenize("", text=name * count, origin=origin)
            ends[name] = trio.current_time()

        with trio.CancelScope() as leaving:
            async with trio.open_nursery() as hostile:
                for name in "abcdefghij":
                    hostile.start_soon(tokenize, name, LONG_TEXT_CHARS, "noisy")
                await trio.sleep(1.0)
                began = trio.current_time()
                nursery.start_soon(tokenize, "s", INLINE_TOKENIZE_CHARS, "other")
                nursery.start_soon(tokenize, "l", LONG_TEXT_CHARS, "other")
                await trio.sleep(1.0)
                assert ends["s"] < began + 0.5
                await trio.sleep(20.0)
                # after the first text's last 4 s, as the noisy client has had its turn
                assert ends["l"] == began + 4.0 + 5.0
                leaving.cancel()
        num_seen = len(seen)
        await trio.sleep(60.0)
        assert len(seen) == num_seen
        assert num_seen < 10

    run(body, 0, encode)


@pytest.mark.parametrize("weights", [(1, 1), (3, 1)])
@pytest.mark.parametrize("count", [INLINE_TOKENIZE_CHARS, LONG_TEXT_CHARS])
def test_many_prompts_of_a_holder_delay_another_ones_by_one(count, weights):
    """Those of the noisy holder take ten times as long. By weight, both have the same time."""
    seconds, waits = Counter(), []

    def encode(threads, text):
        took = 1.0 if text[0] == "n" else 0.1
        seconds[text[0]] += took
        threads.note_sleep(took)
        return (1, 2, 3)

    async def body(engine, nursery):
        noisy = Origin(quota=Quota("noisy", weight=weights[0]))
        quiet = Origin(quota=Quota("quiet", weight=weights[1]))

        async def tokenize(text, origin):
            await engine.tokenize("", text=text * count, origin=origin)

        with trio.CancelScope() as leaving:
            async with trio.open_nursery() as clients:
                for _ in range(100):
                    clients.start_soon(tokenize, "n", noisy)
                await trio.sleep(10.5)
                for _ in range(3):
                    began = trio.current_time()
                    await tokenize("q", quiet)
                    waits.append(trio.current_time() - began)
                for _ in range(300):
                    clients.start_soon(tokenize, "q", quiet)
                seconds.clear()
                await trio.sleep(40.0)
                leaving.cancel()

    # what the tokens are does not matter, and making them of long texts takes most of the time
    run(body, 0, encode, encode_spans=lambda self, text, **_: ())
    assert max(waits) <= 1.0 + 0.1 + 1e-6
    assert seconds["n"] / seconds["q"] == pytest.approx(weights[0] / weights[1], rel=0.1)


BUGS = (
    Mutant(
        "parties take turns, however long these are",
        Turns._count,
        "seconds / weight",
        "1.0 / weight",
    ),
    Mutant("a party saves up time", Turns._lot_of, "max(self._had.get(party, 0.0), least)", "0.0"),
    Mutant("time has no weight", Turns._count, "isinstance(party, Quota)", "False"),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.title)
def test_a_planted_bug_of_turns_is_found(bug):
    with planted(bug), pytest.raises(AssertionError):
        test_many_prompts_of_a_holder_delay_another_ones_by_one(INLINE_TOKENIZE_CHARS, (3, 1))


def test_a_text_that_is_certainly_too_long_is_refused_before_it_is_tokenised():
    seen = []

    def encode(threads, text):
        seen.append(len(text))
        return (1,) * (len(text) // 4)

    async def error_of_generate(engine, text, **prompt):
        sampling = SamplingParams(max_tokens=1)
        request = GenerateRequest(text=text, sampling=sampling, prompt=PromptOptions(**prompt))
        stream = engine.submit(request, buffer=99)
        await stream.wait_closed()
        return stream.error

    async def body(engine, nursery):
        model_len = engine.list_models()[0].max_model_len
        too_long, fits = "a" * (4 * model_len), "a" * (4 * (model_len - 1))
        error = await error_of_generate(engine, too_long)
        assert isinstance(error, RequestTooLarge)
        assert f"at least {model_len} tokens, but at most {model_len - 1}" in str(error)
        assert seen == []
        assert await error_of_generate(engine, fits) is None
        assert await error_of_generate(engine, too_long, truncate_to=5) is None
        assert seen == [len(fits), len(too_long)]
        with pytest.raises(RequestTooLarge, match="of at most 1048576 in one call"):
            await engine.tokenize("", text="a" * (TOKENIZE_CHARS_MAX + 1))
        assert len(seen) == 2

    run(body, 0, encode, max_chars_per_token=4)


async def test_a_request_that_tokenises_when_its_loop_dies_gets_an_error():
    entered, go_on = trio.Event(), trio.Event()

    class SlowTokenizer(FakeTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            if len(text) > INLINE_TOKENIZE_CHARS:
                trio.from_thread.run_sync(entered.set)
                trio.from_thread.run(go_on.wait)
            return super().encode(text)[:20]

    class Runner(FakeRunner):
        """Returns a result for a sequence outside the plan, a bug that ends the replica's loop."""

        tokenizer = SlowTokenizer()

        def execute(self, plan):
            result = super().execute(plan)
            return result.__class__(result.plan_id, (RowResult(99),))

    with trio.fail_after(20):
        async with (
            open_engine(CONFIG, make_runner=lambda *_: Runner()) as engine,
            engine.generate(GenerateRequest(text="x" + LONG)) as slow,
        ):
            await entered.wait()
            async with engine.generate(GenerateRequest(text="short")) as short:
                assert (await error_of(short)).reason == "ENGINE_BUG"
            go_on.set()
            assert (await error_of(slow)).reason == "ENGINE_BUG"


async def error_of(stream):
    with pytest.raises(TrioletError) as caught:
        async for _event in stream:
            pass
    return caught.value


PIECE = 1000


class InPieces:
    """Splits long texts into pieces of `PIECE` characters, each of which takes a second and has a
    token for each character, and notes the first character of each piece."""

    def __init__(self):
        self.made = []

    def jobs(self, threads, text, to_token):
        def make(start):
            threads.note_sleep(1.0)
            self.made.append(text[start])
            return tuple(map(to_token, text[start : start + PIECE].encode()))

        return [partial(make, start) for start in range(0, len(text), PIECE)]


def with_pieces(pieces, threads):
    """Return the methods of a tokenizer that encodes long texts in these pieces."""

    def encode_jobs(self, text, *, add_special_tokens=True):
        return pieces.jobs(threads, text, int)

    def span_jobs(self, text, *, add_special_tokens=True):
        return pieces.jobs(threads, text, lambda one: TokenSpan(one, "", 0, 0))

    return {"encode_jobs": encode_jobs, "span_jobs": span_jobs}


def never(threads, text):
    raise AssertionError("a long text is tokenised in pieces")


@pytest.mark.parametrize("keeps_end", [False, True])
def test_a_long_prompt_that_is_cut_is_tokenised_as_far_as_it_is_wanted(keeps_end):
    pieces = InPieces()

    async def body(engine, nursery):
        text = "x" * PIECE + "a" * LONG_TEXT_CHARS + "z" * PIECE
        stream = engine.submit(
            GenerateRequest(
                text=text,
                sampling=SamplingParams(max_tokens=1),
                prompt=PromptOptions(truncate_to=1500, truncate_left=keeps_end),
            ),
            buffer=99,
        )
        await stream.wait_closed()
        assert stream.error is None
        assert pieces.made == (["z", "a"] if keeps_end else ["x", "a"])

    run(body, 0, never, pieces=pieces)


def test_a_long_prompt_is_refused_once_it_has_more_tokens_than_fit():
    pieces = InPieces()

    async def body(engine, nursery):
        most = engine.list_models()[0].max_model_len - 1
        stream = engine.submit(GenerateRequest(text="a" * LONG_TEXT_CHARS), buffer=99)
        await stream.wait_closed()
        assert isinstance(stream.error, RequestTooLarge)
        assert f"but at most {most} leave room" in str(stream.error)
        assert len(pieces.made) == most // PIECE + 1

    run(body, 0, never, pieces=pieces)


def test_a_cancel_is_seen_between_two_pieces():
    """When a client leaves, the next text begins after the piece that is being tokenised."""
    pieces = InPieces()

    async def body(engine, nursery):
        async def tokenize(name, count):
            await engine.tokenize("", text=name * count, origin=Origin(address=name))

        with trio.move_on_after(2.5):
            nursery.start_soon(tokenize, "b", LONG_TEXT_CHARS)
            await tokenize("a", TOKENIZE_TOKENS_MAX)
        await trio.sleep(100.0)
        assert pieces.made[:4] in (["a", "a", "a", "b"], ["b"] * 4)
        assert pieces.made.count("a") in (0, 3)
        assert pieces.made.count("b") == -(-LONG_TEXT_CHARS // PIECE)

    for seed in range(6):
        pieces.made.clear()
        run(body, seed, never, pieces=pieces)
