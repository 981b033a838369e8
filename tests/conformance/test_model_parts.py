"""Small parts of the worker: cache, packing, backend, and the checkpoint maker."""

import os
import random

import numpy as np
import pytest
import torch

from engine.config import EngineConfig, ModelConfig
from engine.gc_tuning import return_freed_memory
from engine.worker.factory import runner_of, runner_spec
from engine.worker.forward.attention import AttentionCall
from engine.worker.forward.kv_cache import DEFAULT_KV_BYTES, KvCache, size_pool
from engine.worker.forward.packing import pack
from engine.worker.forward.reference_attention import ReferenceBackend, first_visible
from engine.worker.interface import RunnerSpec
from engine.worker.load.architectures import LayerShape, layer_shapes
from engine.worker.load.devices import pick_device
from engine.worker.load.refusal import Refusal
from engine.worker.tokenizing.tokenizer import load_tokenizer
from tests.checkpoints.text import PRESETS, Shape, main, make, make_config
from tests.support.programs import output_of
from tools.lab.bench.coldstart import resident

SHAPES = (LayerShape(2, 8), LayerShape(1, 16))


def make_cache(num_blocks=6, block_size=4, dtype=torch.float32):
    return KvCache(SHAPES, num_blocks, block_size, dtype=dtype, device=torch.device("cpu"))


# --- the package ------------------------------------------------------------------------------


@pytest.mark.parametrize(("users", "seen"), [(None, "10000"), ("7", "7")])
def test_importing_the_package_sets_the_spin_count_and_imports_no_torch(users, seen):
    said = (
        "import engine.worker, os, sys; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    if users is not None:
        environment["GOMP_SPINCOUNT"] = users
    assert output_of(said, env=environment).split() == [seen, "False"]


@pytest.mark.parametrize(
    ("present", "picked"),
    [((), "cpu"), (("mps",), "mps"), (("cuda",), "cuda"), (("cuda", "mps"), "cuda")],
)
def test_auto_picks_the_best_device_there_is_and_the_cpu_can_always_be_asked_for(
    monkeypatch, present, picked
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in present)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in present)
    assert pick_device("auto") == torch.device(picked)
    assert pick_device("cpu") == torch.device("cpu")


# --- the pool's arithmetic and the cache ------------------------------------------------------


def test_a_block_costs_the_sum_over_layers():
    spec = RunnerSpec("m", block_size=4, kv_bytes=10_000, max_num_seqs=100)
    # Bytes of a block: (2 × 2 × 8 + 2 × 1 × 16) numbers of 2 bytes for 4 tokens.
    pool = size_pool(spec, SHAPES, torch.bfloat16, 64)
    assert pool.bytes_per_block == 512
    assert (pool.num_blocks, pool.max_model_len) == (19, 64)
    assert pool.num_bytes == 19 * 512


# By rule: bytes of the memory limit and of the weights, the context, the most sequences, and the
# bytes of the pool that follow.
DEFAULTS = {
    "as large as the weights": (8 << 30, 1 << 30, 4096, 1 << 20, 1 << 30),
    "a 16th of the limit, if that is more": (32 << 30, 1 << 30, 4096, 1 << 20, 2 << 30),
    "at most 4 GiB": (1 << 40, 64 << 30, 4096, 1 << 20, DEFAULT_KV_BYTES),
    "more for one whole context": (1 << 40, 64 << 30, 1 << 26, 4, 8 << 30),
    "but never more than a quarter of the limit": (8 << 30, 64 << 30, 1 << 26, 4, 2 << 30),
    "and than all sequences need": (32 << 30, 1 << 30, 4096, 3, 3 * 4096 * 128),
    "without a limit, the weights decide": (0, 1 << 20, 64, 1 << 20, 1 << 20),
}


