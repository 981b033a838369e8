from grpc_service._generated.triolet.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Activation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTIVATION_UNSPECIFIED: _ClassVar[Activation]
    ACTIVATION_NONE: _ClassVar[Activation]
    ACTIVATION_SIGMOID: _ClassVar[Activation]
    ACTIVATION_SOFTMAX: _ClassVar[Activation]

class Aggregation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AGGREGATION_UNSPECIFIED: _ClassVar[Aggregation]
    AGGREGATION_NONE: _ClassVar[Aggregation]
    AGGREGATION_SIMPLE: _ClassVar[Aggregation]
    AGGREGATION_FIRST: _ClassVar[Aggregation]
    AGGREGATION_AVERAGE: _ClassVar[Aggregation]
    AGGREGATION_MAX: _ClassVar[Aggregation]
ACTIVATION_UNSPECIFIED: Activation
ACTIVATION_NONE: Activation
ACTIVATION_SIGMOID: Activation
ACTIVATION_SOFTMAX: Activation
AGGREGATION_UNSPECIFIED: Aggregation
AGGREGATION_NONE: Aggregation
AGGREGATION_SIMPLE: Aggregation
AGGREGATION_FIRST: Aggregation
AGGREGATION_AVERAGE: Aggregation
AGGREGATION_MAX: Aggregation

class ClassifyRequest(_message.Message):
    __slots__ = ("model", "inputs", "activation", "top_k", "aggregation", "truncate", "request_id", "priority", "background")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[ClassifyInput]
    activation: Activation
    top_k: int
    aggregation: Aggregation
    truncate: bool
    request_id: str
    priority: int
    background: bool
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[ClassifyInput, _Mapping]]] = ..., activation: _Optional[_Union[Activation, str]] = ..., top_k: _Optional[int] = ..., aggregation: _Optional[_Union[Aggregation, str]] = ..., truncate: _Optional[bool] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., background: _Optional[bool] = ...) -> None: ...

class ClassifyInput(_message.Message):
    __slots__ = ("text", "token_ids", "pair")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _common_pb2.TokenIds
    pair: TextPair
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[_common_pb2.TokenIds, _Mapping]] = ..., pair: _Optional[_Union[TextPair, _Mapping]] = ...) -> None: ...

class TextPair(_message.Message):
    __slots__ = ("text", "text_pair")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TEXT_PAIR_FIELD_NUMBER: _ClassVar[int]
    text: str
    text_pair: str
    def __init__(self, text: _Optional[str] = ..., text_pair: _Optional[str] = ...) -> None: ...

class ClassifyResponse(_message.Message):
    __slots__ = ("index", "labels", "entities", "tokens", "model")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ENTITIES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    index: int
    labels: _containers.RepeatedCompositeFieldContainer[LabelScore]
    entities: _containers.RepeatedCompositeFieldContainer[Entity]
    tokens: int
    model: str
    def __init__(self, index: _Optional[int] = ..., labels: _Optional[_Iterable[_Union[LabelScore, _Mapping]]] = ..., entities: _Optional[_Iterable[_Union[Entity, _Mapping]]] = ..., tokens: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class LabelScore(_message.Message):
    __slots__ = ("label", "score")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    label: str
    score: float
    def __init__(self, label: _Optional[str] = ..., score: _Optional[float] = ...) -> None: ...

class Entity(_message.Message):
    __slots__ = ("label", "score", "start", "end")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    label: str
    score: float
    start: int
    end: int
    def __init__(self, label: _Optional[str] = ..., score: _Optional[float] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...
