from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class Capability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPABILITY_UNSPECIFIED: _ClassVar[Capability]
    CAPABILITY_TEXT_TO_TEXT: _ClassVar[Capability]
    CAPABILITY_TEXT_EMBEDDING: _ClassVar[Capability]
    CAPABILITY_RERANK: _ClassVar[Capability]
    CAPABILITY_IMAGE_EMBEDDING: _ClassVar[Capability]
    CAPABILITY_VISION: _ClassVar[Capability]
    CAPABILITY_TEXT_TO_IMAGE: _ClassVar[Capability]

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_STATE_UNSPECIFIED: _ClassVar[ModelState]
    MODEL_STATE_UNLOADED: _ClassVar[ModelState]
    MODEL_STATE_LOADING: _ClassVar[ModelState]
    MODEL_STATE_READY: _ClassVar[ModelState]
    MODEL_STATE_DRAINING: _ClassVar[ModelState]
    MODEL_STATE_FAILED: _ClassVar[ModelState]

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_LOADING: _ClassVar[ReplicaState]
    REPLICA_STATE_READY: _ClassVar[ReplicaState]
    REPLICA_STATE_DRAINING: _ClassVar[ReplicaState]
    REPLICA_STATE_FAILED: _ClassVar[ReplicaState]
    REPLICA_STATE_DEGRADED: _ClassVar[ReplicaState]
CAPABILITY_UNSPECIFIED: Capability
CAPABILITY_TEXT_TO_TEXT: Capability
CAPABILITY_TEXT_EMBEDDING: Capability
CAPABILITY_RERANK: Capability
CAPABILITY_IMAGE_EMBEDDING: Capability
CAPABILITY_VISION: Capability
CAPABILITY_TEXT_TO_IMAGE: Capability
MODEL_STATE_UNSPECIFIED: ModelState
MODEL_STATE_UNLOADED: ModelState
MODEL_STATE_LOADING: ModelState
MODEL_STATE_READY: ModelState
MODEL_STATE_DRAINING: ModelState
MODEL_STATE_FAILED: ModelState
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_LOADING: ReplicaState
REPLICA_STATE_READY: ReplicaState
REPLICA_STATE_DRAINING: ReplicaState
REPLICA_STATE_FAILED: ReplicaState
REPLICA_STATE_DEGRADED: ReplicaState
