"""The watcher of a text model's core, which judges plans."""

from engine.core.common.events import (
    InputEvent,
    OutputEvent,
    Pause,
    PauseMode,
    Resume,
    StepDone,
    StepFailed,
)
from engine.core.common.types import SequenceId
from engine.core.text.plan import StepPlan
from engine.core.text.scheduler import Scheduler
from engine.core.text.types import Preempted, PromptImage
from tests.simulator.background import BackgroundWatch
from tests.simulator.guest_watch import GuestWatch
from tests.simulator.pace_watch import PaceWatch
from tests.simulator.share_watch import ShareWatch


def gave_way_for_nobody(plan: StepPlan | None, events: list[OutputEvent]) -> set[SequenceId]:
    """Return the sequences that lost their blocks to a plan in which nobody else gets any.

    Their work is lost for nothing, perhaps again in the next plan. ``events`` are those of
    planning.
    """
    rows = () if plan is None else plan.rows
    lost = {event.sequence for event in events if isinstance(event, Preempted)}
    got = {row.sequence for row in rows if row.blocks is not None or row.children}
    return set() if got - lost else lost


class TextWatch:
    """Watch the scheduler of one text model. Each method returns what is wrong with its arguments,
    or ""."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.config = scheduler.config
        self.pause: PauseMode | None = None
        self._images: dict[SequenceId, tuple[PromptImage, ...]] = {}
        self._pace = PaceWatch(scheduler.config, scheduler._times)
        self._guests = GuestWatch()
        self._shares = ShareWatch(scheduler)
        self._background = BackgroundWatch(scheduler)

    def applied(self, event: InputEvent, events: list[OutputEvent], now: float) -> str:
        """Take note of an input. `tests.simulator.watch` judges the events."""
        self._shares.applied(now)
        self._background.applied()
        match event:
            case Pause(mode):
                self.pause = mode
            case Resume():
                self.pause = None
            case StepDone():
                self._pace.done(now)
            case StepFailed():
                self._shares.restart()
        return ""

    def planned(self, plan: StepPlan | None, events: list[OutputEvent], now: float) -> str:
        """Judge a plan, None if there is nothing to compute."""
        if lost := gave_way_for_nobody(plan, events):
            return f"{lost} gave way for nobody"
        if wrong := self._background.planned(plan, now, self.pause):
            return wrong
        if plan is None:
            return ""
        return (
            self._judge_rows(plan)
            or self._pace.planned(plan, now)
            or self._guests.planned(self.scheduler, plan, now)
            or self._shares.planned(plan, now)
        )

    def _judge_rows(self, plan: StepPlan) -> str:
        config, rows = self.config, plan.rows
        named = [row.sequence for row in rows]
        named += [fork.sequence for row in rows for fork in row.children]
        if not rows or any(row.count < 1 for row in rows):
            return "nothing to compute"
        if len(set(named)) < len(named):
            return "a sequence twice in a step"
        if len(named) > config.max_num_seqs:
            return f"{len(named)} sequences of at most {config.max_num_seqs}"
        if plan.num_tokens > config.max_num_batched_tokens:
            return f"{plan.num_tokens} tokens of at most {config.max_num_batched_tokens}"
        if (cost := self._image_cost(plan)) > config.max_num_batched_tokens - plan.num_tokens:
            return f"{cost} for images beside {plan.num_tokens} tokens"
        if set(named) & set(plan.released):
            return "a sequence is released and computed"
        if self.pause is PauseMode.KEEP:
            return "a step while the engine is paused"
        if plan.admitted and self.pause is not None:
            return "a start while the engine is paused"
        return ""

    def _image_cost(self, plan: StepPlan) -> int:
        """Return what encoding a step's new images costs in tokens; 0 for a single image."""
        self._images |= {one.sequence: one.images for one in plan.admitted if one.images}
        met = [
            image.cost
            for row in plan.rows
            for image in self._images.get(row.sequence, ())
            if row.start <= image.start < row.start + row.count
        ]
        return sum(met) if len(met) > 1 else 0


__all__ = ["TextWatch", "gave_way_for_nobody"]
