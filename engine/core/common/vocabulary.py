"""Checks that token ids are in a model's vocabulary, which has an id for each row of the embedding.

A tokenizer may have more tokens than that: some fine-tunes add tokens without rows. Rule: every id
is checked here, once, where it enters the engine; the code that computes relies on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.errors import FieldViolation, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKEN_CHARS = 60  # most characters of a token in an error message; a guess: added tokens have fewer


class Decoder(Protocol):
    """The method of a tokenizer that makes a token readable in an error message."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""


def first_outside(ids: Sequence[int], vocab_size: int) -> int | None:
    """Return the index of the first id that is outside the vocabulary; None if all are inside."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return None
    return next(index for index, id_ in enumerate(ids) if not 0 <= id_ < vocab_size)


def violation_of_ids(
    field: str, ids: Sequence[int], vocab_size: int, *, first: int = 0
) -> FieldViolation | None:
    """Return the violation of a field of token ids if one of them is outside the vocabulary; None
    if all are inside. ``first`` is the index that ``ids[0]`` has in the field."""
    index = first_outside(ids, vocab_size)
    if index is None:
        return None
    what = f"is {ids[index]}, outside the vocabulary of {vocab_size}"
    return FieldViolation(f"{field}[{first + index}]", what)


def violation_of_text(
    field: str, ids: Sequence[int], vocab_size: int, tokenizer: Decoder
) -> FieldViolation | None:
    """Return the violation of a text with a token of ``ids`` outside the vocabulary; None
    without."""
    index = first_outside(ids, vocab_size)
    if index is None:
        return None
    text = tokenizer.decode([ids[index]], skip_special_tokens=False)
    shown = text if len(text) <= TOKEN_CHARS else text[: TOKEN_CHARS - 1] + "…"
    what = f"has the token {shown!r} with the id {ids[index]}, outside the vocabulary of"
    return FieldViolation(field, f"{what} {vocab_size}")


def check_ids(field: str, ids: Sequence[int], vocab_size: int, *, first: int = 0) -> None:
    """Check the ids of a field, as `violation_of_ids`.

    Raises:
        InvalidRequest: an id is outside the vocabulary; the violation names the first such id.
    """
    if (violation := violation_of_ids(field, ids, vocab_size, first=first)) is not None:
        raise InvalidRequest([violation])


def check_text(field: str, ids: Sequence[int], vocab_size: int, tokenizer: Decoder) -> None:
    """Check the tokens of a text, as `violation_of_text`.

    Raises:
        InvalidRequest: a token is outside the vocabulary; the violation names the first such token.
    """
    if (violation := violation_of_text(field, ids, vocab_size, tokenizer)) is not None:
        raise InvalidRequest([violation])
