"""Writes GGUF files of published shapes with random blocks, in the mixes of types of llama.cpp's
quantiser, without a checkpoint or llama.cpp.

``q05`` has the shape of Qwen2-0.5B: a width of 896 is no multiple of 256, so that most of its
matrices have the types of `FALLBACK`, as llama.cpp stores them. ``q17`` and ``q4b`` have the shapes
of Qwen3-1.7B and Qwen3-4B. In all of them the embedding is also the head.

Blocks are random bytes with small scales, which load, decompress and multiply as a trained model's
do, and say nothing. The weights of a group are around zero, as a trained model's are: where a group
has an offset, it is that of its middle code. The vocabulary has as many tokens and merges as
Qwen's, of made-up words.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.gguf_files import (
    ALIGNMENT,
    F32,
    IQ4_NL,
    IQ4_XS,
    Q4_0,
    Q4_K,
    Q6_K,
    Q8_0,
    write_head,
)
from tools.lab.peers.environments import cache_folder

if TYPE_CHECKING:
    from pathlib import Path

    Tensor = tuple[str, int, tuple[int, ...]]

FORMAT = 2  # raised when the written files change
Q5_0, Q5_1, Q5_K = 6, 7, 13


@dataclass(frozen=True)
class Block:
    """A type of blocks: a block's inputs and bytes, where its scale of half precision is, and the
    scale's size, with which weights have a standard deviation of about 0.02. The half behind the
    scale is ``middle`` times as large, or random if ``middle`` is 0."""

    inputs: int
    num_bytes: int
    place: int
    scale: float
    middle: float = 0.0


BLOCKS = {
    Q4_0: Block(32, 18, 0, 4.3e-3),
    Q5_0: Block(32, 22, 0, 2.2e-3),
    Q5_1: Block(32, 24, 0, 2.2e-3, -15.5),
    Q8_0: Block(32, 34, 0, 2.7e-4),
    Q4_K: Block(256, 144, 0, 1.2e-4, 7.5),
    Q5_K: Block(256, 176, 0, 6.0e-5, 15.5),
    Q6_K: Block(256, 210, 208, 1.5e-5),
    IQ4_NL: Block(32, 18, 0, 2.8e-4),
    IQ4_XS: Block(256, 136, 0, 1.5e-5),
}
WITH_FACTORS = (Q4_K, Q5_K)  # their groups have factors of scale and offset, in bytes 4 to 15
# The types of rows that blocks of 256 do not divide. Source: llama.cpp's `tensor_type_fallback`.
FALLBACK = {Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0, IQ4_XS: IQ4_NL}
VOCAB, TOKENS = 151936, 151643
LONGEST = 14  # letters of a made-up token


@dataclass(frozen=True)
class Mix:
    """The types that llama.cpp's quantiser gives the tensors of a file, without an importance
    matrix. Source: its `llama_tensor_get_type_impl`.

    ``kind`` is the type of most matrices, and ``head`` that of the tied embedding. ``finer`` is the
    type of the value and down projections in half of the layers (`_has_more_bits`). With
    ``is_iq``, it is the type of all value projections that four or more query heads share, and of
    the down projections in the first eighth of the layers."""

    number: int  # of llama.cpp's file types, which a file's metadata names
    kind: int
    head: int = Q6_K
    finer: int | None = None
    is_iq: bool = False

    def type_of(self, module: str, layer: int, shape: GgufShape) -> int:
        """Return the type of a layer's matrix."""
        if self.finer is None or module not in ("attn_v", "ffn_down"):
            return self.kind
        if not self.is_iq:
            is_finer = _has_more_bits(layer, shape.layers)
        elif module == "attn_v":
            is_finer = shape.heads // shape.kv_heads >= 4
        else:
            is_finer = layer < shape.layers // 8
        return self.finer if is_finer else self.kind


MIXES = {
    "Q4_K_M": Mix(15, Q4_K, finer=Q6_K),
    "Q5_K_M": Mix(17, Q5_K, finer=Q6_K),
    "Q6_K": Mix(18, Q6_K),
    "IQ4_XS": Mix(30, IQ4_XS, finer=Q5_K, is_iq=True),
    "Q8_0": Mix(7, Q8_0, head=Q8_0),
    "Q4_0": Mix(2, Q4_0),
}


@dataclass(frozen=True)
class GgufShape:
    """The sizes of a model, by llama.cpp's names."""

    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    mlp: int
    has_bias: bool = False
    has_head_norms: bool = False

    def tensors(self, mix: Mix) -> list[Tensor]:
        """Return the name, the type and the shape of each tensor. The embedding is also the
        head."""
        found: list[Tensor] = [
            ("token_embd.weight", _fitting(mix.head, self.hidden), (VOCAB, self.hidden)),
            ("output_norm.weight", F32, (self.hidden,)),
        ]
        for index in range(self.layers):
            found += [(f"blk.{index}.{n}", kind, size) for n, kind, size in self._layer(index, mix)]
        return found

    def _layer(self, index: int, mix: Mix) -> list[Tensor]:
        queries, keys, hidden = self.heads * self.head, self.kv_heads * self.head, self.hidden
        matrices = {
            "attn_q": (queries, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, queries),
            "ffn_gate": (self.mlp, hidden),
            "ffn_up": (self.mlp, hidden),
            "ffn_down": (hidden, self.mlp),
        }
        found: list[Tensor] = [
            (f"{name}.weight", _fitting(mix.type_of(name, index, self), size[1]), size)
            for name, size in matrices.items()
        ]
        found += [(f"{name}.weight", F32, (hidden,)) for name in ("attn_norm", "ffn_norm")]
        if self.has_bias:
            sizes = {"attn_q": queries, "attn_k": keys, "attn_v": keys}
            found += [(f"{name}.bias", F32, (size,)) for name, size in sizes.items()]
        if self.has_head_norms:
            found += [(f"{n}.weight", F32, (self.head,)) for n in ("attn_q_norm", "attn_k_norm")]
        return found


