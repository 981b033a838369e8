"""The pool in virtual time: cold starts, memory, eviction, unloading and failure."""

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import assert_no_checkpoints

from engine.config import RUNNERS
from engine.errors import (
    EngineBug,
    MemoryExhausted,
    NoWorkers,
    ShuttingDown,
    SpawnFailed,
    SpawnTimeout,
    TrioletError,
    WorkerLost,
)
from engine.pool.backoff import OPEN_S
from engine.pool.capabilities import can
from engine.status import Capability, ModelState
from tests.support.examples import examples
from tests.support.pools import GB, Model, World, in_world

SEEDS = range(6)  # seeds of the order in which tasks run


def state(world, name="a"):
    return world.pool.registry.entries[name].state


# ---- cold starts


@pytest.mark.parametrize("seed", SEEDS)
@in_world(Model("a", 2 * GB, replicas=2))
async def test_ten_clients_of_a_cold_model_of_two_replicas_load_it_twice(world, *, seed):
    """Red if every client begins a load of its own: 20 loads and 40 GB."""
    results = await world.hold_all(*[("a",)] * 10)
    assert [error for error, _ in results] == [None] * 10
    assert world.num_loads("a") == 2
    assert world.pool.memory.peak() == 4 * GB


@pytest.mark.parametrize("seed", SEEDS)
@in_world(Model("a", 2 * GB, replicas=2, load_s=1.0))
async def test_three_clients_at_drawn_instants_load_two_replicas(world, *, seed):
    """Two clients come at once, the third during the load, and a fourth after it."""
    async with trio.open_nursery() as nursery:
        for at in (0.0, 0.0, 0.5, 1.5):
            nursery.start_soon(later, at, world.hold, "a")
    assert world.num_loads("a") == 2
    assert world.pool.memory.peak() == 4 * GB


async def later(at, job, *args):
    """Run ``job`` after ``at`` seconds."""
    await trio.sleep(at)
    await job(*args)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("capability", Capability)
def test_models_load_beside_each_other_unless_a_load_changes_the_process(capability, runner):
    """sentence-transformers and diffusers change torch for every thread of their process while they
    load, but a worker process has only one model."""
    world = World(*(Model(one, capability=capability, runner=runner) for one in "ab"))

    async def body(world):
        ready = [at for _, at in await world.hold_all(("a",), ("b",))]
        assert sorted(ready) == [1.0, 2.0 if has_own_library and runner != "process" else 1.0]

    has_own_library = capability not in (Capability.TEXT_TO_TEXT, Capability.VISION)
    world.run(body)


@in_world(Model("a", load_s=1.5))
async def test_waiters_wake_at_the_instant_of_ready(world):
    """Red if waiters poll, and so wake later."""
    assert [at for _, at in await world.hold_all(*[("a",)] * 10)] == [1.5] * 10


@in_world(Model("a", 2 * GB, prepare_s=1.0, load_s=1.0))
async def test_memory_is_reserved_before_a_load_and_the_model_serves_only_after_it(world):
    entry = world.pool.registry.entries["a"]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.hold, "a")
        await trio.sleep(0.5)  # the load's memory is being estimated
        assert (world.num_loads("a"), world.pool.memory.total_reserved) == (0, 0)
        await trio.sleep(1.0)  # the model is loading
        assert (world.num_loads("a"), world.pool.memory.total_reserved) == (1, 2 * GB)
        assert (entry.state, entry.ready, entry.replicas) == (ModelState.LOADING, [], [])
        await trio.sleep(1.0)
        assert (entry.state, len(entry.ready)) == (ModelState.READY, 1)


@in_world(Model("a"))
async def test_a_warm_model_is_leased_without_a_wait(world):
    await world.hold("a")
    with assert_no_checkpoints():
        async with world.pool.leases.acquire("a") as replica:
            assert replica.model == "a"


