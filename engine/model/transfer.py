"""A step's integers on their way to the device.

Rule: one copy for all that are sent together, and on CUDA from pinned memory: the host then waits
for nothing, where a copy from other memory waits until the device has done all it was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.model.packing import Ints


def send(arrays: Sequence[Ints], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Arrays of one dimension as tensors of the device, int64 each."""
    packed = torch.from_numpy(np.concatenate(arrays))
    is_cuda = device.type == "cuda"
    if is_cuda:
        packed = packed.pin_memory()
    sent = packed.to(device, non_blocking=is_cuda)
    return sent.split([len(array) for array in arrays])
