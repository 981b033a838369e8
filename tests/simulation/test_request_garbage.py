"""A request that has ended leaves nothing to Python's garbage collector: its text may be megabytes,
and the collector runs once in hundreds of requests. `tests.unit.rpc.test_garbage` checks the same
of calls, with handlers that have no engine."""

import gc

import pytest
import trio

from engine.requests.encode.stream import EncodeStream
from engine.requests.encode.values import EmbedRequest
from engine.requests.image_generation.stream import ImageGenerationStream
from engine.requests.image_generation.values import DrawRequest
from engine.requests.text import stream as text_stream
from engine.requests.text.stream import TextStream
from engine.requests.text.values import GenerateRequest
from engine.worker.fakes.text import FakeScript
from grpc_service.access.interceptor import Interceptor
from grpc_service.access.rpc_record import Rpc
from grpc_service.access.unread_calls import UnreadCalls
from grpc_service.client import messages as pb
from grpc_service.rpc.call import Call
from grpc_service.rpc.status import StatusCode
from grpc_service.services.backend import Backend
from grpc_service.services.call_writer import CallWriter
from grpc_service.services.error_status import status_of
from grpc_service.services.methods import methods
from tests.simulator.determinism import run_deterministically
from tests.support.rpc_calls import MemoryServer, serving
from tests.support.virtual_engine import fake_engine

SERVICE = "triolet.v1.Inference/"
OF_REQUESTS = (Call, CallWriter, Rpc, GenerateRequest, TextStream, EmbedRequest, EncodeStream)
OF_REQUESTS += (DrawRequest, ImageGenerationStream)


def generate(**fields):
    fields = {"text": "a", "sampling": {"max_tokens": 3}} | fields
    return "Generate", pb.GenerateRequest(**fields).SerializeToString()


async def to_its_end(client, name, message):
    await client.request(SERVICE + name, message)


async def reset(client, name, message):
    call = client.call(message, path=f"/{SERVICE}{name}")
    await trio.sleep(0.25)
    assert call not in client.ends
    client.reset(call)


async def late(client, name, message):
    headers = {"grpc-timeout": "300m"}
    answer = await client.request(SERVICE + name, message, headers=headers)
    assert answer.code is StatusCode.DEADLINE_EXCEEDED


LONG = generate(sampling={"max_tokens": 100})
WAYS = {
    "OK": (to_its_end, *generate()),
    "several choices": (to_its_end, *generate(n=3)),
    "a prompt that is cut": (to_its_end, *generate(text="a b c d", prompt={"truncate_to": 2})),
    "reset by the client": (reset, *LONG),
    "deadline": (late, *LONG),
    "wrong field": (to_its_end, *generate(sampling={"top_p": 7})),
    "wrong for the model": (to_its_end, *generate(token_ids={"ids": [2**30]})),
    "no such model": (to_its_end, *generate(model="none")),
    "not decoded": (to_its_end, "Generate", b"\xff"),
    "not of this model": (
        to_its_end,
        "Embed",
        pb.EmbedRequest(inputs=[{"text": "a"}]).SerializeToString(),
    ),
    "tokenized": (to_its_end, "Tokenize", pb.TokenizeRequest(text="a b").SerializeToString()),
}


def alive():
    # `isinstance` would ask some of torch's objects for their class, which warn of that.
    return [one for one in gc.get_objects() if type(one) in OF_REQUESTS]


@pytest.mark.parametrize("way", WAYS)
def test_a_request_that_has_ended_is_freed_without_the_collector(way):
    """Red if the call's record keeps the call and the request's stream in a cycle."""
    run, name, message = WAYS[way]
    left = []

    async def main():
        async with fake_engine(FakeScript(step_s=0.1)) as engine:
            served = methods(Backend(engine, UnreadCalls(trio.current_time)), 2**22)
            served = Interceptor(served, None, status_of).serve
            async with serving(served, kind=MemoryServer) as server:
                client = await server.connect()
                gc.collect()
                older = set(map(id, alive()))
                gc.disable()
                await run(client, name, message)
                await trio.sleep(2)
                await client.settle()
                left.extend(type(one).__name__ for one in alive() if id(one) not in older)

    try:
        run_deterministically(main, 0)
    finally:
        gc.enable()
    assert left == []


INPUTS = {
    "text": {"text": "a " * 50},
    "chat": {"chat": {"messages": [{"role": "user", "content": "a " * 50}]}},
    "ids": {"token_ids": {"ids": [1] * 50}},
}


@pytest.mark.parametrize("name", INPUTS)
def test_a_prompt_that_was_cut_is_let_go_while_its_request_runs(name, monkeypatch):
    """Red if the uncut prompt is kept by the request's task, its call's task or its stream: a
    thousand requests of 4 MiB may run at once."""
    monkeypatch.setattr(text_stream, "KEPT_BYTES", 50)
    large = []
    message = pb.GenerateRequest(
        prompt={"truncate_to": 9}, sampling={"max_tokens": 100}, **INPUTS[name]
    )

    async def main():
        async with fake_engine(FakeScript(step_s=0.1)) as engine:
            served = methods(Backend(engine, UnreadCalls(trio.current_time)), 2**22)
            served = Interceptor(served, None, status_of).serve
            async with serving(served, kind=MemoryServer) as server:
                client = await server.connect()
                call = client.call(message.SerializeToString(), path=f"/{SERVICE}Generate")
                while len(client.messages[call]) < 5:
                    await client.settle()
                    await trio.sleep(0.1)
                large.extend(one.num_bytes for one in alive() if type(one) is GenerateRequest)
                assert call not in client.ends

    run_deterministically(main, 0)
    assert large == [0]
