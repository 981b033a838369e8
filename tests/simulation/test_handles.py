"""Handles in virtual time: they are stopped, dropped, closed or cancelled at any moment."""

import gc
import weakref
from functools import partial

import pytest
import trio

from engine.api.engine import open_engine
from engine.api.handle import Handle
from engine.api.handles import Chat, CrossEncoder, Encoder
from engine.config import EngineConfig, ModelConfig
from engine.core.common.events import Finished
from engine.core.text.types import Tokens
from engine.errors import InvalidRequest, ModelNotFound, RequestCancelled, ShuttingDown, StepFailed
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.fakes.text import FakeRunner, FakeScript
from engine.worker.fakes.tokenizer import FakeTokenizer
from tests.simulator.determinism import VirtualThreads, run_deterministically
from tests.support.bodies import run_by
from tests.support.core_driver import expected_tokens
from tests.support.virtual_engine import fake_engine

SEEDS = range(4)  # seeds of the order in which tasks run
LOAD_S, STEP_S, CALL_S = 0.5, 0.01, 0.1
ENDLESS = SamplingParams(max_tokens=1000)
SHORT = SamplingParams(max_tokens=5)

seeds = pytest.mark.parametrize("seed", SEEDS)


def run(body, seed, *, buffer=4096, script=None):
    """Run ``body(engine)`` in a fresh engine, and check that the engine is idle afterwards."""
    script = script or FakeScript()
    script.load_s, script.step_s = LOAD_S, STEP_S
    config = {"in_process_buffer": buffer, "stall_timeout_s": 1e6}

    async def main():
        async with fake_engine(script, waits=False, **config) as engine:
            await body(engine)
            with trio.fail_after(1):
                await engine.wait_idle()
            stats = engine.statistics()
            if stats.replicas:
                totals = stats.totals
                assert totals.free_blocks + totals.cached_blocks >= totals.total_blocks

    run_deterministically(main, seed)


in_engine = partial(run_by, run)


def said(messages, count):
    """Return the fake model's answer to a conversation."""
    prompt = FakeTokenizer().render_chat(messages)
    ids = expected_tokens(FakeTokenizer().encode(prompt), count=count)
    return "".join(f"<{token_id}>" for token_id in ids)


# ---- chat


@seeds
@in_engine()
async def test_an_answer_read_to_its_last_event_is_part_of_the_conversation(engine, *, seed):
    async with Chat(engine, sampling=SHORT) as chat:
        for number in range(1, 3):
            answer = chat.ask("one")
            async for event in answer:
                if isinstance(event, Finished):
                    break
            assert len(chat.messages) == 2 * number
            assert chat.messages[-1]["content"] == answer.text
            assert answer.is_over


@seeds
@in_engine()
async def test_a_chat_keeps_questions_and_answers(engine, *, seed):
    async with Chat(engine, system="Be brief.", sampling=SHORT) as chat:
        want = [{"role": "system", "content": "Be brief."}]
        for question in ("one", "two"):
            want.append({"role": "user", "content": question})
            want.append({"role": "assistant", "content": said(want, 5)})
            assert await chat.ask(question).read() == want[-1]["content"]
        assert list(chat.messages) == want


@seeds
@pytest.mark.parametrize("after_s", [0.0, LOAD_S / 2, LOAD_S + STEP_S / 2, LOAD_S + 5.5 * STEP_S])
@in_engine()
async def test_a_stop_ends_the_answer_however_early_it_comes(engine, *, seed, after_s):
    """A stop may come before the answer's task has begun, during the load, and during a step."""
    async with Chat(engine, sampling=ENDLESS) as chat:
        answer = chat.ask("one")
        if after_s:
            await trio.sleep(after_s)
        chat.stop()
        chat.stop()
        with trio.fail_after(1):
            assert [event async for event in answer] == []
        assert answer.error is None
        assert chat.messages == ()
        assert len(await chat.ask("two").read()) > 0  # the stop ended only the first answer


