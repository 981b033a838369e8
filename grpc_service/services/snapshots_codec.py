"""Translates snapshots of models and counters into messages of Models and Control.

Rule 1: this module is pure, like `grpc_service.services.text_codec`. Rule 2: fields and
enum values with the same name in the engine and in the proto are copied by name, so that a new
counter needs no line here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.timestamp_pb2 import Timestamp

from engine.status import ModelState
from grpc_service._generated.triolet.v1 import control_pb2, models_pb2
from grpc_service.services.text_encoder import encode_duration

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from engine.status import Counts, EngineStatistics, ModelStatus, ReplicaStatus


def shared_fields(value: object, message: type[Message]) -> dict[str, Any]:
    """Return the fields of ``message`` that a value of the engine has by the same names."""
    names = [name for name in message.DESCRIPTOR.fields_by_name if hasattr(value, name)]
    return {name: getattr(value, name) for name in names}


def encode_model(status: ModelStatus) -> models_pb2.Model:
    """Return the message for a model, as ListModels and GetModel send it."""
    others = {
        "capability": f"CAPABILITY_{status.capability.name}",
        "capabilities": [f"CAPABILITY_{capability.name}" for capability in status.capabilities],
        "state": f"MODEL_STATE_{status.state.name}",
        "replicas": [_encode_replica(replica) for replica in status.replicas],
        "last_used": encode_timestamp(status.last_used) if status.last_used else None,
        "demo": status.is_demo,
    }
    return models_pb2.Model(**shared_fields(status, models_pb2.Model) | others)


def _encode_replica(status: ReplicaStatus) -> models_pb2.Replica:
    others = {
        "id": status.replica_id,
        "state": _state(status.state),
        "tensor_parallel_size": status.tp,
        "busy": encode_duration(status.busy_s),
    }
    return models_pb2.Replica(**shared_fields(status, models_pb2.Replica) | others)


def _state(state: ModelState) -> str:
    """Return the name of a replica's state: UNSPECIFIED for UNLOADED, as no listed replica is."""
    return f"REPLICA_STATE_{'UNSPECIFIED' if state is ModelState.UNLOADED else state.name}"


def encode_statistics(statistics: EngineStatistics) -> control_pb2.GetStatsResponse:
    """Return the message for a snapshot of the engine's counters."""
    return control_pb2.GetStatsResponse(
        totals=control_pb2.Totals(**_encode_counts(statistics.totals, control_pb2.Totals)),
        replicas=[
            control_pb2.ReplicaStats(
                model=entry.model,
                replica=entry.replica,
                state=_state(entry.state),
                pause=f"PAUSE_MODE_{entry.pause.upper() or 'UNSPECIFIED'}",
                **_encode_counts(entry.counts, control_pb2.ReplicaStats),
            )
            for entry in statistics.replicas
        ],
    )


def _encode_counts(counts: Counts, message: type[Message]) -> dict[str, Any]:
    """Return the counters for which ``message`` has a field."""
    ends = shared_fields(counts.requests_total, control_pb2.RequestsTotal)
    return shared_fields(counts, message) | {"requests_total": control_pb2.RequestsTotal(**ends)}


def encode_timestamp(seconds: float) -> Timestamp:
    nanos = round(seconds * 1e9)
    return Timestamp(seconds=nanos // 10**9, nanos=nanos % 10**9)
