"""What the library raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


class InvalidMessage(RpcError):
    """The request is missing, incomplete, or not what the method takes."""

    def __init__(self, message: str) -> None:
        super().__init__(StatusCode.INVALID_ARGUMENT, message)


class MessageTooLarge(RpcError):
    """The request is larger than `Limits.max_message_bytes`."""

    def __init__(self, message: str) -> None:
        super().__init__(StatusCode.RESOURCE_EXHAUSTED, message)


class UnsupportedEncoding(RpcError):
    """The request is compressed in a way that the server does not know."""

    def __init__(self, message: str) -> None:
        super().__init__(StatusCode.UNIMPLEMENTED, message)


class Disconnected(Exception):
    """The client has ended the call; no status can be sent any more."""
