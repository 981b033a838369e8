"""How requests of adapters end, and what their clients see: unloads in every state of a request,
drains, continuations, clients that attach.
"""

import itertools

import pytest
import trio

from engine.core.text.types import Tokens
from engine.errors import (
    ModelNotFound,
    RequestAborted,
    ShuttingDown,
    TrioletError,
)
from engine.requests.text.continuation import Continuation, ContinuedChoice
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.fakes.adapters import ADAPTER_BYTES
from grpc_service.client import (
    Aborted,
    Client,
    NotFound,
    ResourceExhausted,
    Unavailable,
    messages,
)
from tests.service.test_workers import wait_for
from tests.support.adapter_world import CONTENTS, World, asked, reserved, sql, tokens_of, wanted
from tests.support.proxy import proxy
from tests.support.server import fake
from tests.support.wire import SERVING, health, list_models, wait_until

LIMIT_S = 60


# ---- unloads


async def one_that_waits(engine):
    """Another request has the only seat, and this request waits in the queue."""
    await trio.sleep(0.1)
    assert engine.explain("x").state == "WAITING"


async def one_that_is_parked(engine):
    """The request's reader reads nothing, and no message slot is free."""
    await wait_for(lambda: engine.statistics().totals.parked == 1)


async def one_that_was_preempted(engine):
    """The request has lost its blocks to an earlier request."""
    await wait_for(lambda: engine.statistics().totals.preemptions > 0)


STATES = {
    one_that_waits: {"max_num_seqs": 1, "max_num_batched_tokens": 64},
    one_that_is_parked: {"in_process_buffer": 4},
    one_that_was_preempted: {"runner": {"num_blocks": 8, "max_model_len": 112}},
}


@pytest.mark.parametrize("state", STATES)
async def test_an_unload_cuts_a_request_in_every_state(state):
    """The adapter is gone when the unload has ended, and other requests go on unharmed."""
    world = World(adapters=[sql()], script={"step_s": 0.01}, **STATES[state])
    ends, base = [], asked("fake", first=9, count=100, seed=3)
    async with world.open() as engine:
        await engine.wait_ready()
        whole = reserved(engine)
        has_begun = trio.Event()

        async def ask_base():
            async with engine.generate(base) as stream:
                tokens = []
                async for event in stream:
                    has_begun.set()
                    if isinstance(event, Tokens):
                        tokens += event.token_ids
                assert tokens == wanted(base, "")

        async def ask():
            own = asked(count=100, request_id="x")
            try:
                async with engine.generate(own) as stream:
                    if state is one_that_is_parked:
                        await trio.sleep_forever()
                    async for _ in stream:
                        pass
            except RequestAborted as error:
                ends.append(error)

        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_base)
                await has_begun.wait()
                async with trio.open_nursery() as own:
                    own.start_soon(ask)
                    await state(engine)
                    await engine.adapters.unload("fake:sql", 0.0)
                    assert world.loaded == [{}]
                    assert reserved(engine) == whole - ADAPTER_BYTES
                    if state is one_that_is_parked:
                        own.cancel_scope.cancel()
            assert len(ends) == (state is not one_that_is_parked)
            await engine.wait_idle()
        assert engine.num_live == 0


@pytest.mark.parametrize(("load_s", "in_time"), [(0.1, "loaded"), (2.0, "ShuttingDown")])
async def test_a_drain_lets_requests_of_adapters_finish_and_cuts_the_rest(load_s, in_time):
    """An adapter's load that is under way ends before its base model closes, or fails."""
    world = World(adapters=[sql()], script={"step_s": 0.01, "adapter_s": load_s})
    ends = {}
    async with world.open() as engine:
        await engine.wait_ready("fake:sql")

        async def ask(name, count):
            request = asked(count=count)
            try:
                ends[name] = await tokens_of(engine, request) == [wanted(request, "sql")]
            except ShuttingDown:
                ends[name] = "cut"

        async def load():
            try:
                await engine.adapters.load("fake:tales", "/tales")
                ends["load"] = "loaded"
            except TrioletError as error:
                ends["load"] = type(error).__name__

        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, "short", 10)
                nursery.start_soon(ask, "long", 1500)
                await trio.sleep(0.05)
                nursery.start_soon(load)
                await trio.sleep(0.05)
                await engine.drain(1.0)
        with pytest.raises(ShuttingDown):
            await engine.adapters.unload("fake:sql")
    assert ends == {"short": True, "long": "cut", "load": in_time}
    assert engine._pool.memory.total_reserved == 0


# ---- choices, continuations, clients that attach


