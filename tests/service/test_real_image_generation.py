"""A real server with tiny pipelines of random weights draws what diffusers draws, through gRPC."""

from functools import cache

import numpy as np
import pytest

from tests.checkpoints.image_generation import make
from tests.support.encode_wire import wait_all_idle
from tests.support.image_generation_wire import Draw, draw, draw_request, pixels_of
from tests.support.server import real
from tests.support.wire import (
    SERVING,
    ended,
    generate,
    health,
    list_models,
    reason,
    stats,
    wait_until,
)

pytestmark = [pytest.mark.model, pytest.mark.slow]

PIPELINES = {"sd": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline"}
SEED = 11
STEPS = 3


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """Return the directories of two tiny pipelines."""
    folder = tmp_path_factory.mktemp("pipelines")
    return {arch: make(folder / arch, arch, scheduler="DDIMScheduler") for arch in PIPELINES}


@cache
def images_of_diffusers(directory, prompt, count):
    """Return the pixels that diffusers' own pipeline draws."""
    import torch
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(directory, local_files_only=True)
    made = pipe(
        prompt,
        num_images_per_prompt=count,
        num_inference_steps=STEPS,
        generator=torch.Generator("cpu").manual_seed(SEED),
    )
    return [np.asarray(image.convert("RGB")).astype(int) for image in made.images]


@pytest.mark.parametrize(("runner", "archs"), [("thread", PIPELINES), ("process", ["sd"])])
def test_drawings_beside_text(pipelines, runner, archs):
    """Red if an image is not diffusers' own, or a worker goes on after its drawing's end."""
    served = {arch: pipelines[arch] for arch in archs}
    flags = [flag for path in served.values() for flag in ("--model", path)]
    with real(*flags, "--runner", runner) as server:
        for name in served:
            wait_until(lambda name=name: health(server.channel, f"model/{name}") == SERVING, 90)
        for name, directory in served.items():
            asked = draw_request("a red dog", model=name, steps=STEPS, n=2, seed=SEED)
            heard = draw(server.channel, asked)
            assert heard.error is None
            [started] = heard.of("started")
            wanted = images_of_diffusers(directory, "a red dog", 2)
            for index, pixels in enumerate(wanted):
                got = np.frombuffer(pixels_of(heard.files()[index]), np.uint8).astype(int)
                assert np.abs(got.reshape(started.height, started.width, 3) - pixels).max() <= 1
        listed = {model.name: model.architecture for model in list_models(server.channel)}
        assert {arch: listed[arch] for arch in archs} == {arch: PIPELINES[arch] for arch in archs}
        check_ends(server)


def check_ends(server):
    """Check that a cancelled drawing ends within a step, while a text goes on, and that later
    drawings are made."""
    asked = draw_request("a", model="sd", steps=150, width=128, height=128)
    before = ended(server.channel).get("cancelled", 0)
    with Draw(server.channel, asked) as call:
        assert call.read_until("progress") is not None
        assert generate(server.channel, max_tokens=20).error is None
        call.call.cancel()
        wait_until(lambda: ended(server.channel).get("cancelled", 0) > before, 5)
        steps = stats(server.channel).step_count
        assert wait_all_idle(server.channel, 5).step_count <= steps + 1
    first = draw(server.channel, draw_request("a", model="sd", steps=2))
    with Draw(server.channel, asked) as call:
        assert call.read_until("progress") is not None
        assert draw(server.channel, draw_request("a", model="sd", steps=2)).files() == first.files()
    heard = draw(server.channel, draw_request("a" * 90, model="sd"))
    assert reason(heard.error) == "REQUEST_TOO_LARGE"
    wait_all_idle(server.channel)
