"""Converts a checkpoint in bfloat16 or float32 to a GGUF file for llama.cpp, with the same weights
bit for bit.

    PYTHON -m tools.lab.peers.gguf_file CHECKPOINT FILE     (in llama.cpp's environment)

It supports the architectures of the benches with tied embeddings: Llama, Qwen2, Qwen3-MoE and LFM2.
Norms, biases, routers and the kernels of convolutions are stored as float32, as by llama.cpp's own
converter.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# GGUF's names of the tensors in a layer. Source: llama.cpp's converter (gguf.TensorNameMap).
IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    # Qwen3-MoE
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_proj.weight": "ffn_gate_exps.weight",
    "mlp.experts.up_proj.weight": "ffn_up_exps.weight",
    "mlp.experts.down_proj.weight": "ffn_down_exps.weight",
    # LFM2
    "operator_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "self_attn.q_layernorm.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.weight": "attn_k_norm.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.conv.weight": "shortconv.conv.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
}
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
}
NAMES = {"llama": "llama", "qwen2": "qwen2", "qwen3_moe": "qwen3moe", "lfm2": "lfm2"}
IN_FLOAT32 = ("ffn_gate_inp.weight", "shortconv.conv.weight")
STORED = {"BF16": np.uint16, "F32": np.float32}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)(\..+)")


def write(checkpoint: Path, file: Path) -> None:
    """Write ``file`` from the checkpoint's directory."""
    config = json.loads((checkpoint / "config.json").read_text())
    arch = config["model_type"]
    if arch not in NAMES or not config["tie_word_embeddings"]:
        raise SystemExit(f"this converter does not support {arch} with these embeddings")
    writer = gguf.GGUFWriter(str(file), NAMES[arch])
    _describe(writer, config)
    _add_vocabulary(writer, checkpoint)
    for name, bits in _joined(_read(checkpoint / "model.safetensors")).items():
        if name == "lm_head.weight":
            continue  # tied
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        rotated = next((n for part, n in heads.items() if f"{part}.weight" in name), None)
        if arch == "llama" and rotated:
            bits = _interleaved(bits, rotated)
        _add(writer, _named(name), bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name(f"random {config['model_type']}")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    kv_heads = config["num_key_value_heads"]
    if "conv_L_cache" in config:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        kv_heads = [0 if kind == "conv" else kv_heads for kind in config["layer_types"]]
    writer.add_head_count_kv(kv_heads)
    if "moe_intermediate_size" in config:
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _add_vocabulary(writer: Any, checkpoint: Path) -> None:
    model = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))["model"]
    by_id = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(by_id) - 1)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(by_id)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _read(file: Path) -> dict[str, np.ndarray]:
    """Return every tensor as a mapped array: the bits of bfloat16 as uint16, or float32. Source:
    the safetensors format."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    tensors = {}
    for name, what in header.items():
        if what["dtype"] not in STORED:
            raise SystemExit(f"{name} is stored as {what['dtype']}; use {' or '.join(STORED)}")
        start = 8 + size + what["data_offsets"][0]
        kind = STORED[what["dtype"]]
        tensors[name] = np.memmap(file, kind, "r", start, tuple(what["shape"]))
    return tensors


def _joined(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with those of a layer's experts in one, in the order of the experts."""
    joined: dict[str, Any] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, bits in tensors.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            joined[name] = bits
        else:
            experts.setdefault(match[1] + match[3], {})[int(match[2])] = bits
    for name, parts in experts.items():
        joined[name] = np.stack([parts[index] for index in range(len(parts))])
    return joined


def _interleaved(bits: np.ndarray, heads: int) -> np.ndarray:
    """Order rows as llama.cpp's rotary embedding for Llama, which pairs neighbours, not halves."""
    rows, columns = bits.shape
    halves = bits.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def _named(name: str) -> str:
    if name in OUTSIDE:
        return OUTSIDE[name]
    match = LAYER.fullmatch(name)
    if match is None or match[2] not in IN_LAYER:
        raise SystemExit(f"the tensor {name} has no place in a GGUF file")
    return f"blk.{match[1]}.{IN_LAYER[match[2]]}"


def _add(writer: Any, name: str, bits: np.ndarray) -> None:
    if bits.dtype == np.float32:
        writer.add_tensor(name, np.ascontiguousarray(bits))
        return
    if name.endswith("shortconv.conv.weight"):
        bits = bits[:, 0]  # [channels, 1, width]
    if bits.ndim == 1 or name.endswith(IN_FLOAT32):
        writer.add_tensor(name, (bits.astype(np.uint32) << 16).view(np.float32))
        return
    kind = gguf.GGMLQuantizationType.BF16
    writer.add_tensor(name, np.ascontiguousarray(bits).view(np.uint8), raw_dtype=kind)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
