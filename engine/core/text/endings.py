"""How sequences end: exactly one `Finished` event each.

Rule: no other part of a text model's scheduler emits `Finished`. A sequence that a step in flight
uses gives its blocks back at that step's commit (`Ledger.end`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.common.events import Finished

if TYPE_CHECKING:
    from engine.core.common.events import OutputEvent
    from engine.core.common.meter import EqualSteps
    from engine.core.common.types import EndReason
    from engine.core.text.ledger import Ledger
    from engine.core.text.sequence import LiveText, Sequence
    from engine.errors import FieldViolation

RUN_SMOOTHING = 0.05  # weight of the newest end in `run_s`; estimate: the last 20 ends weigh 2/3


class Endings:
    """Ends sequences and requests; appends their events to ``events``, and has ``metering``
    settled before.

    ``run_s`` is the running average of the seconds that sequences ran until they ended; 0 while
    none has ended.
    """

    def __init__(self, ledger: Ledger, events: list[OutputEvent], metering: EqualSteps) -> None:
        self._ledger = ledger
        self._events = events
        self._metering = metering
        self.run_s = 0.0

    def end(
        self,
        seq: Sequence,
        reason: EndReason,
        now: float,
        *,
        matched: str | int | None = None,
        detail: str = "",
        violation: FieldViolation | None = None,
    ) -> None:
        """End one choice, which has not ended yet. Its request's meter is right from then on."""
        self._metering.settle()
        phase, run_s = seq.phase, seq.run_s(now)
        self._ledger.end(seq, now)
        if run_s > 0:
            self.run_s += RUN_SMOOTHING * (run_s - self.run_s) if self.run_s else run_s
        self._events.append(
            Finished(
                seq.request_id,
                seq.choice,
                reason,
                seq.usage(),
                seq.timings(),
                matched,
                phase,
                detail,
                violation,
            )
        )

    def end_request(
        self,
        live: LiveText,
        reason: EndReason,
        now: float,
        detail: str = "",
        violation: FieldViolation | None = None,
    ) -> None:
        """End every choice that has not ended."""
        for seq in list(live.sequences):
            if not seq.has_ended:
                self.end(seq, reason, now, detail=detail, violation=violation)
