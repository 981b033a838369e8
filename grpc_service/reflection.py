"""Server reflection under both of its names, so that old and new tools can list and call services.

grpcio's reflection package knows `grpc.reflection.v1alpha` only. The two versions differ in nothing
but the package name (a test compares their descriptors), and messages do not carry their package on
the wire. So one servicer, grpcio's, answers under both names; from the generated v1 code comes only
the descriptor, which reflection must be able to hand out about itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection as v1alpha
from grpc_reflection.v1alpha import reflection_pb2 as v1alpha_pb2

from engine.errors import InvalidRequest
from grpc_service._generated.grpc_reflection_v1 import reflection_pb2 as v1_pb2
from grpc_service.connections import methods_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from google.protobuf.descriptor import FileDescriptor

    from grpc_service.connections import Context, Method

PROTOS = (v1_pb2, v1alpha_pb2)
SERVICE_NAMES: tuple[str, ...] = tuple(
    one.DESCRIPTOR.services_by_name["ServerReflection"].full_name for one in PROTOS
)


class PoolWithMethods:
    """protobuf's default pool, which when asked for a symbol's file does not know methods.

    The protocol wants them found, and `grpcurl describe package.Service.Method` asks for them.
    Source: grpc/grpc issue 34743.
    """

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """The file that declares `symbol`, a full name.

        Raises:
            KeyError: no file in the pool declares it.
        """
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file

    def __getattr__(self, name: str) -> Any:
        """Everything else is the default pool's."""
        return getattr(self._pool, name)


class ReflectionServicer:
    """Answers a stream of questions with grpcio's servicer, whose answers need no waiting."""

    def __init__(self, listed: Iterable[str]) -> None:
        self._servicer = v1alpha.ReflectionServicer(listed, pool=PoolWithMethods())

    async def ServerReflectionInfo(self, _request: None, context: Context) -> None:
        while (data := await context.read()) is not None:
            try:
                request = v1alpha_pb2.ServerReflectionRequest.FromString(data)
            except DecodeError:
                raise InvalidRequest([], message="this is no ServerReflectionRequest") from None
            for answer in self._servicer.ServerReflectionInfo(iter([request]), None):
                await context.write(answer)


def reflection_methods(service_names: Sequence[str]) -> list[Method]:
    """Lets clients ask for the descriptors of `service_names`, by v1 and by v1alpha.

    The names are full ones, such as `triolet.v1.Inference`, and their generated modules must have
    been imported; both reflection services are listed beside them, unasked. Descriptors come from
    protobuf's default pool, so a client may also fetch those that no listed service uses (error
    details, for one).
    """
    servicer = ReflectionServicer({*service_names, *SERVICE_NAMES})
    services = (one.DESCRIPTOR.services_by_name["ServerReflection"] for one in PROTOS)
    return [method for service in services for method in methods_of(service, servicer)]
