"""The shipped model that embeds drawings, as the engine serves it by its id.

The model reaches its bars on a part of the held-out drawings. `python -m tools.lab.measure_demo
clip` measures all of them.
"""

import json

import numpy as np
import pytest
import torch

import engine
from engine.worker.load.resolve import resolve
from tools.lab.demo import measure_clip, measure_see
from tools.lab.demo.drawings import paint, png_of
from tools.lab.demo.figures import SIZE_BYTES_MAX, size_of
from tools.lab.demo.pieces import Pieces, Unfinished

SOURCE = resolve("demo-clip")
GROUPS = 5


@pytest.fixture(scope="module")
def eng():
    """Return an engine whose model is ready. While the model loads, nothing else of transformers
    may load in this process: each `from_pretrained` replaces `tie_weights` in all models meanwhile,
    and of two overlapping calls the last one may not restore it."""
    config = engine.EngineConfig(models=(engine.ModelConfig("demo-clip"),))
    with engine.blocking.open_engine(config) as one:
        one.wait_ready()
        yield one


def unit(vectors):
    """Return vectors of length one."""
    made = np.array(vectors)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("name", "most"), [("demo-clip", SIZE_BYTES_MAX), ("demo-see", measure_see.SIZE_BYTES_MAX)]
)
def test_a_demo_is_a_small_folder_with_a_card_and_its_trainings_numbers(name, most):
    source = resolve(name)
    assert source.is_demo
    assert size_of(source.directory) < most
    files = {path.name for path in source.directory.iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "training.json"} <= files
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pkl"))]
    facts = json.loads((source.directory / "training.json").read_text(encoding="utf-8"))
    assert facts["seed"] >= 0
    card = (source.directory / "README.md").read_text(encoding="utf-8")
    assert "## What it can't do" in card


def test_the_engine_finds_the_descriptions_of_drawings_and_computes_what_the_library_does(eng):
    groups = [measure_clip.held_out_group(0, index) for index in range(GROUPS)]
    from sentence_transformers import SentenceTransformer

    library = SentenceTransformer(str(SOURCE.directory), device="cpu", local_files_only=True)
    encoder = eng.encoder()
    right: list[bool] = []
    for group in groups:
        files = [png_of(one) for one in group.drawings]
        images, texts = encoder.embed(files), encoder.embed(group.texts)
        expected = library.encode([paint(one) for one in group.drawings])
        assert np.abs(np.array(images) - expected).max() < 1e-4
        assert np.abs(np.array(texts) - library.encode(list(group.texts))).max() < 1e-4
        alike = unit(images) @ unit(texts).T
        own = np.arange(len(files))
        right += [*(alike.argmax(0) == own), *(alike.argmax(1) == own)]
    assert np.mean(right) >= min(measure_clip.BARS.values())


def trained(kept, minutes, *rounds):
    """Return the weights of a small training, run again until it ends, and how often it was run."""
    for pieces in range(1, 100):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        layers = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        model = torch.nn.Sequential(layers, torch.nn.Linear(8, 2))
        training = Pieces(model, torch.nn.Module(), kept, minutes)
        try:
            for step in training.steps(*rounds):
                made = torch.Generator().manual_seed(step)
                training.learn(model(torch.randn(4, 2, 8, generator=made)).square().mean())
        except Unfinished:
            continue
        return model.state_dict(), pieces
    raise AssertionError("it never ends")


def test_a_training_in_pieces_makes_the_weights_of_a_whole_one(tmp_path):
    whole, one = trained(None, 0.0, 7, 5)
    cut, many = trained(tmp_path / "kept", 0.0, 7, 5)
    other, _ = trained(None, 0.0, 12)
    assert (one, many) == (1, 12)
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert not all(torch.equal(whole[name], other[name]) for name in whole), "a round begins anew"
