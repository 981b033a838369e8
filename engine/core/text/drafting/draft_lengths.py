"""How long a draft should be: what drafts gain by their acceptance, and what they cost here.

With a share p of accepted tokens, k drafts give 1 + p + … + p^k tokens on average. A step that
verifies them takes `StepCosts.ratio` times as long as one without drafts, and a draft model makes
it longer by `StepCosts.pass_ratio` for each token of its longest draft. The length is the k with
the best quotient, and 0 if none is above `GAIN_LEAST`.

Rule 1: the share of a sequence is the mean of its verified tokens, of which each new one weighs
1 / (1 + what the others weigh), and at least `LEAST_WEIGHT`. It begins with an expected share that
weighs `FIRST_WEIGHT` tokens, so that a few tokens do not decide. Rule 2: a sequence whose drafts do
not pay tries one token now and then: an n-gram drafter's after `TRY_EVERY` offers, because a text
may begin to repeat itself; a draft model's, of all sequences, after twice as many each time. In a
step with more rows, it is so many times as many, because all of them wait for it. Rule 3: all
drafts of a draft model together may cost `BUDGET_STEPS` steps and the share `EARNED` of the time of
the others (`DraftBudget`), or half as much each time that these are spent, down to `EARNED_LEAST`:
whatever the estimates say, a model that does not pay switches itself off. Rule 4: costs are
measured against steps without drafts. So a draft model waits for `PLAIN_FIRST` of them with as many
rows, and leaves one out of `PLAIN_EVERY`.
"""

from __future__ import annotations

from engine.core.text.drafting.draft_counts import DraftCounter
from engine.core.text.plan import DRAFTING_STEP_MAX

TOKEN_COST = 0.05  # of one more position, in steps, until it is measured
PASS_COST = 0.25  # of a draft model's token, in steps, until it is measured
GAIN_LEAST = 1.03  # guess: below this, drafts may cost more than they gain
MOVE = 1.03  # guess: how much one step changes an estimate of costs
FIRST_SHARE = 0.5  # guess: what is expected of the first drafts
FIRST_WEIGHT = 2.0  # guess: in tokens
LEAST_WEIGHT = 0.1  # guess: of a sequence's new token; the mean is that of the last ten or so
LEAST_WEIGHT_OF_ALL = 0.01  # guess: of a new token in the mean of all sequences
TRY_EVERY = 16  # offers; guess: a sequence whose drafts do not pay tries one of so many
TRY_EVERY_MAX = 256  # guess: of a draft model
EARNED = 0.01  # guess: steps that a step without a draft model earns for it
EARNED_LEAST = EARNED / 4  # guess
PLAIN_FIRST = 3  # guess: the least of a few steps is not one that waited for something else
PLAIN_EVERY = 32  # guess
BUDGET_STEPS = 20.0  # guess: as much as catching up with a prompt of some thousand tokens costs


