"""Writes the demo model's stories; a seed gives the same story on every machine.

Rule 1: every choice of a story is drawn from the given `Random`. Rule 2: `parser.py` recognises
exactly the stories that this file writes; both read the same tables.

    python -m tools.lab.demo.grammar --count        how many stories the grammar derives
    python -m tools.lab.demo.grammar --seed 7       one story
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tools.lab.demo.notation import (
    NAMES,
    PRONOUNS,
    Sentence,
    Slot,
    Tables,
    Variant,
    all_names,
    gender_of,
    load,
    owner_of,
    slots_of,
    with_article,
)

if TYPE_CHECKING:
    from random import Random

STORIES = "stories.grammar"

OPTIONAL_SHARE = 0.6
"""The probability of an optional beat (guess; stories then average about 130 words)."""


@dataclass(frozen=True, slots=True)
class Story:
    """A story and the values in its slots."""

    plot: str
    sentences: tuple[str, ...]
    values: dict[str, str]

    @property
    def text(self) -> str:
        """The whole story on one line."""
        return " ".join(self.sentences)

    @property
    def hero(self) -> str:
        """The hero's name."""
        return self.values["hero"]


@dataclass(slots=True)
class SlotFiller:
    """Fills the slots of one story or request. A role, such as the hero, keeps its value."""

    rng: Random
    tables: Tables = field(default_factory=lambda: load(STORIES))
    values: dict[str, str] = field(default_factory=dict)

    def fill(self, variant: Variant) -> list[str]:
        """Return a variant's sentences with their slots filled."""
        return [self._fill_sentence(sentence) for sentence in variant]

    def _fill_sentence(self, sentence: Sentence) -> str:
        return "".join(p if isinstance(p, str) else self._fill_slot(p) for p in sentence)

    def _fill_slot(self, slot: Slot) -> str:
        words = self._words(slot.base)
        return with_article(words) if slot.article else words

    def _words(self, base: str) -> str:
        owner = owner_of(base)
        if owner is not None:
            forms = PRONOUNS[base if owner == "hero" else base[1:]]
            return forms[gender_of(self.tables, self._role(owner)) or 0]
        if base in NAMES:
            return self._role(base)
        if base in self.tables.roles:
            forms = self._role(base).split("/")
            name = "friend" if base == "fkind" else "hero"
            return forms[gender_of(self.tables, self._role(name)) or 0 if len(forms) > 1 else 0]
        return self.rng.choice(self.tables.lists[base])

    def _role(self, role: str) -> str:
        if role not in self.values:
            if role in NAMES:
                taken = set(self.values.values())
                names = [n for n in all_names(self.tables) if n not in taken]
                self.values[role] = self.rng.choice(names)
            else:
                rule = self.tables.roles[role]
                taken = {self.values.get(rule.differs_from or "")} | {
                    self.values.get(r)
                    for r, q in self.tables.roles.items()
                    if q.differs_from == role
                }
                items = [i for i in self.tables.lists[rule.source] if i not in taken]
                self.values[role] = self.rng.choice(items)
        return self.values[role]


def write_story(
    rng: Random, values: dict[str, str] | None = None, plot: str | None = None
) -> Story:
    """Write a story. `values` sets roles (such as the hero's name), and `plot` its plot."""
    tables = load(STORIES)
    plot = plot or rng.choice(list(tables.plots))
    filler = SlotFiller(rng, tables, dict(values or {}))
    sentences: list[str] = []
    for step in tables.plots[plot]:
        if step.optional and rng.random() >= OPTIONAL_SHARE:
            continue
        sentences += filler.fill(rng.choice(tables.beats[step.beat]))
    return Story(plot, tuple(sentences), filler.values)


def story_from_seed(seed: int | str) -> Story:
    """Return the story of a seed. Strings seed `Random` by SHA-512 in all versions of Python."""
    return write_story(random.Random(f"story/{seed}"))


def count_derivations() -> int:
    """Count the different sequences of choices in the grammar without writing any.

    A role's values count once per story, and only if the story mentions the role. So the count runs
    over sets of mentioned roles: for each beat, set → number of ways to get there.
    """
    tables = load(STORIES)
    total = 0
    for steps in tables.plots.values():
        ways: Counter[frozenset[str]] = Counter({frozenset(): 1})
        for step in steps:
            after: Counter[frozenset[str]] = Counter(ways) if step.optional else Counter()
            for variant in tables.beats[step.beat]:
                roles, local = _choices(tables, variant)
                for mentioned, number in ways.items():
                    after[mentioned | roles] += number * local
            ways = after
        total += sum(number * _role_values(tables, roles) for roles, number in ways.items())
    return total


def _choices(tables: Tables, variant: Variant) -> tuple[frozenset[str], int]:
    """Return the roles that a variant mentions, and the number of ways to fill its list slots."""
    roles: set[str] = set()
    local = 1
    for slot in slots_of(variant):
        owner = owner_of(slot.base)
        if owner is not None or slot.base in NAMES or slot.base in tables.roles:
            roles.add(owner or slot.base)
            continue
        local *= len(tables.lists[slot.base])
    return frozenset(roles), local


def _role_values(tables: Tables, roles: frozenset[str]) -> int:
    """Return how many ways there are to give the roles values, where some must differ."""
    number = math.perm(len(all_names(tables)), len(roles & set(NAMES)))
    for role in roles - set(NAMES):
        rule = tables.roles[role]
        number *= len(tables.lists[rule.source]) - (1 if rule.differs_from in roles else 0)
    return number


def main() -> None:
    """Print a story or the number of stories."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--count", action="store_true", help="print the number of derivations")
    options.add_argument("--seed", default="0", help="which story to write (default 0)")
    given = options.parse_args()
    if given.count:
        number = count_derivations()
        print(f"{number} derivations (about 10^{math.log10(number):.1f})")
    else:
        print(story_from_seed(given.seed).text)


if __name__ == "__main__":
    main()
