"""Runs an image model: each step is one verb of one drawing (D3).

Rule: `engine.worker.image_generation.model` computes; this file loads the model, keeps the
drawings' states by sequence, and turns failures into results.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING, Any

from engine.core.common.steps import RowFailure, RowPhase, StepTimings
from engine.core.common.types import PlanId, SequenceId
from engine.core.image_generation.types import (
    Drawing,
    ImageGenerationPlan,
    ImageGenerationResult,
    ImageGenerationRow,
    Verb,
)
from engine.errors import EngineBug, InvalidRequest
from engine.worker.image_generation import pipelines
from engine.worker.image_generation.interface import ImageGenerationInfo
from engine.worker.image_generation.noise_names import CLASSES
from engine.worker.import_lock import holds_import_lock
from engine.worker.interface import Inspection, LoadProgress
from engine.worker.load.devices import pick_device, pick_dtype
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import resolve, short_name
from engine.worker.tokenizing.tokenizer import HfTokenizer
from engine.worker.torch_runner import InProcessRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.image_generation.types import RawImage
    from engine.worker.image_generation.model import DiffusionModel
    from engine.worker.image_generation.state import DrawingState
    from engine.worker.interface import RunnerSpec

WARM_UP_PIXELS = 64  # The width and the height of the warm-up's image.
GUIDANCE, XL_GUIDANCE = 7.5, 5.0  # Diffusers' defaults for StableDiffusion and for SDXL.
STEPS, FEW_STEPS = 50, {"lcm": 4}  # Diffusers' defaults, which depend on the scheduler.
EXTRA_STEPS = (("pndm", 1),)  # PNDM takes its first step twice.

log = logging.getLogger(__name__)


@holds_import_lock
def _loading() -> Any:
    """Import the module that loads models late, because it imports diffusers."""
    from engine.worker.image_generation import loading

    return loading


class PipelineRunner(
    InProcessRunner[ImageGenerationPlan, ImageGenerationResult, ImageGenerationInfo]
):
    """A runner of a pipeline of diffusers: an `ImageGenerationRunner`. A step
    that runs out of memory leaves the drawing's state as it was; a drawing whose values are not
    finite fails alone."""

    def __init__(self, spec: RunnerSpec) -> None:
        super().__init__(spec)
        self._model: DiffusionModel | None = None
        self._info: ImageGenerationInfo | None = None
        self._states: dict[SequenceId, DrawingState] = {}

    def _inspect(self) -> Inspection:
        loading, spec = _loading(), self._spec
        device = pick_device(spec.device)
        pipeline = pipelines.read(resolve(spec.model, spec.revision).directory)
        dtype = pick_dtype(spec.dtype, loading.stored_dtype(pipeline), device)
        return Inspection(
            device=str(device),
            architecture=pipeline.architecture,
            dtype=str(dtype).removeprefix("torch."),
            stored=loading.stored(pipeline),
            file_bytes=loading.file_bytes(pipeline),
            weight_bytes=loading.weight_bytes(pipeline, dtype),
            tokenizer_bytes=0,  # few tokens beside such weights
            workspace_bytes=loading.workspace_bytes(pipeline, dtype, spec.max_drawings),
            execution="diffusers' modules",
        )

    def close(self) -> None:
        """Free the model's memory. Idempotent."""
        model, self._model = self._model, None
        parts = () if model is None else (*model.parts.prompts.encoders, model.parts.unet,
                                          model.parts.vae)  # fmt: skip
        for module in parts:
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data = tensor.new_empty(0)  # freed now: the modules are in reference cycles
        self._info = None
        self._states.clear()
        super().close()

    # ---- loading

    def _load(self, progress: Callable[[LoadProgress], None]) -> ImageGenerationInfo:
        loading = _loading()
        progress(LoadProgress("config"))
        spec = self._spec
        self._device = device = pick_device(spec.device)
        source = resolve(spec.model, spec.revision)
        pipeline = pipelines.read(source.directory)
        if "safety_checker" in pipeline.index:
            log.info("the safety checker of %s is not loaded", short_name(spec.model))
        dtype = pick_dtype(spec.dtype, loading.stored_dtype(pipeline), device)
        progress(LoadProgress("weights"))
        self._model = model = loading.load(pipeline, device, dtype, progress)
        prompts, noise, tiles = model.parts.prompts, model.parts.noise, model.parts.tiles
        backend = prompts.tokenizers[0].backend_tokenizer
        self._tokenizer = HfTokenizer(type(backend).from_str(backend.to_str()))
        width, height = pipeline.default_size
        self._info = info = ImageGenerationInfo(
            architecture=pipeline.architecture,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            vocab_size=prompts.vocab_size,
            max_model_len=prompts.num_tokens,
            memory_bytes=loading.memory_bytes(pipeline, dtype, spec.max_drawings),
            default_width=width,
            default_height=height,
            max_pixels=loading.max_pixels(pipeline),
            max_image_pixels=spec.max_image_pixels,
            schedulers=tuple(CLASSES),
            default_scheduler=noise.default,
            default_steps=FEW_STEPS.get(noise.default, STEPS),
            default_guidance=XL_GUIDANCE if pipeline.is_xl else GUIDANCE,
            multiple_of=max(8, pipeline.latent_scale),
            prediction_type=noise.prediction_type,
            extra_steps=EXTRA_STEPS,
            steps_max=tuple((name, noise.steps_max(name)) for name in CLASSES),
            tile_size=tiles.size,
            tile_stride=tiles.stride,
            is_demo=source.is_demo,
            threads=spec.threads,
        )
        progress(LoadProgress("warm-up"))
        self._warm_up(info)
        return info

    def _warm_up(self, info: ImageGenerationInfo) -> None:
        """Draw a small image in one step, so that lazy initialisation happens before the first
        request."""
        size = min(WARM_UP_PIXELS, info.default_width, info.default_height)
        drawing = Drawing("", "", size, size, steps=1, guidance_scale=7.5, seed=0)
        sequence = SequenceId(0)
        for verb in Verb:
            given = drawing if verb is Verb.ENCODE else None
            row = self._execute(ImageGenerationPlan(PlanId(0), sequence, verb, drawing=given)).row
            if isinstance(row, RowFailure):
                raise Refusal(f"it cannot draw an image of an empty prompt: {row.detail}")
        self._states.clear()

    # ---- one step

    def _execute(self, plan: ImageGenerationPlan) -> ImageGenerationResult:
        started = perf_counter()
        for sequence in plan.ended:
            self._states.pop(sequence, None)
        try:
            row: ImageGenerationRow | RowFailure = ImageGenerationRow(
                plan.sequence, self._compute(plan)
            )
        except FloatingPointError as error:
            row = RowFailure(plan.sequence, RowPhase(plan.verb.value), str(error))
        except InvalidRequest as error:  # the second tokenizer's: requests are checked by the first
            row = RowFailure(
                plan.sequence, RowPhase(plan.verb.value), str(error), error.violations[0]
            )
        return ImageGenerationResult(
            plan.plan_id, row, StepTimings(forward_s=perf_counter() - started)
        )

    def _compute(self, plan: ImageGenerationPlan) -> RawImage | None:
        """Run the plan's verb, and return the finished image, a preview, or None."""
        if self._model is None or self._info is None:
            raise EngineBug("a step before the load")
        if plan.verb is Verb.ENCODE:
            assert plan.drawing is not None, "a drawing comes with its first step"
            self._states[plan.sequence] = self._model.encode(plan.drawing)
            return None
        state = self._states.get(plan.sequence)
        if state is None:
            raise EngineBug(f"a step of {plan.sequence} before its prompt was encoded")
        if plan.verb is Verb.DENOISE:
            self._model.denoise(state, plan.index)
            return self._model.preview(state) if plan.preview else None
        return self._model.decode(state, *divmod(plan.index, self._info.num_tiles(state.drawing)))
