"""What a stream's client is sent, whoever writes it: the RPC's task, or the bridge's batch."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.credit import Credit
from engine.core.events import Tokens
from engine.core.types import RequestId
from engine.errors import StepFailed
from grpc_service.bridge import BridgeCall
from grpc_service.servicer import Disconnected, _carry

CAPACITY = 1000
# A number: more events. "settle": all who can go on do, until they wait.
STEP = st.sampled_from([1, 1, 1, 2, 3, "yield", "settle", "settle", "let go", "let go"])
WORLDS = st.tuples(
    st.lists(STEP, min_size=10, max_size=30),
    st.sampled_from(["close", "break", "cancel", "fail"]),
    st.lists(STEP, max_size=8),
)


class Context:
    """A client whose transport takes a message when it is told to."""

    def __init__(self):
        self.sent = []
        self.status = None
        self._waiting = None

    async def write(self, data):
        assert self._waiting is None, "two writes at once"
        assert self.status is None, "a write after the status"
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None
        self.sent.append(data)

    async def abort(self, code, *_):
        self.status = code
        raise grpc.aio.AbortError

    def let_go(self, error=None):
        if self._waiting is None or self._waiting.done():
            return False
        if error is None:
            self._waiting.set_result(None)
        else:
            self._waiting.set_exception(error)
        return True


class Stream:
    """A call of a bridge that does nothing, its RPC's task, and what it should come to."""

    def __init__(self):
        self.credit = Credit(CAPACITY)
        bridge = SimpleNamespace(
            clock=lambda: 0.0,
            post=lambda command: True,
            look_soon=lambda call: None,
            zombies=SimpleNamespace(gone=lambda call: None, ended=lambda call, address: None),
        )
        self.call = BridgeCall(bridge, SimpleNamespace(request_id="r"), "")
        self.call.generation = SimpleNamespace(credit=self.credit, credited=(Tokens,))
        self.context = Context()
        self.made = []
        self.task = asyncio.create_task(
            _carry(self.call, self.encode, self.context, short=self.short)
        )

    @staticmethod
    def encode(events):
        return [event.text for event in events]

    @staticmethod
    def short(event):
        """Some are the task's to write, and some have nothing to tell."""
        number = int(event.text)
        return None if number % 4 == 2 else b"" if number % 5 == 0 else event.text

    def take(self, count):
        first = len(self.made) + 1
        texts = [str(number) for number in range(first, first + count)]
        self.made += texts
        self.call.take([Tokens(RequestId("r"), 0, (1,), text) for text in texts], False, None)


async def run(before, end, after):
    """The stream, and how it was ended."""
    stream = Stream()
    await asyncio.sleep(0)
    for step in (*before, end, *after):
        if isinstance(step, int):
            if not stream.call._is_closed:
                stream.take(step)
        elif step == "yield":
            await asyncio.sleep(0)
        elif step == "settle":
            for _ in range(5):
                await asyncio.sleep(0)
        elif step == "let go":
            stream.context.let_go()
        elif step == "cancel":
            stream.task.cancel()
        elif step == "fail" and stream.context.let_go(grpc.aio.UsageError("the client has gone")):
            pass
        else:
            end = "break" if step == "break" else "close"
            error = StepFailed("broken") if step == "break" else None
            stream.call.take([], True, error)
    for _ in range(4 * len(stream.made) + 10):
        stream.context.let_go()
        await asyncio.sleep(0)
    assert stream.task.done(), f"it hangs after {end}"
    return stream, end


@settings(max_examples=500)
@given(world=WORLDS)
def test_events_are_sent_once_and_in_order_and_the_end_comes_after_them(world):
    stream, end = asyncio.run(run(*world))
    sent = [int(text) for text in stream.context.sent if text]
    assert sent == sorted(set(sent))
    assert stream.call._is_left
    if end == "cancel":
        assert stream.task.cancelled()
    elif end == "fail":
        assert isinstance(stream.task.exception(), Disconnected)
    else:
        assert isinstance(stream.task.exception(), grpc.aio.AbortError) == (end == "break")
        told = {int(text) for text in stream.made if int(text) % 5 or int(text) % 4 == 2}
        assert told <= set(sent)
        assert stream.call._num_written == len(stream.made)


def test_a_stream_that_has_ended_is_let_go_without_looking_for_cycles():
    async def body():
        stream = Stream()
        for _ in range(3):
            await asyncio.sleep(0)
            stream.take(1)
            for _ in range(5):
                await asyncio.sleep(0)
                stream.context.let_go()
        stream.call.take([], True, None)
        await stream.task
        left = weakref.ref(stream.context)
        del stream
        return left

    gc.disable()
    try:
        left = asyncio.run(body())
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("broken", ["start", "write", "future"])
def test_what_a_write_raises_is_the_tasks(broken):
    error = asyncio.CancelledError if broken == "future" else ValueError

    async def body():
        stream = Stream()
        stream.task.cancel()
        call = BridgeCall(stream.call._bridge, SimpleNamespace(request_id="r"), "")
        call.generation = stream.call.generation

        def start(event):
            if broken == "start":
                raise ValueError("drawn")

            async def write():
                raise error("drawn")

            return write()

        call.write_straight(start)
        task = asyncio.create_task(call.receive())
        await asyncio.sleep(0)
        call.take([Tokens(RequestId("r"), 0, (1,), "a")], False, None)
        with pytest.raises(error):
            await task
        assert not call._straight.is_writing

    asyncio.run(body())
