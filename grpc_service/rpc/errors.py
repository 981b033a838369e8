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

    _code: ClassVar[StatusCode]

    def __init_subclass__(cls, code: StatusCode) -> None:
        cls._code = code

    def __init__(self, message: str) -> None:
        super().__init__(self._code, message)


class InvalidMessage(_FixedCodeError, code=StatusCode.INTERNAL):
    """The request is incomplete, or its bytes are no message of the method's type."""


class MissingMessage(_FixedCodeError, code=StatusCode.UNIMPLEMENTED):
    """The method takes one request, and none was sent."""


class InvalidHeaders(_FixedCodeError, code=StatusCode.INTERNAL):
    """A header of the request is malformed."""


class HeadersTooLarge(_FixedCodeError, code=StatusCode.RESOURCE_EXHAUSTED):
    """The request's headers are larger than `Limits.header_list_bytes`."""


class MessageTooLarge(_FixedCodeError, code=StatusCode.RESOURCE_EXHAUSTED):
    """The request is larger than `Limits.max_message_bytes`."""


class TooManyHeld(_FixedCodeError, code=StatusCode.RESOURCE_EXHAUSTED):
    """The server keeps too many bytes for its clients, and those of this call were dropped."""


class UnsupportedEncoding(_FixedCodeError, code=StatusCode.UNIMPLEMENTED):
    """The request is compressed by an encoding that the server does not support."""


class Disconnected(Exception):
    """The client has ended the call; no status can be sent any more."""
