"""A kind of work that is new to the product (`tests.support.counting`) is served over gRPC.

Its service and its codec stand here: a method that takes a number and counts down to 1.
"""

from __future__ import annotations

import contextlib
import time

import grpc
import pytest
import trio
from google.protobuf.wrappers_pb2 import UInt32Value

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from grpc_service.access.interceptor import Interceptor
from grpc_service.access.unread_calls import UnreadCalls
from grpc_service.rpc.methods import Method
from grpc_service.rpc.server import RpcServer
from grpc_service.rpc.sockets import listen_tcp
from grpc_service.services.call_writer import CallWriter
from grpc_service.services.error_status import status_of
from tests.support.counting import COUNTING, CountKind, CountRequest, CountRunner
from tests.support.wire import SMALL_WINDOW, connect, reason

Code = grpc.StatusCode
NAME = "toy.Counter/Count"


class Counter:
    """The service."""

    def __init__(self, engine):
        self._engine = engine
        self._unread_calls = UnreadCalls(time.monotonic)

    def translate(self, call):
        """Return what makes the engine's request of a message: the codec's way in."""
        return lambda message: CountRequest(message.value, timeout_s=call.time_remaining())

    async def count(self, asked, rpc):
        """Stream the numbers; the writer's function is the codec's way out."""
        writer = CallWriter(
            rpc, self._unread_calls, lambda numbers: [UInt32Value(value=one) for one in numbers]
        )
        stream = self._engine.submit(asked, buffer=4, reader=writer, origin=rpc.origin)
        await writer.run(stream)


@contextlib.asynccontextmanager
async def served():
    """Yield an engine that counts, and the address at which it is served."""
    runner = CountRunner()  # its step from 13 fails
    config = EngineConfig(models=(ModelConfig("counter", capability=COUNTING),))
    kinds = (CountKind(),)
    async with open_engine(config, make_runner=lambda *_: runner, kinds=kinds) as engine:
        service = Counter(engine)
        method = Method(NAME, UInt32Value, service.count, translate=service.translate)
        listeners = listen_tcp("127.0.0.1", 0)
        async with trio.open_nursery() as nursery:
            server = RpcServer(Interceptor([method], None, status_of).serve)
            nursery.start_soon(server.run, listeners)
            yield engine, f"127.0.0.1:{listeners[0].port}"
            nursery.cancel_scope.cancel(reason="the test is over")


def call(channel, start, **options):
    """Begin to count."""
    return channel.unary_stream(
        f"/{NAME}",
        request_serializer=UInt32Value.SerializeToString,
        response_deserializer=UInt32Value.FromString,
    )(UInt32Value(value=start), **options)


def count(address, start, **options):
    """Return the numbers, and the error that ends the call or None."""
    numbers = []
    with connect(address) as channel:
        try:
            numbers.extend(one.value for one in call(channel, start, **options))
        except grpc.RpcError as error:
            return numbers, error
    return numbers, None


async def test_a_third_kind_streams_its_results_and_its_errors():
    async with served() as (engine, address):
        whole = await trio.to_thread.run_sync(count, address, 12)
        assert whole == ([*range(12, 0, -1)], None)
        numbers, failed = await trio.to_thread.run_sync(count, address, 15)
        assert numbers == [15, 14]
        assert (failed.code(), reason(failed)) == (Code.INTERNAL, "STEP_FAILED")
        _, refused = await trio.to_thread.run_sync(count, address, 0)
        assert refused.code() is Code.INVALID_ARGUMENT
        await engine.wait_idle()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_client_that_leaves_or_runs_out_of_time_ends_its_request(how):
    """Its reader stops, so that the request waits for it."""

    def leave():
        with connect(address, *SMALL_WINDOW) as channel:
            counting = call(channel, 10**6, timeout=1.0 if how == "deadline" else None)
            assert next(counting).value == 10**6
            if how == "cancel":
                counting.cancel()
            with pytest.raises(grpc.RpcError) as caught:
                list(counting)
            return caught.value.code()

    async with served() as (engine, address):
        code = await trio.to_thread.run_sync(leave)
        assert code is (Code.CANCELLED if how == "cancel" else Code.DEADLINE_EXCEEDED)
        await engine.wait_idle()
        ends = engine.statistics().totals.requests_total
        assert (ends.cancelled, ends.deadline) == ((1, 0) if how == "cancel" else (0, 1))
        assert (await trio.to_thread.run_sync(count, address, 3))[0] == [3, 2, 1]
