"""The stubs that protoc generated, for programs that manage channels, metadata and errors
themselves. They take a `grpc.Channel` or a `grpc.aio.Channel`."""

from __future__ import annotations

from grpc_service._generated.triolet.v1.control_pb2_grpc import ControlStub
from grpc_service._generated.triolet.v1.inference_pb2_grpc import InferenceStub
from grpc_service._generated.triolet.v1.models_pb2_grpc import ModelsStub

__all__ = ["ControlStub", "InferenceStub", "ModelsStub"]