async def test_several_seeded_choices_are_each_computed_with_the_adapter():
    world = World(adapters=[sql()])
    request = asked(n=3, seed=11, count=40)
    async with world.open() as engine:
        await engine.wait_ready()
        found = await tokens_of(engine, request)
    assert found == [wanted(request, "sql", choice) for choice in range(3)]
    assert len(set(map(tuple, found))) == 3


async def test_a_continuation_needs_the_name_and_goes_on_with_what_it_stands_for():
    world = World(adapters=[sql()])
    whole = asked(count=20)
    received = tuple(wanted(whole, "sql")[:7])
    again = asked(count=20, continuation=Continuation((ContinuedChoice(received),)))
    async with world.open() as engine:
        await engine.wait_ready()
        await engine.adapters.unload("fake:sql")
        with pytest.raises(ModelNotFound, match="no model is named 'fake:sql'"):
            await tokens_of(engine, again)
        await engine.adapters.load("fake:sql", "/sql")
        assert await tokens_of(engine, again) == [wanted(whole, "sql")[7:]]
        await engine.adapters.load("fake:sql", "/tales")
        longer = asked(count=20)
        longer = GenerateRequest(
            token_ids=(*longer.token_ids, *received),
            sampling=SamplingParams(max_tokens=13, ignore_eos=True),
        )
        assert await tokens_of(engine, again) == [wanted(longer, "tales")]


SERVED = {
    "models": [
        {
            "name": "fake",
            "adapters": [{"name": "sql", "directory": "/sql", "aliases": ["database"]}],
        }
    ],
    "script": {"step_s": 0.01, "adapters": CONTENTS},
    "runner": {"max_model_len": 4096, "num_blocks": 2048},
}


def generate_request(count, **fields):
    """Return a request for the adapter, by its alias."""
    return messages.GenerateRequest(
        token_ids={"ids": [5, 3]},
        model="database",
        sampling={"max_tokens": count, "ignore_eos": True},
        output={"token_ids": True},
        **fields,
    )


def ids_of(events):
    """Return all token ids of a stream's events."""
    return list(itertools.chain.from_iterable(event.delta.token_ids for event in events))


@pytest.mark.parametrize("drain_s", [0, 30])
def test_a_client_that_was_cut_off_attaches_to_an_adapter_that_is_being_unloaded(drain_s):
    """The client's request keeps the adapter as long as the drain allows."""
    with (
        fake(**SERVED) as server,
        Client(server.address, resume_s=0) as client,
        proxy(server.address) as line,
    ):
        with Client(line.address, resume_s=0) as broken:
            request = generate_request(150, resume_window={"seconds": 30})
            stream = broken.generate(request, timeout=LIMIT_S)
            events = [next(stream) for _ in range(12)]
            line.cut()
            with pytest.raises(Unavailable):
                events += stream
        unload = messages.UnloadAdapterRequest(model="fake:sql", drain={"seconds": drain_s})
        client.models.unload_adapter(unload, timeout=LIMIT_S)
        assert [one.name for one in list_models(server.channel)] == ["fake"]
        attach = messages.AttachRequest(
            request_id=events[0].started.request_id,
            attach_token=events[0].started.attach_token,
            received=[{"tokens": len(ids_of(events))}],
        )
        if drain_s:
            events += client.attach(attach, timeout=LIMIT_S)
            plain = asked(count=150)
            assert ids_of(events) == wanted(plain, "sql")
        else:
            with pytest.raises(Aborted):
                list(client.attach(attach, timeout=LIMIT_S))
        with pytest.raises(NotFound):
            list(client.generate(generate_request(3), timeout=LIMIT_S))


# ---- what clients see


def test_an_adapter_is_a_model_to_health_and_listing_and_counts_in_its_clients_quota(tmp_path):
    """GetModel takes a name or an alias, health a name. A key's limits count requests to all."""
    keys = tmp_path / "keys"
    keys.write_text("alice the-key-of-alice-1 max_requests=1\n")
    settings = SERVED | {"server": {"api_key_file": str(keys)}}
    with (
        fake(**settings) as server,
        Client(server.address, api_key="the-key-of-alice-1", resume_s=0) as client,
    ):
        wait_until(lambda: health(server.channel, "model/fake:sql") == SERVING, 10, "the model")
        assert health(server.channel, "model/database") is None  # health knows no aliases
        model = client.models.get_model(messages.GetModelRequest(model="database")).model
        assert (model.name, list(model.aliases), model.base) == ("fake:sql", ["database"], "fake")
        with client.generate(generate_request(2000), timeout=LIMIT_S) as stream:
            next(stream)
            with pytest.raises(ResourceExhausted, match="this key already runs its limit"):
                list(client.generate(generate_request(3), timeout=LIMIT_S))
