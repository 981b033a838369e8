"""Sends a step's integers to the device.

Rule: arrays that are sent together make one copy, for CUDA from pinned memory, for which the host
does not wait. A copy from other memory waits until the device has finished all queued work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.worker.forward.packing import Ints


def send(arrays: Sequence[Ints], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Copy one-dimensional arrays to the device and return them as int64 tensors."""
    packed = torch.from_numpy(np.concatenate(arrays))
    is_cuda = device.type == "cuda"
    if is_cuda:
        packed = packed.pin_memory()
    sent = packed.to(device, non_blocking=is_cuda)
    return sent.split([len(array) for array in arrays])
