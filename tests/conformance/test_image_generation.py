"""Image models against diffusers: the same seed gives the same pixels, by every noise scheduler,
also while other drawings are under way (issue 28).

Each fault of `FAULTS` is planted once, and must show.
"""

import itertools
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from engine.core.common.types import PlanId, SequenceId
from engine.core.image_generation.types import Drawing, ImageGenerationPlan, Verb
from engine.worker.image_generation import model, noise, tiles
from engine.worker.image_generation import state as drawing_state
from engine.worker.image_generation.noise_names import CLASSES
from engine.worker.image_generation.runner import PipelineRunner
from engine.worker.interface import RunnerSpec
from tests.checkpoints.image_generation import make
from tests.support.images import pixels

pytestmark = [
    # diffusers warns when it makes several images from one
    pytest.mark.filterwarnings("ignore:You have passed:FutureWarning"),
]

ARCHS = ("sd", "sdxl")
SIZE = 64
PLAIN = Drawing("a red circle", "blurred", SIZE, SIZE, steps=4, guidance_scale=5.0, seed=7)
FROM_IMAGES = {
    diffusers.StableDiffusionPipeline: diffusers.StableDiffusionImg2ImgPipeline,
    diffusers.StableDiffusionXLPipeline: diffusers.StableDiffusionXLImg2ImgPipeline,
}
plan_ids = itertools.count(1)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("diffusion")
    made = {arch: make(root / arch, arch) for arch in ARCHS}
    lcm = make(root / "lcm", scheduler="LCMScheduler", reads_guidance=True)
    return made | {"lcm": lcm}


@pytest.fixture(scope="module")
def runners(directories):
    made = {}
    for name, directory in directories.items():
        made[name] = PipelineRunner(RunnerSpec(str(directory), threads=1))
        made[name].info = made[name].load(lambda progress: None)
    yield made
    for runner in made.values():
        runner.close()


@pytest.fixture(scope="module")
def pipes(directories, runners):
    """Return diffusers' own pipelines, whose autoencoders decode in tiles of the runners' size."""
    kinds = {
        "sd": diffusers.StableDiffusionPipeline,
        "lcm": diffusers.StableDiffusionPipeline,
        "sdxl": diffusers.StableDiffusionXLPipeline,
    }
    made = {}
    for name, directory in directories.items():
        made[name] = kinds[name].from_pretrained(str(directory), local_files_only=True)
        made[name].set_progress_bar_config(disable=True)
        theirs, ours = made[name].vae, runners[name]._model.parts.vae
        theirs.enable_tiling()
        theirs.tile_sample_min_size = ours.tile_sample_min_size
        theirs.tile_latent_min_size = ours.tile_latent_min_size
    return made


def drawn_by_diffusers(pipe, drawing):
    """Return a drawing's images by diffusers' own pipeline, [images, height, width, 3]."""
    parts = dict(pipe.components)
    if drawing.scheduler:
        kind = getattr(diffusers, CLASSES[drawing.scheduler])
        # DDIM clips latents to ±1 by default; ours does not (`noise.ALWAYS`)
        parts["scheduler"] = kind.from_config(pipe.scheduler.config, clip_sample=False)
    options = {
        "prompt": drawing.prompt,
        "negative_prompt": drawing.negative_prompt or None,
        "num_inference_steps": drawing.steps,
        "guidance_scale": drawing.guidance_scale,
        "num_images_per_prompt": drawing.num_images,
        "generator": torch.Generator("cpu").manual_seed(drawing.seed),
        "output_type": "np",
    }
    made_by = type(pipe)
    if drawing.source is None:
        options |= {"width": drawing.width, "height": drawing.height}
    else:
        made_by = FROM_IMAGES[made_by]
        shape = (drawing.height, drawing.width, 3)
        image = Image.fromarray(np.frombuffer(drawing.source, np.uint8).reshape(shape))
        options |= {"image": image, "strength": drawing.strength}
    whole = made_by(**parts)
    whole.set_progress_bar_config(disable=True)
    with torch.inference_mode():
        return whole(**options).images


def plans_of(runner, drawing, sequence):
    info = runner.info

    def plan(verb, index=0, given=None):
        return ImageGenerationPlan(PlanId(next(plan_ids)), sequence, verb, index, given)

    yield plan(Verb.ENCODE, given=drawing)
    yield from (plan(Verb.DENOISE, index) for index in range(info.num_steps(drawing)))
    tiles_of_all = info.num_tiles(drawing) * drawing.num_images
    yield from (plan(Verb.DECODE, index) for index in range(tiles_of_all))


def run(runner, plan):
    """Execute a plan and return the image of its result, or None."""
    image = runner.execute(plan).row.image
    if image is None:
        return None
    return np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)


