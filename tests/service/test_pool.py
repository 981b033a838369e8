"""Cold starts, memory, loading and unloading over real gRPC."""

import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.core_driver import expected_tokens
from tests.support.server import fake
from tests.support.wire import (
    NOT_SERVING,
    SERVING,
    Generation,
    broken_fields,
    details,
    error_of,
    generate_request,
    health,
    list_models,
    reason,
    stats,
    wait_until,
)

GB = 1 << 30
WAKE_LIMIT_S = 0.05  # seconds within which the pool wakes waiting requests
WIRE_S = 0.25  # guess: round trips of ten calls on a busy machine
LOADED, UNLOADED, DRAINING, FAILED = (
    pb.Model(state=f"MODEL_STATE_{name}").state
    for name in ("READY", "UNLOADED", "DRAINING", "FAILED")
)


def model(channel, name):
    """Return a model's status."""
    return next(one for one in list_models(channel) if one.name == name)


def ask(channel, name, tokens=1, timeout=60):
    """Make one whole request. Return its error, or None, and the time of its end."""
    stub = stubs.InferenceStub(channel)
    request = generate_request(model=name, prompt_ids=[1], max_tokens=tokens)
    try:
        for _ in stub.Generate(request, timeout=timeout):
            pass
    except grpc.RpcError as error:
        return error, time.monotonic()
    return None, time.monotonic()


def ask_all(channel, *names):
    """Make a request to each model at once, and return the results of `ask`."""
    with ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(lambda name: ask(channel, name), names))


def load(channel, name, timeout=60, **fields):
    """Load a model, and return the reported stages."""
    stub = stubs.ModelsStub(channel)
    request = pb.LoadModelRequest(model=name, **fields)
    return list(stub.LoadModel(request, timeout=timeout))


def unload(channel, name, drain_s=None, timeout=60):
    """Unload a model."""
    request = pb.UnloadModelRequest(model=name)
    if drain_s is not None:
        request.drain.FromMicroseconds(int(drain_s * 1e6))
    return stubs.ModelsStub(channel).UnloadModel(request, timeout=timeout)


# ---- cold starts


@pytest.mark.alone
def test_ten_clients_of_a_cold_model_of_two_replicas():
    """Two loads, 4 GB, and nobody waits for longer than the load takes.

    Red if a waiting client begins a load of its own (`Loads.ensure`), and if a load reserves its
    memory twice for a moment (`Governor`).
    """
    cold = {"name": "cold", "lazy": True, "replicas": 2, "memory_bytes": 2 * GB}
    with fake(models=[cold | {"script": {"load_s": 1.0}}]) as server:
        started = time.monotonic()
        results = ask_all(server.channel, *["cold"] * 10)
        assert [error for error, _ in results] == [None] * 10
        assert max(at for _, at in results) - started < 1.0 + WAKE_LIMIT_S + WIRE_S
        check_two_loads(server)


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3])
def test_a_third_client_while_the_load_is_under_way(delay_s):
    """Red as the test above, and if a client that comes during a load begins another load."""
    cold = {"name": "cold", "lazy": True, "replicas": 2, "memory_bytes": 2 * GB}
    with fake(models=[cold | {"script": {"load_s": 0.5}}]) as server:
        with ThreadPoolExecutor(3) as threads:
            first = [threads.submit(ask, server.channel, "cold") for _ in range(2)]
            time.sleep(delay_s)
            third = threads.submit(ask, server.channel, "cold")
        assert [job.result()[0] for job in (*first, third)] == [None] * 3
        check_two_loads(server)


def check_two_loads(server):
    """Check that the model "cold" was loaded twice, once for each of its replicas of 2 GB."""
    # the second replica may be ready a moment after the first, which has served all
    wait_until(lambda: [one.id for one in model(server.channel, "cold").replicas] == [0, 1])
    assert server.ask("loads") == {"cold": 2}
    assert server.ask("peak") == stats(server.channel).memory_reserved == 4 * GB


def test_five_models_at_once_stay_below_the_limit():
    """Five of ten replicas fit, and a request without room gets an error that says so."""
    models = [
        {
            "name": f"m{i}",
            "lazy": True,
            "replicas": 2,
            "memory_bytes": GB,
            "script": {"load_s": 0.5},
        }
        for i in range(5)
    ]
    with fake(models=models, engine={"memory_limit": 5 * GB}) as server:
        results = ask_all(server.channel, *[one["name"] for one in models])
        for error, _ in results:
            assert error is None or reason(error) == "MEMORY_EXHAUSTED"
        assert server.ask("peak") == stats(server.channel).memory_limit == 5 * GB


@pytest.mark.alone
def test_a_failed_load_ends_every_waiting_request_at_once():
    """The requests end after the 1 s that the load took, not after the 30 s that they may wait."""
    cold = {"name": "cold", "lazy": True, "fails": 1, "script": {"load_s": 1.0}}
    with fake(models=[{"name": "fake"}, cold], may_log="cold|Traceback") as server:
        started = time.monotonic()
        results = ask_all(server.channel, *["cold"] * 9)
        assert {error.code() for error, _ in results} == {grpc.StatusCode.FAILED_PRECONDITION}
        assert {reason(error) for error, _ in results} == {"SPAWN_FAILED"}
        waits = [at - started for _, at in results]
        assert min(waits) > 1.0
        assert max(waits) < 1.0 + WAKE_LIMIT_S + WIRE_S
        assert model(server.channel, "cold").state == FAILED
        assert stats(server.channel).memory_reserved == model(server.channel, "fake").memory_bytes
        # an immediate retry is refused; after the backoff the load is tried again
        assert "the next attempt can begin in" in ask(server.channel, "cold")[0].details()
        wait_until(lambda: ask(server.channel, "cold")[0] is None, 10)