@in_world(Model("slow", load_s=20.0), Model("fast", load_s=1.0))
async def test_models_load_in_parallel(world):
    (_, slow), (_, fast) = await world.hold_all(("slow",), ("fast",))
    assert (slow, fast) == (20.0, 1.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_five_models_of_two_replicas_at_once_stay_below_the_limit(seed):
    """The limit holds five replicas; requests for the other models are refused."""
    models = [Model(f"m{i}", GB, replicas=2) for i in range(5)]
    world = World(*models, limit=5 * GB)

    async def body(world):
        results = await world.hold_all(*[(model.name, 5.0) for model in models])
        assert world.pool.memory.peak() <= 5 * GB
        for error, _ in results:
            assert error is None or isinstance(error, MemoryExhausted)
        assert sum(error is None for error, _ in results) >= 3

    world.run(body, seed)


@in_world(Model("a", load_s=10.0))
async def test_a_load_survives_its_requester(world):
    with trio.move_on_after(1.0):
        await world.hold("a")
    assert state(world) is ModelState.LOADING
    await trio.sleep(9.0)
    assert state(world) is ModelState.READY
    assert await world.hold("a") == (None, 10.0)
    assert world.num_loads("a") == 1


@in_world(Model("a", load_s=100.0))
async def test_the_spawn_timeout_is_the_waiters_and_the_load_goes_on(world):
    """Each request waits 30 s from its own arrival."""

    async def timed_out(world, at):
        await trio.sleep(at)
        error, when = await world.hold("a")
        assert isinstance(error, SpawnTimeout)
        assert str(error).startswith("Spawn timeout: a is still loading after 30 s")
        assert when == at + 30.0

    async with trio.open_nursery() as nursery:
        for at in (0.0, 20.0):
            nursery.start_soon(timed_out, world, at)
    assert state(world) is ModelState.LOADING
    await trio.sleep(50.0)
    assert await world.hold("a") == (None, 100.0)


# ---- failure


@pytest.mark.parametrize(
    "cause",
    [SpawnFailed("no such file"), RuntimeError("x"), MemoryError(), SystemExit(3)],
    ids=repr,
)
def test_a_failed_load_raises_an_own_error_for_each_waiter_at_once(cause):
    """Waiters get the error after 1 s, when the load fails, and not after 30 s."""
    world = World(Model("a", load_s=1.0, load_errors=[cause]))

    async def body(world):
        results = await world.hold_all(*[("a",)] * 9)
        errors = [error for error, _ in results]
        assert {at for _, at in results} == {1.0}
        assert all(isinstance(error, SpawnFailed) for error in errors)
        assert len({id(error) for error in errors}) == 9
        assert {id(error.__cause__) for error in errors} != {id(None)}
        assert str(errors[0]).startswith("Worker spawn failed: a: ")
        assert state(world) is ModelState.FAILED
        assert world.pool.memory.total_reserved == 0

    world.run(body)


def test_an_estimate_that_fails_is_a_load_that_fails():
    world = World(Model("a", estimate_error=SpawnFailed("no config.json")))

    async def body(world):
        error, at = await world.hold("a")
        assert (str(error), at) == ("Worker spawn failed: a: no config.json", 0.0)
        [status] = [entry.status() for entry in world.pool.registry.entries.values()]
        assert status.error == "no config.json"  # the status has the model's name in another field
        assert world.num_loads("a") == 0

    world.run(body)
    assert world.workers


@pytest.mark.parametrize("fails", ["estimate", "load"])
def test_the_log_has_once_why_a_model_did_not_load_with_details_that_clients_do_not_get(
    fails, caplog
):
    error = SpawnFailed("no config.json", log_detail="/secret/path")
    faults = {"estimate_error": error} if fails == "estimate" else {"load_errors": [error]}
    world = World(Model("a", **faults))

    async def body(world):
        told, _ = await world.hold("a")
        assert "/secret/path" not in str(told)

    world.run(body)
    [line] = [one for one in caplog.records if "no config.json" in one.getMessage()]
    assert line.levelname == "WARNING"
    assert line.getMessage() == ("a worker of a did not load: no config.json [/secret/path]")
    assert line.exc_info is None


@in_world(Model("a", replicas=2, load_errors=[RuntimeError("x")]))
async def test_one_replica_of_two_that_fails_leaves_the_other(world):
    assert await world.hold("a") == (None, 1.0)
    assert state(world) is ModelState.READY
    assert world.pool.memory.total_reserved == GB


@in_world(Model("a", load_s=0.5, load_errors=[RuntimeError("x")] * 6))
async def test_after_a_failure_the_next_try_waits_longer_each_time_and_then_the_breaker_opens(
    world,
):
    """Tries are 1, 2, 4, 8 and then 60 s apart; requests between them load nothing."""
    waits = [1.0, 2.0, 4.0, 8.0, OPEN_S, OPEN_S]
    for tries, wait_s in enumerate(waits, 1):
        await world.hold("a")
        assert world.num_loads("a") == tries
        await trio.sleep(wait_s - 0.1)
        error, _ = await world.hold("a")
        assert isinstance(error, SpawnFailed)
        assert "the next attempt can begin in 0 s" in str(error)
        assert world.num_loads("a") == tries
        await trio.sleep(0.2)
    assert (await world.hold("a"))[0] is None
    assert state(world) is ModelState.READY


@in_world(Model("a", load_errors=[RuntimeError("x")] * 5))
async def test_the_operator_need_not_wait_for_the_breaker(world):
    for _ in range(5):
        with pytest.raises(SpawnFailed):
            await load(world, "a")
    await load(world, "a")
    assert world.num_loads("a") == 6


@pytest.mark.parametrize("stands", ["one replica serves", "its restart is due"])
def test_the_operator_learns_of_a_replica_that_does_not_load(stands):
    """The operator's load fails once, and is not retried by itself meanwhile."""
    count = 2 if stands == "one replica serves" else 1
    errors = [None] + [RuntimeError("x") for _ in range(3)]
    world = World(Model("a", replicas=count, load_errors=errors))

    async def body(world):
        if count == 1:
            await load(world, "a")
            world.crash("a")
            await trio.sleep(0.01)
        with pytest.raises(SpawnFailed):
            await load(world, "a")
        assert world.num_loads("a") == 2
        assert len(world.pool.registry.entries["a"].ready) == count - 1

    world.run(body)


@in_world(Model("a", load_errors=[RuntimeError("x")]))
async def test_a_late_watch_still_learns_of_the_failure(world):
    watch = world.pool.watch_load("a")
    assert await watch.next() is not None
    await trio.sleep(5.0)
    with pytest.raises(SpawnFailed):
        await watch.next()
    assert world.num_loads("a") == 1


async def load(world, name, replicas=None):
    """Load a model as the operator does, and return every stage that its watch reports."""
    watch = world.pool.watch_load(name, replicas)
    stages = []
    while (stage := await watch.next()) is not None:
        stages.append(stage)
    return stages


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_a_preload_takes_nobodys_room_until_a_request_waits_for_it(is_asked_for):
    models = Model("a", lazy=False), Model("b", lazy=False, prepare_s=2.0)
    world = World(*models, limit=GB)

    async def body(world):
        await trio.sleep(1.5)
        assert state(world) is ModelState.READY
        if is_asked_for:
            assert (await world.hold("b"))[0] is None
        await trio.sleep(5.0)
        assert [bool(world.pool.registry.entries[name].ready) for name in "ab"] == [
            not is_asked_for,
            is_asked_for,
        ]

    world.run(body)


@in_world(Model("a", replicas=2), Model("b"), limit=2 * GB)
async def test_a_load_is_over_even_if_a_dead_replica_still_looks_for_room(world):
    """Red if each check of the operator's watch begins another load (found by the simulator)."""
    await world.hold("a")
    world.crash("a")
    await world.hold("b")  # loads "b" into the memory of the replica that crashed
    with trio.fail_after(5.0):
        assert (await load(world, "a", 2))[-1].state is ModelState.READY
    assert len(world.pool.registry.entries["a"].ready) == 1
    assert world.num_loads("a") == 2


@in_world(Model("a"))
async def test_a_load_is_not_over_while_its_replica_is_dead_and_comes_back(world):
    """Even a slow watcher, as a client may be, gets as its last report that the model serves."""
    watch = world.pool.watch_load("a")
    await trio.sleep(2.0)
    assert state(world) is ModelState.READY
    world.crash("a")
    await trio.sleep(0.01)
    stages = []
    while (stage := await watch.next()) is not None:
        stages.append(stage)
    assert (stages[-1].progress.phase, stages[-1].state) == ("ready", ModelState.READY)
    assert world.num_loads("a") == 2


@in_world(Model("a"))
async def test_a_worker_that_dies_leaves_the_routing_and_comes_back_after_its_backoff(world):
    """Requests that come meanwhile wait; the worker comes back without requests, too."""
    await world.hold("a")
    for died_at, back_at in ((2.0, 4.0), (5.0, 8.0), (10.0, 15.0)):
        await trio.sleep_until(died_at)
        world.crash("a")
        await trio.sleep(0.01)
        assert state(world) is ModelState.LOADING
        assert world.pool.registry.entries["a"].degraded_ids == [0]
        assert world.pool.memory.total_reserved == 0
        assert await world.hold("a") == (None, back_at)
    [replica] = world.pool.registry.entries["a"].replicas
    assert (replica.replica_id, replica.restarts) == (0, 3)


@in_world(Model("a", replicas=2))
async def test_one_replica_of_two_that_dies_leaves_the_other_and_comes_back(world):
    await load(world, "a")
    world.crash("a")
    await trio.sleep(0.01)
    assert state(world) is ModelState.READY
    assert (await world.hold("a"))[0] is None
    await trio.sleep(2.0)
    replicas = world.pool.registry.entries["a"].replicas
    assert [(one.replica_id, one.restarts) for one in replicas] == [(0, 1), (1, 0)]


@in_world(Model("a", load_s=0.0))
async def test_a_replica_that_died_five_times_is_given_up_until_the_operator_acts(world):
    for _ in range(5):
        assert (await world.hold("a"))[0] is None
        world.crash("a")
        await trio.sleep(0.01)
    assert state(world) is ModelState.FAILED
    assert isinstance((await world.hold("a"))[0], EngineBug)
    await load(world, "a")
    assert state(world) is ModelState.READY


@in_world(Model("a", load_s=0.0, load_errors=[None, RuntimeError("x"), None]))
async def test_a_restart_that_fails_is_tried_again(world):
    await world.hold("a")
    world.crash("a")
    await trio.sleep(1.5)  # by now the first restart has failed
    assert world.num_loads("a") == 2
    assert await world.hold("a") == (None, 3.0)


@in_world(Model("a", load_s=0.0))
async def test_unloading_a_model_that_waits_for_its_restart_ends_the_restart(world):
    await world.hold("a")
    world.crash("a")
    await trio.sleep(0.5)
    await world.pool.unload("a", 0.0)
    assert state(world) is ModelState.UNLOADED
    await trio.sleep(10.0)
    assert world.num_loads("a") == 1


# ---- memory


def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic():
    world = World(Model("a", 3 * GB), Model("b", 2 * GB), limit=4 * GB)

    async def body(world):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.hold, "a", 10.0)
            await trio.sleep(5.0)
            error, at = await world.hold("b")
            assert at == 5.0
            assert str(error) == (
                "Memory exhausted: Memory limit reached for b: it needs 2,048.0 MiB on cpu, where "
                "3,072.0 MiB of 4,096.0 MiB are reserved; nothing can be evicted"
            )
        assert (await world.hold("b"))[0] is None  # the next request tries again

    world.run(body)


