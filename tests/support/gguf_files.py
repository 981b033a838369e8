"""Writes GGUF files of tiny checkpoints, by the published layout and llama.cpp's own conversions.

Nothing here uses what it tests. Source: ggml's docs/gguf.md, llama.cpp's convert_hf_to_gguf.py.
"""

import json
import re
import struct
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

ALIGNMENT = 32
F32, F16, Q4_0, Q8_0, Q4_K, Q6_K, IQ4_NL, IQ4_XS = 0, 1, 2, 8, 12, 14, 20, 23
Q2_K, Q3_K, BF16, MXFP4 = 10, 11, 30, 39
# The places of a block's numbers of half precision.
HALVES = {
    2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,), Q2_K: (80, 82), Q3_K: (108,), 12: (0, 2),
    13: (0, 2), 14: (208,), IQ4_NL: (0,), IQ4_XS: (0,), MXFP4: (),
}  # fmt: skip
# llama.cpp's names of a layer's modules.
MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "operator_norm": "attn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
}
ARCHS = {
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
}  # llama.cpp's names of transformers' model types, where they differ
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "shortconv.l_cache": "conv_L_cache",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
YARN = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}


def quantise_q8_0(rows: np.ndarray) -> bytes:
    """Return the blocks of Q8_0: a scale of half precision, and 32 numbers."""
    blocks = rows.astype(np.float32).reshape(-1, 32)
    scale = np.abs(blocks).max(1) / 127
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    numbers = np.rint(blocks * inverse[:, None]).astype(np.int8)
    return np.hstack(
        [scale.astype("<f2")[:, None].view(np.uint8), numbers.view(np.uint8)]
    ).tobytes()


