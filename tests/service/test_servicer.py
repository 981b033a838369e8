"""The services against a scripted backend: real grpc on both ends, no engine."""

import asyncio

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from engine.core.common.events import Finished
from engine.core.common.types import EndReason, Timings, Usage
from engine.core.text.types import Tokens
from engine.errors import DeadlineExceeded, ModelNotFound, Overloaded, ReaderStalled
from engine.requests.text.values import Started
from grpc_service.client import messages as pb
from grpc_service.client import stubs
from grpc_service.services.methods import CONTROL, INFERENCE, MODELS
from tests.service.fake_backend import SMALL_WINDOW, FakeBackend, complaints, run
from tests.support.wire import details

STARTED = Started("r1", "stories", 4)
METHODS = {
    f"{service.full_name}/{method.name}": method
    for service in (INFERENCE, MODELS, CONTROL)
    for method in service.methods
}


def tokens(text, *, choice=0, ids=(5,)):
    """Return the event of a token with this text."""
    return Tokens("r1", choice, ids, text)


def finished(choice=0, **kwargs):
    """Return the end of a choice."""
    kwargs = {"reason": EndReason.STOP, "usage": Usage(4, 0, 2), "timings": Timings()} | kwargs
    return Finished("r1", choice, **kwargs)


def generate(channel, timeout=None, **request):
    """Begin a Generate call."""
    stub = stubs.InferenceStub(channel)
    request = {"text": "Once"} | request
    return stub.Generate(pb.GenerateRequest(**request), timeout=timeout)


async def collect(call):
    """Return a stream's messages, and its end: None, or its AioRpcError."""
    messages = []
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    except grpc.aio.AioRpcError as error:
        return messages, error
    return messages, None


def generate_all(backend, **kwargs):
    """Generate, and return the messages and the stream's end."""

    async def main(channel):
        return await collect(generate(channel, **kwargs))

    return run(backend, main)


# ---- streams ---------------------------------------------------------------------------------


def test_a_generation_is_started_deltas_finished_and_all_credit_comes_back():
    backend = FakeBackend(
        [STARTED], [tokens("Once")], [tokens(" upon"), tokens(" a")], [finished()]
    )
    messages, error = generate_all(backend)
    assert error is None
    assert [message.WhichOneof("event") for message in messages] == [
        "started",
        "delta",
        "delta",
        "delta",
        "finished",
    ]
    assert [message.delta.text for message in messages[1:4]] == ["Once", " upon", " a"]
    assert not messages[1].delta.token_ids
    assert (backend.last.num_written, backend.last.num_leaves) == (3, 1)


def test_token_ids_come_on_request():
    backend = FakeBackend([STARTED, tokens("a", ids=(1, 2)), tokens("", ids=(3,)), finished()])
    messages, _ = generate_all(backend, output={"token_ids": True})
    assert messages[1].delta.token_ids == [1, 2, 3]


def test_credit_comes_back_for_events_that_gave_no_message():
    backend = FakeBackend([STARTED], [tokens("")], [tokens("")], [finished()])
    messages, _ = generate_all(backend)
    assert len(messages) == 2
    assert backend.last.num_written == 2


def test_a_text_beyond_the_message_limit_comes_in_parts():
    text = "é" * (3 * 2**20)
    messages, error = generate_all(FakeBackend([STARTED], [tokens(text)], [finished()]))
    assert error is None
    assert "".join(message.delta.text for message in messages) == text
    assert max(message.ByteSize() for message in messages) < 4 * 2**20


def test_the_clients_deadline_is_the_requests_timeout():
    backend = FakeBackend([STARTED], [finished()])
    generate_all(backend, timeout=20)
    assert 18 < backend.last.request.timeout_s < 21
    generate_all(backend)
    assert backend.last.request.timeout_s is None


# ---- ends ------------------------------------------------------------------------------------


