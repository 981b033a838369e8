"""Writes random-weight checkpoints of any size quickly: on the device, and without a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from engine.worker.skeleton.config import read_skeleton
from engine.worker.skeleton.modules import Skeleton
from tests.checkpoints.text import PRESETS, Shape, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_LEN = 4096
SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class Model:
    """A checkpoint to measure with."""

    name: str
    architecture: str
    model_type: str
    shape: Shape


TINY = Model("tiny", "LlamaForCausalLM", "llama", PRESETS["tiny"])
REAL = (
    Model("s135", "LlamaForCausalLM", "llama", PRESETS["s135"]),
    Model("q05", "Qwen2ForCausalLM", "qwen2", PRESETS["q05"]),
    # the shape of Llama 3's 8 billion
    Model("b8", "LlamaForCausalLM", "llama",
          Shape(32, 4096, 32, 8, 14336, 128_256, MAX_LEN, tied=False)),
)  # fmt: skip


def config_of(model: Model) -> dict[str, Any]:
    """Return the model's config.json."""
    shape = model.shape
    return {
        "architectures": [model.architecture],
        "model_type": model.model_type,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": max(shape.max_len, 1024),
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
        "torch_dtype": "bfloat16",
    }


def write(model: Model, folder: Path, device: str) -> Path:
    """Write the checkpoint and its tokenizer into a new folder in ``folder``. Return the new folder
    or an existing one."""
    directory = folder / model.name
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True)
    config = config_of(model)
    skeleton_config = read_skeleton(config, model.architecture)
    torch.manual_seed(0)
    shards = _Shards(directory)
    tied = skeleton_config.tie_word_embeddings
    for name, parameter in Skeleton(skeleton_config).named_parameters(remove_duplicate=False):
        if not (tied and name == "lm_head.weight"):
            shards.add(name, _numbers(parameter.shape, device))
    shards.close()
    write_tokenizer(directory, model.shape.vocab)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory


def _numbers(shape: torch.Size, device: str) -> torch.Tensor:
    """Return random weights: of a matrix, scaled so that outputs have the variance of inputs; or of
    a norm, near 1."""
    noise = torch.randn(shape, device=device, dtype=torch.bfloat16)
    return (noise / shape[-1] ** 0.5 if len(shape) > 1 else 1.0 + 0.1 * noise).cpu()


class _Shards:
    """The files of a checkpoint, written one after another."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pending: dict[str, torch.Tensor] = {}
        self._places: dict[str, str] = {}
        self._bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor; write a file when the tensors have `SHARD_BYTES` together."""
        self._pending[name] = tensor
        self._bytes += tensor.nbytes
        if self._bytes >= SHARD_BYTES:
            self._write()

    def close(self) -> None:
        """Write the tensors that are in no file yet, and the index."""
        self._write()
        index: Mapping[str, Any] = {"metadata": {}, "weight_map": self._places}
        (self._directory / "model.safetensors.index.json").write_text(json.dumps(index))

    def _write(self) -> None:
        if not self._pending:
            return
        file = f"model-{len(set(self._places.values())):05}.safetensors"
        save_file(self._pending, self._directory / file, {"format": "pt"})
        self._places |= dict.fromkeys(self._pending, file)
        self._pending, self._bytes = {}, 0
