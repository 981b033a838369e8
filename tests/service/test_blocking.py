"""The blocking façade: threads that read, wait, drop and close, on fakes in real time.

test_facades.py has what holds for asyncio's façade, too.
No test depends on how long something takes; `LIMIT_S` only bounds a hang.
"""

import signal
import time

import pytest

from engine.api._generated import blocking
from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import Tokens
from engine.errors import ShuttingDown
from engine.requests.text.values import SamplingParams, Started
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.support.facades import (
    LIMIT_S,
    SHORT,
    STEP_S,
    ids_of,
    open_fake,
    request,
    run_script,
)

pytestmark = pytest.mark.timeout(LIMIT_S)


@pytest.fixture
def eng():
    """Yield an engine with one fake model and small buffers."""
    with open_fake(blocking, in_process_buffer=4) as one:
        yield one


# ---- reading


def test_the_engines_thread_is_woken_without_a_lock_held(eng, monkeypatch):
    """The stream's lock is free then, so that other threads can use the stream."""
    held, post = [], eng._portal.post
    stream = eng.generate(request(sampling=SamplingParams(max_tokens=200)))

    def note(command):
        held.append(stream._lock.locked())
        post(command)

    monkeypatch.setattr(eng._portal, "post", note)
    assert len(ids_of(stream)) == 200
    assert held
    assert not any(held)


# ---- closing


def test_closing_at_once_is_no_bug(caplog):
    """A request that comes while the pool ends is told so, whatever the pool waits for."""
    for _ in range(30):
        eng = open_fake(blocking)
        stream = eng.generate(request())
        eng.close()
        with pytest.raises(ShuttingDown):
            list(stream)
    assert caplog.records == []


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
    thread.join(LIMIT_S / 2)
    assert not thread.is_alive()
    assert "own thread" in str(outcome[0])


def test_a_command_that_raises_ends_nothing(eng, caplog):
    eng._portal.post(lambda: 1 / 0)
    assert eng.statistics() is not None
    assert "a command from another thread failed" in caplog.text


# ---- handles


def test_a_thread_that_reads_an_answer_late_misses_nothing_of_it(eng, monkeypatch):
    """The whole answer comes, however late the calling thread runs again after `ask`."""
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


# ---- the interpreter, from outside

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

    The old fault: `atexit` closed the engine, and the first of these scripts hung or failed with
    errors of the libraries.
    """
    config = "engine.EngineConfig(spawn_timeout_s=150)"  # importing torch may be slow
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
    """The engine's thread does not swallow the signal, and the engine closes afterwards."""
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
