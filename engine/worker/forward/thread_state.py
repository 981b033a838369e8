"""Sets the state that torch keeps for each thread, for one call into a worker (D3)."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def thread_state(threads: int, device: torch.device) -> Iterator[None]:
    """Enter inference mode on ``device`` with ``threads`` OpenMP threads (0: unchanged). OpenMP
    keeps the number of threads for each calling thread, so it is not reset afterwards."""
    if threads and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    is_cuda = device.type == "cuda"
    with torch.inference_mode(), torch.cuda.device(device) if is_cuda else nullcontext():
        yield
