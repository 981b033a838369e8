"""All methods of triolet.v1, for the server to serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpc_service._generated.triolet.v1 import control_pb2, inference_pb2, models_pb2
from grpc_service.rpc.methods import methods_of
from grpc_service.services.control import Control
from grpc_service.services.inference import Inference
from grpc_service.services.models import Models

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor

    from grpc_service.rpc.methods import Method
    from grpc_service.services.backend import Backend

INFERENCE: ServiceDescriptor = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
MODELS: ServiceDescriptor = models_pb2.DESCRIPTOR.services_by_name["Models"]
CONTROL: ServiceDescriptor = control_pb2.DESCRIPTOR.services_by_name["Control"]
SERVICE_NAMES = (INFERENCE.full_name, MODELS.full_name, CONTROL.full_name)


def methods(backend: Backend) -> list[Method]:
    """Return every method of triolet.v1. `grpc_service.access.interceptor` decides who may call
    which."""
    return [
        *methods_of(INFERENCE, Inference(backend)),
        *methods_of(MODELS, Models(backend)),
        *methods_of(CONTROL, Control(backend)),
    ]