def draw(runner, *drawings):
    """Return the images of drawings whose steps alternate, [images, height, width, 3] for each."""
    ways = [plans_of(runner, one, SequenceId(place)) for place, one in enumerate(drawings, 1)]
    found = [[] for _ in drawings]
    for turn in itertools.zip_longest(*ways):
        for place, plan in enumerate(turn):
            image = None if plan is None else run(runner, plan)
            if image is not None:
                found[place].append(image)
    ended = tuple(SequenceId(place) for place in range(1, len(drawings) + 1))
    last = ImageGenerationPlan(PlanId(0), SequenceId(0), Verb.ENCODE, 0, PLAIN, ended=ended)
    runner.execute(last)
    assert set(runner._states) == {SequenceId(0)}
    return [np.stack(images) for images in found]


def apart(runner, pipe, drawing, *beside):
    """Return the largest difference to diffusers' pixels, in steps of a byte."""
    mine = draw(runner, drawing, *beside)[0]
    theirs = drawn_by_diffusers(pipe, drawing) * 255
    assert mine.shape == theirs.shape
    return float(np.abs(mine - theirs).max())


def with_source(drawing, strength=0.6):
    image = pixels(drawing.width, drawing.height, seed=3)
    return replace(drawing, source=image.tobytes(), strength=strength)


