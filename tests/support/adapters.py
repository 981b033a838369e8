"""Adapters (LoRA) for tests: written by peft, or by hand in peft's format."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEARS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
SPREAD = 0.15  # standard deviation of random weights: adapters change logits by about their size


def write_by_peft(directory: Path, base: Path, *, seed: int = 0, **config: Any) -> Path:
    """Have peft write an adapter of the model in ``base`` with random matrices A and B."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0.0, SPREAD, generator=generator)
    model.save_pretrained(directory, save_embedding_layers=False)
    return directory


@contextmanager
def peft_model(base: Path, directory: Path | None) -> Iterator[Any]:
    """Yield transformers' model of ``base`` with an unmerged adapter, in float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )
    if directory is not None:
        model = PeftModel.from_pretrained(model, directory)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small for more threads
    try:
        with torch.inference_mode():
            yield model.eval()
    finally:
        torch.set_num_threads(threads)


def places_of(base: Path, targets: Sequence[str] = LINEARS) -> dict[str, tuple[int, int]]:
    """Return the numbers of inputs and outputs of a checkpoint's linear layers with these names."""
    from safetensors import safe_open

    found = {}
    with safe_open(base / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (not a dict: it has no __iter__)
            layer = name.removesuffix(".weight")
            if layer.rpartition(".")[2] in targets:
                outputs, inputs = file.get_slice(name).get_shape()
                found[layer] = (inputs, outputs)
            if layer == "model.embed_tokens" and "lm_head" in targets:  # a tied head is not stored
                outputs, inputs = file.get_slice(name).get_shape()
                found["lm_head"] = (inputs, outputs)
    return found


def write_by_hand(
    directory: Path,
    base: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = LINEARS,
    spread: float = SPREAD,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write an adapter in peft's format, which takes a few milliseconds. ``fields`` are further
    fields of its config."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (inputs, outputs) in places_of(base, targets).items():
        for suffix, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            numbers = torch.randn(shape, generator=generator) * spread
            tensors[f"base_model.model.{name}.{suffix}.weight"] = numbers
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    config["target_modules"] = list(targets)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({**config, **(fields or {})}))
    return directory


def change_tensors(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a safetensors file anew after ``change`` has changed its dict of tensors."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
