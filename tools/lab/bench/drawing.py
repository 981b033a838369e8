"""Measures what drawing costs beside diffusers' own pipeline: the same drawing by our runner's
steps and by ``pipe()``, in one process, in turn.

The pipelines have the layouts of StableDiffusion and of SDXL, random weights, and images of 256 ×
256 pixels. A denoising step takes 30 to 90 ms on a core, a hundredth of a published model's, so
that the cost of a plan is a larger share here. Both sides use the same number of threads, the same
seed and steps, and decode in tiles of the same size; diffusers' progress bar is off. The bar is
1.02 × diffusers' time in each of three cases: one drawing; three drawings that take turns step by
step, against three calls of ``pipe()``; and a drawing by the engine in this process until its PNG
is there, against ``pipe()`` and Pillow.
"""

from __future__ import annotations

import io
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import DrawRequest, GeneratedImage
from engine.api._generated.blocking import open_engine
from engine.config import ModelConfig
from engine.core.common.types import PlanId, SequenceId
from engine.core.image_generation.types import Drawing, ImageGenerationPlan, Verb
from tests.checkpoints.image_generation import ARCHS, make
from tools.lab.bench.frame import Row, repeat_in_turn, row_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engine.api._generated.blocking import Engine
    from engine.worker.image_generation.interface import ImageGenerationInfo
    from engine.worker.image_generation.runner import PipelineRunner

MEASURES = (
    "engine/api",
    "engine/core/common",
    "engine/core/image_generation",
    "engine/replica",
    "engine/requests",
    "engine/worker/image_generation",
    "engine/worker/forward",
)

SIZE = 32  # latents across
WIDTH = 32  # channels of the unet's first block
THREADS = 1
TOGETHER = 3
REPEATS_HERE = 9  # the bar is narrow
BAR = 1.02
DRAWING = Drawing("a red circle", "blurred", 256, 256, steps=10, guidance_scale=5.0, seed=7)


def plans(
    info: ImageGenerationInfo, drawing: Drawing, number: int
) -> Iterator[ImageGenerationPlan]:
    """Yield a drawing's plans. The first plan also ends the earlier drawing of this number."""
    sequence = SequenceId(number)
    yield ImageGenerationPlan(
        PlanId(1), sequence, Verb.ENCODE, drawing=drawing, ended=(SequenceId(number),)
    )
    for index in range(info.num_steps(drawing)):
        yield ImageGenerationPlan(PlanId(1), sequence, Verb.DENOISE, index)
    for index in range(info.num_tiles(drawing) * drawing.num_images):
        yield ImageGenerationPlan(PlanId(1), sequence, Verb.DECODE, index)


def by_steps(runner: PipelineRunner, info: ImageGenerationInfo, count: int) -> float:
    """Draw ``count`` images, one step of each in turn; return the seconds."""
    start = time.perf_counter()
    drawings = [replace(DRAWING, seed=DRAWING.seed + number) for number in range(count)]
    turns = [plans(info, drawing, number) for number, drawing in enumerate(drawings)]
    for turn in zip(*turns, strict=True):
        for plan in turn:
            runner.execute(plan)
    return time.perf_counter() - start


def by_engine(eng: Engine) -> float:
    """Draw one image through the engine; return the seconds until its file is there."""
    start = time.perf_counter()
    request = DrawRequest(
        prompt=DRAWING.prompt,
        negative_prompt=DRAWING.negative_prompt,
        width=DRAWING.width,
        height=DRAWING.height,
        steps=DRAWING.steps,
        guidance=DRAWING.guidance_scale,
        seed=DRAWING.seed,
    )
    assert any(isinstance(event, GeneratedImage) for event in list(eng.draw(request)))
    return time.perf_counter() - start


def by_calls(pipe: Any, count: int, *, with_file: bool = False) -> float:
    """Draw ``count`` images, each by one call of diffusers' pipeline; ``with_file`` encodes them as
    PNGs, too. Return the seconds."""
    import torch

    torch.set_num_threads(THREADS)
    start = time.perf_counter()
    for number in range(count):
        images = pipe(
            prompt=DRAWING.prompt,
            negative_prompt=DRAWING.negative_prompt,
            width=DRAWING.width,
            height=DRAWING.height,
            num_inference_steps=DRAWING.steps,
            guidance_scale=DRAWING.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(DRAWING.seed + number),
            output_type="pil",
        ).images
        if with_file:
            images[0].save(io.BytesIO(), "PNG")
    return time.perf_counter() - start


def their_pipeline(directory: Path, arch: str, runner: PipelineRunner) -> Any:
    """Return diffusers' pipeline, which decodes in tiles of the runner's size."""
    import diffusers

    kind = (
        diffusers.StableDiffusionXLPipeline if arch == "sdxl" else diffusers.StableDiffusionPipeline
    )
    pipe = kind.from_pretrained(str(directory), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    assert runner._model is not None
    ours = runner._model.parts.vae
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size = ours.tile_sample_min_size
    pipe.vae.tile_latent_min_size = ours.tile_latent_min_size
    return pipe


def measure(directory: Path, arch: str) -> list[Row]:
    """Measure pipelines of one architecture, and return the rows."""
    from engine.worker.image_generation.runner import PipelineRunner
    from engine.worker.interface import RunnerSpec

    runner = PipelineRunner(RunnerSpec(str(directory), threads=THREADS))
    info = runner.load(lambda progress: None)
    pipe = their_pipeline(directory, arch, runner)
    rows = []
    for count, what in ((1, "a drawing"), (TOGETHER, f"{TOGETHER} drawings in turn")):
        sides = [partial(by_steps, runner, info, count), partial(by_calls, pipe, count)]
        rows += against(f"{arch}: {what}", "by our steps", sides)
    runner.close()
    with open_engine(ModelConfig(str(directory), threads=THREADS)) as eng:
        sides = [partial(by_engine, eng), partial(by_calls, pipe, 1, with_file=True)]
        rows += against(f"{arch}: a PNG", "through the engine", sides)
    return rows


def against(what: str, how: str, sides: Sequence[Callable[[], float]]) -> list[Row]:
    """Measure our way to draw and diffusers' in turn, and return the rows."""
    ours, theirs = repeat_in_turn(sides, REPEATS_HERE)
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return [
        row_of(f"{what}, {how}", ours, "s"),
        row_of(f"{what}, by diffusers' pipe()", theirs, "s"),
        row_of(f"{what}, against pipe()", ratios, "×", bar=BAR),
    ]


def run() -> list[Row]:
    """Return the bench's rows."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for arch in ARCHS:
            directory = make(Path(folder) / arch, arch, size=SIZE, width=WIDTH)
            rows += measure(directory, arch)
    return rows
