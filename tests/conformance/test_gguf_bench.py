"""`tools.lab.bench gguf`: the files it writes, and the rows it makes of samples. Engines that are
installed apart are not needed."""

import numpy as np
import pytest
import torch

from engine.worker.quantized.gguf_blocks import BLOCK_TYPES, decode
from tools.lab.bench import gguf, gguf_shapes
from tools.lab.bench.gguf_shapes import F32, MIXES, Q6_K, SHAPES, GgufShape, tensor_bytes
from tools.lab.bench.step import Case
from tools.lab.measure_gguf import measure
from tools.lab.peers.asked import prompts
from tools.lab.peers.environments import PeerError
from tools.lab.peers.process import OURS, start

TINY = {
    "blocks of 256": GgufShape("qwen3", 2, 256, 8, 2, 32, 512, has_head_norms=True),
    "fallbacks": GgufShape("qwen2", 2, 96, 4, 2, 24, 256, has_bias=True),
}
VOCAB = 512
ONE = Case("q05 Q4_K_M", "decode", 1, 129, None)
MANY = Case("q05 Q4_K_M", "decode", 8, 129, None)
PREFILL = Case("q05 Q4_K_M", "prefill", 1, 1024, None)


@pytest.fixture
def small_vocabulary(monkeypatch):
    monkeypatch.setattr(gguf_shapes, "VOCAB", VOCAB)
    monkeypatch.setattr(gguf_shapes, "TOKENS", 400)


class Engine:
    """An engine's process that answers at once, and as often as it is told."""

    def __init__(self, name, answers=100):
        self.name = name
        self.asked = []
        self._left = answers

    def ask(self, what, name, batch, length, steps=0):
        if not self._left:
            raise PeerError(f"{self.name} ended with -6")
        self._left -= 1
        self.asked.append((what, name, length))
        return {"seconds": 0.5, "first": [1] * batch}


# ---- the files -------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", TINY)
def test_a_written_file_computes_what_its_weights_say(shape, mix, small_vocabulary, tmp_path):
    file = tmp_path / "model.gguf"
    gguf_shapes.write_random(file, TINY[shape], MIXES[mix])
    texts = prompts("a", 2, 24, VOCAB)
    found = measure(str(file), texts, "")
    assert 0 <= found[OURS.name] < 1e-3
    assert 0 < file.stat().st_size - tensor_bytes(TINY[shape], MIXES[mix]) < 1 << 16


@pytest.mark.parametrize("kind", gguf_shapes.BLOCKS)
def test_random_weights_are_around_zero_and_as_large_as_a_models(kind):
    """Otherwise a direction that all rows have in common hides the prompt."""
    stored = gguf_shapes._random_tensor(np.random.default_rng(0), "a.weight", kind, (512, 1024))
    raw = torch.frombuffer(bytearray(stored), dtype=torch.uint8).view(512, -1)
    weights = decode(raw, BLOCK_TYPES[kind][1]).expand()
    assert 0.015 < weights.std() < 0.03
    assert abs(weights.mean()) < 0.005 * weights.std()


def test_our_engine_says_how_many_bytes_a_token_reads(small_vocabulary, tmp_path):
    file, shape, mix = tmp_path / "model.gguf", TINY["blocks of 256"], MIXES["Q8_0"]
    gguf_shapes.write_random(file, shape, mix)
    engine = start(OURS, gguf.settings(file) | {"vocab": VOCAB, "kv_bytes": 1 << 24})
    read = engine.ask("decode", "a", 1, 16, 1)["weights_bytes"]
    engine.close()
    assert 1 <= read / tensor_bytes(shape, mix) < gguf.BAR_BYTES


