"""A client of Triolet servers: for threads that block (`Client`) and for asyncio (`AsyncClient`).

It needs only grpc and protobuf, and imports neither the engine nor torch nor trio. `messages` has
every message under its own name; the names most used are here, too. `stubs` has the stubs that
protoc generated.
"""

from __future__ import annotations

from grpc_service.client import messages, stubs
from grpc_service.client._generated.blocking import Client, ImageStream, Stream, TextStream
from grpc_service.client.aio import AsyncClient, AsyncImageStream, AsyncStream, AsyncTextStream
from grpc_service.client.channel import ChannelSettings, Tls, open_aio_channel, open_channel
from grpc_service.client.errors import (
    Aborted,
    AlreadyExists,
    CallError,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    FieldViolation,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from grpc_service.client.messages import (
    ClassifyInput,
    ClassifyRequest,
    EmbedInput,
    EmbedRequest,
    EmbedStreamRequest,
    GenerateImageRequest,
    GenerateRequest,
    Message,
    RerankRequest,
    SamplingParams,
    TokenizeRequest,
)
from grpc_service.pem import PemError

__all__ = [
    "Aborted",
    "AlreadyExists",
    "AsyncClient",
    "AsyncImageStream",
    "AsyncStream",
    "AsyncTextStream",
    "CallError",
    "Cancelled",
    "ChannelSettings",
    "ClassifyInput",
    "ClassifyRequest",
    "Client",
    "DeadlineExceeded",
    "EmbedInput",
    "EmbedRequest",
    "EmbedStreamRequest",
    "FailedPrecondition",
    "FieldViolation",
    "GenerateImageRequest",
    "GenerateRequest",
    "ImageStream",
    "Internal",
    "InvalidArgument",
    "Message",
    "NotFound",
    "PemError",
    "PermissionDenied",
    "RerankRequest",
    "ResourceExhausted",
    "SamplingParams",
    "Stream",
    "TextStream",
    "Tls",
    "TokenizeRequest",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "messages",
    "open_aio_channel",
    "open_channel",
    "stubs",
]
