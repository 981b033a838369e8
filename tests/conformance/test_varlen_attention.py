"""CUDA's attention gives its kernel the right arguments (D12).

With a stand-in for the kernel, outputs equal the reference's, and a model's tokens transformers'.
The stand-in computes attention in plain torch as `varlen_attn` is documented, and checks its
arguments as the kernel does. With a GPU, two more tests run the kernel.
"""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.forward import varlen_attention
from engine.worker.forward.attention import AttentionCall
from engine.worker.forward.backends import pick_backend, prepare
from engine.worker.forward.reference_attention import ReferenceBackend, ReferenceStep
from engine.worker.forward.varlen_attention import VarlenBackend, VarlenStep, varlen_attn
from engine.worker.interface import RunnerSpec
from engine.worker.load.architectures import LayerShape
from engine.worker.load.refusal import Refusal
from engine.worker.text.runner import TorchRunner
from tests.support.attention_rows import caches, lay_out, numbers
from tests.support.mini_planner import MiniPlanner
from tests.support.model_zoo import REFERENCE, ZOO
from tests.support.parity import Tally

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")
CAPPED = "gemma2"  # its scores have a soft cap, which the kernel lacks


def stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **keywords):
    """Compute `varlen_attn` without a GPU, one row and one query after another."""
    check_arguments(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, keywords)
    groups = query.shape[1] // key.shape[1]
    left, right = keywords["window_size"]
    assert right == 0
    out = torch.full_like(query, math.nan)
    sums = query.new_full((query.shape[1], query.shape[0]), math.nan)
    offsets = zip(cu_seq_q.tolist(), cu_seq_k.tolist(), strict=True)
    low_q, low_k = next(offsets)
    for high_q, high_k in offsets:
        for token in range(low_q, high_q):
            end = high_k - (high_q - 1 - token)  # a row's last query is at its last key
            first = low_k if left < 0 else max(low_k, end - 1 - left)
            keys = key[first:end].repeat_interleave(groups, 1)
            values = value[first:end].repeat_interleave(groups, 1)
            scores = torch.einsum("hd,lhd->hl", query[token], keys) * keywords["scale"]
            out[token] = torch.einsum("hl,lhd->hd", scores.softmax(-1), values)
            sums[:, token] = scores.logsumexp(-1)
        low_q, low_k = high_q, high_k
    return (out, sums) if keywords["return_aux"].lse else out


def check_arguments(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, keywords):
    """Check the arguments as the kernel does, and what it assumes without a check."""
    tensors = [one.to("meta") for one in (query, key, value, cu_seq_q, cu_seq_k)]
    told = varlen_attn(*tensors, max_q, max_k, **keywords)
    if keywords["return_aux"].lse:
        told, sums = told
        assert sums.shape == (query.shape[1], query.shape[0])
    assert told.shape == query.shape
    assert query.dtype == key.dtype == value.dtype
    assert key.shape == value.shape
    assert all(one.stride(-1) == 1 for one in (query, key, value))
    for offsets, tokens, most in ((cu_seq_q, query, max_q), (cu_seq_k, key, max_k)):
        assert offsets.dtype == torch.int32
        assert offsets.is_contiguous()
        assert len(offsets) == len(cu_seq_q)
        assert (int(offsets[0]), int(offsets[-1])) == (0, len(tokens))
        assert int(offsets.diff().max()) == most
        assert int(offsets.diff().min()) > 0


def test_a_step_with_images_that_see_both_ways_is_the_references():
    rows, num_blocks = lay_out((16, [], [(None, 3, 20), (None, 40, 1)]), random.Random(0))
    [cache] = caches(rows, num_blocks, (4, 2, 16), (torch.float32, CPU))
    assert isinstance(VarlenBackend().prepare(rows, cache), VarlenStep)
    both_ways = replace(rows, untils=np.maximum(rows.untils, 9))
    assert isinstance(VarlenBackend().prepare(both_ways, cache), ReferenceStep)


@pytest.fixture
def without_gpu(monkeypatch):
    """Put the stand-in in the kernel's place."""
    monkeypatch.setattr(varlen_attention, "varlen_attn", stand_in)


# --- one layer ------------------------------------------------------------------------------


