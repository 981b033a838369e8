"""Reads `handwritten.txt`: plain English as a newcomer might type it, which is not from the
grammar.

Rule: no model is trained on this text, and the grammar is not changed to contain its words or
sentences. The models' results on it are reported as they are.
"""

from __future__ import annotations

from tools.lab.demo.notation import HERE

HANDWRITTEN = "handwritten.txt"


def _groups(lines: int) -> tuple[tuple[str, ...], ...]:
    """Return the file's groups that have `lines` lines. An empty line ends a group."""
    text = (HERE / HANDWRITTEN).read_text(encoding="utf-8")
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    groups = (tuple(group.strip().splitlines()) for group in kept.split("\n\n"))
    return tuple(group for group in groups if len(group) == lines)


def triples() -> list[tuple[str, str, str]]:
    """Return triples of a text, a paraphrase of it, and a text with another meaning."""
    return [(first, second, third) for first, second, third in _groups(3)]


def queries() -> list[tuple[str, str, str, str]]:
    """Return groups of a query, the document that answers it, and two documents that share its
    words but do not answer it."""
    return [(query, right, one, other) for query, right, one, other in _groups(4)]
