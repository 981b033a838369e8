"""What torch keeps for each thread, set for the time of one call into a worker (D3)."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def thread_state(threads: int, device: torch.device) -> Iterator[None]:
    """Inference mode, the device, and the thread count (0: as it is), which is OpenMP's, and kept
    for each thread that calls."""
    if threads and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    is_cuda = device.type == "cuda"
    with torch.inference_mode(), torch.cuda.device(device) if is_cuda else nullcontext():
        yield
