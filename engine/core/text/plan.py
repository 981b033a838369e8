"""The plan that goes to a text model's worker, and the result that comes back (D8).

Rule 1: every class here is a value that pickles without torch, so that a runner can live in a
process of its own. Rule 2: each plan is executed once or fails once.

A value that is made for each row of a step, or for each step, is a named tuple, any other a frozen
dataclass: a dataclass of seven fields takes three times as long to make as a named tuple (D8), and
the whole budget of plan and commit is 1.5 µs a row.

Index spaces: a *token position* counts a sequence's tokens from 0, prompt and output together; a
*block* is the place of ``block_size`` consecutive positions in the KV pool; a *slot* is
``block_id * block_size + position % block_size``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from engine.core.common.steps import RowFailure, StepTimings

if TYPE_CHECKING:
    from engine.core.common.types import BlockId, EndReason, PlanId, SequenceId
    from engine.core.text.types import (
        Constraint,
        PromptImage,
        Reasoning,
        Sampling,
        Stops,
        TokenLogprob,
    )


NO_TIMINGS = StepTimings()

# How many prompt positions one step scores for their log-probabilities, all rows together, but at
# least one of each row. This bounds the memory of their logits. An estimate: 64 rows of 151,936
# logits are 39 MB, and a prompt of 2,048 tokens takes 32 steps.
SCORED_TOKENS_MAX = 64
# How many drafted tokens one row verifies. 1 + 15 positions are the most that run as decodes do
# (`engine.worker.forward.packing.SHORT_MAX`).
DRAFTED_TOKENS_MAX = 15
# How many positions a step with drafts samples, all rows together: with as many rows, no row
# drafts. Reading the weights is most of a step; 8 rows take 1.01 to 1.38 times as long as one.
DRAFTING_STEP_MAX = 16


class Logits(Enum):
    """Which positions of a row need logits.

    NONE: no position, in an unfinished prompt. LAST: the last one, where a token is sampled. ALL:
    every position; a token is sampled at the last, and each of the others scores the prompt token
    after it. PROMPT: every position of an unfinished prompt that is scored.
    """

    NONE = "none"
    LAST = "last"
    ALL = "all"
    PROMPT = "prompt"

    @property
    def samples(self) -> bool:
        """Whether a token is sampled, at the row's last position."""
        return self is Logits.LAST or self is Logits.ALL

    @property
    def scores(self) -> bool:
        """Whether log-probabilities of the prompt are computed."""
        return self is Logits.ALL or self is Logits.PROMPT


class BlockDelta(NamedTuple):
    """How the worker's block table of a sequence changes before the step: keep the first ``keep``
    blocks, drop the rest, and append ``append``. A preempted sequence starts again with ``keep`` 0.
    """

    keep: int
    append: tuple[BlockId, ...] = ()


class StateDelta(NamedTuple):
    """Where the worker keeps a sequence's state from this step on, for models with recurrent layers
    (`engine.core.text.memory.states`).

    The row's last state goes to ``slot``, and a copy of it to ``snapshot``. The row begins from the
    state in ``source``; None: from that in ``slot``. A row from position 0 begins from nothing. A
    step reads all states before it writes any, so the slot that one row begins from may be one that
    another row writes.
    """

    slot: BlockId
    source: BlockId | None = None
    snapshot: BlockId | None = None


class Row(NamedTuple):
    """One sequence's part of a step: positions ``start … start + count - 1`` are computed.

    The worker knows the token ids: the prompt's from `AdmittedSequence`, and those that it sampled
    itself. With logits LAST or ALL the row ends at the sequence's last token, and one token is
    sampled. If the prompt's log-probabilities are asked for, every position of the prompt except
    its last is in a row with logits PROMPT or ALL, until the first token is sampled.
    ``children`` (for n > 1, on the row that completes the prompt) are the sequences that fork here:
    each samples its own first token from the same logits, and `StepPlan.copies` fills the blocks
    that it does not share. ``blocks`` None: the block table is as the last step left it.

    The last ``drafts`` of the positions hold tokens that the worker offered with the sequence's
    last result (`RowResult.offered`). The row samples behind each draft, too, and keeps the sampled
    tokens up to the first that differs from the draft. ``by_model``: the draft model of the worker
    drafts these tokens in this step; they may become fewer (`RowResult.drafted`).

    ``state`` says where the sequence's state is, if that changes. None: it is read from the slot to
    which it was written last, and written there; or the model has no recurrent layers.
    """

    sequence: SequenceId
    start: int
    count: int  # type: ignore[assignment]  # the domain word, over tuple.count
    blocks: BlockDelta | None
    logits: Logits
    children: tuple[ChildFork, ...] = ()
    drafts: int = 0
    by_model: bool = False
    state: StateDelta | None = None


