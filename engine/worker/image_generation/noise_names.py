"""The names of noise schedulers, and diffusers' classes for them."""

from __future__ import annotations

CLASSES = {
    "ddim": "DDIMScheduler",
    "pndm": "PNDMScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler-ancestral": "EulerAncestralDiscreteScheduler",
    "dpm++2m": "DPMSolverMultistepScheduler",
    "lcm": "LCMScheduler",
}
NAMES_OF_CLASSES = {name_of_class: name for name, name_of_class in CLASSES.items()}