@st.composite
def layouts(draw):
    """Draw the rows of a step: chunks of prompts and decodes, some behind a shared prefix."""
    block_size = draw(st.sampled_from([1, 2, 4, 16, 256]))
    prefixes = draw(st.lists(st.integers(1, 3), max_size=2))  # blocks of each prefix
    rows = draw(st.lists(st.tuples(
        st.sampled_from([None, *range(len(prefixes))]),  # the prefix of the row, if any
        st.integers(0, 40),  # computed tokens behind the prefix
        st.one_of(st.just(1), st.integers(1, 40)),  # tokens to compute
    ), min_size=1, max_size=6))  # fmt: skip
    return block_size, prefixes, rows


SHAPES = st.sampled_from([(1, 1, 8), (4, 4, 16), (4, 2, 8), (6, 2, 24), (9, 3, 8), (8, 1, 16)])
WINDOWS = st.sampled_from([None, 1, 2, 7, 40, 600])


def draw_sinks(seed, heads):
    """Return random sinks if ``seed`` is odd, otherwise None."""
    return 2.0 * torch.randn(heads, dtype=torch.float64) if seed % 2 else None


@given(layout=layouts(), shape=SHAPES, windows=st.tuples(WINDOWS, WINDOWS), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=150)
def test_any_step_is_the_references(layout, shape, windows, seed):
    """One prepared step serves two layers with windows of their own."""
    torch.manual_seed(seed)
    rows, num_blocks = lay_out(layout, random.Random(seed))
    kind = (torch.float64, CPU)
    cache, other = caches(rows, num_blocks, shape, kind, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen_attention, "varlen_attn", stand_in)
        step, oracle = VarlenBackend().prepare(rows, cache), ReferenceBackend().prepare(rows, other)
        for layer, window in enumerate(windows):
            call = AttentionCall(layer, 0.3, window, sinks=draw_sinks(seed, shape[0]))
            inputs = numbers(rows, shape, torch.float64)
            out = step.attend(call, *inputs)
            torch.testing.assert_close(out, oracle.attend(call, *inputs), rtol=0, atol=1e-6)
    for own, wanted in zip((*cache.keys, *cache.values), (*other.keys, *other.values), strict=True):
        assert torch.equal(own, wanted) or torch.equal(own.isnan(), wanted.isnan())


def test_a_layer_sends_nothing_to_the_device(without_gpu, monkeypatch):
    """`prepare` computes everything that the layers need, and sends it in one copy."""
    sent = []
    monkeypatch.setattr(
        varlen_attention, "send", lambda *inputs: sent.append(inputs) or SEND(*inputs)
    )
    rows, num_blocks = lay_out((4, [2], [(0, 3, 5), (0, 0, 1), (None, 7, 1)]), random.Random(1))
    [cache] = caches(rows, num_blocks, (4, 2, 8), (torch.float32, CPU))
    step = VarlenBackend().prepare(rows, cache)
    assert len(sent) == 1
    for layer in range(2):
        step.attend(AttentionCall(layer, 1.0), *numbers(rows, (4, 2, 8), torch.float32))
    assert len(sent) == 1
    made = {name: getattr(step, name) for name in VarlenStep.__slots__}
    assert {type(made[name]) for name in ("queries_most", "keys_most")} == {int}


SEND = varlen_attention.send


# --- a model --------------------------------------------------------------------------------


@pytest.mark.cases(12)
@pytest.mark.parametrize("name", [name for name in ZOO if name != CAPPED])
def test_a_models_tokens_are_transformers_own(zoo, without_gpu, name):
    """Chunks run beside decodes, and windows are shorter than the prompts."""
    loaded = zoo.load(name)
    spec = RunnerSpec(str(loaded.directory), dtype="float32", kv_bytes=1 << 24, threads=1)
    runner = TorchRunner(spec, VarlenBackend())
    info = runner.load(lambda _progress: None)
    rng = random.Random(name)
    planner = MiniPlanner(runner, info, seed=3, chunks=24)
    done = [
        planner.add([rng.randrange(1, 512) for _ in range(length)], 8) for length in (1, 17, 40, 61)
    ]
    planner.run()
    counts = [[row.count for row in plan.rows] for plan in planner.plans]
    assert any(1 in own and max(own) > 1 for own in counts)
    tally = Tally()
    loaded.oracle.compare(done, tally)
    assert not tally.wrong
    assert tally.compared
    runner.close()


