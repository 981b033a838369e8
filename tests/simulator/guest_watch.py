"""Watchers of guests: requests whose clients have lost their connections (D25)."""

from typing import Any

from engine.core.text.lifecycle import State
from engine.core.text.plan import StepPlan
from engine.core.text.scheduler import Scheduler
from engine.core.text.sequence import LiveText
from engine.requests.stream import RequestStream
from engine.requests.text.stream import TextStream


class GuestWatch:
    """Watches that guests (requests whose clients are away) get only what no other request needs.

    One plan may break a rule, because it was prepared before the client left or another request
    came; two plans in a row may not.
    """

    def __init__(self) -> None:
        self._was_wrong = False

    def planned(self, scheduler: Scheduler, plan: StepPlan, now: float) -> str:
        """Return what is wrong with a plan, or ""."""
        lives, rows = scheduler._ledger.requests.values(), {row.sequence for row in plan.rows}
        guests = [live for live in lives if live.is_guest]
        others = [seq for live in lives if not live.is_guest for seq in live.sequences]
        computed = [
            live for live in guests if rows.intersection(seq.sequence_id for seq in live.sequences)
        ]
        wrong = self._judge(scheduler, guests, computed, now)
        if computed and any(seq.state in (State.RUNNING, State.WAITING) for seq in others):
            wrong = f"{computed} are computed beside others"
        was_wrong, self._was_wrong = self._was_wrong, bool(wrong)
        return wrong if was_wrong else ""

    def _judge(
        self,
        scheduler: Scheduler,
        guests: list[LiveText],
        computed: list[LiveText],
        now: float,
    ) -> str:
        config = scheduler.config
        # A guest that this plan has parked gives its blocks back at the next plan.
        before = [one for one in guests if one.parked_since is not None and one.parked_since < now]
        held = sum(len(seq.blocks) for live in before for seq in live.sequences)
        if held > config.num_blocks // 16:
            return f"parked guests hold {held} of {config.num_blocks} blocks"
        seats = sum(live.request.num_choices for live in computed)
        if len(computed) > 1 and seats > config.max_num_seqs // 8:
            return f"guests have {seats} of {config.max_num_seqs} seats"
        return ""


class AwayWatch:
    """Watches that schedulers know which requests' clients are away.

    A request whose client left before the scheduler knew of it may be planned once.
    """

    def __init__(self, streams: list[RequestStream[Any]]) -> None:
        self._streams = streams
        self._unknown: dict[Scheduler, set[str]] = {}

    def planning(self, scheduler: Scheduler) -> str:
        """Return what a scheduler knows wrongly before a plan, or ""."""
        streams = {one.core_id: one for one in self._streams if isinstance(one, TextStream)}
        unknown = set()
        for name, live in scheduler._ledger.requests.items():
            stream = streams.get(name)
            if stream is None or not stream.attach_token or live.is_over:
                continue
            if stream.is_closed or stream.reason is not None:
                continue
            if live.is_guest and stream.is_read:
                return f"{name} is a guest, and its client is there"
            if not live.is_guest and not stream.is_read:
                unknown.add(name)
        found = unknown & self._unknown.get(scheduler, set())
        self._unknown[scheduler] = unknown
        return f"{found} are no guests, and their clients are away" if found else ""
