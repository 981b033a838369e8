"""Greedy output equals transformers' own, for every served architecture (D11).

Sequences run alone and packed: prompts of 1 to 500 tokens, chunked prefill and decode mixed in one
plan, blocks of 16 in shuffled order, windows shorter than the prompts. Each model runs by the
compiled kernels, and by the stock modules with the reference attention. With a planted fault, the
comparison fails.
"""

import ctypes
import random
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import torch
import trio
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import Tokens
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.forward import packing, reference_attention, rewrites
from engine.worker.forward.attention import AttentionCall
from engine.worker.forward.decoder import NativeDecoder
from engine.worker.forward.native_attention import NativeBackend, NativeStep
from engine.worker.load.architectures import SERVED, layer_shapes
from engine.worker.skeleton.families import LISTED
from tests.checkpoints.text import make_config
from tests.support.mini_planner import GREEDY, MiniPlanner, Planned
from tests.support.model_zoo import (
    COMPILED,
    REFERENCE,
    WAYS,
    ZOO,
    Loaded,
    load_runner,
    prompt_of,
)
from tests.support.parity import Tally

NUM_NEW = 64
ALONE_LENGTHS = (1, 16, 17, 500)
WINDOWED = [
    *("qwen2, windows above", "mistral", "phi3", "gemma2", "gemma3", "starcoder2"),
    *("ministral", "olmo3", "cohere2", "exaone4", "gpt_oss"),
]


def run_alone(loaded, lengths, num_new=NUM_NEW):
    """Run prompts of these lengths, each alone."""
    rng = random.Random(11)
    done = []
    for length in lengths:
        planner = MiniPlanner(loaded.runner, loaded.info, seed=length)
        done.append(planner.add(prompt_of(rng, length), num_new))
        planner.run()
    return done


def run_packed(loaded, num_new=NUM_NEW, *, count=10, seed=5):
    """Run sequences that arrive while others run, so that chunks and decodes share plans; some are
    preempted."""
    rng = random.Random(seed)
    planner = MiniPlanner(loaded.runner, loaded.info, seed=seed, chunks=96)
    lengths = [1, 500, *(rng.randint(2, 499) for _ in range(count - 2))]
    done = []
    while lengths or any(not one.is_done for one in planner.sequences.values()):
        if lengths and rng.random() < 0.4:
            done.append(planner.add(prompt_of(rng, lengths.pop()), num_new))
        live = [one for one in planner.sequences.values() if not one.is_done]
        if live:
            planner.step(live)
            if rng.random() < 0.05:
                planner.preempt(rng.choice(live))
    planner.run()
    return done, planner


def test_every_served_architecture_has_a_row():
    configs = [make_config(entry.arch, entry.shape, entry.extra) for entry in ZOO.values()]
    assert {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[one.model_type] for one in configs} == set(SERVED)


@pytest.mark.cases(12)
@pytest.mark.parametrize("name", ZOO)
def test_a_machine_with_a_compiler_runs_the_listed_models_compiled(zoo, name):
    runner = zoo.load(name).runner
    is_compiled = isinstance(runner._model.module, NativeDecoder)
    assert is_compiled == (runner._model.architecture.name in LISTED)
    assert isinstance(runner._backend, NativeBackend)


@pytest.mark.parametrize("num_new", [24, pytest.param(NUM_NEW, marks=pytest.mark.full)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ZOO)
def test_alone_and_packed_are_transformers_own_tokens(zoo, name, way, num_new):
    loaded = zoo.load(name, way)
    tally = Tally()
    loaded.oracle.compare(run_alone(loaded, ALONE_LENGTHS, num_new), tally)
    packed, planner = run_packed(loaded, num_new)
    loaded.oracle.compare(packed, tally)
    tally.check()
    assert any(mixes_chunks_and_decodes(plan) for plan in planner.plans)


def mixes_chunks_and_decodes(plan):
    """Return whether a plan has both rows of several tokens and rows of one."""
    counts = [row.count for row in plan.rows]
    return 1 in counts and max(counts, default=0) > 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_output_is_that_of_generate(zoo, name, way):
    loaded = zoo.load(name, way)
    rng = random.Random(3)
    prompt = prompt_of(rng, 40)
    planner = MiniPlanner(loaded.runner, loaded.info, seed=1)
    one = planner.add(prompt, NUM_NEW)
    planner.run()
    wanted = loaded.oracle.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_NEW,
        min_new_tokens=NUM_NEW,
        do_sample=False,
    )
    assert one.tokens == wanted[0].tolist()


