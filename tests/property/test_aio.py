"""The asyncio façade under drawn schedules: tasks read, stall, and end at drawn moments.

One engine serves all examples, each in an event loop of its own. Whatever the schedule, every
stream has exactly its tokens in order, and a parked stream's used credit equals the number of its
events that are unread. At the end no request is live and every block is free.
"""

import asyncio
import gc
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import aio, portal
from engine.core.common.events import Finished
from engine.core.text.types import Tokens
from engine.requests.text.values import SamplingParams
from engine.worker.fakes.text import FakeScript
from tests.support.core_driver import expected_tokens
from tests.support.facades import ids_of, open_fake, request

LIMIT_S = 20
BUFFER = 4
complaints = []  # messages of the event loops' exception handlers, of all examples


@dataclass(frozen=True)
class Reader:
    """What the task that reads one stream does.

    The task reads ``num_read`` events, with pauses before some, and then ends as ``end`` says. A
    reader that stalls is closed when all other readers have ended.
    """

    end: str
    num_read: int
    num_tokens: int
    n: int
    pauses: tuple[bool, ...]


readers = st.builds(
    Reader,
    end=st.sampled_from(["read on", "stall", "cancel", "cancel waiting", "break", "time out"]),
    num_read=st.integers(0, 12),
    num_tokens=st.integers(1, 40),
    n=st.integers(1, 3),
    pauses=st.lists(st.booleans(), max_size=12).map(tuple),
)


@pytest.fixture(scope="module")
def eng():
    async def open_one():
        return await open_fake(
            aio, in_process_buffer=BUFFER, script=FakeScript(), stall_timeout_s=1e6
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portal, "RELEASE_AFTER_S", 0.005)  # the default would slow examples down
        eng = asyncio.run(open_one())
        yield eng
        asyncio.run(eng.close())
    gc.collect()
    assert complaints == []  # such as a future whose exception nobody retrieved


@settings(max_examples=50, deadline=None)
@given(drawn=st.lists(readers, min_size=1, max_size=8))
def test_whatever_tasks_do_they_leave_nothing_behind(eng, drawn):

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, what: complaints.append(what))
        async with asyncio.timeout(LIMIT_S):
            await _Example(eng, drawn).run()

    asyncio.run(main())
    assert complaints == []


class _Example:
    def __init__(self, eng, drawn):
        self.eng = eng
        self.drawn = drawn
        self.stalled = {}  # stream by index
        self.others_ended = asyncio.Event()

    async def run(self):
        before = (await self.eng.statistics()).totals.requests_total
        num_stalling = sum(reader.end == "stall" for reader in self.drawn)
        tasks = [
            asyncio.create_task(self._read(index, reader))
            for index, reader in enumerate(self.drawn)
        ]
        stallers = [t for t, r in zip(tasks, self.drawn, strict=True) if r.end == "stall"]
        others = [t for t in tasks if t not in stallers]
        await asyncio.gather(*others)
        # The engine has no event for these states, so poll.
        while len(self.stalled) < num_stalling or not await self._is_credit_even():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self.others_ended.set()
        await asyncio.gather(*stallers)
        await self._wait_idle()
        ended = 0
        while ended < len(self.drawn):  # a cancelled request may end after its reader
            after = (await self.eng.statistics()).totals.requests_total
            ended = after.finished + after.cancelled - before.finished - before.cancelled
        assert ended == len(self.drawn)
        assert (after.failed, after.stalled, after.refused) == (0, 0, 0)

    async def _read(self, index, reader):
        prompt = (index + 1, reader.num_tokens, 3)
        sampling = SamplingParams(max_tokens=reader.num_tokens)
        stream = self.eng.generate(request(prompt, sampling, n=reader.n))
        events = []
        await self._take(stream, reader, events)
        await self._end(stream, reader, events)
        for choice in range(reader.n):
            got = ids_of(e for e in events if isinstance(e, Tokens) and e.choice == choice)
            want = expected_tokens(prompt, count=reader.num_tokens, choice=choice)
            assert got == want[: len(got)]
            if sum(isinstance(event, Finished) for event in events) == reader.n:
                assert got == want

    async def _take(self, stream, reader, events):
        for number in range(reader.num_read):
            if number < len(reader.pauses) and reader.pauses[number]:
                await asyncio.sleep(0)
            try:
                events.append(await anext(stream))
            except StopAsyncIteration:
                return

    async def _end(self, stream, reader, events):
        match reader.end:
            case "read on":
                events.extend([event async for event in stream])
                assert sum(isinstance(event, Finished) for event in events) == reader.n
            case "stall":
                self.stalled[stream] = None
                await self.others_ended.wait()
                await stream.aclose()
            case "cancel" | "cancel waiting":
                task = asyncio.create_task(self._read_on(stream, events))
                if reader.end == "cancel waiting":
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            case "time out":
                try:
                    async with asyncio.timeout(0.001):
                        await self._read_on(stream, events)
                except TimeoutError:
                    pass
            case "break":
                async for event in stream:
                    events.append(event)
                    break

    async def _read_on(self, stream, events):
        async for event in stream:
            events.append(event)

    async def _is_credit_even(self):
        """Return whether each stalled stream has ended, or is parked with credit for its unread
        events."""

        def look(engine):
            held = []
            for stream in self.stalled:
                source = stream._feed._source
                waiting = sum(isinstance(item, Tokens) for item in stream._feed.items)
                held.append(source is None or source.credit.filled == waiting)
            totals = engine.statistics().totals
            return all(held) and totals.running == totals.waiting == totals.ending == 0

        return await self.eng._caller.ask(look)

    async def _wait_idle(self):
        while True:
            now = (await self.eng.statistics()).totals
            if not now.running + now.waiting + now.parked + now.ending:
                break
            await asyncio.sleep(0.002)
        assert now.free_blocks + now.cached_blocks >= now.total_blocks
