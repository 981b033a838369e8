import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from grpc_service._generated.triolet.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "aliases", "capability", "state", "error", "memory_bytes", "replicas", "leases", "last_used", "dtype", "device", "architecture", "max_model_len", "demo", "context_note", "quantization", "base", "adapter_digest", "adapter_rank", "capabilities")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DEMO_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_NOTE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_RANK_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    name: str
    aliases: _containers.RepeatedScalarFieldContainer[str]
    capability: _common_pb2.Capability
    state: _common_pb2.ModelState
    error: str
    memory_bytes: int
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    leases: int
    last_used: _timestamp_pb2.Timestamp
    dtype: str
    device: str
    architecture: str
    max_model_len: int
    demo: bool
    context_note: str
    quantization: str
    base: str
    adapter_digest: str
    adapter_rank: int
    capabilities: _containers.RepeatedScalarFieldContainer[_common_pb2.Capability]
    def __init__(self, name: _Optional[str] = ..., aliases: _Optional[_Iterable[str]] = ..., capability: _Optional[_Union[_common_pb2.Capability, str]] = ..., state: _Optional[_Union[_common_pb2.ModelState, str]] = ..., error: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., leases: _Optional[int] = ..., last_used: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., architecture: _Optional[str] = ..., max_model_len: _Optional[int] = ..., demo: _Optional[bool] = ..., context_note: _Optional[str] = ..., quantization: _Optional[str] = ..., base: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., adapter_rank: _Optional[int] = ..., capabilities: _Optional[_Iterable[_Union[_common_pb2.Capability, str]]] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("id", "state", "device", "threads", "restarts", "processed", "failed", "cancelled", "busy", "tensor_parallel_size")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    PROCESSED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    id: int
    state: _common_pb2.ReplicaState
    device: str
    threads: int
    restarts: int
    processed: int
    failed: int
    cancelled: int
    busy: _duration_pb2.Duration
    tensor_parallel_size: int
    def __init__(self, id: _Optional[int] = ..., state: _Optional[_Union[_common_pb2.ReplicaState, str]] = ..., device: _Optional[str] = ..., threads: _Optional[int] = ..., restarts: _Optional[int] = ..., processed: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., busy: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tensor_parallel_size: _Optional[int] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("model", "replicas")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    model: str
    replicas: int
    def __init__(self, model: _Optional[str] = ..., replicas: _Optional[int] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("phase", "bytes_done", "bytes_total", "tensors_done", "tensors_total", "state")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TENSORS_DONE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    phase: str
    bytes_done: int
    bytes_total: int
    tensors_done: int
    tensors_total: int
    state: _common_pb2.ModelState
    def __init__(self, phase: _Optional[str] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., tensors_done: _Optional[int] = ..., tensors_total: _Optional[int] = ..., state: _Optional[_Union[_common_pb2.ModelState, str]] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("model", "drain")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    model: str
    drain: _duration_pb2.Duration
    def __init__(self, model: _Optional[str] = ..., drain: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("model", "directory", "aliases")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    model: str
    directory: str
    aliases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., directory: _Optional[str] = ..., aliases: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("model", "drain")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    model: str
    drain: _duration_pb2.Duration
    def __init__(self, model: _Optional[str] = ..., drain: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
