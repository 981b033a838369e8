"""Reads `handwritten.txt`: plain English that a newcomer might type, not from the grammar.

Rule 1: nothing there is trained on, and the grammar is not changed to have these words or
sentences: what the models reach on it is reported as it is.
"""

from __future__ import annotations

from tools.demo.notation import HERE

HANDWRITTEN = "handwritten.txt"


def _groups(lines: int) -> tuple[tuple[str, ...], ...]:
    """The groups of so many lines; an empty line ends a group."""
    text = (HERE / HANDWRITTEN).read_text(encoding="utf-8")
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    groups = (tuple(group.strip().splitlines()) for group in kept.split("\n\n"))
    return tuple(group for group in groups if len(group) == lines)


def triples() -> list[tuple[str, str, str]]:
    """Anchor, paraphrase and what is not one."""
    return [(first, second, third) for first, second, third in _groups(3)]


def queries() -> list[tuple[str, str, str, str]]:
    """Query, the document that answers it, and two that share its words but do not."""
    return [(query, right, one, other) for query, right, one, other in _groups(4)]
