"""For every reader of weights, a checkpoint's index decides from which file a tensor is read.

Each checkpoint is cut into two files. Both have all tensors, and the copies of tensors that the
index assigns to the other file are negated, as after a half-finished update. Or each tensor is in
one file, and the uncut file stays beside them with all tensors negated.

A broken index is refused by name before any weights are read.
"""

import json
import random
import shutil

import pytest
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, ModelConfig
from engine.errors import SpawnFailed
from engine.worker.factory import make_runner
from engine.worker.image_generation.runner import PipelineRunner
from engine.worker.interface import RunnerSpec
from tests.checkpoints import encode as encoder
from tests.checkpoints import image_generation as diffusion
from tests.checkpoints import text, vision
from tests.support.images import picture
from tests.support.mini_planner import MiniPlanner
from tests.support.model_zoo import COMPILED, REFERENCE, load_runner, prompt_of
from tests.support.vision import runner_of


def cut(folder, stem="model", *, leaves_whole=False):
    """Cut a checkpoint's file into two that have stale copies of each other's tensors, or leave
    the whole file as the stale copy."""
    whole = folder / f"{stem}.safetensors"
    tensors = load_file(whole)
    files = [f"{stem}-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {name: files[place % 2] for place, name in enumerate(tensors)}
    for file in files:
        stale = {
            name: one if index[name] == file else -one
            for name, one in tensors.items()
            if index[name] == file or not leaves_whole
        }
        save_file(stale, folder / file, metadata={"format": "pt"})
    whole.unlink()
    if leaves_whole:
        stale = {name: -one for name, one in tensors.items()}
        save_file(stale, whole, metadata={"format": "pt"})
    listed = {"metadata": {}, "weight_map": index}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(listed))


def tokens(directory, way):
    """Return a text model's tokens after a prompt."""
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
    runner = PipelineRunner(RunnerSpec(str(directory), threads=1))
    runner.load(lambda progress: None)
    parts = runner._model.parts
    return [parameters(one) for one in (parts.unet, parts.vae, *parts.prompts.encoders)]


def seeing_weights(directory):
    """Return a vision model's output for a text, and its vision tower's output for an image."""
    runner, info = runner_of(directory)
    planner = MiniPlanner(runner, info)
    sequence = planner.add(prompt_of(random.Random(1), 20), 12)
    planner.run()
    return sequence.output, runner.tower.encode(info.images.read(picture())).tolist()


def experts(directory):
    """Make the checkpoint of a mixture of experts."""
    return text.make(directory, "qwen3_moe")


# The readers of weights: how a checkpoint is made, where its weights are, and what is read from
# them.
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


@pytest.mark.parametrize("leaves_whole", [False, True], ids=["cut", "beside the whole file"])
@pytest.mark.parametrize(("make", "places", "read"), READERS.values(), ids=READERS)
def test_the_index_decides_in_which_file_a_tensor_counts(
    make, places, read, leaves_whole, tmp_path
):
    directory = make(tmp_path / "model")
    want = read(directory)
    for folder, stem in places.items():
        cut(directory / folder, stem, leaves_whole=leaves_whole)
    assert read(directory) == want