def test_an_error_is_sent_after_the_events_before_it():
    backend = FakeBackend(
        [STARTED],
        [tokens("Once")],
        error=DeadlineExceeded("out of time", phase="decode", tokens_done=1),
    )
    messages, error = generate_all(backend)
    assert len(messages) == 2
    assert (error.code(), error.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, "out of time")
    info = details(error)["ErrorInfo"]
    assert info.reason == "DEADLINE_EXCEEDED"
    assert dict(info.metadata) == {"phase": "decode", "tokens_done": "1"}
    assert backend.last.num_leaves == 1


def test_a_refusal_carries_its_retry_hint():
    _, error = generate_all(FakeBackend(error=Overloaded("the queue is full", retry_after_s=2.5)))
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
    backend = FakeBackend()
    if request_fields.keys() & {"chat", "token_ids"}:
        request_fields = {"text": None} | request_fields
    _, error = generate_all(backend, **request_fields)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [v.field for v in details(error)["BadRequest"].field_violations] == [field]
    assert not backend.streams


def test_an_unexpected_error_is_internal_logged_and_not_shown(caplog):
    _, error = generate_all(FakeBackend([STARTED], error=ZeroDivisionError("secret")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert details(error)["ErrorInfo"].reason == "ENGINE_BUG"
    assert "secret" not in error.details()
    assert "ZeroDivisionError: secret" in caplog.text


def not_utf_8(method):
    """Return a message whose first string field is not UTF-8, or garbage without such a field."""
    service, name = method.split("/")
    [found] = [s for s in (INFERENCE, MODELS, CONTROL) if s.full_name == service]
    fields = found.methods_by_name[name].input_type.fields
    strings = [field.number for field in fields if field.type == field.TYPE_STRING]
    return bytes([strings[0] << 3 | 2, 2]) + b"\xff\xfe" if strings else b"\xff\xff"


@pytest.mark.parametrize("kind", ["garbage", "not-utf-8"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_malformed_bytes_are_an_invalid_argument(method, kind, caplog):
    data = b"\xff\xff" if kind == "garbage" else not_utf_8(method)

    async def main(channel):
        if method.endswith("Generate"):
            return (await collect(channel.unary_stream(f"/{method}")(data)))[1]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{method}")(data)
        return caught.value

    error = run(FakeBackend(), main)
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

    code = run(FakeBackend([STARTED], [finished()]), main)
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)


# ---- clients that leave, and clients that do not read ----------------------------------------


def test_a_client_that_cancels_cancels_the_call():
    backend = FakeBackend([STARTED], [tokens("Once")], hangs=True)

    async def main(channel):
        call = generate(channel)
        assert (await call.read()).HasField("started")
        assert (await call.read()).delta.text == "Once"
        assert call.cancel()
        await backend.last.left.wait()
        return await collect(call)

    with pytest.raises(asyncio.CancelledError):
        run(backend, main)
    assert (backend.last.num_written, backend.last.num_leaves) == (1, 1)


def test_a_channel_that_closes_cancels_the_call():
    backend = FakeBackend([STARTED], hangs=True)

    async def main(channel):
        call = generate(channel)
        await call.read()
        await channel.close()
        await backend.last.left.wait()

    run(backend, main)
    assert backend.last.num_leaves == 1


def test_a_deadline_that_the_engine_missed_still_cancels_the_call():
    backend = FakeBackend([STARTED], hangs=True)

    async def main(channel):
        _, error = await collect(generate(channel, timeout=0.2))
        await backend.last.left.wait()
        return error

    assert run(backend, main).code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_server_that_stops_cancels_the_call():
    backend = FakeBackend([STARTED], hangs=True)

    async def main(channel):
        await generate(channel).read()

    run(backend, main)
    assert backend.last.num_leaves == 1


async def blocked(backend):
    """Wait until the last call's writer is blocked."""
    seen = -1
    while seen != backend.last.num_received:
        seen = backend.last.num_received
        await asyncio.sleep(0.1)
    return seen


LONG = [[tokens("x" * 1000)] for _ in range(500)]


def test_a_reader_that_stops_holds_credit_back_and_gets_everything_when_it_reads_on():
    stalled = ReaderStalled("the client did not read")
    backend = FakeBackend([STARTED], *LONG, error=stalled)

    async def main(channel):
        call = generate(channel)
        await call.read()
        taken = await blocked(backend)
        assert 0 < taken < 400
        assert backend.last.num_written < taken
        return await collect(call)

    messages, error = run(backend, main, options=SMALL_WINDOW)
    assert len(messages) == len(LONG)
    assert backend.last.num_written == len(LONG)
    assert error.code() is grpc.StatusCode.ABORTED
    assert details(error)["ErrorInfo"].reason == "READER_STALLED"


def test_a_client_that_leaves_during_a_blocked_write_cancels_the_call(caplog):
    backend = FakeBackend([STARTED], *LONG, hangs=True)

    async def main(channel):
        call = generate(channel)
        await call.read()
        await blocked(backend)
        call.cancel()
        await backend.last.left.wait()

    run(backend, main, options=SMALL_WINDOW)
    assert backend.last.num_leaves == 1
    assert not complaints(caplog)


def test_nothing_is_sent_or_logged_after_the_client_has_gone(caplog):
    """The backend swallows the handler's only cancellation; the next write ends the handler."""
    for afterwards in ([tokens("too late")], []):
        backend = FakeBackend([STARTED], hangs=True, afterwards=afterwards)

        async def main(channel, backend=backend):
            call = generate(channel)
            await call.read()
            call.cancel()
            await backend.last.left.wait()

        run(backend, main)
        assert (backend.last.num_written, backend.last.num_leaves) == (0, 1)
    assert not complaints(caplog)


# ---- the other RPCs --------------------------------------------------------------------------


def test_tokenize_gives_ids_texts_and_places():
    async def main(channel):
        stub = stubs.InferenceStub(channel)
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        return [
            await stub.Tokenize(pb.TokenizeRequest(text="ab", model="m")),
            await stub.Tokenize(pb.TokenizeRequest(chat=chat, add_special_tokens=False)),
        ]

    backend = FakeBackend()
    text, chat = run(backend, main)
    assert [(token.id, token.text, token.start, token.end) for token in text.tokens] == [
        (97, "a", 0, 1),
        (98, "b", 1, 2),
    ]
    assert text.max_model_len == 2048
    assert "".join(token.text for token in chat.tokens) == "hi"
    assert backend.engine.asked[0] == ("m", "ab", None, None)
    assert backend.engine.asked[1][3] is False


def test_an_answer_beyond_the_message_limit_is_refused_by_field():
    async def main(channel):
        stub = stubs.InferenceStub(channel)
        await stub.Tokenize(pb.TokenizeRequest(text="a" * 2**19))

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        run(FakeBackend(), main)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(caught.value)["ErrorInfo"].reason == "REQUEST_TOO_LARGE"


def test_detokenize_skips_special_tokens_by_default():
    async def main(channel):
        stub = stubs.InferenceStub(channel)
        await stub.Detokenize(pb.DetokenizeRequest(ids=[104], skip_special_tokens=False))
        return await stub.Detokenize(pb.DetokenizeRequest(ids=[104, 105]))

    backend = FakeBackend()
    assert run(backend, main).text == "hi"
    assert backend.engine.asked == [("", (104,), False), ("", (104, 105), True)]


def test_models_are_listed_and_found_by_alias():

    async def main(channel):
        stub = stubs.ModelsStub(channel)
        listed = await stub.ListModels(pb.ListModelsRequest())
        found = await stub.GetModel(pb.GetModelRequest(model="s"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModel(pb.GetModelRequest(model="nope"))
        return listed, found, caught.value

    listed, found, error = run(FakeBackend(), main)
    assert [model.name for model in listed.models] == ["stories", "broken"]
    assert found.model == listed.models[0]
    assert found.model.last_used.ToNanoseconds() == 1_500_000_000
    assert not listed.models[1].HasField("last_used")
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert details(error)["ErrorInfo"].reason == ModelNotFound.reason


def test_statistics():
    async def main(channel):
        return await stubs.ControlStub(channel).GetStats(pb.GetStatsRequest())

    totals = run(FakeBackend(), main).totals
    assert (totals.running, totals.requests_total.finished) == (3, 7)