@in_world(Model("a"), Model("huge", 9 * GB), limit=4 * GB)
async def test_a_model_larger_than_the_limit_evicts_nobody(world):
    await world.hold("a")
    error, _ = await world.hold("huge")
    assert isinstance(error, MemoryExhausted)
    assert error.retry_after_s is None
    assert "evicting a (1,024.0 MiB) would not free enough" in str(error)
    assert str(error).endswith("; raise --memory-limit or lower --kv-cache-memory")
    assert state(world) is ModelState.READY


def test_a_divided_model_gets_memory_of_every_device_or_of_none():
    """Each device has 1 GB. Only models on devices without enough free memory are unloaded."""
    half, devices = GB // 2, ("cuda:0", "cuda:1")
    world = World(
        Model("first", half, devices=devices[:1]),
        Model("second", GB, devices=devices[1:]),
        Model("third", half, devices=("cuda:2",)),
        Model("divided", half, devices=devices),
        Model("large", GB + 1, devices=devices),
    )

    async def body(world):
        for name in ("first", "second", "third"):
            assert (await world.hold(name))[0] is None
        memory = world.pool.memory
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.hold, "second", 20.0)
            await trio.sleep(1)
            error, _ = await world.hold("divided")  # "cuda:0" has room, "cuda:1" has none
            assert isinstance(error, MemoryExhausted)
            assert "512.0 MiB on cuda:1" in str(error)
            assert memory.reserved("cuda:0") == half
        assert (await world.hold("divided"))[0] is None
        assert [memory.reserved(device) for device in devices] == [GB, half]
        assert [state(world, name) for name in ("first", "second", "third")] == [
            *(ModelState.READY, ModelState.UNLOADED, ModelState.READY)
        ]
        error, _ = await world.hold("large")
        assert isinstance(error, MemoryExhausted)
        assert error.retry_after_s is None

    world.run(body)


