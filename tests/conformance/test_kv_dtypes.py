"""A KV pool of every dtype, in models that run compiled, stock with kernels, and by the reference.

`test_native_attention.py` compares each dtype's attention with the reference, which rounds alike.
Here are the pool's bytes, the tokens of whole models, and the distance from float32.
"""

from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import Sampling
from engine.errors import ConfigError
from engine.kinds import TextKind
from engine.settings import KV_DTYPES
from engine.worker.forward.kv_cache import DTYPES, KvCache, token_bytes
from engine.worker.load.architectures import LayerShape
from tests.support.mini_planner import MiniPlanner
from tests.support.model_zoo import COMPILED, REFERENCE, load_runner, seeded_prompt
from tests.support.rank_threads import RankThreads
from tools.lab.measure_quantization import Model, compare

NARROW = ("bfloat16", "float16", "int8")
LENGTHS = (5, 33, 80)
# The mean KL from float32 of a tiny model's next tokens: three times what was measured, and far
# less than what a fault leaves.
KL_MOST = {"float32": 1e-9, "float16": 1.3e-5, "bfloat16": 8e-4, "int8": 5e-3}


class WholePrompts(MiniPlanner):
    """Computes each prompt in one step, so that its keys are rounded from the same numbers."""

    def _count(self, one, left):
        return left


def outputs(runner, info, prompts, **fields):
    """Return the output of each prompt, computed together."""
    planner = WholePrompts(runner, info, seed=len(prompts))
    planned = [planner.add(prompt, 16, **fields) for prompt in prompts]
    planner.run()
    return [one.output for one in planned]


def test_the_setting_has_the_dtypes_of_caches():
    assert list(KV_DTYPES) == ["auto", *DTYPES]
    with pytest.raises(ConfigError, match="--kv-cache-dtype is 'fp8'"):
        ModelConfig("demo-stories", kv_cache_dtype="fp8")


@pytest.mark.parametrize("name", DTYPES)
def test_a_caches_bytes_are_those_of_its_tensors(name):
    shapes = (LayerShape(3, 64), LayerShape(2, 80), LayerShape(0, 0))
    cache = KvCache(shapes, 5, 16, dtype=DTYPES[name], device=torch.device("cpu"))
    held = sum(tensor.numel() * tensor.element_size() for tensor in cache._tensors)
    assert held == 5 * 16 * token_bytes(shapes, DTYPES[name])


def test_a_pool_of_16_bits_holds_twice_as_many_blocks_and_one_of_int8_nearly_four_times(zoo):
    counts = {}
    for name in DTYPES:
        runner, info = load_runner(zoo.directory("llama"), kv_cache_dtype=name, kv_bytes=1 << 18)
        runner.close()
        counts[name] = info.num_blocks
        assert info.kv_dtype == name
    assert counts["bfloat16"] == counts["float16"] == 2 * counts["float32"]
    # A head of 16 numbers takes 20 bytes in int8, with a scale of 4 bytes, and 64 in float32.
    assert counts["int8"] == pytest.approx(counts["float32"] * 64 / 20, abs=2)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_oss", "gpt2", "lfm2", "qwen3_5"])
def test_tokens_are_the_same_alone_and_batched(zoo, arch, name):
    """The models are compiled, stock, or have recurrent layers, whose states keep their dtype."""
    runner, info = load_runner(zoo.directory(arch), kv_cache_dtype=name)
    prompts = [seeded_prompt(length) for length in LENGTHS]
    together = outputs(runner, info, prompts)
    assert together == [outputs(runner, info, [prompt])[0] for prompt in prompts]
    runner.close()


@pytest.mark.parametrize("name", NARROW)
def test_a_choice_that_forks_takes_the_scales_of_its_blocks(zoo, name):
    """A forked choice continues a copied block as if it had computed the prompt itself."""
    runner, info = load_runner(zoo.directory("llama"), kv_cache_dtype=name)
    prompt, sampling = seeded_prompt(37), Sampling(temperature=0.9, seed=7)
    planner = WholePrompts(runner, info)
    planner.add(prompt, 16, sampling=sampling, choices=3)
    while any(not one.is_done for one in planner.sequences.values()):
        planner.step([one for one in planner.sequences.values() if not one.is_done])
    forked = [one.output for one in planner.sequences.values()]
    planner.run()
    for choice, output in enumerate(forked):
        own = Sampling(temperature=0.9, seed=7, choice=choice)
        assert outputs(runner, info, [prompt], sampling=own) == [output]
    runner.close()


@pytest.mark.parametrize("name", NARROW)
def test_a_divided_model_has_the_same_pool_in_each_rank(zoo, name):
    ranks = RankThreads(zoo.directory("llama"), kv_cache_dtype=name)
    info = ranks.load()
    assert {rank._cache.dtype for rank in ranks.ranks} == {DTYPES[name]}
    prompts = [seeded_prompt(length) for length in LENGTHS]
    together = outputs(ranks, info, prompts)
    assert together == [outputs(ranks, info, [prompt])[0] for prompt in prompts]
    ranks.on_each(lambda rank: rank.close())


@pytest.fixture(scope="module")
def exact(zoo):
    """Return prompts, and the stock model's logits for them in float32."""
    prompts = [seeded_prompt(length) for length in LENGTHS]
    model = Model(str(zoo.directory("llama")), "float32", "none", is_stock=True)
    found = [model.logits(prompt) for prompt in prompts]
    model.close()
    return prompts, found


def divergence(zoo, exact, name, way, fault=None):
    """Return the mean KL of a pool's dtype from float32, perhaps with a fault planted in it."""
    prompts, wanted = exact
    directory = str(zoo.directory("llama"))
    model = Model(directory, "float32", "none", is_stock=way == REFERENCE, kv_cache_dtype=name)
    if fault is not None:
        fault(model._runner)
    found = compare([model.logits(prompt) for prompt in prompts], wanted, prompts)
    model.close()
    return found["mean_kl_nats"]


@pytest.mark.parametrize("way", [COMPILED, REFERENCE])
@pytest.mark.parametrize("name", DTYPES)
def test_the_next_tokens_are_as_likely_as_in_float32(zoo, exact, name, way):
    found = divergence(zoo, exact, name, way)
    print(f"{name} {way}: {found:.3g} nats")
    assert abs(found) < KL_MOST[name]


@pytest.mark.parametrize("way", [COMPILED, REFERENCE])
def test_scales_of_other_heads_are_seen(zoo, exact, way):
    """A fault in the cache shows in the divergence of whole models."""

    def exchange(runner):
        cache = runner._cache
        if way == REFERENCE:
            cache.scales = (cache.scales[1], cache.scales[0])
            stock = cache.write
            cache.write = lambda *given: (stock(*given), cache.scales[0][0].mul_(1.5))[0]
            return
        for layer in runner._model.module._layers:
            layer.attention.value_scales = layer.attention.key_scales

    assert divergence(zoo, exact, "int8", way, exchange) > 10 * KL_MOST["int8"]


def test_replicas_of_different_dtypes_share_no_prefix():
    """Blocks of different dtypes have different keys, by which routers know cached prefixes."""
    limits = {"num_blocks": 64, "block_size": 16, "max_model_len": 64, "num_states": 0}
    config = EngineConfig(models=("demo-stories",))
    roots = {
        name: TextKind()
        .make_core(SimpleNamespace(**limits, kv_dtype=name), config, "stories")
        .config.cache_namespace
        for name in DTYPES
    }
    assert len(set(roots.values())) == len(DTYPES)
