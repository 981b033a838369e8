"""Adapters of fake models with several replicas: loads that fail in one replica, replicas that die
and come back, memory.
"""

import threading
from dataclasses import replace

import pytest
import trio

from engine.errors import (
    MemoryExhausted,
    ModelNotFound,
    NoWorkers,
    SpawnFailed,
    TrioletError,
    WorkerLost,
)
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.status import ModelState
from engine.worker.fakes.adapters import ADAPTER_BYTES, digest_of_adapter
from tests.service.test_workers import Fleet, states, wait_for
from tests.support.adapter_world import CONTENTS, World, asked, reserved, sql, tokens_of, wanted

LIMIT_S = 60


async def test_every_replica_gets_an_adapter_and_gives_it_back():
    """Requests run on either replica, whatever their adapter."""
    world = World(2, adapters=[sql()], routing="round-robin")
    async with world.open() as engine:
        await engine.load_model("fake")
        whole = reserved(engine)
        await engine.adapters.load("fake:tales", "/tales")
        both = {digest_of_adapter(one): 1 for one in ("sql", "tales")}
        assert world.loaded == [both, both]
        assert engine.get_model("fake:tales").memory_bytes == 2 * ADAPTER_BYTES
        for number in range(4):
            for model, content in (("fake:sql", "sql"), ("fake:tales", "tales"), ("fake", "")):
                request = asked(model, first=5 + number)
                assert await tokens_of(engine, request) == [wanted(request, content)]
        processed = [one.processed for one in engine.list_models()[0].replicas]
        assert all(processed)
        await engine.adapters.unload("fake:tales")
        assert world.loaded == [{digest_of_adapter("sql"): 1}] * 2
        assert reserved(engine) == whole


@pytest.mark.parametrize("name", ["fake:sql", "fake:tales"])
async def test_a_load_that_fails_in_one_replica_leaves_none_with_it(name):
    """This holds for a load that would replace an adapter, too."""
    world = World(2, adapters=[sql()], contents=[CONTENTS, {"/sql": "sql"}])
    async with world.open() as engine:
        await engine.load_model("fake")
        whole = reserved(engine)
        with pytest.raises(SpawnFailed, match=f"{name}: its directory does not exist"):
            await engine.adapters.load(name, "/tales")
        with trio.fail_after(LIMIT_S):
            await wait_for(lambda: world.loaded == [{digest_of_adapter("sql"): 1}] * 2)
        await wait_for(lambda: reserved(engine) == whole)
        assert [one.name for one in engine.list_models()] == ["fake", "fake:sql"]
        request = asked()
        assert await tokens_of(engine, request) == [wanted(request, "sql")]


async def test_replicas_that_read_different_files_serve_neither():
    """The directory changes between the loads of two replicas."""
    other = CONTENTS | {"/tales": "other tales"}
    world = World(2, adapters=[sql()], contents=[CONTENTS, other])
    async with world.open() as engine:
        await engine.load_model("fake")
        whole = reserved(engine)
        with pytest.raises(SpawnFailed, match="files changed while it was loaded"):
            await engine.adapters.load("fake:tales", "/tales")
        await wait_for(lambda: world.loaded == [{digest_of_adapter("sql"): 1}] * 2)
        await wait_for(lambda: reserved(engine) == whole)


async def test_a_load_without_memory_for_every_replica_leaves_none_with_it():
    """A load takes twice an adapter's memory; that of the second replica does not fit."""
    world = World(2, adapters=[sql()])
    async with world.open() as engine:
        await engine.load_model("fake")
        whole = reserved(engine)
        limits = engine._pool.memory._limits
        limits["cpu"] = whole + 3 * ADAPTER_BYTES - 1
        with pytest.raises(MemoryExhausted, match="fake:tales"):
            await engine.adapters.load("fake:tales", "/tales")
        await wait_for(lambda: reserved(engine) == whole)
        assert world.loaded == [{digest_of_adapter("sql"): 1}] * 2
        limits["cpu"] += 1
        await engine.adapters.load("fake:tales", "/tales")
        assert reserved(engine) == whole + 2 * ADAPTER_BYTES


