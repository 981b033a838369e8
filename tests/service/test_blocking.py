"""The blocking façade: threads that read, wait, leave, drop and close, on fakes in real time.

No test depends on how long something takes; `LIMIT_S` only bounds a hang.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref

import pytest

from engine.api import blocking, portal
from engine.config import EngineConfig, ModelConfig
from engine.core.common.events import Finished, PauseMode
from engine.core.text.types import Tokens
from engine.errors import (
    InvalidRequest,
    ModelNotFound,
    RequestAborted,
    RequestCancelled,
    RequestNotFound,
    ShuttingDown,
    SpawnFailed,
    StepFailed,
)
from engine.requests.text_values import GenerateRequest, OutputOptions, SamplingParams, Started
from engine.worker.fakes.digests import VOCAB_SIZE  # X
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.support.core_driver import expected_tokens
from tests.support.facades import (
    ENDLESS,
    LIMIT_S,
    SHORT,
    STEP_S,
    broken_config,
    engine_threads,
    fake_embed,
    fake_rank,
    ids_of,
    open_fake,
    request,
    run_script,
    wait_no_engine_threads,
    wait_until,
)

pytestmark = pytest.mark.timeout(LIMIT_S)


@pytest.fixture
def eng():
    """Yield an engine with one fake model and small buffers."""
    with open_fake(blocking, in_process_buffer=4) as one:
        yield one


def start(function, *args):
    """Call a function in a thread. Return the thread, and a list that gets its result or error."""
    outcome = []

    def run():
        try:
            outcome.append(function(*args))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def join(*threads):
    """Wait for the threads' ends."""
    for thread in threads:
        thread.join(LIMIT_S / 2)
        assert not thread.is_alive()


def park(eng):
    """Return a full stream that no thread reads. Its buffer bounds the events anywhere (R8)."""
    stream = eng.generate(request())
    wait_until(lambda: eng.statistics().totals.parked == 1)
    assert stream._feed.queue.qsize() == 1 + eng.config.in_process_buffer  # Started, Tokens…
    return stream


# ---- reading


def test_credit_comes_back_even_if_it_is_less_than_a_quarter_of_the_buffer():
    many = request((1, 2, 3), SHORT, n=15, output=OutputOptions(echo=True))
    with open_fake(blocking, in_process_buffer=16, stall_timeout_s=3 * LIMIT_S) as eng:
        ends = [event for event in eng.generate(many) if isinstance(event, Finished)]
    assert len(ends) == 15


def test_threads_get_exactly_their_tokens():
    """R17: sixteen readers, small buffers, one engine."""

    def read(index):
        got = []
        for turn in range(3):
            prompt = (index + 1, turn + 1, 7)
            with eng.generate(request(prompt, SamplingParams(max_tokens=30))) as stream:
                events = list(stream)
            assert isinstance(events[-1], Finished)
            got.append(ids_of(events) == expected_tokens(prompt, count=30))
        return got

    with open_fake(blocking, in_process_buffer=3, script=FakeScript()) as eng:
        started = [start(read, index) for index in range(16)]
        join(*(thread for thread, _ in started))
        assert [outcome for _, outcome in started] == [[[True] * 3]] * 16
        wait_until(lambda: eng.statistics().totals.requests_total.finished == 48)


@pytest.mark.parametrize(("n", "buffer"), [(1, 1), (1, 2), (3, 3), (4, 5), (3, 30)])
def test_credit_that_comes_back_late_delays_no_step(monkeypatch, n, buffer):
    """R7, R8: credit that is not given back yet leaves room for the next message."""
    monkeypatch.setattr(portal, "RELEASE_AFTER_S", 1e9)
    with open_fake(
        blocking, in_process_buffer=buffer, script=FakeScript(), stall_timeout_s=5
    ) as eng:
        events = list(eng.generate(request(sampling=SamplingParams(max_tokens=60), n=n)))
        assert len(ids_of(events)) == 60 * n


def test_the_engines_thread_is_woken_without_a_lock_held(eng, monkeypatch):
    """R154: a thread that shares the stream does not wait for a wake-up of another one."""
    held, post = [], eng._portal.post
    stream = eng.generate(request(sampling=SamplingParams(max_tokens=200)))

    def note(command):
        held.append(stream._lock.locked())
        post(command)

    monkeypatch.setattr(eng._portal, "post", note)
    assert len(ids_of(stream)) == 200
    assert held
    assert not any(held)


