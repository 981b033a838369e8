"""A request whose replica died while the request waited moves to another replica's queue."""

from __future__ import annotations

from engine.core.common.types import RequestId
from engine.errors import WorkerLost
from engine.requests.answer_format import AnswerFormat
from engine.requests.stream import StreamOptions
from engine.requests.text_stream import TextStream
from engine.requests.text_values import GenerateRequest


async def test_a_moving_request_reserves_its_streams_slots_once():
    moving = TextStream(GenerateRequest(text="x"), StreamOptions("r", RequestId("r"), 1))
    for _ in range(3):
        moving.echo("x")
        moving.parse_answers(AnswerFormat())
        assert (moving.credit.capacity, moving.credit.filled) == (2, 2)
        moving.lose_replica(WorkerLost("x"), has_begun=False)
        assert moving.take_moving()
    moving.close(None)
