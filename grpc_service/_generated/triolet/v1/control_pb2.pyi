import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from grpc_service._generated.triolet.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_KEEP: _ClassVar[PauseMode]

class AbortOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ABORT_OUTCOME_UNSPECIFIED: _ClassVar[AbortOutcome]
    ABORT_OUTCOME_ABORTED: _ClassVar[AbortOutcome]
    ABORT_OUTCOME_ALREADY_ENDED: _ClassVar[AbortOutcome]
    ABORT_OUTCOME_REMEMBERED: _ClassVar[AbortOutcome]
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_ABORT: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_KEEP: PauseMode
ABORT_OUTCOME_UNSPECIFIED: AbortOutcome
ABORT_OUTCOME_ABORTED: AbortOutcome
ABORT_OUTCOME_ALREADY_ENDED: AbortOutcome
ABORT_OUTCOME_REMEMBERED: AbortOutcome

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("totals", "replicas")
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    totals: Totals
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStats]
    def __init__(self, totals: _Optional[_Union[Totals, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStats, _Mapping]]] = ...) -> None: ...

class RequestsTotal(_message.Message):
    __slots__ = ("finished", "cancelled", "deadline", "aborted", "stalled", "failed", "refused")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    finished: int
    cancelled: int
    deadline: int
    aborted: int
    stalled: int
    failed: int
    refused: int
    def __init__(self, finished: _Optional[int] = ..., cancelled: _Optional[int] = ..., deadline: _Optional[int] = ..., aborted: _Optional[int] = ..., stalled: _Optional[int] = ..., failed: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("running", "waiting", "parked", "ending", "unread_calls", "free_blocks", "total_blocks", "cached_blocks", "prefix_queries", "prefix_hits", "step_count", "step_rows_total", "preemptions", "prompt_tokens_total", "completion_tokens_total", "requests_total", "memory_reserved", "memory_limit", "peak_waiting", "detached", "free_states", "total_states", "cached_states")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    UNREAD_CALLS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_ROWS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_RESERVED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    PEAK_WAITING_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    FREE_STATES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STATES_FIELD_NUMBER: _ClassVar[int]
    CACHED_STATES_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    parked: int
    ending: int
    unread_calls: int
    free_blocks: int
    total_blocks: int
    cached_blocks: int
    prefix_queries: int
    prefix_hits: int
    step_count: int
    step_rows_total: int
    preemptions: int
    prompt_tokens_total: int
    completion_tokens_total: int
    requests_total: RequestsTotal
    memory_reserved: int
    memory_limit: int
    peak_waiting: int
    detached: int
    free_states: int
    total_states: int
    cached_states: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., parked: _Optional[int] = ..., ending: _Optional[int] = ..., unread_calls: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., step_count: _Optional[int] = ..., step_rows_total: _Optional[int] = ..., preemptions: _Optional[int] = ..., prompt_tokens_total: _Optional[int] = ..., completion_tokens_total: _Optional[int] = ..., requests_total: _Optional[_Union[RequestsTotal, _Mapping]] = ..., memory_reserved: _Optional[int] = ..., memory_limit: _Optional[int] = ..., peak_waiting: _Optional[int] = ..., detached: _Optional[int] = ..., free_states: _Optional[int] = ..., total_states: _Optional[int] = ..., cached_states: _Optional[int] = ...) -> None: ...

