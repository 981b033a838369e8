"""Through the whole engine, and over gRPC, an adapter's tokens are those of peft's unmerged model:
in mixed batches, chunks, preemption, prefix hits and forks, and while adapters are loaded, replaced
and unloaded under load.
"""

import itertools
import random
import shutil
import threading
import time

import pytest
import torch
import trio
import trio.testing

from engine.api.engine import open_engine
from engine.config import AdapterConfig, EngineConfig, ModelConfig
from engine.core.common.events import Finished
from engine.core.text.types import Tokens
from engine.errors import InvalidRequest, MemoryExhausted, ModelNotFound, SpawnFailed
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.status import ModelState
from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.conformance.test_hybrid import KINDS
from tests.support.adapters import peft_model, places_of, write_by_hand
from tests.support.server import real
from tests.support.wire import broken_fields, error_of, generate, list_models, reason, wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # peft warns
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

NAMES = ("a", "b", "c")
NEW = 20  # tokens of an answer
RANKS = {"a": 4, "b": 16, "c": 33}


@pytest.fixture(scope="module")
def base(zoo):
    return zoo.directory("llama")


@pytest.fixture(scope="module")
def written(base, tmp_path_factory):
    """Return the directories of three adapters, by their names."""
    return written_by_ranks(tmp_path_factory.mktemp("adapters"), base, RANKS)


def prompts(count):
    """Return prompts of drawn lengths; every other one begins with the same 48 tokens."""
    rng = random.Random(3)
    shared = tuple(rng.randrange(1, 500) for _ in range(48))
    made = [tuple(rng.randrange(1, 500) for _ in range(rng.randint(1, 70))) for _ in range(count)]
    return [shared + own if index % 2 else own for index, own in enumerate(made)]


def greedy(base, directory, asked):
    found = {}
    with peft_model(base, directory) as model:
        for prompt in asked:
            ids = list(prompt)
            for _ in range(NEW):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            found[prompt] = tuple(ids[len(prompt) :])
    return found


def wanted_of(base, written, asked):
    """Return peft's tokens after each prompt, by model name."""
    found = {"base": greedy(base, None, asked)}
    return found | {f"base:{name}": greedy(base, path, asked) for name, path in written.items()}


def written_by_ranks(root, base, ranks):
    """Write adapters of these ranks. Return their directories, by their names."""
    return {
        name: write_by_hand(root / name, base, seed=rank, rank=rank) for name, rank in ranks.items()
    }


def request(name, prompt, n=1, **fields):
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    return GenerateRequest(token_ids=prompt, model=name, sampling=sampling, n=n, **fields)


async def answer(engine, asked):
    """Return the tokens of each choice, and the usage of the last."""
    tokens, usage = [[] for _ in range(asked.n or 1)], None
    async with engine.generate(asked) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                tokens[event.choice] += event.token_ids
            elif isinstance(event, Finished):
                usage = event.usage
    return [tuple(one) for one in tokens], usage


def config_of(base, written, **fields):
    adapters = tuple(AdapterConfig(name, str(written[name]), (f"the {name}",)) for name in written)
    model = ModelConfig(str(base), name="base", dtype="float32", threads=1, adapters=adapters)
    return EngineConfig(models=(model,), check_level=2, **fields)


SCHEDULES = {
    "batched": {},
    "chunked": {"max_num_seqs": 16, "max_num_batched_tokens": 24},
    "preempted": {"max_model_len": 192, "kv_cache_memory": 250_000},
    "plans not prepared": {"prepared_plans": False},
}


@pytest.fixture(scope="module")
def wanted(base, written):
    """Return peft's tokens after each of six prompts, by the names of the models."""
    return wanted_of(base, written, prompts(6))


async def wrong_answers(config, wanted, totals):
    """Send each prompt to each model, all at once, and each twice, so that the second request finds
    a cached prefix; every other prompt has two choices. Return the answers that differ from
    ``wanted``, and pass the engine's counts to ``totals``."""
    wrong = []

    async def ask(engine, name, prompt, n):
        for _ in range(2):
            tokens, _ = await answer(engine, request(name, prompt, n))
            wrong.extend([(name, len(prompt))] * (tokens != [wanted[name][prompt]] * n))

    async with open_engine(config) as engine:
        await engine.wait_ready("base:a")
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                for index, (prompt, name) in enumerate(itertools.product(wanted["base"], wanted)):
                    nursery.start_soon(ask, engine, name, prompt, 1 + index % 2)
        totals(engine.statistics().totals)
    return wrong


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_base_and_adapters_together_give_the_tokens_of_peft(base, written, wanted, schedule):
    """The prompts come in chunks, are preempted, hit cached prefixes, and fork into choices."""
    assert len({tuple(one.values()) for one in wanted.values()}) == 4

    def totals(counts):
        assert counts.prefix_hits > 0
        if schedule == "preempted":
            assert counts.preemptions > 0

    config = config_of(base, written, **SCHEDULES[schedule])
    assert not trio.run(wrong_answers, config, wanted, totals)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_model_with_recurrent_layers_and_its_adapters_give_the_tokens_of_peft(
    zoo, tmp_path, name
):
    """The adapters change layers without states, and compiled ones with states. All later states
    differ, so that a request must not begin from a snapshot of another adapter."""
    base = zoo.directory(name)
    targets = ["q_proj", "k_proj", "v_proj"]
    if name == "lfm2":
        targets += ["in_proj", "out_proj"]
    if not any(".experts." in place for place in places_of(base)):  # adapters do not change experts
        targets += ["gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"]
    written = {
        key: write_by_hand(tmp_path / key, base, seed=rank, rank=rank, targets=targets)
        for key, rank in (("a", 4), ("b", 16))
    }
    asked = prompts(6)
    wanted = {"base": greedy(base, None, asked)}
    wanted |= {f"base:{key}": greedy(base, path, asked) for key, path in written.items()}
    assert len({tuple(one.values()) for one in wanted.values()}) == 3

    def totals(counts):
        assert counts.prefix_hits > 0

    assert not trio.run(wrong_answers, config_of(base, written), wanted, totals)


