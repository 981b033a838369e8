"""Which sequences may start, which give way, and how many blocks are missing: decisions without
effects (D5, D6).

Rule: every function reads the ledger and returns an answer; the step builder acts on it. (A
sequence's prefix-cache keys are computed here when first needed, and the sequence keeps them.)

``matched`` is what `match` returned for the sequence: the cached blocks of its prefix.
``prompt_limit`` is how many prompt tokens the step may compute beside its decodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

from engine.core.common.waiting_queue import BACKGROUND_FROM
from engine.core.text.lifecycle import State
from engine.core.text.memory.blocks import blocks_for
from engine.core.text.plan import SCORED_TOKENS_MAX

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from collections.abc import Sequence as SequenceOf

    from engine.core.common.shares import Share
    from engine.core.common.types import BlockId
    from engine.core.text.ledger import Ledger
    from engine.core.text.sequence import Rank, Sequence

# ---- the cached prefix of a sequence


def match(ledger: Ledger, seq: Sequence) -> tuple[BlockId, ...]:
    """Return the cached blocks of the sequence's prefix; at least one token is left to compute."""
    keys = _matchable_keys(ledger, seq)
    return ledger.match(keys) if keys else ()


def cached_position(ledger: Ledger, seq: Sequence) -> int:
    """Return the position up to which the sequence's keys and values are cached, with or without a
    snapshot of the state."""
    return ledger.config.block_size * len(ledger.cache.match(_matchable_keys(ledger, seq)))


