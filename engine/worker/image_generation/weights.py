"""Builds the modules of an image model and gives them the tensors of their files.

Rule 1: a parameter without a stored tensor, or a stored tensor without a parameter, is a `Refusal`.
No weight is initialised at random. Rule 2: no global state changes, because other models run and
load in other threads. `from_pretrained` of diffusers breaks this rule: while it builds a module,
modules that other threads build get no memory either, and it changes torch's default dtype, as
transformers' does.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import diffusers
import torch
import transformers

from engine.worker.import_lock import holds_import_lock
from engine.worker.load.checkpoint import FLOAT_SIZES, Checkpoint, is_finite
from engine.worker.load.loader import refusing
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.worker.image_generation.pipelines import Component
    from engine.worker.load.checkpoint import StoredTensor

MODULES: dict[str, Any] = {
    "unet": diffusers.UNet2DConditionModel,
    "vae": diffusers.AutoencoderKL,
    "text_encoder": transformers.CLIPTextModel,
    "text_encoder_2": transformers.CLIPTextModelWithProjection,
}
# Older files' names of the layers of an autoencoder's attention, with the current names. Source:
# diffusers 0.42, `models/modeling_utils.py`.
OLDER_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
OLDER = re.compile(r"(?<=\.attentions\.\d\.)(query|key|value|proj_attn)(?=\.(weight|bias)$)")
# Published files have this prefix in the names of CLIP's parameters; transformers' modules may not.
PREFIX = "text_model."
POSITIONS = "position_ids"  # a buffer that old files have and the module computes: 0, 1, 2 …


def load_module(
    name: str,
    component: Component,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int], None],
) -> Any:
    """Return a component's module with its weights. ``progress`` is called with the size in bytes
    of each tensor that was read.

    Raises:
        Refusal: A check of Rule 1 failed, a file is damaged, or a weight is not finite.
    """
    with Checkpoint(component.folder, component.files, component.index) as checkpoint:
        module = _build_empty(name, component.config)
        expected = dict(module.named_parameters())
        sources = _sources(name, expected, checkpoint.tensors.values())
        weights = {}
        for key, stored in sources.items():
            weights[key] = _read(checkpoint, stored, device, dtype)
            progress(stored.num_bytes)
    module.load_state_dict(weights, strict=False, assign=True)
    _fill_positions(module, device)
    return module.eval().requires_grad_(False)


@holds_import_lock
def _build_empty(name: str, config: dict[str, Any]) -> Any:
    """Build a module on the meta device: it has shapes, but no memory."""
    kind = MODULES[name]
    sentence = f"the config.json of its {name} does not describe a {kind.__name__}"
    with refusing(sentence), torch.device("meta"):
        if name.startswith("text_encoder"):
            return kind(transformers.CLIPTextConfig.from_dict(config))
        return kind.from_config(config)


def _sources(
    name: str, expected: dict[str, torch.nn.Parameter], tensors: Iterable[StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the stored tensor of each parameter.

    Raises:
        Refusal: A tensor is missing, has no parameter, or has another shape or no floats.
    """
    sources = {}
    for stored in tensors:
        if stored.name.endswith(POSITIONS):
            continue
        key = _current_name(stored.name, expected)
        if key not in expected:
            raise Refusal(f"its {name} holds a tensor that the module does not use, {stored.name}")
        _check(name, stored, tuple(expected[key].shape))
        sources[key] = stored
    missing = [key for key in expected if key not in sources]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise Refusal(f"its {name} lacks the tensor {missing[0]}{more}")
    return sources


def _current_name(stored: str, expected: dict[str, torch.nn.Parameter]) -> str:
    """Return the name that a stored tensor has in the module."""
    newer = OLDER.sub(lambda match: OLDER_NAMES[match[1]], stored)
    without = newer.removeprefix(PREFIX)
    return next((name for name in (newer, without, PREFIX + newer) if name in expected), stored)


def _check(name: str, stored: StoredTensor, shape: tuple[int, ...]) -> None:
    if stored.dtype not in FLOAT_SIZES:
        raise Refusal(f"the tensor {stored.name} of its {name} is stored as {stored.dtype}; plain "
                      "float weights are needed")  # fmt: skip
    if stored.shape != shape:
        raise Refusal(f"the tensor {stored.name} of its {name} has the shape {list(stored.shape)}, "
                      f"and the config asks for {list(shape)}")  # fmt: skip


def _read(
    checkpoint: Checkpoint, stored: StoredTensor, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor in memory of its own, so that a later change of the file has no effect."""
    tensor = checkpoint.read(stored.name).to(device=device, dtype=dtype, copy=True)
    if not is_finite(tensor):
        checkpoint.check_finite(stored.name)
        raise Refusal(f"its tensor {stored.name} has numbers that {str(dtype)[6:]} cannot hold; "
                      "choose another --dtype")  # fmt: skip
    return tensor


def _fill_positions(module: Any, device: torch.device) -> None:
    """Compute the buffers of positions, which files need not have.

    Raises:
        Refusal: The module has another buffer that is not filled.
    """
    for owner in module.modules():
        if POSITIONS in owner._buffers:
            count = owner._buffers[POSITIONS].shape[-1]
            owner._buffers[POSITIONS] = torch.arange(count, device=device).unsqueeze(0)
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise Refusal(f"its tensor {name} could not be filled")
