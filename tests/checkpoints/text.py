"""Writes a random-weight checkpoint of any transformers text architecture and shape.

    python -m tests.checkpoints.text --arch qwen2 --preset tiny --out DIR
    python -m tests.checkpoints.text --arch llama --preset s135 --dtype bfloat16 --out DIR
    python -m tests.checkpoints.text --arch mistral --layers 4 --set sliding_window=64 --out DIR

Rule 1: the same arguments write the same weights; all randomness comes from ``--seed``. Rule 2: the
weights are random but not degenerate, so that greedy decoding has few near-ties and every part of
the model matters. Attention scores spread by about 2.5, each layer adds more to the residual than
the token's embedding, and the last norm is scaled so that logits spread by `LOGIT_STD`.

The tokenizer is a byte-level BPE trained on the text below (0.1 s). Ids that it does not learn are
made-up words, so that every id of a large vocabulary decodes to some text.
"""

import argparse
import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

EOS = "<|end|>"
# With 512 entries and this spread, the two best logits are within 1e-3 of each other at about 0.1 %
# of positions (measured over the parity suite).
LOGIT_STD = 3.0
TOKENIZER_TEXT = """
The quick brown fox jumps over the lazy dog while seven wizards watch from the hill.
A model reads a few words, and then it writes one more word, and then it reads that word too.
def add(a, b): return a + b
for i in range(10): print(i, i * i, f"{i:03d}")
{"name": "Ada", "born": 1815, "languages": ["English", "French"], "score": 9.75}
Once upon a time there was a small boat. The boat was red, and it sailed across the lake at night.
"Where are you going?" asked the heron. "To the other side," said the boat, "where the lamps are."
Warum ist der Himmel blau? Pourquoi pas? ¿Qué hora es? Это хорошо. 你好，世界。 こんにちは。 🙂🚀
0 1 2 3 4 5 6 7 8 9 10 11 12 100 1000 2024 3.14159 2.71828 -1 +7 50% $20 #tag @name a_b c-d e/f
"""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's size, by the names that most configs use."""

    layers: int = 3
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 128
    vocab: int = 512
    max_len: int = 1024
    tied: bool = True

    @property
    def head_dim(self) -> int:
        """The width of an attention head."""
        return self.hidden // self.heads


PRESETS = {
    "tiny": Shape(),
    # The two shapes that the benches compare.
    "s135": Shape(30, 576, 9, 3, 1536, 49152, 2048),
    "q05": Shape(24, 896, 14, 2, 4864, 151936, 2048),
}

# Further fields of an architecture's config. Windows are shorter than the test prompts, and caps
# are near the spread of the numbers that they cap; otherwise they would change no output.
EXTRA: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 24},
    "phi3": {"sliding_window": 24},
    "starcoder2": {"sliding_window": 24},
    "gemma2": {
        "sliding_window": 24, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {
        "sliding_window": 24, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "granite": {
        "attention_multiplier": 0.2, "embedding_multiplier": 6.0, "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
    },
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "swiglu_limit": 1.0,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 256,
        },
    },
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "ministral": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 128,
        },
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 96,
    },
    "olmo": {"clip_qkv": 2.5},
    "olmo3": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": {
        "sliding_window": 24, "logit_scale": 0.5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "exaone4": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "seed_oss": {"attention_out_bias": True},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "shared_expert_intermediate_size": 96,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 32,
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 128,
        "attention_multiplier": 0.2, "embedding_multiplier": 6.0, "residual_multiplier": 0.5,
        "logits_scaling": 4.0, "position_embedding_type": "rope",
    },
    "bamba": {
        "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
        "mamba_chunk_size": 32,
    },
    "falcon_h1": {
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16,
        "mamba_chunk_size": 32, "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7],
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False,
    },
}  # fmt: skip


