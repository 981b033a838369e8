"""gRPC's TestService for its interop cases, on our RPC library, and a server of it in a thread.

Source: grpc/doc/interop-test-descriptions.md, Server.
"""

import contextlib
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import trio
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc

from grpc_service.rpc.errors import RpcError
from grpc_service.rpc.methods import Dispatcher, Method
from grpc_service.rpc.status import StatusCode
from tests.support import rpc_thread

PROTO = Path(__file__).resolve().parent / "protos" / "testing.proto"
ECHO_INITIAL, ECHO_TRAILING = "x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin"
ENCODING = "gzip"


@cache
def protos():
    """Return the descriptor of `PROTO`, which protoc makes each time; no generated file is kept."""
    with TemporaryDirectory() as folder:
        found = Path(folder) / "found"
        command = ["protoc", f"-I{PROTO.parent}", f"--descriptor_set_out={found}", PROTO.name]
        assert protoc.main(command) == 0
        files = FileDescriptorSet.FromString(found.read_bytes())
    pool = DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool.FindFileByName(PROTO.name)


def message_class(name):
    """Return the class of a message of `PROTO`."""
    return GetMessageClass(protos().message_types_by_name[name])


def method_of(name):
    """Return a method's descriptor. A name without a service is one of TestService."""
    service, _, method = name.rpartition("/")
    return protos().services_by_name[service or "TestService"].methods_by_name[method]


def path_of(method):
    """Return a method's full name, such as ``grpc.testing.TestService/EmptyCall``."""
    return f"{method.containing_service.full_name}/{method.name}"


class Servicer:
    """TestService.

    ``num_running`` and ``num_cancelled`` count calls; ``peers`` has the address of each connection
    that a call came from.
    """

    def __init__(self):
        handlers = {
            "EmptyCall": self.empty_call,
            "UnaryCall": self.unary_call,
            "StreamingInputCall": self.streaming_input_call,
            "StreamingOutputCall": self.streaming_output_call,
            "FullDuplexCall": self.full_duplex_call,
            "HalfDuplexCall": self.half_duplex_call,
        }
        self._dispatcher = Dispatcher(_method(name, handler) for name, handler in handlers.items())
        self.num_running = 0
        self.num_cancelled = 0
        self.peers = set()

    async def serve(self, call):
        """Serve one call to its end."""
        self.peers.add(call.peer)
        self.num_running += 1
        try:
            call.initial_metadata = echoed(call, ECHO_INITIAL)
            await self._dispatcher.serve(call)
        except trio.Cancelled:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    async def empty_call(self, request, call):
        """Answer with nothing."""
        return message_class("Empty")()

    async def unary_call(self, request, call):
        """Answer with as many bytes as the request says."""
        check_compression(request, call)
        end_as_told(request)
        if request.HasField("response_compressed"):
            call.encoding = ENCODING if request.response_compressed.value else ""
        answer = message_class("SimpleResponse")(payload={"body": bytes(request.response_size)})
        call.trailing_metadata = echoed(call, ECHO_TRAILING)
        return answer

    async def streaming_input_call(self, _, call):
        """Answer with the size of all requests."""
        num_bytes = 0
        while request := await next_request(call, "StreamingInputCallRequest"):
            check_compression(request, call)
            num_bytes += len(request.payload.body)
        return message_class("StreamingInputCallResponse")(aggregated_payload_size=num_bytes)

    async def streaming_output_call(self, request, call):
        """Send each answer that the request asks for."""
        await self._answer_each(request, call)

    async def full_duplex_call(self, _, call):
        """Send each answer that a request asks for, before the next request."""
        call.trailing_metadata = echoed(call, ECHO_TRAILING)
        while request := await next_request(call, "StreamingOutputCallRequest"):
            await self._answer_each(request, call)

    async def half_duplex_call(self, _, call):
        """Send all answers after the last request."""
        requests = []
        while request := await next_request(call, "StreamingOutputCallRequest"):
            requests.append(request)
        for request in requests:
            await self._answer_each(request, call)

    async def _answer_each(self, request, call):
        end_as_told(request)
        if any(parameters.compressed.value for parameters in request.response_parameters):
            call.encoding = ENCODING
        for parameters in request.response_parameters:
            answer = message_class("StreamingOutputCallResponse")
            body = {"body": bytes(parameters.size)}
            await call.write(answer(payload=body), compress=parameters.compressed.value)


def _method(name, handler):
    method = method_of(name)
    request = GetMessageClass(method.input_type)
    return Method(path_of(method), request, handler, method.client_streaming)


async def next_request(call, name):
    """Return the next request of a call, of the message type ``name``; None after the last one."""
    data = await call.read()
    return None if data is None else message_class(name).FromString(data)


def echoed(call, name):
    """Return the client's metadata of this name."""
    return tuple((key, value) for key, value in call.metadata if key == name)


def end_as_told(request):
    """End the call with the status that the request asks for, if it asks for one."""
    if request.HasField("response_status"):
        status = request.response_status
        raise RpcError(StatusCode(status.code), status.message)


def check_compression(request, call):
    """Refuse a request that did not arrive compressed, or uncompressed, as it says."""
    if not request.HasField("expect_compressed"):
        return
    if request.expect_compressed.value != call.is_compressed:
        raise RpcError(StatusCode.INVALID_ARGUMENT, "the request is not compressed as it says")


@contextlib.contextmanager
def serving(servicer, tls, limits=None):
    """Serve in a thread while the block runs. Yield two addresses: a plain one, and one with TLS
    by the context ``tls``."""
    with rpc_thread.serving(servicer.serve, tls=tls, limits=limits) as ports:
        yield tuple(f"127.0.0.1:{port}" for port in ports)
