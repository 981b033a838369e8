import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ImageFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IMAGE_FORMAT_UNSPECIFIED: _ClassVar[ImageFormat]
    IMAGE_FORMAT_PNG: _ClassVar[ImageFormat]
    IMAGE_FORMAT_JPEG: _ClassVar[ImageFormat]
    IMAGE_FORMAT_WEBP: _ClassVar[ImageFormat]
IMAGE_FORMAT_UNSPECIFIED: ImageFormat
IMAGE_FORMAT_PNG: ImageFormat
IMAGE_FORMAT_JPEG: ImageFormat
IMAGE_FORMAT_WEBP: ImageFormat

class GenerateImageRequest(_message.Message):
    __slots__ = ("model", "prompt", "negative_prompt", "width", "height", "steps", "guidance", "seed", "n", "source", "strength", "scheduler", "format", "quality", "preview_every", "request_id", "priority")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NEGATIVE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_EVERY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    negative_prompt: str
    width: int
    height: int
    steps: int
    guidance: float
    seed: int
    n: int
    source: ImageSource
    strength: float
    scheduler: str
    format: ImageFormat
    quality: int
    preview_every: int
    request_id: str
    priority: int
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., negative_prompt: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., steps: _Optional[int] = ..., guidance: _Optional[float] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., source: _Optional[_Union[ImageSource, _Mapping]] = ..., strength: _Optional[float] = ..., scheduler: _Optional[str] = ..., format: _Optional[_Union[ImageFormat, str]] = ..., quality: _Optional[int] = ..., preview_every: _Optional[int] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class ImageSource(_message.Message):
    __slots__ = ("image",)
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    image: bytes
    def __init__(self, image: _Optional[bytes] = ...) -> None: ...

class GenerateImageResponse(_message.Message):
    __slots__ = ("started", "progress", "part", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: ImageStarted
    progress: ImageProgress
    part: ImagePart
    finished: ImageFinished
    def __init__(self, started: _Optional[_Union[ImageStarted, _Mapping]] = ..., progress: _Optional[_Union[ImageProgress, _Mapping]] = ..., part: _Optional[_Union[ImagePart, _Mapping]] = ..., finished: _Optional[_Union[ImageFinished, _Mapping]] = ...) -> None: ...

class ImageStarted(_message.Message):
    __slots__ = ("request_id", "model", "seed", "width", "height", "steps", "scheduler")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    seed: int
    width: int
    height: int
    steps: int
    scheduler: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., seed: _Optional[int] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., steps: _Optional[int] = ..., scheduler: _Optional[str] = ...) -> None: ...

class ImageProgress(_message.Message):
    __slots__ = ("step", "steps", "preview")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    step: int
    steps: int
    preview: bytes
    def __init__(self, step: _Optional[int] = ..., steps: _Optional[int] = ..., preview: _Optional[bytes] = ...) -> None: ...

class ImagePart(_message.Message):
    __slots__ = ("index", "data", "last", "format")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    index: int
    data: bytes
    last: bool
    format: ImageFormat
    def __init__(self, index: _Optional[int] = ..., data: _Optional[bytes] = ..., last: _Optional[bool] = ..., format: _Optional[_Union[ImageFormat, str]] = ...) -> None: ...

class ImageFinished(_message.Message):
    __slots__ = ("seed", "usage", "timings")
    SEED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    seed: int
    usage: ImageUsage
    timings: ImageTimings
    def __init__(self, seed: _Optional[int] = ..., usage: _Optional[_Union[ImageUsage, _Mapping]] = ..., timings: _Optional[_Union[ImageTimings, _Mapping]] = ...) -> None: ...

class ImageUsage(_message.Message):
    __slots__ = ("prompt_tokens", "steps", "images")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    steps: int
    images: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., images: _Optional[int] = ...) -> None: ...

class ImageTimings(_message.Message):
    __slots__ = ("queue", "load", "encode", "draw", "parked")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    DRAW_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    queue: _duration_pb2.Duration
    load: _duration_pb2.Duration
    encode: _duration_pb2.Duration
    draw: _duration_pb2.Duration
    parked: _duration_pb2.Duration
    def __init__(self, queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., load: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., encode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., draw: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., parked: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
