"""Which states become snapshots, and which of them sequences begin from (D32).

A state can be kept only as it is when a row ends. So a chunk of a prompt ends at a block's border
where a snapshot is worth it: where another sequence with the same prefix may go on.

Rule: only models with state slots come here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.text import admission
from engine.core.text.plan import StateDelta

if TYPE_CHECKING:
    from engine.core.common.types import BlockId
    from engine.core.text.ledger import Ledger
    from engine.core.text.memory.states import StepStates
    from engine.core.text.plan import Logits, Row
    from engine.core.text.sequence import Sequence


def end_of_chunk(start: int, end: int, size: int, *, branch: int, last: int) -> int:
    """Return where a chunk ends that begins at position ``start`` and could go on to ``end``, with
    blocks of ``size`` tokens.

    It does not go past ``branch``, up to which other sequences have computed the same prefix, nor
    past ``last``, the last border of the prompt with a token behind it, where an equal prompt goes
    on. A chunk that ends before ``last`` ends at a border, if one is in it.
    """
    for border in (branch, last):
        if start < border < end:
            end = border
    aligned = end - end % size
    return aligned if end < last and aligned > start else end


def cut_chunk(ledger: Ledger, seq: Sequence, count: int) -> int:
    """Return how many of the next ``count`` tokens the sequence's next chunk has. A snapshot inside
    of an image that one step computes as a whole is given up."""
    if not ledger.keys.uses_cache(seq.live.request):
        return count
    start, size = seq.num_computed, ledger.config.block_size
    last = (seq.num_tokens - 1) // size * size
    end = end_of_chunk(start, start + count, size, branch=seq.branch, last=last)
    if any(image.is_whole and image.is_inside(end) for image in seq.live.request.images):
        return count
    return end - start


def begin(
    ledger: Ledger, states: StepStates, seq: Sequence, matched: tuple[BlockId, ...]
) -> StateDelta:
    """Give a starting sequence its state slot, and return what its first row begins from: the
    snapshot at the end of its cached prefix ``matched``, or nothing."""
    source = states.begin(seq, seq.keys[len(matched) - 1] if matched else None)
    assert seq.state_slot is not None
    return StateDelta(seq.state_slot, source)


def add(
    ledger: Ledger,
    states: StepStates,
    seq: Sequence,
    end: int,
    logits: Logits,
    delta: StateDelta | None,
) -> StateDelta | None:
    """Return ``delta``, a row's `StateDelta`, with a snapshot of the state at the row's ``end``, if
    that is a block's border inside of a prompt, has no snapshot yet, and a slot is left."""
    size = ledger.config.block_size
    if logits.samples or end % size or not ledger.keys.uses_cache(seq.live.request):
        return delta
    assert ledger.states is not None
    assert seq.state_slot is not None
    key = ledger.keys.extend(seq, end)[end // size - 1]
    slot = None
    if not ledger.states.snapshots.match((key,)):
        kept = admission.promised_states(ledger) + admission.states_of_next(ledger)
        slot = states.snapshot(kept)
    return delta if slot is None else (delta or StateDelta(seq.state_slot))._replace(snapshot=slot)


def publish(ledger: Ledger, seq: Sequence, row: Row, *, is_computed: bool) -> None:
    """Publish the snapshot that a row of a committed step wrote, if it wrote one. ``is_computed``:
    the row has a result, and its sequence still runs."""
    assert row.state is not None
    if row.state.snapshot is None:
        return
    assert ledger.states is not None
    position, key = row.start + row.count, None
    if is_computed:
        key = ledger.keys.extend(seq, position)[position // ledger.config.block_size - 1]
    ledger.states.end_snapshot(row.state.snapshot, key, is_background=seq.is_background)
