"""Reads `meanings.grammar`: concepts, each with forms that mean the same, and frames, which are
kinds of statements about concepts.

Rule 1: everything about words is in the grammar file, not in Python. Rule 2: a mistake in the file
raises `GrammarError` when the file is loaded; no later code checks again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache

from tools.lab.demo.inflection import ing_of, past_of, plural_of, third_of
from tools.lab.demo.notation import HERE, GrammarError

MEANINGS = "meanings.grammar"

KINDS = ("nouns", "names", "places", "verbs", "words")

_ENTRY = re.compile(rf"({'|'.join(KINDS)}|shape|frame) (\w+)(?: (\w+))?(?::\s*(.*))?")
_SLOT = re.compile(r"\{(\w+)(?:\.(\w+))?\}")

VERB_SLOTS = ("past", "was", "is", "s", "base", "ing", "part")
SLOTS = {
    "nouns": ("", "a", "noun", "many", "s", "he", "his"),
    "names": ("", "a", "noun", "s", "he", "his"),
    "places": ("", "at", "to"),
    "verbs": VERB_SLOTS,
    "words": ("", "very", "a"),
}
"""The slots that a concept can fill in a sentence, by its kind; "" is a slot without a dot."""


@dataclass(frozen=True, slots=True)
class Form:
    """Words for a concept, such as a verb, with its ``shapes``: the words in each slot.

    `mass` nouns take no article. `is_plain` verbs can be used in the passive.
    """

    text: str
    shapes: tuple[tuple[str, str], ...] = ()
    mass: bool = False
    is_plain: bool = True

    def shape(self, slot: str) -> str:
        """Return the words for a slot, or the form's text if it has no such shape."""
        return dict(self.shapes).get(slot, self.text)


@dataclass(frozen=True, slots=True)
class Concept:
    """What several forms mean. `name` has the concept's list and first form: `animal/fox`."""

    name: str
    kind: str
    forms: tuple[Form, ...]
    pronoun: str = ""
    prepositions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Frame:
    """A kind of statement: its roles, sentences with slots for them (ways), and questions.

    `sources` has for each role the lists of concepts that may fill it; `details` are lists for
    optional roles.
    """

    name: str
    sources: dict[str, tuple[str, ...]]
    details: tuple[str, ...]
    ways: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    kin: str
    unlike: str
    is_mirror: bool


@dataclass(slots=True)
class Lexicon:
    """The contents of the grammar file, in its order."""

    concepts: dict[str, tuple[Concept, ...]] = field(default_factory=dict)
    frames: dict[str, Frame] = field(default_factory=dict)

    def of(self, sources: tuple[str, ...]) -> tuple[Concept, ...]:
        """Return the concepts of all lists that ``sources`` names."""
        return tuple(concept for source in sources for concept in self.concepts[source])


def slots_of(way: str) -> list[tuple[str, str]]:
    """Return the (role, slot) pairs of a way to say something, in reading order."""
    return [(role, slot) for role, slot in _SLOT.findall(way)]


def fill(way: str, words: dict[tuple[str, str], str]) -> str:
    """Return a way to say something with its slots replaced by words."""
    return _SLOT.sub(lambda found: words[found[1], found[2] or ""], way)


@cache
def lexicon(name: str = MEANINGS) -> Lexicon:
    """Load a grammar file.

    Raises:
        GrammarError: A line is malformed, a list is defined twice, or a slot is undefined.
    """
    return parse((HERE / name).read_text(encoding="utf-8"))


def parse(text: str) -> Lexicon:
    """Parse a grammar's text.

    Raises:
        GrammarError: As in `lexicon`.
    """
    found = Lexicon()
    shapes: dict[str, list[str]] = {}
    for head, body in _entries(text):
        entry = _ENTRY.fullmatch(head)
        if entry is None:
            raise GrammarError(f"no entry starts like this: {head}")
        kind, name, shape, rest = entry.groups()
        if name in (found.frames if kind == "frame" else found.concepts):
            raise GrammarError(f"{name} is there twice")
        if kind == "shape":
            shapes[name] = body
        elif kind == "frame":
            if shape and shape not in shapes:
                raise GrammarError(f"frame {name}: no shape {shape}")
            lines = [*shapes.get(shape or "", ()), *body]
            found.frames[name] = _frame(found, name, rest or "", lines)
        else:
            found.concepts[name] = tuple(_concept(kind, name, line) for line in body)
    for frame in found.frames.values():
        if frame.unlike and frame.unlike not in found.frames:
            raise GrammarError(f"frame {frame.name}: no frame {frame.unlike}")
    return found