def _matchable_keys(ledger: Ledger, seq: Sequence) -> list[bytes]:
    if not ledger.keys.uses_cache(seq.live.request) or not len(ledger.cache) or seq.is_scoring:
        return []
    usable = seq.num_tokens - 1
    return ledger.keys.extend(seq, usable)[: usable // ledger.config.block_size]


def next_key(ledger: Ledger, seq: Sequence, matched: tuple[BlockId, ...]) -> bytes | None:
    """Return the key of the first block that the sequence lacks; None if that is its last block and
    not full, or if it may not be shared."""
    if not ledger.keys.uses_cache(seq.live.request) or seq.is_scoring:
        return None
    usable = seq.num_tokens - 1
    keys = ledger.keys.extend(seq, usable)[: usable // ledger.config.block_size]
    return keys[len(matched)] if len(matched) < len(keys) else None


def _will_be_pending(
    ledger: Ledger, seq: Sequence, matched: tuple[BlockId, ...], prompt_limit: int
) -> bool:
    """Return whether a running prompt is about to compute the first block that ``seq`` lacks."""
    size = ledger.config.block_size
    key, end = next_key(ledger, seq, matched), (len(matched) + 1) * size
    if key is None:
        return False
    for other in _counted(ledger, seq):
        # a token that a step in flight samples is not known yet, so its block has no key
        known = min(other.num_known, other.num_computed + prompt_limit)
        if (
            other.num_computed < end <= known
            and other.num_computed + 1 < known
            and ledger.keys.uses_cache(other.live.request)
            and ledger.keys.extend(other, end)[end // size - 1] == key
        ):
            return True
    return False


# ---- how many blocks are missing


def lacks(ledger: Ledger, seq: Sequence) -> int:
    """Return how many blocks a waiting sequence lacks to start."""
    return max(0, shortfall(ledger, seq, match(ledger, seq)))


def shortfall(ledger: Ledger, seq: Sequence, matched: tuple[BlockId, ...]) -> int:
    """Return how many blocks are lacking for the whole of ``seq`` to be computed beside the running
    sequences; 0 or less if none are.

    Its whole prompt counts, and so do the blocks that running prompts still need: otherwise prompts
    would start only to preempt each other half-way.
    """
    promised = _promised(ledger, seq)
    needed = still_needs(ledger, seq) - len(matched)
    free_matched = sum(1 for block in matched if ledger.pool.references(block) == 0)
    return needed - (ledger.pool.num_free - free_matched - promised)


def still_needs(ledger: Ledger, seq: Sequence, *, with_next: bool = False) -> int:
    """Return how many blocks a sequence lacks for its known tokens and for the choices that fork
    from it (n > 1), which copy its last block if that is not full. ``with_next``: also for the next
    token of each choice."""
    size = ledger.config.block_size
    length = seq.num_tokens + (not seq.num_pending) if with_next else seq.num_known
    has_own_last = with_next or length % size != 0
    copies = len(seq.live.attached) if has_own_last and seq.choice == 0 else 0
    return max(0, blocks_for(length, size) + copies - len(seq.blocks))


def others_running(ledger: Ledger) -> list[Sequence]:
    """Return the running sequences that are not background work, in rank order."""
    end = bisect_left(ledger.running, BACKGROUND_FROM, key=lambda seq: seq.rank[0])
    return ledger.running[:end]


def _counted(ledger: Ledger, first: Sequence) -> list[Sequence]:
    """Return the running sequences that go on beside ``first``: background work does not beside
    others."""
    if not ledger.num_background or first.is_background:
        return ledger.running
    return others_running(ledger)


def _promised(ledger: Ledger, first: Sequence) -> int:
    """Return how many blocks the running sequences still need beside ``first``. Where no step is in
    flight, the number is the same before their rows are planned and after. A sequence before
    ``first`` in rank counts with its next token, for which it would preempt ``first``; a later
    sequence can wait for the block of its next token."""
    size, needed = ledger.config.block_size, 0
    # This runs for each sequence that may start, so sequences with all their blocks are skipped.
    for seq in _counted(ledger, first):
        may_fork = not seq.output and len(seq.live.sequences) > 1
        if may_fork or len(seq.blocks) * size <= seq.num_tokens:
            needed += still_needs(ledger, seq, with_next=seq.rank < first.rank)
    return needed


# ---- how many state slots are missing


def states_over(ledger: Ledger, seq: Sequence) -> int:
    """Return how many state slots a sequence and its choices lack to start; 0 or less if none."""
    if ledger.states is None:
        return 0
    return ledger.seats_of(seq) + promised_states(ledger) - ledger.states.pool.num_free


def promised_states(ledger: Ledger) -> int:
    """Return how many state slots are promised to choices that are to fork from sequences with
    blocks."""
    residents = (*ledger.running, *ledger.parked.residents())
    return sum([ledger.seats_of(seq) - 1 for seq in residents if seq.state_slot is not None])


def states_of_next(ledger: Ledger) -> int:
    """Return how many state slots the first sequence in the queue needs, 0 if there are no seats
    for it. Snapshots, which only save work, must not take these slots."""
    first = next(iter(ledger.waiting.items), None)
    return ledger.seats_of(first) if first is not None and ledger.seats_over(first) <= 0 else 0


# ---- who may start


def has_seats(ledger: Ledger, seq: Sequence) -> bool:
    """Return whether there are seats, and state slots if the model has states, for a sequence and
    its choices to start."""
    return ledger.seats_over(seq) <= 0 and states_over(ledger, seq) <= 0


def has_slots(ledger: Ledger, seq: Sequence, prompt_limit: int) -> bool:
    """Return whether the sequence's stream has room for the messages of its start, and for one
    message of each running choice of its request: else all choices would be parked."""
    free = seq.credit.free
    free -= sum(other.state is State.RUNNING for other in seq.live.sequences)
    if free >= 1 + (len(seq.live.attached) if seq.choice == 0 else 0):
        return True
    # a prompt that takes several rows begins without a message
    missing = seq.num_tokens - len(match(ledger, seq)) * ledger.config.block_size
    return free >= 0 and missing > prompt_limit


# ---- who gives way


def order_victims(
    parked: Iterable[Sequence], running: Iterable[Sequence], rank: Rank
) -> list[Sequence]:
    """Return the sequences that may lose their blocks to a sequence of ``rank``, in the order in
    which they lose them.

    Parked sequences come first, guests before others and the newest first: a client that is away or
    does not read must cost the others nothing, so a parked sequence gives way even to a newer one
    (D6 lets a sequence preempt only those after it; a parked one counts as after every running
    one). Then come the running ones after ``rank`` by (priority, arrival), the last first: the
    oldest always goes on. ``running`` is sorted by rank.
    """
    later = [seq for seq in running if seq.rank > rank]
    first = sorted(parked, key=lambda seq: (seq.live.is_guest, seq.rank), reverse=True)
    return first + later[::-1]


def _by_share(
    ledger: Ledger, seq: Sequence, running: Iterable[Sequence], num_new: int, *, of_seats: bool
) -> list[Sequence]:
    """Return the running sequences that may give way to a sequence of another holder, in the order
    in which they do: each time the last one of the holder that has the most for its weight, as long
    as it then still has as much as ``seq``'s holder will have with ``num_new`` blocks, or seats,
    more. So what was given up is never taken back in the same way, and no holder's last one gives
    way. Background work and the rest are apart.
    """
    size = ledger.seats_of if of_seats else (lambda other: len(other.blocks))
    held: Counter[Share] = Counter()
    running = [other for other in running if other.is_background == seq.is_background]
    for other in ledger.running:
        if other.is_background == seq.is_background:
            held[other.live.share] += size(other)
    own = seq.live.share
    after = (held[own] + num_new) / own.weight
    left: dict[Share, list[Sequence]] = {}
    for other in running:
        if other.live.share is not own:
            left.setdefault(other.live.share, []).append(other)
    victims = []
    while left:
        most = max(left, key=lambda share: held[share] / share.weight)
        victim = left[most].pop()
        held[most] -= size(victim)
        if held[most] / most.weight < after:
            break
        victims.append(victim)
        if not left[most]:
            del left[most]
    return victims


def victims_for_running(ledger: Ledger, seq: Sequence, count: int) -> list[Sequence]:
    """Return which sequences to preempt so that ``count`` blocks are free for a running sequence.
    The list is empty if those that may give way hold too few blocks: they would start again at
    once.
    """
    running = [other for other in ledger.running if not other.in_step]
    return _first_of(ledger, order_victims(_parked_residents(ledger), running, seq.rank), count)


def victims_by_share(ledger: Ledger, seq: Sequence, count: int) -> list[Sequence]:
    """Return the same among several holders, of whom others' sequences give way by what these
    hold."""
    running = [other for other in ledger.running if not other.in_step]
    order = order_victims(_parked_residents(ledger), running, seq.rank)
    others = _by_share(ledger, seq, running, count, of_seats=False)
    return _first_of(ledger, _among_holders(order, others, seq), count)


def _first_of(ledger: Ledger, order: list[Sequence], count: int) -> list[Sequence]:
    """Return the first sequences whose blocks make ``count`` blocks free; none if all are too
    few."""
    lacking = count - ledger.pool.num_free
    victims: list[Sequence] = []
    released: Counter[BlockId] = Counter()
    for victim in order:
        victims.append(victim)
        lacking -= _frees(ledger, victim, released)
        if lacking <= 0:
            return victims
    return []


def _among_holders(order: list[Sequence], others: list[Sequence], seq: Sequence) -> list[Sequence]:
    """Return who gives way to ``seq`` among several holders: of ``order`` the parked sequences and,
    if ``seq`` is none, background work; then the ``others``, then those of ``order`` that are of
    its own holder."""
    parked = [other for other in order if other.state is not State.RUNNING]
    left = [other for other in order if other.state is State.RUNNING]
    behind = [other for other in left if other.is_background > seq.is_background]
    own = [x for x in left if x.live.share is seq.live.share and x not in behind]
    return [*parked, *behind, *others, *own]


def victims_for_first(
    ledger: Ledger,
    first: Sequence,
    now: float,
    prompt_limit: int,
    let_in: SequenceOf[Share] = (),
) -> list[Sequence]:
    """Return which sequences to preempt so that ``first``, the head of the queue, can start.

    The list is empty if ``first`` can start already; if all sequences after it hold too few blocks;
    or if it would not start even then, because of its reader, the step's budget, or a prefix that
    another sequence is computing.

    A running sequence gives way only if it comes after ``first`` in the admission order, too:
    otherwise, because of its age, it would stand before ``first`` in the queue and start again at
    once. The key of ``first`` is the one by which the queue sorted it, up to a second ago, because
    that key decides which of the two would stand before the other.

    With several holders, ``let_in`` are those whose rows the next step has, and ``first`` is one's.
    """
    if not has_slots(ledger, first, prompt_limit):
        return []
    matched = match(ledger, first)
    lacking, seats_over = shortfall(ledger, first, matched), ledger.seats_over(first)
    over = states_over(ledger, first)
    is_free = max(lacking, seats_over, over) <= 0
    if is_free or _will_be_pending(ledger, first, matched, prompt_limit):
        return []
    key = first.waiting_key
    later = [
        seq
        for seq in ledger.running
        if seq.rank > first.rank and ledger.waiting.key_of(seq, now) > key
    ]
    parked = _parked_residents(ledger) if max(lacking, over) > 0 else []
    victims: list[Sequence] = []
    released: Counter[BlockId] = Counter()
    shared = frozenset(matched)
    order = order_victims(parked, later, first.rank)
    if let_in:
        of_seats = max(lacking, over) <= 0
        num_new = ledger.seats_of(first) if of_seats else still_needs(ledger, first) - len(matched)
        # Holders whose rows come before would start what they gave up again at once.
        sooner = set(let_in[: let_in.index(first.live.share)])
        running = [seq for seq in ledger.running if seq.live.share not in sooner]
        others = _by_share(ledger, first, running, num_new, of_seats=of_seats)
        order = _among_holders(order, others, first)
    for victim in order:
        if max(lacking, seats_over, over) <= 0:
            break
        if max(lacking, over) <= 0 and victim.state is not State.RUNNING:
            continue  # a parked sequence has no seat to give back
        victims.append(victim)
        lacking -= _frees(ledger, victim, released, but=shared)
        over -= ledger.seats_of(victim)
        if victim.state is State.RUNNING:
            if victim.is_background == first.is_background:  # else it was not counted
                lacking -= still_needs(ledger, victim)
            seats_over -= ledger.seats_of(victim)
    is_free = max(lacking, seats_over, over) <= 0
    if not is_free:
        return []
    # with several holders, the first one starts before the running ones are planned
    is_left = bool(let_in) or _has_tokens_left(ledger, victims, prompt_limit, first)
    return victims if is_left else []


def _has_tokens_left(
    ledger: Ledger, victims: list[Sequence], prompt_limit: int, first: Sequence
) -> bool:
    """Return whether the running prompts leave some of the step's tokens once the victims are gone.
    If no tokens are left, it is too early to preempt."""
    room, wanted, score_left = ledger.config.max_num_batched_tokens, 0, SCORED_TOKENS_MAX
    for seq in _counted(ledger, first):
        if seq in victims:
            continue
        count = seq.num_tokens - seq.num_computed
        if seq.is_scoring:  # a step scores `SCORED_TOKENS_MAX` positions of prompts
            count = min(count, max(1, score_left))
            score_left -= count
        if count == 1:
            room -= 1
        else:
            wanted += count
    return wanted < min(prompt_limit, room)


def _frees(
    ledger: Ledger,
    victim: Sequence,
    released: Counter[BlockId],
    *,
    but: Collection[BlockId] = (),
) -> int:
    """Return how many blocks become free when the victim gives its blocks back, and add these to
    ``released``, the blocks that other victims have given back: victims may share a block. ``but``
    are blocks that do not count, because the sequence that needs room will share them."""
    released.update(victim.blocks)
    references = ledger.pool.references
    return sum(
        1 for block in victim.blocks if references(block) == released[block] and block not in but
    )


def _parked_residents(ledger: Ledger) -> list[Sequence]:
    """Return the parked sequences that hold blocks and are in no step."""
    return [seq for seq in ledger.parked.residents() if not seq.in_step]