@in_world(*[Model(name) for name in "abcd"], limit=3 * GB)
async def test_the_least_recently_used_idle_model_makes_room(world):
    for name in "abca":
        await world.hold(name)
        await trio.sleep(1)
    await world.hold("d")
    assert [state(world, name) for name in "abcd"] == [
        *(ModelState.READY, ModelState.UNLOADED, ModelState.READY, ModelState.READY)
    ]


def test_a_popular_model_gives_its_spare_replica_to_one_that_has_none():
    """The spare replica is drained even if requests run on it, and none of them is cut."""
    world = World(Model("popular", replicas=4), Model("other"), limit=4 * GB)
    cuts = []

    async def body(world):
        await world.hold("popular")
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(world.hold, "popular", 5.0, lambda: cuts.append(1))
            await trio.sleep(1.0)
            assert await world.hold("other") == (None, 1.0 + 1.0 + 5.0 - 1.0 + 1.0)
        assert len(world.pool.registry.entries["popular"].ready) == 3

    world.run(body)
    assert not cuts


@in_world(Model("a", replicas=2), Model("b"), limit=2 * GB)
async def test_a_replica_that_dies_while_it_makes_room_does_not_come_back(world):
    await load(world, "a")
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(world.hold, "a", 50.0)
        await trio.sleep(1.0)
        nursery.start_soon(world.hold, "b")
        await trio.sleep(1.0)
        [leaving] = [one for one in world.pool.registry.entries["a"].replicas if one.is_retired]
        world.crash_replica(leaving)
        await trio.sleep(0.1)
        assert world.pool.registry.entries["a"].degraded_ids == []
    assert world.num_loads("a") == 2