def quantise_q4_0(rows: np.ndarray) -> bytes:
    """Return the blocks of Q4_0: a scale, and 32 codes. Inputs 0 to 15 are the low nibbles."""
    blocks = rows.astype(np.float32).reshape(-1, 32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)[:, 0]
    scale = largest / -8
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    codes = np.clip(np.floor(blocks * inverse[:, None] + 8.5), 0, 15).astype(np.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    return np.hstack([scale.astype("<f2")[:, None].view(np.uint8), packed]).tobytes()


def quantise_q4_k(rows: np.ndarray) -> bytes:
    """Return the blocks of Q4_K: two scales for 256 numbers; for each 32 a factor of six bits of
    either, in twelve bytes; and codes, of which each 64 share 32 bytes."""
    groups = rows.astype(np.float32).reshape(-1, 8, 32)
    lowest = np.minimum(groups.min(2), 0)
    steps = (groups.max(2) - lowest) / 15
    scale, minimum = ((np.maximum(one.max(1), 1e-8) / 63).astype("<f2") for one in (steps, -lowest))
    factors = np.rint(steps / scale[:, None].astype(np.float32)).clip(0, 63).astype(np.uint8)
    minima = np.rint(-lowest / minimum[:, None].astype(np.float32)).clip(0, 63).astype(np.uint8)
    own = scale[:, None].astype(np.float32) * factors
    offsets = minimum[:, None].astype(np.float32) * minima
    inverse = np.divide(1, own, out=np.zeros_like(own), where=own > 0)
    codes = np.rint((groups + offsets[..., None]) * inverse[..., None]).clip(0, 15).astype(np.uint8)
    packed_factors = np.hstack(
        [
            factors[:, :4] | factors[:, 4:] >> 4 << 6,
            minima[:, :4] | minima[:, 4:] >> 4 << 6,
            factors[:, 4:] & 15 | (minima[:, 4:] & 15) << 4,
        ]
    )
    pairs = codes.reshape(-1, 4, 2, 32)
    packed = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    ends = np.stack([scale, minimum], 1).view(np.uint8)
    return np.hstack([ends, packed_factors, packed]).tobytes()


def quantise_q6_k(rows: np.ndarray) -> bytes:
    """Return the blocks of Q6_K: the low four bits of 256 codes, their high two, a factor of eight
    bits for each 16, and a scale."""
    groups = rows.astype(np.float32).reshape(-1, 16, 16)
    steps = np.abs(groups).max(2) / 31
    scale = (np.maximum(steps.max(1), 1e-8) / 127).astype("<f2")
    factors = np.rint(steps / scale[:, None].astype(np.float32)).clip(0, 127).astype(np.int8)
    own = scale[:, None].astype(np.float32) * factors
    inverse = np.divide(1, own, out=np.zeros_like(own), where=own > 0)
    codes = (np.rint(groups * inverse[..., None]).clip(-32, 31) + 32).astype(np.uint8)
    quarters = codes.reshape(-1, 2, 4, 32)  # quarters of each half of a block
    low = (quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = np.zeros((len(codes), 2, 32), np.uint8)
    for index in range(4):
        high |= quarters[:, :, index] >> 4 << 2 * index
    return np.hstack(
        [low, high.reshape(-1, 64), factors.view(np.uint8), scale[:, None].view(np.uint8)]
    ).tobytes()


UNEVEN = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


def _nearest(groups: np.ndarray, scales: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the codes of the table's numbers that are nearest to groups [..., inputs], which have
    a scale each."""
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    wanted = (groups * inverse[..., None])[..., None]
    return np.abs(wanted - table).argmin(-1).astype(np.uint8)


def _halves_of(codes: np.ndarray) -> np.ndarray:
    """Return bytes of the codes of the first half of the last axis, below those of the other."""
    low, high = np.split(codes, 2, -1)
    return low | high << 4


def quantise_iq4_nl(rows: np.ndarray) -> bytes:
    """Return the blocks of IQ4_NL: those of Q4_0, with codes for `UNEVEN`."""
    blocks = rows.astype(np.float32).reshape(-1, 32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)[:, 0]
    scale = (largest / UNEVEN[0]).astype("<f2")
    codes = _nearest(blocks, scale.astype(np.float32), UNEVEN)
    return np.hstack([scale[:, None].view(np.uint8), _halves_of(codes)]).tobytes()


def quantise_iq4_xs(rows: np.ndarray) -> bytes:
    """Return the blocks of IQ4_XS: a scale; for each of eight groups a factor of six bits, less 32,
    of which the high two are first; and the codes of `UNEVEN`."""
    groups = rows.astype(np.float32).reshape(-1, 8, 32)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(2)[..., None], 2)[..., 0]
    steps = largest / UNEVEN[0]
    scale = (np.maximum(np.abs(steps).max(1), 1e-8) / 31).astype("<f2")
    wide = scale[:, None].astype(np.float32)
    factors = np.rint(steps / wide).clip(-32, 31)
    codes = _nearest(groups, wide * factors, UNEVEN)
    stored = (factors + 32).astype(np.uint8)
    high = np.zeros((len(stored), 2), np.uint8)
    for index in range(8):
        high[:, index // 4] |= stored[:, index] >> 4 << 2 * (index % 4)
    low = stored[:, ::2] & 15 | (stored[:, 1::2] & 15) << 4
    packed = _halves_of(codes).reshape(-1, 128)
    return np.hstack([scale[:, None].view(np.uint8), high, low, packed]).tobytes()


def _in_quarters(codes: np.ndarray) -> np.ndarray:
    """Return codes of two bits [blocks, 256] as bytes, each with one of each quarter of a half."""
    quarters = codes.reshape(-1, 2, 4, 32)
    packed = np.zeros((len(quarters), 2, 32), np.uint8)
    for index in range(4):
        packed |= quarters[:, :, index] << 2 * index
    return packed.reshape(-1, 64)


def quantise_q2_k(rows: np.ndarray) -> bytes:
    """Return the blocks of Q2_K: for each 16 numbers a byte with two factors; codes of two bits;
    and two scales."""
    groups = rows.astype(np.float32).reshape(-1, 16, 16)
    lowest = np.minimum(groups.min(2), 0)
    steps = (groups.max(2) - lowest) / 3
    scale, minimum = ((np.maximum(one.max(1), 1e-8) / 15).astype("<f2") for one in (steps, -lowest))
    factors = np.rint(steps / scale[:, None].astype(np.float32)).clip(0, 15).astype(np.uint8)
    minima = np.rint(-lowest / minimum[:, None].astype(np.float32)).clip(0, 15).astype(np.uint8)
    own = scale[:, None].astype(np.float32) * factors
    offsets = minimum[:, None].astype(np.float32) * minima
    inverse = np.divide(1, own, out=np.zeros_like(own), where=own > 0)
    codes = np.rint((groups + offsets[..., None]) * inverse[..., None]).clip(0, 3).astype(np.uint8)
    ends = np.stack([scale, minimum], 1).view(np.uint8)
    return np.hstack([factors | minima << 4, _in_quarters(codes), ends]).tobytes()


def quantise_q3_k(rows: np.ndarray) -> bytes:
    """Return the blocks of Q3_K: the third bits of 256 codes, their lower two, a factor of six bits
    for each 16, less 32, and a scale."""
    groups = rows.astype(np.float32).reshape(-1, 16, 16)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(2)[..., None], 2)[..., 0]
    scale = (np.maximum(np.abs(largest / -4).max(1), 1e-8) / 31).astype("<f2")
    wide = scale[:, None].astype(np.float32)
    factors = np.rint(largest / -4 / wide).clip(-32, 31)
    codes = _nearest(groups, wide * factors, np.arange(-4, 4)).reshape(-1, 8, 32)
    high = np.zeros((len(codes), 32), np.uint8)
    for index in range(8):
        high |= codes[:, index] >> 2 << index
    stored = (factors + 32).astype(np.uint8)
    packed_factors = np.hstack([stored[:, :8] & 15 | (stored[:, 8:] & 15) << 4,
                                np.zeros((len(stored), 4), np.uint8)])  # fmt: skip
    for index in range(4):
        packed_factors[:, 8:] |= stored[:, 4 * index : 4 * index + 4] >> 4 << 2 * index
    return np.hstack(
        [high, _in_quarters(codes & 3), packed_factors, scale[:, None].view(np.uint8)]
    ).tobytes()


DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])


def quantise_mxfp4(rows: np.ndarray) -> bytes:
    """Return the blocks of MXFP4: a power of two as a byte, and 32 codes for half of `DOUBLED`."""
    blocks = rows.astype(np.float32).reshape(-1, 32)
    power = np.frexp(np.abs(blocks).max(1))[1] - 3  # the largest number, 6, has the exponent 2
    codes = _nearest(blocks, np.ldexp(np.float32(0.5), power), DOUBLED)
    return np.hstack([(power + 127).astype(np.uint8)[:, None], _halves_of(codes)]).tobytes()


QUANTISE = {
    Q4_0: quantise_q4_0, Q8_0: quantise_q8_0, Q4_K: quantise_q4_k, Q6_K: quantise_q6_k,
    IQ4_NL: quantise_iq4_nl, IQ4_XS: quantise_iq4_xs, MXFP4: quantise_mxfp4,
    Q2_K: quantise_q2_k, Q3_K: quantise_q3_k,
}  # fmt: skip
PLAIN = ("ffn_gate_inp.weight", "shortconv.conv.weight")  # matrices that are F32 in any file
# The types of embeddings, heads, and the tensors in FINER, by the file's type. In a file of another
# type of blocks, only embeddings and heads have a type of their own, Q8_0.
ENDS = {Q2_K: Q4_K, Q3_K: Q6_K, Q4_K: Q6_K, IQ4_XS: Q6_K}
FINER = ("attn_v.weight", "ffn_down.weight")


def write_model(
    checkpoint: Path,
    path: Path,
    kind: int = F32,
    *,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    parts: tuple[int, ...] = (),
    types: dict[str, int] | None = None,
) -> Path:
    """Write the checkpoint as one GGUF file. Matrices have the type ``kind``; if that is a type of
    blocks, embedding and head have the type of `ENDS`. ``metadata`` and ``tensors`` are added.
    ``parts`` are the numbers of tensors in each part but the last: the file is then divided, and
    the first part's path returned. ``types`` are the types of tensors by the ends of their
    names."""
    from safetensors.numpy import load_file  # not in llama.cpp's environment

    config = json.loads((checkpoint / "config.json").read_text())
    arch = ARCHS.get(config["model_type"], config["model_type"])
    told: dict[str, Any] = {"general.architecture": arch}
    for key, name in FIELDS.items():
        if config.get(name) is not None:
            told[f"{arch}.{key}"] = config[name]
    if "norm_eps" in config:  # LFM2
        told[f"{arch}.attention.layer_norm_rms_epsilon"] = config["norm_eps"]
        heads = {"conv": 0, "full_attention": config["num_key_value_heads"]}
        told[f"{arch}.attention.head_count_kv"] = [heads[one] for one in config["layer_types"]]
    if "num_experts" in config:
        told[f"{arch}.expert_count"] = config["num_experts"]
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    told[f"{arch}.rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        told[f"{arch}.rope.scaling.type"] = "yarn"
        told |= {f"{arch}.{key}": rope[name] for key, name in YARN.items() if name in rope}
    told |= _vocabulary(checkpoint, config) | (metadata or {})
    stored: dict[str, tuple[int, tuple[int, ...], bytes]] = {}
    read = _gpt_oss if config["model_type"] == "gpt_oss" else _with_joined_experts
    for name, value in read(load_file(checkpoint / "model.safetensors")).items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        own, array = _converted(name, value, config)
        is_end = own in ("token_embd.weight", "output.weight")
        is_finer = is_end or (kind in ENDS and own.endswith(FINER))
        finer = ENDS.get(kind, Q8_0) if kind in QUANTISE else kind
        is_plain = array.ndim == 1 or own.endswith((".bias", *PLAIN))
        own_kind = F32 if is_plain else finer if is_finer else kind
        own_kind = next((k for end, k in (types or {}).items() if own.endswith(end)), own_kind)
        stored[own] = (own_kind, array.shape, _bytes(array, own_kind))
    for name, value in (tensors or {}).items():
        stored[name] = (F32, value.shape, _bytes(value, F32))
    if parts:
        return write_parts(path, told, stored, parts)
    write_file(path, told, stored)
    return path


def write_parts(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[int, tuple[int, ...], bytes]],
    parts: tuple[int, ...],
) -> Path:
    """Write a model as llama-gguf-split divides it, and return the first part's path. All parts
    have their numbers, and only the first has the metadata."""
    names, count = iter(tensors), len(parts) + 1
    for number, size in enumerate((*parts, len(tensors) - sum(parts))):
        told = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        own = {name: tensors[name] for name in islice(names, size)}
        write_file(part_path(path, number, count), told if number else metadata | told, own)
    return part_path(path, 0, count)


def part_path(path: Path, number: int, count: int) -> Path:
    """Return the path of a part, counted from 0."""
    return path.with_name(f"{path.stem}-{number + 1:05}-of-{count:05}.gguf")


def write_file(
    path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...], bytes]]
) -> None:
    """Write metadata, and tensors as (type, shape, bytes), in GGUF's version 3."""
    with path.open("wb") as file:
        sizes = {name: (kind, shape, len(data)) for name, (kind, shape, data) in tensors.items()}
        write_head(file, metadata, sizes)
        for _, _, data in tensors.values():
            file.write(data + b"\0" * (-len(data) % ALIGNMENT))


def write_head(
    file: BinaryIO,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[int, tuple[int, ...], int]],
) -> None:
    """Write all that precedes the first tensor's data; tensors are (type, shape, bytes)."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        head += [_text(key), _value(value)]
    offset = 0
    for name, (kind, shape, size) in tensors.items():
        head += [_text(name), struct.pack("<I", len(shape))]
        head += [struct.pack("<Q", length) for length in reversed(shape)]
        head.append(struct.pack("<IQ", kind, offset))
        offset += size + -size % ALIGNMENT
    start = b"".join(head)
    file.write(start + b"\0" * (-len(start) % ALIGNMENT))


def _with_joined_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with the weights of a layer's experts in one, [experts, …]."""
    joined: dict[str, Any] = {}
    for name, value in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name)
        if match is None:
            joined[name] = value
        else:
            joined.setdefault(match[1] + match[3], {})[int(match[2])] = value
    return {
        name: np.stack([value[i] for i in range(len(value))]) if isinstance(value, dict) else value
        for name, value in joined.items()
    }


def _gpt_oss(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with gates and ups apart, and outputs before inputs."""
    found: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if ".experts." not in name:
            found[name] = value
            continue
        base, part = name.rsplit(".", 1)
        kind = "bias" if part.endswith("_bias") else "weight"
        own = value if kind == "bias" else value.swapaxes(1, 2)
        part = part.removesuffix("_bias")
        parts = {part: own}
        if part == "gate_up_proj":
            parts = {"gate_proj": own[:, ::2], "up_proj": own[:, 1::2]}
        found |= {f"{base}.{one}.{kind}": array for one, array in parts.items()}
    return found


def _converted(name: str, value: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    """Return llama.cpp's name and numbers of a tensor."""
    kind = config["model_type"]
    array = value.astype(np.float32)
    if kind.startswith("gemma") and "norm" in name:
        array = array + 1
    if name in OUTSIDE:
        return OUTSIDE[name], array
    _, _, layer, rest = name.split(".", 3)
    module, _, attribute = rest.rpartition(".")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    count = heads.get(module.rpartition(".")[2])
    if module == "self_attn" and attribute == "sinks":
        return f"blk.{layer}.attn_sinks.weight", array
    if count and kind in ("llama", "granite", "smollm3", "ministral3"):
        halves = array.reshape(count, 2, len(array) // count // 2, *array.shape[1:])
        array = halves.swapaxes(1, 2).reshape(array.shape)
    if module == "conv.conv" and attribute == "weight":
        array = array[:, 0]
    if module == "mlp.shared_expert_gate":
        array = array[0]
    if module == "post_attention_layernorm":
        is_own = kind in ("gemma2", "gemma3_text", "olmo2", "gpt_oss")
        module = "post_attention_norm" if is_own else "ffn_norm"
    return f"blk.{layer}.{MODULES.get(module, module)}.{attribute}", array


def _vocabulary(checkpoint: Path, config: dict[str, Any]) -> dict[str, Any]:
    model = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))["model"]
    by_id = sorted(model["vocab"], key=model["vocab"].__getitem__)
    by_id += [f"[PAD{i}]" for i in range(len(by_id), config["vocab_size"])]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": by_id,
        "tokenizer.ggml.token_type": [3] + [1] * (len(by_id) - 1),
        "tokenizer.ggml.merges": [
            pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]
        ],
        "tokenizer.ggml.eos_token_id": 0,
    }


def _bytes(array: np.ndarray, kind: int) -> bytes:
    if kind in QUANTISE:
        return QUANTISE[kind](array)
    if kind == BF16:  # rounded to nearest
        wide = np.ascontiguousarray(array, "<f4").view("<u4")
        return (wide + 0x7FFF + (wide >> 16 & 1) >> 16).astype("<u2").tobytes()
    return np.ascontiguousarray(array, "<f2" if kind == F16 else "<f4").tobytes()


def _text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Return a value of the metadata with its type before it."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if type(value[0]) is int:  # int32, as llama.cpp writes them and its tokenizer reads them
        return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    items = [_value(item) for item in value]
    return (
        struct.pack("<I", 9)
        + items[0][:4]
        + struct.pack("<Q", len(items))
        + b"".join(item[4:] for item in items)
    )
