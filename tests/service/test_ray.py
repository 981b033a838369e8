"""The answers of a replica behind Ray Serve, without Ray: an asyncio engine with a fake model, and
the wrapper of Serve's handlers on a server of grpc's."""

import asyncio
import contextlib
import re
import time
from functools import partial
from types import SimpleNamespace

import grpc
import pytest
from grpc.aio._server import Server

from engine.api import aio
from engine.errors import InvalidRequest, RequestNotFound, ShuttingDown, Unsupported, WorkerLost
from engine.worker.fakes.text import FakeScript
from grpc_service._generated.triolet.v1 import (
    classes_pb2,
    common_pb2,
    images_pb2,
    inference_pb2,
    inference_pb2_grpc,
    vectors_pb2,
)
from grpc_service.ray.answers import Answers
from grpc_service.ray.ingress import INSTEAD, REMAINING_KEY, SERVES_OWN, add_inference
from grpc_service.services import (
    classify_codec,
    encode_codec,
    image_generation_codec,
    text_codec,
)
from grpc_service.services.error_status import status_of
from grpc_service.services.methods import INFERENCE
from tests.support.bodies import run_by
from tests.support.facades import open_fake
from tests.support.wire import broken_fields, generate_request, reason

LIMIT_S = 30
STEP_S = 0.01


# ---- answers


def run(body, **config):
    """Run ``body(answers, engine)`` beside an engine with a fake model."""

    async def main():
        script = FakeScript(step_s=STEP_S)
        async with asyncio.timeout(LIMIT_S), open_fake(aio, script=script, **config) as engine:
            await engine.wait_ready("fake")
            await body(Answers(engine), engine)

    asyncio.run(main())


in_engine = partial(run_by, run)


async def all_of(messages):
    """Return every message of a stream."""
    return [message async for message in messages]


@in_engine()
async def test_a_stream_has_the_messages_of_a_server(answers, engine):
    request = generate_request(prompt_ids=[1, 2], max_tokens=5, output={"token_ids": True})
    found = await all_of(answers.generate(request, None))
    assert [one.WhichOneof("event") for one in found] == ["started", *["delta"] * 5, "finished"]
    ids = [i for one in found[1:-1] for i in one.delta.token_ids]
    again = await all_of(answers.generate(request, 10.0))
    assert [i for one in again[1:-1] for i in one.delta.token_ids] == ids
    told = await answers.tokenize(inference_pb2.TokenizeRequest(text="<5><6>"))
    text = await answers.detokenize(
        common_pb2.DetokenizeRequest(ids=[one.id for one in told.tokens])
    )
    assert text.text == "<5><6>"


@in_engine()
async def test_refusals_are_the_engines(answers, engine):
    with pytest.raises(InvalidRequest, match="n: is 17"):
        await all_of(answers.generate(generate_request(n=17), None))
    with pytest.raises(Unsupported, match="resume_window") as refused:
        await all_of(answers.generate(generate_request(resume_window={"seconds": 3}), None))
    assert refused.value.field == "resume_window"
    with pytest.raises(RequestNotFound):
        await all_of(answers.attach(common_pb2.AttachRequest(request_id="a"), None))
    with pytest.raises(InvalidRequest):
        await all_of(answers.embed(vectors_pb2.EmbedRequest(inputs=[{}]), None))
    with pytest.raises(InvalidRequest, match="inputs"):
        await all_of(answers.classify(classes_pb2.ClassifyRequest(inputs=[{}]), None))
    with pytest.raises(InvalidRequest, match="prompt: is empty"):
        await all_of(answers.generate_image(images_pb2.GenerateImageRequest(), None))


DECODED = {
    "generate": (text_codec, "decode_generate", generate_request(prompt_ids=[1])),
    "embed": (encode_codec, "decode_embed", vectors_pb2.EmbedRequest(inputs=[{"text": "a"}])),
    "rerank": (encode_codec, "decode_rerank", vectors_pb2.RerankRequest(query="q")),
    "classify": (
        classify_codec,
        "decode_classify",
        classes_pb2.ClassifyRequest(inputs=[{"text": "a"}]),
    ),
    "generate_image": (
        image_generation_codec,
        "decode_generate_image",
        images_pb2.GenerateImageRequest(prompt="a"),
    ),
}


ENGINES_CALLS = ("generate", "embed", "rerank", "classify", "draw")


@pytest.mark.parametrize("name", DECODED)
def test_decoding_a_request_takes_from_its_timeout(name, monkeypatch):
    """Red if the engine counts the timeout from the end of the decoding."""
    codec, function, request = DECODED[name]
    decode, timeouts = getattr(codec, function), []

    def decode_slowly(message, timeout_s):
        time.sleep(0.1)
        return decode(message, timeout_s)

    def begin(asked):
        timeouts.append(asked.timeout_s)
        raise ShuttingDown("enough was seen")

    monkeypatch.setattr(codec, function, decode_slowly)
    engine = SimpleNamespace(**dict.fromkeys(ENGINES_CALLS, begin))
    for remaining_s in (100.0, None):
        with pytest.raises(ShuttingDown):
            asyncio.run(all_of(getattr(Answers(engine), name)(request, remaining_s)))
    assert timeouts[0] <= 99.9
    assert timeouts[1] is None


@in_engine()
async def test_a_reader_that_is_cancelled_frees_the_blocks(answers, engine):
    request = generate_request(prompt_ids=range(1, 40), max_tokens=1000)
    stream = answers.generate(request, None)
    for _ in range(3):
        await anext(stream)
    reading = asyncio.create_task(all_of(stream))
    await asyncio.sleep(2 * STEP_S)
    counts = (await engine.statistics()).totals
    assert counts.free_blocks < counts.total_blocks
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    while counts.free_blocks < counts.total_blocks:
        await asyncio.sleep(STEP_S)
        counts = (await engine.statistics()).totals
    assert counts.requests_total.cancelled == 1