class StepCosts:
    """How much longer steps take that draft, by the steps before.

    An estimate moves by the same factor whatever a step took, up or down. So it follows the median,
    and a step that waited for something else does not count for more than another.
    """

    def __init__(self) -> None:
        self._plain_s = [0.0] * DRAFTING_STEP_MAX  # by the step's rows; 0: unknown
        self._num_plain = [0] * DRAFTING_STEP_MAX
        self._num_asked = 0
        # [k] is the ratio of steps with 2**k … 2**(k + 1) - 1 drafts.
        sizes = range(DRAFTING_STEP_MAX.bit_length() - 1)
        self._ratios: list[float] = [1.0 + TOKEN_COST * ((2 << k) - 1) for k in sizes]
        self.pass_ratio = PASS_COST

    def ratio(self, num_drafts: int) -> float:
        """Return how long a step takes with so many drafts, compared with none."""
        return self._ratios[min(num_drafts.bit_length(), len(self._ratios)) - 1]

    def without(self, num_rows: int, num_drafts: int, seconds: float) -> float:
        """Return what a step of ``num_rows`` decodes, which took ``seconds`` with its drafts, would
        have taken without them."""
        return self._plain(num_rows) or seconds / self.ratio(num_drafts)

    def note(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Count a step of ``num_rows`` decodes and no prompt, and what it took without a draft
        model; a time of 0 or less says nothing."""
        if num_rows >= DRAFTING_STEP_MAX:
            return
        plain_s = self._plain_s[num_rows]
        if not num_drafts:
            self._num_plain[num_rows] += 1
            if seconds > 0.0:
                is_first = self._num_plain[num_rows] <= PLAIN_FIRST
                following = min(plain_s, seconds) if is_first else _nearer(plain_s, seconds)
                self._plain_s[num_rows] = following if plain_s else seconds
        elif plain_s and seconds > 0.0:
            k = min(num_drafts.bit_length(), len(self._ratios)) - 1
            self._ratios[k] = max(1.0, _nearer(self._ratios[k], seconds / plain_s))

    def is_known(self, num_rows: int) -> bool:
        """Return whether a draft model may draft in a step of ``num_rows`` decodes (Rule 4)."""
        if num_rows >= DRAFTING_STEP_MAX or self._num_plain[num_rows] < PLAIN_FIRST:
            return False
        self._num_asked += 1
        return self._num_asked % PLAIN_EVERY > 0

    def note_passes(self, num_rows: int, num_passes: int, seconds: float) -> None:
        """Count what a draft model took for its drafts of a step, the longest of ``num_passes``
        tokens, at least 1."""
        if steps := self.in_steps(num_rows, seconds):
            self.pass_ratio = _nearer(self.pass_ratio, steps / num_passes)

    def in_steps(self, num_rows: int, seconds: float) -> float:
        """Return a time in steps of ``num_rows`` decodes without drafts; 0 if none was seen."""
        plain_s = self._plain(num_rows)
        return seconds / plain_s if plain_s else 0.0

    def _plain(self, num_rows: int) -> float:
        return self._plain_s[num_rows] if num_rows < DRAFTING_STEP_MAX else 0.0


def _nearer(estimate: float, value: float) -> float:
    """Return the estimate after one more value."""
    return min(value, estimate * MOVE) if value > estimate else max(value, estimate / MOVE)


class Share:
    """The share of accepted tokens (Rule 1)."""

    __slots__ = ("_least", "_weight", "value")

    def __init__(self, value: float = FIRST_SHARE, *, least: float = LEAST_WEIGHT) -> None:
        self.value = value
        self._weight = FIRST_WEIGHT
        self._least = least

    def note(self, drafted: int, accepted: int) -> None:
        """Count a draft whose first ``accepted`` tokens were taken. Of the others, only the first
        was compared with what the model says behind these, unless the sequence ended before."""
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._weight = min(self._weight + 1.0, 1.0 / self._least)
            self.value += (right - self.value) / self._weight


class Trials:
    """When drafts that do not pay are tried in spite of that (Rule 2)."""

    __slots__ = ("_num_declined", "_slows", "_wait")

    def __init__(self, *, slows: bool = False) -> None:
        self._slows = slows
        self._num_declined = 0
        self._wait = TRY_EVERY

    def is_due(self, num_rows: int = 1) -> bool:
        """Count an offer that does not pay, in a step of ``num_rows``, and return whether to try
        it. All rows of the step wait for the trial, so each of them has its turn more seldom."""
        self._num_declined += 1
        if self._num_declined < self._wait * num_rows:
            return False
        self._num_declined = 0
        if self._slows:
            self._wait = min(2 * self._wait, TRY_EVERY_MAX)
        return True

    def note_paying(self) -> None:
        """Count an offer that pays."""
        self._num_declined, self._wait = 0, TRY_EVERY


class Lengths:
    """How long the drafts of one drafter are for one sequence. Those of a draft model share their
    ``trials``."""

    __slots__ = ("_is_model", "share", "trials")

    def __init__(self, share: float = FIRST_SHARE, model_trials: Trials | None = None) -> None:
        self.share = Share(share)
        self.trials = model_trials or Trials()
        self._is_model = model_trials is not None

    def best(
        self, most: int, costs: StepCosts, others: int = 0, idle: int = 0
    ) -> tuple[int, float]:
        """Return how many tokens to draft, at most ``most``, and by which factor that makes tokens
        faster; 0 if it does not pay. ``others`` more sequences draft beside this one, and ``idle``
        ones do not."""
        best, best_rate = 0, GAIN_LEAST
        chance, expected, drafting = 1.0, 1.0, 1 + others
        a_pass = costs.pass_ratio if self._is_model else 0.0
        share, num_rows, ratio = self.share.value, drafting + idle, costs.ratio
        for count in range(1, most + 1):
            chance *= share
            expected += chance
            gained = (drafting * expected + idle) / num_rows
            rate = gained / (ratio(drafting * count) + a_pass * count)
            if rate > best_rate:
                best, best_rate = count, rate
        if best:
            self.trials.note_paying()
        return best, best_rate if best else 0.0


class DraftBudget:
    """What the drafts of a draft model may still cost, in steps without drafts (Rule 3)."""

    __slots__ = ("_earned", "left")

    def __init__(self) -> None:
        self.left = BUDGET_STEPS
        self._earned = EARNED

    @property
    def is_open(self) -> bool:
        """Whether the model may draft."""
        return self.left > 0.0

    def note(self, gained: float, spent: float) -> None:
        """Count a step in which the model drafted: how many steps its accepted tokens saved, and
        how much longer it took."""
        self.left = min(BUDGET_STEPS, self.left + gained - spent)
        if gained > spent:
            self._earned = EARNED
        elif not self.is_open:
            self._earned = max(EARNED_LEAST, self._earned / 2)

    def note_other(self) -> None:
        """Count a step in which it did not."""
        self.left = min(BUDGET_STEPS, self.left + self._earned)


class Drafting:
    """How the drafts of one sequence have fared, by their ``counter``, and how long each drafter's
    are."""

    __slots__ = ("by_model", "by_ngram", "counter")

    def __init__(self, by_model: Lengths) -> None:
        self.counter = DraftCounter()
        self.by_ngram = Lengths()
        self.by_model = by_model

    def note(self, drafted: int, accepted: int, *, forced: int, by_model: bool) -> None:
        """Count a draft whose first ``accepted`` tokens were taken. A constraint forced the first
        ``forced`` ones."""
        self.counter.note(drafted, accepted, forced=forced, by_model=by_model)
        lengths = self.by_model if by_model else self.by_ngram
        lengths.share.note(drafted, accepted)
