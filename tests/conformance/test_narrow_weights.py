"""Weights that are stored in 16 bits stay so in a compiled model that computes in float32.

They are widened exactly: log-probabilities have the bits that the same weights give in float32.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.text.types import Sampling
from engine.worker.interface import RunnerSpec
from engine.worker.load import devices
from engine.worker.load.division import Division
from engine.worker.text.placed_model import measure
from tests.checkpoints.text import make
from tests.support.mini_planner import MiniPlanner
from tests.support.model_zoo import load_runner, seeded_prompt

ARCHS = {  # how the embedding, the head, fused products, experts and convolutions are packed
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "phi3": {},
    "qwen3_moe": {},
    "lfm2": {},
}
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def pair(tmp_path, arch, dtype):
    """Return the folders of a checkpoint in 16 bits, and of the same numbers in float32."""
    narrow = make(tmp_path / "narrow", arch, extra=ARCHS[arch], dtype=NAMES[dtype])
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
    found = []
    for directory in pair(tmp_path, arch, dtype):
        runner, info = load_runner(directory, dtype="float32")
        planner = MiniPlanner(runner, info, seed=1)
        asked = Sampling(temperature=0.0, prompt_logprobs=0, logprobs=3)
        one = planner.add(seeded_prompt(80), 16, sampling=asked)
        planner.run()
        size = runner._model.num_bytes
        found.append((size, one.output, one.prompt_logprobs, one.logprobs))
        runner.close()
        estimate = measure(RunnerSpec(str(directory), dtype="float32"), Division()).weight_bytes
        assert 0.85 * size < estimate <= size
    (narrow, *scores), (wide, *wanted) = found
    assert len(scores[1]) == 80
    assert scores == wanted
    assert narrow < 0.55 * wide


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
