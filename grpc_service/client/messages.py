"""Every message, enum and enum value of the package ``triolet.v1``, under its own name.

What a field means stands in its comment in ``proto/triolet/v1``. A message takes its fields by
keyword, and a mapping in place of a message field: ``GenerateRequest(text="Once", sampling={"seed":
7})``.
"""

from __future__ import annotations

from grpc_service._generated.triolet.v1.classes_pb2 import *  # noqa: F403
from grpc_service._generated.triolet.v1.common_pb2 import *  # noqa: F403
from grpc_service._generated.triolet.v1.control_pb2 import *  # noqa: F403
from grpc_service._generated.triolet.v1.images_pb2 import *  # noqa: F403
from grpc_service._generated.triolet.v1.inference_pb2 import *  # noqa: F403
from grpc_service._generated.triolet.v1.models_pb2 import *  # noqa: F403
from grpc_service._generated.triolet.v1.vectors_pb2 import *  # noqa: F403

# The other names that a generated module has are its own.
__all__ = [name for name in dir() if name[0].isupper() and name != "DESCRIPTOR"]
