"""What a step costs each of those who pay for it (a holder's share, or a request's meter): its
usual time on this machine, divided among its rows.

Rule 1: a token costs what it adds to a step of its shape. The decodes of a step share the time that
so many decodes usually take alone, each by its positions: a row with drafts has several. Prompts
share the time that their tokens add to it, and an image counts with the tokens that encoding it
costs. What is cached is not computed, and costs nothing. Rule 2: the times are the medians that
`StepTimes` has measured, so that a step which was slow by accident costs nobody more.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from engine.core.common.meter import EqualSteps, divide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.core.common.meter import Meter
    from engine.core.common.shares import Share
    from engine.core.text.planned_step import PlannedStep
    from engine.core.text.sequence import Sequence
    from engine.core.text.step_times import StepTimes

PayerT = TypeVar("PayerT")
share_of: Callable[[Sequence], Share] = attrgetter("live.share")
meter_of: Callable[[Sequence], Meter] = attrgetter("live.meter")


def price_of(
    times: StepTimes, step: PlannedStep, payer_of: Callable[[Sequence], PayerT]
) -> dict[PayerT, float]:
    """Return what a step costs each of those who pay for its sequences, in seconds."""
    decodes: dict[PayerT, int] = {}
    prompts: dict[PayerT, int] = {}
    num_decodes = 0
    for seq, row in zip(step.sequences, step.rows, strict=True):
        payer = payer_of(seq)
        if row.count > 1 + row.drafts:
            end = row.start + row.count
            images = seq.live.request.images
            count = row.count + sum([x.cost for x in images if row.start <= x.start < end])
            prompts[payer] = prompts.get(payer, 0) + count
        else:
            num_decodes += 1
            decodes[payer] = decodes.get(payer, 0) + row.count
    prices = dict.fromkeys([*decodes, *prompts], 0.0)
    if decodes:
        decodes_s = times.price_of_decodes(num_decodes, step.num_drafts) / sum(decodes.values())
        for payer, count in decodes.items():
            prices[payer] += decodes_s * count
    if prompts:
        total = sum(prompts.values())
        token_s = times.price_of_prompts(total) / total
        for payer, count in prompts.items():
            prices[payer] += token_s * count
    return prices


def price_alone(times: StepTimes, running: Iterable[Sequence], room: int) -> float:
    """Return what a step with these sequences alone costs, in seconds; it has room for ``room``
    prompt tokens."""
    missing = [seq.num_tokens - seq.num_computed for seq in running]
    num_decodes = missing.count(1)
    num_prompt = min(room, sum(missing) - num_decodes)
    price = times.price_of_decodes(num_decodes) if num_decodes else 0.0
    return price + (times.price_of_prompts(num_prompt) if num_prompt > 0 else 0.0)


def charge(step: PlannedStep, times: StepTimes) -> dict[Share, float]:
    """Return what a step costs each holder."""
    return price_of(times, step, share_of)


class Metering(EqualSteps):
    """Divides the time of steps among the meters of their requests: decodes cost alike, and other
    rows their prices."""

    __slots__ = ("_times",)

    def __init__(self, times: StepTimes) -> None:
        super().__init__()
        self._times = times

    def charge(self, step: PlannedStep, seconds: float) -> None:
        """Divide a step's seconds, or note them until `settle`."""
        if step.num_tokens == len(step.rows):
            self.add(step.sequences, seconds)
        else:
            prices = price_of(self._times, step, meter_of)
            divide(seconds, prices, tuple(prices.values()))
