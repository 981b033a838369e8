"""Recognises the sentences and stories of the grammar.

A sentence is accepted if the grammar has it with some values in its slots: a role must have the
same value everywhere, pronouns must have their name's gender, and roles that must differ do. A
story is accepted if its sentences follow one plot with one set of values.

    python -m tools.lab.demo.parser FILE            prints a line per sentence: ok or NOT
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tools.lab.demo.grammar import STORIES
from tools.lab.demo.notation import (
    NAMES,
    PRONOUNS,
    Sentence,
    Slot,
    Step,
    Tables,
    Variant,
    gender_of,
    load,
    owner_of,
    split_sentences,
    with_article,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

Values = dict[str, str]
"""The facts of a reading: role → value, and `hero's`/`friend's` → gender as "0" or "1"."""

_WORD = re.compile(r"[\w'-]+")


@dataclass(frozen=True)
class Parser:
    """A recogniser for one grammar."""

    tables: Tables

    @cached_property
    def _sentences(self) -> tuple[Sentence, ...]:
        """Every sentence of the plots' beats, each once."""
        beats = {step.beat for steps in self.tables.plots.values() for step in steps}
        variants = (variant for beat in sorted(beats) for variant in self.tables.beats[beat])
        return tuple(dict.fromkeys(sentence for variant in variants for sentence in variant))

    @cached_property
    def _closed(self) -> dict[Slot, dict[str, list[tuple[str, Values]]]]:
        """For each slot except the names, by first word: the fillers that begin with this word, and
        the facts that follow from each."""
        slots = {p for sentence in self._sentences for p in sentence if isinstance(p, Slot)}
        closed: dict[Slot, dict[str, list[tuple[str, Values]]]] = {}
        for slot in slots - {Slot(name) for name in NAMES}:
            by_first = closed[slot] = defaultdict(list)
            for words, facts in self._surfaces(slot.base):
                surface = with_article(words) if slot.article else words
                by_first[_first_word(surface)].append((surface, facts))
        return closed

    def _surfaces(self, base: str) -> Iterator[tuple[str, Values]]:
        owner = owner_of(base)
        if owner is not None:
            forms = PRONOUNS[base if owner == "hero" else base[1:]]
            yield from ((form, {f"{owner}'s": str(gender)}) for gender, form in enumerate(forms))
        elif base in self.tables.roles:
            owner = "friend" if base == "fkind" else "hero"
            for value in self.tables.lists[self.tables.roles[base].source]:
                forms = value.split("/")
                for gender, form in enumerate(forms):
                    extra = {f"{owner}'s": str(gender)} if len(forms) > 1 else {}
                    yield form, {base: value, **extra}
        else:
            yield from ((item, {}) for item in self.tables.lists[base])

    def _fillers(self, slot: Slot, text: str) -> Iterator[tuple[str, Values]]:
        """Yield the words at the start of the text that may fill the slot, and the facts that
        follow from them, such as the hero's gender."""
        first = _first_word(text)
        if slot.base not in NAMES:
            known = self._closed[slot].get(first, ())
            yield from ((surface, facts) for surface, facts in known if text.startswith(surface))
            return
        name = first.removesuffix("'s")
        gender = gender_of(self.tables, name)
        if gender is not None:
            yield name, {slot.base: name, f"{slot.base}'s": str(gender)}

    def _merge(self, known: Values, facts: Values) -> Values | None:
        """Return all facts, or None if they disagree or two roles break a rule that they differ."""
        if any(known.get(key, value) != value for key, value in facts.items()):
            return None
        merged = {**known, **facts}
        if merged.get("hero", "") == merged.get("friend"):
            return None
        for role, rule in self.tables.roles.items():
            if rule.differs_from and merged.get(role, "") == merged.get(rule.differs_from):
                return None
        return merged

    def _match(self, pieces: Sentence, text: str, known: Values) -> Iterator[Values]:
        """Yield, for every way to read the whole text as these pieces, the facts known then."""
        if not pieces:
            if not text:
                yield known
            return
        head, rest = pieces[0], pieces[1:]
        if isinstance(head, str):
            if text.startswith(head):
                yield from self._match(rest, text[len(head) :], known)
            return
        for surface, facts in self._fillers(head, text):
            merged = self._merge(known, facts) if facts else known
            if merged is not None:
                yield from self._match(rest, text[len(surface) :], merged)

    def accepts_sentence(self, text: str) -> bool:
        """Return whether the grammar derives this sentence in any story."""
        readings = (self._match(sentence, text, {}) for sentence in self._sentences)
        return any(next(reading, None) is not None for reading in readings)

    def accepts_story(self, text: str) -> bool:
        """Return whether the grammar derives this text as a whole story."""
        sentences = tuple(split_sentences(text))
        plots = self.tables.plots.values()
        return any(self._follows(steps, sentences, {}) for steps in plots)

    def _follows(self, steps: tuple[Step, ...], texts: tuple[str, ...], known: Values) -> bool:
        if not steps:
            return not texts
        step, rest = steps[0], steps[1:]
        for variant in self.tables.beats[step.beat]:
            for values in self._read_variant(variant, texts, known):
                if self._follows(rest, texts[len(variant) :], values):
                    return True
        return step.optional and self._follows(rest, texts, known)

    def _read_variant(
        self, variant: Variant, texts: tuple[str, ...], known: Values
    ) -> Iterator[Values]:
        if not variant:
            yield known
        elif texts:
            for values in self._match(variant[0], texts[0], known):
                yield from self._read_variant(variant[1:], texts[1:], values)


def _first_word(text: str) -> str:
    found = _WORD.match(text)
    return found.group() if found else ""


@cache
def story_parser() -> Parser:
    """Return the parser of the shipped stories."""
    return Parser(load(STORIES))


def main() -> int:
    """Check a text file's sentences and return the exit code: 1 if one is not the grammar's."""
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    parser = story_parser()
    verdicts = [(parser.accepts_sentence(s), s) for s in split_sentences(text)]
    for accepted, sentence in verdicts:
        print("ok " if accepted else "NOT", sentence)
    return 0 if all(accepted for accepted, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
