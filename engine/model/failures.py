"""What went wrong in a worker, in words: for the client, and for the log."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from engine.errors import SpawnFailed
from engine.model.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)


@contextmanager
def load_failures(name: str, close: Callable[[], None], *, needs: str) -> Iterator[None]:
    """Whatever stops the load of a model is told in one sentence, and nothing is kept.

    Raises:
        SpawnFailed: after ``close``; a BaseException that is no Exception passes, after it too.
    """
    try:
        yield
    except BaseException as error:
        close()
        if isinstance(error, SpawnFailed) or not isinstance(error, Exception):
            raise
        raise spawn_failed(name, error, needs=needs) from error


@contextmanager
def step_failures() -> Iterator[None]:
    """No memory for a step is a MemoryError, whoever says so."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) and not isinstance(error, MemoryError):
            raise MemoryError(str(error)) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the system behind the CPU's allocator, had no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch has no class for these: the messages are those of its CPU and MPS allocators.
    said = ("can't allocate memory", "MPS backend out of memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in said)


def spawn_failed(name: str, error: Exception, *, needs: str) -> SpawnFailed:
    """One sentence for whatever stopped a load; what only the operator may see goes beside it."""
    if isinstance(error, Refusal):
        return SpawnFailed(f"the model {name!r} cannot be loaded: {error}", log_detail=error.detail)
    if is_out_of_memory(error):
        return SpawnFailed(
            f"the model {name!r} cannot be loaded: the device has too little free memory for its "
            f"{needs}",
            log_detail=describe(error),
        )
    log.error("the load of %s failed in an unexpected way", name, exc_info=error)
    return SpawnFailed(
        f"the model {name!r} cannot be loaded: it failed in an unexpected way "
        f"({type(error).__name__}); the log has the details",
        log_detail=describe(error),
    )


def describe(error: BaseException) -> str:
    """For the log only."""
    return f"{type(error).__name__}: {error}"
