"""Searches for the cross-encoder: a query, the document that answers it, and wrong documents.

Rule 1: search `index` of `seed` is always the same, on every machine. Rule 2: no wrong document has
a sentence that says what the query asks for, nor one with a frame of the same kind, except a
sentence that was made from the right document's by a slight change.

    python -m tools.lab.demo.searches --seed 7 --count 3 [--held-out]      prints some
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.lab.demo.meaning_notation import lexicon
from tools.lab.demo.meanings import differing, draw_meaning
from tools.lab.demo.triples import draw_question, joined
from tools.lab.demo.wording import draw_form, draw_wording, like, say

if TYPE_CHECKING:
    from random import Random

    from tools.lab.demo.meanings import Meaning, Roles

QUERY_SHARES = {"question": 5, "statement": 3, "keywords": 2}
SENTENCES_MAX = 3
"""The sentences of a document: the one that matters, and others around it (guess)."""

HARD, SAME, ANY = "hard", "same", "any"
"""Kinds of wrong documents: like the right one except for one sentence that differs slightly; about
the same agent as the right one; about anything."""

HELD_OUT_WRONG = (HARD,) * 4 + (SAME,) * 2 + (ANY,) * 3
FIRST_WRONG = (HARD, HARD, SAME, ANY)
TRAINING_WRONG = (HARD,) * 3
"""And one more of another kind (guess: a few are enough to learn the easy ones)."""

HELD_OUT_DOCUMENTS = 1 + len(HELD_OUT_WRONG)
TRAINING_DOCUMENTS = 2 + len(TRAINING_WRONG)


@dataclass(frozen=True, slots=True)
class Search:
    """A query and its documents, the right one first. `fulfilled` says for each document, where
    known, whether it has the frame that the query asks for, and each role's concept."""

    query: str
    documents: tuple[str, ...]
    fulfilled: tuple[dict[str, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class _Wish:
    """The statement that the right document makes: `meaning`'s frame with ``roles``' concepts."""

    meaning: Meaning
    roles: Roles

    def is_met_by(self, meaning: Meaning) -> bool:
        """Return whether a meaning has the wish's frame and concepts."""
        return meaning.says(self.meaning.frame, self.roles)

    def compare(self, meaning: Meaning) -> dict[str, bool]:
        """Return whether a meaning has the wish's frame, and each role's concept. The roles of a
        mirror frame are taken in the order in which more of them agree."""
        found = {"frame": meaning.frame == self.meaning.frame}
        orders = [dict(meaning.core)]
        if lexicon().frames[meaning.frame].is_mirror:
            said = orders[0]
            orders.append({"agent": said["patient"], "patient": said["agent"]})
        roles = [{r: said[r] == c for r, c in self.roles if r in said} for said in orders]
        return found | max(roles, key=lambda equal: sum(equal.values()))

    @property
    def kin(self) -> str:
        """The group of similar frames to which the wished frame belongs."""
        return lexicon().frames[self.meaning.frame].kin


def training_search(seed: int, index: int) -> Search:
    """Return the training search number ``index``: three wrong documents that differ slightly from
    the right one, and one of another kind."""
    rng = random.Random(f"search/{seed}/{index}")
    wrong = (*TRAINING_WRONG, rng.choice((SAME, ANY)))
    return _search(rng, wrong, held_out=False)


def first_search(seed: int, index: int) -> Search:
    """Return a search for the training's first phase: documents of one sentence."""
    rng = random.Random(f"first search/{seed}/{index}")
    return _search(rng, FIRST_WRONG, held_out=False, sentences=1)


def held_out_search(seed: int, index: int) -> Search:
    """Return a search for a meaning that no training text has, among ten documents."""
    return _search(random.Random(f"held out search/{seed}/{index}"), HELD_OUT_WRONG, held_out=True)


def _search(
    rng: Random, wrong: tuple[str, ...], held_out: bool, sentences: int = SENTENCES_MAX
) -> Search:
    while True:
        meaning = draw_meaning(rng, held_out)
        query, roles = _draw_query(rng, meaning)
        wish = _Wish(meaning, roles)
        wording = draw_wording(rng, meaning)
        around = _others(rng, wish, rng.randrange(sentences))
        texts = [_document(rng, say(meaning, wording), around)]
        fulfilled = [wish.compare(meaning)]
        for kind in wrong:
            if kind == HARD and roles:  # without roles, a slight change would be right, too
                other, _ = differing(rng, meaning, roles, held_out)
                kept = around if rng.random() < 0.5 else _others(rng, wish, len(around))
                text = say(other, like(rng, wording, meaning, other))
                texts.append(_document(rng, text, kept))
                fulfilled.append(wish.compare(other))
            else:
                texts.append(joined(_others(rng, wish, rng.randint(1, sentences), kind)))
                fulfilled.append({"frame": False})
        if len(set(texts)) == len(texts):
            return Search(query, tuple(texts), tuple(fulfilled))


def _draw_query(rng: Random, meaning: Meaning) -> tuple[str, Roles]:
    [kind] = rng.choices(list(QUERY_SHARES), list(QUERY_SHARES.values()))
    if kind == "question":
        return draw_question(rng, meaning)
    if kind == "statement":
        return say(meaning, draw_wording(rng, meaning, drop_share=1.0)), meaning.core
    roles = list(meaning.core)
    if len(roles) > 2 and rng.random() < 0.3:
        roles = rng.sample(roles, 2)
    rng.shuffle(roles)
    words = [draw_form(rng, concept).text for _, concept in roles]
    return " ".join(words), tuple(roles)


def _others(rng: Random, wish: _Wish, count: int, kind: str = "") -> list[str]:
    """Return sentences whose frames are of other kinds than the wish's; some have its agent."""
    agent = dict(wish.meaning.core).get("agent")
    texts: list[str] = []
    while len(texts) < count:
        same = kind == SAME or (not kind and rng.random() < 0.6)
        meaning = draw_meaning(rng, agent=agent if same else None, not_kin=wish.kin)
        if lexicon().frames[meaning.frame].kin != wish.kin and not wish.is_met_by(meaning):
            texts.append(say(meaning, draw_wording(rng, meaning)))
    return texts


def _document(rng: Random, sentence: str, around: list[str]) -> str:
    at = rng.randint(0, len(around))
    return joined([*around[:at], sentence, *around[at:]])


def main() -> None:
    """Print searches."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--count", type=int, default=3)
    options.add_argument("--held-out", action="store_true")
    given = options.parse_args()
    for index in range(given.count):
        find = held_out_search if given.held_out else training_search
        found = find(given.seed, index)
        print(found.query, *found.documents, sep="\n    ")


if __name__ == "__main__":
    main()
