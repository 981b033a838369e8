"""How credit comes back over the bridge: fetched, posted, looked at after a while; never lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from trio.testing import wait_all_tasks_blocked

from engine.core.types import RequestId
from engine.generation import Generation
from engine.loop import Deliveries
from engine.requests import GenerateRequest
from grpc_service.bridge import CREDIT_DELAY_S, Bridge, BridgeCall

BUFFER = 8


class Loop:
    """An asyncio loop that keeps what it is asked to do."""

    def __init__(self):
        self.later = []

    def call_later(self, delay_s, callback):
        assert delay_s == CREDIT_DELAY_S
        self.later.append(callback)
        return callback


@pytest.fixture
async def stream():
    """A call over a bridge: its credit, its loop, and itself."""
    config = SimpleNamespace(stream_buffer=BUFFER)
    bridge = Bridge(SimpleNamespace(config=config, deliveries=Deliveries()))
    loop = Loop()
    bridge.attach(loop)
    request = GenerateRequest(text="a")
    call = BridgeCall(bridge, request, "")
    call.generation = Generation(request, "r", RequestId("r"), BUFFER)
    return SimpleNamespace(call=call, credit=call.generation.credit, loop=loop)


def make(credit, count):
    """So many messages on their way to the client."""
    assert credit.try_reserve(count)
    credit.fill(count)


async def test_what_is_written_is_looked_at_after_a_while_by_one_timer(stream):
    make(stream.credit, 3)
    stream.call.written(2)
    stream.call.written(1)
    await wait_all_tasks_blocked()
    assert stream.credit.filled == 3
    [look] = stream.loop.later
    look()
    await wait_all_tasks_blocked()
    assert stream.credit.filled == 0


async def test_a_stream_that_waits_for_slots_gets_them_at_once(stream):
    make(stream.credit, 2)
    stream.credit.mark_starved()
    stream.call.written(1)
    await wait_all_tasks_blocked()
    assert stream.credit.filled == 1


async def test_half_a_streams_credit_comes_back_at_once(stream):
    make(stream.credit, BUFFER)
    stream.call.written(BUFFER // 2 - 1)
    await wait_all_tasks_blocked()
    assert stream.credit.filled == BUFFER
    stream.call.written(1)
    await wait_all_tasks_blocked()
    assert stream.credit.filled == BUFFER // 2


async def test_what_the_courier_has_fetched_is_not_given_back_twice(stream):
    make(stream.credit, 3)
    stream.call.written(3)
    stream.call.release_written()
    assert stream.credit.filled == 0
    for look in stream.loop.later:
        look()
    await wait_all_tasks_blocked()
    assert stream.credit.filled == 0


async def test_messages_without_credit_give_none_back(stream):
    stream.call.written(0)
    assert not stream.loop.later


async def test_credit_that_the_courier_comes_for_wakes_nobody(stream):
    make(stream.credit, 2)
    stream.call.written(1)
    stream.call.release_written()  # the courier comes by
    stream.call.written(1)
    [look] = stream.loop.later
    stream.loop.later.clear()
    look()
    await wait_all_tasks_blocked()
    assert stream.credit.filled == 1, "it was left for the courier"
    [look] = stream.loop.later
    stream.loop.later.clear()
    look()
    await wait_all_tasks_blocked()
    assert stream.credit.filled == 0, "nobody came for it"
    assert not stream.loop.later, "and then nobody looks any more"


async def test_a_stream_that_starts_to_wait_is_seen_at_the_next_look(stream):
    make(stream.credit, 2)
    stream.call.written(1)
    stream.call.release_written()
    stream.call.written(1)
    stream.credit.mark_starved()  # a moment after that was written
    [look] = stream.loop.later
    look()
    await wait_all_tasks_blocked()
    assert stream.credit.filled == 0