def test_a_load_goes_on_without_its_client():
    cold = {"name": "cold", "lazy": True, "script": {"load_s": 1.0}}
    with fake(models=[cold]) as server:
        error, _ = ask(server.channel, "cold", timeout=0.3)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: model(server.channel, "cold").state == LOADED)


def test_a_load_that_takes_longer_than_its_waiters_wait():
    cold = {"name": "cold", "lazy": True, "script": {"load_s": 2.0}}
    with fake(models=[cold], engine={"spawn_timeout_s": 0.5}) as server:
        error, _ = ask(server.channel, "cold")
        assert (error.code(), reason(error)) == (grpc.StatusCode.UNAVAILABLE, "SPAWN_TIMEOUT")
        assert "RetryInfo" in details(error)
        wait_until(lambda: model(server.channel, "cold").state == LOADED)


# ---- LoadModel and UnloadModel


@pytest.fixture
def server():
    """Serve three models of 1 GB, of which two fit."""
    models = [
        {"name": "a", "memory_bytes": GB, "aliases": ["alpha"], "script": {"load_s": 0.3}},
        {"name": "b", "memory_bytes": GB, "lazy": True},
        {"name": "c", "memory_bytes": GB, "lazy": True, "script": {"load_s": 0.3}},
    ]
    slow = {"step_s": 0.02}
    with fake(
        models=models,
        script=slow,
        runner={"max_model_len": 4096},
        engine={"memory_limit": 2 * GB},
    ) as one:
        wait_until(lambda: model(one.channel, "a").state == LOADED)
        yield one


def test_loading_reports_its_stages(server):
    stages = load(server.channel, "c")
    assert [stage.phase for stage in stages][-2:] == ["weights", "ready"]
    assert stages[-1].state == LOADED
    assert [stage.phase for stage in load(server.channel, "c")] == ["ready"]  # it is loaded already


def test_loading_more_replicas_than_fit_loads_those_that_fit(server):
    load(server.channel, "alpha", replicas=5)
    assert len(model(server.channel, "a").replicas) == 2


def test_leaving_a_load_leaves_it_to_the_server(server):
    stub = stubs.ModelsStub(server.channel)
    call = stub.LoadModel(pb.LoadModelRequest(model="c"), timeout=30)
    next(call)
    call.cancel()
    wait_until(lambda: model(server.channel, "c").state == LOADED)


def test_eviction_makes_room_and_the_evicted_model_comes_back(server):
    channel = server.channel
    assert ask(channel, "b")[0] is None
    assert ask(channel, "c")[0] is None
    assert model(channel, "a").state == UNLOADED
    assert health(channel, "model/a") == health(channel) == SERVING  # by the other replica
    assert ask(channel, "a")[0] is None
    assert model(channel, "b").state == UNLOADED


def test_a_model_that_is_busy_is_not_evicted(server):
    channel = server.channel
    streams = [Generation(channel, model=name, prompt_ids=[1], max_tokens=500) for name in "ab"]
    for stream in streams:
        stream.read_deltas(1)
    error, _ = ask(channel, "c")
    assert (error.code(), reason(error)) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "MEMORY_EXHAUSTED",
    )
    assert "nothing can be evicted" in error.details()
    with pytest.raises(grpc.RpcError) as caught:
        load(channel, "c")
    assert reason(caught.value) == "MEMORY_EXHAUSTED"
    for stream in streams:
        stream.cancel()
    wait_until(lambda: ask(channel, "c")[0] is None)


def test_unloading_waits_for_requests_and_then_cuts_them(server):
    channel = server.channel
    long = Generation(channel, model="a", prompt_ids=[1], max_tokens=3000)
    short = Generation(channel, model="a", prompt_ids=[1], max_tokens=20)
    long.read_deltas(1)
    with ThreadPoolExecutor(1) as threads:
        unloading = threads.submit(unload, channel, "a", 1.5)
        wait_until(lambda: model(channel, "a").state == DRAINING)
        assert health(channel, "model/a") == NOT_SERVING
        error, _ = ask(channel, "a")
        assert (error.code(), reason(error)) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKERS")
        assert unloading.result(30) is not None
    heard = short.finish()
    assert heard.error is None
    assert heard.ids() == list(expected_tokens([1], count=20))
    assert reason(long.finish().error) == "ABORTED"
    assert model(channel, "a").state == UNLOADED
    assert model(channel, "a").memory_bytes == stats(channel).memory_reserved == 0
    assert ask(channel, "a")[0] is None  # it can be loaded again


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "model"),
        ({"model": "a", "replicas": 0}, "replicas"),
        ({"model": "a", "replicas": 65}, "replicas"),
    ],
    ids=str,
)
def test_a_broken_load_is_named(server, fields, field):
    stub = stubs.ModelsStub(server.channel)
    request = pb.LoadModelRequest(**fields)
    error = error_of(lambda: list(stub.LoadModel(request, timeout=10)))
    assert broken_fields(error) == [field]


def test_a_broken_unload_is_named(server):
    error = error_of(lambda: unload(server.channel, ""))
    assert broken_fields(error) == ["model"]
    error = error_of(lambda: unload(server.channel, "a", -1.0))
    assert broken_fields(error) == ["drain"]
    for job in (load, unload):
        error = error_of(lambda job=job: job(server.channel, "nothing"))
        assert reason(error) == "MODEL_NOT_FOUND"
