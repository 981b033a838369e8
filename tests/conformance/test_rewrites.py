"""A compiled decoder computes what the stock module does (D11).

In float32 it is within 1e-5, and in bfloat16 no further from float32 than 1.1 times the stock
module.
"""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine.core.text.plan import SCORED_TOKENS_MAX  # noqa: E402
from engine.worker.forward.attention import KEYWORD  # noqa: E402
from engine.worker.forward.backends import pick_backend, prepare  # noqa: E402
from engine.worker.forward.decoder import NativeDecoder, quantise  # noqa: E402
from engine.worker.forward.kv_cache import KvCache, PoolSize  # noqa: E402
from engine.worker.forward.packing import pack  # noqa: E402
from engine.worker.forward.reference_attention import ReferenceBackend  # noqa: E402
from engine.worker.forward.rewrites import NotRewritten, take_apart  # noqa: E402
from engine.worker.interface import RunnerSpec  # noqa: E402
from engine.worker.load.architectures import layer_shapes  # noqa: E402
from engine.worker.load.checkpoint import Checkpoint  # noqa: E402
from engine.worker.load.loader import load_model, read_config  # noqa: E402
from engine.worker.load.probe import probe  # noqa: E402
from engine.worker.load.refusal import Refusal  # noqa: E402
from engine.worker.outline.families import LISTED  # noqa: E402
from engine.worker.outline.modules import Outline  # noqa: E402
from engine.worker.text_runner import TorchRunner  # noqa: E402
from tests.support.mini_planner import MiniPlanner  # noqa: E402
from tests.support.model_zoo import ZOO, Zoo  # noqa: E402
from tools.make_model import Shape, make  # noqa: E402

pytestmark = pytest.mark.model

