"""The states of a model's recurrent layers, and how stock layers compute a packed batch (D32).

A stock recurrent layer takes a batch of sequences, and a cache that has their states. Here the rows
of a step are packed into one row of tokens. So each layer gets the rows of equal length together as
a batch, with a cache of these rows alone (`RecurrentLayers`). A compiled decoder reads the states
in place and takes all rows at once (`CompiledStates`).

Rule 1: no other file allocates or indexes state tensors. Rule 2: a forward reads states and keeps
the new ones beside them. `States.write` puts them into the slots once the step can no longer fail.

Index spaces: a *slot* here is a state slot; rows and tokens are those of
`engine.worker.forward.packing`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from engine.worker.forward import kernel_structs as structs
from engine.worker.forward.decoder import NativeDecoder
from engine.worker.forward.transfer import send

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine.worker.forward.packing import Ints, PackedRows
    from engine.worker.load.recurrent import Recurrence, StateShape


@dataclass(frozen=True, slots=True)
class RowState:
    """The state slots of one row: the row begins from the state in ``source`` (None: from a state
    of zeros), and its last state goes to each of ``targets``."""

    source: int | None
    targets: tuple[int, ...]


class States(Protocol):
    """The states of one model's recurrent layers. For each step: `begin`, the model's forward, and
    `write`. The states of a step that fails are not written."""

    def begin(self, rows: PackedRows, states: Sequence[RowState]) -> None:
        """Set the rows of the forward that follows, and their slots."""

    def write(self) -> None:
        """Write the states that the forward computed into their slots.

        Raises:
            RuntimeError: Memory is lacking, and no state has changed.
        """


@dataclass(frozen=True, slots=True)
class StateSlots:
    """The state slots of a model: the kind of its recurrent layers, the shape of each layer's state
    by the layer's index, and the slots' number, dtype and device."""

    recurrence: Recurrence
    shapes: Mapping[int, StateShape]
    count: int
    dtype: torch.dtype  # convolutions' states have this dtype; recurrences' states are float32
    device: torch.device


def open_states(module: Any, slots: StateSlots) -> States:
    """Allocate a model's state slots, and connect its ``module`` with them."""
    kind = CompiledStates if isinstance(module, NativeDecoder) else RecurrentLayers
    return kind(module, slots)


@dataclass(slots=True)
class LayerState:
    """A layer's states: ``conv`` [num, channels, width], and ``recurrent`` [num, …] float32 or
    None."""

    conv: torch.Tensor
    recurrent: torch.Tensor | None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the convolution's states, and the recurrence's if there are any."""
        return (self.conv,) if self.recurrent is None else (self.conv, self.recurrent)

    def at(self, slots: torch.Tensor, fresh: torch.Tensor | None) -> LayerState:
        """Return a copy of the states in ``slots``. The copies with the indices ``fresh`` are zero,
        the state before a sequence's first token."""
        read = [tensor.index_select(0, slots) for tensor in self.tensors()]
        if fresh is not None:
            for tensor in read:
                tensor.index_fill_(0, fresh, 0.0)
        return LayerState(read[0], read[1] if len(read) > 1 else None)


class RowsCache:
    """Takes the place of transformers' `Cache` in a recurrent layer, for rows of equal length."""

    def __init__(self, state: LayerState) -> None:
        self.state = state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """Return the convolution's state, which the layer may change in place."""
        return self.state.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the recurrence's state, which the layer may change in place."""
        return self.state.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False, because earlier states are not kept."""
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, **_keywords: object
    ) -> torch.Tensor:
        """Return the state followed by the inputs ``conv_states`` [num_rows, channels, length], and
        keep the end of both as the new state."""
        width = self.state.conv.shape[-1]
        whole = torch.cat((self.state.conv, conv_states), dim=-1)
        self.state.conv = whole[..., -width:].clone()  # a view would keep the memory of ``whole``
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, **_keywords: object
    ) -> torch.Tensor:
        """Keep ``recurrent_states`` as the layer's new recurrence, and return them unchanged."""
        self.state.recurrent = recurrent_states
        return recurrent_states


@dataclass(frozen=True, slots=True)
class _Group:
    """The rows of one length: their tokens [num_rows, length], the slots of their states, and the
    indices of the rows that begin from a state of zeros."""

    tokens: torch.Tensor
    slots: torch.Tensor
    fresh: torch.Tensor | None


@dataclass(slots=True)
class _Step:
    """A step's groups, and the ``new`` states of its layers, in the order of the groups' rows.
    ``targets`` are the indices of the states that are written, and the slots that they go to."""

    groups: Sequence[_Group]
    targets: tuple[torch.Tensor, torch.Tensor]
    new: dict[int, list[LayerState]] = field(default_factory=dict)


