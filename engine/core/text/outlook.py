"""How far a prompt is, and when its first token comes.

Rule: an outlook changes nothing, and never asks the worker, so a step in flight does not delay it.
Its time is bounded by the lengths of the waiting queue and of the running list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.common.phases import Phase
from engine.core.common.prompts import PromptState
from engine.core.text import admission
from engine.core.text.lifecycle import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.core.text.ledger import Ledger
    from engine.core.text.planned_step import PlannedStep
    from engine.core.text.sequence import LiveText, Sequence
    from engine.core.text.step_times import StepTimes


class Outlook:
    """Looks at the prompts of one scheduler. ``prompt_limit`` returns how many prompt tokens a step
    may have beside a number of decodes."""

    def __init__(
        self, ledger: Ledger, times: StepTimes, prompt_limit: Callable[[int], int]
    ) -> None:
        self._ledger = ledger
        self._times = times
        self._prompt_limit = prompt_limit

    def state(
        self,
        live: LiveText,
        now: float,
        steps: tuple[PlannedStep, ...],
        start_s: float | None,
    ) -> PromptState | None:
        """Return the state of a request's prompt; None once the request has a token.

        ``steps`` are the step that executes and the one that is prepared. ``start_s`` is the time
        until the request starts, if the queue's head lacks something (None: unknown); 0.0 if it
        only needs a step.
        """
        seq = next((seq for seq in live.sequences if not seq.has_ended), None)
        if seq is None or any(other.has_sampled for other in live.sequences):
            return None
        starts = _starts(steps)
        is_known = seq.is_known_to_worker
        return PromptState(
            min(_computed(seq, starts), seq.num_prompt) if is_known else 0,
            seq.cached_tokens if is_known else 0,
            seq.seconds_in(Phase.PREFILL, now),
            self._first_token_s(seq, now, steps, starts, start_s),
        )

    def _first_token_s(
        self,
        seq: Sequence,
        now: float,
        steps: tuple[PlannedStep, ...],
        starts: dict[Sequence, int],
        start_s: float | None,
    ) -> float | None:
        """Return the time until the sequence samples: that of its own prompt, of its holder's
        prompts before it, and of what other holders have computed meanwhile. Unknown for a prompt
        with images, whose encoding may cost much or nothing."""
        ledger, waits = self._ledger, seq.state is State.WAITING
        if start_s is None or seq.state is State.PARKED or seq.live.request.images:
            return None
        own, ahead = seq.live.share, [seq]
        beside: list[Sequence] = []
        gives_way = not seq.is_background and ledger.background_gives_way()
        running = admission.others_running(ledger) if gives_way else ledger.running
        if not start_s:
            ahead += [other for other in running if waits or other.rank < seq.rank]
            if waits:
                ahead += ledger.waiting.items[: ledger.waiting.position_of(seq) - 1]
            if ledger.shares.is_contested:
                ahead = [other for other in ahead if other.live.share is own]
                both = (*running, *ledger.waiting.items)
                beside = [other for other in both if other.live.share is not own]
                beside = [x for x in beside if x.is_background <= seq.is_background]
        num_tokens, num_pairs = _left(ahead, starts)
        others_tokens, others_pairs = _beside(beside, starts, num_tokens / own.weight)
        num_tokens, num_pairs = num_tokens + others_tokens, num_pairs + others_pairs
        decodes = sum([1 for other in running if other.has_sampled])
        chunk = self._prompt_limit(decodes)
        seconds = self._times.pace.seconds(num_tokens, num_pairs, chunk)
        if seconds is None:
            return None
        # Each step computes the decodes beside the prompts.
        seconds += self._times.decodes_s(decodes) * -(-num_tokens // max(1, chunk))
        if start_s:
            return start_s + seconds
        for step in steps[:1]:
            if step.started_at:  # else it is only prepared
                seconds -= min(max(0.0, now - step.started_at), seconds * _share(step, num_tokens))
        return seconds


def _starts(steps: tuple[PlannedStep, ...]) -> dict[Sequence, int]:
    """Return where the first row of each sequence begins. Rows in plans are counted ahead
    (`Sequence.count_ahead`), so what is before this place is certainly computed."""
    starts: dict[Sequence, int] = {}
    for step in steps:
        for seq, row in zip(step.sequences, step.rows, strict=True):
            starts.setdefault(seq, row.start)
    return starts


def _computed(seq: Sequence, starts: dict[Sequence, int]) -> int:
    return starts.get(seq, seq.num_computed)


def _left(prompts: Iterable[Sequence], starts: dict[Sequence, int]) -> tuple[int, float]:
    """Return how many tokens of prompts are still to be computed, and the sum of their contexts. A
    decode has none."""
    num_tokens, num_pairs = 0, 0.0
    for seq in prompts:
        end, start = seq.num_known, _computed(seq, starts)
        if end - start > 1 or not seq.has_sampled:
            num_tokens += end - start
            num_pairs += (end - start) * (end + start) / 2
    return num_tokens, num_pairs


def _beside(prompts: list[Sequence], starts: dict[Sequence, int], most: float) -> tuple[int, float]:
    """Return the tokens of other holders' prompts that are computed meanwhile, and the sum of their
    contexts: at most ``most`` tokens for each unit of a holder's weight."""
    num_tokens, num_pairs = 0, 0.0
    for share in {seq.live.share for seq in prompts}:
        tokens, pairs = _left([seq for seq in prompts if seq.live.share is share], starts)
        part = min(1.0, most * share.weight / max(1, tokens))
        num_tokens += round(part * tokens)
        num_pairs += part * pairs
    return num_tokens, num_pairs


def _share(step: PlannedStep, num_tokens: int) -> float:
    """Return which part of ``num_tokens`` prompt tokens a step computes."""
    own = sum([row.count for row in step.rows if row.count > 1])
    return min(1.0, own / max(1, num_tokens))
