import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

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
    CAPABILITY_SPARSE_EMBEDDING: _ClassVar[Capability]
    CAPABILITY_MULTI_VECTOR_EMBEDDING: _ClassVar[Capability]
    CAPABILITY_TEXT_CLASSIFICATION: _ClassVar[Capability]
    CAPABILITY_TOKEN_CLASSIFICATION: _ClassVar[Capability]

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
CAPABILITY_SPARSE_EMBEDDING: Capability
CAPABILITY_MULTI_VECTOR_EMBEDDING: Capability
CAPABILITY_TEXT_CLASSIFICATION: Capability
CAPABILITY_TOKEN_CLASSIFICATION: Capability
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

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("request_id", "attach_token", "received")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTACH_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attach_token: str
    received: _containers.RepeatedCompositeFieldContainer[ReceivedChoice]
    def __init__(self, request_id: _Optional[str] = ..., attach_token: _Optional[str] = ..., received: _Optional[_Iterable[_Union[ReceivedChoice, _Mapping]]] = ...) -> None: ...

class ReceivedChoice(_message.Message):
    __slots__ = ("tokens", "finished")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    finished: bool
    def __init__(self, tokens: _Optional[int] = ..., finished: _Optional[bool] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("choices", "seed")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[ContinuedChoice]
    seed: int
    def __init__(self, choices: _Optional[_Iterable[_Union[ContinuedChoice, _Mapping]]] = ..., seed: _Optional[int] = ...) -> None: ...

class ContinuedChoice(_message.Message):
    __slots__ = ("token_ids", "finished")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., finished: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("tokens", "max_model_len")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    max_model_len: int
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "text", "start", "end")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    start: int
    end: int
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class Reasoning(_message.Message):
    __slots__ = ("enabled", "budget_tokens")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    budget_tokens: int
    def __init__(self, enabled: _Optional[bool] = ..., budget_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue", "load", "prefill", "decode", "parked")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    queue: _duration_pb2.Duration
    load: _duration_pb2.Duration
    prefill: _duration_pb2.Duration
    decode: _duration_pb2.Duration
    parked: _duration_pb2.Duration
    def __init__(self, queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., load: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., parked: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