def test_threads_may_share_a_stream(eng):
    with eng.generate(request(sampling=SamplingParams(max_tokens=200))) as stream:
        started = [start(lambda: list(stream)) for _ in range(3)]
        join(*(thread for thread, _ in started))
    got = [ids_of(outcome[0]) for _, outcome in started]
    assert sorted(i for ids in got for i in ids) == sorted(expected_tokens((1, 2, 3), count=200))
    with pytest.raises(StopIteration):
        next(stream)


def test_a_refusal_is_raised_at_the_first_event_and_then_the_stream_has_ended(eng):
    """R123."""
    stream = eng.generate(GenerateRequest(token_ids=(VOCAB_SIZE,)))
    with pytest.raises(InvalidRequest):
        next(stream)
    assert list(stream) == []


def test_a_prompt_in_and_its_text_out(eng):
    want = "".join(f"<{token}>" for token in expected_tokens((98, 99), count=5))
    assert eng.complete("ab", max_tokens=5) == want
    assert eng.complete(GenerateRequest(text="ab", sampling={"max_tokens": 5})) == want
    with eng.generate("ab") as stream:
        assert next(stream).prompt_tokens == 2
    with pytest.raises(InvalidRequest, match=r"sampling\.top_p"):
        eng.complete("ab", top_p=7)
    with pytest.raises(ModelNotFound):
        eng.complete(GenerateRequest(text="ab", model="nobody"))


def test_leaving_the_block_ends_the_generation(eng):
    with eng.generate(request()) as stream:
        next(stream)
    wait_until(lambda: eng.statistics().totals.requests_total.cancelled == 1)
    with pytest.raises(RequestCancelled):
        list(stream)


def test_a_stream_closed_before_it_has_begun_is_ended():
    """R3: the model is still loading."""
    with open_fake(blocking, script=FakeScript(load_s=0.5)) as eng:
        stream = eng.generate(request())
        stream.close()
        stream.close()
        with pytest.raises(RequestCancelled, match="after 0 tokens"):
            list(stream)


def test_breaking_out_of_the_loop_ends_the_generation(eng):
    """R9: a dropped iterator is collected, and its finaliser only signals."""
    for event in eng.generate(request()):
        if isinstance(event, Tokens):
            break
    gc.collect()
    wait_until(lambda: eng.statistics().totals.requests_total.cancelled == 1)


def test_a_stream_of_a_cycle_is_ended_wherever_it_is_collected(eng):
    """R17: the collector runs on any thread, here on the engine's own."""
    box = [eng.generate(request())]
    box.append(box)
    del box
    eng._caller.ask(lambda engine: gc.collect())
    wait_until(lambda: eng.statistics().totals.requests_total.cancelled == 1)


def test_a_full_stream_holds_up_no_other(eng):
    """R8, R196."""
    park(eng)
    assert len(ids_of(eng.generate(request((9,), SamplingParams(max_tokens=50))))) == 50


# ---- the rest of the surface


def test_everything_else_an_engine_does(eng):
    eng.wait_ready()
    assert [status.name for status in eng.list_models()] == ["fake"]
    assert eng.get_model("fake").max_model_len == 2048
    spans, longest = eng.tokenize(text="ab")
    assert ([span.token_id for span in spans], longest) == ([98, 99], 2048)
    assert eng.detokenize([5, 6]) == "<5><6>"
    with pytest.raises(ModelNotFound):
        eng.tokenize("nobody", text="a")
    with pytest.raises(ModelNotFound):
        eng.get_model("nobody")
    eng.reset_prefix_cache()
    eng.pause(PauseMode.KEEP)
    stream = eng.generate(request(request_id="a"))
    wait_until(lambda: eng.statistics().totals.waiting == 1)
    eng.resume()
    eng.abort("a")
    with pytest.raises(RequestAborted):
        list(stream)


def test_drain_lets_other_threads_finish(eng):
    stream = eng.generate(request(sampling=SamplingParams(max_tokens=300)))
    next(stream)
    thread, outcome = start(lambda: list(stream))
    eng.drain()
    join(thread)
    assert len(ids_of(outcome[0])) == 300
    with pytest.raises(ShuttingDown):
        next(eng.generate(request()))


def test_a_model_that_fails_to_load_is_an_error_for_every_waiting_request():
    with open_fake(blocking, script=FakeScript(load_error=SpawnFailed("no weights"))) as eng:
        with pytest.raises(SpawnFailed, match="no weights"):
            eng.wait_ready()
        with pytest.raises(SpawnFailed):
            list(eng.generate(request()))


