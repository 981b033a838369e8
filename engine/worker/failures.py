"""Turns a worker's exceptions into errors with one sentence for clients and one for the log."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from engine.errors import SpawnFailed
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)


@contextmanager
def load_failures(name: str, close: Callable[[], None], *, needs: str) -> Iterator[None]:
    """Wrap the load of a model: on any exception call ``close`` and raise a SpawnFailed.

    ``name`` is the model's name for the log. ``needs`` says, for the message of a load without
    memory, what needs memory (`NEEDS` of the runners).

    Raises:
        SpawnFailed: The load failed. A BaseException that is not an Exception passes unchanged.
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
    """Wrap a step: any out-of-memory error becomes a MemoryError.

    Raises:
        MemoryError: The device, or the CPU's allocator, had no memory left.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) and not isinstance(error, MemoryError):
            raise MemoryError(str(error)) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that the device, or the CPU's allocator, had no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch raises plain RuntimeErrors here. These are the messages of its CPU and MPS allocators.
    messages = ("can't allocate memory", "MPS backend out of memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in messages)


def spawn_failed(name: str, error: Exception, *, needs: str) -> SpawnFailed:
    """Return the error of a failed load: one sentence for the client, and for the operator alone
    the details in ``log_detail``."""
    if isinstance(error, Refusal):
        return error.spawn_failed()
    if is_out_of_memory(error):
        return SpawnFailed(
            f"the device has too little free memory for its {needs}",
            log_detail=describe(error),
        )
    if (
        isinstance(error, OSError)
        and error.strerror
        and isinstance(error.filename, str | bytes)  # it is a number if a descriptor was used
    ):
        # A library raised this OSError: files that the engine reads itself raise a `Refusal`.
        file = os.path.basename(os.fsdecode(error.filename))
        reason = f"its load could not use the file {file} ({error.strerror})"
        return SpawnFailed(reason, log_detail=describe(error))
    log.error("the load of %s failed in an unexpected way", name, exc_info=error)
    return SpawnFailed(
        f"its load failed in an unexpected way ({type(error).__name__}); the log has the details",
        log_detail=describe(error),
    )


def describe(error: BaseException) -> str:
    """Return the type and the message of an error, for the log only."""
    return f"{type(error).__name__}: {error}"
