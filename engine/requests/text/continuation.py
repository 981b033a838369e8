"""How far a stream had come before it was cut, as its client reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from engine.errors import FieldViolation
from engine.requests.field_types import TypedFields, several

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class ContinuedChoice(TypedFields):
    """How far one choice had come: the tokens received, or that its end was received."""

    token_ids: tuple[int, ...] = ()
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Continuation(TypedFields):
    """How far the stream of an equal request had come, so that this request continues it.

    ``choices`` are in the order of their indices. Of a choice that is not listed, nothing was
    received. ``seed`` is the seed in the stream's `Started`.
    """

    TYPES: ClassVar = {"choices": several(ContinuedChoice)}
    choices: tuple[ContinuedChoice, ...] = ()
    seed: int | None = None

    @property
    def has_begun(self) -> bool:
        """Whether anything of a choice was received."""
        return any(choice.token_ids or choice.finished for choice in self.choices)

    def violations(self, n: int, seed: int | None) -> Iterator[FieldViolation]:
        """Yield every broken field, by proto path. ``n`` and ``seed`` are the request's own."""
        if len(self.choices) > n:
            what = f"has {len(self.choices)} choices, but n is {n}"
            yield FieldViolation("continuation.choices", what)
        elif len(self.choices) == n and all(choice.finished for choice in self.choices):
            yield FieldViolation(
                "continuation.choices", "have all finished, so there is nothing to continue"
            )
        if self.seed is not None and seed is not None and self.seed != seed:
            what = f"is {self.seed}, but sampling.seed is {seed}"
            yield FieldViolation("continuation.seed", what)
