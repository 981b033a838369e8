"""Estimates how long steps take. From this follow how many prompt tokens a step may have (D4),
which prompts cannot be computed in time (D18), and how many tokens to draft (D27).

Rule 1: the last `KEPT` times of each size of step are kept. The size of a step of decodes is their
number. A step with prompts is sized by its prompt tokens, in halvings of the step budget, and what
is kept is the time that a prompt token added to the decodes. A step with drafts is sized by their
number, in doublings, and what is kept is how many times as long as without drafts it took. Rule 2:
the usual time is the median of the kept times. So a step that waited for something else does not
count, and a change of the machine's speed shows after five steps. Rule 3: a prompt's least time
follows from the smallest kept times; without any it is 0.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from engine.core.text.plan import DRAFTING_STEP_MAX
from engine.core.text.prompt_pace import PromptPace

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine.config import SchedulerConfig
    from engine.core.text.planned_step import PlannedStep

KEPT = 9  # times per size of step; estimate: more would adapt later, fewer be less exact
PROMPTS_SHARE_MIN = 0.1  # estimate: prompts count as at least this share of their step's time
TOKENS_EACH = 2  # prompt tokens of a step per sequence; by `tools.lab.bench pace` and `serve`
CHUNK_MIN = 16  # prompt tokens of a step; estimate: fewer hardly take less time
LARGE_SHARE = 8  # estimate: a step of 1/8 of the budget shows how fast prompts are computed
SHORTEST_STEPS = 4  # a step may last four shortest steps; estimate: a quarter is then fixed cost
DISCOUNT = 1.1  # each refusal divides a prompt's least time by this; estimate: eight halve it
TOKEN_COST = 0.05  # what one more position costs, in steps, until that is measured
PASS_COST = 0.25  # what a draft model's token costs, in steps, until that is measured
DECODES_S = 0.01  # what decodes cost a holder until they are measured; only the first steps need it
TOKENS_PER_STEP = 16  # and how many prompt tokens cost as much; estimate, as above
SHORT_STEPS = 3  # holders' steps may last three shortest steps; by `tools.lab.bench holders`
SHORT_PROMPTS = 2  # and prompts without decodes twice that, so that few are cut; estimate
SHORT_MIN = 24  # positions of such a step; estimate: fewer would waste its fixed cost
PLAIN_FIRST = 3  # steps without drafts to begin with; estimate: their median leaves out a slow one
PLAIN_EVERY = 32  # estimate: one step in 32 goes without the draft model, to be measured


class StepTimes:
    """The estimates of one scheduler. ``pace`` says how long prompts take.

    ``pass_ratio`` is how much longer a draft model makes a step for each token of its longest
    draft, in units of a step without drafts.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._budget = budget = config.max_num_batched_tokens
        sizes = range(budget.bit_length() + 1)
        # Seconds of steps of decodes alone, by their number; from `DRAFTING_STEP_MAX` on in
        # doublings.
        self._decodes = [deque[float](maxlen=KEPT) for _ in range(DRAFTING_STEP_MAX + len(sizes))]
        # The numbers of decodes, where the place does not say them.
        self._widths = [deque[int](maxlen=KEPT) for _ in self._decodes]
        # [k]: seconds of a prompt token in steps with at least budget / 2**k prompt tokens, and
        # fewer than budget / 2**(k - 1).
        self._prompts = [deque[float](maxlen=KEPT) for _ in sizes]
        self._shortest_prompts_s = math.inf  # no step with prompts was measured yet
        self.pace = PromptPace()
        # [k]: how many times as long steps with 2**k … 2**(k + 1) - 1 drafts take, and took.
        self._ratios = [
            1.0 + TOKEN_COST * ((2 << k) - 1) for k in range(DRAFTING_STEP_MAX.bit_length() - 1)
        ]
        self._drafts = [_expected(ratio) for ratio in self._ratios]
        self.pass_ratio = PASS_COST
        self._passes = _expected(PASS_COST)
        self._num_draftable = 0  # steps in which a draft model might draft
        # What each further position adds to a step of holders, in shortest steps.
        self._positions = _expected(TOKEN_COST)
        self._token_s = deque[float](maxlen=KEPT)  # of their prompt tokens
        # [k]: what the least time by `_prompts[:k]` is divided by, until such a step is measured.
        self._discounts: dict[int, float] = {}

    def note(self, step: PlannedStep, num_tokens: int, seconds: float) -> None:
        """Count a committed step of ``num_tokens``, its drafts not counted, and of ``seconds``, the
        draft model's not counted. A step of 0 seconds or less gives no estimate."""
        num_rows, num_drafts = len(step.rows), step.num_drafts
        place = _place(num_rows)
        last = self._decodes[place]
        if num_tokens == num_rows and not num_drafts:
            last.append(max(0.0, seconds))
            if place >= DRAFTING_STEP_MAX:
                self._widths[place].append(num_rows)
        elif seconds <= 0.0 or step.image_cost:
            return  # images take no time if their encodings are kept, and much otherwise
        elif num_tokens > num_rows:
            self._note_prompts(step, seconds)
        elif plain_s := _usual(last):
            k = min(num_drafts.bit_length(), len(self._ratios)) - 1
            self._drafts[k].append(max(1.0, seconds / plain_s))
            self._ratios[k] = _usual(self._drafts[k])
        else:
            last.append(seconds / self.ratio(num_drafts))
            if place >= DRAFTING_STEP_MAX:
                self._widths[place].append(num_rows)

    def _note_prompts(self, step: PlannedStep, seconds: float) -> None:
        chunks = [row for row in step.plan.rows if row.count > 1]
        num_tokens = sum([row.count for row in chunks])
        self._shortest_prompts_s = min(self._shortest_prompts_s, seconds)
        decodes_s = self.decodes_s(len(step.rows) - len(chunks))
        prompts_s = max(seconds - decodes_s, PROMPTS_SHARE_MIN * seconds)
        token_s = prompts_s / num_tokens
        pairs = sum([row.count * (row.start + row.count / 2) for row in chunks])
        self.pace.note(num_tokens, pairs, prompts_s)
        k = self._size_of(num_tokens)
        self._prompts[k].append(token_s)
        if num_tokens == self._budget >> k:
            # The smallest step of a size counts for the next smaller size, too. Otherwise an old,
            # shorter time of the smaller size would have this step chosen again and again.
            self._prompts[min(k + 1, len(self._prompts) - 1)].append(token_s)
        if self._discounts:
            self._discounts = {n: value for n, value in self._discounts.items() if n <= k}

    # ---- prompts

    def decodes_s(self, num_decodes: int) -> float:
        """Return how many seconds ``num_decodes`` decodes usually take alone, by steps with as many
        or fewer decodes; 0.0 if there was none."""
        known = self._decodes[: _place(num_decodes) + 1]
        return next(filter(None, map(_usual, reversed(known))), 0.0)

    def prompt_tokens(self, limit: int, num_sequences: int, num_decodes: int) -> int:
        """Return how many prompt tokens, at most ``limit``, a step may have beside its decodes, if
        ``num_sequences`` run or wait, the decodes included.

        The step takes ``step_time_target_s``. Beside decodes it takes ``inter_token_target_s``, if
        that is less, but prompts get at least as much of its time as decodes, and at least
        `TOKENS_EACH` tokens for each sequence. So with few sequences a prompt delays readers
        little. With many, a step computes more prompt tokens, because more answers end meanwhile
        and other prompts take their places.
        """
        limit = min(limit, self.tokens_in_step(self._shortest_s()))
        beside_s = self._config.inter_token_target_s
        if not (num_decodes and beside_s):
            return limit
        decodes_s = self.decodes_s(num_decodes)
        in_time = self.tokens_in(max(beside_s - decodes_s, decodes_s))
        return min(limit, max(in_time, CHUNK_MIN, TOKENS_EACH * num_sequences))

    def tokens_in_step(self, shortest_s: float) -> int:
        """Return how many prompt tokens a step may have, whatever decodes are beside them, if the
        shortest step takes ``shortest_s``.

        Where every step has a high fixed cost, as with a large model on a CPU, small steps would
        pay it for each part of a prompt. So a step may always take four times the shortest step's
        time, and always have an eighth of the budget. As smaller steps do not show how fast large
        ones are, only the budget is a bound until a step of an eighth of it was measured.
        """
        target_s, large = self._config.step_time_target_s, self._prompts[: LARGE_SHARE.bit_length()]
        if not (target_s and any(large)):
            return self._budget
        in_time = self.tokens_in(max(target_s, SHORTEST_STEPS * shortest_s), doubles=False)
        return max(in_time, -(-self._budget // LARGE_SHARE))

    def tokens_in(self, seconds: float, *, doubles: bool = True) -> int:
        """Return how many prompt tokens usually take ``seconds``, by the measured steps of about
        that size. A size that was not measured is taken to be as fast as the next larger measured
        size. Beyond the largest measured size, the answer is at most double that size or, without
        ``doubles``, extrapolated."""
        token_s, limit = 0.0, self._budget
        for k, last in enumerate(self._prompts):
            token_s = _usual(last) or token_s
            size = self._budget >> k
            if token_s and token_s * size <= seconds:
                return int(min(limit, seconds / token_s))
            if token_s or doubles:
                limit = size
        return 0 if token_s else self._budget

    def _shortest_s(self) -> float:
        """Return how long the shortest step usually takes: a step of the fewest decodes and no
        prompt or, before there was any, the shortest step with prompts."""
        return next(filter(None, map(_usual, self._decodes)), self._shortest_prompts_s)

    def least_s(self, num_tokens: int) -> float:
        """Return the least time that a prompt takes, in seconds; 0.0 before a step was as large as
        the prompt's largest chunk."""
        count = self._num_sizes(num_tokens)
        known = [min(last) for last in self._prompts[:count] if last]
        return num_tokens * min(known) / self._discounts.get(count, 1.0) if known else 0.0

    def note_refusal(self, num_tokens: int) -> None:
        """Count a prompt that was refused because of `least_s`. A refused prompt is not measured,
        and all earlier steps may have been slow by accident. So the next estimate is shorter."""
        count = self._num_sizes(num_tokens)
        self._discounts[count] = self._discounts.get(count, 1.0) * DISCOUNT

    def _num_sizes(self, num_tokens: int) -> int:
        """Return with how many sizes of step, the largest first, a prompt is compared: those as
        large as the prompt, or as its largest chunk. A small step is dominated by its fixed cost
        and does not show how fast large steps are."""
        most = self.tokens_in_step(self._shortest_s())
        if num_tokens >= most:
            return self._size_of(most) + 1
        return (self._budget // max(1, num_tokens)).bit_length()

    def _size_of(self, num_tokens: int) -> int:
        """Return the index of the size of steps with ``num_tokens`` prompt tokens."""
        return (-(-self._budget // num_tokens) - 1).bit_length()

    # ---- what holders pay, and how long their steps are

    def note_shared(self, step: PlannedStep, num_tokens: int, seconds: float) -> None:
        """Count a step while holders share, beside `note`, of which the arguments are."""
        if seconds <= 0.0:
            return
        if num_tokens >= SHORT_MIN // 4 and (one_s := self._one_s()):
            self._positions.append(max(0.0, seconds / one_s - 1.0) / (num_tokens - 1))
        if num_prompt := sum([row.count for row in step.rows if row.count > 1 + row.drafts]):
            num_decodes = sum([row.count == 1 + row.drafts for row in step.rows])
            decodes_s = self.price_of_decodes(num_decodes) if num_decodes else 0.0
            prompts_s = max(seconds - decodes_s, PROMPTS_SHARE_MIN * seconds)
            if not step.image_cost:
                self._token_s.append(prompts_s / num_prompt)

    def short_step(self) -> int:
        """Return how many positions a step may have while holders share: they take `SHORT_STEPS`
        times as long as one decode, however long the contexts of such rows are now."""
        most = 1 + (SHORT_STEPS - 1) / max(_usual(self._positions), 1e-9)
        return int(min(self._budget, max(SHORT_MIN, most)))

    def short_prompts(self) -> int:
        """Return how many prompt tokens such a step may have if it has no decodes."""
        short_s = self.short_step_s()
        in_time = self.tokens_in(SHORT_PROMPTS * short_s) if short_s else self._budget
        return max(SHORT_MIN, in_time)

    def short_step_s(self) -> float:
        """Return how long such a step takes; 0.0 before any step of decodes was measured."""
        return SHORT_STEPS * self._one_s()

    def _one_s(self) -> float:
        """Return how long a step of one decode takes, by the measured steps of the fewest decodes;
        0.0 without any."""
        for place, last in enumerate(self._decodes):
            if last and (few_s := _usual(last)):
                return few_s / (1.0 + TOKEN_COST * (self._width(place) - 1))
        return 0.0

    def price_of_decodes(self, num_decodes: int, num_drafts: int = 0) -> float:
        """Return how many seconds ``num_decodes`` decodes, at least 1, usually take alone, if they
        verify ``num_drafts`` drafts: a line through the fewest that were measured and the number
        nearest to theirs."""
        ratio = self.ratio(num_drafts) if num_drafts else 1.0
        known = [place for place, last in enumerate(self._decodes) if last and _usual(last)]
        if not known:
            return ratio * DECODES_S
        place = _place(num_decodes)
        near = min(known, key=lambda one: abs(one - place))
        (few, few_s), (most, most_s) = self._measured(known[0]), self._measured(near)
        one_s = self._one_s()
        each_s = (most_s - few_s) / (most - few) if most > few else TOKEN_COST * one_s
        return ratio * max(one_s, most_s + max(0.0, each_s) * (num_decodes - most))

    def _measured(self, place: int) -> tuple[float, float]:
        """Return the usual number of decodes of the steps at a place of `_decodes`, and their usual
        time."""
        return self._width(place), _usual(self._decodes[place])

    def _width(self, place: int) -> float:
        return place if place < DRAFTING_STEP_MAX else _usual(self._widths[place])

    def price_of_prompts(self, num_tokens: int) -> float:
        """Return how many seconds ``num_tokens`` prompt tokens add to a step. Each costs the same,
        so that equal prompts cost equally much however steps divide them: what they have added to
        the last steps of several holders or, before these, to steps of about that size."""
        if self._token_s:
            return num_tokens * _usual(self._token_s)
        place = self._size_of(num_tokens)
        near = sorted(range(len(self._prompts)), key=lambda k: abs(k - place))
        known = (_usual(self._prompts[k]) for k in near)
        return num_tokens * next(filter(None, known), DECODES_S / TOKENS_PER_STEP)

    # ---- drafts

    def ratio(self, num_drafts: int) -> float:
        """Return how many times as long a step usually takes with ``num_drafts`` drafts."""
        return self._ratios[min(num_drafts.bit_length(), len(self._ratios)) - 1]

    def in_steps(self, num_rows: int, seconds: float) -> float:
        """Return how many steps of ``num_rows`` decodes take ``seconds``; 0 if none was
        measured."""
        plain_s = _usual(self._decodes[_place(num_rows)])
        return seconds / plain_s if plain_s else 0.0

    def note_passes(self, num_rows: int, num_passes: int, seconds: float) -> None:
        """Count the time that a draft model took in a step, whose longest draft has ``num_passes``
        tokens, at least 1."""
        if steps := self.in_steps(num_rows, seconds):
            self._passes.append(steps / num_passes)
            self.pass_ratio = _usual(self._passes)

    def may_draft(self, num_rows: int) -> bool:
        """Return whether a draft model may draft in a step of ``num_rows`` decodes. Its cost is
        measured against steps without drafts, so some of these come first, and some between."""
        if num_rows >= DRAFTING_STEP_MAX or len(self._decodes[num_rows]) < PLAIN_FIRST:
            return False
        self._num_draftable += 1
        return self._num_draftable % PLAIN_EVERY > 0


def _place(num_rows: int) -> int:
    """Return at which index `StepTimes` keeps the times of steps of ``num_rows`` decodes."""
    if num_rows < DRAFTING_STEP_MAX:
        return num_rows
    return DRAFTING_STEP_MAX + num_rows.bit_length() - DRAFTING_STEP_MAX.bit_length()


def _expected(value: float) -> deque[float]:
    """Return the times before any measurement: the expected ``value``, half of `KEPT` times."""
    return deque([value] * (KEPT // 2), maxlen=KEPT)


def _usual(last: Collection[float]) -> float:
    """Return the median, the smaller of two middle values; 0 without values."""
    return sorted(last)[(len(last) - 1) // 2] if last else 0.0
