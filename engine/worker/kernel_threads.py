"""The number of threads that a text model's compiled kernels use, step by step.

Results do not depend on it: each number is computed by one thread, in the same order (D12). Torch's
own operations keep the number of threads that the model has, because theirs may.
"""

from __future__ import annotations

import ctypes
import os
import threading
from time import perf_counter
from typing import TYPE_CHECKING

from engine.worker.forward import native
from engine.worker.thread_count import ThreadCount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.text.plan import Row

HELPERS_MOST = 256  # whose waits are read; guess: more threads than most machines have cores
LOOK_S = 0.02  # the least time between two looks, each of which is a system call for each thread
EXACT_MAX = 16  # up to so many tokens or rows make a kind of step of their own


class KernelThreads:
    """Chooses the threads of a worker's next step: ``limit``, or if that ``varies``, from 1 to
    ``limit``. Belongs to one step at a time."""

    def __init__(self, limit: int, *, varies: bool) -> None:
        self._limit = limit
        self._counts = ThreadCount(limit) if varies and limit > 1 else None
        self._waits = RunQueueWaits()
        self._looked_at, self._is_told = 0.0, True

    @property
    def count(self) -> int:
        """The threads of the next step; 0: as many as torch has."""
        return self._limit if self._counts is None else self._counts.count

    def note(self, rows: Sequence[Row], seconds: float) -> None:
        """Note the forward of a step that has ended, in the thread that computed it."""
        if self._counts is None:
            return
        now = perf_counter()
        waited: float | None = 0.0
        if self._is_told and now - self._looked_at >= LOOK_S:
            waited, self._looked_at = self._waits.seconds(), now
            self._is_told = waited is not None
        kind = _size(sum([row.count for row in rows])), _size(len(rows))
        self._counts.note(kind, seconds, waited if self._is_told else None, now)

    def close(self) -> None:
        """Close the files of the threads. Idempotent."""
        self._waits.close()


class RunQueueWaits:
    """For how long the calling thread and its helpers waited for a core, since the last look. Linux
    counts it in /proc/self/task/*/schedstat, in nanoseconds."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._ids = (ctypes.c_int64 * HELPERS_MOST)()

    def seconds(self) -> float | None:
        """Return the threads' time together. A thread counts from its second look on. None if the
        system does not say."""
        library = native.loaded()
        count = library.triolet_helpers(self._ids, HELPERS_MOST) if library is not None else 0
        total = 0
        try:
            for thread in (threading.get_native_id(), *self._ids[:count]):
                waited = self._waited(thread)
                total += waited - self._last.get(thread, waited)
                self._last[thread] = waited
        except (OSError, ValueError, IndexError):
            return None
        return total / 1e9

    def _waited(self, thread: int) -> int:
        if thread not in self._files:
            path = f"/proc/self/task/{thread}/schedstat"
            self._files[thread] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.pread(self._files[thread], 80, 0).split()[1])
        except ProcessLookupError:  # the file of an older thread with the same number
            os.close(self._files.pop(thread))
            self._last.pop(thread, None)
            return self._waited(thread)

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._last.clear()


def _size(number: int) -> int:
    """Return a number's class: steps of one class take about equally long."""
    if number <= EXACT_MAX:
        return number
    bits = number.bit_length() - 4  # within an eighth
    return number >> bits << bits
