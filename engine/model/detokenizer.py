"""One sequence's output as text: incremental detokenising, stop strings, the end of a choice.

Rule 1: text once returned never changes; everything returned, joined, is the output's text.
Rule 2: a step costs what its token adds, never what the output already holds.

The text of an output is what follows the longest common start of ``decode(prompt)`` and
``decode(prompt + output)``: so " there" after "Once upon a time" keeps its space, and an output
that completes a character the prompt began shows the whole character. Tokenizers with byte
fallback decode a run of bytes to replacement characters as a whole when any of it is invalid;
as shown text cannot change, here the valid characters of such a run stay, and a run of 16
tokens without one is shown without waiting for its end.

Stops of each token (``count`` tokens came before it):
1. nothing stops a sequence while ``count < min_tokens`` (vLLM's rule: a stop string that ends
   within the first ``min_tokens`` tokens does not count, one that ends later does, even where
   it began earlier);
2. a stop token id: STOP, matched the id; its own text is part of the output with ``include``
   only, and not where special tokens are skipped;
3. a stop string: STOP; of several the one that ends first, of those the longest. Text after it
   is dropped, and itself too without ``include``. It wins over a stop token that only released
   the text it is in, as in vLLM, and over ``max_tokens``;
4. the token that completes a constraint's form: STOP, matched nothing;
5. ``max_tokens``: LENGTH.
All ends but a stop string release what was held back: text that could have become a stop
string, and the bytes of an unfinished character as U+FFFD.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from engine.core.types import EndReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.types import Stops
    from engine.model.tokenizer import HfTokenizer

_REPLACEMENT = "\ufffd"
# Tokens of the prompt that the first output tokens are decoded after. One would do for spaces;
# a run of byte tokens must be whole, hence the longer bound for those.
_CONTEXT = 8
_CONTEXT_MAX = 64
# A character has at most four bytes, so at most three tokens can be an unfinished one.
_UNFINISHED_MAX = 3
# Tokens without one valid character after which the invalid part is shown. DecodeStream would
# hold it, and decode all of it again at every token: quadratic. No valid text is this long
# without a character (four bytes); the rest is room so that the cut is rare.
_PENDING_MAX = 16


@dataclass(frozen=True, slots=True)
class TextStep:
    """What one token brought: text to show now, and the end where it is one."""

    text: str = ""
    finish: EndReason | None = None
    matched: str | int | None = None


class TextState:
    """The text side of one sequence, from its prompt to its end.

    1. built with the prompt; 2. `push` for every sampled token; 3. done when a step has a
    finish: a further push is a programmer's error. `fork` at any time before that.
    """

    __slots__ = ("_decoder", "_is_done", "_matcher", "_num_tokens", "_stops")

    def __init__(self, tokenizer: HfTokenizer, stops: Stops, prompt: Sequence[int]) -> None:
        self._stops = stops
        hidden = tokenizer.special_ids - stops.shown if stops.skip_special else frozenset()
        self._decoder = IncrementalDecoder(tokenizer, prompt, hidden=hidden)
        self._matcher = StopMatcher(stops.strings, include=stops.include)
        self._num_tokens = 0
        self._is_done = False

    @property
    def num_tokens(self) -> int:
        """Tokens pushed so far."""
        return self._num_tokens

    def push(self, token_id: int, *, is_complete: bool = False) -> TextStep:
        """Take the next sampled token; ``is_complete``: its form allows none after it."""
        assert not self._is_done, "push after the end of the sequence"
        stops = self._stops
        is_armed = self._num_tokens >= stops.min_tokens
        self._num_tokens += 1
        if is_armed and token_id in stops.token_ids:
            return self._end_by_token(token_id)
        is_last = self._num_tokens >= stops.max_tokens
        text = self._decoder.step(token_id)
        if is_last or is_complete:
            text += self._decoder.flush()
        text, matched = self._matcher.feed(text, is_armed=is_armed)
        if matched is not None:
            return self._end(text, EndReason.STOP, matched)
        if is_complete:
            return self._end(text + self._matcher.flush(), EndReason.STOP)
        if is_last:
            return self._end(text + self._matcher.flush(), EndReason.LENGTH)
        return TextStep(text)

    def push_end(self, token_id: int) -> TextStep:
        """Take a token that ends the sequence whatever its stops say: nothing else could follow
        its form."""
        assert not self._is_done, "push after the end of the sequence"
        self._num_tokens += 1
        return self._end_by_token(token_id)

    def fork(self) -> TextState:
        """An independent copy."""
        twin = copy.copy(self)
        twin._decoder = self._decoder.fork()
        twin._matcher = copy.copy(self._matcher)
        return twin

    def _end_by_token(self, token_id: int) -> TextStep:
        text = self._decoder.step(token_id) if self._stops.include else ""
        text, matched = self._matcher.feed(text + self._decoder.flush())
        if matched is not None:
            return self._end(text, EndReason.STOP, matched)
        return self._end(text + self._matcher.flush(), EndReason.STOP, token_id)

    def _end(self, text: str, reason: EndReason, matched: str | int | None = None) -> TextStep:
        self._is_done = True
        return TextStep(text, reason, matched)


class StopMatcher:
    """Finds stop strings in a text that comes in pieces.

    Invariant: ``_held`` is the longest end of the text that is a proper start of a stop string;
    everything before it has been returned. Work per piece is bounded by the piece and the
    longest stop string.
    """

    __slots__ = ("_firsts", "_held", "_include", "_strings")

    def __init__(self, strings: Sequence[str], *, include: bool) -> None:
        self._strings = tuple(s for s in strings if s)
        self._firsts = frozenset(s[0] for s in self._strings)
        self._include = include
        self._held = ""

    def feed(self, piece: str, *, is_armed: bool = True) -> tuple[str, str | None]:
        """Add a piece; return the text that may be shown now, and the stop string it ends with.

        Not armed, no stop string is looked for, but what could begin one is held all the same.
        """
        if not self._held and self._firsts.isdisjoint(piece):
            return piece, None
        old = len(self._held)
        text = self._held + piece
        if is_armed and (found := self._find(text, old)) is not None:
            end, stop = found
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        cut = self._begin_of_held(text)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """Return what was held; the text ends here."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, old: int) -> tuple[int, str] | None:
        """The stop string that ends first beyond ``old``, of those the longest, and its end."""
        best: tuple[int, str] | None = None
        for stop in self._strings:
            at = text.find(stop, max(0, old - len(stop) + 1))
            if at < 0:
                continue
            end = at + len(stop)
            if best is None or (end, -len(stop)) < (best[0], -len(best[1])):
                best = end, stop
        return best

    def _begin_of_held(self, text: str) -> int:
        cut = len(text)
        for stop in self._strings:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), cut)
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1, cut)
            if at >= 0:
                cut = at
        return cut