class RecurrentLayers:
    """The recurrent layers of one stock model, with its state slots: an implementation of `States`.
    One runner owns them. Its constructor replaces the `forward` of the stock modules."""

    def __init__(self, module: Any, slots: StateSlots) -> None:
        device, num_slots, recurrence = slots.device, slots.count, slots.recurrence
        self._device = device
        self._step: _Step | None = None
        # Not initialised: a state is written before it is read.
        self._states = {
            layer: LayerState(
                torch.empty((num_slots, *shape.conv), dtype=slots.dtype, device=device),
                torch.empty((num_slots, *shape.recurrent), dtype=torch.float32, device=device)
                if shape.recurrent
                else None,
            )
            for layer, shape in slots.shapes.items()
        }
        layers = [m for m in module.modules() if type(m).__name__ == recurrence.module]
        assert sorted(m.layer_idx for m in layers) == sorted(slots.shapes), recurrence
        for layer in layers:
            layer.forward = self._forward_of(layer, recurrence.keyword)

    def _forward_of(self, module: Any, keyword: str) -> Callable[..., torch.Tensor]:
        """Return a forward over packed tokens [1, num_tokens, hidden]. It ignores masks and
        positions, which only the model's attention layers need."""
        stock, layer = module.forward, module.layer_idx

        def forward(hidden_states: torch.Tensor, **_keywords: object) -> torch.Tensor:
            step = self._step
            assert step is not None, "a forward without a step"
            packed = hidden_states[0]
            out = torch.empty_like(packed)
            for group in step.groups:
                cache = RowsCache(self._states[layer].at(group.slots, group.fresh))
                out[group.tokens] = stock(hidden_states=packed[group.tokens], **{keyword: cache})
                step.new.setdefault(layer, []).append(cache.state)
            return out[None]

        return forward

    def begin(self, rows: PackedRows, states: Sequence[RowState]) -> None:
        """Implements `States.begin`."""
        groups, order = [], []
        counts = np.diff(rows.offsets)
        for count in np.unique(counts):
            members = np.flatnonzero(counts == count)
            groups.append(self._group(rows, members, int(count), states))
            order += members.tolist()
        targets = _targets_of([states[row] for row in order], self._device)
        self._step = _Step(groups, targets)

    def _group(
        self, rows: PackedRows, members: Ints, count: int, states: Sequence[RowState]
    ) -> _Group:
        sources = [states[row].source for row in members.tolist()]
        fresh = np.array([i for i, source in enumerate(sources) if source is None], np.int64)
        slots = np.array([source or 0 for source in sources], np.int64)
        tokens = rows.offsets[members][:, None] + np.arange(count)
        at, read, new = send((tokens.ravel(), slots, fresh), self._device)
        return _Group(at.view(tokens.shape), read, new if len(fresh) else None)

    def write(self) -> None:
        """As `States.write`."""
        step, self._step = self._step, None
        if step is None:
            return
        indices, slots = step.targets
        ready = []
        for layer in list(step.new):
            each = zip(*(part.tensors() for part in step.new.pop(layer)), strict=True)
            for into, new in zip(self._states[layer].tensors(), each, strict=True):
                whole = new[0] if len(new) == 1 else torch.cat(new)
                ready.append((into, whole.index_select(0, indices).to(into.dtype)))
        for into, values in ready:  # copies in place need no memory, so that none can fail
            into.index_copy_(0, slots, values)


class CompiledStates:
    """The states of a compiled decoder's short convolutions: an implementation of `States`."""

    def __init__(self, decoder: NativeDecoder, slots: StateSlots) -> None:
        (channels, length), *others = {shape.conv for shape in slots.shapes.values()}
        assert not others, "convolutions of several shapes"
        # Not initialised: a state is written before it is read. Channels are the last dimension
        # because the kernels' vectors hold channels.
        shape = (len(slots.shapes), slots.count, length, channels)
        self._states = torch.empty(shape, dtype=slots.dtype)
        self._results = self._states.new_empty(0)
        self._targets: tuple[torch.Tensor, torch.Tensor] | None = None
        self._arrays: tuple[Ints, ...] = ()
        self._decoder = decoder
        decoder.place_states(list(self._states))

    def begin(self, rows: PackedRows, states: Sequence[RowState]) -> None:
        """As `States.begin`."""
        count, (layers, _, *shape) = len(states), self._states.shape
        owners = np.repeat(np.arange(count), np.diff(rows.offsets))
        sources = np.array([-1 if s.source is None else s.source for s in states], np.int64)
        self._arrays = owners, rows.offsets, sources
        self._results = self._states.new_empty((layers, count, *shape))
        self._targets = _targets_of(states, self._states.device)
        addresses = (array.ctypes.data for array in self._arrays)
        own = structs.StateRows(*addresses, self._results.data_ptr(), count, self._states.shape[1])
        self._decoder.begin_states(own)

    def write(self) -> None:
        """As `States.write`."""
        if self._targets is None:
            return
        (indices, slots), self._targets = self._targets, None
        self._states.index_copy_(1, slots, self._results.index_select(1, indices))


def _targets_of(
    states: Sequence[RowState], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pairs of the index of a row and a slot that gets its state, as two tensors."""
    targets = [(index, slot) for index, state in enumerate(states) for slot in state.targets]
    pairs = np.array(targets, np.int64).reshape(-1, 2).T
    indices, slots = send((pairs[0].copy(), pairs[1].copy()), device)
    return indices, slots
