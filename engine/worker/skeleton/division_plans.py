"""Lists how the layers of each architecture are divided among the ranks of a group (D29).

Rule: the plans are transformers' (`base_model_tp_plan`), except as noted at `PLANS`. They are
repeated here so that transformers need not be imported; `tests/conformance/test_division.py`
compares both.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Style(Enum):
    """How a module is divided."""

    COLUMNS = "columns"  # Weight and bias are divided by outputs.
    ROWS = "rows"  # Divided by inputs; the ranks' outputs are added up; rank 0 has the bias.
    QKV = "qkv"  # Like COLUMNS, for queries, keys and values in one tensor.
    PAIR = "pair"  # Like COLUMNS, for gates and ups in one tensor.
    SUM = "sum"  # Only parts of the module are divided; the ranks' outputs are added up.
    NORM = "norm"  # A norm over all heads: its weight is divided, the ranks' squares are added up.


_ATTENTION = {
    "self_attn.q_proj": Style.COLUMNS,
    "self_attn.k_proj": Style.COLUMNS,
    "self_attn.v_proj": Style.COLUMNS,
    "self_attn.o_proj": Style.ROWS,
}
_MLP = {
    "mlp.gate_proj": Style.COLUMNS,
    "mlp.up_proj": Style.COLUMNS,
    "mlp.down_proj": Style.ROWS,
}
_LLAMA = {**_ATTENTION, **_MLP}
_EXPERTS = {
    "mlp.experts.gate_up_proj": Style.PAIR,
    "mlp.experts.down_proj": Style.ROWS,
    "mlp.experts": Style.SUM,
}
_NORMS_OF_ALL_HEADS = {"self_attn.q_norm": Style.NORM, "self_attn.k_norm": Style.NORM}
_JOINED_MLP = {"mlp.gate_up_proj": Style.PAIR, "mlp.down_proj": Style.ROWS}

# The divided modules of a decoder layer, by their names in it. In some places, transformers gathers
# the ranks' results, so that each rank continues with the whole. Here each rank continues with its
# own part: each section of a joined tensor (Phi-3, GLM) is cut, and norms over all heads (OLMo 2,
# OLMo 3) add up their squares. GPT-NeoX has no plan here, because transformers' module computes the
# width of a head from the number of heads, which is smaller on a rank.
PLANS: dict[str, Mapping[str, Style]] = {
    **dict.fromkeys(
        (
            *("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"),
            *("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GraniteForCausalLM"),
            *("SmolLM3ForCausalLM", "MinistralForCausalLM", "Ministral3ForCausalLM"),
            *("OlmoForCausalLM", "Cohere2ForCausalLM", "Exaone4ForCausalLM"),
            *("Ernie4_5ForCausalLM", "SeedOssForCausalLM"),
        ),
        _LLAMA,
    ),
    "Qwen3MoeForCausalLM": {**_LLAMA, **_EXPERTS},
    "Qwen2MoeForCausalLM": {**_LLAMA, **_EXPERTS},
    "MixtralForCausalLM": {**_ATTENTION, **_EXPERTS},
    "Phi3ForCausalLM": {
        "self_attn.qkv_proj": Style.QKV,
        "self_attn.o_proj": Style.ROWS,
        **_JOINED_MLP,
    },
    "Olmo2ForCausalLM": {**_LLAMA, **_NORMS_OF_ALL_HEADS},
    "Olmo3ForCausalLM": {**_LLAMA, **_NORMS_OF_ALL_HEADS},
    "GlmForCausalLM": {**_ATTENTION, **_JOINED_MLP},
    "Glm4ForCausalLM": {**_ATTENTION, **_JOINED_MLP},
    # Cohere's norms of queries and keys have weights [heads, head_dim].
    "CohereForCausalLM": {
        **_LLAMA,
        "self_attn.q_norm": Style.COLUMNS,
        "self_attn.k_norm": Style.COLUMNS,
    },
    "PhiForCausalLM": {
        "self_attn.q_proj": Style.COLUMNS,
        "self_attn.k_proj": Style.COLUMNS,
        "self_attn.v_proj": Style.COLUMNS,
        "self_attn.dense": Style.ROWS,
        "mlp.fc1": Style.COLUMNS,
        "mlp.fc2": Style.ROWS,
    },
    "Starcoder2ForCausalLM": {
        **_ATTENTION,
        "mlp.c_fc": Style.COLUMNS,
        "mlp.c_proj": Style.ROWS,
    },
}
IN_LAYER = re.compile(r".*\blayers\.\d+\.(?P<module>.+?)(\.(weight|bias))?")
ONE_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<part>\w+)")
EXPERT_PARTS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}


def style_of(name: str, architecture: str) -> Style | None:
    """Return how a module, a parameter or a stored tensor is divided, by its name; None if it is
    not divided. A single expert's tensor is divided like the tensor of all experts."""
    match = IN_LAYER.fullmatch(name)
    if match is None:
        return None
    module = match["module"]
    expert = ONE_EXPERT.fullmatch(module)
    if expert is not None:
        module = f"{expert['experts']}.{EXPERT_PARTS.get(expert['part'], '')}"
    return PLANS.get(architecture, {}).get(module)


def is_one_expert(name: str) -> bool:
    """Return whether a stored tensor belongs to a single expert of a mixture."""
    return ONE_EXPERT.search(name) is not None