def test_an_engine_that_cannot_start_raises_and_leaves_no_thread():
    with pytest.raises(AttributeError):
        blocking.open_engine(broken_config())
    wait_no_engine_threads()


# ---- closing


@pytest.mark.parametrize("is_referenced", [True, False])
def test_closing_with_an_abandoned_full_stream(is_referenced):
    """R10, R15: held or dropped, the stream has no reader any more."""
    eng = open_fake(blocking, in_process_buffer=2)
    stream = park(eng)
    if not is_referenced:
        del stream
    eng.close(LIMIT_S / 2)
    wait_no_engine_threads()
    if is_referenced:
        with pytest.raises(ShuttingDown):
            list(stream)


def test_no_thread_is_left_but_trios_cached_ones():
    """R20."""
    before = set(threading.enumerate())
    with open_fake(blocking) as eng:
        list(eng.generate(request(sampling=SHORT)))
    wait_no_engine_threads()
    left = set(threading.enumerate()) - before
    assert [t.name for t in left if not t.name.startswith("Trio thread")] == []


def test_closing_while_threads_wait():
    """R170: threads in an iterator, in a call, and in `close` itself all wake."""
    eng = open_fake(blocking, script=FakeScript(load_s=0.2))
    eng.pause(PauseMode.KEEP)
    stream = eng.generate(request())
    reader, read = start(lambda: list(stream))
    caller, called = start(eng.drain)
    wait_until(lambda: eng.statistics().totals.waiting == 1)
    closers = [start(eng.close) for _ in range(3)]
    join(reader, caller, *(thread for thread, _ in closers))
    assert isinstance(read[0], ShuttingDown)
    assert isinstance(called[0], ShuttingDown)
    assert [outcome for _, outcome in closers] == [[None]] * 3
    wait_no_engine_threads()


def test_closing_during_a_load_joins_it():
    """R11: nothing is abandoned, and a thread that waited for the load learns of the end."""
    eng = open_fake(blocking, script=FakeScript(load_s=0.5))
    waiter, outcome = start(eng.wait_ready)
    wait_until(lambda: len(eng._portal._waiters) == 1)
    eng.close()
    join(waiter)
    assert isinstance(outcome[0], ShuttingDown)


def test_closing_at_once_is_no_bug(caplog):
    """A request that comes while the pool ends finds it closed, whatever the pool waits for."""
    for _ in range(30):
        eng = open_fake(blocking)
        stream = eng.generate(request())
        eng.close()
        with pytest.raises(ShuttingDown):
            list(stream)
    assert caplog.records == []


def test_closing_with_a_limit_does_not_wait_longer():
    entered, go_on = threading.Event(), threading.Event()

    def sleep(seconds):
        entered.set()
        go_on.wait(LIMIT_S)

    eng = open_fake(blocking, script=FakeScript(load_s=1, sleep=sleep))
    assert entered.wait(LIMIT_S)
    eng.close(0.01)
    assert len(engine_threads()) == 1
    go_on.set()
    eng.close()
    wait_no_engine_threads()


CALLS = {
    "generate": lambda eng, stream, chat: eng.generate(request()),
    "tokenize": lambda eng, stream, chat: eng.tokenize(text="a"),
    "detokenize": lambda eng, stream, chat: eng.detokenize([1]),
    "list_models": lambda eng, stream, chat: eng.list_models(),
    "get_model": lambda eng, stream, chat: eng.get_model("fake"),
    "wait_ready": lambda eng, stream, chat: eng.wait_ready(),
    "statistics": lambda eng, stream, chat: eng.statistics(),
    "pause": lambda eng, stream, chat: eng.pause(PauseMode.KEEP),
    "resume": lambda eng, stream, chat: eng.resume(),
    "reset_prefix_cache": lambda eng, stream, chat: eng.reset_prefix_cache(),
    "abort": lambda eng, stream, chat: eng.abort("a"),
    "drain": lambda eng, stream, chat: eng.drain(),
    "chat": lambda eng, stream, chat: eng.chat(),
    "encoder": lambda eng, stream, chat: eng.encoder(),
    "cross_encoder": lambda eng, stream, chat: eng.cross_encoder(),
    "next": lambda eng, stream, chat: list(stream),
    "ask": lambda eng, stream, chat: chat.ask("a"),
}