@in_world(Model("a", lazy=False), Model("b", lazy=False), limit=GB)
async def test_a_preload_evicts_nobody(world):
    await trio.sleep(5.0)
    assert {state(world, "a"), state(world, "b")} == {ModelState.READY, ModelState.FAILED}


@in_world(Model("a", GB, measured=3 * GB), Model("b", GB), limit=3 * GB)
async def test_a_measurement_replaces_the_estimate(world):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.hold, "a", 10.0)
        await trio.sleep(2.0)
        assert world.pool.memory.total_reserved == 3 * GB
        assert isinstance((await world.hold("b"))[0], MemoryExhausted)


@in_world(Model("b"), Model("a", measured=5 * GB), Model("c"), limit=4 * GB)
async def test_nothing_is_evicted_in_vain_if_more_was_measured_than_the_limit(world):
    await world.hold("b")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.hold, "a", 50.0)
        await trio.sleep(2.0)
        assert isinstance((await world.hold("c"))[0], MemoryExhausted)
        assert state(world, "b") is ModelState.READY


@in_world(Model("a"), Model("b"), idle_ttl_s=60.0)
async def test_an_idle_model_goes_after_its_time_to_live(world):
    await world.hold("a", 100.0)
    await world.hold("b")
    await trio.sleep(58.0)
    assert state(world) is ModelState.READY
    await trio.sleep(1.5)
    assert [state(world, name) for name in "ab"] == [ModelState.UNLOADED, ModelState.READY]
    await trio.sleep(2.0)
    assert state(world, "b") is ModelState.UNLOADED