async def test_a_reload_under_the_same_name_never_hits_an_old_prefix(
    base, written, wanted, tmp_path
):
    """An adapter never hits its base's prefixes; the same content hits its own under any name."""
    prompt = prompts(2)[1]
    old, new = wanted["base:a"], wanted["base:b"]
    place = tmp_path / "one"
    shutil.copytree(written["a"], place)
    async with open_engine(config_of(base, {"x": place})) as engine:
        for name, cached in (("base", 0), ("base", 48), ("base:x", 0), ("the x", 48)):
            tokens, usage = await answer(engine, request(name, prompt))
            assert usage.cached_tokens >= cached
            assert usage.cached_tokens == 0 or cached
        assert tokens == [old[prompt]]
        shutil.copytree(written["b"], place, dirs_exist_ok=True)
        status = await engine.adapters.load("base:x", place)
        assert (status.adapter_rank, status.base) == (RANKS["b"], "base")
        tokens, usage = await answer(engine, request("base:x", prompt))
        assert (tokens, usage.cached_tokens) == ([new[prompt]], 0)
        await engine.adapters.load("base:y", written["b"], aliases=("why",))
        tokens, usage = await answer(engine, request("why", prompt))
        assert tokens == [new[prompt]]
        assert usage.cached_tokens >= 48


async def test_a_running_request_keeps_its_adapter_and_its_memory(base, written, wanted):
    """The request finishes although its adapter is replaced or unloaded, which then frees its
    bytes."""
    [prompt] = prompts(1)
    own_tokens = wanted["base:a"][prompt]
    async with open_engine(config_of(base, {"x": written["a"]})) as engine:
        await engine.wait_ready()

        def reserved():
            return engine.statistics().totals.memory_reserved

        own = engine.get_model("base:x").memory_bytes
        before = reserved() - own
        assert own > 0
        async with engine.generate(request("base:x", prompt)) as stream:
            events = [await anext(stream), await anext(stream)]
            await engine.adapters.load("base:x", written["b"])
            both = engine.get_model("base:x").memory_bytes + own
            assert reserved() == before + both
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.adapters.unload, "base:x")
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(ModelNotFound):
                    await answer(engine, request("base:x", prompt))
            events += [event async for event in stream]
        tokens = [i for one in events if isinstance(one, Tokens) for i in one.token_ids]
        assert tuple(tokens) == own_tokens
        with trio.fail_after(10):
            while reserved() != before:  # noqa: ASYNC110  (nothing says that a task has ended)
                await trio.sleep(0.01)


async def test_what_cannot_be_loaded_changes_nothing(base, written, wanted, tmp_path):
    """A load that is refused, lacks memory or has a bad name leaves the earlier adapter in place.
    An adapter of the configuration that does not load is FAILED, and its base serves."""
    broken = tmp_path / "broken"
    shutil.copytree(written["a"], broken)
    (broken / "adapter_model.safetensors").write_bytes(b"x")
    [prompt] = prompts(1)
    own_tokens = wanted["base:a"][prompt]
    config = config_of(base, {"x": written["a"], "bad": broken})
    async with open_engine(config) as engine:
        await engine.wait_ready()
        before = engine.statistics().totals.memory_reserved
        states = {one.name: one.state for one in engine.list_models()}
        ready, failed = ModelState.READY, ModelState.FAILED
        assert states == {"base": ready, "base:x": ready, "base:bad": failed}
        assert "cut short" in engine.get_model("base:bad").error
        with pytest.raises(SpawnFailed, match="cut short"):
            await answer(engine, request("base:bad", prompt))
        with pytest.raises(SpawnFailed, match=r"base:x: .*cut short"):
            await engine.adapters.load("base:x", broken)
        for name in ("x", "base:", "the x:y"):
            with pytest.raises((InvalidRequest, ModelNotFound)):
                await engine.adapters.load(name, written["b"])
        with pytest.raises(InvalidRequest, match="another model"):
            await engine.adapters.load("base:z", written["b"], aliases=("the x",))
        with pytest.raises(InvalidRequest, match="not an adapter"):
            await engine.adapters.unload("base")
        for operate in (engine.pause, engine.reset_prefix_cache, engine.watch_load):
            with pytest.raises(InvalidRequest, match="adapter of base"):
                operate("base:x") if operate != engine.pause else operate(None, "base:x")
        engine._pool.memory._limits["cpu"] = before
        with pytest.raises(MemoryExhausted, match="base:z"):
            await engine.adapters.load("base:z", written["c"])
        assert engine.statistics().totals.memory_reserved == before
        tokens, _ = await answer(engine, request("base:x", prompt))
        assert tokens == [own_tokens]


