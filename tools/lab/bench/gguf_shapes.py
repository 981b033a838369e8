"""Writes GGUF files of published shapes with random blocks, in the mix of types of llama.cpp's
Q4_K_M, without a checkpoint or llama.cpp.

``q05`` has the shape of Qwen2-0.5B: a width of 896 is no multiple of 256, so that most of its
matrices are Q5_0 and Q8_0, as llama.cpp stores them. ``q4b`` has the shape of Qwen3-4B. Blocks are
random bytes with small scales, which load, decompress and multiply as a trained model's do, and
say nothing. The vocabulary has as many tokens and merges as Qwen's, of made-up words.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.gguf_files import ALIGNMENT, F32, Q4_K, Q6_K, Q8_0, write_head
from tools.lab.peers.environments import cache_folder

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1  # raised when the written files change
Q5_0 = 6
# For each type: inputs and bytes of a block, and where its scales of half precision are.
BLOCKS = {Q5_0: (32, 22, (0,)), Q8_0: (32, 34, (0,)), Q4_K: (256, 144, (0, 2)),
          Q6_K: (256, 210, (208,))}  # fmt: skip
FALLBACK = {Q4_K: Q5_0, Q6_K: Q8_0}  # of rows that blocks of 256 do not divide
SCALES = {Q5_0: 2e-3, Q8_0: 2e-4, Q4_K: 1e-4, Q6_K: 2e-5}
VOCAB, TOKENS = 151936, 151643
LONGEST = 14  # letters of a made-up token


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

    def tensors(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """Return the name, the type in the mix Q4_K_M, and the shape of each tensor. The embedding
        is also the head."""
        found = [("token_embd.weight", _fitting(Q6_K, self.hidden), (VOCAB, self.hidden)),
                 ("output_norm.weight", F32, (self.hidden,))]  # fmt: skip
        for index in range(self.layers):
            found += [(f"blk.{index}.{n}", kind, shape) for n, kind, shape in self._layer(index)]
        return found

    def _layer(self, index: int) -> list[tuple[str, int, tuple[int, ...]]]:
        finer = Q6_K if _has_more_bits(index, self.layers) else Q4_K
        queries, keys, hidden = self.heads * self.head, self.kv_heads * self.head, self.hidden
        matrices = [
            ("attn_q", Q4_K, (queries, hidden)),
            ("attn_k", Q4_K, (keys, hidden)),
            ("attn_v", finer, (keys, hidden)),
            ("attn_output", Q4_K, (hidden, queries)),
            ("ffn_gate", Q4_K, (self.mlp, hidden)),
            ("ffn_up", Q4_K, (self.mlp, hidden)),
            ("ffn_down", finer, (hidden, self.mlp)),
        ]
        found: list[tuple[str, int, tuple[int, ...]]] = [
            (f"{name}.weight", _fitting(kind, shape[1]), shape) for name, kind, shape in matrices
        ]
        found += [(f"{name}.weight", F32, (hidden,)) for name in ("attn_norm", "ffn_norm")]
        if self.has_bias:
            sizes = {"attn_q": queries, "attn_k": keys, "attn_v": keys}
            found += [(f"{name}.bias", F32, (size,)) for name, size in sizes.items()]
        if self.has_head_norms:
            found += [(f"{n}.weight", F32, (self.head,)) for n in ("attn_q_norm", "attn_k_norm")]
        return found


def _has_more_bits(index: int, layers: int) -> bool:
    """Return whether a layer's value and down projections are in Q6_K, as by llama.cpp's rule."""
    eighth = layers // 8
    return index < eighth or index >= 7 * layers // 8 or (index - eighth) % 3 == 2


def _fitting(kind: int, inputs: int) -> int:
    return FALLBACK[kind] if inputs % BLOCKS[kind][0] else kind


SHAPES = {
    "q05": GgufShape("qwen2", 24, 896, 14, 2, 64, 4864, has_bias=True),
    "q4b": GgufShape("qwen3", 36, 2560, 32, 8, 128, 9728, has_head_norms=True),
}


def random_gguf(name: str) -> Path:
    """Return the file of a shape, and write it if it is missing."""
    file = cache_folder("triolet-bench") / f"{name}-random-Q4_K_M-v{FORMAT}.gguf"
    if not file.exists():
        print(f"writing {file}", file=sys.stderr)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        _write(partial, SHAPES[name])
        partial.rename(file)
    return file


def _write(path: Path, shape: GgufShape) -> None:
    draw = np.random.default_rng(0)
    tensors = shape.tensors()
    sizes = {name: (kind, own, _num_bytes(kind, own)) for name, kind, own in tensors}
    with path.open("wb") as file:
        write_head(file, _metadata(shape), sizes)
        for _, kind, own in tensors:
            data = _random_tensor(draw, kind, own)
            file.write(data + b"\0" * (-len(data) % ALIGNMENT))


def _num_bytes(kind: int, shape: tuple[int, ...]) -> int:
    numbers = int(np.prod(shape))
    if kind == F32:
        return 4 * numbers
    inputs, size, _ = BLOCKS[kind]
    return numbers // inputs * size


def _random_tensor(draw: np.random.Generator, kind: int, shape: tuple[int, ...]) -> bytes:
    if kind == F32:
        return draw.normal(1.0, 0.1, shape).astype("<f4").tobytes()
    _, size, scales = BLOCKS[kind]
    blocks = draw.integers(0, 256, (_num_bytes(kind, shape) // size, size), dtype=np.uint8)
    for place in scales:
        own = draw.uniform(0.5, 1.5, len(blocks)) * SCALES[kind]
        blocks[:, place : place + 2] = own.astype("<f2")[:, None].view(np.uint8)
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