@in_world(Model("a", lazy=False), Model("b", replicas=2), idle_ttl_s=60.0)
async def test_a_model_that_nobody_ever_used_goes_after_its_time_to_live_too(world):
    await trio.sleep(2.0)
    await load(world, "b")
    await trio.sleep(57.0)
    assert state(world) is ModelState.READY
    await trio.sleep(2.5)
    assert [state(world, name) for name in "ab"] == [ModelState.UNLOADED, ModelState.READY]
    await trio.sleep(3.0)
    assert state(world, "b") is ModelState.UNLOADED


# ---- loading and unloading as the operator wants


@in_world(Model("a"), limit=3 * GB)
async def test_loading_adds_replicas_up_to_the_requested_number(world):
    [*_, last] = await load(world, "a")
    assert (last.state, len(world.pool.registry.entries["a"].ready)) == (ModelState.READY, 1)
    await load(world, "a", 3)
    assert len(world.pool.registry.entries["a"].ready) == 3
    await load(world, "a", 9)  # loads as many replicas as fit
    await load(world, "a", 1)
    assert len(world.pool.registry.entries["a"].ready) == 3
    assert [r.replica_id for r in world.pool.registry.entries["a"].replicas] == [0, 1, 2]


@in_world(Model("a"))
async def test_unloading_lets_requests_finish_and_then_cuts_them(world):
    async def unload(world, drain_s):
        await world.pool.unload("a", drain_s)
        assert world.pool.memory.total_reserved == 0

    scope = trio.CancelScope()

    async def long():
        with scope:
            await world.hold("a", 100.0, scope.cancel)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(long)
        nursery.start_soon(world.hold, "a", 5.0)
        await trio.sleep(2.0)
        nursery.start_soon(unload, world, 10.0)
        await trio.sleep(1.0)
        assert state(world) is ModelState.DRAINING
        error, _ = await world.hold("a")
        assert isinstance(error, NoWorkers)
        assert str(error) == "No workers available: a is being unloaded"
    assert trio.current_time() == 12.0
    assert state(world) is ModelState.UNLOADED
    assert (await world.hold("a"))[0] is None  # an unloaded model can be loaded again


@in_world(Model("a"))
async def test_an_unload_goes_on_without_its_caller_and_a_second_one_may_cut(world):
    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:

        async def long():
            with scope:
                await world.hold("a", 100.0, scope.cancel)

        nursery.start_soon(long)
        await trio.sleep(2.0)
        with trio.move_on_after(1.0):
            await world.pool.unload("a", 50.0)
        assert state(world) is ModelState.DRAINING
        await world.pool.unload("a", 0.0)
    assert trio.current_time() == 3.0
    await trio.sleep(60)


@in_world(Model("a", load_s=10.0))
async def test_unloading_waits_for_a_load_under_way(world):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.hold, "a")
        await trio.sleep(1.0)
        await world.pool.unload("a", 0.0)
        assert trio.current_time() >= 10.0
        assert state(world) is ModelState.UNLOADED


@in_world(Model("a", load_s=10.0), Model("b"))
async def test_closing_while_a_load_is_under_way_ends_its_waiters(world):
    async def closes(world):
        error, _ = await world.hold("a")
        assert isinstance(error, ShuttingDown)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(closes, world)
        await trio.sleep(1.0)
        world.pool.close()
        assert isinstance((await world.hold("b"))[0], ShuttingDown)
        with pytest.raises(ShuttingDown):
            await world.pool.unload("a", 0.0)


