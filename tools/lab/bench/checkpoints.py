"""Random-weight checkpoints of the shapes that the benches compare, made once and kept in the
user's cache.

The shapes are those of `tests.checkpoints.text`, in bfloat16, with a context of 8,192. ``thin`` has
s135's vocabulary and a tiny model, to measure what a step costs outside of the model. ``lfm350``
has the shape of LFM2-350M: six of its 16 layers have attention, the others short convolutions.
``moe850`` is a mixture of 850 million parameters with the widths of Granite 3.1's 1B-A400M.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from tests.checkpoints.text import PRESETS, Shape, make
from tools.lab.bench.wire import ROOT
from tools.lab.peers.environments import PEERS, cache_folder

if TYPE_CHECKING:
    from pathlib import Path

MAX_LEN = 8192
FORMAT = 1  # raised when the written files change


@dataclass(frozen=True)
class Model:
    """A checkpoint to measure with."""

    name: str
    arch: str
    shape: Shape
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of its config

    @property
    def directory(self) -> Path:
        """The checkpoint's folder in the cache."""
        return cache_folder("triolet-bench") / f"{self.name}-bf16-v{FORMAT}"


WITH_ATTENTION = (2, 5, 8, 10, 12, 14)  # LFM2's layers
HYBRID: dict[str, Any] = {
    "layer_types": ["full_attention" if layer in WITH_ATTENTION else "conv" for layer in range(16)],
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
}
MIXTURE: dict[str, Any] = {
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}
MODELS = {
    model.name: model
    for model in (
        Model("s135", "llama", replace(PRESETS["s135"], max_len=MAX_LEN)),
        Model("q05", "qwen2", replace(PRESETS["q05"], max_len=MAX_LEN)),
        # Small, and with heads that two processes can share.
        Model("d40", "llama", Shape(12, 512, 8, 4, 1536, 8192, MAX_LEN)),
        Model("lfm350", "lfm2", Shape(16, 1024, 16, 8, 4608, 65536, MAX_LEN), HYBRID),
        Model("moe850", "qwen3_moe", Shape(16, 1024, 16, 8, 512, 49152, MAX_LEN), MIXTURE),
        Model("thin", "llama", Shape(1, 64, 2, 1, 128, 49152, MAX_LEN)),
    )
}


def checkpoint(name: str) -> Path:
    """Return the model's directory, and write the checkpoint if it is missing."""
    model = MODELS[name]
    if not (model.directory / "complete").exists():
        print(f"writing {model.directory}", file=sys.stderr)
        make(model.directory, model.arch, model.shape, dtype="bfloat16", extra=model.extra)
        (model.directory / "complete").touch()
    return model.directory


def in_float32(name: str) -> Path:
    """Return the directory of the checkpoint with the same numbers in float32, and write it if it
    is missing."""
    source = checkpoint(name)
    directory = source.with_name(source.name.replace("bf16", "f32"))
    if not (directory / "complete").exists():
        shutil.copytree(
            source, directory, ignore=shutil.ignore_patterns("*.gguf", "complete"),
            dirs_exist_ok=True,
        )  # fmt: skip
        for file in directory.glob("*.safetensors"):
            wide = {key: tensor.float() for key, tensor in load_file(file).items()}
            save_file(wide, file, {"format": "pt"})
        (directory / "complete").touch()
    return directory


def gguf(name: str, kind: str = "") -> Path | None:
    """Return the checkpoint as a GGUF file, or None if llama.cpp is not installed. With a ``kind``
    (Q8_0, Q4_0, Q4_K_M), llama.cpp quantises it."""
    peer = PEERS["llama.cpp"]
    if not peer.is_installed:
        return None
    source = checkpoint(name)
    plain = source / "model.gguf"
    _written(plain, ["tools.lab.peers.gguf_file", str(source)])
    if not kind:
        return plain
    file = source / f"model-{kind}.gguf"
    _written(file, ["tools.lab.peers.quantize", kind, str(plain)])
    return file


def story_gguf() -> Path | None:
    """Return the shipped story model as a GGUF file, or None if llama.cpp is not installed."""
    if not PEERS["llama.cpp"].is_installed:
        return None
    file = cache_folder("triolet-bench") / "demo-stories.gguf"
    _written(file, ["tools.lab.peers.gguf_file", str(ROOT / "engine" / "demo" / "stories")])
    return file


def _written(file: Path, command: list[str]) -> None:
    """Have a module of llama.cpp's environment write a file, if it is missing."""
    if file.exists():
        return
    partial = file.with_suffix(".partial")
    python = str(PEERS["llama.cpp"].python)
    subprocess.run([python, "-m", *command, str(partial)], cwd=ROOT, check=True)
    partial.rename(file)
