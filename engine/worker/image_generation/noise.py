"""Makes the noise schedulers of diffusers, one for each drawing, because they hold state.

A drawing may name a scheduler other than the checkpoint's own. It is then made with those fields of
the checkpoint's config that its class has, as diffusers' users do.

Source: diffusers 0.42, `schedulers`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import diffusers

from engine.worker.image_generation.noise_names import CLASSES, NAMES_OF_CLASSES

if TYPE_CHECKING:
    import torch

    from engine.core.image_generation.types import Drawing
    from engine.worker.image_generation.pipelines import Pipeline

# All classes are imported with this file: diffusers would import each at its first use, which may
# be in a drawing's first step.
KINDS = {name: getattr(diffusers, name_of_class) for name, name_of_class in CLASSES.items()}
# Settings that differ from defaults of diffusers' classes: latents are not clipped, because they
# have no fixed range, and PNDM's twelve additional Runge-Kutta steps are skipped.
ALWAYS: dict[str, Any] = {"clip_sample": False, "skip_prk_steps": True}


class NoiseSchedulers:
    """Makes the noise schedulers of one model."""

    def __init__(self, pipeline: Pipeline) -> None:
        own = {name: value for name, value in pipeline.scheduler.items() if name[0] != "_"}
        # StableDiffusion was trained with this offset; older configs leave it out.
        offset = {} if pipeline.is_xl else {"steps_offset": 1}
        self._config = own | offset | ALWAYS
        self.default = NAMES_OF_CLASSES[pipeline.scheduler["_class_name"]]

    @property
    def prediction_type(self) -> str:
        """The type of the model's predictions: epsilon, v_prediction or sample."""
        return str(self._config.get("prediction_type", "epsilon"))

    def make(self, name: str) -> Any:
        """Return a new scheduler of this name, or of the checkpoint's own class if it is empty."""
        kind = KINDS[name or self.default]
        known = inspect.signature(kind.__init__).parameters
        return kind(**{field: value for field, value in self._config.items() if field in known})

    def steps_max(self, name: str) -> int:
        """Return the most steps that a scheduler takes."""
        config = self.make(name).config
        return int(config.get("original_inference_steps") or config.num_train_timesteps)


def start(scheduler: Any, drawing: Drawing, device: torch.device) -> torch.Tensor:
    """Set a scheduler to the drawing's number of steps, and return the steps' times in the noise
    schedule, [steps]. A drawing with a source skips the first steps, by its strength."""
    scheduler.set_timesteps(drawing.steps, device=device)
    times = scheduler.timesteps
    if drawing.source is None:
        return times
    skipped = drawing.steps - min(int(drawing.steps * drawing.strength), drawing.steps)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(skipped)
    return times[skipped:]


def step_arguments(scheduler: Any, generator: torch.Generator) -> dict[str, Any]:
    """Return further arguments of a scheduler's ``step``: the generator, if it draws noise."""
    known = inspect.signature(scheduler.step).parameters
    return {"generator": generator} if "generator" in known else {}
