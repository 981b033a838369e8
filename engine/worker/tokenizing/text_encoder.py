"""Turns text into token ids: a short text at once, a long text piece by piece.

Rule: nothing here changes the tokenizer, so every method may be called from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from engine.errors import InvalidRequest
from engine.worker.interface import TokenSpan
from engine.worker.tokenizing.text_pieces import TextDivider

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer

    from engine.worker.tokenizing.text_pieces import Piece

T = TypeVar("T")


class TextEncoder(ABC):
    """The encoding methods of `engine.worker.interface.Tokenizer`, by a `tokenizers.Tokenizer`."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        self._divider = TextDivider(backend, self._encoding)

    @abstractmethod
    def token_text(self, token_id: int) -> str:
        """Return the text of one token as part of a longer text, with its leading space."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the ids of a text.

        Raises:
            InvalidRequest: The text cannot be encoded; the violation names the field ``text``.
        """
        return tuple(self._encoding(text, add_special_tokens).ids)

    def encode_spans(self, text: str, *, add_special_tokens: bool = True) -> tuple[TokenSpan, ...]:
        """Return the tokens of a text, each with its range of code points.

        A token that the post-processor added has an empty range. Tokens that are single bytes of
        one character all have the range of that character.

        Raises:
            InvalidRequest: The text cannot be encoded (`encode`).
        """
        encoding = self._encoding(text, add_special_tokens)
        return tuple(
            TokenSpan(id_, self.token_text(id_), start, end)
            for id_, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
        )

    def encode_jobs(
        self, text: str, *, add_special_tokens: bool = True
    ) -> list[Callable[[], tuple[int, ...]]]:
        """Divide a long text (`TextDivider`), and return a function for each piece that returns the
        piece's ids. Special tokens before and after the text count as pieces.

        Raises:
            InvalidRequest: as `encode`; the functions raise it, too.
        """
        return self._jobs(text, add_special_tokens, self._piece_ids, tuple)

    def span_jobs(
        self, text: str, *, add_special_tokens: bool = True
    ) -> list[Callable[[], Sequence[TokenSpan]]]:
        """Divide a long text like `encode_jobs`, and return a function for each piece that returns
        the piece's tokens.

        Raises:
            InvalidRequest: as `encode`; the functions raise it, too.
        """
        return self._jobs(text, add_special_tokens, self._piece_spans, self._special_spans)

    def _jobs(
        self,
        text: str,
        add_special_tokens: bool,
        of_piece: Callable[[Piece, bool], T],
        of_special: Callable[[tuple[int, ...]], T],
    ) -> list[Callable[[], T]]:
        pieces = self._divider.divide(text)
        if len(pieces) == 1:
            return [partial(of_piece, pieces[0], add_special_tokens)]
        jobs = [partial(of_piece, piece, False) for piece in pieces]
        if not add_special_tokens:
            return [*jobs]
        before, behind = self._divider.ends
        return [partial(of_special, before), *jobs, partial(of_special, behind)]

    def _piece_ids(self, piece: Piece, add_special_tokens: bool) -> tuple[int, ...]:
        return self.encode(piece.text, add_special_tokens=add_special_tokens)

    def _piece_spans(self, piece: Piece, add_special_tokens: bool) -> Sequence[TokenSpan]:
        encoding = self._encoding(piece.text, add_special_tokens)
        starts = array("I", [start + piece.start for start, _ in encoding.offsets])
        ends = array("I", [end + piece.start for _, end in encoding.offsets])
        if piece.takes_space:
            starts[0] -= 1
        return _PackedSpans(array("I", encoding.ids), starts, ends, self.token_text)

    def _special_spans(self, ids: tuple[int, ...]) -> Sequence[TokenSpan]:
        return tuple(TokenSpan(id_, self.token_text(id_), 0, 0) for id_ in ids)

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        try:
            # The library's `encode` would hold the GIL all the time: 2.8 s for 4 MiB.
            [encoding] = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
            return encoding
        except Exception as error:
            # A lone surrogate raises TypeError; a model without an unknown token raises Exception.
            if any("\ud800" <= character <= "\udfff" for character in text):
                what = "contains a lone surrogate, which no Unicode text can"
            else:
                what = "contains something this model's tokenizer cannot encode"
            raise InvalidRequest.of("text", what) from error


class _PackedSpans(Sequence[TokenSpan]):
    """The tokens of a piece in 12 bytes each, a tenth of an object's size: all tokens of a text
    stay in memory until its last piece is encoded."""

    def __init__(
        self, ids: array[int], starts: array[int], ends: array[int], text_of: Callable[[int], str]
    ) -> None:
        self._ids, self._starts, self._ends, self._text_of = ids, starts, ends, text_of

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, at: Any) -> Any:  # no slices
        token_id = self._ids[at]
        return TokenSpan(token_id, self._text_of(token_id), self._starts[at], self._ends[at])