@pytest.mark.parametrize(
    ("mix", "module", "layers"),
    [  # as llama.cpp's quantiser stored a model of q17's layers and query heads
        ("Q4_K_M", "attn_v", [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]),
        ("Q5_K_M", "ffn_down", [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]),
        ("IQ4_XS", "ffn_down", [0, 1, 2]),
        ("IQ4_XS", "attn_v", []),
        ("Q4_K_M", "ffn_up", []),
    ],
)
def test_a_mix_has_more_bits_where_the_quantiser_of_llama_cpp_has(mix, module, layers):
    own = MIXES[mix]
    kinds = {name: kind for name, kind, _ in SHAPES["q17"].tensors(own)}
    finer = [n for n in range(28) if kinds[f"blk.{n}.{module}.weight"] not in (own.kind, F32)]
    assert finer == layers
    assert kinds["token_embd.weight"] == Q6_K


# ---- the rows --------------------------------------------------------------------------------


def rows(case, found, sizes=None):
    made = gguf.rows_of(case, found, ("llama.cpp", "ik_llama.cpp"), sizes or {OURS.name: 10**9})
    return {row.name.removeprefix(case.name): row for row in made}


def test_a_bar_is_lowered_to_what_the_bandwidth_allows():
    """A token reads 1 GB, so 30 GB/s allow 30 tokens/s; 27 of them are 1.08 of llama.cpp's."""
    samples = {OURS.name: [28.0], "llama.cpp": [25.0], "ik_llama.cpp": [20.0], "bandwidth": [30.0]}
    found = rows(ONE, samples)
    assert found[", of the bandwidth"].value == pytest.approx(28 / 30)
    assert found[", against llama.cpp"].bar == pytest.approx(27 / 25)
    assert found[", against llama.cpp"].passed
    assert found[", against ik_llama.cpp"].bar == 1.1


def test_a_slow_decode_misses_its_bar():
    samples = {OURS.name: [28.0], "llama.cpp": [25.0], "bandwidth": [90.0]}
    found = rows(ONE, samples)
    assert found[", against llama.cpp"].bar == 1.3
    assert found[", against llama.cpp"].passed is False


def test_bars_of_a_missing_engine_are_undecided():
    found = rows(PREFILL, {OURS.name: [300.0], "llama.cpp": [100.0]})
    assert found[": ik_llama.cpp"].value is None
    assert found[", against ik_llama.cpp"].bar == 1.0
    assert found[", against ik_llama.cpp"].passed is None
    assert found[", against llama.cpp"].bar == 1.5


def test_without_our_own_engine_the_others_are_still_shown():
    found = rows(MANY, {"llama.cpp": [100.0]})
    assert found[": triolet"].value is None
    assert found[": llama.cpp"].value == 100


@pytest.mark.parametrize(("case", "ratio"), [(ONE, 0.8 * 1.2), (PREFILL, 0.8)])
def test_a_type_is_compared_with_q4_0_by_the_bytes_of_a_decode(case, ratio):
    samples = {OURS.name: [80.0], gguf.TWIN: [100.0]}
    sizes = {OURS.name: 1200, gguf.TWIN: 1000}
    name = f", against {gguf.TWIN}{' by bytes' * (case is ONE)}"
    row = rows(case, samples, sizes)[name]
    assert row.value == pytest.approx(ratio)
    assert row.bar == gguf.BAR_LIKE


def test_an_engine_that_ends_is_left_out():
    ours, other = Engine(OURS.name), Engine("llama.cpp", answers=0)
    samples, asked = gguf.measure(MANY, [ours, other])
    assert list(samples) == list(asked) == [OURS.name]


def test_the_first_prompt_of_a_prefill_warms_up_and_all_are_new():
    engine = Engine(OURS.name)
    samples, _ = gguf.measure(PREFILL, [engine])
    assert samples == {OURS.name: [1024 / 0.5] * gguf.PREFILLS}
    assert [length for *_, length in engine.asked] == [gguf.WARM, *[1024] * gguf.PREFILLS]
    assert len({name for _, name, _ in engine.asked}) == len(engine.asked)


def test_the_bandwidth_is_measured_in_the_turns_of_one_sequence():
    samples, _ = gguf.measure(ONE, [Engine(OURS.name)])
    assert len(samples["bandwidth"]) == len(samples[OURS.name]) == gguf.REPEATS
    assert min(samples["bandwidth"]) > 0
