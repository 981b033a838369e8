"""Methods, the dispatcher, and the helpers with which programs test their handlers in memory."""

import pytest
import trio
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2

from grpc_service.rpc.errors import RpcError
from grpc_service.rpc.limits import Limits
from grpc_service.rpc.methods import Dispatcher, Method, methods_of
from grpc_service.rpc.status import StatusCode
from tests.support.rpc_calls import serving

NAME = "demo.Greeter/Greet"


def packed(text):
    return StringValue(value=text).SerializeToString()


def serve(handler, **options):
    """Return a function that serves a call of one method by ``handler``."""
    return Dispatcher([Method(NAME, StringValue, handler, **options)]).serve


async def ask(handler, *messages, method=NAME, limits=None, headers=None, **options):
    """Call ``handler`` once, and return what the client gets."""
    async with serving(serve(handler, **options), limits) as server:
        client = await server.connect()
        return await client.request(method, *messages, headers=headers)


async def upper(request, call):
    return StringValue(value=request.value.upper())


async def fail(request, call):
    raise RpcError(StatusCode.NOT_FOUND, "no such nömber", [("x-a", "1"), ("x-b-bin", b"\0")])


async def crash(request, call):
    """Raise an exception that is no status."""
    raise ValueError("a secret path")


async def sleep(request, call):
    """Never answer. Cancellation: ends the waiting."""
    await trio.sleep_forever()


async def test_a_handler_that_returns_a_message_has_answered():
    answer = await ask(upper, packed("a"))
    assert answer.messages == [packed("A")]
    assert answer.code is StatusCode.OK
    assert answer.message == ""


async def test_a_handler_may_write_and_return_nothing():
    async def twice(request, call):
        await call.write(request)
        await call.write(request)

    answer = await ask(twice, packed("a"))
    assert answer.messages == [packed("a")] * 2
    assert answer.code is StatusCode.OK


async def test_a_handler_of_a_stream_reads_itself():
    async def join(request, call):
        assert request is None
        found = ""
        while (data := await call.read()) is not None:
            found += StringValue.FromString(data).value
        return StringValue(value=found)

    answer = await ask(join, packed("a"), packed("b"), takes_stream=True)
    assert answer.messages == [packed("ab")]


async def test_an_rpc_error_is_the_calls_status():
    answer = await ask(fail, packed("a"))
    assert answer.code is StatusCode.NOT_FOUND
    assert answer.message == "no such nömber"
    assert answer.headers["x-a"] == "1"
    assert answer.headers["x-b-bin"] == "AA"


async def test_a_bug_is_logged_and_not_shown(caplog):
    answer = await ask(crash, packed("a"))
    assert answer.code is StatusCode.UNKNOWN
    assert "secret" not in answer.message
    assert "a secret path" in caplog.text


@pytest.mark.parametrize(
    ("messages", "options", "code", "message"),
    [
        ([], {}, StatusCode.UNIMPLEMENTED, f"{NAME} takes one request, and none was sent"),
        ([b"\xff"], {}, StatusCode.INTERNAL, "not a valid google.protobuf.StringValue"),
        ([b"a"], {"method": "demo.Greeter/No"}, StatusCode.UNIMPLEMENTED, "no method"),
        (
            [bytes(101)],
            {"limits": Limits(max_message_bytes=100)},
            StatusCode.RESOURCE_EXHAUSTED,
            "the request has 101 bytes, of at most 100",
        ),
    ],
)
async def test_a_handler_does_not_run_without_a_proper_request(messages, options, code, message):
    answer = await ask(crash, *messages, **options)
    assert answer.code is code
    assert message in answer.message


async def test_a_deadline_ends_a_call_and_takes_no_time_on_a_clock_that_jumps(autojump_clock):
    answer = await ask(sleep, packed("a"), headers={"grpc-timeout": "2H"})
    assert answer.code is StatusCode.DEADLINE_EXCEEDED
    assert trio.current_time() >= 7200


async def test_an_answer_that_comes_late_is_waited_for(autojump_clock):
    async def late(request, call):
        await trio.sleep(100)
        return request

    assert (await ask(late, packed("a"))).messages == [packed("a")]


async def test_a_client_whose_connection_is_closed_gets_no_answer(autojump_clock):
    async with serving(serve(sleep)) as server:
        client = await server.connect(is_deaf=True)
        with pytest.raises(ConnectionError):
            await client.request(NAME, packed("a"))


async def test_a_reset_without_a_status_is_cancelled_for_the_client(autojump_clock):
    async def cut(request, call):
        with trio.move_on_after(1):
            await call.write(StringValue(value="a" * 100_000))
        raise RpcError(StatusCode.INTERNAL)

    assert (await ask(cut, packed("a"))).code is StatusCode.CANCELLED


def test_the_methods_of_a_service_are_the_servicers_of_their_names():
    class Servicer:
        Check = List = Watch = staticmethod(upper)

    service = health_pb2.DESCRIPTOR.services_by_name["Health"]
    methods = methods_of(service, Servicer())
    assert {one.name: one.request for one in methods} == {
        "grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest,
        "grpc.health.v1.Health/List": health_pb2.HealthListRequest,
        "grpc.health.v1.Health/Watch": health_pb2.HealthCheckRequest,
    }
    assert not any(one.takes_stream for one in methods)
