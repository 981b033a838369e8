"""Translates snapshots of models and counters into messages of Models and Control.

Rule 1: this module is pure, like `grpc_service.services.text_codec`. Rule 2: counters have the same
names in the engine and in the proto, so that a new counter needs no line here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.timestamp_pb2 import Timestamp

from engine.status import Capability, ModelState
from grpc_service._generated.triolet.v1 import common_pb2, control_pb2, models_pb2
from grpc_service.services.text_encoder import encode_duration

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from engine.status import Counts, EngineStatistics, ModelStatus, ReplicaStatus

CAPABILITIES = {
    Capability.TEXT_TO_TEXT: common_pb2.CAPABILITY_TEXT_TO_TEXT,
    Capability.TEXT_EMBEDDING: common_pb2.CAPABILITY_TEXT_EMBEDDING,
    Capability.RERANK: common_pb2.CAPABILITY_RERANK,
    Capability.IMAGE_EMBEDDING: common_pb2.CAPABILITY_IMAGE_EMBEDDING,
    Capability.VISION: common_pb2.CAPABILITY_VISION,
    Capability.TEXT_TO_IMAGE: common_pb2.CAPABILITY_TEXT_TO_IMAGE,
}
MODEL_STATES = {
    ModelState.UNLOADED: common_pb2.MODEL_STATE_UNLOADED,
    ModelState.LOADING: common_pb2.MODEL_STATE_LOADING,
    ModelState.READY: common_pb2.MODEL_STATE_READY,
    ModelState.DRAINING: common_pb2.MODEL_STATE_DRAINING,
    ModelState.FAILED: common_pb2.MODEL_STATE_FAILED,
}
REPLICA_STATES = {
    # A replica that is not loaded is not listed, so this state is never sent.
    ModelState.UNLOADED: common_pb2.REPLICA_STATE_UNSPECIFIED,
    ModelState.LOADING: common_pb2.REPLICA_STATE_LOADING,
    ModelState.READY: common_pb2.REPLICA_STATE_READY,
    ModelState.DRAINING: common_pb2.REPLICA_STATE_DRAINING,
    ModelState.FAILED: common_pb2.REPLICA_STATE_FAILED,
    ModelState.DEGRADED: common_pb2.REPLICA_STATE_DEGRADED,
}
PAUSES = {
    "": control_pb2.PAUSE_MODE_UNSPECIFIED,
    "keep": control_pb2.PAUSE_MODE_KEEP,
    "wait": control_pb2.PAUSE_MODE_WAIT,
    "abort": control_pb2.PAUSE_MODE_ABORT,
}


def encode_model(status: ModelStatus) -> models_pb2.Model:
    """Return the message for a model, as ListModels and GetModel send it."""
    return models_pb2.Model(
        name=status.name,
        aliases=status.aliases,
        capability=CAPABILITIES[status.capability],
        state=MODEL_STATES[status.state],
        error=status.error,
        memory_bytes=status.memory_bytes,
        replicas=[_encode_replica(replica) for replica in status.replicas],
        leases=status.leases,
        last_used=_encode_timestamp(status.last_used) if status.last_used else None,
        dtype=status.dtype,
        device=status.device,
        architecture=status.architecture,
        max_model_len=status.max_model_len,
        demo=status.is_demo,
        context_note=status.context_note,
        quantization=status.quantization,
        base=status.base,
        adapter_digest=status.adapter_digest,
        adapter_rank=status.adapter_rank,
    )


def _encode_replica(status: ReplicaStatus) -> models_pb2.Replica:
    return models_pb2.Replica(
        id=status.replica_id,
        state=REPLICA_STATES[status.state],
        device=status.device,
        threads=status.threads,
        tensor_parallel_size=status.tp,
        restarts=status.restarts,
        processed=status.processed,
        failed=status.failed,
        cancelled=status.cancelled,
        busy=encode_duration(status.busy_s),
    )


def encode_statistics(statistics: EngineStatistics) -> control_pb2.GetStatsResponse:
    """Return the message for a snapshot of the engine's counters."""
    return control_pb2.GetStatsResponse(
        totals=control_pb2.Totals(**_encode_counts(statistics.totals, control_pb2.Totals)),
        replicas=[
            control_pb2.ReplicaStats(
                model=entry.model,
                replica=entry.replica,
                state=REPLICA_STATES[entry.state],
                pause=PAUSES[entry.pause],
                **_encode_counts(entry.counts, control_pb2.ReplicaStats),
            )
            for entry in statistics.replicas
        ],
    )


def _encode_counts(counts: Counts, message: type[Message]) -> dict[str, Any]:
    """Return the counters that ``message`` has."""
    names = [name for name in message.DESCRIPTOR.fields_by_name if name in counts.__slots__]
    values = {name: getattr(counts, name) for name in names}
    ends = values.pop("requests_total")
    values["requests_total"] = control_pb2.RequestsTotal(
        **{name: getattr(ends, name) for name in ends.__slots__}
    )
    return values


def _encode_timestamp(seconds: float) -> Timestamp:
    nanos = round(seconds * 1e9)
    return Timestamp(seconds=nanos // 10**9, nanos=nanos % 10**9)