def test_after_closing_every_call_raises():
    """R22: a call raises, and a call that only ends something does nothing."""
    eng = open_fake(blocking)
    stream, chat = eng.generate(request()), eng.chat()
    eng.close()
    for call in CALLS.values():
        with pytest.raises(ShuttingDown):
            call(eng, stream, chat)
    for one in (stream, chat, eng, chat):
        one.close()
    chat.stop()


def test_an_engine_that_is_dropped_is_closed():
    """R19: `__del__` signals, and the thread ends by itself."""
    eng = open_fake(blocking, in_process_buffer=2)
    thread = eng._portal.thread
    park(eng)
    alive = weakref.ref(eng)
    del eng
    gc.collect()
    assert alive() is None
    join(thread)


def test_an_engine_may_be_closed_by_its_own_thread_and_may_not_wait_there():
    eng = open_fake(blocking)
    thread = eng._portal.thread
    outcome = []

    def on_its_thread():
        try:
            eng.statistics()
        except RuntimeError as error:
            outcome.append(error)
        eng.close()

    eng._portal.post(on_its_thread)
    join(thread)
    assert "own thread" in str(outcome[0])


def test_nothing_is_kept_alive_by_a_closed_engine():
    """R23: the engine, its streams and handles, and the model."""
    runners = []

    def make_runner(model, config):
        runners.append(FakeRunner(script=FakeScript(step_s=STEP_S)))
        return runners[0]

    eng = blocking.open_engine(EngineConfig(models=(ModelConfig("fake"),)), make_runner=make_runner)
    eng.wait_ready()
    chat = eng.chat()
    things = [eng, eng._portal, chat, chat.ask("a"), eng.generate(request()), runners[0]]
    refs = [weakref.ref(thing) for thing in things]
    eng.close()
    runners.clear()
    del eng, chat, things
    gc.collect()
    assert [ref() for ref in refs[:-1]] == [None] * 5
    wait_until(lambda: gc.collect() is not None and refs[-1]() is None)


def test_an_engine_whose_thread_dies_leaves_nobody_waiting(eng, caplog):
    """R22: the thread whose call never gets an answer, and another that reads."""
    reader, read = start(lambda: list(eng.generate(request())))
    wait_until(lambda: eng.statistics().totals.parked + eng.statistics().totals.running == 1)
    with pytest.raises(ShuttingDown):
        eng._caller.ask(lambda engine: sys.exit(1))
    join(reader)
    assert isinstance(read[0], ShuttingDown)
    with pytest.raises(ShuttingDown):
        eng.statistics()
    assert "the engine's thread failed" in caplog.text


def test_a_command_that_raises_ends_nothing(eng, caplog):
    eng._portal.post(lambda: 1 / 0)
    assert eng.statistics() is not None
    assert "a command from another thread failed" in caplog.text


# ---- handles


def test_a_conversation(eng):
    with eng.chat(system="Be brief.", sampling=SHORT) as chat:
        for question in ("one", "two"):
            texts = [e.text for e in chat.ask(question) if isinstance(e, Tokens)]
            assert chat.messages[-1]["content"] == "".join(texts)
        assert [m["role"] for m in chat.messages] == ["system", *["user", "assistant"] * 2]
        chat.reset()
        assert len(chat.messages) == 1
    with pytest.raises(ShuttingDown, match="chat is closed"):
        chat.ask("three")
    assert len(ids_of(eng.generate(request(sampling=SHORT)))) == 5


def test_a_thread_that_reads_an_answer_late_misses_nothing_of_it(eng, monkeypatch):
    """R7, R145: the answer begins with the question, however late the calling thread runs again."""
    ask = eng._caller.ask

    def ask_and_dawdle(question):
        result = ask(question)
        time.sleep(50 * STEP_S)
        return result

    with eng.chat(sampling=SHORT) as chat:
        monkeypatch.setattr(eng._caller, "ask", ask_and_dawdle)
        events = list(chat.ask("one"))
        assert isinstance(events[0], Started)
        assert len(ids_of(events)) == 5
        assert chat.messages[-1]["content"] == "".join(
            [event.text for event in events if isinstance(event, Tokens)]
        )


