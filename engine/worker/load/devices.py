"""Picks the device and the dtype of a model."""

from __future__ import annotations

import torch

from engine.limits.memory import LIMIT_FRACTION
from engine.worker.interface import MemoryEstimate
from engine.worker.load.refusal import Refusal

DEVICES = "--device takes auto, cpu, cuda, cuda:N or mps"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """Return the device of a `RunnerSpec`. ``auto`` is the first of cuda, mps and cpu that is
    available.

    Raises:
        Refusal: This machine has no such device.
    """
    if name == "auto":
        cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise Refusal(f"there is no kind of device called {name!r}; {DEVICES}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise _unavailable(
            name,
            f"{torch.cuda.device_count()} CUDA devices were found"
            if torch.backends.cuda.is_built()
            else "this torch is built without CUDA",
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise _unavailable(name, "only Apple's processors have it")
    if device.type not in ("cpu", "cuda", "mps"):
        raise Refusal(f"the device {name!r} is not served; {DEVICES}")
    return device


def _unavailable(name: str, why: str) -> Refusal:
    return Refusal(f"the device {name!r} is not available: {why}; --device auto picks one that is")


def estimate_on(device: torch.device, num_bytes: int) -> MemoryEstimate:
    """Return an estimate of ``num_bytes`` on a device. On CUDA, its limit is `LIMIT_FRACTION` of
    the device's memory; elsewhere it has no limit."""
    limit = None
    if device.type == "cuda":
        limit = int(torch.cuda.mem_get_info(device)[1] * LIMIT_FRACTION)
    return MemoryEstimate(num_bytes, str(device), limit)


def pick_dtype(name: str, stored: str, device: torch.device) -> torch.dtype:
    """Return the dtype for ``name``, a value of ``--dtype``. ``stored`` is safetensors' name of the
    checkpoint's dtype. ``auto`` is bfloat16 if the device supports it and the checkpoint is not
    stored in float32, else float32.

    Raises:
        Refusal: ``name`` is not a supported dtype.
    """
    if name != "auto":
        if name not in DTYPES:
            raise Refusal(f"the dtype {name!r} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if stored == "F32" or not has_bfloat16(device):
        return torch.float32
    return torch.bfloat16


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the device multiplies bfloat16 in hardware."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))
