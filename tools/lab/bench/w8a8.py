"""Writes a bench's checkpoint in compressed-tensors' W8A8, which vLLM serves with integer products.

Each output of a linear layer has one scale, its largest magnitude / 127. Inputs are rounded by the
engine, with one scale for each row. Embeddings and the head stay in bfloat16. Source: the layout
"int-quantized" of compressed-tensors; `tests/conformance/test_packed_checkpoints.py` has it, too.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from tools.lab.bench.checkpoints import checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    import torch

FORMAT = 1  # raised when the written files change
LARGEST = 127
OUTSIDE = ("model.embed_tokens.", "lm_head.")  # are not rounded
INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
SETTINGS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS}
    },
    "ignore": ["lm_head"],
}


def w8a8(name: str) -> Path:
    """Return the directory of the model ``name`` (`tools.lab.bench.checkpoints`) in W8A8. It is
    written if it is missing."""
    source = checkpoint(name)
    target = source.with_name(f"{source.name}-w8a8-v{FORMAT}")
    if not (target / "complete").exists():
        write(source, target)
        (target / "complete").touch()
    return target


def write(source: Path, target: Path) -> None:
    """Write the checkpoint ``source``, of one file of safetensors, in W8A8."""
    from safetensors.torch import load_file, save_file

    skipped = shutil.ignore_patterns("*.safetensors", "*.gguf", "complete")
    shutil.copytree(source, target, ignore=skipped, dirs_exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for key, values in load_file(source / "model.safetensors").items():
        is_linear = values.dim() == 2 and not key.startswith(OUTSIDE)
        tensors |= rounded(key, values) if is_linear else {key: values}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = SETTINGS
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def rounded(key: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a weight [outputs, inputs] rounded to int8, and its bfloat16 scales [outputs, 1]."""
    import torch

    wide = weight.float()
    scales = (wide.abs().amax(1, keepdim=True) / LARGEST).to(torch.bfloat16)
    numbers = (wide / scales.float()).round().clamp(-LARGEST, LARGEST)
    return {key: numbers.to(torch.int8), f"{key}_scale": scales}
