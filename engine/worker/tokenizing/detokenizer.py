"""Turns one sequence's tokens into text, token by token, and finds where the sequence ends.

Rule 1: text that was returned never changes; all returned pieces joined are the output's text.
Rule 2: the cost of a step depends on its token, and not on the length of the output.

The text of an output is the part of ``decode(prompt + output)`` after the longest start that it has
in common with ``decode(prompt)``. So " there" after "Once upon a time" keeps its space, and an
output that completes a character of the prompt shows the whole character. If any byte of a run is
invalid, a tokenizer with byte fallback decodes the whole run to replacement characters. Returned
text cannot change, so here the valid characters of such a run stay, and 16 tokens without a valid
character are returned before their run ends. U+FFFD itself, if its three bytes are in such a run,
may come as three U+FFFD.

For each token, with ``count`` tokens before it, these rules apply in this order:
1. Nothing stops a sequence while ``count < min_tokens``. As in vLLM, a stop string that ends within
   the first ``min_tokens`` tokens does not count; one that ends later does, even if it begins
   earlier.
2. A stop token id ends the sequence with STOP and the id as the match. Its own text is part of the
   output only with ``include``, and not if special tokens are skipped.
3. A stop string ends the sequence with STOP. Of several, the one that ends first is the match, and
   of those that end together the longest. The text behind it is dropped, and without ``include``
   its own text too. It takes precedence over ``max_tokens``, over a special stop token at whose
   text it ends, and, as in vLLM, over a stop token that only released the text with the stop
   string. A stop string in which the text of a special token occurs is found where the model wrote
   that token, even though the token is left out of the output's text. So ``<|im_end|>`` stops at
   its token, as the id would, and ``x<|im_end|>`` at the token behind an ``x``.
4. The token that completes a constraint's grammar ends the sequence with STOP and no match.
5. With ``max_tokens`` tokens, the sequence ends with LENGTH.
Every end but a stop string returns the text that was held back: text that could have become a stop
string, and the bytes of an unfinished character as U+FFFD.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tokenizers.decoders import DecodeStream

from engine.core.common.types import EndReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.core.text.types import Stops
    from engine.worker.tokenizing.tokenizer import HfTokenizer

_REPLACEMENT = "\ufffd"
# So many last tokens of the prompt are decoded with the first output tokens. For spaces, one would
# be enough; a run of byte tokens must be complete, so it has a higher limit.
_CONTEXT = 8
_CONTEXT_MAX = 64
# A character has at most four bytes, so an unfinished one has at most three tokens.
_UNFINISHED_MAX = 3
# After this many tokens without a valid character, the invalid text is returned, because
# DecodeStream would keep all of them and decode them again at each token. In valid text, four byte
# tokens complete a character; the limit is higher, so that it is rarely reached.
_PENDING_MAX = 16


@dataclass(frozen=True, slots=True)
class TextStep:
    """The outcome of one token: the text to return now, and how the sequence ends, if it ends."""

    text: str = ""
    finish: EndReason | None = None
    matched: str | int | None = None


class TextState:
    """The text of one sequence, from its prompt to its end.

    Life: 1. made with the prompt; 2. `push` for each sampled token, and `fork` at any time; 3.
        ended when a `TextStep` has a ``finish``. A push after the end is a bug.
    """

    __slots__ = (
        "_decoder",
        "_hidden",
        "_is_done",
        "_matcher",
        "_searched",
        "_stops",
        "num_tokens",
    )

    def __init__(self, tokenizer: HfTokenizer, stops: Stops, prompt: Sequence[int]) -> None:
        self._stops = stops
        hidden = tokenizer.special_ids - stops.shown if stops.skip_special else frozenset()
        self._hidden = hidden
        self._decoder = IncrementalDecoder(tokenizer, prompt, hidden=hidden)
        # The special tokens whose texts occur in stop strings: their texts, by id.
        self._searched: dict[int, str] = {
            token_id: tokenizer.backend.id_to_token(token_id) or ""
            for string in stops.strings
            for token_id in tokenizer.special_ids_within(string)
        }
        self._matcher = StopMatcher(
            stops.strings, include=stops.include, hidden=self._searched.values()
        )
        self.num_tokens = 0
        self._is_done = False

    def push(self, token_id: int, *, is_complete: bool = False) -> TextStep:
        """Append the next sampled token. With ``is_complete``, the constraint's grammar allows no
        token after it."""
        assert not self._is_done, "push after the end of the sequence"
        stops = self._stops
        is_armed = self.num_tokens >= stops.min_tokens
        self.num_tokens += 1
        if is_armed and token_id in stops.token_ids:
            return self._end_by_token(token_id)
        is_last = self.num_tokens >= stops.max_tokens
        hidden = self._searched.get(token_id, "") if token_id in self._hidden else ""
        text = self._decoder.step(token_id)
        if is_last or is_complete or hidden:
            text += self._decoder.flush()
        text, matched = self._matcher.feed(text, hidden, is_armed=is_armed)
        if matched is not None:
            return self._end(text, EndReason.STOP, matched)
        if is_complete:
            return self._end(text + self._matcher.flush(), EndReason.STOP)
        if is_last:
            return self._end(text + self._matcher.flush(), EndReason.LENGTH)
        return TextStep(text)

    def push_end(self, token_id: int) -> TextStep:
        """Append an end token that completes the constraint's grammar. It ends the sequence,
        whatever the request's stops are."""
        assert not self._is_done, "push after the end of the sequence"
        self.num_tokens += 1
        return self._end_by_token(token_id)

    def fork(self) -> TextState:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin._decoder = self._decoder.fork()
        twin._matcher = self._matcher.fork()
        return twin

    def _end_by_token(self, token_id: int) -> TextStep:
        is_shown = self._stops.include and token_id not in self._hidden
        text = self._decoder.step(token_id) if is_shown else ""
        hidden = "" if is_shown else self._searched.get(token_id, "")
        text, matched = self._matcher.feed(text + self._decoder.flush(), hidden)
        if matched is not None:
            return self._end(text, EndReason.STOP, matched)
        return self._end(text + self._matcher.flush(), EndReason.STOP, token_id)

    def _end(self, text: str, reason: EndReason, matched: str | int | None = None) -> TextStep:
        self._is_done = True
        return TextStep(text, reason, matched)