@pytest.mark.parametrize("end", ["close", "unload"])
@in_world(Model("a", replicas=2), Model("b", load_s=45.0), limit=2 * GB)
async def test_a_model_that_waits_for_room_is_not_loaded_after_the_end(world, *, end):
    async def waits(world):
        error, at = await world.hold("b")
        assert isinstance(error, NoWorkers if end == "unload" else ShuttingDown)
        assert at == 3.0

    async def watches(world):
        with pytest.raises(NoWorkers if end == "unload" else ShuttingDown):
            await load(world, "b")

    await load(world, "a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.hold, "a", 20.0)
        nursery.start_soon(world.hold, "a", 20.0)
        await trio.sleep(1.0)
        nursery.start_soon(waits, world)
        nursery.start_soon(watches, world)
        await trio.sleep(1.0)
        with trio.fail_after(1.0):
            if end == "unload":
                await world.pool.unload("b", 0.0)
            else:
                world.pool.close()
                await trio.sleep(0.5)
            assert state(world, "b") is ModelState.UNLOADED
    assert world.num_loads("b") == 0


@pytest.mark.parametrize("end", ["close", "unload"])
def test_a_model_that_waits_for_a_thread_is_not_loaded_after_the_end(end):
    encoder = Capability.TEXT_EMBEDDING  # encoders load one after the other
    world = World(
        *(Model(name, load_s=10.0, capability=encoder) for name in "ab"),
    )

    async def body(world):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.hold, "a")
            await trio.sleep(0.5)
            nursery.start_soon(world.hold, "b")
            await trio.sleep(0.5)
            if end == "unload":
                await world.pool.unload("b", 0.0)
            else:
                world.pool.close()
        assert world.num_loads("b") == 0

    world.run(body)


def test_a_death_with_a_reason_is_one_log_line_and_a_bug_is_a_traceback(caplog):
    world = World(Model("lost"), Model("broken"))

    async def body(world):
        await load(world, "lost")
        await load(world, "broken")
        [replica] = world.pool.registry.entries["lost"].replicas
        replica.loop.lose(WorkerLost("the worker process was killed by signal 9"))
        world.crash("broken")
        await trio.sleep(0.01)

    world.run(body)
    lines = [one for one in caplog.records if "has died" in one.getMessage()]
    tracebacks = {one.getMessage(): bool(one.exc_info) for one in lines}
    assert tracebacks == {
        "a worker of lost has died: the worker process was killed by signal 9": False,
        "a worker of broken has died": True,
    }


@in_world(Model("a", replicas=2))
async def test_closing_waits_for_no_backoff(world):
    await load(world, "a")
    for _ in range(2):
        world.crash("a")
        await trio.sleep(0.01)
    assert world.pool.registry.entries["a"].degraded_ids == [0, 1]
    world.pool.close()
    await trio.sleep(0.1)
    assert world.pool.registry.entries["a"].load is None


# ---- every capability


@pytest.mark.parametrize("capability", Capability, ids=lambda one: one.value)
def test_the_pool_serves_all_capabilities_alike(capability):
    """Cold start, failure and retry, eviction and unloading work for any capability."""
    other = next(one for one in Capability if not can(capability, one))
    world = World(
        Model("a", capability=capability, replicas=2, load_errors=[RuntimeError("x")] * 2),
        Model("b", 2 * GB, capability=other),
        limit=2 * GB,
    )

    async def body(world):
        assert isinstance((await world.hold("a"))[0], SpawnFailed)
        await trio.sleep(1.0)
        async with world.pool.leases.acquire("", capability) as replica:
            assert replica.model == "a"
        await load(world, "a", 2)
        assert len(world.pool.registry.entries["a"].ready) == 2
        with pytest.raises(TrioletError, match=r"a .*, but the request needs a model that "):
            world.pool.registry.find("a", other)
        assert (await world.hold("b"))[0] is None
        assert state(world) is ModelState.UNLOADED
        await world.pool.unload("b", 0.0)
        assert (await world.hold("a"))[0] is None

    world.run(body)