def test_stopping_from_another_thread_ends_the_iteration(eng):
    """R3, R6, R17: the reader waits in its iterator."""
    with eng.chat(sampling=ENDLESS) as chat:
        eng.pause(PauseMode.KEEP)
        reader, read = start(lambda: list(chat.ask("one")))
        wait_until(lambda: eng.statistics().totals.waiting == 1)
        with pytest.raises(InvalidRequest, match="still runs"):
            chat.ask("two")
        chat.stop()
        join(reader)
        eng.resume()
        assert ids_of(read[0]) == []
        stream = chat.ask("two")  # an earlier stop does not count
        assert len([next(stream) for _ in range(5)]) == 5


def test_a_chat_closes_however_full_its_stream_is(eng):
    """R15."""
    chat = eng.chat(sampling=ENDLESS)
    stream = chat.ask("one")
    wait_until(lambda: eng.statistics().totals.parked == 1)
    chat.close()
    assert [e for e in stream if isinstance(e, Finished)] == []
    wait_until(lambda: eng.statistics().totals.parked == 0)


def test_a_dropped_chat_is_closed_but_not_while_it_is_read_through(eng):
    stream = eng.chat(sampling=SHORT).ask("one")
    gc.collect()
    assert len(ids_of(stream)) == 5
    chat = eng.chat(sampling=ENDLESS)
    handle = chat._handle
    del chat
    gc.collect()
    wait_until(lambda: handle.is_closed)


@pytest.mark.parametrize("kind", ["encoder", "cross_encoder"])
def test_a_bad_input_does_not_end_an_encoder(eng, kind):
    """R5, R21, R22."""
    if kind == "encoder":
        handle = eng.encoder(function=fake_embed)
        call, want = handle.embed, ((1.0,), (2.0,))
    else:
        handle = eng.cross_encoder(function=fake_rank)
        call, want = (lambda texts: handle.rank("q", texts)), (1.0, 2.0)
    with handle:
        with pytest.raises(InvalidRequest):
            call(["bad"])
        with pytest.raises(StepFailed):
            call(["broken"])
        assert call(["a", "bb"]) == want
        thread, outcome = start(call, ["slow"])
        wait_until(lambda: len(handle._handle._guard._running) == 1)
        handle.stop()
        join(thread)
        assert isinstance(outcome[0], RequestCancelled)
        assert call(["a", "bb"]) == want
    with pytest.raises(ShuttingDown):
        call(["a"])


def test_encoders_that_are_not_configured_are_an_error(eng):
    with pytest.raises(ModelNotFound):
        eng.encoder().embed(["a"])
    with pytest.raises(ModelNotFound):
        eng.cross_encoder().rank("q", ["a"])


# ---- the interpreter, from outside

LEFT_OPEN = {
    "idle": "eng = open_fake()",
    "with a stream that is held": """
eng = open_fake(step_s=0.01)
stream = eng.generate(request())
next(stream)
""",
    "with all in a cycle": """
eng = open_fake(step_s=0.01)
box = [eng, eng.generate(request()), eng.chat(), eng.chat().ask("a")]
box.append(box)
""",
    "while it loads": "eng = open_fake(load_s=1)",
    "while a thread reads, which is told": """
eng = open_fake(step_s=0.01)
stream = eng.generate(request())
next(stream)
def read():
    try:
        list(stream)
    except engine.TrioletError as error:
        print(error.reason)
threading.Thread(target=read).start()
""",
    "while daemons wait for it": """
eng = open_fake(step_s=0.01)
eng.pause(PauseMode.KEEP)
def ask_on():
    while True:
        eng.statistics()
for wait in (lambda: list(eng.generate(request())), eng.drain, ask_on):
    threading.Thread(target=wait, daemon=True).start()
while eng.statistics().totals.waiting == 0:
    time.sleep(0.01)
""",
    "after a step that hangs, for the limit": """
portal.EXIT_LIMIT_S = 0.5
go_on = threading.Event()
eng = open_fake(step_s=1, sleep=lambda s: s and go_on.wait())
stream = eng.generate(request())
next(stream)
""",
    "twice": "one, other = open_fake(), open_fake()",
    "inside its block, by sys.exit": """
with open_fake(step_s=0.01) as eng:
    stream = eng.generate(request())
    next(stream)
    sys.exit(0)
""",
}


@pytest.mark.parametrize("text", LEFT_OPEN.values(), ids=LEFT_OPEN.keys())
def test_the_interpreter_exits_with_an_engine_left_open(text):
    """R17: the exit takes bounded time and shows no traceback."""
    code, out, err = run_script(text)
    assert (code, err) == (0, "")
    assert out == ("SHUTTING_DOWN\n" if "print" in text else "")