# ---- the wrapper of Serve's handlers


class LikeServe(Server):
    """A server that replaces a service's functions by ``stream`` and ``unary``, as Serve's does."""

    def __init__(self, stream, unary):
        super().__init__(None, (), (), (), None, None)
        self._stream, self._unary = stream, unary

    def add_generic_rpc_handlers(self, handlers):
        """Add the service with functions of its own."""
        [handler] = handlers
        handler._method_handlers = {
            name: one._replace(
                response_serializer=None, unary_stream=self._stream, unary_unary=self._unary
            )
            for name, one in handler._method_handlers.items()
        }
        super().add_generic_rpc_handlers(handlers)


def serve(body, stream=None, unary=None, *, of_channel=False):
    """Run ``body(stub)``, or ``body(channel)``, beside a server that answers by these functions."""

    async def main():
        server = LikeServe(stream, unary)
        add_inference(inference_pb2_grpc.InferenceServicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with asyncio.timeout(LIMIT_S):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await body(channel if of_channel else inference_pb2_grpc.InferenceStub(channel))
            await server.stop(0)

    asyncio.run(main())


MESSAGE = inference_pb2.GenerateResponse(delta={"text": "a"}).SerializeToString()


def test_serve_is_told_how_long_the_client_waits():
    told = []

    async def stream(request, context):
        told.append(dict(context.invocation_metadata()).get(REMAINING_KEY))
        yield MESSAGE

    async def body(stub):
        forged = ((REMAINING_KEY, "1000"),)
        for timeout in (None, 20):
            call = stub.Generate(generate_request(), timeout=timeout, metadata=forged)
            assert len([one async for one in call]) == 1

    serve(body, stream)
    assert told[0] is None
    assert 10 < float(told[1]) <= 20.1


def test_a_cancel_reaches_serve_even_while_a_message_is_written():
    cancelled, came = [], asyncio.Semaphore(0)

    async def stream(request, context):
        try:
            while True:
                yield MESSAGE * 1000
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            cancelled.append(context.peer())
            came.release()
            raise

    async def body(stub):
        for count in range(1, 11):
            call = stub.Generate(generate_request())
            for _ in range(count):
                await anext(aiter(call))
            call.cancel()
            await came.acquire()

    serve(body, stream)
    assert all(peer.startswith("ipv4:127.0.0.1") for peer in cancelled)


def test_the_message_that_brings_a_failure_is_dropped_and_its_details_arrive():
    status = status_of(InvalidRequest.of("n", "is 17"))

    async def stream(request, context):
        yield MESSAGE
        context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
        context.set_details(status.message)
        context.set_trailing_metadata(status.metadata)
        yield b""

    async def unary(request, context):
        context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
        context.set_details(status.message)
        context.set_trailing_metadata(status.metadata)
        return b""

    async def body(stub):
        call = stub.Generate(generate_request())
        assert (await call.read()).delta.text == "a"
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
        assert reason(failed.value) == "INVALID_REQUEST"
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Tokenize(inference_pb2.TokenizeRequest())
        assert reason(failed.value) == "INVALID_REQUEST"

    serve(body, stream, unary)


def test_a_request_is_counted_and_read_before_serve_has_it():
    """The old fault: the proxy did not count values (`tests/unit/test_value_counts.py`), and a
    message of two million empty stop strings stopped it for seconds."""
    served = []

    async def stream(request, context):
        served.append(request)
        yield MESSAGE

    async def unary(request, context):
        served.append(request)
        return b""

    async def body(channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        large = generate_request(text="a" * 5000)
        assert len(await all_of(stub.Generate(large))) == 1
        assert served == [large]
        many = generate_request(sampling={"stop": [""] * 2000})
        ids = common_pb2.DetokenizeRequest(ids=[1] * 262145)
        for call, field in (
            (all_of(stub.Generate(many)), "sampling.stop"),
            (stub.Detokenize(ids), "ids"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert broken_fields(failed.value) == [field]
        raw = channel.unary_stream("/triolet.v1.Inference/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await all_of(raw(b"\x0a"))
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert served == [large]

    serve(body, stream, unary, of_channel=True)


def test_a_request_that_is_a_stream_is_refused_by_its_name():
    """The old fault: the call reached Serve's stand-in for the service, which knows no status."""
    streams = [one.name for one in INFERENCE.methods if one.client_streaming]
    assert streams == [*INSTEAD] == ["EmbedStream"]

    async def body(stub):
        message = vectors_pb2.EmbedStreamRequest(parameters={"model": "m"})
        for requests in ([], [message]):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await all_of(stub.EmbedStream(iter(requests)))
            assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert reason(failed.value) == Unsupported.reason
            assert failed.value.details().startswith("EmbedStream is not served behind Ray Serve")

    serve(body)


@in_engine()
async def test_every_other_method_has_its_answer(answers, engine):
    for method in INFERENCE.methods:
        name = re.sub(r"\B([A-Z])", r"_\1", method.name).lower()
        assert hasattr(answers, name) is not method.client_streaming


def test_a_failure_of_serves_own_gets_details():
    async def stream(request, context):
        yield MESSAGE
        context.set_code(grpc.StatusCode.INTERNAL)
        context.set_details("a traceback")

    async def body(stub):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await all_of(stub.Generate(generate_request()))
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason(failed.value) == WorkerLost.reason
        assert "traceback" not in failed.value.details()

    serve(body, stream)
    for make in SERVES_OWN.values():
        assert status_of(make()).message