@seeds
@in_engine()
async def test_a_stopped_answer_is_kept_as_far_as_it_was_read(engine, *, seed):
    async with Chat(engine, sampling=ENDLESS) as chat:
        async for _event in (answer := chat.ask("one")):
            if answer.text.count("<") == 3:
                chat.stop()
        question = {"role": "user", "content": "one"}
        assert chat.messages == (
            question,
            {"role": "assistant", "content": said([question], 3)},
        )


@seeds
@in_engine()
async def test_a_whole_answer_is_kept_even_if_it_is_empty(engine, *, seed):
    """Here the stop string is the whole answer; the question is kept nevertheless."""
    async with Chat(engine, sampling=SamplingParams(stop=("<",))) as chat:
        assert await chat.ask("one").read() == ""
        assert [m["content"] for m in chat.messages] == ["one", ""]


@seeds
@in_engine()
async def test_a_stop_without_an_answer_has_no_later_effect(engine, *, seed):
    """A stop while no answer runs has no effect on the next answer."""
    async with Chat(engine, sampling=SHORT) as chat:
        chat.stop()
        await chat.ask("one").read()
        chat.stop()
        await chat.ask("two").read()
        assert len(chat.messages) == 4


@seeds
@pytest.mark.parametrize("after_s", [0.0, LOAD_S + 3.5 * STEP_S])
@in_engine()
async def test_a_question_while_an_answer_runs_is_refused_and_changes_nothing(
    engine, *, seed, after_s
):
    async with Chat(engine, sampling=SamplingParams(max_tokens=20)) as chat:
        answer = chat.ask("one")
        await trio.sleep(after_s)
        with pytest.raises(InvalidRequest, match="still runs"):
            chat.ask("two")
        events = [event async for event in answer]
        assert isinstance(events[-1], Finished)
        assert [m["content"] for m in chat.messages] == ["one", answer.text]


@seeds
def test_an_answer_that_fails_leaves_no_trace(seed):
    def fault(plan):
        return RuntimeError("a bad step") if plan.num_tokens == 1 and plan.plan_id < 9 else None

    async def body(engine):
        async with Chat(engine, sampling=SHORT) as chat:
            with pytest.raises(StepFailed):
                await chat.ask("one").read()
            assert chat.messages == ()
            script.plan_fault = None
            await chat.ask("one").read()
            assert [m["role"] for m in chat.messages] == ["user", "assistant"]

    script = FakeScript(plan_fault=fault)
    run(body, seed, script=script)


@seeds
@in_engine()
async def test_leaving_an_answer_ends_it_and_keeps_what_was_read(engine, *, seed):
    async with Chat(engine, sampling=ENDLESS) as chat:
        async with chat.ask("one") as answer:
            async for event in answer:
                if isinstance(event, Tokens):
                    break
        assert [m["content"] for m in chat.messages] == ["one", answer.text]
        assert answer.text.count("<") == 1
        assert [event async for event in answer] == []


@seeds
@in_engine()
async def test_a_dropped_answer_is_ended_and_the_chat_goes_on(engine, *, seed):
    """Nobody can read an answer whose handle is gone."""
    async with Chat(engine, sampling=ENDLESS) as chat:
        answer = chat.ask("one")
        await trio.sleep(LOAD_S + 5 * STEP_S)
        del answer
        gc.collect()
        with trio.fail_after(1):
            await engine.wait_idle()
        assert chat.messages == ()
        assert engine.statistics().totals.requests_total.cancelled == 1
        async with chat.ask("two"):
            pass


@seeds
@in_engine()
async def test_a_reset_while_an_answer_runs_forgets_it(engine, *, seed):
    """Red if the answer's task adds its message to the chat after the reset."""
    async with Chat(engine, system="a", sampling=ENDLESS) as chat:
        answer = chat.ask("one")
        await trio.sleep(LOAD_S + 5 * STEP_S)
        chat.reset()
        with trio.fail_after(1):
            assert [event async for event in answer] == []
        assert chat.messages == ({"role": "system", "content": "a"},)
        chat.reset(system="")
        assert chat.messages == ()


