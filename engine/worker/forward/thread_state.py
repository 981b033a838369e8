"""Sets the state that torch and the kernels keep for each thread, for a call into a worker (D3)."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Own(threading.local):
    kernel_threads = 0


_own = _Own()


@contextmanager
def thread_state(threads: int, device: torch.device, kernel_threads: int = 0) -> Iterator[None]:
    """Enter inference mode on ``device`` with ``threads`` OpenMP threads (0: unchanged). OpenMP
    keeps the count for each calling thread, so it is not reset afterwards. The compiled kernels
    take ``kernel_threads`` (0: as many as OpenMP)."""
    if threads and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    is_cuda = device.type == "cuda"
    _own.kernel_threads = kernel_threads
    try:
        with torch.inference_mode(), torch.cuda.device(device) if is_cuda else nullcontext():
            yield
    finally:
        _own.kernel_threads = 0


def kernel_threads() -> int:
    """Return how many threads the compiled kernels use in the calling thread."""
    return _own.kernel_threads or torch.get_num_threads()
