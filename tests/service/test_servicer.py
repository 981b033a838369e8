"""The services against a scripted front: real grpc on both ends, no engine."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc_status.rpc_status import GRPC_DETAILS_METADATA_KEY

from engine.core.events import Finished, Tokens
from engine.core.types import EndReason, Timings, Usage
from engine.errors import DeadlineExceeded, ModelNotFound, Overloaded, ReaderStalled
from engine.requests import Started
from grpc_service._generated.triolet.v1 import (
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)
from grpc_service.servicer import CONTROL, INFERENCE, MODELS
from tests.service.fake_front import SMALL_WINDOW, FakeFront, complaints, run

STARTED = Started("r1", "stories", 4)
METHODS = {
    f"{service.full_name}/{method.name}": method
    for service in (INFERENCE, MODELS, CONTROL)
    for method in service.methods
}


def tokens(text, *, choice=0, ids=(5,)):
    return Tokens("r1", choice, ids, text)


def finished(choice=0, **kwargs):
    kwargs = {"reason": EndReason.STOP, "usage": Usage(4, 0, 2), "timings": Timings()} | kwargs
    return Finished("r1", choice, **kwargs)


def generate(channel, timeout=None, **request):
    stub = inference_pb2_grpc.InferenceStub(channel)
    request = {"text": "Once"} | request
    return stub.Generate(inference_pb2.GenerateRequest(**request), timeout=timeout)


async def collect(call):
    """The messages of a stream and how it ended: None, or its AioRpcError."""
    messages = []
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    except grpc.aio.AioRpcError as error:
        return messages, error
    return messages, None


def generate_all(front, **kwargs):
    async def main(channel):
        return await collect(generate(channel, **kwargs))

    return run(front, main)


def details(error):
    """The google.rpc details of a call's end, by message name."""
    [status] = [
        value for key, value in error.trailing_metadata() if key == GRPC_DETAILS_METADATA_KEY
    ]
    status = Status.FromString(status)
    assert (status.code, status.message) == (error.code().value[0], error.details())
    found = {}
    for packed in status.details:
        name = packed.TypeName().removeprefix("google.rpc.")
        found[name] = getattr(error_details_pb2, name)()
        assert packed.Unpack(found[name])
    assert found["ErrorInfo"].domain == "triolet"
    return found


# ---- streams ---------------------------------------------------------------------------------


def test_a_generation_is_started_deltas_finished_and_all_credit_comes_back():
    front = FakeFront([STARTED], [tokens("Once")], [tokens(" upon"), tokens(" a")], [finished()])
    messages, error = generate_all(front)
    assert error is None
    assert [message.WhichOneof("event") for message in messages] == [
        "started",
        "delta",
        "delta",
        "finished",
    ]
    assert [message.delta.text for message in messages[1:3]] == ["Once", " upon a"]
    assert not messages[1].delta.token_ids
    assert (front.last.num_written, front.last.num_leaves) == (3, 1)


def test_token_ids_come_when_asked_for():
    front = FakeFront([STARTED, tokens("a", ids=(1, 2)), tokens("", ids=(3,)), finished()])
    messages, _ = generate_all(front, output={"token_ids": True})
    assert messages[1].delta.token_ids == [1, 2, 3]


def test_credit_comes_back_for_events_that_gave_no_message():
    front = FakeFront([STARTED], [tokens("")], [tokens("")], [finished()])
    messages, _ = generate_all(front)
    assert len(messages) == 2
    assert front.last.num_written == 2


def test_a_text_beyond_the_message_limit_comes_in_parts():
    text = "é" * (3 * 2**20)
    messages, error = generate_all(FakeFront([STARTED], [tokens(text)], [finished()]))
    assert error is None
    assert "".join(message.delta.text for message in messages) == text
    assert max(message.ByteSize() for message in messages) < 4 * 2**20


def test_the_clients_deadline_is_the_requests_timeout():
    front = FakeFront([STARTED], [finished()])
    generate_all(front, timeout=20)
    assert 18 < front.last.request.timeout_s < 21
    generate_all(front)
    assert front.last.request.timeout_s is None


# ---- ends ------------------------------------------------------------------------------------


