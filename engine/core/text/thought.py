"""Follows the reasoning of one answer, token by token, and ends it when its budget is spent.

Rule 1: a state depends on the answer's tokens alone, so that it is the same after a preemption, in
a continuation, in a fork and behind drafts. Rule 2: no more tokens than `Reasoning.tokens_max` are
reasoning. Rule 3: markers are found in the text, whatever tokens spell them, and reasoning is what
the readers of answers (`engine.requests.text.answers`) read as such.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.text.types import Reasoning

# The end of a sentence or of a line. A full stop behind a digit may be a decimal point.
SENTENCE_END = re.compile(r"(?:\n|[.。！？!?…][\"'”’)\]*]*)\s*\Z")
DECIMAL = re.compile(r"\d\.\Z")
NONE: frozenset[int] = frozenset()
TAIL_CHARS = 16  # The latest characters are kept, to find a sentence's end; a guess: with brackets.
OPENING_CHARS = 640  # The latest characters are searched for a whole header of a message.


class Thought:
    """The state of one answer's reasoning. ``num_tokens`` counts its tokens, without those that are
    part of a marker. ``owed`` are the tokens that must come next, because the budget is spent."""

    __slots__ = (
        "_is_behind",
        "_is_inside",
        "_is_shunning",
        "_pieces",
        "_rules",
        "_tail",
        "_text_of",
        "num_tokens",
        "owed",
    )

    def __init__(self, rules: Reasoning, text_of: Callable[[int], str]) -> None:
        self._rules = rules
        self._text_of = text_of
        self._tail = ""  # the end of the text, where a marker may have begun
        self._pieces: list[
            tuple[str, bool]
        ] = []  # its tokens' texts, and whether they were counted
        self._is_behind = not rules.opening  # the answer's beginning is over
        self._is_inside = self._is_shunning = False
        self.num_tokens = 0
        self.owed: tuple[int, ...] = ()
        self._read(rules.begun, counts=False)
        self._decide()

    @property
    def shunned(self) -> frozenset[int]:
        """The tokens that would begin the reasoning again where it was just ended by force."""
        return self._rules.shunned if self._is_shunning else NONE

    def push(self, token: int) -> None:
        """Append a token to the answer: the next of ``owed``, if there are any."""
        is_over = self._is_behind and not self._is_inside and self._rules.again is None
        if is_over and not self.owed:
            return
        is_forced = bool(self.owed)
        self.owed = self.owed[1:]
        self._is_shunning = is_forced and not self.owed
        self._read(self._text_of(token), counts=not is_forced)
        self._decide()

    def fork(self) -> Thought:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin._pieces = self._pieces.copy()
        return twin

    def _read(self, piece: str, *, counts: bool) -> None:
        """Append a token's text, and note whether it enters or leaves the reasoning."""
        self._tail += piece
        if self._is_inside:
            self.num_tokens += counts
            self._pieces.append((piece, counts))
        while self._leaves() if self._is_inside else self._enters():
            if self._is_inside and self._tail.strip():  # the token goes on behind the marker
                self.num_tokens += counts
                self._pieces.append((self._tail, counts))

    def _enters(self) -> bool:
        """Return whether the reasoning begins in the text, which is then cut behind the marker."""
        opening, again = self._rules.opening, self._rules.again
        if not self._is_behind:
            text = self._tail.lstrip()
            if text.startswith(opening):
                self._tail, self._is_inside = text[len(opening) :], True
                return True
            self._is_behind = not opening.startswith(text)
        if self._is_behind and again is not None:
            while (found := again.search(self._tail)) is not None:
                self._tail = self._tail[found.end() :]
                if found.lastgroup is None:
                    self._is_inside = True
                    return True
            self._tail = self._tail[-OPENING_CHARS:]
        return False

    def _leaves(self) -> bool:
        """Return whether the reasoning ends in the text, which is then cut before the marker. The
        tokens of the marker are no reasoning."""
        closings = self._rules.closings
        found = [(at, closing) for closing in closings if (at := self._tail.find(closing)) >= 0]
        if not found:
            kept = max(TAIL_CHARS, *map(len, closings))
            self._tail = self._tail[-kept:]
            while len(self._pieces) > kept:
                del self._pieces[0]
            return False
        at, _ = min(found)
        behind = len(self._tail) - at
        while behind > 0 and self._pieces:
            piece, was_counted = self._pieces.pop()
            self.num_tokens -= was_counted
            behind -= len(piece)
        self._pieces.clear()
        self._tail = self._tail[at:]
        self._is_inside, self._is_behind = False, True
        return True

    def _decide(self) -> None:
        """End the reasoning if its budget is spent: within the margin at the end of a sentence."""
        budget = self._rules.budget
        if budget is None or self.owed or not self._is_inside or self.num_tokens < budget:
            return
        is_end = SENTENCE_END.search(self._tail) and not DECIMAL.search(self._tail)
        if self.num_tokens >= self._rules.tokens_max or not self._pieces or is_end:
            self.owed = self._rules.ending
