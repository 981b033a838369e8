"""A compiled decoder computes what the stock module does (D11).

In float32 its logits differ by at most 1e-5, and in bfloat16 its error is at most 1.1 times the
stock module's.
"""

import ctypes
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.core.text.plan import SCORED_TOKENS_MAX
from engine.worker.forward import kernel_structs as structs
from engine.worker.forward.attention import KEYWORD
from engine.worker.forward.backends import pick_backend, prepare
from engine.worker.forward.decoder import PART, NativeDecoder
from engine.worker.forward.kv_cache import KvCache, PoolSize
from engine.worker.forward.packing import pack
from engine.worker.forward.recurrent import RowState, StateSlots, open_states
from engine.worker.forward.reference_attention import ReferenceBackend
from engine.worker.forward.rewrites import NotRewritten, take_apart
from engine.worker.interface import RunnerSpec
from engine.worker.load.architectures import layer_shapes
from engine.worker.load.checkpoint import Checkpoint
from engine.worker.load.loader import load_model, read_config, weight_bytes
from engine.worker.load.probe import probe
from engine.worker.load.recurrent import RECURRENT, state_shapes
from engine.worker.load.refusal import Refusal
from engine.worker.quantized.weight import ROUNDED, quantise
from engine.worker.skeleton.families import LISTED
from engine.worker.skeleton.modules import Skeleton
from engine.worker.text.runner import TorchRunner
from tests.checkpoints.text import Shape, make
from tests.conformance.test_quantized_weights import round_row_blocks
from tests.support.mini_planner import MiniPlanner
from tests.support.model_zoo import COMPILED_ROWS

CPU = torch.device("cpu")
COUNTS = (1, 40, 3, 1, 130, 1)
ERROR_FLOAT32 = 1e-5  # D11's bound
FLOATS = ("shared_expert_gate",)  # layers whose weights stay floats
ERROR_BFLOAT16 = 1.1  # times the stock module's error
# Layers as wide as in small real models, and an MLP whose last panel is partly empty.
WIDE = {
    "llama": Shape(2, 576, 9, 3, 1000, 700, 256),
    "qwen2": Shape(2, 896, 14, 2, 2432, 512, 256),
}


def load(directory, dtype, quantization="none", weights=None, *, is_stock=True):
    """Return a checkpoint's model in a dtype: transformers' own, or its skeleton."""
    architecture, config = read_config(directory, is_stock=is_stock)
    with weights or Checkpoint(directory) as checkpoint:
        return load_model(
            checkpoint, architecture, config, dtype=dtype, device=CPU,
            progress=lambda _p: None, quantization=quantization,
        )  # fmt: skip


