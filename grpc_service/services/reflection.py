"""Server reflection under both of its names, so that old and new tools can list and call services.

grpcio's reflection package knows `grpc.reflection.v1alpha` only. The two versions differ only in
the package name (a test compares their descriptors), and messages do not carry their package on the
wire. So grpcio's servicer answers under both names. Of the generated v1 code only the descriptor is
used, because reflection must describe itself, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection_pb2 as v1alpha_pb2

from engine.errors import InvalidRequest
from grpc_service._generated.grpc_reflection_v1 import reflection_pb2 as v1_pb2
from grpc_service.rpc.methods import methods_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from google.protobuf.descriptor import FileDescriptor

    from grpc_service.access.rpc_record import Rpc
    from grpc_service.rpc.methods import Method

PROTOS = (v1_pb2, v1alpha_pb2)
NAME_BYTES_MAX = 2**12  # a request holds little more than the name of a file or symbol
SERVICE_NAMES: tuple[str, ...] = tuple(
    proto.DESCRIPTOR.services_by_name["ServerReflection"].full_name for proto in PROTOS
)


class PoolWithMethods:
    """protobuf's default pool, which also finds the file of a method.

    The pool itself does not, but the protocol requires it, and `grpcurl describe
    package.Service.Method` asks for it. Source: grpc/grpc issue 34743.
    """

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """Return the file that declares `symbol`, a full name.

        Raises:
            KeyError: no file in the pool declares it.
        """
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file

    def __getattr__(self, name: str) -> Any:
        """Return the default pool's own attribute."""
        return getattr(self._pool, name)


class ReflectionServicer:
    """Answers a stream of requests with grpcio's servicer, which never waits. ``listed`` are the
    full names of the services to list. That servicer is imported at the first call, because it
    imports grpcio: this takes some 40 ms, once."""

    def __init__(self, listed: Iterable[str]) -> None:
        self._listed = tuple(listed)
        self._servicer: Any = None

    def _make_servicer(self) -> None:
        from grpc_reflection.v1alpha.reflection import ReflectionServicer as Servicer

        self._servicer = Servicer(self._listed, pool=PoolWithMethods())

    async def ServerReflectionInfo(self, _request: None, rpc: Rpc) -> None:
        """Answer each request until the client sends no more.

        Raises:
            InvalidRequest: a message cannot be parsed, or is larger than a name can be.

        Cancellation: safe; the call ends.
        """
        if self._servicer is None:
            self._make_servicer()
        while (data := await rpc.call.read()) is not None:
            if len(data) > NAME_BYTES_MAX:
                raise InvalidRequest(
                    [], message=f"the message has more than {NAME_BYTES_MAX} bytes"
                )
            try:
                request = v1alpha_pb2.ServerReflectionRequest.FromString(data)
            except DecodeError:
                raise InvalidRequest(
                    [], message="the message is not a ServerReflectionRequest"
                ) from None
            for answer in self._servicer.ServerReflectionInfo(iter([request]), None):
                await rpc.call.write(answer)


def reflection_methods(service_names: Sequence[str]) -> list[Method]:
    """Return the methods by which clients list `service_names` and fetch their descriptors, under
    v1 and under v1alpha.

    The names are full names, such as `triolet.v1.Inference`, and their generated modules must have
    been imported. Both reflection services are listed, too. Descriptors come from protobuf's
    default pool, so that a client may also fetch those that no listed service uses, such as error
    details.
    """
    servicer = ReflectionServicer({*service_names, *SERVICE_NAMES})
    services = (proto.DESCRIPTOR.services_by_name["ServerReflection"] for proto in PROTOS)
    return [method for service in services for method in methods_of(service, servicer)]