ROW_COUNT = itemgetter(Row._fields.index("count"))
_DRAFTS = itemgetter(Row._fields.index("drafts"))


class ChildFork(NamedTuple):
    """A choice that starts as a copy of its parent's prompt. ``blocks`` is its whole block table
    after the step: the full blocks, which it shares, then its own copy of the last one. ``state``
    is the slot that a copy of the parent's last state goes to, if there are states."""

    sequence: SequenceId
    choice: int
    blocks: tuple[BlockId, ...]
    state: BlockId | None = None


@dataclass(frozen=True, slots=True)
class AdmittedSequence:
    """A sequence that the worker sees for the first time. The worker keeps its state (tokens,
    sampler, detokeniser, constraint) until the id comes in ``released``. ``output`` are the tokens
    that a continued choice has already: the worker takes them as if it had sampled them.
    ``adapter`` is the digest of the loaded adapter that the sequence is computed with; "": the base
    model alone. ``speculates``: its next tokens may be drafted. ``images`` are the prompt's.
    ``reasoning`` says how its reasoning is counted and ended, if it is."""

    sequence: SequenceId
    prompt: tuple[int, ...]
    sampling: Sampling
    stops: Stops
    constraint: Constraint | None = None
    output: tuple[int, ...] = ()
    adapter: str = ""
    speculates: bool = True
    images: tuple[PromptImage, ...] = ()
    reasoning: Reasoning | None = None


class StepPlan(NamedTuple):
    """One forward pass.

    The worker applies ``released``, then ``admitted``, then the block tables, then the forward pass
    over ``rows``, then ``copies``, then it samples. A copy goes from the first block to the second:
    a child's last block is copied after the parent has written it. States are written last.
    """

    plan_id: PlanId
    rows: tuple[Row, ...]
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    admitted: tuple[AdmittedSequence, ...] = ()
    released: tuple[SequenceId, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes: the sum over the rows."""
        return sum(map(ROW_COUNT, self.rows))

    @property
    def num_drafts(self) -> int:
        """Drafted tokens that the step verifies; they are among ``num_tokens``."""
        return sum(map(_DRAFTS, self.rows))

    def journal_line(self) -> str:
        """Return the plan in one stable line: each row's positions, and whether it samples."""
        return f"plan {self.plan_id}: {' '.join(map(_row_line, self.rows))}"


def _row_line(row: Row) -> str:
    samples = "!" if row.logits is not Logits.NONE else ""
    drafts = f"?{row.drafts}" if row.drafts else ""
    return f"{row.sequence}[{row.start}+{row.count}{samples}{drafts}]"


class RowResult(NamedTuple):
    """The result of a step for one sequence.

    ``tokens`` is empty for an unfinished prompt; a row with drafts has one to ``1 + drafts``.
    ``text`` is what may be shown now: it never ends within a character, and holds nothing that
    could still become a stop string. ``finish`` is STOP or LENGTH on the last token; ``matched`` is
    the stop string or stop token id that ended the sequence, None for LENGTH. ``prompt_logprobs``
    come all together, with the first token of choice 0. ``replayed`` is the text of a continued
    choice's earlier tokens; it comes with the first new token. A continued choice that had ended
    already has a ``finish`` and no tokens, in its first row. ``offered`` drafted tokens may be
    verified in the sequence's next row; with ``has_model``, tokens that a draft model drafts in
    that step may be, instead. ``drafted`` tokens of the row were verified, fewer than planned if a
    draft model made fewer. The constraint forced the first ``forced`` of them. With a ``finish``,
    ``num_reasoning`` is how many of the sequence's tokens were reasoning.
    """

    sequence: SequenceId
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: EndReason | None = None
    matched: str | int | None = None
    replayed: str = ""
    offered: int = 0
    has_model: bool = False
    drafted: int = 0
    forced: int = 0
    num_reasoning: int = 0


class StepResult(NamedTuple):
    """The result of a step: one entry for each row of the plan and each child, in the plan's order.
    A row's children follow it."""

    plan_id: PlanId
    rows: tuple[RowResult | RowFailure, ...]
    timings: StepTimings = NO_TIMINGS