@pytest.mark.parametrize("case", DEFAULTS.values(), ids=DEFAULTS)
def test_the_default_pool_depends_on_the_weights_the_context_and_the_memory(case):
    """A token takes 128 bytes of the pool."""
    limit, weights, context, seqs, budget = case
    spec = RunnerSpec("m", memory_limit=limit, max_num_seqs=seqs)
    pool = size_pool(spec, SHAPES, torch.bfloat16, context, weight_bytes=weights)
    assert pool.num_bytes == budget
    assert pool.max_model_len == min(context, budget // 128)


def test_the_default_pool_of_a_rank_is_its_part():
    whole = size_pool(
        RunnerSpec("m", memory_limit=8 << 30), SHAPES, torch.bfloat16, 1 << 20, 0, 1 << 30
    )
    half = (LayerShape(1, 8), LayerShape(1, 8))
    rank = size_pool(
        RunnerSpec("m", memory_limit=8 << 30, tp=2), half, torch.bfloat16, 1 << 20, 0, 1 << 29
    )
    assert (rank.num_blocks, 2 * rank.num_bytes) == (whole.num_blocks, whole.num_bytes)


def test_the_default_pool_holds_one_context_beside_states():
    """Up to half of the pool's bytes are for recurrent states."""
    spec = RunnerSpec("m", memory_limit=1 << 20, max_num_seqs=64)
    pool = size_pool(spec, SHAPES, torch.bfloat16, 1024, 600, 1)
    assert pool.max_model_len == 1024
    large = size_pool(spec, SHAPES, torch.bfloat16, 64, 50_000, 1)
    assert (large.num_states, large.max_model_len) == (2, 64)


def test_the_arithmetic_counts_a_partly_used_last_block():
    fields = {"block_size": 4, "max_model_len": 9, "max_num_seqs": 1}
    assert (
        size_pool(RunnerSpec("m", kv_bytes=3 * 512, **fields), SHAPES, torch.bfloat16, 9).num_blocks
        == 3
    )
    with pytest.raises(Refusal, match="needs 3 blocks"):
        size_pool(RunnerSpec("m", kv_bytes=3 * 512 - 1, **fields), SHAPES, torch.bfloat16, 9)


def test_up_to_half_of_the_pool_is_for_states():
    fields = {"block_size": 4, "kv_bytes": 10_000}
    few = size_pool(RunnerSpec("m", max_num_seqs=3, **fields), SHAPES, torch.bfloat16, 64, 600)
    assert (few.num_states, few.num_blocks) == (6, (10_000 - 6 * 600) // 512)
    many = size_pool(RunnerSpec("m", max_num_seqs=100, **fields), SHAPES, torch.bfloat16, 32, 600)
    assert (many.num_states, many.num_blocks) == (8, (10_000 - 8 * 600) // 512)
    assert many.num_bytes == many.num_blocks * 512 + 8 * 600
    assert few.new_state_bytes == 6 * 600
    with pytest.raises(Refusal, match="less than the 6,000 bytes that the states"):
        size_pool(RunnerSpec("m", **fields), SHAPES, torch.bfloat16, 64, 6_000)
    with pytest.raises(Refusal, match="none of its layers has attention"):
        size_pool(RunnerSpec("m", **fields), [], torch.bfloat16, 64, 600)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_values_are_read_back(dtype):
    cache = make_cache(dtype=dtype)
    slots = torch.tensor([23, 0, 7])
    for layer, shape in enumerate(SHAPES):
        key, value = torch.randn(2, 3, shape.num_kv_heads, shape.head_dim).to(dtype)
        cache.write(layer, slots, key, value)
        keys, values = cache.read(layer, slots.flip(0)[:, None], dtype)
        assert torch.equal(keys[:, 0], key.flip(0))
        assert torch.equal(values[:, 0], value.flip(0))
        assert torch.equal(cache.keys[layer][5, 3], key[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_blocks_are_copied_as_if_all_at_once(dtype):
    """With their scales."""
    cache = make_cache(dtype=dtype)
    tensors = (*cache.keys, *cache.values, *cache.scales[0], *cache.scales[1])
    assert len(tensors) == len(SHAPES) * (4 if dtype is torch.int8 else 2)
    for tensor in tensors:
        tensor.copy_(torch.arange(6.0).view(6, *[1] * (tensor.dim() - 1)).expand(tensor.shape))
    cache.copy_blocks([(0, 1), (1, 0), (2, 5)])
    for tensor in tensors:
        assert tensor.flatten(1)[:, 0].tolist() == [1, 0, 2, 3, 4, 2]
    cache.copy_blocks([])


def test_shapes_follow_the_config():
    shape = Shape(layers=2, hidden=64, heads=4, kv_heads=2)
    assert layer_shapes(make_config("llama", shape, {})) == (LayerShape(2, 16),) * 2
    assert layer_shapes(make_config("gemma3_text", shape, {"head_dim": 32}))[0].head_dim == 32
    assert layer_shapes(make_config("gpt2", shape, {})) == (LayerShape(4, 16),) * 2


@pytest.mark.parametrize("is_prefaulted", [False, True])
def test_a_pool_has_its_memory_from_the_load_on_only_if_that_is_wanted(is_prefaulted):
    pool_mib = 512
    config = EngineConfig(
        models=(ModelConfig("demo-stories"),),
        kv_cache_memory=pool_mib << 20,
        prefault_kv_cache=is_prefaulted,
    )
    runner = runner_of(runner_spec(config.models[0], config), None)
    return_freed_memory()  # of tests before, which the load would give back
    before = resident()
    runner.load(lambda progress: None)
    assert (resident() - before > 0.95 * pool_mib) is is_prefaulted
    runner.close()


# --- packing and the reference backend against plain loops -----------------------------------


def test_rows_are_laid_out_one_after_another():
    tables = [np.array([5]), np.array([4, 2, 0])]
    rows = pack([1, 6], [1, 3], tables, 4)
    assert rows.num_tokens == 4
    assert rows.positions.tolist() == [1, 6, 7, 8]
    assert rows.slots.tolist() == [21, 10, 11, 0]
    assert rows.ends.tolist() == [2, 9]
    assert rows.offsets.tolist() == [0, 1, 4]


def test_a_window_shows_a_query_itself_and_those_before_it():
    positions = np.array([0, 1, 2, 9])
    assert first_visible(positions, 1).tolist() == [0, 1, 2, 9]
    assert first_visible(positions, 3).tolist() == [0, 0, 0, 7]
    assert first_visible(positions, None).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("seed", range(4))
def test_the_reference_is_attention_token_by_token(seed, window, softcap, has_sinks):
    """The rows' blocks are shuffled, and all earlier keys are in the cache."""
    rng, block_size = random.Random(seed), 4
    cache = KvCache([LayerShape(2, 8)], 64, block_size, dtype=torch.float64,
                    device=torch.device("cpu"))  # fmt: skip
    torch.manual_seed(seed)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape))
    free = rng.sample(range(64), 64)
    starts, counts, tables = [], [], []
    for _ in range(6):
        starts.append(rng.randint(0, 20))
        counts.append(rng.choice([1, 1, 2, 9]))
        blocks = -(-(starts[-1] + counts[-1]) // block_size)
        tables.append(np.array([free.pop() for _ in range(blocks)]))
    rows = pack(starts, counts, tables, block_size)
    query = torch.randn(rows.num_tokens, 6, 8, dtype=torch.float64)
    key, value = torch.randn(2, rows.num_tokens, 2, 8, dtype=torch.float64)
    sinks = 2.0 * torch.randn(6, dtype=torch.float64) if has_sinks else None
    call = AttentionCall(0, 0.4, window, softcap, sinks)
    out = ReferenceBackend().prepare(rows, cache).attend(call, query, key, value)
    token = 0
    for start, count, table in zip(starts, counts, tables, strict=True):
        for position in range(start, start + count):
            first = 0 if window is None else max(0, position - window + 1)
            places = [table[p // 4] * 4 + p % 4 for p in range(first, position + 1)]
            keys = cache.keys[0].flatten(0, 1)[places].repeat_interleave(3, 1)
            values = cache.values[0].flatten(0, 1)[places].repeat_interleave(3, 1)
            scores = torch.einsum("hd,lhd->hl", query[token], keys) * 0.4
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total += sinks.exp()[:, None]
            wanted = torch.einsum("hl,lhd->hd", weights / total, values)
            torch.testing.assert_close(out[token], wanted, rtol=1e-6, atol=1e-6)
            token += 1


# --- the checkpoint maker ---------------------------------------------------------------------


def test_the_same_arguments_write_the_same_bytes(tmp_path):
    first, second, other = (
        make(tmp_path / n, "qwen2", seed=s) for n, s in (("a", 1), ("b", 1), ("c", 2))
    )
    read = lambda directory: (directory / "model.safetensors").read_bytes()  # noqa: E731
    assert read(first) == read(second) != read(other)


def test_the_command_line_sets_shape_and_fields(tmp_path, capsys):
    main(["--arch", "mistral", "--layers", "1", "--kv-heads", "4", "--vocab", "700",
          "--set", "sliding_window=9", "--dtype", "bfloat16", "--out", str(tmp_path)])  # fmt: skip
    assert "mistral" in capsys.readouterr().out
    config = (tmp_path / "config.json").read_text()
    for said in ('"num_hidden_layers": 1', '"sliding_window": 9', '"vocab_size": 700'):
        assert said in config
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([699]) == " w699"
    text = "Naïve tokens: 你好 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("preset", "arch", "millions"), [("s135", "llama", 134.5), ("q05", "qwen2", 494.0)]
)
def test_the_shapes_of_the_peers_have_their_sizes(preset, arch, millions):
    """The notes on other engines (peers.md) name these models by their numbers of parameters."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(arch, PRESETS[preset], {}))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