def test_an_error_is_told_after_the_events_before_it():
    front = FakeFront(
        [STARTED],
        [tokens("Once")],
        error=DeadlineExceeded("out of time", phase="decode", tokens_done=1),
    )
    messages, error = generate_all(front)
    assert len(messages) == 2
    assert (error.code(), error.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, "out of time")
    info = details(error)["ErrorInfo"]
    assert info.reason == "DEADLINE_EXCEEDED"
    assert dict(info.metadata) == {"phase": "decode", "tokens_done": "1"}
    assert front.last.num_leaves == 1


def test_a_refusal_carries_its_retry_hint():
    _, error = generate_all(FakeFront(error=Overloaded("the queue is full", retry_after_s=2.5)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(error)["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == 2.5


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"sampling": {"top_p": 2.0}}, "sampling.top_p"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
        ({"n": 0}, "n"),
        ({"chat": {}}, "chat.messages"),
        ({"chat": {"messages": [{"content": "hi"}]}}, "chat.messages[0].role"),
        ({"token_ids": {}}, "token_ids.ids"),
        ({"request_id": "x" * 1000}, "request_id"),
    ],
)
def test_a_broken_field_is_an_invalid_argument_that_names_it(request_fields, field):
    front = FakeFront()
    if request_fields.keys() & {"chat", "token_ids"}:
        request_fields = {"text": None} | request_fields
    _, error = generate_all(front, **request_fields)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [v.field for v in details(error)["BadRequest"].field_violations] == [field]
    assert not front.calls