# --- which backend --------------------------------------------------------------------------

PLAIN = [AttentionCall(0, 1.0), AttentionCall(1, 1.0, sliding_window=24)]


def pick(monkeypatch, device=CUDA, dtype=torch.bfloat16, width=64, calls=PLAIN, capability=(8, 0)):
    """Return the backend that is chosen for a device."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    return pick_backend(device, dtype, [LayerShape(2, width)], calls)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [8, 64, 80, 256])
def test_cuda_has_its_own_backend(monkeypatch, dtype, width):
    backend, _ = pick(monkeypatch, dtype=dtype, width=width)
    assert isinstance(backend, VarlenBackend)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"dtype": torch.float32}, "does not compute in torch.float32"),
        ({"width": 12}, "its heads are 12 wide"),
        ({"width": 264}, "its heads are 264 wide"),
        ({"calls": [*PLAIN, AttentionCall(2, 1.0, softcap=50.0)]}, "does not cap scores"),
        ({"capability": (7, 5)}, "needs compute capability 8.0, and cuda:0 has 7.5"),
        ({"device": torch.device("mps")}, "no kernel for mps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_reference_does_what_the_kernel_cannot(monkeypatch, fields, why):
    backend, reason = pick(monkeypatch, **fields)
    assert isinstance(backend, ReferenceBackend)
    assert why in reason


def test_a_cpu_never_has_cudas_backend(monkeypatch):
    assert not isinstance(pick(monkeypatch, device=CPU)[0], VarlenBackend)


def test_the_backend_names_its_kernel_and_refuses_int8(zoo, monkeypatch):
    runner = zoo.load("llama", REFERENCE).runner
    chosen = pick(monkeypatch)
    told = prepare(runner._model, *chosen, PLAIN, runner._cache).reason
    assert "runs stock with CUDA's variable-length attention" in told
    with pytest.raises(Refusal, match=r"int8 .* no compiled decoder for cuda"):
        prepare(runner._model, *chosen, PLAIN, runner._cache, quantization="int8")


# --- the kernel itself ----------------------------------------------------------------------

if torch.cuda.is_available():  # without a GPU these tests are not defined

    @given(layout=layouts(), shape=SHAPES, window=WINDOWS, seed=st.integers(0, 99))
    @settings(deadline=None, max_examples=150)
    def test_the_kernel_is_the_reference(layout, shape, window, seed):
        torch.manual_seed(seed)
        rows, num_blocks = lay_out(layout, random.Random(seed))
        near, exact = caches(rows, num_blocks, shape, (torch.bfloat16, CUDA), (torch.float64, CPU))
        call = AttentionCall(0, 0.3, window, sinks=draw_sinks(seed, shape[0]))
        inputs = numbers(rows, shape, torch.bfloat16)
        on_gpu, wide = [one.to(CUDA) for one in inputs], [one.double() for one in inputs]
        sent = replace(call, sinks=None if call.sinks is None else call.sinks.to(CUDA))
        out = VarlenBackend().prepare(rows, near).attend(sent, *on_gpu)
        wanted = ReferenceBackend().prepare(rows, exact).attend(call, *wide)
        torch.testing.assert_close(out.cpu().double(), wanted, rtol=0, atol=6e-2)

    @pytest.mark.parametrize("name", [name for name in ZOO if name != CAPPED])
    def test_a_model_on_a_gpu_is_near_the_reference(zoo, name):
        """Compare the first tokens of 32 prompts with those in float32.

        By the reference in bfloat16 on a CPU up to 4 of them differ, with wrong attention nearly
        all.
        """
        loaded = zoo.load(name)
        spec = RunnerSpec(
            str(loaded.directory), device="cuda", dtype="bfloat16", kv_bytes=1 << 24, threads=1
        )
        runner = TorchRunner(spec)
        info = runner.load(lambda _progress: None)
        assert isinstance(runner._backend, VarlenBackend)
        rng = random.Random(name)
        planner = MiniPlanner(runner, info, seed=3, chunks=24)
        done = [planner.add([rng.randrange(1, 512) for _ in range(40)], 1) for _ in range(32)]
        planner.run()
        tally = Tally()
        loaded.oracle.compare(done, tally)
        assert len(tally.wrong) <= 8
        runner.close()
