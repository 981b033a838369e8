"""A request with images is kept once: by the engine, and not by the RPC as well."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from engine.errors import ShuttingDown
from grpc_service.access.decoding import SMALL_BYTES
from grpc_service.access.interceptor import Interceptor
from grpc_service.client import messages as pb
from grpc_service.rpc.status import StatusCode
from grpc_service.rpc.testing import open_server
from grpc_service.services.error_status import status_of
from grpc_service.services.methods import methods

REQUESTS = {
    "Embed": pb.EmbedRequest(inputs=[{"image": b"a"}]),
    "Generate": pb.GenerateRequest(chat={"messages": [{"role": "user", "content": "a"}]}),
    "GenerateImage": pb.GenerateImageRequest(prompt="a", source={"image": b"a"}),
}


class Parsing:
    """Parses as a class of messages does, and keeps what it made."""

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
    async with open_server(Interceptor(served, None, status_of).serve) as server:
        client = await server.connect()
        path = f"triolet.v1.Inference/{name}"
        answer = await client.request(path, REQUESTS[name].SerializeToString())
        assert answer.code is StatusCode.UNAVAILABLE, answer.message
    assert counts == [2]  # the test's list, and the argument of the count itself


async def test_a_deadline_that_passes_in_the_queue_for_decoding_names_its_phase(autojump_clock):
    """Its status said that the deadline had passed, and not where, as that of the engine does."""
    interceptor = Interceptor(methods(SimpleNamespace(), 2**20), None, status_of)
    async with open_server(interceptor.serve) as server:
        client = await server.connect()
        data = pb.GenerateRequest(text="a" * SMALL_BYTES).SerializeToString()
        async with interceptor._decoding._medium._turns.hold("another"):
            answer = await client.request(
                "triolet.v1.Inference/Generate", data, headers={"grpc-timeout": "1S"}
            )
        assert answer.code is StatusCode.DEADLINE_EXCEEDED
        assert answer.message == "the deadline passed in phase read, before the request was decoded"
