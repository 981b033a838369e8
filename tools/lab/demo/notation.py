"""Reads the grammar files' notation into plain tables, for writing and for recognising stories.

Rule 1: everything about words is in the `.grammar` files, not in Python. Rule 2: a mistake in a
file raises `GrammarError` when the file is loaded; no later code checks again.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent

PRONOUNS = {
    "he": ("she", "he"),
    "He": ("She", "He"),
    "his": ("her", "his"),
    "His": ("Her", "His"),
    "him": ("her", "him"),
}
"""Slot → the female and the male pronoun; with an `f` before it, the friend's."""

NAMES = ("hero", "friend")
"""The roles that have a name. A name determines the pronouns."""

# A sentence ends at . ! or ?, with or without a closing quotation mark, if a capital letter or a
# quotation mark follows. `?" asked Mina` goes on in lower case, so the sentence does not end there.
_BORDER = re.compile(r'(?<=[.!?])\s+(?=[A-Z"{])|(?<=[.!?]")\s+(?=[A-Z"{])')
_SLOT = re.compile(r"\{(\w+)\}")


class GrammarError(ValueError):
    """A grammar file breaks the notation's rules."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot in a sentence. `base` names the role, list or pronoun; `article` puts a or an before
    the word."""

    base: str
    article: bool = False


Sentence = tuple["str | Slot", ...]
Variant = tuple[Sentence, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A beat's place in a plot."""

    beat: str
    optional: bool


@dataclass(frozen=True, slots=True)
class Role:
    """A slot that has one value in a story: the list of its values, and which role's value must
    differ."""

    source: str
    differs_from: str | None


@dataclass(slots=True)
class Tables:
    """The contents of grammar files, in their order."""

    lists: dict[str, tuple[str, ...]] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    beats: dict[str, tuple[Variant, ...]] = field(default_factory=dict)
    plots: dict[str, tuple[Step, ...]] = field(default_factory=dict)
    talks: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences. The speaker of a quotation belongs to it."""
    return _BORDER.split(text.strip())


def with_article(words: str) -> str:
    """Return the words with their article: `a fox`, `an owl`, `an honest fox`."""
    vowel = words[0] in "aeiou" or words.startswith("honest")
    return f"{'an' if vowel else 'a'} {words}"


@cache
def load(*names: str) -> Tables:
    """Load one or more grammar files of this folder.

    Raises:
        GrammarError: A line is malformed, or a slot is undefined.
    """
    tables = Tables()
    for name in names:
        for head, body in _entries((HERE / name).read_text(encoding="utf-8")):
            _add_entry(tables, head, body)
    _check(tables)
    return tables


def _entries(text: str) -> list[tuple[str, list[str]]]:
    """Return each unindented line with the indented lines that belong to it."""
    entries: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line[0].isspace():
            entries[-1][1].append(line.strip())
        else:
            entries.append((line.rstrip(), []))
    return entries


def _add_entry(tables: Tables, head: str, body: list[str]) -> None:
    found = re.fullmatch(r"(list|role|beat|plot|talk) (\w+)(?::\s*(.*))?", head)
    if found is None:
        raise GrammarError(f"no entry starts like this: {head}")
    kind, name, rest = found.groups()
    if kind == "list":
        items = " ".join([rest, *body]).split("|")
        expanded = [full for item in items for full in _multiply(tables, item.strip())]
        tables.lists[name] = tuple(expanded)
    elif kind == "role":
        source, _, other = rest.partition(" not ")
        tables.roles[name] = Role(source.strip(), other.strip() or None)
    elif kind == "beat":
        tables.beats[name] = tuple(parse_variant(line) for line in body)
    elif kind == "plot":
        steps = " ".join([rest, *body]).split()
        tables.plots[name] = tuple(Step(s.rstrip("?"), s.endswith("?")) for s in steps)
    else:
        asked = tuple(line[2:] for line in body if line.startswith("> "))
        tables.talks[name] = (asked, tuple(line for line in body if not line.startswith("> ")))


def _multiply(tables: Tables, item: str) -> list[str]:
    names = _SLOT.findall(item)
    choices = itertools.product(*(tables.lists[name] for name in names))
    shape = _SLOT.sub("{}", item)
    return [shape.format(*words) for words in choices]


def parse_variant(line: str) -> Variant:
    """Return the sentences of a variant, each as alternating literal pieces and slots."""
    return tuple(_parse_sentence(sentence) for sentence in split_sentences(line))


def _parse_sentence(text: str) -> Sentence:
    pieces: list[str | Slot] = []
    for index, piece in enumerate(_SLOT.split(text)):
        if index % 2 == 0:
            if piece:
                pieces.append(piece)
        else:
            article = piece.startswith("a_")
            pieces.append(Slot(piece.removeprefix("a_"), article))
    return tuple(pieces)


def slots_of(variant: Variant) -> list[Slot]:
    """Return the slots of a variant, in reading order."""
    return [piece for sentence in variant for piece in sentence if isinstance(piece, Slot)]


def owner_of(slot: str) -> str | None:
    """Return the name role that a pronoun slot refers to, or None for another slot."""
    if slot in PRONOUNS:
        return "hero"
    if slot[0] == "f" and slot[1:] in PRONOUNS:
        return "friend"
    return None


def gender_of(tables: Tables, name: str) -> int | None:
    """Return 0 for a female name, 1 for a male name, or None for a name that is not listed."""
    if name in tables.lists["she"]:
        return 0
    return 1 if name in tables.lists["he"] else None


def all_names(tables: Tables) -> tuple[str, ...]:
    """Return every listed name, the female ones first."""
    return tables.lists["she"] + tables.lists["he"]


def _check(tables: Tables) -> None:
    for beat, variants in tables.beats.items():
        for slot in (s for variant in variants for s in slots_of(variant)):
            known = slot.base in tables.roles or slot.base in NAMES or owner_of(slot.base)
            if not known and slot.base not in tables.lists:
                raise GrammarError(f"beat {beat}: nothing defines {{{slot.base}}}")
    for plot, steps in tables.plots.items():
        for step in steps:
            if step.beat not in tables.beats:
                raise GrammarError(f"plot {plot}: no beat {step.beat}")
    for name, role in tables.roles.items():
        if role.source not in tables.lists:
            raise GrammarError(f"role {name}: no list {role.source}")