# ---- a server


class Asker(threading.Thread):
    """A thread that asks random models until the time ``until``, and keeps the wrong answers."""

    def __init__(self, address_channel, wanted, until, seed):
        super().__init__(daemon=True)
        self.channel, self.wanted, self.until = address_channel, wanted, until
        self.rng = random.Random(seed)
        self.wrong, self.count = [], 0
        self.start()

    def run(self):
        while time.monotonic() < self.until:
            name = self.rng.choice(sorted(self.wanted))
            prompt = self.rng.choice(sorted(self.wanted[name][0]))
            heard = generate(
                self.channel, timeout=60, prompt_ids=prompt, model=name,
                sampling={"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True},
            )  # fmt: skip
            self.count += 1
            if heard.error is not None:
                if name != "base:gone" or reason(heard.error) not in ("MODEL_NOT_FOUND", "ABORTED"):
                    self.wrong.append((name, heard.error))
            elif tuple(heard.ids()) not in [one[prompt] for one in self.wanted[name]]:
                self.wrong.append((name, heard.ids()))


def memory_of(channel):
    """Return the bytes of each ready model and adapter, by name."""
    listed = list_models(channel)
    assert {one.state for one in listed} == {pb.MODEL_STATE_READY}
    return {one.name: one.memory_bytes for one in listed}


def churn(base, written, wanted, seconds):
    """Load, replace and unload adapters under 50 streams, and count rounds and answers."""
    by_name = [wanted[f"base:{name}"] for name in NAMES]
    wanted = {
        "base": [wanted["base"]],
        "base:a": by_name[:1],
        "base:new": by_name,  # replaced again and again
        "base:gone": by_name[1:2],  # loaded and unloaded again and again
    }
    root = written["a"].parent
    with real(
        *("--served-model-name", "base", "--dtype", "float32"),
        *("--adapter", f"base:a={written['a']}", "--adapter", f"base:new={written['b']}"),
        *("--adapter-root", root, "--max-num-seqs", "32"),
        model=base,
    ) as server:
        models = stubs.ModelsStub(server.channel)
        first = memory_of(server.channel)
        alone = first["base"] - first["base:a"] - first["base:new"]
        until = time.monotonic() + seconds
        askers = [Asker(server.channel, wanted, until, seed) for seed in range(50)]
        rounds = 0
        while time.monotonic() < until:
            for name in NAMES:
                load = pb.LoadAdapterRequest(model="base:new", directory=name)
                assert models.LoadAdapter(load, timeout=60).model.base == "base"
            load = pb.LoadAdapterRequest(model="base:gone", directory=str(root / "b"))
            models.LoadAdapter(load, timeout=60)
            unload = pb.UnloadAdapterRequest(model="base:gone")
            unload.drain.FromMilliseconds(500 if rounds % 2 else 0)
            models.UnloadAdapter(unload, timeout=60)
            rounds += 1
        for asker in askers:
            asker.join(90)
            assert not asker.is_alive()
        assert not [one for asker in askers for one in asker.wrong][:3]
        listed = memory_of(server.channel)
        assert sorted(listed) == ["base", "base:a", "base:new"]
        held = alone + listed["base:a"] + listed["base:new"]
        # replaced versions are unloaded after the answers that held them
        wait_until(lambda: memory_of(server.channel)["base"] == held, what="old versions are gone")
        for name in ("base:a", "base:new"):
            held -= listed[name]
            models.UnloadAdapter(pb.UnloadAdapterRequest(model=name), timeout=60)
            assert memory_of(server.channel)["base"] == held, "bytes are lost"
        for directory in ("../llama", "/etc", ".", "a/../../llama"):
            bad = pb.LoadAdapterRequest(model="base:q", directory=directory)
            error = error_of(lambda bad=bad: models.LoadAdapter(bad, timeout=10))
            assert broken_fields(error) == ["directory"]
        return rounds, sum(asker.count for asker in askers)


@pytest.mark.slow
def test_adapters_come_and_go_under_fifty_streams(base, written, wanted):
    """No token is wrong, and all memory is given back."""
    rounds, answers = churn(base, written, wanted, 4.0)
    assert rounds >= 2
    assert answers > 50


@pytest.mark.full
def test_adapters_come_and_go_under_fifty_streams_for_a_minute(base, written, wanted):
    rounds, answers = churn(base, written, wanted, 60.0)
    print(f"{rounds} rounds of four loads, {answers} answers")
    assert rounds >= 20
