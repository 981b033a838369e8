"""What a step costs each of those who pay for it.

Rule 1: a holder's share pays what a step with the holder's rows alone usually takes. So equal work
costs equally much whoever shares the steps, and what a shared step saves is everybody's. The meters
of requests divide the step's own time, by what their rows add to it. Rule 2: decodes cost what so
many usually take, a row with drafts more; prompts cost the time that their tokens add to a step,
and an image counts with the tokens that encoding it costs. What is cached is not computed, and
costs nothing. Rule 3: the times are the medians that `StepTimes` has measured, so that a step which
was slow by accident costs nobody more.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from engine.core.common.meter import EqualSteps, divide

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.common.meter import Meter
    from engine.core.common.shares import Share
    from engine.core.text.planned_step import PlannedStep
    from engine.core.text.sequence import Sequence
    from engine.core.text.step_times import StepTimes

PayerT = TypeVar("PayerT")
share_of: Callable[[Sequence], Share] = attrgetter("live.share")
meter_of: Callable[[Sequence], Meter] = attrgetter("live.meter")


class _Counts(NamedTuple, Generic[PayerT]):
    """What each of those who pay has in a step: decodes, their drafts, and prompt tokens."""

    decodes: dict[PayerT, int]
    drafts: dict[PayerT, int]
    prompts: dict[PayerT, int]


def counts_of(step: PlannedStep, payer_of: Callable[[Sequence], PayerT]) -> _Counts[PayerT]:
    """Return what each of those who pay for a step's sequences has in it."""
    found: _Counts[PayerT] = _Counts({}, {}, {})
    decodes, drafts, prompts = found
    for seq, row in zip(step.sequences, step.rows, strict=True):
        payer, images, cost = payer_of(seq), seq.live.request.images, 0
        if images:
            end = row.start + row.count
            cost = sum([image.cost for image in images if row.start <= image.start < end])
        if cost or row.count > 1 + row.drafts:
            count = row.count + cost
            prompts[payer] = prompts.get(payer, 0) + count
        else:
            decodes[payer] = decodes.get(payer, 0) + 1
            drafts[payer] = drafts.get(payer, 0) + row.drafts
    return found


def price_of(
    times: StepTimes, step: PlannedStep, payer_of: Callable[[Sequence], PayerT]
) -> dict[PayerT, float]:
    """Return what each of those who pay adds to a step, in seconds: decodes by their positions."""
    decodes, drafts, prompts = counts_of(step, payer_of)
    prices = dict.fromkeys([*decodes, *prompts], 0.0)
    if num_decodes := sum(decodes.values()):
        num_drafts = sum(drafts.values())
        each_s = times.price_of_decodes(num_decodes, num_drafts) / (num_decodes + num_drafts)
        for payer, count in decodes.items():
            prices[payer] += each_s * (count + drafts[payer])
    if prompts:
        total = sum(prompts.values())
        token_s = times.price_of_prompts(total) / total
        for payer, count in prompts.items():
            prices[payer] += token_s * count
    return prices


def price_alone(times: StepTimes, counts: _Counts[PayerT]) -> dict[PayerT, float]:
    """Return what a step with the rows of each of those who pay alone takes, in seconds."""
    decodes, drafts, prompts = counts
    prices = dict.fromkeys([*decodes, *prompts], 0.0)
    for payer, count in decodes.items():
        prices[payer] += times.price_of_decodes(count, drafts[payer])
    for payer, count in prompts.items():
        prices[payer] += times.price_of_prompts(count)
    return prices


def charge(step: PlannedStep, times: StepTimes) -> dict[Share, float]:
    """Return what a step costs each holder."""
    return price_alone(times, counts_of(step, share_of))


class Metering(EqualSteps):
    """Divides the time of steps among the meters of their requests: decodes cost alike, and other
    rows their prices."""

    __slots__ = ("_times",)

    def __init__(self, times: StepTimes) -> None:
        super().__init__()
        self._times = times

    def charge(self, step: PlannedStep, seconds: float) -> None:
        """Divide a step's seconds, or note them until `settle`."""
        # Most steps compute the decodes of the step before, and cost no more than this.
        if step.sequences == self._rows and step.num_tokens == self._num_rows:
            self._seconds += seconds
        elif step.num_tokens == len(step.rows):
            self.add(step.sequences, seconds)
        else:
            prices = price_of(self._times, step, meter_of)
            divide(seconds, prices, tuple(prices.values()))
