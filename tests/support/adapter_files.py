"""The files of an adapter (LoRA), written without torch."""

import json
from pathlib import Path
from typing import Any


def files_in(directory: Path, header: bytes = b"{}", **fields: Any) -> Path:
    """Write an adapter's files. ``fields`` are further fields of its config."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config | fields))
    size = len(header).to_bytes(8, "little")
    (directory / "adapter_model.safetensors").write_bytes(size + header)
    return directory