LISTS_NOTHING = "lists no weights"
NO_FILE = "names no safetensors file for 'a'"
OUTSIDE = "points outside the model's directory"
# The content of the index, and the reason in the refusal.
BROKEN = {
    "empty": ("", "is not valid JSON"),
    "cut short": ('{"weight_map": {"a": "model', "is not valid JSON"),
    "not UTF-8": (b"\xff\xfe", "is not UTF-8"),
    "a number without end": ("9" * 5000, "is not valid JSON"),
    "nested deeply": ("[" * 100_000, "is not valid JSON"),
    "a list": ("[]", "is not a JSON object"),
    "no weight_map": ('{"metadata": {}}', LISTS_NOTHING),
    "a list as weight_map": ('{"weight_map": ["model.safetensors"]}', LISTS_NOTHING),
    "an empty weight_map": ('{"weight_map": {}}', LISTS_NOTHING),
    "a number as file": ('{"weight_map": {"a": 5}}', NO_FILE),
    "null as file": ('{"weight_map": {"a": null}}', NO_FILE),
    "no name": ('{"weight_map": {"a": ""}}', NO_FILE),
    "pickled": ('{"weight_map": {"a": "pytorch_model.bin"}}', NO_FILE),
    "a NUL": ('{"weight_map": {"a": "a\\u0000.safetensors"}}', NO_FILE),
    "half a character": ('{"weight_map": {"a": "\\ud800.safetensors"}}', NO_FILE),
    "a long name": (f'{{"weight_map": {{"a": "{"a" * 300}.safetensors"}}}}', NO_FILE),
    "above": ('{"weight_map": {"a": "../a.safetensors"}}', OUTSIDE),
    "a path": ('{"weight_map": {"a": "/tmp/a.safetensors"}}', OUTSIDE),
    "a folder": ('{"weight_map": {"a": "b/a.safetensors"}}', OUTSIDE),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the directory of a model for each reader."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp("models")
            make = PLACES[kind][0]
            made[kind] = make(folder / "model")
        return made[kind]

    return get


def refusal(directory):
    """Return why a model does not load."""

    def load():
        model = ModelConfig(str(directory))
        runner = make_runner(model, EngineConfig(models=(model,), kv_cache_memory=8 << 20))
        runner.estimate()
        runner.load(lambda progress: None)

    with pytest.raises(SpawnFailed) as refused:
        load()
    return str(refused.value)


# How a checkpoint is made, and the folder and name of an index.
PLACES = {
    "text": (text.make, ".", "model"),
    "an embedding model": (encoder.make_embedder, ".", "model"),
    "a reranker": (encoder.make_reranker, ".", "model"),
    "CLIP": (encoder.make_image_embedder, ".", "model"),
    "a vision model": (vision.make, ".", "model"),
    "a unet": (diffusion.make, "unet", "diffusion_pytorch_model"),
    "a text encoder": (diffusion.make, "text_encoder", "model"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_broken_index_is_refused_by_its_name_and_fault(kind, models, tmp_path):
    _, folder, stem = PLACES[kind]
    directory = shutil.copytree(models(kind), tmp_path / "model")
    index = directory / folder / f"{stem}.safetensors.index.json"
    for name, (content, fault) in BROKEN.items():
        index.write_bytes(content if isinstance(content, bytes) else content.encode())
        told = refusal(directory)
        assert f"{index.name} {fault}" in told, name
        told.encode()  # can be sent to clients, as UTF-8
    index.write_text('{"metadata": {}, "weight_map": {"a": "gone.safetensors"}}')
    assert "gone.safetensors" in refusal(directory)


@pytest.mark.parametrize("metadata", ["", '"metadata": null, ', '"metadata": [], '])
def test_an_encoders_index_has_the_metadata_that_transformers_needs(models, tmp_path, metadata):
    directory = shutil.copytree(models("an embedding model"), tmp_path / "model")
    cut(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"metadata": {}, ', metadata))
    assert 'has no "metadata"' in refusal(directory)


def test_an_encoders_config_names_no_other_weights(models, tmp_path):
    directory = shutil.copytree(models("an embedding model"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["transformers_weights"] = "model.safetensors"
    (directory / "config.json").write_text(json.dumps(config))
    assert "(transformers_weights)" in refusal(directory)


def test_a_dense_layer_has_one_file_of_weights(tmp_path):
    """sentence-transformers reads no index in the folder of a dense layer."""
    directory = encoder.make_embedder(tmp_path / "model", dense=8)
    cut(directory / "2_Dense")
    assert "its 2_Dense has no model.safetensors" in refusal(directory)
