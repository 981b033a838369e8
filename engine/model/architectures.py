"""What is served and what is refused, by name, from the config alone.

Rule 1: an architecture is in `SERVED` only if the parity suite has a row for it.
Rule 2: a refusal is a `Refusal` of one sentence that names what stands in the way; nothing
that could change the output is skipped in silence.

What cannot be seen in a config (keywords that a layer hands to its attention) is checked on the
loaded model by `engine.model.probe`. This file imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.model.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Architecture:
    """One served class of transformers: its name, where it lives, the name for people, and its
    config class."""

    name: str
    module: str
    label: str
    config: str


SERVED: dict[str, Architecture] = {
    entry.name: entry
    for entry in (
        Architecture("LlamaForCausalLM", "llama", "Llama", "LlamaConfig"),
        Architecture("Qwen2ForCausalLM", "qwen2", "Qwen2", "Qwen2Config"),
        Architecture("Qwen3ForCausalLM", "qwen3", "Qwen3", "Qwen3Config"),
        Architecture("Qwen3MoeForCausalLM", "qwen3_moe", "Qwen3-MoE", "Qwen3MoeConfig"),
        Architecture("MistralForCausalLM", "mistral", "Mistral", "MistralConfig"),
        Architecture("Phi3ForCausalLM", "phi3", "Phi-3", "Phi3Config"),
        Architecture("GemmaForCausalLM", "gemma", "Gemma", "GemmaConfig"),
        Architecture("Gemma2ForCausalLM", "gemma2", "Gemma 2", "Gemma2Config"),
        Architecture("Gemma3ForCausalLM", "gemma3", "Gemma 3 (text)", "Gemma3TextConfig"),
        Architecture("Olmo2ForCausalLM", "olmo2", "OLMo 2", "Olmo2Config"),
        Architecture("GPT2LMHeadModel", "gpt2", "GPT-2", "GPT2Config"),
        Architecture("OPTForCausalLM", "opt", "OPT", "OPTConfig"),
        Architecture("GraniteForCausalLM", "granite", "Granite", "GraniteConfig"),
        Architecture("Starcoder2ForCausalLM", "starcoder2", "StarCoder2", "Starcoder2Config"),
    )
}

# Words in a model type that mean recurrent or state-space layers: they keep state that is not
# keys and values, which the paged cache cannot hold.
RECURRENT_TYPES = (
    "mamba", "rwkv", "recurrent_gemma", "jamba", "bamba", "zamba", "xlstm", "falcon_h1", "lfm2",
    "qwen3_next", "granitemoehybrid", "nemotron_h", "plamo2", "minimax", "kimi_linear",
)  # fmt: skip
RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "ssm", "hybrid")
# Models whose decoder layers do not hand the step's keywords to their attention (D11).
KEYWORDLESS_TYPES = ("stablelm",)
# Models whose attention needs a keyword that ours does not know, by the keyword.
KEYWORD_TYPES = {"gpt_oss": "s_aux"}
MULTIMODAL_KEYS = ("vision_config", "audio_config", "text_config", "image_token_id")
# Rotary kinds whose frequencies depend on nothing but the config. `dynamic` recomputes them from
# the longest position of the batch, so that one request would change another's output.
STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


def served_names() -> str:
    """The list that every refusal of an unknown architecture ends with."""
    return ", ".join(entry.label for entry in SERVED.values())


def find(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a parsed config.json.

    Raises:
        Refusal: it is not served; the sentence names it and says why.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    model_type = str(config.get("model_type", ""))
    _refuse_kinds(config, name or model_type or "unnamed", model_type)
    if not name:
        raise Refusal("its config.json names no architecture (the field 'architectures')")
    if name not in SERVED:
        raise Refusal(
            f"the architecture {name} is not served; these are, each tested token for token: "
            f"{served_names()}"
        )
    _refuse_fields(config, name)
    return SERVED[name]


def _refuse_kinds(config: Mapping[str, Any], name: str, model_type: str) -> None:
    """Whole families that are refused with their own reason, served or not."""
    if config.get("is_encoder_decoder"):
        raise Refusal(f"{name} is an encoder-decoder model; only decoder-only ones are served")
    if any(config.get(key) is not None for key in MULTIMODAL_KEYS):
        raise Refusal(f"{name} is a multimodal model; only text models are served")
    layer_types = config.get("layer_types") or config.get("layers_block_type") or ()
    layers = [kind for kind in layer_types if any(w in str(kind) for w in RECURRENT_LAYERS)]
    if layers or any(word in model_type for word in RECURRENT_TYPES):
        what = f" ({layers[0]})" if layers else ""
        raise Refusal(f"{name} has recurrent layers{what}, whose state the paged cache cannot hold")
    if model_type in KEYWORDLESS_TYPES:
        raise Refusal(f"{name} does not pass keywords on to its attention, which paging needs")
    if model_type in KEYWORD_TYPES:
        raise Refusal(
            f"{name} needs the attention keyword {KEYWORD_TYPES[model_type]!r}, which is not "
            "honoured here"
        )


def _refuse_fields(config: Mapping[str, Any], name: str) -> None:
    """Fields of a served architecture's config that would change the maths."""
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise Refusal(f"the checkpoint is quantised ({method or 'unknown method'}); it needs "
                          "plain float weights")  # fmt: skip
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        raise Refusal(f"this {name} attends in both directions; only causal ones are served")
    if config.get("add_cross_attention"):
        raise Refusal(f"this {name} has cross-attention; only decoder-only ones are served")


def context_limit(config: Any, requested: int | None) -> int:
    """Most tokens a sequence may have, prompt and output together.

    ``config`` is transformers' config object. It is the model's own limit, lowered to a longrope
    model's original length (beyond it, one long sequence would change the frequencies of all).

    Raises:
        Refusal: the rotary kind is not served, or ``requested`` is more than the limit.
    """
    limit = int(config.max_position_embeddings)
    why = "the model's max_position_embeddings"
    for rope in _rope_parameters(config):
        kind = str(rope.get("rope_type", "default"))
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings") or limit
            if int(original) < limit:
                limit, why = int(original), "the original length of its longrope embedding"
        elif kind not in STATIC_ROPE_TYPES:
            raise Refusal(
                f"its rotary embedding is of type {kind!r}, whose frequencies depend on the other "
                "sequences of the batch or which is untested"
            )
    if requested is None:
        return limit
    if requested > limit:
        raise Refusal(f"max_model_len {requested} is more than {why}, {limit}")
    return requested


def _rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary settings: one mapping, or one for each layer type (Gemma 3), or none."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope or "rope_theta" in rope:
        yield rope
        return
    for value in rope.values():
        if isinstance(value, dict):
            yield value


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps for one token: ``num_kv_heads`` keys and as many values, each of
    ``head_dim`` numbers."""

    num_kv_heads: int
    head_dim: int

    @property
    def numbers_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim


def layer_shapes(config: Any) -> tuple[LayerShape, ...]:
    """One shape for each layer, from the config; the probe holds it against the loaded model."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return (LayerShape(kv_heads, head_dim),) * int(config.num_hidden_layers)
