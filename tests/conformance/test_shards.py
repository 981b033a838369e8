"""The index of a checkpoint decides in which file a tensor counts, for every reader of weights.

Each checkpoint is cut into two files. Both have all tensors, and those that the index gives to the
other file are negated, as after a half-finished update.
"""

from __future__ import annotations

import json
import random

import pytest
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, ModelConfig
from engine.worker.diffusion.runner import DiffusionRunner
from engine.worker.factory import make_runner
from engine.worker.interface import RunnerSpec
from tests.checkpoints import diffusion, encoder, text, vision
from tests.support.images import picture
from tests.support.mini_planner import MiniPlanner
from tests.support.model_zoo import COMPILED, REFERENCE, load_runner, prompt_of
from tests.support.vision import runner_of

pytestmark = [
    pytest.mark.model,
    # diffusers 0.42 beside numpy 2.4
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def cut(folder, stem="model"):
    """Cut a checkpoint's file into two that have stale copies of each other's tensors."""
    whole = folder / f"{stem}.safetensors"
    tensors = load_file(whole)
    files = [f"{stem}-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {name: files[place % 2] for place, name in enumerate(tensors)}
    for file in files:
        stale = {name: one if index[name] == file else -one for name, one in tensors.items()}
        save_file(stale, folder / file, metadata={"format": "pt"})
    whole.unlink()
    listed = {"metadata": {}, "weight_map": index}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(listed))


def tokens(directory, way):
    """Return what a text model makes of a prompt."""
    runner, info = load_runner(directory, way=way)
    planner = MiniPlanner(runner, info)
    sequence = planner.add(prompt_of(random.Random(1), 20), 12)
    planner.run()
    runner.close()
    return sequence.output


def parameters(module):
    """Return the parameters of a module by name, as bytes."""
    return {name: one.detach().float().numpy().tobytes() for name, one in module.named_parameters()}


def encoder_weights(directory):
    """Return the parameters of an encoder."""
    model = ModelConfig(str(directory))
    runner = make_runner(model, EngineConfig(models=(model,)))
    runner.load(lambda progress: None)
    return parameters(runner._model)


def drawing_weights(directory):
    """Return the parameters of an image model."""
    runner = DiffusionRunner(RunnerSpec(str(directory), threads=1))
    runner.load(lambda progress: None)
    parts = runner._model.parts
    return [parameters(one) for one in (parts.unet, parts.vae, *parts.prompts.encoders)]


def seeing_weights(directory):
    """Return the output of a vision model for a text, and its tower's for an image."""
    runner, info = runner_of(directory)
    planner = MiniPlanner(runner, info)
    sequence = planner.add(prompt_of(random.Random(1), 20), 12)
    planner.run()
    return sequence.output, runner.tower.encode(info.images.read(picture())).tolist()


def experts(directory):
    """Make a mixture of experts."""
    return text.make(directory, "qwen3_moe")


# The readers of weights: what makes a checkpoint, where its files of weights are, and what is read
# of them.
READERS = {
    "text, compiled": (text.make, {".": "model"}, lambda path: tokens(path, COMPILED)),
    "text, stock": (text.make, {".": "model"}, lambda path: tokens(path, REFERENCE)),
    "experts": (experts, {".": "model"}, lambda path: tokens(path, COMPILED)),
    "an embedding model": (encoder.make_embedder, {".": "model"}, encoder_weights),
    "a reranker": (encoder.make_reranker, {".": "model"}, encoder_weights),
    "CLIP": (encoder.make_image_embedder, {".": "model"}, encoder_weights),
    "a vision model": (vision.make, {".": "model"}, seeing_weights),
    "an image model": (
        diffusion.make,
        {
            "unet": "diffusion_pytorch_model",
            "vae": "diffusion_pytorch_model",
            "text_encoder": "model",
        },
        drawing_weights,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "places", "read"), READERS.values(), ids=READERS)
def test_the_index_decides_in_which_file_a_tensor_counts(make, places, read, tmp_path):
    directory = make(tmp_path / "model")
    want = read(directory)
    for folder, stem in places.items():
        cut(directory / folder, stem)
    assert read(directory) == want
