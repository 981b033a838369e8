"""The gRPC service, the codec and the test requests of the toy kind `tests.simulator.counting`."""

from functools import partial

from google.protobuf.struct_pb2 import Struct
from google.protobuf.wrappers_pb2 import UInt32Value

from engine.api.engine import KINDS, open_engine
from grpc_service.app import application
from grpc_service.rpc.methods import Method
from grpc_service.services.call_writer import CallWriter
from grpc_service.services.inference import Inference
from tests.simulator.counting import COUNTING, MODEL, Count, CountKind
from tests.support.ending_kinds import Kind, phases, running
from tests.support.wire import StreamingCall

NAME = "toy.Counter/Count"


class Counter(Inference):
    async def count(self, asked, rpc):
        writer = CallWriter(rpc, self._backend.unread_calls, self.encode)
        await writer.serve(self._backend.engine, asked)

    def encode(self, numbers):
        return [UInt32Value(value=one) for one in numbers]


def translate(call):
    timeout_s = call.time_remaining()
    return lambda message: Count(**{**message, "start": int(message["start"])}, timeout_s=timeout_s)


def register():
    """Have this process's server also serve counting and its RPC."""
    application.open_engine = partial(open_engine, kinds=(*KINDS, CountKind()))
    application.methods = lambda backend, *given, listed=application.methods, **more: [
        *listed(backend, *given, **more),
        Method(NAME, Struct, Counter(backend).count, translate=translate),
    ]


class Counting(Kind):
    def models(self, script):
        counter = {"name": MODEL, "capability": COUNTING.value, "script": script}
        return [{"name": "fake"}, counter]

    def call(self, channel, fields, **options):
        own = channel.unary_stream(f"/{NAME}", Struct.SerializeToString, UInt32Value.FromString)
        request = Struct()
        request.update(fields)
        return StreamingCall(own, request, **options)

    def expected(self, fields):
        return Count(fields["start"]).expected()


COUNT = Counting(
    *("count", MODEL, {"start": 3}),
    blockers=({"start": 100},),
    phases=phases(
        **{"short": {"start": 5}, "queued": {"start": 5}, "blocked": {"max_drawings": 1}},
        parked=({"start": 6000}, {}),
        decode=running({"start": 9}, 2),
    ),
    server={"toy": True},
)
