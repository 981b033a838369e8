"""What a step costs each holder: its usual time on this machine, divided among its rows.

Rule 1: a token costs what it adds to a step of its shape. The decodes of a step share the time that
so many decodes usually take alone, each by its positions: a row with drafts has several. Prompts
share the time that their tokens add to it, and an image counts with the tokens that encoding it
costs. What is cached is not computed, and costs nothing. Rule 2: the times are the medians that
`StepTimes` has measured, so that a step which was slow by accident costs nobody more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.core.common.shares import Share
    from engine.core.text.plan import Row
    from engine.core.text.planned_step import PlannedStep
    from engine.core.text.sequence import Sequence
    from engine.core.text.step_times import StepTimes


def price_of(
    times: StepTimes, rows: Iterable[tuple[Sequence, Row]], num_drafts: int
) -> dict[Share, float]:
    """Return what a step with these rows costs each holder, in seconds."""
    decodes: dict[Share, int] = {}
    prompts: dict[Share, int] = {}
    num_decodes = 0
    for seq, row in rows:
        share = seq.live.share
        if row.count > 1 + row.drafts:
            end = row.start + row.count
            images = seq.live.request.images
            count = row.count + sum([x.cost for x in images if row.start <= x.start < end])
            prompts[share] = prompts.get(share, 0) + count
        else:
            num_decodes += 1
            decodes[share] = decodes.get(share, 0) + row.count
    prices = dict.fromkeys([*decodes, *prompts], 0.0)
    if decodes:
        decodes_s = times.price_of_decodes(num_decodes, num_drafts) / sum(decodes.values())
        for share, count in decodes.items():
            prices[share] += decodes_s * count
    if prompts:
        total = sum(prompts.values())
        token_s = times.price_of_prompts(total) / total
        for share, count in prompts.items():
            prices[share] += token_s * count
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
    return price_of(times, zip(step.sequences, step.rows, strict=True), step.num_drafts)
