"""Who is where and holds what: every live request, its state, its place and its blocks.

Rule 1: a sequence changes its place (waiting, running, parked, gone) only here, together with
its state and its blocks, so that the books balance between any two calls. Rule 2: nothing is
decided here; `planner` and `scheduler` decide.

Places: WAITING ones that may start stand in ``waiting``, sorted by admission key; attached
choices of n > 1 stand nowhere until they fork. RUNNING ones stand in ``running``, sorted by
rank. Parked requests stand in ``parked``. An unforked parent counts as all its choices against
the seats of max_num_seqs, since they all run from the fork on; parked ones hold no seat.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from engine.core.blocks import BlockPool
from engine.core.lifecycle import Event, State
from engine.core.policy import blocks_for, waiting_key
from engine.core.prefix import PrefixCache, extend_keys, root_key
from engine.core.sequence import LiveRequest, Sequence
from engine.core.types import Request, RequestId, SequenceId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.config import SchedulerConfig
    from engine.core.blocks import Reservation
    from engine.core.credit import Credit
    from engine.core.types import BlockId

AGING_RESORT_S = 1.0  # guess: aging moves in steps of 10 s, so a second late is not noticed


class Ledger:
    """The state of the scheduler. Not thread-safe."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.cache = PrefixCache(self.pool)
        self.requests: dict[RequestId, LiveRequest] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.parked: dict[RequestId, LiveRequest] = {}
        self.released: list[SequenceId] = []
        self.num_seats = 0
        self.queued_tokens = 0
        self._next_id = 1
        self._sorted_at = 0.0

    # ---- places

    def admit(self, request: Request, credit: Credit, now: float) -> LiveRequest:
        """A new request, all its choices WAITING."""
        live = LiveRequest(
            request, credit, root=root_key(self.config.cache_namespace, request.cache_salt)
        )
        since = min(now, request.arrival)  # it has been waiting since it came
        for choice in range(request.n):
            live.sequences.append(Sequence(SequenceId(self._next_id), live, choice, since))
            self._next_id += 1
        self.requests[request.request_id] = live
        self._enqueue(live.parent, now)
        return live

    def start(self, seq: Sequence, now: float) -> None:
        """WAITING → RUNNING; its blocks come with the plan. An attached choice starts at its
        parent's fork, within the parent's seats."""
        if seq.is_attached:
            seq.is_attached = False
        else:
            self._dequeue(seq)
            self.num_seats += self.seats_of(seq)
        seq.advance(Event.START)
        insort(self.running, seq, key=_rank)
        seq.enter("decode" if seq.output else "prefill", now)

    def preempt(self, seq: Sequence, now: float) -> None:
        """RUNNING → WAITING, or PARKED without blocks from now on; what it computed is lost,
        what it said is not."""
        self._give_back_blocks(seq)
        was_running = seq.state is State.RUNNING
        seq.advance(Event.PREEMPT)
        if was_running:
            self._leave_running(seq)
            self._enqueue(seq, now)

    def unfork(self, child: Sequence, now: float) -> None:
        """Undo a fork whose step failed: the choice is attached to its parent again."""
        assert not child.blocks, child  # they went back with the step's reservation
        child.advance(Event.PREEMPT)
        self.running.remove(child)
        child.is_attached = True
        child.enter("queued", now)

    def park(self, live: LiveRequest, now: float) -> None:
        """All choices of a request whose stream is full stop being schedulable."""
        live.parked_since = now
        self.parked[live.request.request_id] = live
        for seq in live.sequences:
            if seq.state is State.RUNNING:
                self._leave_running(seq)
            elif seq.state is State.WAITING and not seq.is_attached:
                self._dequeue(seq)
            elif seq.state is not State.WAITING:
                continue
            seq.advance(Event.PARK)
            seq.enter("parked", now)

    def unpark(self, live: LiveRequest, now: float) -> None:
        """The reader drained: residents run on if there are seats, the others wait in line
        with the arrival they had."""
        live.parked_since = None
        del self.parked[live.request.request_id]
        for seq in live.sequences:
            if seq.state is not State.PARKED:
                continue
            if seq.blocks and self.num_seats + self.seats_of(seq) > self.config.max_num_seqs:
                self.preempt(seq, now)
            if seq.blocks:
                seq.advance(Event.UNPARK_RESIDENT)
                self.num_seats += self.seats_of(seq)
                insort(self.running, seq, key=_rank)
                seq.enter("decode" if seq.output else "prefill", now)
            else:
                seq.advance(Event.UNPARK_EVICTED)
                if not seq.is_attached:
                    self._enqueue(seq, now)
                seq.enter(self._phase_of_waiting(seq), now)

    def end(self, seq: Sequence, now: float) -> None:
        """Any live state → ENDING while a step in flight uses it, else FINISHED. The blocks of
        an ENDING one leave by `finish` at that step's commit."""
        was = seq.state
        seq.enter(seq.phase, now)
        if was is State.RUNNING:
            self._leave_running(seq)
        elif was is State.WAITING and not seq.is_attached:
            self._dequeue(seq)
        if seq.in_step:
            seq.advance(Event.END_IN_STEP)
        else:
            self.finish(seq)
        if seq.live.is_over:
            self.parked.pop(seq.live.request.request_id, None)

    def finish(self, seq: Sequence) -> None:
        """→ FINISHED: blocks back, the worker told to forget it, the request gone with its
        last choice."""
        seq.advance(Event.FINISH)
        self._give_back_blocks(seq)
        if seq.is_known_to_worker:
            self.released.append(seq.sequence_id)
        live = seq.live
        if all(other.state is State.FINISHED for other in live.sequences):
            del self.requests[live.request.request_id]
            live.sequences.clear()  # they know it, and would keep each other from being freed

    # ---- blocks and keys

    def take(self, reservation: Reservation, count: int) -> tuple[BlockId, ...] | None:
        """Fresh blocks, with the cache told of what they held."""
        taken = self.pool.take(reservation, count)
        self.cache.forget(self.pool.drain_reused())
        return taken

    def extend_keys(self, seq: Sequence, num_tokens: int) -> list[bytes]:
        """The keys of the sequence's full blocks within its first ``num_tokens`` tokens."""
        size, keys = self.config.block_size, seq.keys
        if len(keys) < num_tokens // size:
            assert num_tokens <= seq.num_known, f"{seq}: a block's key needs all of its tokens"
            # what has its key is not looked at again: a block costs the same at every length
            extend_keys(keys, seq.live.root, seq.tokens(len(keys) * size, num_tokens), size)
        return keys

    def prefix_keys(self, request: Request) -> list[bytes]:
        """The keys of a prompt's full blocks that may be cached; none where the request does not
        use the cache. Hashes the whole prompt."""
        keys: list[bytes] = []
        if self.uses_cache(request) and request.sampling.prompt_logprobs is None:
            root = root_key(self.config.cache_namespace, request.cache_salt)
            extend_keys(keys, root, request.prompt[:-1], self.config.block_size)
        return keys

    def cached_tokens(self, keys: list[bytes]) -> int:
        """Tokens of the prefix with these keys that need not be computed."""
        return self.config.block_size * len(self.cache.match(keys))

    def uses_cache(self, request: Request) -> bool:
        """The prefix cache is on and the request does not bypass it."""
        return self.config.prefix_cache and not request.bypass_prefix_cache

    def publish_computed(self, seq: Sequence, start: int, end: int) -> None:
        """Make the blocks matchable that computing positions ``start … end - 1`` completed."""
        size = self.config.block_size
        first, last = start // size, end // size
        if first == last or not self.uses_cache(seq.live.request):
            return
        keys = self.extend_keys(seq, end)
        for index in range(first, last):
            self.cache.publish(keys[index], seq.blocks[index])

    def seats_of(self, seq: Sequence) -> int:
        """How many of max_num_seqs the sequence takes while it runs."""
        return 1 + len(seq.live.attached) if seq.choice == 0 else 1

    # ---- the waiting line

    def sort_waiting(self, now: float) -> list[Sequence]:
        """The waiting line in admission order, aging applied at most a second late."""
        if now - self._sorted_at >= AGING_RESORT_S:
            for seq in self.waiting:
                seq.waiting_key = self.waiting_key_of(seq, now)
            self.waiting.sort(key=_waiting_key)
            self._sorted_at = now
        return self.waiting

    def waiting_key_of(self, seq: Sequence, now: float) -> tuple[float, ...]:
        """Where the sequence stands, or would stand, in the admission order."""
        return waiting_key(seq.live.request, now, self.config.aging_s, seq.sequence_id)

    def _enqueue(self, seq: Sequence, now: float) -> None:
        seq.waiting_key = self.waiting_key_of(seq, now)
        insort(self.waiting, seq, key=_waiting_key)
        self.queued_tokens += seq.num_tokens

    def _dequeue(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self.queued_tokens -= seq.num_tokens

    def _leave_running(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.num_seats -= self.seats_of(seq)

    def _give_back_blocks(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.num_computed = 0

    def _phase_of_waiting(self, seq: Sequence) -> str:
        if seq.output:
            return "decode"
        return "prefill" if seq.is_known_to_worker else "queued"

    # ---- the books

    def live_sequences(self) -> Iterator[Sequence]:
        """Every sequence that is not FINISHED."""
        for live in self.requests.values():
            yield from (seq for seq in live.sequences if seq.state is not State.FINISHED)

    def check(self) -> None:
        """Balance everything.

        Raises:
            AssertionError: naming what does not balance (I1, I2, I5 of engine/README.md).
        """
        self.pool.check([seq.blocks for seq in self.live_sequences()])
        self.cache.check()
        assert self.running == sorted(self.running, key=_rank)
        assert self.waiting == sorted(self.waiting, key=_waiting_key)
        assert self.queued_tokens == sum(seq.num_tokens for seq in self.waiting)
        assert self.num_seats == sum(self.seats_of(seq) for seq in self.running)
        assert self.num_seats <= self.config.max_num_seqs
        for seq in self.live_sequences():
            self._check_sequence(seq)

    def _check_sequence(self, seq: Sequence) -> None:
        parked = seq.live.request.request_id in self.parked
        assert (seq in self.running) == (seq.state is State.RUNNING), seq
        assert (seq in self.waiting) == (seq.state is State.WAITING and not seq.is_attached), seq
        assert (seq.state is State.PARKED) <= parked, seq
        if seq.state is State.WAITING or seq.is_attached:
            assert not seq.blocks, seq
        needed = blocks_for(seq.num_computed, self.config.block_size)
        assert len(seq.blocks) >= needed, seq
        assert seq.num_computed <= seq.num_tokens, seq
        assert seq.num_tokens == seq.num_prompt + len(seq.output) + seq.num_pending, seq
        assert min(seq.num_pending, seq.num_chunks) >= 0, seq
        assert seq.in_step <= 2, seq
        known_blocks = seq.num_known // self.config.block_size
        assert len(seq.keys) <= known_blocks, f"{seq}: keys of unknown tokens"


def _rank(seq: Sequence) -> tuple[int, float, int]:
    return seq.rank


def _waiting_key(seq: Sequence) -> tuple[float, ...]:
    return seq.waiting_key