def _entries(text: str) -> list[tuple[str, list[str]]]:
    entries: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if not line[0].isspace():
            entries.append((line.rstrip(), []))
        elif entries:
            entries[-1][1].append(line.strip())
        else:
            raise GrammarError(f"belongs to nothing: {line}")
    return entries


def _concept(kind: str, source: str, line: str) -> Concept:
    words, _, mark = line.partition("@")
    texts = [text.strip() for text in words.split("|")]
    make = {"verbs": _verb, "nouns": _noun, "places": _noun}.get(kind, Form)
    forms = tuple(make(text) for text in texts)
    prepositions = tuple(mark.split()) if kind == "places" else ()
    if kind == "places" and not prepositions:
        raise GrammarError(f"{source}: {line} has no prepositions")
    pronoun = "" if kind == "places" else mark.strip()
    return Concept(f"{source}/{forms[0].text}", kind, forms, pronoun, prepositions)


def _noun(text: str) -> Form:
    one, _, many = text.removeprefix("~").partition("/")
    mass = text.startswith("~")
    return Form(one, (("many", one if mass else many or plural_of(one)),), mass)


def _verb(text: str) -> Form:
    if text.startswith("="):
        state = text[1:]
        starts = {"past": "was ", "was": "was ", "is": "is ", "s": "is ", "base": "be ", "ing": ""}
        shapes = {slot: start + state for slot, start in starts.items()}
        return Form(state, tuple(shapes.items()), is_plain=False)
    head, _, rest = text.partition(" ")
    parts = head.split("/")
    if len(parts) not in (1, 3):
        raise GrammarError(f"a verb has one form or three: {text}")
    base, past, part = parts if len(parts) == 3 else (parts[0], past_of(head), past_of(head))
    ing = ing_of(base)
    shapes = {"past": past, "was": f"was {ing}", "is": f"is {ing}", "s": third_of(base)}
    shapes |= {"base": base, "ing": ing, "part": part}
    full = {slot: f"{words} {rest}".rstrip() for slot, words in shapes.items()}
    return Form(full["base"], tuple(full.items()), is_plain=len(rest.split()) <= 1)


def _frame(found: Lexicon, name: str, header: str, lines: list[str]) -> Frame:
    sources: dict[str, tuple[str, ...]] = {}
    options = {"kin": "", "unlike": ""}
    for word in header.replace("mirror", "").split():
        key, _, value = word.partition("=")
        if key in options:
            options[key] = value
        else:
            sources[key] = tuple(value.split("+"))
    details: tuple[str, ...] = ()
    ways: list[str] = []
    questions: list[tuple[str, str]] = []
    for line in lines:
        if line.startswith("detail:"):
            details = tuple(line.removeprefix("detail:").split())
        elif line.startswith("ask "):
            role, _, asked = line.removeprefix("ask ").partition(":")
            questions += [(role, question.strip()) for question in asked.split("|")]
        else:
            ways.append(line)
    frame = Frame(
        name, sources, details, tuple(ways), tuple(questions), **options,
        is_mirror="mirror" in header.split(),
    )  # fmt: skip
    _check(found, frame)
    return frame


def _check(found: Lexicon, frame: Frame) -> None:
    for source in [s for listed in frame.sources.values() for s in listed] + [*frame.details]:
        if source not in found.concepts:
            raise GrammarError(f"frame {frame.name}: no list {source}")
    for way in [*frame.ways, *(question for _, question in frame.questions)]:
        for role, slot in slots_of(way):
            if role not in frame.sources:
                raise GrammarError(f"frame {frame.name}: no role {role} in {way!r}")
            kinds = {c.kind for source in frame.sources[role] for c in found.concepts[source]}
            if not any(slot in SLOTS[kind] for kind in kinds):
                raise GrammarError(f"frame {frame.name}: nothing makes {role}.{slot} in {way!r}")
    for role, question in frame.questions:
        if role not in frame.sources:
            raise GrammarError(f"frame {frame.name}: {question!r} asks for no role")
