"""Where each sequence is and what it holds: its state, its place and its blocks.

Rule 1: a sequence changes its place (waiting, running, parked, none) only here, together with its
state, and gives its blocks back here; `step_builder` gives it blocks. The invariants of `check`
hold while no step is built. Rule 2: nothing is decided here; `admission`, `step_builder` and
`scheduler` decide.

Places: WAITING sequences that may start are in ``waiting``; attached choices of n > 1 are in no
place until they fork. RUNNING ones are in ``running``, sorted by rank. Parked requests are in
``parked``. Seats: each running sequence takes one of max_num_seqs. A parent that has not forked
takes a seat for each of its choices, since they all run from the fork on; parked ones take none.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from typing import TYPE_CHECKING

from engine.core.common.phases import Phase
from engine.core.common.types import SequenceId
from engine.core.text.lifecycle import Event, State
from engine.core.text.memory.blocks import BlockPool, blocks_for
from engine.core.text.memory.prefix import PrefixCache
from engine.core.text.memory.sequence_keys import SequenceKeys
from engine.core.text.memory.states import States
from engine.core.text.parked import Parked
from engine.core.text.sequence import LiveText, Sequence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.config import SchedulerConfig
    from engine.core.common.credit import Credit
    from engine.core.common.shares import Shares
    from engine.core.common.types import BlockId, RequestId
    from engine.core.common.waiting_queue import WaitingQueue
    from engine.core.text.memory.blocks import Reservation
    from engine.core.text.types import Request


class Ledger:
    """The state of one scheduler. Not thread-safe. ``shares`` are those of the holders of
    ``requests``, which are the live ones; ``unread`` are those of them that are parked because of
    their readers."""

    def __init__(
        self,
        config: SchedulerConfig,
        shares: Shares,
        requests: dict[RequestId, LiveText],
        waiting: WaitingQueue[Sequence],
        unread: dict[RequestId, LiveText],
    ) -> None:
        self.config = config
        self.shares = shares
        self.requests = requests
        self.waiting = waiting
        self.pool = BlockPool(config.num_blocks)
        self.cache = PrefixCache(self.pool)
        self.states = States(config.num_states) if config.num_states else None
        self.keys = SequenceKeys(config)
        self.running: list[Sequence] = []
        self.parked = Parked(unread)
        self.released: list[SequenceId] = []  # ended sequences that the next plan releases
        self.num_seats = 0
        self.num_background = 0  # live background requests
        self._next_id = 1

    # ---- places

    def admit(self, request: Request, credit: Credit, now: float) -> LiveText:
        """Put a new request into the queue, all its choices WAITING, and return its record."""
        share = self.shares.enter(request.holder, request.weight)
        live = LiveText(request, credit, share, self.keys.root_of(request))
        since = min(now, request.arrival)  # the request has been waiting since it arrived
        for choice in request.choices:
            live.sequences.append(Sequence(SequenceId(self._next_id), live, choice, since))
            self._next_id += 1
        self.num_background += live.is_background
        for seq in live.sequences:
            if not seq.is_attached:
                self.waiting.add(seq, now)
                self.shares.activate(share)
        return live

    def start(self, seq: Sequence, now: float) -> None:
        """Move a sequence from WAITING to RUNNING; the plan gives it its blocks. An attached choice
        starts at its parent's fork and takes one of the parent's seats."""
        if seq.is_attached:
            seq.is_attached = False
            self.shares.activate(seq.live.share)
        else:
            self.waiting.remove(seq)
            self.num_seats += self.seats_of(seq)
        seq.advance(Event.START)
        insort(self.running, seq, key=_rank)
        seq.enter(Phase.DECODE if seq.has_sampled else Phase.PREFILL, now)

    def preempt(self, seq: Sequence, now: float) -> None:
        """Take a sequence's blocks: a RUNNING one waits again, a PARKED one stays parked. Its
        computed KV values are lost; its output is not."""
        self._give_back_blocks(seq)
        was_running = seq.state is State.RUNNING
        seq.advance(Event.PREEMPT)
        if was_running:
            self._leave_running(seq)
            self.waiting.add(seq, now)
        else:
            self.parked.note_loss(seq.live)

    def unfork(self, child: Sequence, now: float) -> None:
        """Undo a fork whose step failed: the choice is attached to its parent again."""
        assert not child.blocks, child  # its blocks were given back with the step's reservation
        child.advance(Event.PREEMPT)
        self.running.remove(child)
        self.shares.deactivate(child.live.share)
        child.is_attached = True
        child.enter(Phase.QUEUED, now)

    def park(self, live: LiveText, now: float) -> None:
        """Park every choice of a request whose stream is full or whose client is away."""
        live.parked_since = now
        self.parked.add(live)
        for seq in live.sequences:
            if seq.state is State.RUNNING:
                self._leave_running(seq)
            elif seq.state is State.WAITING and not seq.is_attached:
                self.waiting.remove(seq)
            elif seq.state is not State.WAITING:
                continue
            if not seq.is_attached:
                self.shares.deactivate(live.share)
            seq.advance(Event.PARK)
            seq.enter(Phase.PARKED, now)

    def unpark(self, live: LiveText, now: float) -> None:
        """End a request's parking, since its reader has drained its stream, or its client is back.
        Choices that still hold blocks run on if there are seats for them; the others wait, with the
        arrival they had."""
        live.parked_since = None
        self.parked.remove(live)
        for seq in live.sequences:
            if seq.state is not State.PARKED:
                continue
            if seq.blocks and self.seats_over(seq) > 0:
                self.preempt(seq, now)
            if seq.blocks:
                seq.advance(Event.UNPARK_RESIDENT)
                self.num_seats += self.seats_of(seq)
                insort(self.running, seq, key=_rank)
                self.shares.activate(live.share)
                seq.enter(Phase.DECODE if seq.has_sampled else Phase.PREFILL, now)
            else:
                seq.advance(Event.UNPARK_EVICTED)
                if not seq.is_attached:
                    self.waiting.add(seq, now)
                    self.shares.activate(live.share)
                seq.enter(self._phase_of_waiting(seq), now)

    def end(self, seq: Sequence, now: float) -> None:
        """Move a sequence from any live state to ENDING if a step in flight uses it, otherwise to
        FINISHED. An ENDING one gives its blocks back by `finish`, at that step's commit."""
        was = seq.state
        seq.enter(seq.phase, now)
        if was is State.RUNNING:
            self._leave_running(seq)
            self.shares.deactivate(seq.live.share)
        elif was is State.WAITING and not seq.is_attached:
            self.waiting.remove(seq)
            self.shares.deactivate(seq.live.share)
        if seq.in_step:
            seq.advance(Event.END_IN_STEP)
        else:
            self.finish(seq)
        if seq.live.is_over:
            self.parked.remove(seq.live)

    def finish(self, seq: Sequence) -> None:
        """Move a sequence to FINISHED: give its blocks back, have the worker release it, and forget
        the request with its last choice."""
        seq.advance(Event.FINISH)
        self._give_back_blocks(seq)
        if seq.is_known_to_worker:
            self.released.append(seq.sequence_id)
        live = seq.live
        if all(other.state is State.FINISHED for other in live.sequences):
            del self.requests[live.request.request_id]
            self.num_background -= seq.is_background
            self.shares.leave(live.share)
            live.sequences.clear()  # a reference cycle would keep the sequences in memory

    # ---- blocks

    def take(self, reservation: Reservation, count: int) -> tuple[BlockId, ...] | None:
        """Return fresh blocks, whose contents the cache has forgotten; None if too few are free."""
        taken = self.pool.take(reservation, count)
        self.cache.forget(self.pool.drain_reused())
        return taken

    def match(self, keys: list[bytes]) -> tuple[BlockId, ...]:
        """Return the blocks of the longest prefix with these keys that need not be computed."""
        cached = self.cache.match(keys)
        return cached if self.states is None else self.states.cut(keys, cached)

    def keys_of(self, request: Request) -> list[bytes]:
        """Return the keys of a prompt's blocks; the request need not be submitted."""
        return self.keys.of_prompt(request)

    def cached_tokens(self, keys: list[bytes]) -> int:
        """Return how many tokens of the prefix with these keys need not be computed."""
        return self.config.block_size * len(self.match(keys))

    def reset_cache(self) -> None:
        """Forget every cached prefix; live sequences keep their blocks and states."""
        self.cache.reset()
        if self.states is not None:
            self.states.snapshots.reset()

    def publish_computed(self, seq: Sequence, start: int, end: int) -> None:
        """Publish the blocks that computing positions ``start … end - 1`` completed."""
        size = self.config.block_size
        first, last = start // size, end // size
        if first == last or not self.keys.uses_cache(seq.live.request):
            return
        keys, observer = self.keys.extend(seq, end), self.cache.observer
        is_background = bool(self.num_background) and seq.is_background
        for index in range(first, last):
            is_new = self.cache.publish(keys[index], seq.blocks[index], is_background=is_background)
            if is_new and observer is not None and self.keys.is_plain(seq):
                parent = keys[index - 1] if index else None
                observer.stored(keys[index], parent, seq.tokens(index * size, (index + 1) * size))

    def give_back_behind(self, seq: Sequence) -> None:
        """Give back the sequence's blocks for positions that are not computed yet."""
        needed = blocks_for(seq.num_computed, self.config.block_size)
        behind = seq.blocks[needed:]
        del seq.blocks[needed:]
        self.pool.release(behind)

    # ---- seats

    def seats_of(self, seq: Sequence) -> int:
        """Return how many of max_num_seqs the sequence takes while it runs."""
        return 1 + len(seq.live.attached) if seq.choice == 0 else 1

    def seats_over(self, seq: Sequence) -> int:
        """Return how many seats are lacking for the sequence to run, too; 0 or less if none are."""
        return self.num_seats + self.seats_of(seq) - self.config.max_num_seqs

    # ---- background work

    def background_gives_way(self) -> bool:
        """Return whether there is background work, and another sequence runs or waits."""
        if not self.num_background:
            return False
        running, waiting = self.running, self.waiting.items
        return bool(
            (running and not running[0].is_background) or (waiting and not waiting[0].is_background)
        )

    def _leave_running(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.num_seats -= self.seats_of(seq)

    def _give_back_blocks(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []
        if self.states is not None:
            self.states.release(seq)
        seq.num_computed = 0

    def _phase_of_waiting(self, seq: Sequence) -> Phase:
        if seq.has_sampled:
            return Phase.DECODE
        return Phase.PREFILL if seq.is_known_to_worker else Phase.QUEUED

    # ---- invariants

    def live_sequences(self) -> Iterator[Sequence]:
        """Yield every sequence that is not FINISHED."""
        for live in self.requests.values():
            yield from (seq for seq in live.sequences if seq.state is not State.FINISHED)

    def check(self) -> None:
        """Check every invariant of places, blocks and counts (I1, I2, I5 of engine/README.md).

        Raises:
            AssertionError: The message names the sequence or block that breaks one.
        """
        self.pool.check([seq.blocks for seq in self.live_sequences()])
        self.cache.check()
        self.parked.check()
        assert self.running == sorted(self.running, key=_rank)
        assert self.num_seats == sum(self.seats_of(seq) for seq in self.running)
        assert self.num_seats <= self.config.max_num_seqs
        active = Counter(
            seq.live.request.holder
            for seq in self.live_sequences()
            if seq.state in (State.RUNNING, State.WAITING) and not seq.is_attached
        )
        background = [x for x in self.requests.values() if x.is_background]
        assert self.num_background == len(background)
        self.shares.check(active, Counter(x.request.holder for x in self.requests.values()))
        for seq in self.live_sequences():
            self._check_sequence(seq)

    def _check_sequence(self, seq: Sequence) -> None:
        parked = seq.live in self.parked
        assert (seq in self.running) == (seq.state is State.RUNNING), seq
        assert (seq in self.waiting.items) == (
            seq.state is State.WAITING and not seq.is_attached
        ), seq
        assert (seq.state is State.PARKED) <= parked, seq
        if seq.state is State.WAITING or seq.is_attached:
            assert not seq.blocks, seq
        needed = blocks_for(seq.num_computed, self.config.block_size)
        assert len(seq.blocks) >= needed, seq
        # More blocks than its computed tokens need are held only in a step, for unverified drafts.
        assert seq.in_step or len(seq.blocks) == needed, seq
        assert seq.num_computed <= seq.num_tokens, seq
        assert seq.num_tokens == seq.num_prompt + len(seq.output) + seq.num_pending, seq
        assert min(seq.num_pending, seq.num_chunks) >= 0, seq
        assert seq.in_step <= 2, seq
        known_blocks = seq.num_known // self.config.block_size
        assert len(seq.keys) <= known_blocks, f"{seq}: keys of unknown tokens"


def _rank(seq: Sequence) -> tuple[int, float, int]:
    return seq.rank
