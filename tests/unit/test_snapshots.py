"""Models and counters as proto messages: every value has its field."""

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
from grpc_service.client import messages as pb
from grpc_service.services import snapshots_codec


def test_every_enum_value_of_the_engine_is_in_the_proto():
    for capability in Capability:
        message = snapshots_codec.encode_model(ModelStatus("m", ModelState.READY, capability))
        assert pb.Capability.Name(message.capability) == f"CAPABILITY_{capability.name}"
    for state in ModelState:
        entry = ReplicaCounts("m", 1, state, Counts())
        [replica] = snapshots_codec.encode_statistics(EngineStatistics(Counts(), (entry,))).replicas
        name = pb.ReplicaState.Name(replica.state).removeprefix("REPLICA_STATE_")
        assert name == ("UNSPECIFIED" if state is ModelState.UNLOADED else state.name)
        if state is not ModelState.DEGRADED:
            message = snapshots_codec.encode_model(ModelStatus("m", state))
            assert pb.ModelState.Name(message.state) == f"MODEL_STATE_{state.name}"


def test_a_model_is_encoded_completely():
    replica = ReplicaStatus(1, ModelState.DRAINING, "cpu", 2, 3, 4, 5, 6, 7.5, 2)
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
        context_note="of 4096",
        quantization="int4",
        is_demo=True,
    )
    message = snapshots_codec.encode_model(status)
    assert all(message.HasField(f.name) for f in message.DESCRIPTOR.fields if f.has_presence)
    assert message == pb.Model(
        name="m",
        state="MODEL_STATE_FAILED",
        capability="CAPABILITY_RERANK",
        aliases=["a", "b"],
        error="why",
        memory_bytes=2**40,
        replicas=[
            pb.Replica(
                id=1,
                state="REPLICA_STATE_DRAINING",
                device="cpu",
                threads=2,
                tensor_parallel_size=2,
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
        context_note="of 4096",
        quantization="int4",
    )
    assert not snapshots_codec.encode_model(ModelStatus("m", ModelState.READY)).HasField(
        "last_used"
    )


def test_every_counter_is_encoded():
    """Each counter gets a number of its own; the proto has the same names and no others."""
    numbers = {f.name: i + 1 for i, f in enumerate(dataclasses.fields(Counts))}
    ends = {f.name: i + 100 for i, f in enumerate(dataclasses.fields(RequestsTotal))}
    counts = Counts(**numbers | {"requests_total": RequestsTotal(**ends)})
    entry = ReplicaCounts("m", 1, ModelState.READY, counts)
    message = snapshots_codec.encode_statistics(EngineStatistics(counts, (entry,)))
    expected = numbers | {"requests_total": pb.RequestsTotal(**ends)}
    assert message.totals == pb.Totals(**expected)
    del expected["detached"]  # streams without a client belong to no replica
    assert message.replicas[0] == pb.ReplicaStats(
        model="m", replica=1, state="REPLICA_STATE_READY", **expected
    )
    assert {f.name for f in pb.Totals.DESCRIPTOR.fields} == set(numbers)
    assert {f.name for f in pb.RequestsTotal.DESCRIPTOR.fields} == set(ends)