def _has_more_bits(index: int, layers: int) -> bool:
    """Return whether a layer's value and down projections have more bits, as by llama.cpp's
    `use_more_bits`."""
    eighth = layers // 8
    return index < eighth or index >= 7 * layers // 8 or (index - eighth) % 3 == 2


def _fitting(kind: int, inputs: int) -> int:
    return FALLBACK[kind] if inputs % BLOCKS[kind].inputs else kind


SHAPES = {
    "q05": GgufShape("qwen2", 24, 896, 14, 2, 64, 4864, has_bias=True),
    "q17": GgufShape("qwen3", 28, 2048, 16, 8, 128, 6144, has_head_norms=True),
    "q4b": GgufShape("qwen3", 36, 2560, 32, 8, 128, 9728, has_head_norms=True),
}


def random_gguf(name: str, mix: str = "Q4_K_M") -> Path:
    """Return the file of a shape in a mix of types, and write it if it is missing."""
    file = cache_folder("triolet-bench") / f"{name}-random-{mix}-v{FORMAT}.gguf"
    if not file.exists():
        print(f"writing {file}", file=sys.stderr)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        write_random(partial, SHAPES[name], MIXES[mix])
        partial.rename(file)
    return file


def tensor_bytes(shape: GgufShape, mix: Mix) -> int:
    """Return the bytes of all tensors of a file."""
    return sum(_num_bytes(kind, size) for _, kind, size in shape.tensors(mix))


def write_random(path: Path, shape: GgufShape, mix: Mix) -> None:
    """Write the file of a shape in a mix of types."""
    draw = np.random.default_rng(0)
    tensors = shape.tensors(mix)
    sizes = {name: (kind, own, _num_bytes(kind, own)) for name, kind, own in tensors}
    with path.open("wb") as file:
        write_head(file, _metadata(shape) | {"general.file_type": mix.number}, sizes)
        for name, kind, own in tensors:
            data = _random_tensor(draw, name, kind, own)
            file.write(data + b"\0" * (-len(data) % ALIGNMENT))


def _num_bytes(kind: int, shape: tuple[int, ...]) -> int:
    numbers = int(np.prod(shape))
    return 4 * numbers if kind == F32 else numbers // BLOCKS[kind].inputs * BLOCKS[kind].num_bytes


def _random_tensor(
    draw: np.random.Generator, name: str, kind: int, shape: tuple[int, ...]
) -> bytes:
    if kind == F32:
        around, wide = (0.0, 0.01) if name.endswith("bias") else (1.0, 0.1)
        return draw.normal(around, wide, shape).astype("<f4").tobytes()
    block = BLOCKS[kind]
    count = _num_bytes(kind, shape) // block.num_bytes
    blocks = draw.integers(0, 256, (count, block.num_bytes), dtype=np.uint8)
    scales = draw.uniform(0.5, 1.5, count) * block.scale
    if not block.middle:  # codes are not around zero; with both signs their weights are
        scales *= draw.choice((-1.0, 1.0), count)
    halves = [scales, scales * block.middle] if block.middle else [scales]
    for place, half in enumerate(halves):
        own = slice(block.place + 2 * place, block.place + 2 * place + 2)
        blocks[:, own] = half.astype("<f2")[:, None].view(np.uint8)
    if kind in WITH_FACTORS:  # a group's offset has the factor of its scale
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    return blocks.tobytes()


def _metadata(shape: GgufShape) -> dict[str, Any]:
    arch = shape.arch
    tokens, merges = _vocabulary()
    markers = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    markers += [f"<|extra_{index}|>" for index in range(VOCAB - len(tokens) - len(markers))]
    return {
        "general.architecture": arch,
        f"{arch}.context_length": 32768,
        f"{arch}.embedding_length": shape.hidden,
        f"{arch}.block_count": shape.layers,
        f"{arch}.feed_forward_length": shape.mlp,
        f"{arch}.attention.head_count": shape.heads,
        f"{arch}.attention.head_count_kv": shape.kv_heads,
        f"{arch}.attention.key_length": shape.head,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.freq_base": 1e6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens + markers,
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * len(markers),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens),
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.add_bos_token": False,
    }


def _vocabulary() -> tuple[list[str], list[str]]:
    """Return tokens in the letters of byte-level BPE, and the merges that make them of pairs."""
    draw = Random(0)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    known, merges = set(tokens), []
    while len(tokens) < TOKENS:
        left, right = (tokens[int(len(tokens) * draw.random() ** 2)] for _ in range(2))
        joined = left + right
        if len(joined) <= LONGEST and joined not in known:
            known.add(joined)
            tokens.append(joined)
            merges.append(f"{left} {right}")
    return tokens, merges
