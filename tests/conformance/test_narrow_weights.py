"""Weights that are stored in 16 bits stay so in a compiled model that computes in float32.

They are widened exactly: log-probabilities have the bits that the same weights give in float32.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import Sampling
from engine.errors import SpawnFailed
from engine.worker.inspection import inspect
from engine.worker.interface import RunnerSpec
from engine.worker.load import devices
from engine.worker.load.division import Division
from engine.worker.text.placed_model import measure
from engine.worker.text.runner import TorchRunner
from tests.checkpoints.text import make
from tests.support.mini_planner import MiniPlanner
from tests.support.model_zoo import REFERENCE, load_runner, seeded_prompt

ARCHS = {  # how the embedding, the head, fused products, experts and convolutions are packed
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "phi3": {},
    "qwen3_moe": {},
    "lfm2": {},
}
# Modules of transformers: with compiled products, with a tied head, which is not packed, and one
# that is compiled in spite of its config.
STOCK = {
    "gpt_neox": {"tie_word_embeddings": False},
    "phi": {"tie_word_embeddings": False},
    "opt": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False, "a_new_field": 1},
}
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def pair(tmp_path, arch, dtype, extra=None):
    """Return the folders of a checkpoint in 16 bits, and of the same numbers in float32."""
    extra = ARCHS[arch] if extra is None else extra
    narrow = make(tmp_path / "narrow", arch, extra=extra, dtype=NAMES[dtype])
    wide = tmp_path / "wide"
    shutil.copytree(narrow, wide)
    tensors = load_file(narrow / "model.safetensors")
    assert {one.dtype for one in tensors.values()} == {dtype}
    widened = {name: one.float() for name, one in tensors.items()}
    save_file(widened, wide / "model.safetensors", {"format": "pt"})
    return narrow, wide


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("arch", ARCHS)
def test_log_probabilities_have_the_bits_of_the_same_weights_in_float32(tmp_path, arch, dtype):
    narrow, wide = sizes_of_equal_runs(*pair(tmp_path, arch, dtype))
    assert narrow < 0.55 * wide


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("arch", STOCK)
def test_modules_of_transformers_keep_linear_layers_so(tmp_path, arch, dtype):
    narrow, wide = sizes_of_equal_runs(*pair(tmp_path, arch, dtype, STOCK[arch]))
    assert narrow < 0.85 * wide


@pytest.mark.parametrize("arch", ["gpt_neox", "llama"])
def test_a_module_of_transformers_says_that_its_weights_have_16_bits(tmp_path, arch):
    narrow, _ = pair(tmp_path, arch, torch.bfloat16, STOCK[arch])
    config = ModelConfig(str(narrow), dtype="float32")
    found = inspect(config, EngineConfig(models=(config,))).found
    seen = []
    runner = TorchRunner(RunnerSpec(str(narrow), dtype="float32", kv_bytes=1 << 22, threads=1))
    info = runner.load(seen.append)
    assert (info.dtype, info.quantization) == ("float32", "bfloat16")
    assert found.weight_bytes == pytest.approx(runner._model.num_bytes, rel=0.1)
    runner.close()
    assert seen[-2].bytes_done == seen[-2].bytes_total
    reference, info = load_runner(narrow, way=REFERENCE, dtype="float32")
    assert info.quantization == ""
    reference.close()


def test_a_weight_of_16_bits_that_is_not_finite_is_refused(tmp_path):
    narrow, _ = pair(tmp_path, "gpt_neox", torch.bfloat16, STOCK["gpt_neox"])
    tensors = load_file(narrow / "model.safetensors")
    name = next(name for name in tensors if name.endswith("dense.weight"))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, narrow / "model.safetensors", {"format": "pt"})
    with pytest.raises(SpawnFailed, match=f"its tensor {name}"):
        load_runner(narrow, dtype="float32")


def sizes_of_equal_runs(*directories):
    """Check that all checkpoints give the same scores in float32, and that their sizes are known
    before; return these."""
    found = []
    for directory in directories:
        runner, info = load_runner(directory, dtype="float32")
        planner = MiniPlanner(runner, info, seed=1)
        asked = Sampling(temperature=0.0, prompt_logprobs=0, logprobs=3)
        one = planner.add(seeded_prompt(80), 16, sampling=asked)
        planner.run()
        size = runner._model.num_bytes
        found.append((size, one.output, one.prompt_logprobs, one.logprobs))
        runner.close()
        estimate = measure(RunnerSpec(str(directory), dtype="float32"), Division()).weight_bytes
        assert 0.85 * size < estimate <= 1.05 * size
    (narrow, *scores), (wide, *wanted) = found
    assert len(scores[1]) == 80
    assert scores == wanted
    return narrow, wide


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
def test_a_processor_without_bfloat16_keeps_16_bits_in_weights_and_cache(
    tmp_path, monkeypatch, dtype
):
    """By ``auto``; a float32 checkpoint, and one that float32 is asked for, has a cache of that."""
    monkeypatch.setattr(devices, "has_bfloat16", lambda _device: False)
    narrow, wide = pair(tmp_path, "llama", dtype)
    infos = []
    for directory, fields in ((narrow, {}), (narrow, {"dtype": "float32"}), (wide, {})):
        runner, info = load_runner(directory, **fields)
        planner = MiniPlanner(runner, info, seed=1)
        one = planner.add(seeded_prompt(33), 8)
        planner.run()
        assert len(one.output) == 8
        infos.append((info.dtype, info.quantization, info.kv_dtype))
        runner.close()
    assert infos == [
        ("float32", NAMES[dtype], "float16"),
        ("float32", NAMES[dtype], "float32"),
        ("float32", "", "float32"),
    ]