# ---- interleavings

ERRORS = (SpawnFailed("x"), RuntimeError("x"), SystemExit(1), MemoryError())


@st.composite
def drawn_worlds(draw):
    """Draw models, operations on them, and a pool's settings."""
    models = [
        Model(
            name,
            draw(st.sampled_from([GB, 2 * GB, 3 * GB])),
            load_s=draw(st.sampled_from([0.0, 0.5, 3.0, 45.0])),
            replicas=draw(st.integers(1, 3)),
            lazy=draw(st.booleans()),
            load_errors=draw(st.lists(st.sampled_from([None, *ERRORS]), max_size=4)),
        )
        for name in "abcd"
    ]
    instants = st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.5, 3.0, 10.0, 46.0])
    operations = draw(
        st.lists(
            st.tuples(
                instants,
                st.sampled_from(["hold"] * 6 + ["leave"] * 2 + ["load", "unload", "crash"]),
                st.sampled_from("abcd"),
                st.sampled_from([0.0, 0.5, 4.0, 30.0]),
                st.integers(1, 4),
            ),
            max_size=25,
        )
    )
    limit = draw(st.sampled_from([2, 4, 7, 20])) * GB
    ttl = draw(st.sampled_from([None, 1.0, 20.0]))
    closes_at = draw(st.sampled_from([0.0, 2.0, 5.0, 100.0]))
    return models, operations, limit, ttl, closes_at, draw(st.integers(0, 1 << 30))


@settings(max_examples=examples(300), deadline=None)
@given(drawn_worlds())
def test_whatever_happens_the_invariants_hold_and_nobody_waits_for_ever(drawn):
    """`World.run` and `World.check` check the invariants."""
    models, operations, limit, ttl, closes_at, seed = drawn
    world = World(*models, limit=limit, idle_ttl_s=ttl)
    ended = []

    async def operate(world, at, kind, name, seconds, count):
        await trio.sleep(at)
        pool = world.pool
        scope = trio.CancelScope()
        with scope:
            try:
                if kind == "hold":
                    await world.hold(name, seconds, scope.cancel)
                elif kind == "leave":
                    with trio.move_on_after(seconds):
                        await world.hold(name, 50.0, scope.cancel)
                elif kind == "load":
                    await load(world, name, count)
                elif kind == "unload":
                    await pool.unload(name, seconds)
                else:
                    world.crash(name)
            except TrioletError:
                pass  # an error is an end like any other
        ended.append(kind)

    async def body(world):
        async with trio.open_nursery() as nursery:
            for operation in operations:
                nursery.start_soon(operate, world, *operation)
            await trio.sleep(closes_at)
            world.pool.close()

    world.run(body, seed)
    assert len(ended) == len(operations)


@in_world(Model("a", replicas=2), Model("b"), limit=2 * GB)
async def test_a_spare_replica_that_finds_no_room_looks_again(world):
    """A dead spare replica evicts no other model, and comes back once there is room."""
    await load(world, "a")
    world.crash("a")
    await trio.sleep(0.1)
    await world.hold("b")
    await trio.sleep(15.0)
    assert len(world.pool.registry.entries["a"].ready) == 1
    assert world.pool.registry.entries["a"].degraded_ids
    await world.pool.unload("b", 0.0)
    await trio.sleep(15.0)
    assert len(world.pool.registry.entries["a"].ready) == 2


@in_world(Model("a", replicas=3))
async def test_the_operator_gets_the_requested_number_of_replicas(world):
    await load(world, "a", 1)
    assert len(world.pool.registry.entries["a"].ready) == 1
    await load(world, "a")
    assert len(world.pool.registry.entries["a"].ready) == 3


@in_world(Model("a", replicas=2), idle_ttl_s=0.01)
async def test_loading_a_model_that_is_unloaded_at_once_ends(world):
    """The model's idle time ends before the operator's watch checks again."""
    await load(world, "a", 2)
    assert world.num_loads("a") == 2