@seeds
@pytest.mark.parametrize("buffer", [1, 2, 7])
@pytest.mark.parametrize("after_s", [0.0, LOAD_S / 2, LOAD_S + 20.5 * STEP_S])
@in_engine()
async def test_closing_a_chat_whose_stream_is_full_and_held_but_read_by_nobody(
    engine, *, seed, buffer, after_s
):
    """Closing needs no reader."""
    chat = Chat(engine, sampling=ENDLESS)
    answer = chat.ask("one")
    await trio.sleep(after_s)
    with trio.fail_after(1):
        await chat.aclose()
        await chat.aclose()
    assert engine.num_live == 0
    assert [event async for event in answer] == []


@seeds
@pytest.mark.parametrize("does_close", [False, True])
@in_engine()
async def test_a_waiting_reader_gets_the_end(engine, *, seed, does_close):
    """`close` does not wait for the end, but a task that waits for the next event wakes."""
    chat = Chat(engine, sampling=ENDLESS)
    with trio.fail_after(LOAD_S + 1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(chat.ask("one").read)
            await trio.sleep(LOAD_S + 5.5 * STEP_S)
            (chat.close if does_close else chat.stop)()
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    assert chat.is_closed is does_close


@seeds
def test_the_root_is_cancelled_while_a_stream_is_full(seed):
    """Nobody reads the stream, and the program ends in bounded time."""
    ended_at = []

    async def main():
        try:
            async with (
                fake_engine(waits=False, in_process_buffer=2) as engine,
                Chat(engine, sampling=ENDLESS) as chat,
            ):
                held.append(chat.ask("one"))
                await trio.sleep(5)
                root.cancel()
                await trio.sleep_forever()
        finally:
            ended_at.append(trio.current_time() - began_at)

    async def under_root():
        nonlocal root, began_at
        began_at = trio.current_time()
        with trio.CancelScope() as root:
            await main()

    held, root, began_at = [], None, 0.0
    run_deterministically(under_root, seed)
    assert 5 <= ended_at[0] < 6
    assert isinstance(held[0].error, ShuttingDown)


@seeds
@in_engine()
async def test_a_closed_chat_keeps_nothing_alive(engine, *, seed):
    """A chat, its answer and the answer's stream are freed when nothing else refers to them."""
    chat = Chat(engine, sampling=ENDLESS)
    answer = chat.ask("one")
    await trio.sleep(LOAD_S + 5 * STEP_S)
    await chat.aclose()
    things = [chat, answer, answer._stream]
    refs = [weakref.ref(thing) for thing in things]
    del chat, answer, things
    await trio.sleep(1)
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


@seeds
@in_engine()
async def test_an_open_chat_keeps_no_answer_alive(engine, *, seed):
    """An answer is freed once it has ended and nothing else refers to it."""
    async with Chat(engine, sampling=SHORT) as chat:
        answer = chat.ask("one")
        await answer.read()
        refs = [weakref.ref(answer), weakref.ref(answer._stream)]
        del answer
        await trio.sleep(1)
        gc.collect()
        assert [ref() for ref in refs] == [None, None]


def test_the_model_dies_with_its_engine():
    refs = []

    def make_runner(model, config):
        runner = FakeRunner()
        refs.append(weakref.ref(runner))
        return runner

    async def main():
        config = EngineConfig(models=(ModelConfig("fake"),))
        async with (
            open_engine(config, make_runner=make_runner, threads=VirtualThreads()) as engine,
            Chat(engine, sampling=SHORT) as chat,
        ):
            await chat.ask("one").read()
            refs.append(weakref.ref(engine))

    run_deterministically(main, 0)
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


# ---- encoders, on fakes


class Fakes:
    """Encoding functions that take `CALL_S` seconds; the texts "bad" and "broken" are errors."""

    def __init__(self):
        self.begun = 0

    async def _look(self, texts):
        self.begun += 1
        await trio.sleep(CALL_S)
        if "bad" in texts:
            raise InvalidRequest.of("inputs", "is bad")
        if "broken" in texts:
            raise ValueError("the secret text")

    async def embed(self, model, texts):
        await self._look(texts)
        return [[float(len(text)), 1.0] for text in texts]

    async def rank(self, model, query, documents):
        await self._look(documents)
        return [float(len(document)) for document in documents]


def encoder(engine, fakes):
    """Return an `Encoder` of these functions, a call of it, and the call's right result."""
    handle = Encoder(engine, function=fakes.embed)
    return handle, handle.embed, ((1.0, 1.0), (2.0, 1.0))


def cross_encoder(engine, fakes):
    """Return a `CrossEncoder` of these functions, a call of it, and the call's right result."""
    handle = CrossEncoder(engine, function=fakes.rank)
    return handle, lambda texts: handle.rank("query", texts), (1.0, 2.0)


kinds = pytest.mark.parametrize("kind", [encoder, cross_encoder])
TEXTS = ("a", "bb")


@seeds
@kinds
@in_engine()
async def test_a_bad_input_fails_only_its_own_call(engine, *, seed, kind):
    """Other calls at the same time, and later ones, succeed."""
    handle, call, want = kind(engine, Fakes())

    async def good():
        assert await call(TEXTS) == want

    async def bad():
        with pytest.raises(InvalidRequest):
            await call(("a", "bad"))
        with pytest.raises(StepFailed) as caught:
            await call(("broken",))
        assert "secret" not in str(caught.value)
        assert isinstance(caught.value.__cause__, ValueError)

    async with handle:
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for task in (good, bad, good):
                    nursery.start_soon(task)


@seeds
@kinds
@pytest.mark.parametrize("after_s", [0.0, CALL_S / 2])
@pytest.mark.parametrize("how", ["stop", "close", "aclose"])
@in_engine()
async def test_a_call_is_ended_however_early(engine, *, seed, kind, after_s, how):
    """`stop`, `close` and `aclose` end all calls, begun or not; `stop` allows later calls."""
    fakes = Fakes()
    handle, call, want = kind(engine, fakes)
    ends = []

    async def asked(awaitable):
        try:
            ends.append(await awaitable)
        except RequestCancelled:
            ends.append("stopped")

    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(asked, call(TEXTS))
            if after_s:
                await trio.sleep(after_s)
            if how == "aclose":
                await handle.aclose()
            else:
                getattr(handle, how)()
            if how == "stop":
                nursery.start_soon(asked, call(TEXTS))
            else:
                with pytest.raises(ShuttingDown):
                    call(TEXTS)
    later = [want] if how == "stop" else []
    assert ends == ["stopped", "stopped", *later]
    if not after_s and how != "aclose":
        assert fakes.begun == len(later)


@seeds
@kinds
@in_engine()
async def test_a_call_that_is_cancelled_from_outside_is_cancelled(engine, *, seed, kind):
    handle, call, want = kind(engine, Fakes())
    async with handle:
        with trio.move_on_after(CALL_S / 2) as scope:
            await call(TEXTS)
        assert scope.cancelled_caught
        assert await call(TEXTS) == want


@seeds
@in_engine()
async def test_handles_of_encoders_that_are_not_configured_raise(engine, *, seed):
    async with Encoder(engine) as one, CrossEncoder(engine) as other:
        with pytest.raises(ModelNotFound):
            await one.embed(["a"])
        with pytest.raises(ModelNotFound):
            await other.rank("q", ["a"])


@seeds
@in_engine()
async def test_a_closed_chat_refuses(engine, *, seed):
    async with Chat(engine) as chat:
        pass
    with pytest.raises(ShuttingDown, match="chat is closed"):
        chat.ask("one")
    chat.stop()


@in_engine(0)
async def test_a_handle_holds_no_stop_state_of_its_own(engine):
    """Only the base class `Handle` has flags and events; scopes belong to the supervisor."""
    shared = vars(Handle("handle"))
    for handle in (Chat(engine), Encoder(engine), CrossEncoder(engine)):
        held = [type(value) for name, value in vars(handle).items() if name not in shared]
        assert not {bool, trio.Event, trio.CancelScope} & set(held)
    generation = engine.submit(GenerateRequest(text="x", sampling=SHORT), buffer=9)
    await generation.wait_closed()