@pytest.mark.parametrize("name", ZOO)
def test_weights_and_buffers_are_those_of_from_pretrained(zoo, name):
    loaded = zoo.load(name, REFERENCE)
    ours, stock = loaded.runner._model.module, loaded.oracle.model
    for get in ("named_parameters", "named_buffers"):
        own = dict(getattr(ours, get)(remove_duplicate=False))
        other = dict(getattr(stock, get)(remove_duplicate=False))
        assert own.keys() == other.keys()
        for key, tensor in own.items():
            assert tensor.dtype == other[key].dtype, key
            assert torch.equal(tensor, other[key]), key


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2"])
def test_a_step_is_one_forward_over_the_plans_tokens(zoo, name, way):
    loaded = zoo.load(name, way)
    seen = []
    hook = loaded.runner._model.module.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    try:
        _, planner = run_packed(loaded, 8, count=4)
    finally:
        hook.remove()
    assert seen == [(1, plan.num_tokens) for plan in planner.plans if plan.rows]


def test_an_engine_that_shares_prefixes_and_preempts_gives_gpt_oss_its_own_tokens(zoo):
    """Windows, sinks and experts of GPT-OSS work with blocks that another sequence has computed."""
    loaded, rng = zoo.load("gpt_oss"), random.Random(4)
    shared = prompt_of(rng, 70)
    prompts = [shared + prompt_of(rng, rng.randint(1, 60)) for _ in range(16)]
    per_token = 4 * sum(
        shape.numbers_per_token for shape in layer_shapes(loaded.oracle.model.config)
    )
    config = EngineConfig(
        models=(ModelConfig(str(loaded.directory), threads=1),),
        check_level=2,
        max_model_len=192,
        max_num_seqs=16,
        max_num_batched_tokens=48,
        kv_cache_memory=int(2.2 * 192 * per_token),
    )
    outputs = {}

    async def main():
        async with open_engine(config) as engine:

            async def run(index):
                sampling = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
                request = GenerateRequest(token_ids=prompts[index], sampling=sampling)
                async with engine.generate(request) as stream:
                    steps = [e.token_ids async for e in stream if isinstance(e, Tokens)]
                outputs[index] = [token for step in steps for token in step]

            async with trio.open_nursery() as nursery:
                for index in range(len(prompts)):
                    nursery.start_soon(run, index)
            return engine.statistics().totals

    totals = trio.run(main)
    assert totals.preemptions
    assert totals.prefix_hits
    tally = Tally()
    loaded.oracle.compare(
        (
            Planned(index, tuple(prompt), NUM_NEW, GREEDY, [*prompt, *outputs[index]])
            for index, prompt in enumerate(prompts)
        ),
        tally,
    )
    tally.check()


# --- planted faults: each must make the rows that it touches fail ----------------------------


def assert_red(loaded):
    """Check that parity fails: five sequences of 24 tokens suffice."""
    tally = Tally()
    sequences = run_packed(loaded, 24, count=5)[0]
    if any("its best logit is not finite" in str(one.failure) for one in sequences):
        return  # the fault read memory that was never written, which may hold NaN
    loaded.oracle.compare(sequences, tally)
    assert tally.wrong
    with pytest.raises(AssertionError):
        tally.check()


@contextmanager
def changed_calls(loaded, change):
    """Let every layer compute its attention by ``change(call)``."""
    module = loaded.runner._model.module
    with pytest.MonkeyPatch.context() as patch:
        for step in (reference_attention.ReferenceStep, NativeStep):
            patch.setattr(step, "attend", _with_changed_call(step.attend, change))
        layers = module._layers if isinstance(module, NativeDecoder) else ()
        stock = [
            (one.window, one.softcap, one.scaling, one.sinks)
            for one in (layer.attention for layer in layers)
        ]
        kept = []  # keeps sinks alive, as the layers have only their addresses
        for index, layer in enumerate(layers):
            own = layer.attention
            call = AttentionCall(
                index, own.scaling, own.window or None, own.softcap or None, sinks_at(own)
            )
            new = change(call)
            own.window, own.softcap = new.sliding_window or 0, new.softcap or 0.0
            own.scaling = new.scaling
            kept.append(new.sinks)
            own.sinks = None if new.sinks is None else new.sinks.data_ptr()
        try:
            yield
        finally:
            for layer, values in zip(layers, stock, strict=True):
                own = layer.attention
                own.window, own.softcap, own.scaling, own.sinks = values


def sinks_at(attention):
    """Return a copy of a compiled layer's sinks, or None."""
    if attention.sinks is None:
        return None
    found = (ctypes.c_float * attention.heads).from_address(attention.sinks)
    return torch.tensor(list(found))


