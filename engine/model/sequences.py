"""What a worker keeps for each sequence from ``admitted`` to ``released``.

Rule 1: a state changes only in `SequenceState.advance`, `place`, `note_scores` and `tell_scores`,
which the runner calls once nothing of the step can fail any more. Rule 2: a preempted sequence
keeps everything but its blocks: text and sampler state depend on prompt and output only (D8).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from engine.core.types import TokenLogprob
from engine.errors import EngineBug
from engine.model.detokenizer import TextState
from engine.model.edits import make_edits
from engine.model.sampler import SampleRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from engine.core.plan import AdmittedSequence, BlockDelta, ChildFork
    from engine.core.types import Sampling, Stops
    from engine.model.constraints import Matching
    from engine.model.detokenizer import TextStep
    from engine.model.edits import Edits
    from engine.model.tokenizer import HfTokenizer

    Ints = NDArray[np.int64]

NO_BLOCKS = np.zeros(0, np.int64)


@dataclass(slots=True)
class SequenceState:
    """One sequence: its tokens (prompt and output), how it samples, its text, its blocks."""

    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    stops: Stops
    text: TextState | None  # made with the first token: if it cannot be, this row alone fails
    blocks: Ints  # [num_blocks] int64, the block table as of the last step that took effect
    edits: Edits | None = None  # what it does to logits before each draw
    matching: Matching | None = None  # where it is in its constraint's form
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from the second token on

    @classmethod
    def admit(cls, new: AdmittedSequence, matching: Matching | None = None) -> SequenceState:
        edits = make_edits(new.sampling, new.prompt)
        tokens, size = list(new.prompt), len(new.prompt)
        return cls(tokens, size, new.sampling, new.stops, None, NO_BLOCKS, edits, matching)

    @property
    def position(self) -> int:
        """The index of the next output token."""
        return len(self.tokens) - self.prompt_tokens

    def sample_row(self) -> SampleRow:
        """How the next token is chosen; its mask, where it has one, is still to be filled."""
        is_early = self.position < self.stops.min_tokens
        banned = self.stops.token_ids if is_early else frozenset()
        if self.matching is None:
            return SampleRow(self.sampling, self.position, banned, self.edits)
        # with ignore_eos, the form's ends are none of the request's
        banned |= frozenset(self.matching.ends) - self.stops.token_ids
        mask = self.matching.new_mask()
        return SampleRow(self.sampling, self.position, banned, self.edits, mask)

    @property
    def is_scoring(self) -> bool:
        """Its prompt's log-probabilities are asked for and have not been told."""
        return self.sampling.prompt_logprobs is not None and self.position == 0

    @property
    def num_unscored(self) -> int:
        """Tokens of its prompt whose log-probabilities are still to be computed."""
        known = 1 + len(self.prompt_logprobs)  # the first has none
        return self.prompt_tokens - known if self.is_scoring else 0

    def table_after(self, delta: BlockDelta | None) -> Ints:
        """The block table that a delta makes of this one, which stays as it is."""
        if delta is None:
            return self.blocks
        if delta.keep > len(self.blocks):
            raise EngineBug(f"a delta keeps {delta.keep} of {len(self.blocks)} blocks")
        kept = self.blocks[: delta.keep]
        return np.concatenate((kept, np.array(delta.append, np.int64))) if delta.append else kept

    def place(self, blocks: Ints) -> None:
        """The step took effect: its block table is the sequence's."""
        self.blocks = blocks

    def note_scores(self, scores: Sequence[TokenLogprob]) -> None:
        """The step took effect: more of its prompt is scored."""
        self.prompt_logprobs.extend(scores)

    def tell_scores(self, text_of: Callable[[int], str]) -> tuple[TokenLogprob, ...]:
        """The whole prompt's log-probabilities; they are not kept."""
        first = TokenLogprob(self.tokens[0], text_of(self.tokens[0]), None)
        told = (first, *self.prompt_logprobs)
        self.prompt_logprobs = []
        return told

    def advance(self, token: int, tokenizer: HfTokenizer) -> TextStep:
        """Take the sampled token; the text's failure leaves the tokens as they were."""
        if self.text is None:
            self.text = TextState(tokenizer, self.stops, self.tokens[: self.prompt_tokens])
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
        """A choice that continues from this prompt, before any token of its own."""
        return SequenceState(
            tokens=list(self.tokens),
            prompt_tokens=self.prompt_tokens,
            sampling=replace(self.sampling, choice=child.choice, prompt_logprobs=None),
            stops=self.stops,
            text=None if self.text is None else self.text.fork(),
            blocks=np.array(child.blocks, np.int64),
            edits=None if self.edits is None else self.edits.fork(),
            matching=None if self.matching is None else self.matching.fork(),
        )