class ReplicaStats(_message.Message):
    __slots__ = ("running", "waiting", "parked", "ending", "unread_calls", "free_blocks", "total_blocks", "cached_blocks", "prefix_queries", "prefix_hits", "step_count", "step_rows_total", "preemptions", "prompt_tokens_total", "completion_tokens_total", "requests_total", "memory_reserved", "memory_limit", "model", "replica", "state", "pause", "peak_waiting", "free_states", "total_states", "cached_states")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    UNREAD_CALLS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_ROWS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_RESERVED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    PEAK_WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_STATES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STATES_FIELD_NUMBER: _ClassVar[int]
    CACHED_STATES_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    parked: int
    ending: int
    unread_calls: int
    free_blocks: int
    total_blocks: int
    cached_blocks: int
    prefix_queries: int
    prefix_hits: int
    step_count: int
    step_rows_total: int
    preemptions: int
    prompt_tokens_total: int
    completion_tokens_total: int
    requests_total: RequestsTotal
    memory_reserved: int
    memory_limit: int
    model: str
    replica: int
    state: _common_pb2.ReplicaState
    pause: PauseMode
    peak_waiting: int
    free_states: int
    total_states: int
    cached_states: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., parked: _Optional[int] = ..., ending: _Optional[int] = ..., unread_calls: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., step_count: _Optional[int] = ..., step_rows_total: _Optional[int] = ..., preemptions: _Optional[int] = ..., prompt_tokens_total: _Optional[int] = ..., completion_tokens_total: _Optional[int] = ..., requests_total: _Optional[_Union[RequestsTotal, _Mapping]] = ..., memory_reserved: _Optional[int] = ..., memory_limit: _Optional[int] = ..., model: _Optional[str] = ..., replica: _Optional[int] = ..., state: _Optional[_Union[_common_pb2.ReplicaState, str]] = ..., pause: _Optional[_Union[PauseMode, str]] = ..., peak_waiting: _Optional[int] = ..., free_states: _Optional[int] = ..., total_states: _Optional[int] = ..., cached_states: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("mode", "model")
    MODE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    mode: PauseMode
    model: str
    def __init__(self, mode: _Optional[_Union[PauseMode, str]] = ..., model: _Optional[str] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[AbortResult]
    def __init__(self, results: _Optional[_Iterable[_Union[AbortResult, _Mapping]]] = ...) -> None: ...

class AbortResult(_message.Message):
    __slots__ = ("request_id", "outcome")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    outcome: AbortOutcome
    def __init__(self, request_id: _Optional[str] = ..., outcome: _Optional[_Union[AbortOutcome, str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout",)
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("state", "waiting_for", "position", "estimate", "computed_tokens", "blocks", "parked", "drafted_tokens", "accepted_tokens", "drafts")
    STATE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    state: str
    waiting_for: str
    position: int
    estimate: _duration_pb2.Duration
    computed_tokens: int
    blocks: int
    parked: _duration_pb2.Duration
    drafted_tokens: int
    accepted_tokens: int
    drafts: _containers.RepeatedCompositeFieldContainer[DraftCounts]
    def __init__(self, state: _Optional[str] = ..., waiting_for: _Optional[str] = ..., position: _Optional[int] = ..., estimate: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., computed_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., parked: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., drafts: _Optional[_Iterable[_Union[DraftCounts, _Mapping]]] = ...) -> None: ...

class DraftCounts(_message.Message):
    __slots__ = ("drafter", "drafted_tokens", "accepted_tokens")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, drafter: _Optional[str] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ("holder", "model", "since")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    holder: str
    model: str
    since: _timestamp_pb2.Timestamp
    def __init__(self, holder: _Optional[str] = ..., model: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("since", "sums")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    since: _timestamp_pb2.Timestamp
    sums: _containers.RepeatedCompositeFieldContainer[UsageSums]
    def __init__(self, since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., sums: _Optional[_Iterable[_Union[UsageSums, _Mapping]]] = ...) -> None: ...

class UsageSums(_message.Message):
    __slots__ = ("holder", "model", "requests", "succeeded", "usage")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    holder: str
    model: str
    requests: int
    succeeded: int
    usage: RequestUsage
    def __init__(self, holder: _Optional[str] = ..., model: _Optional[str] = ..., requests: _Optional[int] = ..., succeeded: _Optional[int] = ..., usage: _Optional[_Union[RequestUsage, _Mapping]] = ...) -> None: ...

class RequestUsage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens", "results", "undelivered", "drafted_tokens", "accepted_tokens", "reasoning_tokens", "images", "queue", "step", "sent_bytes")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    UNDELIVERED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    results: int
    undelivered: int
    drafted_tokens: int
    accepted_tokens: int
    reasoning_tokens: int
    images: int
    queue: _duration_pb2.Duration
    step: _duration_pb2.Duration
    sent_bytes: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., results: _Optional[int] = ..., undelivered: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ..., images: _Optional[int] = ..., queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., step: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., sent_bytes: _Optional[int] = ...) -> None: ...