async def test_an_adapter_that_takes_more_than_was_measured_is_given_back():
    """The files grew between measuring and loading, and the difference was not reserved."""
    world = World(1, adapters=[sql()])
    async with world.open() as engine:
        await engine.wait_ready()
        whole = reserved(engine)
        store = world.runners[0].adapters
        store.measure = lambda directory: ADAPTER_BYTES - 1
        with pytest.raises(SpawnFailed, match=r"fake:tales: .*than its files showed"):
            await engine.adapters.load("fake:tales", "/tales")
        await wait_for(lambda: reserved(engine) == whole)
        assert world.loaded == [{digest_of_adapter("sql"): 1}]


def running(engine):
    """Return how many sequences each replica runs."""
    return [replica.counts.running for replica in engine.statistics().replicas]


async def test_a_request_runs_only_where_its_own_adapter_is_held():
    """The second replica lacks the adapter, but has the same content under another name, with the
    request's prefix cached. The other name may be unloaded at any time."""
    both = {"/copy": "sql"}
    world = World(
        2, adapters=[sql()], contents=[CONTENTS | both, both], routing="prefix",
        script={"step_s": 0.01},
    )  # fmt: skip
    prompt = tuple(range(100, 150))
    request = GenerateRequest(
        token_ids=prompt, model="fake:sql", sampling=SamplingParams(max_tokens=60, ignore_eos=True)
    )
    async with world.open() as engine:
        await engine.load_model("fake")
        await engine.adapters.load("fake:copy", "/copy")
        replicas = engine.registry.entries["fake"].replicas  # the first one made has both adapters
        holder, other = sorted(replicas, key=lambda one: -len(one.adapters))
        assert [len(one.adapters) for one in (holder, other)] == [2, 1]
        assert (holder.processed, other.processed) == (0, 0)
        busy = [int(one is holder) for one in replicas]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tokens_of, engine, asked(count=100))  # keeps the holder busy
            await wait_for(lambda: running(engine) == busy)
            await tokens_of(engine, replace(request, model="fake:copy"))
            await wait_for(lambda: other.processed == 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tokens_of, engine, asked(count=100, first=9))
            await wait_for(lambda: running(engine) == busy)
            async with engine.generate(request) as stream:
                found = []
                while not found:
                    found += getattr(await anext(stream), "token_ids", ())
                await engine.adapters.unload("fake:copy", 0.0)
                async for event in stream:
                    found += getattr(event, "token_ids", ())
        assert found == wanted(request, "sql")


async def test_a_request_that_moves_is_computed_with_its_adapters_newest_version():
    """The adapter is replaced while its request waits in a queue, whose worker then dies.

    Red if the request keeps the old version (`PreparedText.with_adapter`).
    """
    world = World(adapters=[sql()], script={"step_s": 0.01}, max_num_seqs=1)
    moving, got = asked(), []

    async def ask(engine):
        got.extend(await tokens_of(engine, moving))

    async def read(stream):
        async for _ in stream:
            pass

    async with world.open() as engine, trio.open_nursery() as nursery:
        await engine.wait_ready("fake:sql")
        async with engine.generate(asked("fake", count=1500)) as first:
            await anext(first)
            nursery.start_soon(ask, engine)
            await wait_for(lambda: engine.statistics().totals.waiting == 1)
            await engine.adapters.load("fake:sql", "/tales")
            world.runners[0].script.plan_fault = lambda _: WorkerLost("killed")
            with pytest.raises(WorkerLost):
                await read(first)
    assert got == [wanted(moving, "tales")]


