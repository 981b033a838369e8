"""What the next step computes: one pass over the running sequences in rank order, then the waiting
queue.

Rule 1: a builder plans one step and keeps nothing for the next. The step is undone or kept as a
whole (`PlannedStep`). Rule 2: a row exists only with its blocks *and* its message slots reserved.
A request is parked only if it has the blocks to run but no slot for its message.

The step's token budget: every running decode has its one token first (max_num_batched_tokens is
greater than max_num_seqs); the rest goes to prompt chunks in rank order. So neither starves the
other (D4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.text import admission
from engine.core.text.lifecycle import State
from engine.core.text.memory import snapshots
from engine.core.text.memory.blocks import blocks_for
from engine.core.text.plan import SCORED_TOKENS_MAX, BlockDelta, ChildFork, Logits, Row
from engine.core.text.planned_step import PlannedStep
from engine.core.text.prompt_images import cut_chunk
from engine.errors import EngineBug

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Set

    from engine.core.common.types import BlockId
    from engine.core.text.ledger import Ledger
    from engine.core.text.plan import StateDelta
    from engine.core.text.sequence import Sequence


class StepBuilder:
    """Builds one `PlannedStep`, by one call of `build`, `build_alone` or `build_ahead`.

    ``prompt_limit`` returns how many prompt tokens a step may have beside a number of decodes.
    ``on_preempt`` is called with every running sequence that lost its blocks. With ``only_begun``,
    which is set before, no waiting sequence starts that has never been in a step.
    """

    # Values that most steps keep from beginning to end. As attributes of the class they cost a
    # step nothing.
    only_begun = _but_background = False
    _may_preempt = True
    _lacked_blocks = False
    _chunk_left: int | None = None  # computed for the first prompt of the step
    _score_left = SCORED_TOKENS_MAX
    _has_chunk = False  # whether the step computes a part of a prompt
    _image_cost = 0  # what encoding the last chunk's images costs, in tokens
    _executing_keys: Set[bytes] = frozenset()  # keys of the executing step's blocks

    def __init__(
        self,
        ledger: Ledger,
        now: float,
        prompt_limit: Callable[[int], int],
        on_preempt: Callable[[Sequence], None],
    ) -> None:
        self._ledger = ledger
        self._beside = ledger.running  # the running sequences that the step may have
        self._size = ledger.config.block_size
        self._now = now
        self._prompt_limit = prompt_limit
        self._on_preempt = on_preempt
        self._step = PlannedStep(ledger)

    def share(self) -> None:
        """Have holders pay for the step."""
        self._step.is_shared, self._step.turns = True, {}

    def leave_out_background(self) -> None:
        """Plan no background work. To be called before the step is built."""
        self._but_background = True
        self._beside = admission.others_running(self._ledger)

    # ---- building: one call of one of these

    def build(self) -> PlannedStep | None:
        """Return the next step, or None if nothing can be computed, while no plan is in flight."""
        may_start = bool(self._ledger.waiting.items)
        if may_start:
            self._make_room_for_first()
        self._plan_all_running(self._beside.copy())
        if may_start:
            self._start_waiting()
        return self._finish()

    def build_alone(self, seq: Sequence) -> PlannedStep | None:
        """Return a step of this one running or waiting sequence, or None if it cannot be computed.
        The rows of a failed step run again in this way. No plan is in flight."""
        if seq.state is State.RUNNING:
            self._plan_running(seq)
        elif admission.has_seats(self._ledger, seq):
            matched = admission.match(self._ledger, seq)
            if admission.shortfall(self._ledger, seq, matched) <= 0:
                self._start(seq, matched)
        return self._finish()

    def build_ahead(self, executing: PlannedStep) -> PlannedStep | None:
        """Return the step after ``executing``, as far as it can be known while that runs (D9):
        every row in flight is assumed to succeed and to go on. None if nothing can be computed, or
        if the step would require a preemption: then `build` decides, once ``executing`` is over."""
        self._may_preempt = False
        self._executing_keys = executing.pending_keys
        if self._ledger.waiting.items and self._victims_for_first():
            self._lacked_blocks = True
        else:
            self._plan_all_running(self._beside.copy())
            if self._ledger.waiting.items and not self._lacked_blocks:
                self._start_waiting()
        return self._finish()

    def _finish(self) -> PlannedStep | None:
        step = self._step
        if step.rows and (self._may_preempt or not self._lacked_blocks):
            return step
        step.undo(self._now)
        return None

    # ---- the step's token budget

    def _chunk_room(self) -> int:
        """Return how many prompt tokens this step can still take beside its decodes."""
        if self._chunk_left is None:
            decodes = count_decodes(self._beside)
            room = self._ledger.config.max_num_batched_tokens - decodes
            self._chunk_left = min(self._prompt_limit(decodes), room)
        return self._chunk_left

    def _chunk_of(self, seq: Sequence, remaining: int) -> int:
        """Return how many of a prompt's ``remaining`` tokens this step can take."""
        count, self._image_cost = min(remaining, self._chunk_room()), 0
        # Each scored prompt gets at least one token, so that none holds up another.
        count = min(count, max(1, self._score_left)) if seq.is_scoring else count
        images = seq.live.request.images
        if images:
            count, self._image_cost = cut_chunk(
                images,
                seq.num_computed,
                count,
                self._chunk_room(),
                begins=seq.state is not State.RUNNING,
                is_first=not self._has_chunk,
            )
        if self._ledger.states is not None and count > 1:
            count = snapshots.cut_chunk(self._ledger, seq, count)
        return count

    def _use_chunk(self, count: int) -> None:
        self._chunk_left = max(0, self._chunk_room() - count - self._image_cost)
        self._step.image_cost += self._image_cost
        self._has_chunk = True

    # ---- running sequences

    def _plan_all_running(self, running: list[Sequence]) -> None:
        """Plan running sequences, which come in rank order.

        A decode is the common case, and its time is most of the scheduler's cost
        (`python -m tools.lab.bench schedule`). So it is planned here, with `Credit.try_reserve` and
        `Sequence.count_ahead` inlined; `_plan_running` plans all other rows.
        """
        step, size, is_running = self._step, self._size, State.RUNNING
        rows, sequences = step.rows, step.sequences
        make, last = tuple.__new__, Logits.LAST
        for seq in running:
            if seq.state is not is_running:
                continue  # the sequence lost its blocks or was parked earlier in this pass
            start, known = seq.num_computed, seq.num_tokens
            num_decoded = known - seq.num_prompt
            if num_decoded >= seq.max_tokens:
                continue  # the step in flight samples the sequence's last token
            is_decode = num_decoded > 0 and known - start == 1
            credit = seq.credit
            if is_decode and credit.free:
                credit.free -= 1
                credit.reserved += 1
                delta = None
                if not start % size and start >= len(seq.blocks) * size:
                    delta = _take_next(self._ledger, step, seq)
                    if delta is None:
                        credit.cancel()
                        self._plan_running(seq)
                        continue
                values = (seq.sequence_id, start, 1, delta, last, (), 0, False, None)
                rows.append(make(Row, values))
                sequences.append(seq)
                seq.num_computed = known
                seq.num_tokens = known + 1
                seq.num_pending += 1
            else:
                self._plan_running(seq)

    def _plan_running(self, seq: Sequence) -> None:
        """Plan a running sequence's row, if there are tokens, slots and blocks for it."""
        remaining = seq.num_tokens - seq.num_computed
        is_chunk = remaining > 1 or _ends_in_an_image(seq)
        count = self._chunk_of(seq, remaining) if is_chunk else 1
        if count == 0:
            return
        slots = _slots_for(seq, count)
        if slots and not self._reserve_slots(seq, slots):
            return
        if not self._try_row(seq, count, may_preempt=self._may_preempt):
            self._lacked_blocks = True
            seq.credit.cancel(slots)
        elif is_chunk:
            self._use_chunk(count)

    # ---- one row: its slots, its blocks, its forks

    def _reserve_slots(self, seq: Sequence, count: int) -> bool:
        """Reserve ``count`` message slots, or park the request."""
        credit = seq.credit
        if credit.try_reserve(count):
            return True
        credit.mark_starved()
        if not any(other.in_step for other in seq.live.sequences):
            self._ledger.park(seq.live, self._now)
        return False

    def _try_row(
        self, seq: Sequence, count: int, *, may_preempt: bool, state: StateDelta | None = None
    ) -> bool:
        """Add a row with its blocks; without enough blocks, add nothing and return False."""
        completes = seq.num_computed + count == seq.num_tokens
        forks = seq.live.attached if completes and seq.choice == 0 else []
        num_new = max(0, blocks_for(seq.num_computed + count, self._size) - len(seq.blocks))
        num_copies = len(forks) if seq.num_tokens % self._size else 0
        taken = self._take(seq, num_new + num_copies, may_preempt=may_preempt)
        if taken is None:
            return False
        kept = len(seq.blocks)
        seq.blocks.extend(taken[:num_new])
        delta = BlockDelta(kept, taken[:num_new]) if num_new else None
        children = self._fork(seq, forks, taken[num_new:]) if forks else ()
        if children:
            self._step.forks[seq.sequence_id] = forks
        if seq.is_scoring:
            logits = Logits.ALL if completes else Logits.PROMPT
        else:
            logits = Logits.LAST if completes else Logits.NONE
        self._add_row(seq, count, delta, logits, children, state)
        return True

    def _add_row(
        self,
        seq: Sequence,
        count: int,
        delta: BlockDelta | None,
        logits: Logits,
        children: tuple[ChildFork, ...],
        state: StateDelta | None,
    ) -> None:
        step, start = self._step, seq.num_computed
        end = start + count
        if step.states is not None:
            state = snapshots.add(self._ledger, step.states, seq, end, logits, state)
        row = Row(seq.sequence_id, start, count, delta, logits, children, state=state)
        step.rows.append(row)
        step.sequences.append(seq)
        if count > 1 and self._ledger.keys.uses_cache(seq.live.request):
            keys = self._ledger.keys.extend(seq, end)
            step.pending_keys.update(keys[start // self._size : end // self._size])
        if logits.scores:
            self._score_left -= count
        seq.count_ahead(end, samples=logits.samples)

    def _take(self, seq: Sequence, count: int, *, may_preempt: bool) -> tuple[BlockId, ...] | None:
        """Return ``count`` blocks, preempting sequences after ``seq`` if allowed; None if too
        few."""
        if count == 0:
            return ()
        ledger, reservation = self._ledger, self._step.reservation
        taken = ledger.take(reservation, count)
        if taken is not None or not may_preempt:
            return taken
        victims = self._victims_for_running(seq, count)
        for victim in victims:
            self._preempt(victim)
        return ledger.take(reservation, count) if victims else None

    def _victims_for_running(self, seq: Sequence, count: int) -> list[Sequence]:
        return admission.victims_for_running(self._ledger, seq, count)

    def _preempt(self, victim: Sequence) -> None:
        was_running = victim.state is State.RUNNING
        self._ledger.preempt(victim, self._now)
        if was_running:
            self._on_preempt(victim)

    def _fork(
        self, parent: Sequence, forks: list[Sequence], copies: tuple[BlockId, ...]
    ) -> tuple[ChildFork, ...]:
        """Give each attached choice a block table: the prompt's full blocks shared, the last
        partial one copied (copy-on-write, done when the first write is certain)."""
        full = parent.blocks[: parent.num_tokens // self._size]
        children = []
        for index, child in enumerate(forks):
            self._ledger.pool.share(self._step.reservation, full)
            child.blocks = full.copy()
            if copies:
                self._step.copies.append((parent.blocks[len(full)], copies[index]))
                child.blocks.append(copies[index])
            state = None if self._step.states is None else self._step.states.give(child)
            blocks = tuple(child.blocks)
            children.append(ChildFork(child.sequence_id, child.choice, blocks, state))
            child.keys = parent.keys.copy()
            self._ledger.start(child, self._now)
            child.count_ahead(parent.num_tokens, samples=True)
        return tuple(children)

    # ---- the waiting queue

    def _queue(self) -> list[Sequence]:
        """Return the waiting sequences that may start, the first one first."""
        waiting = self._ledger.waiting
        order = waiting.in_order(self._now)
        if self._but_background:
            order = order[: len(order) - waiting.num_background]
        return [seq for seq in order if seq.is_known_to_worker] if self.only_begun else order

    def _first_waiting(self) -> Sequence | None:
        """Return the first of the queue. One whose deadline has passed never starts, and holds up
        nobody."""
        return next((seq for seq in self._queue() if not seq.is_late(self._now)), None)

    def _victims_for_first(self) -> list[Sequence]:
        if (first := self._first_waiting()) is None:
            return []
        return admission.victims_for_first(
            self._ledger, first, self._now, self._prompt_limit(count_decodes(self._beside))
        )

    def _make_room_for_first(self) -> bool:
        """Preempt sequences so that the first of the queue can start, and return whether any was.
        This comes before the running sequences are planned, because a sequence in the plan cannot
        be preempted. A first sequence whose stream is full is parked; the next one is then the
        first."""
        while (first := self._first_waiting()) is not None and not admission.has_slots(
            self._ledger, first, self._prompt_limit(count_decodes(self._beside))
        ):
            if any(other.state is State.RUNNING for other in first.live.sequences):
                return False  # the request's running choice needs the slots, or has both parked
            first.credit.mark_starved()
            self._ledger.park(first.live, self._now)  # no step in flight has a row of the request
        victims = self._victims_for_first()
        for victim in victims:
            self._preempt(victim)
        return bool(victims)

    def _start_waiting(self) -> bool:
        """Start sequences from the head of the queue, up to the first that cannot start, so that
        small ones do not overtake a large one for ever. Return whether none lacked memory."""
        ledger = self._ledger
        if ledger.num_seats >= ledger.config.max_num_seqs:
            return True
        for seq in self._queue().copy():
            if self._chunk_room() <= 0:
                return True
            if seq.state is not State.WAITING:
                continue  # the sequence was just parked, with a choice of its request
            if not admission.has_seats(ledger, seq):
                return False
            if seq.is_late(self._now):
                continue  # its deadline is about to end the sequence, so it is never started (D18)
            matched = admission.match(ledger, seq)
            here, executing = self._step.pending_keys, self._executing_keys
            if here or executing:
                key = admission.next_key(ledger, seq, matched)
                if key in here or key in executing:
                    continue  # a step computes its next block, which is then a cache hit (D5)
            if admission.shortfall(ledger, seq, matched) > 0:
                return False
            self._start(seq, matched)
            if seq.state is State.WAITING:
                return True  # the step has no room for the sequence's next image
        return True

    def _start(self, seq: Sequence, matched: tuple[BlockId, ...]) -> None:
        """Start a waiting sequence: share its cached prefix and plan its first chunk. The caller
        has checked that there are enough blocks (`admission.shortfall`). A sequence whose stream
        has no slot is parked instead, and one whose next image the step has no room for waits."""
        ledger, step = self._ledger, self._step
        start = len(matched) * self._size
        seq.num_computed = start
        if ledger.states is not None:
            seq.branch = admission.cached_position(ledger, seq)
        count = self._chunk_of(seq, seq.num_tokens - start)
        if count == 0:
            seq.num_computed = 0
            return
        slots = _slots_for(seq, count)
        if slots and not self._reserve_slots(seq, slots):
            seq.num_computed = 0
            return
        ledger.pool.share(step.reservation, matched)
        if not seq.is_background:
            ledger.pool.keep_longer(matched)
        seq.blocks = list(matched)
        state = None
        if step.states is not None:
            state = snapshots.begin(ledger, step.states, seq, matched)
        ledger.start(seq, self._now)
        step.started.append(seq)
        if not self._try_row(seq, count, may_preempt=False, state=state):
            raise EngineBug(f"{seq} was started without room for it")
        self._use_chunk(count)
        step.rows[-1] = step.rows[-1]._replace(blocks=BlockDelta(0, tuple(seq.blocks)))
        if not seq.is_known_to_worker:
            seq.cached_tokens = min(start, seq.num_prompt)
        if ledger.keys.uses_cache(seq.live.request):
            ledger.cache.queried_tokens += seq.num_known
            ledger.cache.hit_tokens += start


def _take_next(ledger: Ledger, step: PlannedStep, seq: Sequence) -> BlockDelta | None:
    """Give a decode its next block, and return the change; None if no block is free."""
    taken = ledger.take(step.reservation, 1)
    if taken is None:
        return None
    delta = BlockDelta(len(seq.blocks), taken)
    seq.blocks += taken
    return delta


def count_decodes(running: Iterable[Sequence]) -> int:
    """Return how many of some running sequences lack one token."""
    return sum(1 for seq in running if seq.num_tokens - seq.num_computed == 1)


def _slots_for(seq: Sequence, count: int) -> int:
    """Return how many messages a row will make: one for each choice that it samples for."""
    if seq.num_computed + count < seq.num_tokens:
        return 0
    return 1 + (len(seq.live.attached) if seq.choice == 0 else 0)


def _ends_in_an_image(seq: Sequence) -> bool:
    """Return whether an image begins with the next token of a prompt. If it is the prompt's last
    token, it is planned like a chunk, because the image must be encoded."""
    start = seq.num_computed
    return start < seq.num_prompt and any(image.start == start for image in seq.live.request.images)
