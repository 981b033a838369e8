"""All methods of triolet.v1, for the server to serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpc_service._generated.triolet.v1 import control_pb2, inference_pb2, models_pb2
from grpc_service._generated.triolet.v1.count_limits import COUNT_LIMITS
from grpc_service.rpc.methods import methods_of
from grpc_service.services.control import Control
from grpc_service.services.image_bytes import IMAGE_FIELDS, judge_of
from grpc_service.services.inference import Inference, translators
from grpc_service.services.models import Models
from grpc_service.services.value_counts import judges_of

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor

    from grpc_service.rpc.methods import Method
    from grpc_service.services.backend import Backend

INFERENCE: ServiceDescriptor = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
MODELS: ServiceDescriptor = models_pb2.DESCRIPTOR.services_by_name["Models"]
CONTROL: ServiceDescriptor = control_pb2.DESCRIPTOR.services_by_name["Control"]
SERVICE_NAMES = (INFERENCE.full_name, MODELS.full_name, CONTROL.full_name)
# Methods for connected clients while the server drains, and for clients that a full server takes.
LASTING_METHODS = (f"{CONTROL.full_name}/", f"{INFERENCE.full_name}/Attach")
TAKING_IMAGES = tuple(f"{INFERENCE.full_name}/{name}" for name in IMAGE_FIELDS)


def methods(backend: Backend, max_message_bytes: int, *, adapter_root: str = "") -> list[Method]:
    """Return every method of triolet.v1. `grpc_service.access.interceptor` decides who may call
    which. A request may have ``max_message_bytes`` without its images. Adapters are loaded from
    below ``adapter_root``; "": from nowhere."""
    sizes = {name: judge_of(path, max_message_bytes) for name, path in IMAGE_FIELDS.items()}
    judges = judges_of(INFERENCE, COUNT_LIMITS, sizes)
    return [
        *methods_of(INFERENCE, Inference(backend), judges, translators()),
        *methods_of(MODELS, Models(backend, adapter_root), judges_of(MODELS, COUNT_LIMITS)),
        *methods_of(CONTROL, Control(backend), judges_of(CONTROL, COUNT_LIMITS)),
    ]
