"""The library's exceptions. The codes are those of gRPC's servers (grpc/doc/statuscodes.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from grpc_service.rpc.status import Status, StatusCode

if TYPE_CHECKING:
    from collections.abc import Sequence


class RpcError(Exception):
    """Ends a call with a status other than OK. A handler may raise one."""

    def __init__(
        self,
        code: StatusCode,
        message: str = "",
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = Status(code, message, tuple(metadata))


class _FixedCodeError(RpcError):
    """An `RpcError` whose class has the code."""

    CODE: ClassVar[StatusCode]

    def __init__(self, message: str) -> None:
        super().__init__(self.CODE, message)


class InvalidMessage(_FixedCodeError):
    """The request is incomplete, or its bytes are no message of the method's type."""

    CODE = StatusCode.INTERNAL


class MissingMessage(_FixedCodeError):
    """The method takes one request, and none was sent."""

    CODE = StatusCode.UNIMPLEMENTED


class InvalidHeaders(_FixedCodeError):
    """A header of the request is malformed."""

    CODE = StatusCode.INTERNAL


class HeadersTooLarge(_FixedCodeError):
    """The request's headers are larger than `Limits.header_list_bytes`."""

    CODE = StatusCode.RESOURCE_EXHAUSTED


class MessageTooLarge(_FixedCodeError):
    """The request is larger than `Limits.max_message_bytes`."""

    CODE = StatusCode.RESOURCE_EXHAUSTED


class TooManyHeld(_FixedCodeError):
    """The server keeps more bytes for its clients than it may, and this call's were among them."""

    CODE = StatusCode.RESOURCE_EXHAUSTED


class UnsupportedEncoding(_FixedCodeError):
    """The request is compressed by an encoding that the server does not support."""

    CODE = StatusCode.UNIMPLEMENTED


class Disconnected(Exception):
    """The client has ended the call; no status can be sent any more."""
