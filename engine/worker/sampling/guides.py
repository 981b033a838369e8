"""Guides of a sequence's sampling, token by token: its constraint and its reasoning's budget."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.core.text.thought import Thought
from engine.errors import EngineBug
from engine.worker.sampling.masks import Mask

if TYPE_CHECKING:
    from engine.core.text.plan import AdmittedSequence
    from engine.worker.sampling.constraint_compiler import ConstraintCompiler, Matching


class Guide(Protocol):
    """One sequence's state in its constraint or reasoning budget. Each step fills a mask, if there
    is one, and reports the sampled token with `push`, which alone changes the state."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The end-of-sequence tokens of the grammar; none without one."""

    @property
    def shunned(self) -> frozenset[int]:
        """Tokens that must not come next."""

    @property
    def num_reasoning(self) -> int:
        """How many of the tokens so far were reasoning."""

    def new_mask(self) -> Mask | None:
        """Return a mask for `fill` to write; None if any token may follow."""

    def fill(self, mask: Mask) -> None:
        """Set the bits of the tokens that may follow, or set ``trouble`` if that fails."""

    def allows(self, token: int) -> bool:
        """Return whether a token that another server or model sampled may follow."""

    def forced(self) -> list[int]:
        """Return tokens that must follow, or tokens of a text that must."""

    def num_allowed(self, tokens: list[int]) -> int:
        """Return how many of these drafted tokens may follow, from the first one on. It may be
        too many: each draft is verified."""

    def push(self, token: int) -> bool:
        """Append a token to the output. Returns True if the output is complete.

        Raises:
            EngineBug: The token may not follow.
        """

    def fork(self) -> Guide:
        """Return an independent copy."""


class Thinking:
    """A `Guide` that follows a sequence's reasoning, and its constraint if it has one. As long as
    the reasoning owes tokens, these are forced; the constraint's grammar allows them."""

    __slots__ = ("_matching", "_num_words", "_thought")

    def __init__(self, thought: Thought, matching: Matching | None, vocab: int) -> None:
        self._thought = thought
        self._matching = matching
        self._num_words = (vocab + 31) // 32

    @property
    def ends(self) -> tuple[int, ...]:
        """The end-of-sequence tokens of the constraint's grammar."""
        return () if self._matching is None else self._matching.ends

    @property
    def shunned(self) -> frozenset[int]:
        """The tokens that would begin the reasoning again where it was just ended by force."""
        return self._thought.shunned

    @property
    def num_reasoning(self) -> int:
        """How many of the tokens so far were reasoning."""
        return self._thought.num_tokens

    def new_mask(self) -> Mask | None:
        """Return a mask for `fill` to write, or one of the token that is forced."""
        if not self._thought.owed:
            return None if self._matching is None else self._matching.new_mask()
        token = self._thought.owed[0]
        # As an end of the mask, the token is sampled even if the request's settings exclude it.
        mask = Mask(self._num_words, (token,))
        mask.words.view(np.uint32)[token >> 5] = 1 << (token & 31)
        return mask

    def fill(self, mask: Mask) -> None:
        """Set the bits of the tokens that may follow, or set ``trouble`` if that fails."""
        if self._matching is not None and not self._thought.owed:
            self._matching.fill(mask)

    def allows(self, token: int) -> bool:
        """Return whether a token that another server or model sampled may follow."""
        if self._thought.owed and token != self._thought.owed[0]:
            return False
        return self._matching is None or self._matching.allows(token)

    def forced(self) -> list[int]:
        """Return the tokens that end the reasoning, or what the constraint forces."""
        if self._thought.owed:
            return list(self._thought.owed)
        return [] if self._matching is None else self._matching.forced()

    def num_allowed(self, tokens: list[int]) -> int:
        """Return how many of these drafted tokens may follow, from the first one on."""
        owed = self._thought.owed
        if owed:
            pairs = zip(tokens, owed, strict=False)
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return len(tokens) if self._matching is None else self._matching.num_allowed(tokens)

    def push(self, token: int) -> bool:
        """Append a token to the output. Returns True if the constraint's form is complete.

        Raises:
            EngineBug: The token may not follow.
        """
        if self._thought.owed and token != self._thought.owed[0]:
            raise EngineBug(f"token {token} does not end the reasoning")
        is_complete = self._matching is not None and self._matching.push(token)
        self._thought.push(token)
        return is_complete

    def fork(self) -> Thinking:
        """Return an independent copy."""
        twin = Thinking.__new__(Thinking)
        twin._thought = self._thought.fork()
        twin._matching = None if self._matching is None else self._matching.fork()
        twin._num_words = self._num_words
        return twin


def guide_of(new: AdmittedSequence, grammars: ConstraintCompiler) -> Guide | None:
    """Return a new sequence's guide, before its first token; None if it needs no guide."""
    matching = None if new.constraint is None else grammars.start(new.constraint)
    if new.reasoning is None:
        return matching
    thought = Thought(new.reasoning, grammars.tokenizer.token_text)
    return Thinking(thought, matching, grammars.vocab)
