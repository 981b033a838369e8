"""Clients whose requests are background work, and the watcher of it: by its own account of every
plan, background work runs only where nothing else could, and its prefixes are evicted first.

They are drawn by a generator of its own, so that worlds without them stay the same.
"""

import random
from collections.abc import Iterable
from dataclasses import replace

from engine.core.common.events import PauseMode
from engine.core.text.lifecycle import State
from engine.core.text.plan import StepPlan
from engine.core.text.scheduler import Scheduler
from engine.core.text.sequence import Sequence
from engine.requests.encode.values import EmbedRequest, RerankRequest
from engine.requests.text.values import GenerateRequest
from tests.simulator.clients import Client

FAULT = "background"
SHARE = 0.2  # of worlds
CLASSED = (GenerateRequest, EmbedRequest, RerankRequest)


def is_drawn(seed: int) -> bool:
    """Return whether clients of the world of this seed have background work."""
    return _rng(seed).random() < SHARE


def _rng(seed: int) -> random.Random:
    return random.Random(f"background {seed}")


def ask(seed: int, clients: Iterable[Client]) -> tuple[Client, ...]:
    """Return the clients, some of whose requests are background work."""
    rng = _rng(seed)
    share = rng.choice([0.2, 0.5, 0.9])
    return tuple(_ask(client) if rng.random() < share else client for client in clients)


def _ask(client: Client) -> Client:
    if not isinstance(client.request, CLASSED):
        return client
    return replace(client, request=replace(client.request, background=True, check=False))


class BackgroundWatch:
    """Watches that background work delays no other request by more than the step in flight."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_known = False  # whether there has been any background work
        self._foreground: set[bytes] = set()  # keys of cached blocks that others have used
        self._cached: set[bytes] = set()
        self._first: set[bytes] = set()  # keys of free blocks that only background work has used
        scheduler._ledger.publish_computed = self._publish  # type: ignore[method-assign]

    def _publish(self, seq: Sequence, start: int, end: int) -> None:
        ledger = self._scheduler._ledger
        type(ledger).publish_computed(ledger, seq, start, end)
        if not seq.live.is_background and ledger.keys.uses_cache(seq.live.request):
            size = ledger.config.block_size
            self._foreground.update(ledger.keys.extend(seq, end)[start // size : end // size])

    def applied(self) -> None:
        """Take note of which cached blocks requests use that are not background work."""
        ledger = self._scheduler._ledger
        lives = ledger.requests.values()
        self._is_known |= any(live.is_background for live in lives)
        key_of = ledger.cache._key_of
        self._cached = set(key_of.values())
        self._foreground &= self._cached
        for live in lives:
            if not live.is_background:
                blocks = [block for seq in live.sequences for block in seq.blocks]
                self._foreground |= {key_of[block] for block in blocks if block in key_of}
        free = {key for block, key in key_of.items() if not ledger.pool.references(block)}
        self._first = free - self._foreground

    def planned(self, plan: StepPlan | None, now: float, pause: PauseMode | None) -> str:
        """Return what is wrong with a plan that is sent now, or ""."""
        before, first = self._foreground & self._cached, self._first
        self.applied()
        if not self._is_known:
            return ""
        lost, left = before - self._cached, first & self._first
        if lost and left:
            return f"{len(lost)} prefixes are evicted before {len(left)} of background work"
        return self._judge_rows(plan, now, pause)

    def _judge_rows(self, plan: StepPlan | None, now: float, pause: PauseMode | None) -> str:
        lives = self._scheduler._ledger.requests.values()
        sequences = [seq for live in lives for seq in live.sequences if not live.is_guest]
        planned = {row.sequence for row in plan.rows} if plan is not None else set()
        rows = [seq for seq in sequences if seq.sequence_id in planned]
        if plan is None or not any(seq.live.is_background for seq in rows):
            return ""
        others = [seq for seq in sequences if not seq.live.is_background]
        for seq in others:
            if seq in rows:
                return f"background work shares a step with {seq}"
        able = [seq for seq in others if _could_run(seq, now, pause)]
        return f"background work goes before {able}" if able else ""


def _could_run(seq: Sequence, now: float, pause: PauseMode | None) -> bool:
    """Return whether a sequence could have been in a step that has background work only. Background
    work and parked requests keep neither memory nor seats from the sequence, so that only its
    reader, its deadline or a pause can hold it up."""
    if seq.is_late(now) or seq.is_attached:
        return False
    num_messages = 1 + (len(seq.live.attached) if seq.choice == 0 else 0)
    if seq.state is State.WAITING:
        if pause is not None and not seq.is_known_to_worker:
            return False
        num_messages += sum(other.state is State.RUNNING for other in seq.live.sequences)
    return seq.state in (State.RUNNING, State.WAITING) and seq.credit.free >= num_messages
