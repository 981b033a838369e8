"""Server reflection under both of its names, so that old and new tools can list and call services.

grpcio's reflection package knows `grpc.reflection.v1alpha` only. The two versions differ in nothing
but the package name (a test compares their descriptors), and messages do not carry their package on
the wire. So one servicer, grpcio's, answers under both names; from the generated v1 code comes only
the descriptor, which reflection must be able to hand out about itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection as v1alpha
from grpc_reflection.v1alpha import reflection_pb2 as v1alpha_pb2

from grpc_service._generated.grpc_reflection_v1 import reflection_pb2 as v1_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.descriptor import FileDescriptor

SERVICE_NAMES: tuple[str, str] = (
    v1_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name,
    v1alpha_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name,
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


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Lets clients of `server` ask for the descriptors of `service_names`, by v1 and by v1alpha.

    Call it before the server starts. The names are full ones, such as `triolet.v1.Inference`, and
    their generated modules must have been imported; both reflection services are listed beside
    them, unasked. Descriptors come from protobuf's default pool, so a client may also fetch those
    that no listed service uses (error details, for one).
    """
    listed = {*service_names, *SERVICE_NAMES}
    servicer = v1alpha.aio.ReflectionServicer(listed, pool=PoolWithMethods())
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=v1alpha_pb2.ServerReflectionRequest.FromString,
        response_serializer=v1alpha_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
            for name in SERVICE_NAMES
        )
    )