WHILE_TORCH_IS_IMPORTED = """
while "torch" not in sys.modules:
    time.sleep(0.01)
"""
WHILE_IT_GENERATES = """
sampling = engine.SamplingParams(ignore_eos=True)
stream = eng.generate(engine.GenerateRequest(text="Once", sampling=sampling))
next(stream)
"""


@pytest.mark.model
@pytest.mark.timeout(200)  # importing torch from a cold disk takes half a minute
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(WHILE_TORCH_IS_IMPORTED, id="while torch is imported"),
        pytest.param(WHILE_IT_GENERATES, id="while it generates"),
    ],
)
@pytest.mark.full
def test_the_interpreter_exits_with_a_real_model(text):
    """The engine must close before torch's own exit handlers run.

    When `atexit` closed it, the first of these scripts failed with errors of the libraries, or
    hung.
    """
    config = "engine.EngineConfig(spawn_timeout_s=150)"  # for the same reason
    text = f"portal.EXIT_LIMIT_S = 150\neng = blocking.open_engine({config})\n{text}"
    code, out, err = run_script(text, options=(), limit_s=180)
    assert (code, out, err) == (0, "", "")


WAITS = {
    "iterator": "list(stream)",
    "call": "eng.drain()",
    "embedding": """
async def forever(model, texts):
    await trio.sleep_forever()
import trio
eng.encoder(function=forever).embed(["a"])
""",
}


@pytest.mark.parametrize("text", WAITS.values(), ids=WAITS.keys())
def test_ctrl_c_reaches_the_thread_that_waits(text):
    """The signal is not lost in the engine's thread, and the engine closes after it."""
    body = text.strip().replace("\n", "\n    ")
    code, out, err = run_script(
        f"""
eng = open_fake()
eng.pause(PauseMode.KEEP)
stream = eng.generate(request())
def say():
    time.sleep(0.2)  # by then the main thread waits; if it does not yet, it is interrupted anyway
    print("ready", flush=True)
try:
    threading.Thread(target=say).start()
    {body}
except KeyboardInterrupt:
    eng.close()
    print("interrupted", len(portal._open))
""",
        sends=signal.SIGINT,
    )
    assert (code, out, err) == (0, "interrupted 0\n", "")


def test_calls_in_a_forked_child_raise():
    """Every call raises at once; closing and exiting do nothing to the parent's engine."""
    code, out, err = run_script("""
eng = open_fake(step_s=0.001)
stream, chat = eng.generate(request(300)), eng.chat()
next(stream)
child = os.fork()
if child == 0:
    for call in (lambda: next(stream), eng.statistics, eng.wait_ready, lambda: chat.ask("a"),
                 lambda: eng.generate(request())):
        try:
            call()
        except engine.TrioletError as error:
            print(type(error).__name__, "fork" in str(error), flush=True)
    stream.close()
    chat.close()
    eng.close()
    del stream, chat, eng
    sys.exit(7)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), len(list(stream)))
eng.close()
""")
    assert (code, err) == (0, "")
    assert out == "ShuttingDown True\n" * 5 + "7 301\n"


def test_the_process_id_decides_about_a_fork(eng, monkeypatch):
    real = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: real + 1)
    with pytest.raises(ShuttingDown, match="fork"):
        eng.statistics()
    eng.close()
    monkeypatch.undo()
    assert eng.statistics() is not None


def test_the_first_event_of_a_full_chat_says_what_was_left_out():
    runner = FakeRunner(script=FakeScript(), max_model_len=256)
    config = EngineConfig(models=(ModelConfig("fake"),), check_level=2)
    with (
        blocking.open_engine(config, make_runner=lambda *_: runner) as eng,
        eng.chat(sampling=SHORT) as chat,
    ):
        dropped = []
        for number in range(12):
            started, *_ = chat.ask(f"question {number} {'x' * 20}")
            dropped += started.dropped
        assert dropped
        kept = [message["content"] for message in chat.messages]
        assert kept[0].startswith("question 0 ")
        assert not {message["content"] for message in dropped} & set(kept)


def test_explain_from_any_thread(eng):
    with eng.generate(request(request_id="mine")) as stream:
        next(stream)
        assert eng.explain("mine").state in ("WAITING", "RUNNING", "PARKED")
    with pytest.raises(RequestNotFound):
        eng.explain("other")
