"""Triples for the embedding model: a text, another of the same meaning, and one of another meaning.

Rule 1: triple `index` of `seed` is always the same, on every machine. Rule 2: the third text has
the first one's words except for the difference in meaning.

    python -m tools.lab.demo.triples --seed 7 --count 5 [--held-out]      prints some
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tools.lab.demo.meaning_notation import lexicon
from tools.lab.demo.meanings import Meaning, differing, draw_meaning, swapped
from tools.lab.demo.wording import (
    Wording,
    capitalised,
    draw_wording,
    fill_way,
    like,
    possible_ways,
    say,
)

if TYPE_CHECKING:
    from random import Random

    from tools.lab.demo.meanings import Roles

PASSAGE_SHARE, QUESTION_SHARE = 0.12, 0.18
"""The shares of training triples that are passages, and questions with answers (guesses)."""

SWAP_SHARE = 0.3
"""The share of training triples of sentences whose negative exchanges two roles. There are more of
them than in the measurement because this is learnt last."""

SENTENCES_MAX = 5
ABOUT_ONE_SHARE = 0.8
"""The probability that a passage's sentence is about the same agent as the first (guess)."""


@dataclass(frozen=True, slots=True)
class Triple:
    """Three texts. `differs` names the change of the negative, as `differing` does.

    A triple of sentences has two `meanings`: that of anchor and paraphrase, and the negative's.
    """

    anchor: str
    paraphrase: str
    negative: str
    differs: str
    meanings: tuple[Meaning, ...]
    kind: str = "sentence"

    @property
    def texts(self) -> tuple[str, str, str]:
        """Anchor, paraphrase and negative."""
        return self.anchor, self.paraphrase, self.negative


def training_triple(seed: int, index: int) -> Triple:
    """Return the training triple with this number: three sentences, three passages, or a question,
    its answer and a wrong one."""
    rng = random.Random(f"triple/{seed}/{index}")
    draw = rng.random()
    if draw < PASSAGE_SHARE:
        return passage_triple(rng)
    if draw < PASSAGE_SHARE + QUESTION_SHARE:
        return question_triple(rng)
    return swap_triple(rng) if rng.random() < SWAP_SHARE else sentence_triple(rng)


def swap_lesson(seed: int, index: int) -> Triple:
    """Return a triple for the training's first phase, which teaches only who does what to whom."""
    return swap_triple(random.Random(f"lesson/{seed}/{index}"))


def held_out_triple(seed: int, index: int) -> Triple:
    """Return a triple of sentences, the first two with a meaning that no training text has."""
    return sentence_triple(random.Random(f"held out/{seed}/{index}"), held_out=True)


def sentence_triple(rng: Random, held_out: bool = False) -> Triple:
    """Return a triple of sentences. Only if `held_out`, the negative may be a held-out one."""
    while True:
        meaning = draw_meaning(rng, held_out)
        triple = _triple(rng, meaning, *differing(rng, meaning, held_out=held_out))
        if len(set(triple.texts)) == 3:
            return triple


def swap_triple(rng: Random) -> Triple:
    """Return a training triple of sentences whose negative exchanges two roles."""
    while True:
        meaning = draw_meaning(rng)
        other = swapped(rng, meaning)
        if other is None or other[0].is_held_out:
            continue
        triple = _triple(rng, meaning, *other)
        if len(set(triple.texts)) == 3:
            return triple


def _triple(rng: Random, meaning: Meaning, other: Meaning, differs: str) -> Triple:
    anchor = _showing(draw_wording(rng, meaning, drop_share=0.1), differs)
    paraphrase = _showing(draw_wording(rng, meaning, other_than=anchor), differs)
    negative = _showing(like(rng, anchor, meaning, other), differs)
    texts = say(meaning, anchor), say(meaning, paraphrase), say(other, negative)
    return Triple(*texts, differs, (meaning, other))