def _with_changed_call(stock, change):
    return lambda step, call, *tensors: stock(step, change(call), *tensors)


@pytest.mark.cases(12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_off_by_one_is_noticed(zoo, name, shift, way):
    def change(call):
        window = call.sliding_window
        return replace(call, sliding_window=None if window is None else window + shift)

    loaded = zoo.load(name, way)
    with changed_calls(loaded, change):
        assert_red(loaded)


@pytest.mark.cases(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WINDOWED)
def test_an_ignored_window_is_noticed(zoo, name, way):
    loaded = zoo.load(name, way)
    with changed_calls(loaded, lambda call: replace(call, sliding_window=None)):
        assert_red(loaded)


@pytest.mark.parametrize("way", WAYS)
def test_a_dropped_soft_cap_is_noticed(zoo, way):
    loaded = zoo.load("gemma2", way)
    with changed_calls(loaded, lambda call: replace(call, softcap=None)):
        assert_red(loaded)


SINK_FAULTS = {
    "left out": lambda _sinks: None,
    "of the head beside": lambda sinks: sinks.roll(1),
    "scaled as the scores of keys": lambda sinks: sinks / 4,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", SINK_FAULTS.values(), ids=SINK_FAULTS)
def test_a_wrong_sink_is_noticed(zoo, change, way):
    loaded = zoo.load("gpt_oss", way)
    with changed_calls(loaded, lambda call: replace(call, sinks=change(call.sinks))):
        assert_red(loaded)


@pytest.mark.parametrize("way", WAYS)
def test_experts_whose_gates_are_not_clamped_are_noticed(zoo, monkeypatch, way):
    loaded = zoo.load("gpt_oss", way)
    module = loaded.runner._model.module
    if isinstance(module, NativeDecoder):
        monkeypatch.setattr(module._model, "gate_limit", 1e9)
    else:
        for layer in module.model.layers:
            monkeypatch.setattr(layer.mlp.experts, "limit", 1e9)
    assert_red(loaded)


@pytest.mark.cases(12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ZOO)
def test_a_wrong_scale_is_noticed(zoo, name, way):
    loaded = zoo.load(name, way)
    with changed_calls(loaded, lambda call: replace(call, scaling=call.scaling * 1.2)):
        assert_red(loaded)


@pytest.mark.cases(12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in ZOO if "no positions" not in name])
def test_positions_off_by_one_after_the_first_step_are_noticed(zoo, monkeypatch, name, way):
    """The planted fault is a usual mistake: each decode has the position of the token before.

    A shift of all positions would not show in a rotary model, whose scores depend only on
    differences.
    """
    stock = packing.pack

    def pack(starts, *rest):
        packed = stock(starts, *rest)
        late = (packed.starts > 0).repeat(packed.ends - packed.starts)
        return replace(packed, positions=packed.positions - late)

    monkeypatch.setattr(packing, "pack", pack)
    assert_red(zoo.load(name, way))


def assert_red_when_loaded(zoo, name):
    """Load a model of the zoo anew, compiled, and check that parity fails."""
    directory = zoo.directory(name)
    runner, info = load_runner(directory)
    with closing(runner):
        assert_red(Loaded(directory, runner, info, zoo.oracle(name)))


@pytest.mark.parametrize("name", ["smollm3", "exaone4"])
def test_a_rotary_embedding_in_a_layer_without_one_is_noticed(zoo, monkeypatch, name):
    monkeypatch.setattr(rewrites, "is_rotated", lambda *_: True)
    assert_red_when_loaded(zoo, name)


def test_shares_of_experts_that_are_not_normed_are_noticed(zoo, monkeypatch):
    stock = rewrites._take_experts

    def take(*arguments):
        return replace(stock(*arguments), is_normalised=False)

    monkeypatch.setattr(rewrites, "_take_experts", take)
    assert_red_when_loaded(zoo, "mixtral")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_block_table_read_in_another_order_is_noticed(zoo, monkeypatch, name):
    stock = packing.PackedRows.slots_at

    def slots_at(rows, members, positions):
        return stock(replace(rows, tables=rows.tables[:, ::-1]), members, positions)

    reference, compiled = zoo.load(name, REFERENCE), zoo.load(name, COMPILED)
    monkeypatch.setattr(packing.PackedRows, "slots_at", slots_at)
    assert_red(reference)
    stock_prepare = NativeBackend.prepare
    monkeypatch.setattr(
        NativeBackend,
        "prepare",
        lambda backend, rows, cache: stock_prepare(
            backend, replace(rows, tables=rows.tables[:, ::-1]), cache
        ),
    )
    assert_red(compiled)