def test_an_unexpected_error_is_internal_logged_and_not_shown(caplog):
    _, error = generate_all(FakeFront([STARTED], error=ZeroDivisionError("secret")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert details(error)["ErrorInfo"].reason == "ENGINE_BUG"
    assert "secret" not in error.details()
    assert "ZeroDivisionError: secret" in caplog.text


def not_utf_8(method):
    """A message whose first string field is not UTF-8; garbage for a message without one."""
    service, name = method.split("/")
    [found] = [s for s in (INFERENCE, MODELS, CONTROL) if s.full_name == service]
    fields = found.methods_by_name[name].input_type.fields
    strings = [field.number for field in fields if field.type == field.TYPE_STRING]
    return bytes([strings[0] << 3 | 2, 2]) + b"\xff\xfe" if strings else b"\xff\xff"


@pytest.mark.parametrize("kind", ["garbage", "not-utf-8"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_bytes_that_are_no_request_are_an_invalid_argument(method, kind, caplog):
    data = b"\xff\xff" if kind == "garbage" else not_utf_8(method)

    async def main(channel):
        if method.endswith("Generate"):
            return (await collect(channel.unary_stream(f"/{method}")(data)))[1]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{method}")(data)
        return caught.value

    error = run(FakeFront(), main)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(error)["ErrorInfo"].reason == "INVALID_REQUEST"
    assert "Request" in error.details()
    assert not complaints(caplog)


ENDLESS = {"triolet.v1.Control/WatchStats"}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_served(name):
    method = METHODS[name]

    async def main(channel):
        kind = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = kind(
            f"/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )(GetMessageClass(method.input_type)())
        try:
            if name in ENDLESS:
                await call.read()
                return grpc.StatusCode.OK
            await (collect(call) if method.server_streaming else call)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return await call.code()

    code = run(FakeFront([STARTED], [finished()]), main)
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)


# ---- clients that go, and clients that do not read -------------------------------------------


def test_a_client_that_cancels_cancels_the_call():
    front = FakeFront([STARTED], [tokens("Once")], hangs=True)

    async def main(channel):
        call = generate(channel)
        assert (await call.read()).HasField("started")
        assert (await call.read()).delta.text == "Once"
        assert call.cancel()
        await front.last.left.wait()
        return await collect(call)

    with pytest.raises(asyncio.CancelledError):
        run(front, main)
    assert (front.last.num_written, front.last.num_leaves) == (1, 1)


def test_a_channel_that_closes_cancels_the_call():
    front = FakeFront([STARTED], hangs=True)

    async def main(channel):
        call = generate(channel)
        await call.read()
        await channel.close()
        await front.last.left.wait()

    run(front, main)
    assert front.last.num_leaves == 1


def test_a_deadline_that_the_engine_missed_still_cancels_the_call():
    front = FakeFront([STARTED], hangs=True)

    async def main(channel):
        _, error = await collect(generate(channel, timeout=0.2))
        await front.last.left.wait()
        return error

    assert run(front, main).code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_server_that_stops_cancels_the_call():
    front = FakeFront([STARTED], hangs=True)

    async def main(channel):
        await generate(channel).read()

    run(front, main)
    assert front.last.num_leaves == 1


async def blocked(front):
    """Waits until the last call's writer stands still."""
    seen = -1
    while seen != front.last.num_received:
        seen = front.last.num_received
        await asyncio.sleep(0.1)
    return seen


LONG = [[tokens("x" * 1000)] for _ in range(500)]


def test_a_reader_that_stops_holds_credit_back_and_gets_everything_when_it_reads_on():
    stalled = ReaderStalled("the client did not read")
    front = FakeFront([STARTED], *LONG, error=stalled)

    async def main(channel):
        call = generate(channel)
        await call.read()
        taken = await blocked(front)
        assert 0 < taken < 400
        assert front.last.num_written < taken
        return await collect(call)

    messages, error = run(front, main, options=SMALL_WINDOW)
    assert len(messages) == len(LONG)
    assert front.last.num_written == len(LONG)
    assert error.code() is grpc.StatusCode.ABORTED
    assert details(error)["ErrorInfo"].reason == "READER_STALLED"


def test_a_client_that_goes_during_a_blocked_write_cancels_the_call(caplog):
    front = FakeFront([STARTED], *LONG, hangs=True)

    async def main(channel):
        call = generate(channel)
        await call.read()
        await blocked(front)
        call.cancel()
        await front.last.left.wait()

    run(front, main, options=SMALL_WINDOW)
    assert front.last.num_leaves == 1
    assert not complaints(caplog)


def test_nothing_is_sent_or_logged_after_the_client_has_gone(caplog):
    """A front that swallows the handler's one cancellation: the next write ends the handler."""
    for afterwards in ([tokens("too late")], []):
        front = FakeFront([STARTED], hangs=True, afterwards=afterwards)

        async def main(channel, front=front):
            call = generate(channel)
            await call.read()
            call.cancel()
            await front.last.left.wait()

        run(front, main)
        assert (front.last.num_written, front.last.num_leaves) == (0, 1)
    assert not complaints(caplog)


# ---- the other RPCs --------------------------------------------------------------------------


def test_tokenize_gives_ids_texts_and_places():
    async def main(channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        return [
            await stub.Tokenize(inference_pb2.TokenizeRequest(text="ab", model="m")),
            await stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat, add_special_tokens=False)),
        ]

    front = FakeFront()
    text, chat = run(front, main)
    assert [(token.id, token.text, token.start, token.end) for token in text.tokens] == [
        (97, "a", 0, 1),
        (98, "b", 1, 2),
    ]
    assert text.max_model_len == 2048
    assert "".join(token.text for token in chat.tokens) == "hi"
    assert front.engine.asked[0] == ("m", "ab", None, None)
    assert front.engine.asked[1][3] is False


def test_an_answer_beyond_the_message_limit_is_refused_by_field():
    async def main(channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        await stub.Tokenize(inference_pb2.TokenizeRequest(text="a" * 2**19))

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        run(FakeFront(), main)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(caught.value)["ErrorInfo"].reason == "REQUEST_TOO_LARGE"


def test_detokenize_skips_special_tokens_unless_told():
    async def main(channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        await stub.Detokenize(inference_pb2.DetokenizeRequest(ids=[104], skip_special_tokens=False))
        return await stub.Detokenize(inference_pb2.DetokenizeRequest(ids=[104, 105]))

    front = FakeFront()
    assert run(front, main).text == "hi"
    assert front.engine.asked == [("", (104,), False), ("", (104, 105), True)]


def test_models_are_listed_and_found_by_alias():
    async def main(channel):
        stub = models_pb2_grpc.ModelsStub(channel)
        listed = await stub.ListModels(models_pb2.ListModelsRequest())
        found = await stub.GetModel(models_pb2.GetModelRequest(model="s"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModel(models_pb2.GetModelRequest(model="nope"))
        return listed, found, caught.value

    listed, found, error = run(FakeFront(), main)
    assert [model.name for model in listed.models] == ["stories", "broken"]
    assert found.model == listed.models[0]
    assert found.model.last_used.ToNanoseconds() == 1_500_000_000
    assert not listed.models[1].HasField("last_used")
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert details(error)["ErrorInfo"].reason == ModelNotFound.reason


def test_statistics():
    async def main(channel):
        return await control_pb2_grpc.ControlStub(channel).GetStats(control_pb2.GetStatsRequest())

    totals = run(FakeFront(), main).totals
    assert (totals.running, totals.requests_total.finished) == (3, 7)