CPU = torch.device("cpu")
COUNTS = (1, 40, 3, 1, 130, 1)
ERROR_FLOAT32 = 1e-5  # D11
ERROR_BFLOAT16 = 1.1  # times the stock module's error
# Layers as wide as small real models have them, and an MLP that leaves a panel partly empty.
WIDE = {
    "llama": Shape(2, 576, 9, 3, 1000, 700, 256),
    "qwen2": Shape(2, 896, 14, 2, 2432, 512, 256),
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Yield the tiny models."""
    zoo = Zoo(tmp_path_factory.mktemp("zoo"))
    yield zoo
    zoo.close()


def load(directory, dtype, *, is_stock=True):
    """Return a checkpoint's model in a dtype: transformers' own, or its outline."""
    architecture, config = read_config(directory, is_stock=is_stock)
    with Checkpoint(directory) as checkpoint:
        return load_model(
            checkpoint, architecture, config, dtype=dtype, device=CPU, progress=lambda _p: None
        )


class Built:
    """A checkpoint's model, stock or compiled, over a cache of its own."""

    def __init__(
        self, directory, dtype, *, is_stock, rounded=None, quantization="none", loaded=None
    ):
        model = loaded or load(directory, dtype, is_stock=is_stock)
        for parameter in model.module.parameters() if rounded else ():
            parameter.data = rounded(parameter.data)
        shapes = layer_shapes(model.config)
        self.cache = KvCache(shapes, 64, 16, dtype=dtype, device=CPU)
        calls = probe(model, shapes)
        backend, reason = ReferenceBackend(), "it was chosen"
        if not is_stock:
            backend, reason = pick_backend(CPU, dtype, shapes, calls)
        self.execution = prepare(
            model, backend, reason, calls, self.cache, quantization=quantization
        )
        self.vocab = model.config.vocab_size

    def logits(self, only=None):
        """Return the logits of every token of rows of `COUNTS` tokens, or of one of these rows.

        [num_tokens, vocab] float32
        """
        rng = np.random.default_rng(7)
        blocks = iter(rng.permutation(64))
        tables = [np.array([next(blocks) for _ in range(-(-c // 16))]) for c in COUNTS]
        ids = [rng.integers(1, self.vocab, count) for count in COUNTS]
        chosen = slice(None) if only is None else slice(only, only + 1)
        counts = COUNTS[chosen]
        rows = pack([0] * len(counts), counts, tables[chosen], 16)
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


def as_int8(weight):
    """Return matrices as their int8 numbers give them, and the rest as bfloat16."""
    rounded = as_bfloat16(weight)
    if weight.dim() != 2:
        return rounded
    numbers, scales = quantise(rounded)
    return (numbers * scales[:, None]).to(weight.dtype)


def distance(one, other):
    """Return the norm of the difference relative to ``other``."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def check_both_dtypes(directory):
    """Compare compiled and stock model in float32 and in bfloat16."""
    compiled = Built(directory, torch.float32, is_stock=False)
    assert isinstance(compiled.execution.model.module, NativeDecoder)
    stock = Built(directory, torch.float32, is_stock=True)
    error = distance(compiled.logits(), stock.logits())
    assert error <= ERROR_FLOAT32
    # The exact result for bfloat16: the same rounded weights, computed in float32.
    exact = Built(directory, torch.float32, is_stock=True, rounded=as_bfloat16).logits()
    ours, theirs = (
        distance(Built(directory, torch.bfloat16, is_stock=is_stock).logits(), exact)
        for is_stock in (False, True)
    )
    print(f"float32 {error:.1e}; bfloat16 {ours:.2e}, stock {theirs:.2e}")
    assert ours <= ERROR_BFLOAT16 * theirs


LISTED_ROWS = [
    name for name in ZOO if not name.startswith(("gpt2", "opt", "starcoder2", "qwen3_moe"))
]


def test_every_listed_class_is_among_the_rows(zoo):
    rows = {read_config(zoo.directory(name))[0].name for name in LISTED_ROWS}
    assert rows == set(LISTED)


@pytest.mark.parametrize("name", LISTED_ROWS)
def test_a_compiled_decoder_is_the_stock_one(zoo, name):
    check_both_dtypes(zoo.directory(name))


@pytest.mark.parametrize("name", LISTED_ROWS)
def test_an_outline_gives_the_bits_of_the_stock_module_when_compiled(zoo, name):
    directory = zoo.directory(name)
    outline, stock = (load(directory, torch.bfloat16, is_stock=one) for one in (False, True))
    assert isinstance(outline.module, Outline)
    assert not isinstance(stock.module, Outline)
    one, other = (
        Built(directory, torch.bfloat16, is_stock=False, loaded=loaded).logits()
        for loaded in (outline, stock)
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("arch", WIDE)
def test_a_compiled_decoder_is_the_stock_one_at_the_width_of_real_layers(tmp_path, arch):
    check_both_dtypes(make(tmp_path, arch, WIDE[arch]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2"])
def test_a_row_gives_the_same_bits_whatever_rows_are_beside_it(zoo, name, dtype):
    built = Built(zoo.directory(name), dtype, is_stock=False)
    together = built.logits()
    assert torch.equal(built.logits(), together)
    for row in range(len(COUNTS)):
        low = sum(COUNTS[:row])
        assert torch.equal(built.logits(row), together[low : low + COUNTS[row]])


def test_a_model_with_an_unknown_activation_is_not_rewritten(zoo):
    model = load(zoo.directory("llama"), torch.float32)
    calls = probe(model, layer_shapes(model.config))
    model.module.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    with pytest.raises(NotRewritten, match="its activation is ReLU"):
        take_apart(model.module, calls)


def test_a_weight_is_held_once(zoo):
    """A compiled model has the bytes of its parameters, and padding."""
    directory = zoo.directory("llama")
    stock = load(directory, torch.float32)
    compiled = Built(directory, torch.float32, is_stock=False).execution.model
    assert stock.num_bytes <= compiled.num_bytes <= 1.05 * stock.num_bytes


def test_int8_halves_the_weights_and_computes_with_their_rounded_values(zoo):
    directory = zoo.directory("llama")
    plain = Built(directory, torch.bfloat16, is_stock=False)
    small = Built(directory, torch.bfloat16, is_stock=False, quantization="int8")
    assert small.execution.model.num_bytes < 0.6 * plain.execution.model.num_bytes
    exact = Built(directory, torch.float32, is_stock=True, rounded=as_int8).logits()
    stock = Built(directory, torch.bfloat16, is_stock=True, rounded=as_int8).logits()
    assert distance(small.logits(), exact) <= ERROR_BFLOAT16 * distance(stock, exact)


REFUSED = {
    "the class": ("gpt2", {}, "GPT2LMHeadModel has no compiled form"),
    "the dtype": ("llama", {"dtype": "float16"}, "the kernels do not compute in torch.float16"),
}


@pytest.mark.parametrize(("name", "fields", "why"), REFUSED.values(), ids=REFUSED)
def test_impossible_int8_is_refused(zoo, name, fields, why):
    spec = RunnerSpec(str(zoo.directory(name)), kv_bytes=1 << 24, threads=1,
                      quantization="int8", **fields)  # fmt: skip
    with pytest.raises(Exception, match=why) as raised:
        TorchRunner(spec).load(lambda _progress: None)
    assert isinstance(raised.value.__cause__, Refusal) or "int8" in str(raised.value)


def test_the_reported_memory_covers_the_largest_step(zoo):
    """R118: four chunks of long prompts nearly fill a step; other steps follow."""
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
    told = decoder.activation_bytes(2048, 4 + SCORED_TOKENS_MAX, pool)
    assert max(grown) <= told <= 4 * max(grown)
    assert info.memory_bytes > told + runner._model.num_bytes