class StopMatcher:
    """Finds stop strings in a text that comes in pieces.

    ``hidden`` are the texts of special tokens that are left out of the output. A stop string that
    contains such a text is searched in the output with these tokens, any other in the output
    without them.

    Invariant: ``_held`` is the longest suffix of the text that may begin a stop string; everything
    before it was returned. The work for a piece is bounded by the lengths of the piece and of the
    longest stop string.
    """

    __slots__ = ("_held", "_include", "_plain", "_whole")

    def __init__(
        self, strings: Sequence[str], *, include: bool, hidden: Iterable[str] = ()
    ) -> None:
        texts = tuple(hidden)
        whole = tuple(s for s in strings if any(text in s for text in texts))
        self._plain = _Search(tuple(s for s in strings if s and s not in whole))
        self._whole = _Search(whole) if whole else None
        self._include = include
        self._held = ""

    def feed(
        self, piece: str, hidden: str = "", *, is_armed: bool = True
    ) -> tuple[str, str | None]:
        """Add a piece, and behind it the text of a hidden token. Return the text that may be shown
        now, and the stop string that was found.

        Without ``is_armed``, stop strings are not searched, but text that may begin one is held
        back all the same.
        """
        text = self._held + piece
        stops = [self._plain.feed(piece, is_armed=is_armed)] if piece else []
        if self._whole is not None:
            if piece:
                stops.append(self._whole.feed(piece, is_armed=is_armed))
            if hidden and not any(stops):
                stops.append(self._whole.feed(hidden, is_armed=is_armed, is_hidden=True))
        hits = [stop for stop in stops if stop is not None]
        if hits:
            first = max(hits, key=lambda stop: (stop.num_behind, len(stop.stop)))
            end = len(text) - first.num_behind
            self._held = ""
            return text[: end if self._include else end - first.num_inside], first.stop
        num_held = self._plain.num_shown
        if self._whole is not None:
            num_held = max(num_held, self._whole.num_shown)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """Return the text that was held back. Call this at the end of the text."""
        held, self._held = self._held, ""
        return held

    def fork(self) -> StopMatcher:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin._plain = copy.copy(self._plain)
        twin._whole = copy.copy(self._whole)
        return twin


class _StopMatch(NamedTuple):
    """A stop string that was found, and how many shown characters are inside it and behind it."""

    stop: str
    num_inside: int
    num_behind: int


class _Search:
    """Searches stop strings in one text, some of whose characters may be hidden.

    Invariant: ``_held`` is the longest suffix of the text that is a proper prefix of a stop string.
    ``_shown`` has for each character of ``_held`` a 1 if it is shown, and otherwise a 0.
    """

    __slots__ = ("_firsts", "_held", "_shown", "_strings", "num_shown")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = strings
        self._firsts = frozenset(s[0] for s in strings)
        self._held = self._shown = ""
        self.num_shown = 0

    def feed(self, piece: str, *, is_armed: bool, is_hidden: bool = False) -> _StopMatch | None:
        """Add a piece, and return the stop string that was found in it."""
        if not self._held and self._firsts.isdisjoint(piece):
            return None
        old = len(self._held)
        text = self._held + piece
        shown = self._shown + ("0" if is_hidden else "1") * len(piece)
        if is_armed and (place := self._find(text, old)) is not None:
            end, stop = place
            inside = shown.count("1", end - len(stop), end)
            return _StopMatch(stop, inside, shown.count("1", end))
        cut = self._begin_of_held(text)
        self._held, self._shown = text[cut:], shown[cut:]
        self.num_shown = self._shown.count("1")
        return None

    def _find(self, text: str, old: int) -> tuple[int, str] | None:
        """Return where the first stop string that is not within the first ``old`` characters ends,
        and the stop string; of several that end there, the longest."""
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
        """Return the beginning of the longest suffix that is a proper prefix of a stop string."""
        cut = len(text)
        for stop in self._strings:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), cut)
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1, cut)
            if at >= 0:
                cut = at
        return cut


