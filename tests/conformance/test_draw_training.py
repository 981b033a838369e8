"""The training of an image model writes a pipeline that the engine can serve.

How good a completely trained model is, is measured by `python -m tools.lab.measure_demo draw`.
"""

import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import engine
from engine.worker.load.devices import pick_dtype
from tools.lab.demo import measure_draw, train_draw

PROMPT = "a red circle left of a small blue square"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a model's folder after two steps of each of its trainings, run one step at a time."""
    folder = tmp_path_factory.mktemp("draw")
    argv = ["--steps", "2", "--autoencoder-steps", "2", "--out", str(folder / "made")]
    pieces = ["--kept", str(folder / "kept"), "--minutes", "0"]
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train", *argv, *pieces])
        codes = [train_draw.main() for _ in range(3)]
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    torch.random.set_rng_state(state)
    assert codes == [3, 3, 0]
    return folder / "made"


@pytest.mark.full
def test_the_engine_draws_with_it_what_diffusers_draws(folder):
    from diffusers import StableDiffusionPipeline

    request = engine.DrawRequest(prompt=PROMPT, seed=3, steps=5)
    with engine.blocking.open_engine(str(folder)) as eng:
        [file] = [one.data for one in eng.draw(request) if isinstance(one, engine.GeneratedImage)]
    dtype = pick_dtype("auto", "F16", torch.device("cpu"))
    pipe = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True, dtype=dtype)
    chance = torch.Generator().manual_seed(request.seed)
    [expected] = pipe(PROMPT, num_inference_steps=5, generator=chance).images
    got = np.asarray(Image.open(io.BytesIO(file))).astype(int)
    assert got.shape == (64, 64, 3)
    assert np.abs(got - np.asarray(expected)).max() <= 1


@pytest.mark.full
def test_a_model_that_has_learnt_nothing_misses_the_bar(folder):
    figures, wrong = measure_draw.measure(folder, seed=0, count=3)
    assert figures["drawings_right"] == 0.0
    assert len(wrong) == 3
    assert figures["size_bytes"] < measure_draw.SIZE_BYTES_MAX


@pytest.mark.full
def test_whitened_latents_are_as_the_noise_and_give_the_same_pixels():
    torch.manual_seed(0)
    vae = train_draw.build_autoencoder().eval().requires_grad_(False)
    pixels = train_draw.pixels_of([train_draw.example(1, at, "test")[1] for at in range(64)])
    before = vae.decode(vae.encode(pixels).latent_dist.mean).sample
    train_draw.whiten(vae, seed=1)
    latents = vae.encode(pixels).latent_dist.mean
    assert (vae.decode(latents).sample - before).abs().max() < 1e-3
    channels = latents.transpose(0, 1).flatten(1)
    assert channels.mean(1).abs().max() < 0.1
    assert (torch.cov(channels) - torch.eye(train_draw.LATENTS)).abs().max() < 0.2


def test_each_word_of_a_description_is_one_token():
    tokenizer = train_draw.train_tokenizer(1)
    assert tokenizer.tokenize(PROMPT) == [f"{word}</w>" for word in PROMPT.split()]
    assert tokenizer.tokenize("Zebra")