def make(
    out: Path | str,
    arch: str = "llama",
    shape: Shape = PRESETS["tiny"],
    *,
    seed: int = 0,
    dtype: str = "float32",
    extra: dict[str, Any] | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Write the checkpoint and its tokenizer into ``out`` and return the path.

    ``arch`` is transformers' model type (``llama``, ``gemma3_text``). ``extra`` overrides fields of
    the config.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory = Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    config = make_config(arch, shape, extra or {})
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    fill(model, torch.Generator().manual_seed(seed))
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    write_tokenizer(directory, shape.vocab)
    return directory


def make_config(arch: str, shape: Shape, extra: dict[str, Any]) -> Any:
    """Return transformers' config of the architecture in this shape."""
    from transformers import AutoConfig

    fields: dict[str, Any] = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_len,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    if arch == "gpt_neox":
        for name in ("head_dim", "num_key_value_heads"):
            del fields[name]
    if arch in ("gpt2", "opt"):
        for name in ("head_dim", "num_key_value_heads", "intermediate_size"):
            del fields[name]
    if arch == "opt":
        fields |= {"ffn_dim": shape.mlp, "word_embed_proj_dim": shape.hidden}
    fields |= {key: value for key, value in EXTRA.get(arch, {}).items() if key not in fields}
    if len(fields.get("layer_types", ())) not in (0, shape.layers):
        del fields["layer_types"]
    return AutoConfig.for_model(arch, **copy.deepcopy(fields | extra))


def fill(model: Any, generator: torch.Generator) -> None:
    """Fill the model with random weights by Rule 2."""
    import torch

    embedded = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    # GPT-2's Conv1D and GPT-OSS' experts store their weights transposed: inputs first.
    flipped = {
        id(parameter)
        for module in model.modules()
        if type(module).__name__ in ("Conv1D", "GptOssExperts")
        for parameter in module.parameters()
    }
    scale = _embedding_scale(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embedded:
                parameter.copy_(noise * (0.1 / scale))  # so that layers add more (Rule 2)
            elif name.endswith("sinks"):
                parameter.copy_(1.0 + 1.5 * noise)  # sinks near the best scores of a few keys
            elif parameter.dim() == 1 or name.endswith("_norm.weight"):  # Cohere: [heads, dim]
                # Norm weights near their initial value (1, or 0 if the model adds the 1).
                start = parameter.mean().round() if "bias" not in name else 0.0
                parameter.copy_(start + 0.1 * noise)
            elif name.endswith("_proj_bias"):  # biases of experts, [experts, outputs]
                parameter.copy_(0.3 * noise)
            else:
                inputs = parameter.shape[-2 if id(parameter) in flipped else -1]
                parameter.copy_(noise * _gain(name) / inputs**0.5)
        _scale_logits(model, generator)


def _gain(name: str) -> float:
    """Return by which factor a projection's random weights are larger than those that keep the
    variance of its input."""
    if any(part in name for part in ("q_proj", "k_proj", "c_attn", "qkv_proj")):
        return 1.6
    return 2.0 if name.endswith(("mlp.gate.weight", "router.weight")) else 1.0


def _embedding_scale(model: Any) -> float:
    """Return the factor by which the model multiplies embeddings (Gemma: the square root of the
    width; Granite: a field)."""
    config = model.config
    if config.model_type.startswith("gemma"):
        return float(config.hidden_size**0.5)
    return float(getattr(config, "embedding_multiplier", 1.0))


def _scale_logits(model: Any, generator: torch.Generator) -> None:
    """Scale the last norm so that the logits of random tokens spread by `LOGIT_STD`."""
    import torch

    tokens = torch.randint(0, model.config.vocab_size, (1, 24), generator=generator)
    last = (
        "model.norm",
        "transformer.ln_f",
        "final_layer_norm",
        "model.final_layernorm",
        "model.embedding_norm",
    )
    norms = [module for name, module in model.named_modules() if name.endswith(last)]
    if not norms:
        return
    # OLMo's norms have no weights, so its output head is scaled.
    weight = getattr(norms[-1], "weight", model.get_output_embeddings().weight)
    adds_one = model.config.model_type.startswith(("gemma", "qwen3_next", "qwen3_5"))
    offset = 1.0 if adds_one else 0.0
    for _ in range(3):  # repeated, as a cap on the logits makes them grow less than the factor
        factor = LOGIT_STD / model.eval()(tokens, use_cache=False).logits.std()
        weight.copy_((weight + offset) * factor - offset)


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json: a byte-level BPE with ``vocab_size``
    entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 512),
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_TEXT.splitlines(), trainer)
    written = json.loads(tokenizer.to_str())
    vocab = written["model"]["vocab"]
    for index in range(len(vocab), vocab_size):
        vocab[f"Ġw{index}"] = index
    (directory / "tokenizer.json").write_text(json.dumps(written, ensure_ascii=False), "utf-8")
    config = {"eos_token": EOS, "model_max_length": 1 << 20, "chat_template": CHAT_TEMPLATE,
              "tokenizer_class": "PreTrainedTokenizerFast"}  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.checkpoints.text", description="Write a random checkpoint."
    )
    parser.add_argument("--arch", default="llama", help="transformers' model type (llama, gpt2)")
    parser.add_argument("--preset", default="tiny", choices=sorted(PRESETS))
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-shard-size", default="5GB")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", dest="fields",
                        help="a field of the config, as often as needed")  # fmt: skip
    for name in ("layers", "hidden", "heads", "kv-heads", "mlp", "vocab", "max-len"):
        parser.add_argument(f"--{name}", type=int)
    given = parser.parse_args(arguments)
    sizes = {name: value for name in ("layers", "hidden", "heads", "kv_heads", "mlp", "vocab",
             "max_len") if (value := getattr(given, name)) is not None}  # fmt: skip
    shape = replace(PRESETS[given.preset], **sizes)
    extra = dict(field.split("=", 1) for field in given.fields)
    extra = {name: json.loads(value) for name, value in extra.items()}
    make(given.out, given.arch, shape, seed=given.seed, dtype=given.dtype, extra=extra,
         max_shard_size=given.max_shard_size)  # fmt: skip
    print(f"wrote {given.arch} {shape} to {given.out}")


if __name__ == "__main__":
    main()