class IncrementalDecoder:
    """Turns token ids into text, one at a time, with the `DecodeStream` of tokenizers.

    ``_stream`` has got the tokens ``_context`` and then ``_pending``. The text of ``_context`` was
    returned, or belongs to the prompt; that of ``_pending`` was not returned. The stream lacks and
    this class adds: a flush, a bound on pending tokens, recovery where more tokens change the text
    of earlier tokens, and prompts that end inside a character, whose whole text the stream would
    return again.
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
        # The stream never gets hidden ids, nor ids outside the vocabulary: it would keep them and
        # decode them again at every token.
        self._hidden = hidden
        context, unfinished = self._split_prompt(self._end_of_prompt(prompt))
        self._restart(context)
        # The prompt's unfinished bytes as replacement characters, which the output does not repeat.
        self._owed = self._decode(unfinished)
        for token_id in unfinished:
            self.step(token_id)

    def step(self, token_id: int) -> str:
        """Append a token and return the text that can no longer change."""
        if token_id in self._hidden or not self._is_known(token_id):
            return ""
        self._pending.append(token_id)
        try:
            text: str | None = self._stream.step(self._backend, token_id)
        except Exception as error:
            # The stream's InvalidPrefix has no class of its own. Any other error is raised.
            if not str(error).startswith("Invalid prefix"):
                raise
            return self._recover()
        if text is None:
            return self._show_invalid() if len(self._pending) >= _PENDING_MAX else ""
        self._context, self._pending = self._pending, []
        return self._own(text) if self._owed else text

    def flush(self) -> str:
        """Return the pending tokens' text, with unfinished bytes as U+FFFD. Steps may follow."""
        if not self._pending:
            return ""
        before = self._decode(self._context)
        whole = self._decode([*self._context, *self._pending])
        text = whole[len(before) :] if whole.startswith(before) else self._decode(self._pending)
        self._restart()
        return self._own(text)

    def fork(self) -> IncrementalDecoder:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin._stream = copy.copy(self._stream)
        twin._pending = self._pending.copy()
        return twin

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _restart(self, context: Sequence[int] | None = None) -> None:
        """Begin a new stream after the tokens ``context``, by default the tokenizer's anchor: a
        token after which tokens keep their leading spaces, whatever bytes came before it."""
        self._context = list(self._tokenizer.anchor if context is None else context)
        self._pending = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=False)

    def _own(self, text: str) -> str:
        """Return the output's first text without the characters that ``_owed`` has from the
        prompt."""
        owed, self._owed = self._owed, ""
        return text[len(_common_start(owed, text)) :]

    def _recover(self) -> str:
        """Decode the pending tokens in a new stream without context, and return their text."""
        pending = self._pending
        self._restart()
        return "".join([self.step(token_id) for token_id in pending])

    def _show_invalid(self) -> str:
        """Return the pending text, except for the last tokens, which may begin a character."""
        cut = self._clean_cut(self._pending)
        tail = self._pending[cut:]
        self._pending = self._pending[:cut]
        return self.flush() + "".join([self.step(token_id) for token_id in tail])

    def _clean_cut(self, token_ids: list[int]) -> int:
        """Return where to cut the ids so that no character goes across the cut: before the shortest
        tail of up to three tokens whose text is the same alone and after the other tokens. Return
        the number of ids if there is no such tail."""
        whole, size = self._decode(token_ids), len(token_ids)
        for cut in range(size - 1, max(-1, size - 1 - _UNFINISHED_MAX), -1):
            if self._decode(token_ids[:cut]) + self._decode(token_ids[cut:]) == whole:
                return cut
        return size

    def _end_of_prompt(self, prompt: Sequence[int]) -> list[int]:
        """Return the last visible tokens of the prompt, in order."""
        end: list[int] = []
        for token_id in reversed(prompt):
            if token_id in self._hidden or not self._is_known(token_id):
                continue
            end.append(token_id)
            if len(end) >= _CONTEXT_MAX or (len(end) >= _CONTEXT and not self._is_byte(token_id)):
                break
        return end[::-1]

    def _is_byte(self, token_id: int) -> bool:
        """Return whether a token is a byte-fallback token such as ``<0x0A>``. A run of these is
        decoded as a whole."""
        name: str | None = self._backend.id_to_token(token_id)
        return name is not None and len(name) == 6 and name.startswith("<0x")

    def _split_prompt(self, end: list[int]) -> tuple[list[int], list[int]]:
        """Split tokens into those whose text is complete and up to three that may begin a
        character."""
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
