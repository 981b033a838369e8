"""Models and counters as proto messages: every value has its place."""

from __future__ import annotations

import dataclasses

from engine.status import (
    Capability,
    Counts,
    EngineStatistics,
    ModelState,
    ModelStatus,
    ReplicaCounts,
    ReplicaStatus,
    RequestsTotal,
)
from grpc_service import snapshots
from grpc_service._generated.triolet.v1 import common_pb2, control_pb2, models_pb2


def test_every_enum_value_of_the_engine_has_its_namesake():
    for table, enum, prefix in (
        (snapshots.CAPABILITIES, common_pb2.Capability, "CAPABILITY_"),
        (snapshots.MODEL_STATES, common_pb2.ModelState, "MODEL_STATE_"),
    ):
        for value, number in table.items():
            assert enum.Name(number) == prefix + value.name
    assert set(snapshots.CAPABILITIES) == set(Capability)
    assert set(snapshots.REPLICA_STATES) == set(ModelState)
    assert set(snapshots.MODEL_STATES) == set(ModelState) - {ModelState.DEGRADED}


def test_a_model_is_told_whole():
    replica = ReplicaStatus(1, ModelState.DRAINING, "cpu", 2, 3, 4, 5, 6, 7.5)
    status = ModelStatus(
        name="m",
        state=ModelState.FAILED,
        capability=Capability.RERANK,
        aliases=("a", "b"),
        error="why",
        memory_bytes=2**40,
        replicas=(replica,),
        leases=8,
        last_used=1.5,
        dtype="float32",
        device="cpu",
        architecture="Llama",
        max_model_len=2048,
        is_demo=True,
    )
    message = snapshots.encode_model(status)
    assert all(message.HasField(f.name) for f in message.DESCRIPTOR.fields if f.has_presence)
    assert message == models_pb2.Model(
        name="m",
        state="MODEL_STATE_FAILED",
        capability="CAPABILITY_RERANK",
        aliases=["a", "b"],
        error="why",
        memory_bytes=2**40,
        replicas=[
            models_pb2.Replica(
                id=1,
                state="REPLICA_STATE_DRAINING",
                device="cpu",
                threads=2,
                restarts=3,
                processed=4,
                failed=5,
                cancelled=6,
                busy={"seconds": 7, "nanos": 500_000_000},
            )
        ],
        leases=8,
        last_used={"seconds": 1, "nanos": 500_000_000},
        dtype="float32",
        device="cpu",
        architecture="Llama",
        max_model_len=2048,
        demo=True,
    )
    assert not snapshots.encode_model(ModelStatus("m", ModelState.READY)).HasField("last_used")


def test_every_counter_is_told():
    """Each counter gets a number of its own; the proto has the same names and no others."""
    numbers = {f.name: i + 1 for i, f in enumerate(dataclasses.fields(Counts))}
    ends = {f.name: i + 100 for i, f in enumerate(dataclasses.fields(RequestsTotal))}
    counts = Counts(**numbers | {"requests_total": RequestsTotal(**ends)})
    entry = ReplicaCounts("m", 1, ModelState.READY, counts)
    message = snapshots.encode_statistics(EngineStatistics(counts, (entry,)))
    expected = numbers | {"requests_total": control_pb2.RequestsTotal(**ends)}
    assert message.totals == control_pb2.Totals(**expected)
    assert message.replicas[0] == control_pb2.ReplicaStats(
        model="m", replica=1, state="REPLICA_STATE_READY", **expected
    )
    assert {f.name for f in control_pb2.Totals.DESCRIPTOR.fields} == set(numbers)
    assert {f.name for f in control_pb2.RequestsTotal.DESCRIPTOR.fields} == set(ends)
