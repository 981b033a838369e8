"""Combines the answers of a group's ranks to one request into one answer, or an error (D29).

The same request goes to every rank, and each answers once. Rank 0's answer is the group's answer,
once it is certain that all ranks are in the same state.

Rule: this file decides and neither waits nor reads a clock; `engine.worker.process.group` does
both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.worker.process.messages import Raised

# Seconds from the first rank's failure in a step to the end of the group, if other ranks do not
# answer: a rank that the failed rank has left in a collective waits for ever. Not tuned; ranks that
# do not wait answer within milliseconds.
GRACE_S = 1.0


class OutOfStep(Exception):
    """The ranks are not in the same state any more, so the group must end. The message says why, as
    the rest of a sentence that begins with "the worker process"."""


class Answer(NamedTuple):
    """One rank's answer: the name and the value of its message."""

    name: str
    value: Any


class Answers:
    """The ranks' answers to one message. With ``is_step``, a failure counts only once all ranks
    have answered, because ranks that did not fail may have changed their state."""

    def __init__(self, size: int, *, is_step: bool) -> None:
        self._size = size
        self._is_step = is_step
        self._of: dict[int, Answer] = {}

    def take(self, rank: int, answer: Answer) -> None:
        """Record a rank's answer."""
        self._of[rank] = answer

    @property
    def missing(self) -> list[int]:
        """The ranks that have not answered yet."""
        return [rank for rank in range(self._size) if rank not in self._of]

    @property
    def has_failure(self) -> bool:
        """Whether a rank has failed."""
        return any(answer.name == "raised" for answer in self._of.values())

    @property
    def is_over(self) -> bool:
        """Whether no further answer is needed."""
        return not self.missing or (self.has_failure and not self._is_step)

    def give_up(self) -> OutOfStep:
        """Return the error of a step in which a rank failed and others do not answer."""
        failed = next(rank for rank, answer in self._of.items() if answer.name == "raised")
        return OutOfStep(
            f"of rank {failed} failed in a step ({_what(self._of[failed])}), and rank "
            f"{self.missing[0]} waited for it; both were killed"
        )

    def in_order(self) -> list[Answer]:
        """Return the answers of all ranks, or only the failure if an estimate or a load failed.

        Raises:
            OutOfStep: Some ranks computed a step and others did not.
        """
        failed = [rank for rank, answer in sorted(self._of.items()) if answer.name == "raised"]
        if failed and not self._is_step:
            return [self._of[failed[0]]]
        if failed and len(failed) < self._size:
            raise OutOfStep(
                f"of rank {failed[0]} failed in a step that others took "
                f"({_what(self._of[failed[0]])}); all were killed"
            )
        answers = [self._of[rank] for rank in range(self._size)]
        if len({_begun(answers[rank]) for rank in failed}) > 1:
            raise OutOfStep(
                f"of rank 0 and the others failed at different places of a step "
                f"({_what(answers[0])}); all were killed"
            )
        return answers


def _begun(answer: Answer) -> int:
    return answer.value.num_collectives if isinstance(answer.value, Raised) else 0


def _what(answer: Answer) -> str:
    return answer.value.text if isinstance(answer.value, Raised) else answer.name