class IncrementalDecoder:
    """Token ids to text, one at a time, by tokenizers' `DecodeStream`.

    ``_stream`` has seen ``_context`` and then ``_pending``; the text of ``_context`` has been
    returned (or belongs to the prompt), that of ``_pending`` has not. The class adds what the
    stream lacks: a flush, a bound on what it holds, recovery when a longer run decodes to
    something else than its start did, and a prompt that ends inside a character (the stream
    alone would return the whole prompt's text then).
    """

    __slots__ = (
        "_backend",
        "_context",
        "_hidden",
        "_is_known",
        "_owed",
        "_pending",
        "_stream",
        "_tokenizer",
    )

    def __init__(
        self, tokenizer: HfTokenizer, prompt: Sequence[int], *, hidden: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._is_known = tokenizer.is_known
        self._backend = tokenizer.backend
        self._context: list[int] = []
        self._pending: list[int] = []
        self._stream = DecodeStream(skip_special_tokens=False)
        # Never given to the stream, as ids that the vocabulary lacks: it would hold them, and
        # decode them again at every token.
        self._hidden = hidden
        context, unfinished = self._split_prompt(self._end_of_prompt(prompt))
        self._restart(context)
        # The prompt's own replacement characters: not shown again as the output's.
        self._owed = self._decode(unfinished)
        for token_id in unfinished:
            self.step(token_id)

    def step(self, token_id: int) -> str:
        """The text that is certain now."""
        if token_id in self._hidden or not self._is_known(token_id):
            return ""
        self._pending.append(token_id)
        try:
            text: str | None = self._stream.step(self._backend, token_id)
        except Exception as error:
            # The stream's own InvalidPrefix has no class; anything else is not ours to hide.
            if not str(error).startswith("Invalid prefix"):
                raise
            return self._recover()
        if text is None:
            return self._show_invalid() if len(self._pending) >= _PENDING_MAX else ""
        self._context, self._pending = self._pending, []
        return self._own(text) if self._owed else text

    def flush(self) -> str:
        """The text of what is pending, unfinished bytes as U+FFFD; stepping on is possible."""
        if not self._pending:
            return ""
        before = self._decode(self._context)
        whole = self._decode([*self._context, *self._pending])
        text = whole[len(before) :] if whole.startswith(before) else self._decode(self._pending)
        self._restart()
        return self._own(text)

    def fork(self) -> IncrementalDecoder:
        twin = copy.copy(self)
        twin._stream = copy.copy(self._stream)
        twin._pending = self._pending.copy()
        return twin

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _restart(self, context: Sequence[int] | None = None) -> None:
        """A new stream behind ``context``; by default behind a plain token, so that a leading
        space is kept and bytes before do not matter."""
        self._context = list(self._tokenizer.anchor if context is None else context)
        self._pending = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=False)

    def _own(self, text: str) -> str:
        """Take the start that the prompt already showed off the output's first text."""
        owed, self._owed = self._owed, ""
        return text[len(_common_start(owed, text)) :]

    def _recover(self) -> str:
        """What was returned stays; the pending tokens are decoded apart from it."""
        pending = self._pending
        self._restart()
        return "".join([self.step(token_id) for token_id in pending])

    def _show_invalid(self) -> str:
        """Return the pending text but that of the last tokens, which may begin a character."""
        cut = self._clean_cut(self._pending)
        tail = self._pending[cut:]
        self._pending = self._pending[:cut]
        return self.flush() + "".join([self.step(token_id) for token_id in tail])

    def _clean_cut(self, token_ids: list[int]) -> int:
        """Where the shortest end of up to three tokens begins that decodes on its own as it
        does behind the others; no character goes across. The length where there is none."""
        whole, size = self._decode(token_ids), len(token_ids)
        for cut in range(size - 1, max(-1, size - 1 - _UNFINISHED_MAX), -1):
            if self._decode(token_ids[:cut]) + self._decode(token_ids[cut:]) == whole:
                return cut
        return size

    def _end_of_prompt(self, prompt: Sequence[int]) -> list[int]:
        """The last visible tokens of the prompt, in order."""
        end: list[int] = []
        for token_id in reversed(prompt):
            if token_id in self._hidden or not self._is_known(token_id):
                continue
            end.append(token_id)
            if len(end) >= _CONTEXT_MAX or (len(end) >= _CONTEXT and not self._is_byte(token_id)):
                break
        return end[::-1]

    def _is_byte(self, token_id: int) -> bool:
        """A byte-fallback token, ``<0x0A>``; a run of them decodes as a whole."""
        name: str | None = self._backend.id_to_token(token_id)
        return name is not None and len(name) == 6 and name.startswith("<0x")

    def _split_prompt(self, end: list[int]) -> tuple[list[int], list[int]]:
        """Tokens whose text is complete, and up to three that may begin a character."""
        for cut in range(len(end), max(-1, len(end) - _UNFINISHED_MAX - 1), -1):
            if not self._decode(end[:cut]).endswith(_REPLACEMENT):
                return end[:cut], end[cut:]
        return list(self._tokenizer.anchor), end[self._clean_cut(end) :]


def _common_start(first: str, second: str) -> str:
    size = 0
    for size, (a, b) in enumerate(zip(first, second, strict=False), start=1):
        if a != b:
            return first[: size - 1]
    return first[:size]
