"""What the next step computes: one pass in rank order, then the waiting line.

Rule 1: `build` changes places and reservations only through the ledger, and what it did can be
undone by `undo` (the step failed) as exactly as it can be kept by `keep` (it succeeded).
Rule 2: a row exists only with its blocks *and* its message slots reserved (design §2.4); a
request that has blocks to run but no slot for its message is parked, and no other request is.

The step's token budget: every running decode has its one token first (max_num_batched_tokens
is greater than max_num_seqs), the rest goes to prompt chunks in rank order, so neither starves
the other (D4).

It has more lines than other files, since the pass, the line and those that give way to it all
change the one step that is being planned.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from engine.core.lifecycle import State
from engine.core.plan import (
    SCORED_TOKENS_MAX,
    AdmittedSequence,
    BlockDelta,
    ChildFork,
    Logits,
    Row,
    StepPlan,
)
from engine.core.policy import blocks_for, order_victims
from engine.core.types import PlanId
from engine.errors import EngineBug

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from engine.core.blocks import Reservation
    from engine.core.ledger import Ledger
    from engine.core.sequence import Sequence
    from engine.core.types import BlockId, SequenceId


class PlannedStep:
    """A plan and what the ledger must know to keep or undo it.

    ``sequences`` runs parallel to ``rows``; ``forks`` maps a parent's id to the choices that
    fork in its row; ``started`` are the sequences this plan took from the waiting line;
    ``pending_keys`` are those of the blocks it computes. ``plan`` exists once it is sealed.
    """

    __slots__ = (
        "copies",
        "forks",
        "pending_keys",
        "plan",
        "reservation",
        "rows",
        "sequences",
        "started",
        "started_at",
    )

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation
        self.started_at = 0.0
        self.rows: list[Row] = []
        self.sequences: list[Sequence] = []
        self.forks: dict[SequenceId, list[Sequence]] = {}
        self.started: list[Sequence] = []
        self.pending_keys: set[bytes] = set()
        self.copies: list[tuple[BlockId, BlockId]] = []
        self.plan = EMPTY_PLAN


EMPTY_PLAN = StepPlan(PlanId(0), ())


class Planner:
    """Builds one `PlannedStep` at a time over a ledger.

    ``on_preempt`` hears of every running sequence that lost its blocks. Two limits bound the
    prompt tokens of a step, and the smaller holds: ``chunk_limit``, which running out of memory
    halves (D17), and ``pace_limit``, what can be computed in the time a step should take (D4).
    """

    def __init__(self, ledger: Ledger, on_preempt: Callable[[Sequence], None]) -> None:
        self._ledger = ledger
        self._config = ledger.config
        self._size = ledger.config.block_size
        self._on_preempt = on_preempt
        self._next_plan = 1
        self.chunk_limit = self.pace_limit = self._config.max_num_batched_tokens
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._may_preempt = True
        self._lacked_blocks = False
        self._only_begun = False

    # ---- the one pass

    def build(
        self, now: float, *, only_begun: bool = False, only: Sequence | None = None
    ) -> PlannedStep | None:
        """The next step, unsealed, or None if nothing can be computed. No plan is in flight.

        ``only``: a plan of this one running or waiting sequence (a failed step's rows are run
        again alone). ``only_begun``: of the waiting ones only those go on that have been in a
        step before.
        """
        self._begin(now, may_preempt=True, only_begun=only_begun)
        may_start = only is None and bool(self._ledger.waiting)
        if may_start:
            self._make_room_for_first()
        if only is not None:
            self._plan_alone(only)
        else:
            self._plan_all_running()
        if may_start:
            self._start_waiting()
        return self._end(now)

    def prepare(self, now: float, executing: PlannedStep) -> PlannedStep | None:
        """The step after ``executing``, as far as it can be known while that runs (D9): each
        row in flight is taken to succeed and to go on. None if there is nothing to compute, or
        if it would take a preemption: then `build` decides, once the step is over."""
        self._begin(now, may_preempt=False, only_begun=False)
        self._pending_keys |= executing.pending_keys
        if self._ledger.waiting and self._victims_for_first():
            self._lacked_blocks = True
        else:
            self._plan_all_running()
            if self._ledger.waiting and not self._lacked_blocks:
                self._start_waiting()
        return self._end(now)

    def _begin(self, now: float, *, may_preempt: bool, only_begun: bool) -> None:
        self._now = now
        self._only_begun = only_begun
        self._may_preempt = may_preempt
        self._lacked_blocks = False
        self._step = PlannedStep(self._ledger.pool.open())
        self._chunk_left: int | None = None
        self._score_left = SCORED_TOKENS_MAX
        self._pending_keys: set[bytes] = set()

    def _end(self, now: float) -> PlannedStep | None:
        step = self._step
        if step.rows and (self._may_preempt or not self._lacked_blocks):
            return step
        self.undo(step, now)
        return None

    @property
    def _prompt_limit(self) -> int:
        """Prompt tokens of a step at most, beside its decodes."""
        return min(self.chunk_limit, self.pace_limit)

    def _chunk_room(self) -> int:
        """Prompt tokens this step can still take beside its decodes."""
        if self._chunk_left is None:
            decodes = sum(1 for s in self._ledger.running if s.num_tokens - s.num_computed == 1)
            room = self._config.max_num_batched_tokens - decodes
            self._chunk_left = min(self._prompt_limit, room)
        return self._chunk_left

    def _chunk_of(self, seq: Sequence, remaining: int) -> int:
        """How many of a prompt's ``remaining`` tokens this step can take; 0: none."""
        count = min(remaining, self._chunk_room())
        # at least one, so that one prompt that is scored does not hold up another
        return min(count, max(1, self._score_left)) if seq.is_scoring else count

    def _use_chunk(self, count: int) -> None:
        self._chunk_left = self._chunk_room() - count

    def _plan_all_running(self) -> None:
        """One pass in rank order. A decode is the common case and costs what it costs
        (`python -m tools.bench schedule`); all else goes the general way."""
        step, size, is_running = self._step, self._size, State.RUNNING
        rows, sequences = step.rows, step.sequences
        make, last = tuple.__new__, Logits.LAST
        for seq in self._ledger.running.copy():
            if seq.state is not is_running:
                continue  # it lost its blocks, or was parked, earlier in this pass
            start, known = seq.num_computed, seq.num_tokens
            num_decoded = known - seq.num_prompt
            if num_decoded >= seq.max_tokens:
                continue  # the token that the step in flight samples is its last
            is_decode = num_decoded > 0 and known - start == 1
            credit = seq.credit
            if is_decode and credit.free:
                credit.free -= 1  # `Credit.try_reserve`, without the call
                credit.reserved += 1
                delta = None
                if not start % size and start >= len(seq.blocks) * size:
                    delta = self._take_next(seq)
                    if delta is None:
                        credit.cancel()
                        self._plan_running(seq)
                        continue
                rows.append(make(Row, (seq.sequence_id, start, 1, delta, last, ())))
                sequences.append(seq)
                seq.num_computed = known
                seq.num_tokens = known + 1
                seq.num_pending += 1
            else:
                self._plan_running(seq)

    def _take_next(self, seq: Sequence) -> BlockDelta | None:
        """The next block for a decode; None: none is free."""
        taken = self._ledger.take(self._step.reservation, 1)
        if taken is None:
            return None
        delta = BlockDelta(len(seq.blocks), taken)
        seq.blocks += taken
        return delta

    def _plan_alone(self, seq: Sequence) -> None:
        if seq.state is State.RUNNING:
            self._plan_running(seq)
        elif self._has_seats_for(seq) and self._shortfall(seq, self._match(seq)) <= 0:
            self._start(seq, self._match(seq))

    def _has_seats_for(self, seq: Sequence) -> bool:
        seats = self._ledger.num_seats + self._ledger.seats_of(seq)
        return seats <= self._config.max_num_seqs

    def _plan_running(self, seq: Sequence) -> None:
        remaining = seq.num_tokens - seq.num_computed
        count = 1 if remaining == 1 else self._chunk_of(seq, remaining)
        if count == 0:
            return
        slots = self._slots_for(seq, count)
        if slots and not self._reserve_slots(seq, slots):
            return
        if not self._try_row(seq, count, may_preempt=self._may_preempt):
            self._lacked_blocks = True
            seq.credit.cancel(slots)
        elif remaining > 1:
            self._use_chunk(count)

    def _slots_for(self, seq: Sequence, count: int) -> int:
        """Messages the row will make: one per choice it samples for."""
        if seq.num_computed + count < seq.num_tokens:
            return 0
        return 1 + (len(seq.live.attached) if seq.choice == 0 else 0)

    def _try_row(self, seq: Sequence, count: int, *, may_preempt: bool) -> bool:
        """Add a row with its blocks; or nothing, and False, if they are not to be had."""
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
        self._add_row(seq, count, delta, logits, children)
        return True

    def _add_row(
        self,
        seq: Sequence,
        count: int,
        delta: BlockDelta | None,
        logits: Logits,
        children: tuple[ChildFork, ...] = (),
    ) -> None:
        step = self._step
        step.rows.append(Row(seq.sequence_id, seq.num_computed, count, delta, logits, children))
        step.sequences.append(seq)
        start, end = seq.num_computed, seq.num_computed + count
        if count > 1 and self._ledger.uses_cache(seq.live.request):
            keys = self._ledger.extend_keys(seq, end)
            step.pending_keys.update(keys[start // self._size : end // self._size])
            self._pending_keys |= step.pending_keys
        if logits.scores:
            self._score_left -= count
        _run_ahead(seq, end, samples=logits.samples)

    # ---- slots and blocks of one row

    def _reserve_slots(self, seq: Sequence, count: int) -> bool:
        """One message slot per token to sample, or the request is parked."""
        credit = seq.credit
        if credit.try_reserve(count):
            return True
        credit.mark_starved()
        if not any(other.in_step for other in seq.live.sequences):
            self._ledger.park(seq.live, self._now)
        return False

    def _take(self, seq: Sequence, count: int, *, may_preempt: bool) -> tuple[BlockId, ...] | None:
        """``count`` blocks, preempting what comes after ``seq`` if allowed; None: not enough."""
        if count == 0:
            return ()
        taken = self._ledger.take(self._step.reservation, count)
        if taken is None and may_preempt and (victims := self._victims_for(seq, count)):
            for victim in victims:
                self._preempt(victim)
            taken = self._ledger.take(self._step.reservation, count)
        return taken

    def _victims_for(self, seq: Sequence, count: int) -> list[Sequence]:
        """Whom to preempt so that ``count`` blocks are free for a running sequence; nobody if all
        that may give way hold too few: they would take their places back at once."""
        running = [other for other in self._ledger.running if not other.in_step]
        lacking = count - self._ledger.pool.num_free
        victims: list[Sequence] = []
        released: Counter[BlockId] = Counter()
        for victim in order_victims(self._parked_residents(), running, seq.rank):
            victims.append(victim)
            lacking -= self._frees(victim, released)
            if lacking <= 0:
                return victims
        return []

    def _frees(
        self, victim: Sequence, released: Counter[BlockId], *, but: Collection[BlockId] = ()
    ) -> int:
        """How many blocks can be taken once the victim has given its own back, after those in
        ``released``, to which they are added: a block may be shared by several victims. ``but``:
        those that whoever it gives way to will share."""
        released.update(victim.blocks)
        references = self._ledger.pool.references
        return sum(
            1
            for block in victim.blocks
            if references(block) == released[block] and block not in but
        )

    def _parked_residents(self) -> list[Sequence]:
        return [
            seq
            for live in self._ledger.parked.values()
            for seq in live.sequences
            if seq.blocks and not seq.in_step
        ]

    def _preempt(self, victim: Sequence) -> None:
        was_running = victim.state is State.RUNNING
        self._ledger.preempt(victim, self._now)
        if was_running:
            self._on_preempt(victim)

    def _fork(
        self, parent: Sequence, forks: list[Sequence], copies: tuple[BlockId, ...]
    ) -> tuple[ChildFork, ...]:
        """Give each attached choice a table: the prompt's full blocks shared, the last partial
        one copied (copy-on-write, done when the first write is certain)."""
        full = parent.blocks[: parent.num_tokens // self._size]
        children = []
        for index, child in enumerate(forks):
            self._ledger.pool.share(self._step.reservation, full)
            child.blocks = full.copy()
            if copies:
                self._step.copies.append((parent.blocks[len(full)], copies[index]))
                child.blocks.append(copies[index])
            children.append(ChildFork(child.sequence_id, child.choice, tuple(child.blocks)))
            child.keys = parent.keys.copy()
            self._ledger.start(child, self._now)
            _run_ahead(child, parent.num_tokens, samples=True)
        return tuple(children)

    # ---- the waiting line

    def _make_room_for_first(self) -> None:
        """Make the first in line able to start. Done before the pass, since what is in a plan
        cannot be preempted. One whose stream is full is parked instead, and the next is first."""
        while (first := self._first_in_line()) is not None and not self._has_slots_for(first):
            if any(other.state is State.RUNNING for other in first.live.sequences):
                return  # that one needs the slots, or parks them both
            first.credit.mark_starved()
            self._ledger.park(first.live, self._now)  # no row of it is in flight: no plan is
        for victim in self._victims_for_first():
            self._preempt(victim)

    def _first_in_line(self) -> Sequence | None:
        return next(filter(self._may_go_on, self._ledger.sort_waiting(self._now)), None)

    def _has_slots_for(self, seq: Sequence) -> bool:
        """Its stream has room for its start, beside what its request's running choices say: they
        would park it with themselves."""
        free = seq.credit.free
        free -= sum(other.state is State.RUNNING for other in seq.live.sequences)
        if free >= 1 + (len(seq.live.attached) if seq.choice == 0 else 0):
            return True
        # a prompt that takes several rows begins without a message
        missing = seq.num_tokens - len(self._match(seq)) * self._size
        return free >= 0 and missing > self._prompt_limit

    def _victims_for_first(self) -> list[Sequence]:
        """Whom to preempt so that the first in line can start; empty if it can already, if what
        comes after it does not suffice, or if it would not start for all that: nobody gives way to
        one that its reader, its deadline or the step's budget keeps, or that waits for a prefix.

        A running sequence gives way only if it comes after the first in the admission order too:
        aging may have put it before, and it would take its place back at once. The first counts
        by its key in the line, which may be a second old, as that is what it would be put behind.
        """
        ledger = self._ledger
        first = self._first_in_line()
        if first is None or first.is_late(self._now) or not self._has_slots_for(first):
            return []
        matched = self._match(first)
        lacking = self._shortfall(first, matched)
        seats_over = ledger.num_seats + ledger.seats_of(first) - self._config.max_num_seqs
        if (lacking <= 0 and seats_over <= 0) or self._will_be_pending(first, matched):
            return []
        key = first.waiting_key
        later = [
            seq
            for seq in ledger.running
            if seq.rank > first.rank and ledger.waiting_key_of(seq, self._now) > key
        ]
        parked = self._parked_residents() if lacking > 0 else []
        victims: list[Sequence] = []
        released: Counter[BlockId] = Counter()
        shared = frozenset(matched)
        for victim in order_victims(parked, later, first.rank):
            if lacking <= 0 and seats_over <= 0:
                break
            if lacking <= 0 and victim.state is not State.RUNNING:
                continue  # parked ones hold no seat
            victims.append(victim)
            lacking -= self._frees(victim, released, but=shared)
            if victim.state is State.RUNNING:
                lacking -= self._still_needs(victim)
                seats_over -= ledger.seats_of(victim)
        if lacking > 0 or seats_over > 0 or not self._has_tokens_left(victims):
            return []
        return victims

    def _has_tokens_left(self, victims: list[Sequence]) -> bool:
        """Running prompts leave some of the step's tokens, once the victims are gone; if not, it
        is too early to preempt anybody."""
        room, wanted, score_left = self._config.max_num_batched_tokens, 0, SCORED_TOKENS_MAX
        for seq in self._ledger.running:
            if seq in victims:
                continue
            count = seq.num_tokens - seq.num_computed
            if seq.is_scoring:  # as `_chunk_of`
                count = min(count, max(1, score_left))
                score_left -= count
            if count == 1:
                room -= 1
            else:
                wanted += count
        return wanted < min(self._prompt_limit, room)

    def _still_needs(self, seq: Sequence, *, with_next: bool = False) -> int:
        """Blocks that a sequence lacks for the tokens that are known, and for the choices that
        fork from it (n > 1), which copy its last block if that is not full. ``with_next``: for the
        token after those too, of each choice."""
        length = seq.num_tokens + (not seq.num_pending) if with_next else seq.num_known
        has_own_last = with_next or length % self._size != 0
        copies = len(seq.live.attached) if has_own_last and seq.choice == 0 else 0
        return max(0, blocks_for(length, self._size) + copies - len(seq.blocks))

    def _promised(self, first: Sequence) -> int:
        """Blocks that what runs still needs beside ``first``; where no step is in flight, the
        same before their rows are planned and after. One that comes before ``first`` would preempt
        it for its next token, one that comes after it can wait for that."""
        size, needed = self._size, 0
        # asked for each that may start: what has all it needs is passed over
        for seq in self._ledger.running:
            may_fork = not seq.output and len(seq.live.sequences) > 1
            if may_fork or len(seq.blocks) * size <= seq.num_tokens:
                needed += self._still_needs(seq, with_next=seq.rank < first.rank)
        return needed

    def _may_go_on(self, seq: Sequence) -> bool:
        return seq.is_known_to_worker or not self._only_begun

    def _start_waiting(self) -> None:
        """Start from the line's head; the first that cannot start stops the line, so that a
        large one is not overtaken for ever."""
        ledger = self._ledger
        if ledger.num_seats >= self._config.max_num_seqs:
            return
        for seq in ledger.sort_waiting(self._now).copy():
            if self._chunk_room() <= 0:
                return
            if not self._may_go_on(seq):
                continue
            if seq.state is not State.WAITING:
                continue  # parked a moment ago with a sibling whose stream is full
            if not self._has_seats_for(seq):
                return
            if seq.is_late(self._now):
                continue  # its own scope is about to end it; it is never started (D18)
            matched = self._match(seq)
            if self._is_next_block_pending(seq, matched):
                continue  # one step's patience, and it is a hit
            if self._shortfall(seq, matched) > 0:
                return
            self._start(seq, matched)

    def _start(self, seq: Sequence, matched: tuple[BlockId, ...]) -> None:
        """Plan a waiting sequence's first chunk, its cached prefix shared. The blocks are there
        (`_shortfall`); if its stream has no slot, it is parked instead."""
        ledger = self._ledger
        start = len(matched) * self._size
        seq.num_computed = start
        count = self._chunk_of(seq, seq.num_tokens - start)
        slots = self._slots_for(seq, count)
        if slots and not self._reserve_slots(seq, slots):
            seq.num_computed = 0
            return
        ledger.pool.share(self._step.reservation, matched)
        seq.blocks = list(matched)
        ledger.start(seq, self._now)
        self._step.started.append(seq)
        if not self._try_row(seq, count, may_preempt=False):
            raise EngineBug(f"{seq} was started without room for it")
        self._use_chunk(count)
        row = self._step.rows[-1]
        self._step.rows[-1] = row._replace(blocks=BlockDelta(0, tuple(seq.blocks)))
        self._count_hits(seq, start)

    def _count_hits(self, seq: Sequence, start: int) -> None:
        if not seq.is_known_to_worker:
            seq.cached_tokens = start
        if self._ledger.uses_cache(seq.live.request):
            self.prefix_queries += seq.num_tokens - seq.num_pending
            self.prefix_hits += start

    def _match(self, seq: Sequence) -> tuple[BlockId, ...]:
        """The cached blocks of the sequence's prefix; at least one token is left to compute."""
        ledger = self._ledger
        if not ledger.uses_cache(seq.live.request) or not len(ledger.cache) or seq.is_scoring:
            return ()
        usable = seq.num_tokens - 1
        return ledger.cache.match(ledger.extend_keys(seq, usable)[: usable // self._size])

    def _is_next_block_pending(self, seq: Sequence, matched: tuple[BlockId, ...]) -> bool:
        """The first block it lacks is being computed by a row of this plan (D5)."""
        return bool(self._pending_keys) and self._next_key(seq, matched) in self._pending_keys

    def _next_key(self, seq: Sequence, matched: tuple[BlockId, ...]) -> bytes | None:
        """The key of the first block it lacks, if that is a full one and may be shared."""
        if not self._ledger.uses_cache(seq.live.request) or seq.is_scoring:
            return None
        usable = seq.num_tokens - 1
        keys = self._ledger.extend_keys(seq, usable)[: usable // self._size]
        return keys[len(matched)] if len(matched) < len(keys) else None

    def _will_be_pending(self, seq: Sequence, matched: tuple[BlockId, ...]) -> bool:
        """A running prompt is about to compute the first block it lacks."""
        key, end = self._next_key(seq, matched), (len(matched) + 1) * self._size
        if key is None:
            return False
        ledger, chunk = self._ledger, self._prompt_limit
        for other in ledger.running:
            # what is pending is not known yet, and has no key
            known = min(other.num_known, other.num_computed + chunk)
            if (
                other.num_computed < end <= known
                and other.num_computed + 1 < known
                and ledger.uses_cache(other.live.request)
                and ledger.extend_keys(other, end)[end // self._size - 1] == key
            ):
                return True
        return False

    def lacks(self, seq: Sequence) -> int:
        """Blocks that a waiting sequence lacks to start; 0: none."""
        return max(0, self._shortfall(seq, self._match(seq)))

    def _shortfall(self, seq: Sequence, matched: tuple[BlockId, ...]) -> int:
        """Blocks lacking for the whole of ``seq`` to be computed beside what runs; ≤ 0: none.

        Counting the whole, and what running prompts still need, keeps prompts from starting
        only to preempt each other half-way.
        """
        pool = self._ledger.pool
        promised = self._promised(seq)
        needed = self._still_needs(seq) - len(matched)
        free_matched = sum(1 for block in matched if pool.references(block) == 0)
        return needed - (pool.num_free - free_matched - promised)

    # ---- from planned to handed out

    def seal(self, step: PlannedStep, now: float) -> StepPlan:
        """Number the plan and tell the worker of new and ended sequences: it goes out now."""
        ledger = self._ledger
        admitted = []
        for seq in step.started:
            if not seq.is_known_to_worker:
                seq.is_known_to_worker = True
                admitted.append(_admission(seq))
        released, ledger.released = ledger.released, []
        step.started_at = now
        step.plan = StepPlan(
            PlanId(self._next_plan),
            tuple(step.rows),
            tuple(step.copies),
            tuple(admitted),
            tuple(released),
        )
        self._next_plan += 1
        return step.plan

    def reconcile(self, step: PlannedStep, now: float) -> bool:
        """The step before a prepared one is over: drop the rows of what ended meanwhile, keep
        the rest. False: nothing is left of it, and it is undone."""
        ended = [seq for seq in step.sequences if seq.state is State.ENDING]
        for seq in ended:
            index = step.sequences.index(seq)
            self._drop(step, index, now)
            del step.sequences[index], step.rows[index]
        if not step.rows:
            self._ledger.pool.rollback(step.reservation)
        return bool(step.rows)

    def _drop(self, step: PlannedStep, index: int, now: float) -> None:
        """Give back what one row of a prepared step reserved. The choices that were to fork in
        it have ended with it, as a request ends whole before its fork."""
        seq, row = step.sequences[index], step.rows[index]
        pool, forks = self._ledger.pool, step.forks.pop(seq.sequence_id, [])
        taken = self._strike_out(seq, row)
        for child in forks:
            taken, child.blocks = [*taken, *child.blocks], []
        own = {target for child in row.children for target in child.blocks}
        step.copies = [copy for copy in step.copies if copy[1] not in own]
        seq.credit.cancel((1 + len(forks)) if row.logits.samples else 0)
        pool.give_back(step.reservation, taken)
        for child in forks:
            _fall_back(child, 0, samples=True)
            self._ledger.finish(child)
        if seq in step.started:
            step.started.remove(seq)
        _fall_back(seq, row.start, samples=row.logits.samples)
        if not seq.in_step:
            self._ledger.finish(seq)

    @staticmethod
    def _strike_out(seq: Sequence, row: Row) -> list[BlockId]:
        """Take the row's new blocks out of the sequence's table."""
        if row.blocks is None:
            return []
        struck = seq.blocks[row.blocks.keep :]
        del seq.blocks[row.blocks.keep :]
        return struck

    # ---- the end of a plan

    def keep(self, step: PlannedStep) -> None:
        """The step succeeded: its blocks belong to their sequences, forks are known to the
        worker."""
        self._ledger.pool.commit(step.reservation)
        for forks in step.forks.values():
            for child in forks:
                child.is_known_to_worker = True

    def undo(self, step: PlannedStep, now: float) -> None:
        """The step failed, or is not to be: blocks and slots go back, what it started waits
        again. Sequences that ended meanwhile are finished."""
        for seq, row in zip(step.sequences, step.rows, strict=True):
            forks = step.forks.get(seq.sequence_id, [])
            samples = row.logits.samples
            if samples:
                seq.credit.cancel(1 + len(forks))
            self._strike_out(seq, row)
            _fall_back(seq, row.start, samples=samples)
            for child in forks:
                child.blocks = []
                _fall_back(child, 0, samples=True)
        self._ledger.pool.rollback(step.reservation)
        for seq in step.sequences:
            for child in step.forks.get(seq.sequence_id, []):
                self._settle(child, now, is_fork=True)
            self._settle(seq, now, is_started=seq in step.started)

    def _settle(
        self, seq: Sequence, now: float, *, is_fork: bool = False, is_started: bool = False
    ) -> None:
        """Where a sequence of an undone plan belongs now."""
        if seq.state is State.ENDING:
            if not seq.in_step:
                self._ledger.finish(seq)
        elif is_fork:
            self._ledger.unfork(seq, now)
        elif is_started:
            self._ledger.preempt(seq, now)
            if not seq.is_known_to_worker:
                seq.enter("queued", now)


def _run_ahead(seq: Sequence, end: int, *, samples: bool) -> None:
    """Count a planned row as computed up to ``end``, and the token it samples as there."""
    seq.num_computed = end
    if samples:
        seq.num_tokens += 1
        seq.num_pending += 1
    else:
        seq.num_chunks += 1


def _fall_back(seq: Sequence, start: int, *, samples: bool) -> None:
    """Undo `_run_ahead` of a row that began at ``start``."""
    seq.num_computed = start
    if samples:
        seq.num_tokens -= 1
        seq.num_pending -= 1
    else:
        seq.num_chunks -= 1


def _admission(seq: Sequence) -> AdmittedSequence:
    request = seq.live.request
    return AdmittedSequence(
        seq.sequence_id, request.prompt, request.sampling, request.stops, request.constraint
    )