def _showing(wording: Wording, detail: str) -> Wording:
    """Return the wording with ``detail`` kept, because the texts differ in it."""
    return replace(wording, dropped=wording.dropped - {detail})


def draw_passage(rng: Random, sentences: int, first: Meaning | None = None) -> list[Meaning]:
    """Draw meanings to be said one after another, most often about the same agent."""
    meanings = [first or draw_meaning(rng)]
    agent = dict(meanings[0].core).get("agent")
    while len(meanings) < sentences:
        about = agent if agent is not None and rng.random() < ABOUT_ONE_SHARE else None
        kin = lexicon().frames[meanings[0].frame].kin
        meanings.append(draw_meaning(rng, agent=about, not_kin=kin))
    return meanings


def passage_triple(rng: Random) -> Triple:
    """Return a triple of passages. At least one of the negative's sentences says something else."""
    meanings = draw_passage(rng, rng.randint(2, SENTENCES_MAX))
    anchor = [draw_wording(rng, meaning, drop_share=0.1) for meaning in meanings]
    pairs = list(zip(meanings, anchor, strict=True))
    said = [say(m, draw_wording(rng, m, other_than=w)) for m, w in pairs]
    if len(said) > 2 and rng.random() < 0.3:
        del said[rng.randrange(len(said))]
    changed = set(rng.sample(range(len(pairs)), rng.randint(1, len(pairs))))
    others: list[str] = []
    for at, (meaning, wording) in enumerate(pairs):
        other = meaning
        if at in changed:
            other, _ = differing(rng, meaning, meaning.core, held_out=False)
        others.append(say(other, like(rng, wording, meaning, other)))
    texts = [say(m, w) for m, w in pairs]
    return Triple(
        joined(texts), joined(said), joined(others), "passage", tuple(meanings), "passage"
    )


def joined(sentences: list[str]) -> str:
    """Return the sentences as one text."""
    return " ".join(s if s.endswith((".", "!", "?", '"')) else f"{s}." for s in sentences)


def question_triple(rng: Random) -> Triple:
    """Return a triple of a question, its answer, and a text that answers another question."""
    while True:
        meaning = draw_meaning(rng)
        question, wanted = draw_question(rng, meaning)
        if not wanted:
            continue
        other, differs = differing(rng, meaning, wanted, held_out=False)
        wording = draw_wording(rng, meaning)
        answers = [say(meaning, wording)]
        wrong = [say(other, like(rng, wording, meaning, other))]
        if rng.random() < 0.3:
            more = [say(m, draw_wording(rng, m)) for m in draw_passage(rng, 2, meaning)[1:]]
            answers, wrong = answers + more, wrong + more
        if answers != wrong:
            return Triple(
                question, joined(answers), joined(wrong), differs, (meaning, other), "question"
            )


def draw_question(rng: Random, meaning: Meaning) -> tuple[str, Roles]:
    """Return a question that the meaning answers, and the roles that an answer must have."""
    wording = draw_wording(rng, meaning, drop_share=1.0)
    frame = lexicon().frames[meaning.frame]
    questions = dict(frame.questions)
    role = rng.choice(list(questions))
    fitting = possible_ways(
        meaning, wording.forms, tuple(text for asked, text in frame.questions if asked == role)
    )
    if not fitting:
        return draw_question(rng, meaning)
    text = rng.choice(fitting)
    named = {name for name in dict(meaning.core) if f"{{{name}" in text}
    asked = capitalised(fill_way(text, meaning, wording))
    wanted = tuple((r, c) for r, c in meaning.core if r in named)
    return asked + ("?" if rng.random() < 0.8 else ""), wanted


def main() -> None:
    """Print triples."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--count", type=int, default=5)
    options.add_argument("--held-out", action="store_true")
    given = options.parse_args()
    for index in range(given.count):
        make = held_out_triple if given.held_out else training_triple
        found = make(given.seed, index)
        print(f"{found.differs}\n  {found.anchor}\n  {found.paraphrase}\n  not: {found.negative}")


if __name__ == "__main__":
    main()
