"""The state that a worker keeps for each sequence, from its admission to its release.

Rule 1: a state changes only in `SequenceState.advance`, `place`, `note_scores` and `tell_scores`,
which the runner calls once the step can no longer fail. Rule 2: a preempted sequence keeps
everything but its blocks, because its text and its sampling depend on prompt and output only (D8).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from engine.core.text.types import TokenLogprob
from engine.errors import EngineBug
from engine.worker.sampling.edits import make_edits
from engine.worker.sampling.sampler import SampleRow
from engine.worker.text.detokenizer import TextState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from engine.core.text.plan import AdmittedSequence, BlockDelta, ChildFork
    from engine.core.text.types import Sampling, Stops
    from engine.worker.sampling.constraint_compiler import Matching
    from engine.worker.sampling.edits import Edits
    from engine.worker.text.detokenizer import TextStep
    from engine.worker.text.tokenizer import HfTokenizer

    Ints = NDArray[np.int64]

NO_BLOCKS = np.zeros(0, np.int64)


@dataclass(slots=True)
class SequenceState:
    """One sequence: its tokens (prompt and output), how it samples, its text, its blocks."""

    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    stops: Stops
    text: TextState | None  # made with the first token, so that a failure is this row's alone
    blocks: Ints  # [num_blocks] int64, the block table after the last step that took effect
    edits: Edits | None = None  # the request's changes to its logits
    matching: Matching | None = None  # the sequence's state in its constraint's grammar
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from the second token on

    @classmethod
    def admit(cls, new: AdmittedSequence, matching: Matching | None = None) -> SequenceState:
        """Return the state of a new sequence, which has no blocks and no output."""
        edits = make_edits(new.sampling, new.prompt)
        tokens, size = list(new.prompt), len(new.prompt)
        return cls(tokens, size, new.sampling, new.stops, None, NO_BLOCKS, edits, matching)

    @property
    def position(self) -> int:
        """The index of the next output token, from 0."""
        return len(self.tokens) - self.prompt_tokens

    def sample_row(self) -> SampleRow:
        """Return how the next token is to be sampled. A constraint's mask is still empty."""
        is_early = self.position < self.stops.min_tokens
        banned = self.stops.token_ids if is_early else frozenset()
        if self.matching is None:
            return SampleRow(self.sampling, self.position, banned, self.edits)
        # With ignore_eos, the grammar's end tokens are not among the request's stop tokens.
        banned |= frozenset(self.matching.ends) - self.stops.token_ids
        mask = self.matching.new_mask()
        return SampleRow(self.sampling, self.position, banned, self.edits, mask)

    @property
    def is_scoring(self) -> bool:
        """Whether the prompt's log-probabilities are requested and were not returned yet."""
        return self.sampling.prompt_logprobs is not None and self.position == 0

    @property
    def num_unscored(self) -> int:
        """How many prompt tokens still lack their log-probabilities."""
        known = 1 + len(self.prompt_logprobs)  # the first has none
        return self.prompt_tokens - known if self.is_scoring else 0

    def table_after(self, delta: BlockDelta | None) -> Ints:
        """Return the block table after a delta. The sequence's own table is not changed.

        Raises:
            EngineBug: the delta keeps more blocks than there are.
        """
        if delta is None:
            return self.blocks
        if delta.keep > len(self.blocks):
            raise EngineBug(f"a delta keeps {delta.keep} of {len(self.blocks)} blocks")
        kept = self.blocks[: delta.keep]
        return np.concatenate((kept, np.array(delta.append, np.int64))) if delta.append else kept

    def place(self, blocks: Ints) -> None:
        """Set the block table of a step that took effect."""
        self.blocks = blocks

    def note_scores(self, scores: Sequence[TokenLogprob]) -> None:
        """Append the prompt's log-probabilities that a step computed, which took effect."""
        self.prompt_logprobs.extend(scores)

    def tell_scores(self, text_of: Callable[[int], str]) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of the whole prompt, and drop them here."""
        first = TokenLogprob(self.tokens[0], text_of(self.tokens[0]), None)
        told = (first, *self.prompt_logprobs)
        self.prompt_logprobs = []
        return told

    def advance(self, token: int, tokenizer: HfTokenizer) -> TextStep:
        """Append the sampled token and return its text. If the text fails, the tokens stay as they
        were."""
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
        """Return the state of another choice of the same prompt, which has no output yet."""
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
