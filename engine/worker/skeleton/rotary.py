"""Computes rotary embeddings as transformers does, to the last bit.

Rule: every expression has transformers' order of operations and dtypes. The frequencies of all
types depend on the config alone; longrope's are those of its original length, because longer
sequences are not served (`engine.worker.load.architectures.context_limit`).

Source: transformers 5.23, modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.worker.skeleton.config import SkeletonConfig


class Rotary:
    """The rotary embedding of a model, or the embeddings of its layer types, called like the module
    of transformers. ``rope_type`` is the type, or a dict of types by layer type."""

    def __init__(self, config: SkeletonConfig) -> None:
        settings = config.rope_parameters
        kinds = sorted(set(config.layer_types)) if "rope_type" not in settings else ()
        self.rope_type: str | dict[str, str]
        if kinds:
            self.rope_type = {kind: settings[kind]["rope_type"] for kind in kinds}
            self._inv_freq = {kind: frequencies(config, settings[kind]) for kind in kinds}
        else:
            self.rope_type = settings["rope_type"]
            self._inv_freq = {"": frequencies(config, settings)}

    def __call__(
        self, example: torch.Tensor, position_ids: torch.Tensor, layer_type: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, [1, num_tokens, rotary_dim], in the dtype of ``example``.
        ``position_ids`` are [1, num_tokens] int64."""
        inv_freq, scaling = self._inv_freq[layer_type]
        angles = position_ids[..., None].float() * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        cosines, sines = angles.cos() * scaling, angles.sin() * scaling
        return cosines.to(example.dtype), sines.to(example.dtype)


def frequencies(config: SkeletonConfig, settings: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Return inverse frequencies, [rotary_dim / 2] float32, and the factor of cosines and sines."""
    dim = int(config.head_dim * settings.get("partial_rotary_factor", 1.0))
    kind, base = settings["rope_type"], settings["rope_theta"]
    if kind == "yarn":
        return _yarn(settings, dim)
    if kind == "longrope":
        return _longrope(config, settings, dim)
    inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    if kind == "linear":
        inv_freq /= settings["factor"]
    elif kind == "llama3":
        inv_freq = _llama3(settings, inv_freq)
    return inv_freq, 1.0


def _llama3(settings: Mapping[str, Any], inv_freq: torch.Tensor) -> torch.Tensor:
    factor, original = settings["factor"], settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    lengths = 2 * math.pi / inv_freq
    slowed = torch.where(lengths > original / low, inv_freq / factor, inv_freq)
    smooth = (original / lengths - low) / (high - low)
    smoothed = (1 - smooth) * slowed / factor + smooth * slowed
    is_between = ~(lengths < original / high) * ~(lengths > original / low)
    return torch.where(is_between, smoothed, slowed)


def _yarn(settings: Mapping[str, Any], dim: int) -> tuple[torch.Tensor, float]:
    base, factor = settings["rope_theta"], settings["factor"]
    original = settings["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """Return the dimension that rotates so many times over the original context length."""
        return (dim * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(base))

    low = dimension(settings.get("beta_fast", 32))
    high = dimension(settings.get("beta_slow", 1))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    powers = base ** (torch.arange(0, dim, 2).to(dtype=torch.float) / dim)
    own, stretched = 1.0 / powers, 1.0 / (factor * powers)
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    share = 1 - ramp
    return stretched * (1 - share) + own * share, _yarn_scaling(settings)


def _yarn_scaling(settings: Mapping[str, Any]) -> float:
    def scale(weight: float) -> float:
        factor = settings["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given, weight = settings.get("attention_factor"), settings.get("mscale")
    if given is not None:
        return given
    if weight and settings.get("mscale_all_dim"):
        return float(scale(weight) / scale(settings["mscale_all_dim"]))
    return scale(1)


def _longrope(
    config: SkeletonConfig, settings: Mapping[str, Any], dim: int
) -> tuple[torch.Tensor, float]:
    original = settings["original_max_position_embeddings"]
    factor, scaling = settings.get("factor"), settings.get("attention_factor")
    if factor is None:
        factor = config.max_position_embeddings / original
    if scaling is None:
        is_long = factor > 1.0
        scaling = math.sqrt(1 + math.log(factor) / math.log(original)) if is_long else 1.0
    stretch = torch.tensor(settings["short_factor"], dtype=torch.float32)
    powers = settings["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    return 1.0 / (stretch * powers), scaling
