"""Divides a long text into pieces whose tokens, joined, are the tokens of the text.

Pieces bound the memory of a tokenizer, which keeps 250 to 450 bytes for each token of its input.
Between two pieces a request can be cancelled, and other requests have their turns.

Rule 1: a text is divided only at places that no token of the vocabulary can span. Then neither
merges nor the choice of the best tokens span them. Rule 2: the text around a place is tokenised
whole and in two parts, and the tokens must be the same. They differ, for example, if a normalizer
writes a space before each text; then the piece begins after the text's own space. Rule 3: a
tokenizer that writes special tokens elsewhere than before and after a text divides no text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers.pre_tokenizers import ByteLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tokenizers import Tokenizer

PIECE_CHARS = 2**15  # The longest piece, which takes about 80 ms and 10 MB.
# Not tuned: the search for a place to divide at ends after FAR_CHARS; CONTEXT_CHARS on each side of
# a place are compared; LOOK_CHARS are searched for places at once; of the places with the same
# character, TRIES_MAX are compared for one piece.
FAR_CHARS = 2**17
CONTEXT_CHARS = 128
LOOK_CHARS = 2**10
TRIES_MAX = 4
# Characters that may begin a piece after a letter or digit. No apostrophe: "don't" is one unit.
STARTS = ' \n,;:!?()[]{}<>/+="#&@|\u3001\u3002\uff0c\uff01\uff1f'
WORD = r"[^\W_]"
# A character of a vocabulary's token that may stand for a character of a word, or for its byte.
WRITTEN_WORD = r"[^\x00-/:-@\[-`{-~\u0120\u010a\u2581]"
SPACE_MARK = "\u2581"  # SentencePiece's character for a space
AFTER_NEWLINE = "a word behind a line break"


class Piece(NamedTuple):
    """A part of a text, which begins at the character ``start``. ``takes_space``: the space before
    ``start`` belongs to its first token and is in no piece."""

    start: int
    text: str
    takes_space: bool = False


class TextDivider:
    """Divides texts for one tokenizer. Safe to use in any thread. ``encoding`` returns the
    library's encoding of a text, with special tokens or without; it raises InvalidRequest."""

    def __init__(self, backend: Tokenizer, encoding: Callable[[str, bool], Any]) -> None:
        self._backend = backend
        self._encoding = encoding

    @property
    def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens that the tokenizer writes before and after a text. Empty for a
        tokenizer that divides no text."""
        return self._ends or ((), ())

    @cached_property
    def _ends(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """As `ends`, or None for a tokenizer that writes special tokens elsewhere, too (Rule 3)."""
        ends = {self._ends_of(text) for text in ("a", "b c")}
        return ends.pop() if len(ends) == 1 else None

    def divide(self, text: str) -> list[Piece]:
        """Return the pieces of a text, of at most `PIECE_CHARS` characters where there are places.
        If there is no place in `FAR_CHARS` characters, the rest of the text is one piece.

        Raises:
            InvalidRequest: The text cannot be tokenised.
        """
        pattern, pieces, piece = self._pattern, [], Piece(0, text)
        while pattern is not None and len(text) - piece.start > PIECE_CHARS:
            following = self._next(pattern, text, piece.start)
            if following is None:
                break
            end = following.start - following.takes_space
            pieces.append(piece._replace(text=text[piece.start : end]))
            piece = following
        return [*pieces, piece._replace(text=text[piece.start :])]

    def _next(self, pattern: re.Pattern[str], text: str, start: int) -> Piece | None:
        """Return the piece that follows the piece from ``start`` on, as yet without its text; None
        if no place to divide at is found."""
        tried: Counter[str] = Counter()
        for at in _places(pattern, text, start):
            tried[text[at]] += 1
            if tried[text[at]] > TRIES_MAX:
                continue
            for takes_space in (False, True) if text[at] == " " else (False,):
                if self._is_place(text, at, takes_space=takes_space):
                    return Piece(at + takes_space, "", takes_space)
        return None

    def _is_place(self, text: str, at: int, *, takes_space: bool) -> bool:
        """Return whether the text around a place has the same tokens if it is divided (Rule 2)."""
        first, last = max(0, at - CONTEXT_CHARS), at + CONTEXT_CHARS
        whole = self._encoding(text[first:last], False)
        left = self._encoding(text[first:at], False)
        right = self._encoding(text[at + takes_space : last], False)
        if whole.ids != left.ids + right.ids or not right.ids:
            return False
        shift = at - first
        moved = [
            (begin + shift + takes_space, end + shift + takes_space) for begin, end in right.offsets
        ]
        if takes_space:
            moved[0] = shift, moved[0][1]
        return bool(whole.offsets == left.offsets + moved)

    def _ends_of(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        bare, whole = tuple(self._encoding(text, False).ids), tuple(self._encoding(text, True).ids)
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        return None

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """The pattern of places at which texts may be divided (Rule 1); None if no text may."""
        if self._ends is None:
            return None
        whole = self._backend.get_vocab(with_added_tokens=False)
        of_bytes = all(byte in whole for byte in ByteLevel.alphabet())
        added = [token.content for token in self._backend.get_added_tokens_decoder().values()]
        within = _starts_within(whole, _written_starts(of_bytes=of_bytes))
        within |= _starts_within(added, {start: start for start in STARTS})
        starts = [start for start in STARTS if start not in within]
        if type(self._backend.model).__name__ == "Unigram":
            # Unigram adds up the scores of a unit's tokens, so that rounding spans its places.
            starts = [start for start in starts if start == " " and self._splits_at_spaces()]
        patterns = [f"(?<={WORD})(?=[{re.escape(''.join(starts))}]{WORD})"] if starts else []
        if "\n" in starts and AFTER_NEWLINE not in within:
            patterns.append(f"(?<=\n)(?={WORD})")
        return re.compile("|".join(patterns)) if patterns else None

    def _splits_at_spaces(self) -> bool:
        splitter = self._backend.pre_tokenizer
        waiting = [] if splitter is None else [json.loads(splitter.__getstate__())]
        while waiting:
            state = waiting.pop()
            waiting += state.get("pretokenizers", [])
            if state["type"] in {"WhitespaceSplit", "Whitespace", "BertPreTokenizer"}:
                return True
            if state["type"] == "Metaspace" and state.get("split", True):
                return True
        return False


def _places(pattern: re.Pattern[str], text: str, start: int) -> Iterator[int]:
    """Yield the places where a piece may end: first those within `PIECE_CHARS`, the last one first,
    and then those after that, in order."""
    least, most = start + PIECE_CHARS // 2, start + PIECE_CHARS
    for last in range(most, least, -LOOK_CHARS):
        yield from [m.start() for m in pattern.finditer(text, last - LOOK_CHARS, last)][::-1]
    for match in pattern.finditer(text, most, start + FAR_CHARS):
        yield match.start()


def _written_starts(*, of_bytes: bool) -> dict[str, str]:
    """Return the characters of `STARTS` by their spellings in tokens: themselves, or a letter that
    stands for a byte."""
    if not of_bytes:
        return {start: start for start in STARTS} | {SPACE_MARK: " "}
    splitter = ByteLevel(add_prefix_space=False, use_regex=False)
    return {splitter.pre_tokenize_str(start)[0][0]: start for start in STARTS}


def _starts_within(tokens: Iterable[str], written: dict[str, str]) -> set[str]:
    """Return the characters of `STARTS` that some token has after a character of a word, and
    `AFTER_NEWLINE` if some token has a word after a line break. The GIL is never held for long."""
    ways = "|".join(map(re.escape, written))
    newline = next(way for way, start in written.items() if start == "\n")
    behind = re.compile(f"{WRITTEN_WORD}(?=({ways}))")
    after = re.compile(f"{re.escape(newline)}{WRITTEN_WORD}")
    starts: set[str] = set()
    for token in tokens:
        if len(token) > 1:
            starts.update(written[way] for way in behind.findall(token))
            if after.search(token):
                starts.add(AFTER_NEWLINE)
    return starts
