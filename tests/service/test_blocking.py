"""The blocking façade: threads that read, wait, drop and close, on fakes in real time.

test_facades.py has what holds for asyncio's façade, too.
No test depends on how long something takes; `LIMIT_S` only bounds a hang.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref

import pytest

from engine.api._generated import blocking
from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import Tokens
from engine.errors import (
    ModelNotFound,
    ShuttingDown,
)
from engine.requests.text_values import SamplingParams, Started
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.support.facades import (
    ENDLESS,
    LIMIT_S,
    SHORT,
    STEP_S,
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
    """Return a full stream that no thread reads. Its buffer bounds the events anywhere."""
    stream = eng.generate(request())
    wait_until(lambda: eng.statistics().totals.parked == 1)
    assert stream._feed.queue.qsize() == 1 + eng.config.in_process_buffer  # Started, Tokens…
    return stream


# ---- reading


def test_the_engines_thread_is_woken_without_a_lock_held(eng, monkeypatch):
    """A thread that shares the stream does not wait for a wake-up of another one."""
    held, post = [], eng._portal.post
    stream = eng.generate(request(sampling=SamplingParams(max_tokens=200)))

    def note(command):
        held.append(stream._lock.locked())
        post(command)

    monkeypatch.setattr(eng._portal, "post", note)
    assert len(ids_of(stream)) == 200
    assert held
    assert not any(held)


# ---- the rest of the surface


# ---- closing


def test_no_thread_is_left_but_trios_cached_ones():
    before = set(threading.enumerate())
    with open_fake(blocking) as eng:
        list(eng.generate(request(sampling=SHORT)))
    wait_no_engine_threads()
    left = set(threading.enumerate()) - before
    assert [t.name for t in left if not t.name.startswith("Trio thread")] == []


def test_closing_at_once_is_no_bug(caplog):
    """A request that comes while the pool ends finds it closed, whatever the pool waits for."""
    for _ in range(30):
        eng = open_fake(blocking)
        stream = eng.generate(request())
        eng.close()
        with pytest.raises(ShuttingDown):
            list(stream)
    assert caplog.records == []


def test_an_engine_that_is_dropped_is_closed():
    """`__del__` signals, and the thread ends by itself."""
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
    """The engine, its streams and handles, and the model."""
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


def test_a_command_that_raises_ends_nothing(eng, caplog):
    eng._portal.post(lambda: 1 / 0)
    assert eng.statistics() is not None
    assert "a command from another thread failed" in caplog.text


# ---- handles


def test_a_thread_that_reads_an_answer_late_misses_nothing_of_it(eng, monkeypatch):
    """The answer begins with the question, however late the calling thread runs again."""
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


def test_a_dropped_chat_is_closed_but_not_while_it_is_read_through(eng):
    stream = eng.chat(sampling=SHORT).ask("one")
    gc.collect()
    assert len(ids_of(stream)) == 5
    chat = eng.chat(sampling=ENDLESS)
    handle = chat._handle
    del chat
    gc.collect()
    wait_until(lambda: handle.is_closed)


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
    """The exit takes bounded time and shows no traceback."""
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
