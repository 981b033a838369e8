"""The adapters that one text model has loaded.

Rule 1: adapters are loaded and unloaded during steps, in the callers' threads. The lock guards the
tables only, and no step takes it. Rule 2: a step finds an adapter by its content's digest. A
sequence whose adapter was unloaded fails without affecting others; its request has already ended,
because a running request keeps its adapter loaded.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.core.common.steps import RowFailure, RowPhase
from engine.errors import EngineBug, ShuttingDown, SpawnFailed
from engine.worker.failures import is_out_of_memory
from engine.worker.forward.adapters import AdapterGroup
from engine.worker.forward.thread_state import thread_state
from engine.worker.load.adapter import PAD, measure_adapter, padded_to, read_adapter
from engine.worker.load.refusal import Refusal
from engine.worker.text.interface import AdapterInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from engine.core.common.types import SequenceId
    from engine.core.text.plan import Row
    from engine.worker.forward.adapters import AdapterHost
    from engine.worker.forward.packing import Ints
    from engine.worker.interface import RunnerSpec
    from engine.worker.load.adapter import AdapterSize
    from engine.worker.text.sequences import SequenceState

THREADS = 1  # OpenMP threads of an adapter's load, which runs beside steps


class LoadedAdapters:
    """Implements `engine.worker.text.interface.Adapters`. `open` is called after the load."""

    def __init__(self, spec: RunnerSpec) -> None:
        self._spec = spec
        self._host: AdapterHost | None = None
        self._itemsize = 4
        self._device: torch.device | None = None
        self._lock = threading.Lock()
        self._placed: dict[str, Any] = {}  # Adapters in the host's form, by digest.
        self._counts: dict[str, int] = {}  # How many more loads than unloads, by digest.

    def open(self, host: AdapterHost, dtype: torch.dtype, device: torch.device) -> None:
        """Accept adapters from now on, because the model has loaded."""
        self._host, self._itemsize, self._device = host, dtype.itemsize, device

    def close(self) -> None:
        """Drop every adapter. Idempotent."""
        self._host = None
        with self._lock:
            self._placed, self._counts = {}, {}

    def measure(self, directory: str) -> int:
        """Return an upper bound of the bytes that loading the adapter takes: its file, its tensors
        as read or in the host's form, and its buffers in a step.

        Raises:
            SpawnFailed: The config or the weights' header shows that `load` would fail.
        """
        size = _measured(directory)
        placed = size.num_values * self._itemsize
        rows = self._spec.max_num_batched_tokens * 3 * padded_to(size.rank, PAD) * self._itemsize
        return size.file_bytes + max(size.file_bytes, placed) + rows

    def placed_bytes(self, directory: str, dtype: str) -> int:
        """Return the bytes of the adapter's numbers once a model of this dtype has loaded it.
        Raises as `measure`."""
        return _measured(directory).num_values * getattr(torch, dtype).itemsize

    def load(self, directory: str) -> AdapterInfo:
        """Read the adapter and bring it into the host's form.

        Raises:
            SpawnFailed: The adapter cannot be served with this model; one sentence says why.
            ShuttingDown: The model was closed.
        """
        host, device = self._host, self._device
        if host is None or device is None:
            raise ShuttingDown("the model was closed")
        try:
            with thread_state(THREADS, device):
                stored = read_adapter(directory, host.places, host.head)
                placed = self._placed.get(stored.digest) or host.place(stored)
        except Refusal as refusal:
            raise refusal.spawn_failed() from refusal
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise SpawnFailed("there is no memory for it", log_detail=repr(error)) from error
        with self._lock:
            placed = self._placed.setdefault(stored.digest, placed)
            self._counts[stored.digest] = self._counts.get(stored.digest, 0) + 1
        ranks = [part.rank for part in stored.parts.values()]
        rows = self._spec.max_num_batched_tokens * placed.width * self._itemsize
        return AdapterInfo(stored.digest, placed.num_bytes + rows, max(ranks), len(ranks))

    def unload(self, digest: str) -> None:
        """Undo one `load` of an adapter; the last undo frees it."""
        with self._lock:
            if digest not in self._counts:
                return
            self._counts[digest] -= 1
            if not self._counts[digest]:
                del self._counts[digest], self._placed[digest]

    # ---- one step

    def find(self, digest: str) -> Any:
        """Return a loaded adapter, or None."""
        return self._placed.get(digest)

    def of_rows(
        self, rows: Iterable[Row], sequences: Mapping[SequenceId, SequenceState]
    ) -> dict[SequenceId, Any]:
        """Return the adapters of the rows that have one. A sequence whose adapter was unloaded gets
        a ``verdict``, the failure of its row."""
        by_id = {}
        for row in rows:
            state = sequences.get(row.sequence)
            if state is None or not state.admission.adapter:
                continue
            adapter = by_id[row.sequence] = self.find(state.admission.adapter)
            if adapter is None:
                state.verdict = RowFailure(row.sequence, RowPhase.ADAPTER, "it was unloaded")
        return by_id


def _measured(directory: str) -> AdapterSize:
    try:
        return measure_adapter(directory)
    except Refusal as refusal:
        raise refusal.spawn_failed() from refusal


def group_rows(
    adapters: Sequence[Any], counts: Sequence[int], keep: Ints
) -> tuple[AdapterGroup, ...]:
    """Return each adapter's range of tokens. ``adapters`` and ``counts`` are those of the packed
    rows; the rows of an adapter follow one another. ``keep`` are the tokens whose logits are
    computed.

    Raises:
        EngineBug: An adapter has two ranges.
    """
    ranges: dict[int, list[int]] = {}
    by_key: dict[int, Any] = {}
    at = 0
    for adapter, count in zip(adapters, counts, strict=True):
        if adapter is not None:
            own = ranges.setdefault(id(adapter), [at, at])
            if own[1] != at:
                raise EngineBug("the rows of an adapter do not follow one another")
            own[1] = at + count
            by_key[id(adapter)] = adapter
        at += count
    groups = []
    for key, (first, end) in ranges.items():
        low, high = (int(place) for place in np.searchsorted(keep, (first, end)))
        groups.append(AdapterGroup(by_key[key], first, end - first, low, high - low))
    return tuple(groups)
