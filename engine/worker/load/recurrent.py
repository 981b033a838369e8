"""The shapes of the states that recurrent layers keep of each sequence (D32).

Rule: an architecture is in `RECURRENT` only if the parity suite tests it with prefix hits, forks
and preemptions. This file imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of one layer for one sequence: the last inputs of its convolution, [channels,
    width] in the model's dtype, and its recurrence's float32 state, () without one."""

    conv: tuple[int, ...]
    recurrent: tuple[int, ...] = ()

    def num_bytes(self, element_size: int) -> int:
        """Return the size of the state, with ``element_size`` bytes per number of the dtype."""
        own = prod(self.recurrent) * FLOAT32_BYTES if self.recurrent else 0
        return prod(self.conv) * element_size + own


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The recurrent layers of one architecture: the class of their modules in transformers, the
    modules' keyword for a cache, the layers' type in the config, and their states' shape."""

    module: str
    keyword: str
    layer_type: str
    shape: Callable[[Any], StateShape]


def _short_convolution(config: Any) -> StateShape:
    return StateShape((int(config.hidden_size), int(config.conv_L_cache)))


def _delta_rule(config: Any) -> StateShape:
    """Return the state of a gated delta net: one matrix for each head of the values."""
    keys, values = int(config.linear_key_head_dim), int(config.linear_value_head_dim)
    num_keys, num_values = int(config.linear_num_key_heads), int(config.linear_num_value_heads)
    channels = 2 * num_keys * keys + num_values * values
    conv = (channels, int(config.linear_conv_kernel_dim))
    return StateShape(conv, (num_values, keys, values))


def _mamba2(config: Any) -> StateShape:
    """Return the state of a Mamba-2 layer: one matrix for each head."""
    inner = getattr(config, "mamba_d_ssm", None) or config.mamba_expand * config.hidden_size
    size = int(config.mamba_d_state)
    channels = int(inner) + 2 * int(config.mamba_n_groups) * size
    heads = (int(config.mamba_n_heads), int(config.mamba_d_head), size)
    return StateShape((channels, int(config.mamba_d_conv)), heads)


LINEAR = "linear_attention"
HYBRID = "hybrid"  # a layer that has attention and a recurrence side by side
RECURRENT: dict[str, Recurrence] = {
    "Lfm2ForCausalLM": Recurrence("Lfm2ShortConv", "past_key_values", "conv", _short_convolution),
    "Qwen3NextForCausalLM": Recurrence(
        "Qwen3NextGatedDeltaNet", "cache_params", LINEAR, _delta_rule
    ),
    "Qwen3_5ForCausalLM": Recurrence("Qwen3_5GatedDeltaNet", "cache_params", LINEAR, _delta_rule),
    "GraniteMoeHybridForCausalLM": Recurrence(
        "GraniteMoeHybridMambaLayer", "cache_params", LINEAR, _mamba2
    ),
    "BambaForCausalLM": Recurrence("BambaMixer", "cache_params", LINEAR, _mamba2),
    "FalconH1ForCausalLM": Recurrence("FalconH1Mixer", "cache_params", HYBRID, _mamba2),
}
# Types of layers that keep no keys and values.
KEYLESS_TYPES = frozenset(recurrence.layer_type for recurrence in RECURRENT.values()) - {HYBRID}


def state_shapes(name: str, config: Any) -> dict[int, StateShape]:
    """Return the shape of each recurrent layer's state, by the layer's index, for an architecture
    called ``name``. ``config`` is transformers' config object."""
    if name not in RECURRENT:
        return {}
    own = RECURRENT[name]
    kinds = enumerate(config.layer_types)
    return {index: own.shape(config) for index, kind in kinds if kind == own.layer_type}
