"""A request whose replica died in its queue, as it gets in line elsewhere."""

from __future__ import annotations

from engine.answers import AnswerFormat
from engine.core.types import RequestId
from engine.errors import WorkerLost
from engine.generation import Generation
from engine.requests import GenerateRequest


async def test_it_takes_the_slots_of_its_stream_once():
    moving = Generation(GenerateRequest(text="x"), "r", RequestId("r"), 1)
    for _ in range(3):
        moving.echo("x")
        moving.tell_apart(AnswerFormat())
        assert (moving.credit.capacity, moving.credit.filled) == (2, 2)
        moving.on_lost(WorkerLost("x"), has_begun=False)
        assert moving.take_moving()
    moving.close(None)
