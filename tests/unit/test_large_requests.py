"""The engine alone keeps a request with images: the RPC's task has no second reference."""

import math
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from engine.errors import InvalidRequest, ShuttingDown
from engine.requests.text.chat_values import VIOLATIONS_MAX
from grpc_service.access import decoding
from grpc_service.access.decoding import SMALL_BYTES
from grpc_service.access.interceptor import Interceptor
from grpc_service.client import messages as pb
from grpc_service.rpc.status import StatusCode
from grpc_service.services.error_status import status_of
from grpc_service.services.methods import methods
from grpc_service.services.text_codec import decode_generate
from tests.support.rpc_calls import serving

REQUESTS = {
    "Embed": pb.EmbedRequest(inputs=[{"image": b"a"}]),
    "Generate": pb.GenerateRequest(chat={"messages": [{"role": "user", "content": "a"}]}),
    "GenerateImage": pb.GenerateImageRequest(prompt="a", source={"image": b"a"}),
}


class Parsing:
    """Stands in for a message class: parses bytes as that class does, and keeps the message."""

    def __init__(self, request):
        self._class = type(request)
        self.made = []

    def FromString(self, data):
        self.made.append(self._class.FromString(data))
        return self.made[-1]


@pytest.mark.parametrize("name", REQUESTS)
async def test_nothing_but_the_engine_keeps_a_request_that_runs(autojump_clock, name):
    parsing, counts = Parsing(REQUESTS[name]), []

    def submit(request, **_):
        counts.append(sys.getrefcount(parsing.made[0]))
        raise ShuttingDown("enough was seen")

    engine = SimpleNamespace(submit=submit, config=SimpleNamespace(stream_buffer=4))
    backend = SimpleNamespace(engine=engine, unread_calls=None)
    served = [
        one._replace(request=parsing) if one.name.endswith(f"/{name}") else one
        for one in methods(backend, 2**20)
    ]
    async with serving(Interceptor(served, None, status_of).serve) as server:
        client = await server.connect()
        path = f"triolet.v1.Inference/{name}"
        answer = await client.request(path, REQUESTS[name].SerializeToString())
        assert answer.code is StatusCode.UNAVAILABLE, answer.message
    assert counts == [2]  # references by the test's list, and by getrefcount's argument


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{}] * 1000},
        {"role": "user", "parts": [{}] * 1000},
    ],
)
def test_a_client_is_told_of_few_violations_of_a_large_chat(message):
    """Red if all violations are listed: ten thousand kept the event loop busy for 17 ms."""
    with pytest.raises(InvalidRequest) as caught:
        decode_generate(pb.GenerateRequest(chat={"messages": [message]})).validate()
    assert len(caught.value.violations) == VIOLATIONS_MAX


async def test_a_deadline_that_passes_in_the_queue_for_decoding_names_its_phase(autojump_clock):
    """Here the deadline passes before the engine has the request."""
    interceptor = Interceptor(methods(SimpleNamespace(), 2**20), None, status_of)
    async with serving(interceptor.serve) as server:
        client = await server.connect()
        data = pb.GenerateRequest(text="a" * SMALL_BYTES).SerializeToString()
        async with interceptor.decoding._medium._turns.hold("another"):
            answer = await client.request(
                "triolet.v1.Inference/Generate", data, headers={"grpc-timeout": "1S"}
            )
        assert answer.code is StatusCode.DEADLINE_EXCEEDED
        assert answer.message == "the deadline passed in phase read, before the request was decoded"


async def test_an_owner_has_few_large_requests_that_are_decoded_and_not_answered(monkeypatch):
    """Red if a client can have a thousand texts of a megabyte decoded while the tokenizer is busy:
    a gigabyte. Short requests do not wait for this bound."""
    for name, size in {"SMALL_BYTES": 50, "LARGE_BYTES": 100, "DECODED_BYTES": 2000}.items():
        monkeypatch.setattr(decoding, name, size)
    began, answers = trio.open_memory_channel(20)
    let_go = trio.Semaphore(0)

    async def tokenize(model, text, **_):
        began.send_nowait(len(text))
        if len(text) > 10:
            await let_go.acquire()
        return (), 0

    engine = SimpleNamespace(tokenize=tokenize)
    served = methods(SimpleNamespace(engine=engine), 2**22)
    with trio.fail_after(30):
        async with serving(Interceptor(served, None, status_of).serve) as server:
            client = await server.connect()

            async def ask(size):
                data = pb.TokenizeRequest(text="a" * size).SerializeToString()
                await client.request("triolet.v1.Inference/Tokenize", data)

            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(ask, 950)
                assert [await answers.receive() for _ in range(2)] == [950, 950]
                nursery.start_soon(ask, 10)
                assert await answers.receive() == 10
                for _ in range(3):
                    await trio.sleep(0.05)
                    with pytest.raises(trio.WouldBlock):
                        answers.receive_nowait()
                    let_go.release()
                    assert await answers.receive() == 950
                let_go.release()
                let_go.release()


REQUEST = st.tuples(
    *(st.sampled_from("abcde"), st.integers(1, 2500), st.floats(0.0, 2.0), st.floats(0.0, 8.0)),
    st.sampled_from([math.inf, 0.5, 3.0]),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(REQUEST, max_size=12))
def test_the_room_bounds_each_owner_and_all_and_is_empty_in_the_end(requests):
    """The drawn requests' clients may leave while they wait or later, and some keep their room for
    longer than `DECODED_S`, after which it does not count."""
    num_bytes: Counter[str] = Counter()
    num_in: Counter[str] = Counter()
    num_ended = 0

    async def ask(room, owner, size, after, keeps, patience):
        nonlocal num_ended
        counts = min(keeps, decoding.DECODED_S - 0.01)
        await trio.sleep(after)
        with trio.move_on_after(patience):
            give_back = await room.take(owner, size)
            for name in (owner, "all"):
                num_bytes[name] += size
                num_in[name] += 1
            try:
                for name, most in ((owner, 1000), ("all", 2500)):
                    assert num_bytes[name] <= most or num_in[name] == 1
                await trio.sleep(counts)
            finally:
                for name in (owner, "all"):
                    num_bytes[name] -= size
                    num_in[name] -= 1
                with trio.CancelScope(shield=True):
                    await trio.sleep(keeps - counts)
                give_back()
                give_back()
        num_ended += 1

    async def main():
        room = decoding._Room()
        async with trio.open_nursery() as nursery:
            for request in requests:
                nursery.start_soon(ask, room, *request)
        assert not room._owners
        assert not room._all.taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "DECODED_BYTES", 1000)
        patch.setattr(decoding, "ALL_DECODED_BYTES", 2500)
        trio.run(main, clock=MockClock(autojump_threshold=0))
    assert num_ended == len(requests)
