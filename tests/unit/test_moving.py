"""A request whose replica died while the request waited moves to another replica's queue."""

from contextlib import nullcontext
from types import SimpleNamespace

from engine.core.common.types import RequestId
from engine.core.text.types import Tokens
from engine.errors import WorkerLost
from engine.requests.stream import StreamOptions
from engine.requests.text.answers.format import REASONING, AnswerFormat
from engine.requests.text.chat_values import Chat
from engine.requests.text.prepare import PreparedText
from engine.requests.text.stream import TextStream
from engine.requests.text.values import GenerateRequest
from tests.unit.test_detached import Seen


class DyingLoop:
    """A replica's loop that dies as soon as it has a request."""

    forget = phase_of = cancel = staticmethod(lambda *_: None)

    def submit(self, event, stream):
        stream.lose_replica(WorkerLost("x"), has_begun=False)


async def test_a_moving_request_begins_its_answer_once():
    """Red if the parser reads the message to continue once more, or the prompt is echoed twice."""
    turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "<thi"})
    chat = Chat(turns, continue_final_message=True)
    seen = Seen()
    moving = TextStream(GenerateRequest(chat=chat), StreamOptions("r", RequestId("r"), 1, seen))
    form = AnswerFormat(reasoning=REASONING[0])
    request = SimpleNamespace(num_tokens=1, num_tokens_ahead=2, num_choices=1, images=())
    prepared = PreparedText(request, form=form, echo="x")
    for _ in range(3):
        await moving.run(prepared, SimpleNamespace(loop=DyingLoop(), busy_with=nullcontext))
        assert moving.take_moving()
    moving.push(Tokens(RequestId("r"), 0, (1,), "nk>y</think>z"))
    assert (seen[-1].reasoning, seen[-1].text) == ("y", "xz")
    moving.close(None)