OTHERS = (
    replace(PLAIN, prompt="a dog", seed=1, steps=3, scheduler="euler-ancestral"),
    with_source(replace(PLAIN, prompt="a ship", seed=2, steps=6, guidance_scale=1.0)),
)
CASES = {
    "guided": PLAIN,
    "unguided": replace(PLAIN, guidance_scale=1.0),
    "no negative prompt": replace(PLAIN, negative_prompt=""),
    "two images": replace(PLAIN, num_images=2),
    "one step": replace(PLAIN, steps=1),
    "not square": replace(PLAIN, width=96, height=48),
    "a long prompt": replace(PLAIN, prompt="a very long story of a ship " * 9),
    "from an image": with_source(PLAIN),
    "two from an image": with_source(replace(PLAIN, num_images=2), strength=1.0),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", CASES)
def test_pixels_are_those_of_diffusers(runners, pipes, arch, case):
    assert apart(runners[arch], pipes[arch], CASES[case]) <= 1.0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("scheduler", CLASSES)
def test_every_noise_scheduler_gives_the_pixels_of_diffusers(runners, pipes, arch, scheduler):
    runner, pipe = runners[arch], pipes[arch]
    guided = replace(PLAIN, scheduler=scheduler, steps=5, num_images=2)
    assert apart(runner, pipe, guided, *OTHERS) <= 1.0
    unguided = replace(guided, guidance_scale=1.0, num_images=1)
    assert apart(runner, pipe, unguided) <= 1.0
    assert apart(runner, pipe, with_source(guided), *OTHERS) <= 1.0


def test_a_unet_that_reads_the_guidance_gives_the_pixels_of_diffusers(runners, pipes):
    drawing = replace(PLAIN, guidance_scale=8.0, num_images=2)
    assert apart(runners["lcm"], pipes["lcm"], drawing, *OTHERS) <= 1.0
    other = replace(drawing, guidance_scale=2.0)
    mine, others = (draw(runners["lcm"], one)[0] for one in (drawing, other))
    assert not np.array_equal(mine, others)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("size", [(320, 272), (512, 64), (264, 456)])
def test_images_of_several_tiles_are_those_of_diffusers(runners, pipes, arch, size):
    runner, pipe = runners[arch], pipes[arch]
    width, height = size
    drawing = replace(PLAIN, width=width, height=height, steps=2, num_images=2)
    assert runner.info.num_tiles(drawing) > 1
    assert apart(runner, pipe, drawing) <= 1.0
    assert apart(runner, pipe, with_source(drawing)) <= 1.0


def test_the_same_seed_gives_the_same_bytes_beside_other_drawings(runners):
    runner = runners["sd"]
    alone = draw(runner, PLAIN)[0]
    beside = draw(runner, PLAIN, *OTHERS, replace(PLAIN, seed=8))
    assert np.array_equal(alone, beside[0])
    assert not np.array_equal(alone, beside[3])


@pytest.mark.parametrize("scheduler", CLASSES)
def test_the_number_of_steps_is_known_before_the_first(runners, scheduler):
    """The core plans `ImageGenerationInfo.num_steps` steps; the noise schedulers have as many."""
    runner = runners["sd"]
    source = bytes(SIZE * SIZE * 3)
    for steps, strength in itertools.product(range(1, 20), (None, 0.05, 0.3, 0.99, 1.0)):
        drawing = replace(PLAIN, scheduler=scheduler, steps=steps)
        if strength is not None:
            drawing = replace(drawing, source=source, strength=strength)
        made = runner._model.parts.noise.make(scheduler)
        expected = runner.info.num_steps(drawing)
        found = len(noise.start(made, drawing, torch.device("cpu")))
        assert expected == found or (expected == 0 and found <= 1), (steps, strength)


def test_a_preview_is_a_small_image_and_changes_nothing(runners):
    runner = runners["sd"]
    plain = draw(runner, PLAIN)[0]
    plans = list(plans_of(runner, PLAIN, SequenceId(1)))
    images = [run(runner, replace(one, preview=one.verb is Verb.DENOISE)) for one in plans]
    previews = [image for image in images[:-1] if image is not None]
    assert len(previews) == runner.info.num_steps(PLAIN)
    assert all(max(image.shape[:2]) <= 128 for image in previews)
    assert np.array_equal(images[-1], plain[0])


@pytest.mark.parametrize("size", [(8, 8), (8, 136), (512, 24)], ids=str)
def test_a_narrow_image_has_a_preview(runners, size):
    width, height = size
    drawing = replace(PLAIN, width=width, height=height, steps=1)
    begin, step = itertools.islice(plans_of(runners["sd"], drawing, SequenceId(1)), 2)
    run(runners["sd"], begin)
    preview = run(runners["sd"], replace(step, preview=True))
    assert min(preview.shape[:2]) >= 1
    assert max(preview.shape[:2]) == min(128, max(size))


# ---- planted faults: each must be seen by the comparison above


def wrong_seed(monkeypatch):
    plain = model.DiffusionModel.encode
    monkeypatch.setattr(
        model.DiffusionModel, "encode",
        lambda self, drawing: plain(self, replace(drawing, seed=drawing.seed + 1)),
    )  # fmt: skip


def guidance_swapped(monkeypatch):
    plain = torch.Tensor.chunk
    monkeypatch.setattr(
        torch.Tensor, "chunk",
        lambda self, count, dim=0: plain(self, count, dim)[:: -1 if count == 2 and not dim else 1],
    )  # fmt: skip


def shared_scheduler(monkeypatch):
    plain, kept = noise.NoiseSchedulers.make, {}
    monkeypatch.setattr(
        noise.NoiseSchedulers, "make",
        lambda self, name: kept.setdefault(name, plain(self, name)),
    )  # fmt: skip


def tile_off_by_one(monkeypatch):
    plain = tiles.Tiles.decode
    monkeypatch.setattr(
        tiles.Tiles, "decode",
        lambda self, latents, tile: plain(self, latents.roll(1, -1) if tile else latents, tile),
    )  # fmt: skip


def tiles_not_blended(monkeypatch):
    from diffusers import AutoencoderKL

    monkeypatch.setattr(AutoencoderKL, "blend_h", lambda self, a, b, extent: b)


def sizes_swapped(monkeypatch):
    plain = model.DiffusionModel._conditions
    monkeypatch.setattr(
        model.DiffusionModel, "_conditions",
        lambda self, drawing, embeddings: plain(
            self, replace(drawing, width=drawing.height, height=drawing.width), embeddings
        ),
    )  # fmt: skip


def noise_before_the_source(monkeypatch):
    plain = model.DiffusionModel._from_source

    def swapped(self, drawing, scheduler, times, generator):
        self._noise(drawing, generator)
        return plain(self, drawing, scheduler, times, generator)

    monkeypatch.setattr(model.DiffusionModel, "_from_source", swapped)


SAME = replace(PLAIN, seed=9, steps=6)
WIDE = replace(PLAIN, width=512, height=64, steps=2)
FAULTS = {
    wrong_seed: ("sd", PLAIN, ()),
    guidance_swapped: ("sd", PLAIN, ()),
    shared_scheduler: ("sd", PLAIN, (SAME,)),
    tile_off_by_one: ("sd", WIDE, ()),
    tiles_not_blended: ("sd", WIDE, ()),
    sizes_swapped: ("sdxl", replace(PLAIN, width=96, height=48), ()),
    noise_before_the_source: ("sd", with_source(PLAIN), ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_shows(runners, pipes, monkeypatch, fault):
    arch, drawing, beside = FAULTS[fault]
    runner, pipe = runners[arch], pipes[arch]
    assert apart(runner, pipe, drawing, *beside) <= 1.0
    theirs = drawn_by_diffusers(pipe, drawing) * 255
    fault(monkeypatch)
    mine = draw(runner, drawing, *beside)[0]
    assert float(np.abs(mine - theirs).max()) > 1.0


def test_a_state_has_nothing_that_another_drawing_has(runners):
    runner = runners["sd"]
    for place, drawing in enumerate((PLAIN, replace(PLAIN, seed=8)), 1):
        plan = next(plans_of(runner, drawing, SequenceId(place)))
        runner.execute(plan)
    first, second = (runner._states[SequenceId(place)] for place in (1, 2))
    shared = [
        name
        for name in drawing_state.DrawingState.__slots__
        if getattr(first, name) is getattr(second, name) and name not in ("is_guided",)
    ]
    assert shared == []


def test_a_source_is_not_kept_once_it_was_read(runners):
    runner, drawing = runners["sd"], with_source(PLAIN)
    runner.execute(next(plans_of(runner, drawing, SequenceId(1))))
    assert drawing.source is not None
    assert runner._states[SequenceId(1)].drawing == replace(drawing, source=None)