async def test_a_worker_process_that_dies_comes_back_with_every_adapter():
    """The adapters are one of the configuration and one that the operator loaded."""
    adapters = {"adapters": CONTENTS}
    fleet = Fleet(2, asked=adapters, adapters=(sql(),), routing="round-robin")
    async with fleet.open() as engine:
        await engine.load_model("fake")
        await engine.adapters.load("fake:tales", "/tales")
        each = engine.get_model("fake:sql").memory_bytes
        assert each == 2 * ADAPTER_BYTES
        for _ in range(2):  # kills each of the first two processes in turn
            fleet.kill()
            await wait_for(lambda: ModelState.DEGRADED in states(engine))
            request = asked("fake:tales")
            assert await tokens_of(engine, request) == [wanted(request, "tales")]
            await wait_for(lambda: states(engine) == [ModelState.READY] * 2)
        for name, content in (("fake:sql", "sql"), ("fake:tales", "tales")):
            status = engine.get_model(name)
            assert (status.state, status.memory_bytes) == (ModelState.READY, each)
            assert status.adapter_digest == digest_of_adapter(content)
            for first in range(5, 9):
                request = asked(name, first=first)
                assert await tokens_of(engine, request) == [wanted(request, content)]


async def test_a_worker_that_dies_in_the_load_of_an_adapter_costs_that_load_alone(tmp_path):
    """The other replica drops the adapter; the dead one comes back without it. The error says that
    the worker died, although its runner may have been closed before the load's thread sees it."""
    free = tmp_path / "free"
    free.touch()
    asked_of_each = {"adapters": CONTENTS, "folder": str(tmp_path)}
    fleet = Fleet(2, asked=asked_of_each, adapters=(sql(),))
    async with fleet.open() as engine:
        await engine.load_model("fake")
        failed = []

        async def load():
            try:
                await engine.adapters.load("fake:tales", "/tales")
            except Exception as error:
                failed.append(type(error).__name__)

        first, second = engine.registry.entries["fake"].replicas
        numbers = [one.process.process.pid for one in (first, second)]
        free.unlink()
        for path in tmp_path.glob("adapter*"):
            path.unlink()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load)
            (tmp_path / f"free{numbers[0]}").touch()
            await wait_for((tmp_path / f"adapter{numbers[1]}").exists)
            assert len(first.adapters) == 2
            fleet.kill(second.process)  # while it loads the adapter
        free.touch()
        assert failed == ["WorkerLost"]
        await wait_for(lambda: states(engine) == [ModelState.READY] * 2)
        with pytest.raises(ModelNotFound):
            await tokens_of(engine, asked("fake:tales"))
        request = asked()
        assert await tokens_of(engine, request) == [wanted(request, "sql")]
        await engine.adapters.load("fake:tales", "/tales")
        request = asked("fake:tales")
        assert await tokens_of(engine, request) == [wanted(request, "tales")]


async def test_a_load_whose_base_is_unloaded_meanwhile_can_be_tried_again():
    """The error says that the base was unloaded: neither the adapter nor its files are wrong."""
    loading, free = threading.Event(), threading.Event()

    def sleep(seconds):
        if seconds:
            loading.set()
            assert free.wait(LIMIT_S)

    world = World(adapters=[sql()], script={"adapter_s": 1.0, "sleep": sleep})
    free.set()
    async with world.open() as engine:
        await engine.wait_ready()
        failed = []

        async def load():
            try:
                await engine.adapters.load("fake:tales", "/tales")
            except TrioletError as error:
                failed.append(type(error))

        loading.clear(), free.clear()
        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(load)
                await wait_for(loading.is_set)
                nursery.start_soon(engine.unload_model, "fake", 0.0)
                await wait_for(lambda: engine.get_model("fake").state is not ModelState.READY)
                free.set()
        assert failed == [NoWorkers]
        assert reserved(engine) == 0
        await engine.adapters.load("fake:tales", "/tales")
        request = asked("fake:tales")
        assert await tokens_of(engine, request) == [wanted(request, "tales")]
