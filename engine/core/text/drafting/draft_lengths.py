"""How long a draft should be: what drafts gain by their acceptance, and what they cost here.

With a share p of accepted tokens, k drafts give 1 + p + … + p^k tokens on average. A step that
verifies them takes `StepTimes.ratio` times as long as one without drafts, and a draft model makes
it longer by `StepTimes.pass_ratio` for each token of its longest draft. The length is the k with
the most tokens for the time, if they come more than `GAIN_LEAST` times as fast as without drafts,
or else 0.

Rule 1: the share of a sequence is the mean over its verified tokens, an accepted one counting 1 and
a rejected one 0. The newest token's part of the mean is never below `LEAST_WEIGHT`, so that old
tokens are forgotten. The mean begins with an expected share that counts as `FIRST_WEIGHT` tokens,
so that a few tokens do not decide. Rule 2: a drafter whose drafts do not pay tries one token now
and then: an n-gram drafter in each sequence after `TRY_EVERY` offers, because a text may begin to
repeat itself; a draft model after the same number of offers to all sequences together, twice as
many each time. Both numbers are multiplied by the rows of the step, which all wait for the try.
Rule 3: a draft model has a budget (`DraftBudget`): it may cost the time of `BUDGET_STEPS` steps,
and each step in which it does not draft adds the time of `EARNED` steps. Each time that the budget
is spent, this addition is halved, down to `EARNED_LEAST`: whatever the estimate says, a model that
does not pay switches itself off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.core.text.drafting.draft_counts import DraftCounter
    from engine.core.text.step_times import StepTimes

GAIN_LEAST = 1.03  # estimate: with less gain than this factor, drafts may cost more than they gain
FIRST_SHARE = 0.5  # estimate: the share of accepted tokens that a sequence begins with
FIRST_WEIGHT = 2.0  # estimate: the expected share counts as this many tokens of the mean
LEAST_WEIGHT = 0.1  # estimate: a sequence's share is that of about its last ten tokens
LEAST_WEIGHT_OF_ALL = 0.01  # estimate: the share of all sequences is that of about 100 tokens
TRY_EVERY, TRY_EVERY_MAX = 16, 256  # declined offers before a try, at first and at most; estimates
EARNED = 0.01  # estimate: steps that each step without the draft model adds to the model's budget
EARNED_LEAST = EARNED / 4  # estimate
BUDGET_STEPS = 20.0  # estimate: a draft model reads a prompt of some thousand tokens in that time


class Trials:
    """When drafts are tried although they do not pay (Rule 2). With ``slows``, each try needs twice
    as many offers as the try before."""

    __slots__ = ("_num_declined", "_slows", "_wait")

    def __init__(self, *, slows: bool = False) -> None:
        self._slows = slows
        self._num_declined = 0
        self._wait = TRY_EVERY

    def is_due(self, num_rows: int = 1) -> bool:
        """Count an offer that does not pay, in a step of ``num_rows``. Return whether to try it."""
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
    """How long the drafts of one drafter are for one sequence, by the ``share`` of its tokens that
    was accepted (Rule 1). Those of a draft model share their ``trials``."""

    __slots__ = ("_least", "_weight", "is_model", "share", "trials")

    def __init__(
        self,
        share: float = FIRST_SHARE,
        model_trials: Trials | None = None,
        *,
        least: float = LEAST_WEIGHT,
    ) -> None:
        self.share = share
        self._weight, self._least = FIRST_WEIGHT, least
        self.is_model = model_trials is not None
        self.trials = model_trials or Trials()

    def note(self, drafted: int, accepted: int) -> None:
        """Count a draft whose first ``accepted`` tokens were taken. Of the rejected tokens, only
        the first was compared with the model's own token, unless the sequence ended before."""
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._weight = min(self._weight + 1.0, 1.0 / self._least)
            self.share += (right - self.share) / self._weight

    def best(
        self, most: int, times: StepTimes, drafting: int = 1, num_rows: int = 1
    ) -> tuple[int, float]:
        """Return how many tokens to draft, at most ``most``, and by what factor tokens come faster;
        0 and 0.0 if drafts do not pay. ``drafting`` of ``num_rows`` rows use the drafter."""
        best, best_rate = 0, GAIN_LEAST
        chance, gained, share = 1.0, 1.0, self.share
        pass_ratio, ratio = times.pass_ratio if self.is_model else 0.0, times.ratio
        for count in range(1, most + 1):
            chance *= share
            gained += chance * drafting / num_rows
            rate = gained / (ratio(drafting * count) + pass_ratio * count)
            if rate > best_rate:
                best, best_rate = count, rate
        if best:
            self.trials.note_paying()
        return best, best_rate if best else 0.0


class DraftBudget:
    """The time that a draft model's drafts may still take, in steps without drafts (Rule 3)."""

    __slots__ = ("_earned", "left")

    def __init__(self) -> None:
        self.left = BUDGET_STEPS
        self._earned = EARNED

    @property
    def is_open(self) -> bool:
        """Whether the model may draft."""
        return self.left > 0.0

    def note(self, gained: float, spent: float) -> None:
        """Count a step in which the model drafted: its accepted tokens saved ``gained`` steps, and
        drafting and verifying took the time of ``spent`` steps."""
        self.left = min(BUDGET_STEPS, self.left + gained - spent)
        if gained > spent:
            self._earned = EARNED
        elif not self.is_open:
            self._earned = max(EARNED_LEAST, self._earned / 2)

    def note_other(self) -> None:
        """Count a step in which the draft model did not draft; the n-gram drafter may have."""
        self.left = min(BUDGET_STEPS, self.left + self._earned)


class Drafting(NamedTuple):
    """The counts of one sequence's drafts, and the lengths of each drafter's drafts."""

    counter: DraftCounter
    by_ngram: Lengths
    by_model: Lengths
