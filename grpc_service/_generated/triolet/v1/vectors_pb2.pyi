from grpc_service._generated.triolet.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VectorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VECTOR_KIND_UNSPECIFIED: _ClassVar[VectorKind]
    VECTOR_KIND_DENSE: _ClassVar[VectorKind]
    VECTOR_KIND_SPARSE: _ClassVar[VectorKind]
    VECTOR_KIND_MULTI_VECTOR: _ClassVar[VectorKind]

class Precision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRECISION_UNSPECIFIED: _ClassVar[Precision]
    PRECISION_FLOAT32: _ClassVar[Precision]
    PRECISION_FLOAT16: _ClassVar[Precision]
    PRECISION_INT8: _ClassVar[Precision]
    PRECISION_UINT8: _ClassVar[Precision]
    PRECISION_BINARY: _ClassVar[Precision]
    PRECISION_UBINARY: _ClassVar[Precision]
VECTOR_KIND_UNSPECIFIED: VectorKind
VECTOR_KIND_DENSE: VectorKind
VECTOR_KIND_SPARSE: VectorKind
VECTOR_KIND_MULTI_VECTOR: VectorKind
PRECISION_UNSPECIFIED: Precision
PRECISION_FLOAT32: Precision
PRECISION_FLOAT16: Precision
PRECISION_INT8: Precision
PRECISION_UINT8: Precision
PRECISION_BINARY: Precision
PRECISION_UBINARY: Precision

class VectorRanges(_message.Message):
    __slots__ = ("low", "high")
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    low: _containers.RepeatedScalarFieldContainer[float]
    high: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, low: _Optional[_Iterable[float]] = ..., high: _Optional[_Iterable[float]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("model", "inputs", "dimensions", "normalize", "prompt_name", "truncate", "request_id", "priority", "precision", "ranges", "kind", "top_k", "threshold", "background")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[EmbedInput]
    dimensions: int
    normalize: bool
    prompt_name: str
    truncate: bool
    request_id: str
    priority: int
    precision: Precision
    ranges: VectorRanges
    kind: VectorKind
    top_k: int
    threshold: float
    background: bool
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[EmbedInput, _Mapping]]] = ..., dimensions: _Optional[int] = ..., normalize: _Optional[bool] = ..., prompt_name: _Optional[str] = ..., truncate: _Optional[bool] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., precision: _Optional[_Union[Precision, str]] = ..., ranges: _Optional[_Union[VectorRanges, _Mapping]] = ..., kind: _Optional[_Union[VectorKind, str]] = ..., top_k: _Optional[int] = ..., threshold: _Optional[float] = ..., background: _Optional[bool] = ...) -> None: ...

class EmbedInput(_message.Message):
    __slots__ = ("text", "token_ids", "image")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _common_pb2.TokenIds
    image: bytes
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[_common_pb2.TokenIds, _Mapping]] = ..., image: _Optional[bytes] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("index", "values", "tokens", "model", "packed", "sparse", "rows")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    index: int
    values: _containers.RepeatedScalarFieldContainer[float]
    tokens: int
    model: str
    packed: bytes
    sparse: SparseVector
    rows: int
    def __init__(self, index: _Optional[int] = ..., values: _Optional[_Iterable[float]] = ..., tokens: _Optional[int] = ..., model: _Optional[str] = ..., packed: _Optional[bytes] = ..., sparse: _Optional[_Union[SparseVector, _Mapping]] = ..., rows: _Optional[int] = ...) -> None: ...

class SparseVector(_message.Message):
    __slots__ = ("indices", "weights")
    INDICES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, indices: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ...) -> None: ...

class EmbedStreamRequest(_message.Message):
    __slots__ = ("parameters", "inputs")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    parameters: EmbedRequest
    inputs: _containers.RepeatedCompositeFieldContainer[EmbedStreamInput]
    def __init__(self, parameters: _Optional[_Union[EmbedRequest, _Mapping]] = ..., inputs: _Optional[_Iterable[_Union[EmbedStreamInput, _Mapping]]] = ...) -> None: ...

class EmbedStreamInput(_message.Message):
    __slots__ = ("index", "input")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    index: int
    input: EmbedInput
    def __init__(self, index: _Optional[int] = ..., input: _Optional[_Union[EmbedInput, _Mapping]] = ...) -> None: ...

class EmbedStreamResponse(_message.Message):
    __slots__ = ("vectors", "errors")
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    vectors: _containers.RepeatedCompositeFieldContainer[EmbedResponse]
    errors: _containers.RepeatedCompositeFieldContainer[InputError]
    def __init__(self, vectors: _Optional[_Iterable[_Union[EmbedResponse, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[InputError, _Mapping]]] = ...) -> None: ...

class InputError(_message.Message):
    __slots__ = ("index", "reason", "message")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    index: int
    reason: str
    message: str
    def __init__(self, index: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class RerankRequest(_message.Message):
    __slots__ = ("model", "query", "documents", "raw_scores", "truncate", "top_n", "request_id", "priority", "background")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    RAW_SCORES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    TOP_N_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    model: str
    query: str
    documents: _containers.RepeatedScalarFieldContainer[str]
    raw_scores: bool
    truncate: bool
    top_n: int
    request_id: str
    priority: int
    background: bool
    def __init__(self, model: _Optional[str] = ..., query: _Optional[str] = ..., documents: _Optional[_Iterable[str]] = ..., raw_scores: _Optional[bool] = ..., truncate: _Optional[bool] = ..., top_n: _Optional[int] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., background: _Optional[bool] = ...) -> None: ...

class RerankResponse(_message.Message):
    __slots__ = ("index", "score")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    index: int
    score: float
    def __init__(self, index: _Optional[int] = ..., score: _Optional[float] = ...) -> None: ...
