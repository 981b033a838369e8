"""The state that a worker keeps for each sequence, from its admission to its release.

Rule 1: a state changes only in `SequenceState.advance`, `place`, `note_scores`, `tell_scores`,
`take_replayed` and `offer`, which the runner calls once the step can no longer fail; `replay` is
called when the state is made. Rule 2: a preempted sequence keeps everything but its blocks, because
its text and its sampling depend on prompt and output only (D8).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from engine.core.common.steps import RowFailure, RowPhase
from engine.core.text.plan import DRAFTED_TOKENS_MAX, Logits, RowResult
from engine.core.text.types import TokenLogprob
from engine.errors import EngineBug, FieldViolation
from engine.worker.failures import describe
from engine.worker.forward.recurrent import RowState
from engine.worker.sampling.edits import make_edits
from engine.worker.sampling.sampler import SampleRow
from engine.worker.text.ngram_drafter import NgramDrafter
from engine.worker.tokenizing.detokenizer import TextState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from engine.core.text.plan import AdmittedSequence, BlockDelta, ChildFork, Row, StateDelta
    from engine.core.text.types import Sampling, Stops
    from engine.worker.sampling.edits import Edits
    from engine.worker.sampling.guides import Guide
    from engine.worker.tokenizing.detokenizer import TextStep
    from engine.worker.tokenizing.tokenizer import HfTokenizer

    Ints = NDArray[np.int64]

NO_BLOCKS = np.zeros(0, np.int64)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SequenceState:
    """One sequence: its admission, which has the request's settings; its tokens (prompt and
    output), its text, its blocks."""

    admission: AdmittedSequence
    tokens: list[int]
    text: TextState | None  # Made with the first token, so that its failure fails only this row.
    blocks: Ints  # [num_blocks] int64, the block table after the last step that took effect.
    edits: Edits | None = None  # The request's changes to its logits.
    matching: Guide | None = None  # The sequence's state in its constraint and its reasoning.
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # From the second token on.
    replayed: str = ""  # The text of a continued choice's earlier tokens, until it is returned.
    verdict: RowResult | RowFailure | None = None  # If set, it is the result of every row.
    ngram: NgramDrafter | None = None  # If there is none, no tokens are drafted.
    draft: list[int] = field(default_factory=list)  # Tokens that may follow ``tokens``.
    num_forced: int = 0  # So many first tokens of the draft follow from the constraint.
    state_slot: int | None = None  # Where its state is, if the model has recurrent layers.

    @classmethod
    def admit(
        cls, new: AdmittedSequence, matching: Guide | None = None, *, drafts: bool = False
    ) -> SequenceState:
        """Return the state of a new sequence, which has no blocks and no output. With ``drafts`` it
        offers drafts, unless its request excludes them."""
        edits = make_edits(new.sampling, new.prompt)
        ngram = NgramDrafter() if drafts and new.speculates else None
        return cls(new, list(new.prompt), None, NO_BLOCKS, edits, matching, ngram=ngram)

    def replay(self, tokenizer: HfTokenizer) -> None:
        """Append the tokens that a continued choice has already, as if they had been sampled here.
        If they end the choice, or cannot be the output of its request, the ``verdict`` becomes the
        result of every row of the sequence. Never raises."""
        self.verdict = self._replay(tokenizer)
        # Plans have rows for all tokens of the output, even after a misfit.
        self.tokens = [*self.admission.prompt, *self.admission.output]

    def _replay(self, tokenizer: HfTokenizer) -> RowResult | RowFailure | None:
        new = self.admission
        texts: list[str] = []
        end: RowResult | None = None
        for index, token in enumerate(new.output):
            if end is not None:
                return _misfit(new, index, "comes after the end of the choice")
            if self.matching is not None and not self.matching.allows(token):
                what = "the constraint" if new.reasoning is None else "the reasoning or the form"
                return _misfit(new, index, f"does not follow {what}")
            try:
                step = self.advance(token, tokenizer)
            except Exception as error:
                return RowFailure(new.sequence, RowPhase.TEXT, describe(error))
            texts.append(step.text)
            if step.finish is not None:
                count = self.num_reasoning
                end = RowResult(
                    new.sequence, finish=step.finish, matched=step.matched, num_reasoning=count
                )
        self.replayed = "".join(texts)
        return end

    def require_fit(self, row: Row) -> None:
        """Check that a planned row fits the sequence.

        Raises:
            EngineBug: The row does not fit.
        """
        end = row.start + row.count - row.drafts
        if end <= row.start or row.start < 0 or end > len(self.tokens):
            raise EngineBug(
                f"sequence {row.sequence} has {len(self.tokens)} tokens, and positions "
                f"{row.start} … {end - 1} are planned"
            )
        if row.logits.samples and end != len(self.tokens):
            raise EngineBug(f"sequence {row.sequence} is to be sampled before its last token")
        if row.drafts > (len(self.draft) if row.logits is Logits.LAST else 0):
            raise EngineBug(f"sequence {row.sequence} is to verify more drafts than it offered")
        if row.logits is Logits.LAST and self.num_unscored:
            raise EngineBug(f"sequence {row.sequence} is sampled before its prompt is scored")
        for image in self.admission.images:
            if image.is_whole and image.is_inside(end):
                raise EngineBug(f"a row of sequence {row.sequence} cuts an image that is whole")

    def wholes(self, row: Row, first: int) -> list[tuple[int, int]]:
        """Return the spans of the row's tokens that see each other, those of images that are whole:
        (first token, last token + 1) of each. ``first`` is the row's first token."""
        shift, end = first - row.start, row.start + row.count
        return [
            (max(image.start, row.start) + shift, image.end + shift)
            for image in self.admission.images
            if image.is_whole and row.start < image.end <= end
        ]

    def take_replayed(self) -> str:
        """Return the text of the replayed tokens, and drop it, so that it is returned once."""
        text, self.replayed = self.replayed, ""
        return text

    @property
    def position(self) -> int:
        """The index of the next output token, from 0."""
        return len(self.tokens) - len(self.admission.prompt)

    @property
    def num_reasoning(self) -> int:
        """How many tokens of the output were reasoning."""
        return 0 if self.matching is None else self.matching.num_reasoning

    def sample_row(self) -> SampleRow:
        """Return the settings for sampling the next token. A constraint's mask is still empty."""
        admission = self.admission
        return _sample_row(
            admission.sampling, admission.stops, self.position, self.edits, self.matching
        )

    def ahead(self) -> Ahead:
        """Return a copy of the state that sampling depends on, to sample after drafted tokens."""
        return Ahead(
            self.admission.sampling,
            self.admission.stops,
            self.position,
            None if self.edits is None else self.edits.fork(),
            None if self.matching is None else self.matching.fork(),
        )

    def offer(self) -> int:
        """Draft tokens that may follow, and return their number. Tokens that the constraint forces
        come first. The draft ends before a token that would end the sequence, and before one that
        the constraint forbids."""
        self.draft = []
        if self.ngram is None:
            return 0
        forced = [] if self.matching is None else self.matching.forced()[:DRAFTED_TOKENS_MAX]
        draft, left = forced, DRAFTED_TOKENS_MAX - len(forced)
        if left:
            draft = forced + self.ngram.draft(self.tokens, forced, left)
        if not draft:  # the usual case, of every sequence in every step
            return 0
        most = max(0, self.admission.stops.max_tokens - self.position - 1)
        self.draft = self._possible(draft[:most])
        self.num_forced = min(len(forced), len(self.draft))
        return len(self.draft)

    def forced(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that the constraint forces, none of which ends the text."""
        return [] if self.matching is None else self._possible(self.matching.forced()[:most])

    def _possible(self, draft: list[int]) -> list[int]:
        """Return the draft up to a token that ends the sequence or that the constraint forbids."""
        ends = self.admission.stops.token_ids
        draft = draft[: next((i for i, token in enumerate(draft) if token in ends), len(draft))]
        if self.matching is not None:
            del draft[self.matching.num_allowed(draft) :]
        return draft

    @property
    def is_scoring(self) -> bool:
        """Whether the prompt's log-probabilities are requested and were not returned yet."""
        return self.admission.sampling.prompt_logprobs is not None and self.position == 0

    @property
    def num_unscored(self) -> int:
        """How many prompt tokens still lack their log-probabilities."""
        known = 1 + len(self.prompt_logprobs)  # the first token has no log-probability
        return len(self.admission.prompt) - known if self.is_scoring else 0

    def table_after(self, delta: BlockDelta | None) -> Ints:
        """Return the sequence's block table, changed by ``delta``, as a new table.

        Raises:
            EngineBug: The delta keeps more blocks than the table has.
        """
        if delta is None:
            return self.blocks
        if delta.keep > len(self.blocks):
            raise EngineBug(f"a delta keeps {delta.keep} of {len(self.blocks)} blocks")
        kept = self.blocks[: delta.keep]
        return np.concatenate((kept, np.array(delta.append, np.int64))) if delta.append else kept

    def table_for(self, row: Row, block_size: int) -> Ints:
        """Return the block table for a planned row.

        Raises:
            EngineBug: The table has too few blocks for the row's positions.
        """
        table = self.table_after(row.blocks)
        end = row.start + row.count
        if len(table) * block_size < end:
            raise EngineBug(f"sequence {row.sequence} has {len(table)} blocks for {end} tokens")
        return table

    def row_state(self, row: Row) -> RowState:
        """Return the slot of the state before a planned row, and the slots for the state after it.

        Raises:
            EngineBug: The sequence has no state slot.
        """
        own, source, snapshot = row.state or (self.state_slot, None, None)
        if own is None:
            raise EngineBug(f"sequence {row.sequence} has no state slot")
        targets = [own, *[child.state for child in row.children], snapshot]
        begins = source if source is not None else own
        return RowState(begins if row.start else None, tuple([t for t in targets if t is not None]))

    def place(self, blocks: Ints, state: StateDelta | None) -> None:
        """Set the block table, and the state slot, of a step that took effect."""
        self.blocks = blocks
        if state is not None:
            self.state_slot = state.slot

    def note_scores(self, scores: Sequence[TokenLogprob]) -> None:
        """Append log-probabilities of the prompt, from a step that can no longer fail."""
        self.prompt_logprobs.extend(scores)

    def tell_scores(self, text_of: Callable[[int], str]) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of the whole prompt, and drop them."""
        first = TokenLogprob(self.tokens[0], text_of(self.tokens[0]), None)
        logprobs = (first, *self.prompt_logprobs)
        self.prompt_logprobs = []
        return logprobs

    def advance(self, token: int, tokenizer: HfTokenizer) -> TextStep:
        """Append the sampled token and return its text. If that fails, no token is appended."""
        if self.text is None:
            self.text = TextState(tokenizer, self.admission.stops, self.admission.prompt)
        is_complete = self.matching is not None and self.matching.push(token)
        if is_complete and self.matching is not None and token in self.matching.ends:
            step = self.text.push_end(token)
        else:
            step = self.text.push(token, is_complete=is_complete)
        self.tokens.append(token)
        if self.edits is not None:
            self.edits.push(token)
        return step

    def fork(self, child: ChildFork) -> SequenceState:
        """Return the state of another choice of the same prompt, which has no output yet."""
        sampling = replace(self.admission.sampling, choice=child.choice, prompt_logprobs=None)
        return SequenceState(
            admission=replace(self.admission, sequence=child.sequence, sampling=sampling),
            tokens=list(self.tokens),
            text=None if self.text is None else self.text.fork(),
            blocks=np.array(child.blocks, np.int64),
            edits=None if self.edits is None else self.edits.fork(),
            matching=None if self.matching is None else self.matching.fork(),
            ngram=None if self.ngram is None else NgramDrafter(),
            state_slot=child.state,
        )


@dataclass(slots=True)
class Ahead:
    """The state that a sequence's sampling depends on, some tokens ahead of its `SequenceState`:
    these tokens belong to the same step and are not part of the sequence yet."""

    sampling: Sampling
    stops: Stops
    position: int
    edits: Edits | None
    matching: Guide | None

    def push(self, token: int) -> bool:
        """Append a token. Returns False if the token completes the constraint.

        Raises:
            EngineBug: The constraint does not allow the token.
        """
        self.position += 1
        if self.edits is not None:
            self.edits.push(token)
        return self.matching is None or not self.matching.push(token)

    def sample_row(self) -> SampleRow:
        """Return the settings for sampling the next token. A constraint's mask is filled."""
        row = _sample_row(self.sampling, self.stops, self.position, self.edits, self.matching)
        if self.matching is not None and row.mask is not None:
            self.matching.fill(row.mask)
        return row


def _sample_row(
    sampling: Sampling, stops: Stops, position: int, edits: Edits | None, matching: Guide | None
) -> SampleRow:
    banned = stops.token_ids if position < stops.min_tokens else frozenset()
    if matching is None:
        return SampleRow(sampling, position, banned, edits)
    # With ignore_eos, the grammar's end tokens are not among the request's stop tokens.
    banned |= frozenset(matching.ends) - stops.token_ids | matching.shunned
    return SampleRow(sampling, position, banned, edits, matching.new_mask())


def _misfit(new: AdmittedSequence, index: int, what: str) -> RowFailure:
    """Return the failure of a continued choice whose tokens cannot be its request's output."""
    path = f"continuation.choices[{new.sampling.choice}].token_ids[{index}]"
    return RowFailure(new.sequence, RowPhase.REPLAY, what, FieldViolation(path, what))


def offer_of(state: SequenceState) -> int:
    """Have the sequence draft, and return how many tokens. After a failure, it drafts no more."""
    try:
        return state.offer()
    except Exception:
        log.exception("drafting failed")
        state.ngram = None
        return 0