class Built:
    """A checkpoint's model, stock or compiled, over a cache of its own."""

    def __init__(
        self,
        directory,
        dtype,
        *,
        is_stock,
        rounded=None,
        quantization="none",
        weights=None,
        is_rounding_inputs=False,
        loaded=None,
    ):
        given = "none" if is_stock else quantization
        model = loaded or load(directory, dtype, given, weights, is_stock=is_stock)
        if is_stock and quantization != "none":
            round_weights(model.module, ROUNDED[quantization])
            is_rounding_inputs = True
        for parameter in model.module.parameters() if rounded else ():
            parameter.data = rounded(parameter.data)
        shapes = layer_shapes(model.config)
        self.cache = KvCache(shapes, 64, 16, dtype=dtype, device=CPU)
        calls = probe(model, shapes)
        backend, reason = ReferenceBackend(), "it was chosen"
        if not is_stock:
            backend, reason = pick_backend(CPU, dtype, shapes, calls)
        self.execution = prepare(
            model, backend, reason, calls, self.cache,
            quantization="none" if is_stock else quantization,
        )  # fmt: skip
        self.vocab = model.config.vocab_size
        self.states, name = None, model.architecture.name
        if name in RECURRENT:
            shapes = state_shapes(name, model.config)
            slots = StateSlots(RECURRENT[name], shapes, 1, dtype, CPU)
            self.states = open_states(self.execution.model.module, slots)
        if is_rounding_inputs:
            round_inputs(self.execution.model.module)

    def logits(self, only=None, counts=COUNTS):
        """Return the logits of every token of rows with ``counts`` tokens, or of the row ``only``,
        [num_tokens, vocab] float32."""
        rng = np.random.default_rng(7)
        blocks = iter(rng.permutation(64))
        tables = [np.array([next(blocks) for _ in range(-(-c // 16))]) for c in counts]
        ids = [rng.integers(1, self.vocab, count) for count in counts]
        chosen = slice(None) if only is None else slice(only, only + 1)
        counts = counts[chosen]
        rows = pack([0] * len(counts), counts, tables[chosen], 16)
        if self.states is not None:
            self.states.begin(rows, [RowState(None, ())] * len(counts))
        with torch.inference_mode():
            output = self.execution.model.module(
                input_ids=torch.from_numpy(np.concatenate(ids[chosen]))[None],
                position_ids=torch.from_numpy(rows.positions)[None],
                use_cache=False,
                logits_to_keep=torch.arange(rows.num_tokens),
                **{KEYWORD: self.execution.backend.prepare(rows, self.cache)},
            )
        return output.logits[0].float().clone()


def as_bfloat16(weight):
    """Return the weight, rounded to bfloat16."""
    return weight.bfloat16().to(weight.dtype)


class SeparateExperts(torch.nn.Module):
    """The experts of a stock mixture with a linear layer for each weight."""

    def __init__(self, stock):
        super().__init__()
        self.act_fn = getattr(stock, "act_fn", None)
        self.apply_gate = getattr(stock, "_apply_gate", None)  # only GPT-OSS has this method
        is_joined = hasattr(stock, "act_fn")
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleList(parts)
            for parts in (joined_parts(stock) if is_joined else alternating_parts(stock))
        )

    def gated(self, gate, up):
        """Return the up projection, gated."""
        if self.act_fn is not None:
            return self.act_fn(gate) * up
        return self.apply_gate(torch.stack((gate, up), dim=-1).flatten(-2))

    def forward(self, hidden, chosen, shares):
        """Return the sum of the chosen experts' outputs for each row, weighted by their shares."""
        rows = []
        for row, experts, own in zip(hidden.split(1), chosen.tolist(), shares, strict=True):
            parts = []
            for expert, share in zip(experts, own, strict=True):
                gate, up, down = self.layers[expert]
                parts.append(share * down(self.gated(gate(row), up(row))))
            rows.append(sum(parts))
        return torch.cat(rows)


def joined_parts(stock):
    """Yield the gate, up and down projection of each expert, from joint weights."""
    for gate_up, down in zip(stock.gate_up_proj, stock.down_proj, strict=True):
        yield [linear_of(weight) for weight in (*gate_up.chunk(2), down)]


def alternating_parts(stock):
    """Yield each expert's projections, as `joined_parts`; GPT-OSS' gates and ups alternate."""
    joined = (stock.gate_up_proj, stock.gate_up_proj_bias, stock.down_proj, stock.down_proj_bias)
    for gate_up, bias, down, down_bias in zip(*joined, strict=True):
        pair = [linear_of(gate_up.T[first::2], bias[first::2]) for first in (0, 1)]
        yield [*pair, linear_of(down.T, down_bias)]


def linear_of(weight, bias=None):
    """Return a linear layer with this weight."""
    layer = torch.nn.Linear(*weight.T.shape, bias=bias is not None)
    layer.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias.detach().clone(), requires_grad=False)
    return layer


def separate_experts(module):
    """Give each expert of a stock module layers of its own."""
    for layer in module.model.layers:
        if hasattr(getattr(getattr(layer, "mlp", None), "experts", None), "gate_up_proj"):
            layer.mlp.experts = SeparateExperts(layer.mlp.experts)


def round_weights(module, bits):
    """Round the weights of a stock module's linear layers and embedding, as `--quantization`
    does."""
    separate_experts(module)
    ends = {id(module.lm_head.weight), id(module.model.embed_tokens.weight)}
    seen = set()
    for name, layer in module.named_modules():
        if not isinstance(layer, torch.nn.Linear | torch.nn.Embedding) or name.endswith(FLOATS):
            continue
        if id(layer.weight) in seen:
            continue
        seen.add(id(layer.weight))
        own = {4: 6}.get(bits, bits) if id(layer.weight) in ends else bits
        layer.weight.data = quantise(layer.weight.data, own).expand().to(layer.weight.dtype)


def round_inputs(module, in_blocks_of_16=(), but=()):
    """Round the inputs of a stock module's linear layers as the kernels do: in blocks of 32, in
    blocks of 16 for layers with these names, and not at all for the names in ``but``."""

    def rounded(_layer, args, *, block):
        rows = args[0].reshape(-1, args[0].shape[-1])
        numbers, steps = round_row_blocks(rows, block)
        values = (numbers * steps[:, :, None]).view(len(rows), -1)[:, : rows.shape[1]]
        return (values.view_as(args[0]).to(args[0].dtype),)

    separate_experts(module)
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and not name.endswith((*but, *FLOATS)):
            block = 16 if name.endswith(in_blocks_of_16) else 32
            layer.register_forward_pre_hook(partial(rounded, block=block))


def distance(one, other):
    """Return the norm of the difference relative to ``other``."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def median_distance(ours, theirs):
    """Return the median of the rows' distances: a row for which a mixture chooses another expert
    differs by more than roundings."""
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).median())


def check_both_dtypes(directory):
    """Compare compiled and stock model in float32 and in bfloat16."""
    compiled = Built(directory, torch.float32, is_stock=False)
    assert isinstance(compiled.execution.model.module, NativeDecoder)
    stock = Built(directory, torch.float32, is_stock=True)
    error = distance(compiled.logits(), stock.logits())
    assert error <= ERROR_FLOAT32
    # The exact result for bfloat16 has the same rounded weights, and is computed in float32.
    exact = Built(directory, torch.float32, is_stock=True, rounded=as_bfloat16).logits()
    ours, theirs = (
        median_distance(Built(directory, torch.bfloat16, is_stock=is_stock).logits(), exact)
        for is_stock in (False, True)
    )
    print(f"float32 {error:.1e}; bfloat16 {ours:.2e}, stock {theirs:.2e}")
    assert ours <= ERROR_BFLOAT16 * theirs


def test_every_listed_class_is_among_the_rows(zoo):
    rows = {read_config(zoo.directory(name))[0].name for name in COMPILED_ROWS}
    assert rows == set(LISTED)


@pytest.mark.parametrize("name", COMPILED_ROWS)
def test_a_compiled_decoder_is_the_stock_one(zoo, name):
    check_both_dtypes(zoo.directory(name))


@pytest.mark.parametrize("name", COMPILED_ROWS)
def test_a_skeleton_gives_the_bits_of_the_stock_module_when_compiled(zoo, name):
    directory = zoo.directory(name)
    skeleton, stock = (load(directory, torch.bfloat16, is_stock=one) for one in (False, True))
    assert isinstance(skeleton.module, Skeleton)
    assert not isinstance(stock.module, Skeleton)
    one, other = (
        Built(directory, torch.bfloat16, is_stock=False, loaded=loaded).logits()
        for loaded in (skeleton, stock)
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("arch", WIDE)
def test_a_compiled_decoder_is_the_stock_one_at_the_width_of_real_layers(tmp_path, arch):
    check_both_dtypes(make(tmp_path, arch, WIDE[arch]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2", "qwen3_moe", "gpt_oss", "lfm2"])
def test_a_row_gives_the_same_bits_whatever_rows_are_beside_it(zoo, name, dtype):
    built = Built(zoo.directory(name), dtype, is_stock=False)
    together = built.logits()
    assert torch.equal(built.logits(), together)
    for row in range(len(COUNTS)):
        low = sum(COUNTS[:row])
        assert torch.equal(built.logits(row), together[low : low + COUNTS[row]])


@pytest.mark.parametrize("mlp", [96, 112, 208, 304])
def test_a_task_of_a_single_row_has_whole_pairs_of_gates_and_ups(tmp_path, mlp):
    """With two threads a task's share is 3, 3, 6 or 9 panels, of which it must take an even
    number."""
    built = Built(make(tmp_path, "llama", Shape(mlp=mlp)), torch.bfloat16, is_stock=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(built.logits(0), built.logits()[:1])
    finally:
        torch.set_num_threads(before)


def test_a_model_with_an_unknown_activation_is_not_rewritten(zoo):
    model = load(zoo.directory("llama"), torch.float32)
    calls = probe(model, layer_shapes(model.config))
    model.module.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    with pytest.raises(NotRewritten, match="its activation is ReLU"):
        take_apart(model.module, calls)


def test_a_weight_is_held_once(zoo):
    """A compiled model takes the bytes of its parameters and a little padding: no second copy."""
    directory = zoo.directory("llama")
    stock = load(directory, torch.float32)
    compiled = Built(directory, torch.float32, is_stock=False).execution.model
    assert stock.num_bytes <= compiled.num_bytes <= 1.05 * stock.num_bytes


SMALL_ROWS = ["llama", "llama, untied, biases", "qwen2", "phi3", "gemma3", "olmo2", "granite",
              "qwen3_moe", "qwen2_moe", "smollm3", "ministral3", "mixtral", "exaone4", "seed_oss",
              "gpt_oss", "lfm2"]  # fmt: skip


def check_rounded_alike(small, exact, most=0.03):
    """Compare compiled quantized weights with a stock model, both in float32, whose weights and
    inputs of layers are rounded in the same way.

    Sums whose last bits differ may round an activation to two different numbers. Then the
    activation's row, and rows that attend to it, differ by part of a rounding step. So most rows of
    one token are equal, and long rows are close: ``most`` of their norm apart.
    """
    assert isinstance(small.execution.model.module, NativeDecoder)
    ours, theirs = (one.logits(counts=(1,) * 48) for one in (small, exact))
    assert median_distance(ours, theirs) <= ERROR_FLOAT32
    assert distance(small.logits(), exact.logits()) <= most


@pytest.mark.parametrize("quantization", ROUNDED)
@pytest.mark.parametrize("name", SMALL_ROWS)
def test_quantized_weights_compute_what_torch_does_with_the_same_roundings(zoo, name, quantization):
    directory = zoo.directory(name)
    small = Built(directory, torch.float32, is_stock=False, quantization=quantization)
    exact = Built(directory, torch.float32, is_stock=True, quantization=quantization)
    check_rounded_alike(small, exact)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("quantization", ROUNDED)
def test_a_row_of_quantized_weights_gives_the_same_bits_whatever_is_beside_it(
    zoo, quantization, name
):
    built = Built(zoo.directory(name), torch.bfloat16, is_stock=False, quantization=quantization)
    together = built.logits()
    for row in range(len(COUNTS)):
        low = sum(COUNTS[:row])
        assert torch.equal(built.logits(row), together[low : low + COUNTS[row]])


@pytest.mark.parametrize(("quantization", "share"), [("int8", 0.58), ("int4", 0.38)])
@pytest.mark.parametrize("is_tied", [True, False])
def test_quantized_weights_take_their_share_of_bfloat16s_memory(
    tmp_path, quantization, share, is_tied
):
    """The estimate before the load says the same."""
    shape = Shape(4, 256, 4, 2, 1024, 1000, 256, tied=is_tied)
    directory = make(tmp_path, "llama", shape, dtype="bfloat16")
    plain = Built(directory, torch.bfloat16, is_stock=False).execution.model.num_bytes
    small = Built(directory, torch.bfloat16, is_stock=False, quantization=quantization)
    assert small.execution.model.num_bytes <= share * plain
    _, config = read_config(directory)
    with Checkpoint(directory) as checkpoint:
        told = weight_bytes(checkpoint, config, torch.bfloat16, quantization)
    assert 0.98 * small.execution.model.num_bytes <= told <= 1.02 * plain


REFUSED = {
    "the class": ("gpt2", {}, "GPT2LMHeadModel has no compiled form"),
    "the dtype": ("llama", {"dtype": "float16"}, "the kernels do not compute in torch.float16"),
}


@pytest.mark.parametrize("quantization", ROUNDED)
@pytest.mark.parametrize(("name", "fields", "why"), REFUSED.values(), ids=REFUSED)
def test_impossible_quantized_weights_are_refused(zoo, name, fields, why, quantization):
    spec = RunnerSpec(str(zoo.directory(name)), kv_bytes=1 << 24, threads=1,
                      quantization=quantization, **fields)  # fmt: skip
    with pytest.raises(Exception, match=why) as raised:
        TorchRunner(spec).load(lambda _progress: None)
    assert isinstance(raised.value.__cause__, Refusal) or quantization in str(raised.value)


def test_the_reported_memory_covers_the_largest_step(zoo):
    """Chunks of four long prompts nearly fill the first step; smaller steps follow."""
    runner = TorchRunner(RunnerSpec(str(zoo.directory("llama")), kv_bytes=1 << 24, threads=2,
                                    max_num_seqs=4, max_num_batched_tokens=2048))  # fmt: skip
    info = runner.load(lambda _progress: None)
    decoder = runner._model.module
    pool = PoolSize(info.num_blocks, info.block_size, info.max_model_len, 0)
    library, grown = decoder._library, []
    stock = library.triolet_step

    def step(kind, model, step, arena):
        grown.append(library.triolet_step_bytes(kind, model, step))
        return stock(kind, model, step, arena)

    decoder._library = SimpleNamespace(
        triolet_step=step, triolet_step_bytes=library.triolet_step_bytes
    )
    planner = MiniPlanner(runner, info, seed=1, chunks=500)
    rng = np.random.default_rng(1)
    for length in (1020, 900, 700, 30):
        planner.add(rng.integers(1, 500, length).tolist(), 4)
    planner.run()
    told = decoder.activation_bytes(2048, 4 + SCORED_TOKENS_MAX, 4, pool)
    assert max(grown) <= told <= 4 * max(grown)
    assert info.memory_bytes > told + runner._model.num_bytes


def test_the_reported_memory_covers_short_rows(zoo):
    """Rows of one token have contexts of two parts, in a pool that just holds the rows."""
    runner = TorchRunner(RunnerSpec(str(zoo.directory("llama")), kv_bytes=1 << 24, threads=2))
    info = runner.load(lambda _progress: None)
    decoder = runner._model.module
    assert isinstance(decoder, NativeDecoder)

    def needed(start):
        starts = np.tile(np.arange(start, start + 16, dtype=np.int64), 7)
        ends, offsets = starts + 1, np.arange(7 * 16 + 1, dtype=np.int64)
        own = (starts.ctypes.data, ends.ctypes.data, offsets.ctypes.data)
        rows = structs.Rows(*own, None, None, None, len(starts), 0, 16, len(starts))
        step = structs.Step(rows=rows, num_kept=7, num_threads=2)
        return decoder._library.triolet_step_bytes(
            decoder._packer.kind, ctypes.byref(decoder._model), ctypes.byref(step)
        )

    def told(num_tokens, num_rows, num_blocks):
        """Return the reported bytes of activations that attention in parts of contexts adds."""
        pool = PoolSize(num_blocks, 16, info.max_model_len, 0)
        whole, chunks = (decoder.activation_bytes(num_tokens, 7, n, pool) for n in (num_rows, 0))
        return whole - chunks

    more = needed(PART) - needed(0)
    assert more <= told(7 * 16, 7, 7 * (PART // 16 + 1)) < 1.2 * more
    assert told(1, 1, 1 << 16) == told(1, 1, info.max_model_len // 16)
