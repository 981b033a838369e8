"""Puts a meaning into words: one of the frame's sentences, a form of each concept, and details.

Rule: a wording holds every random choice, so that another meaning can be said in the same words
except where the meanings differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tools.lab.demo.inflection import possessive_of, with_article
from tools.lab.demo.meaning_notation import SLOTS, Form, fill, lexicon, slots_of
from tools.lab.demo.meanings import Meaning, takes_look

if TYPE_CHECKING:
    from random import Random

    from tools.lab.demo.meaning_notation import Concept

OTHER_FORM_SHARE = 0.8
"""How often a form differs from the one to avoid, where there is another (guess)."""

PRONOUNS = {"he": {"she": "she", "he": "he"}, "his": {"she": "her", "he": "his"}}


@dataclass(frozen=True, slots=True)
class Wording:
    """The random choices for one sentence: the sentence of the frame (``way``), and for each role
    the form, the article, the preposition and the pronoun."""

    way: str
    forms: dict[str, Form]
    articles: dict[str, str]
    prepositions: dict[str, str]
    pronouns: dict[str, str]
    emphasis: str
    front: str
    dropped: frozenset[str]
    stop: str


def draw_wording(
    rng: Random, meaning: Meaning, other_than: Wording | None = None, drop_share: float = 0.25
) -> Wording:
    """Draw a wording for a meaning. If possible, its way and forms are others than `other_than`'s.

    Each detail is left out with the probability `drop_share`.
    """
    roles = meaning.core + meaning.details
    forms: dict[str, Form] = {}
    for role, concept in roles:
        old = other_than.forms.get(role) if other_than else None
        forms[role] = draw_form(rng, concept, old)
    ways = possible_ways(meaning, forms, lexicon().frames[meaning.frame].ways)
    if other_than is not None and len(ways) > 1:
        ways = [way for way in ways if way != other_than.way] or ways
    kept = [role for role, _ in meaning.details if role != "look"]
    return Wording(
        way=rng.choice(ways),
        forms=forms,
        articles={role: rng.choices(("the", "a"), (3, 2))[0] for role, _ in roles},
        prepositions={role: rng.choice(c.prepositions) for role, c in roles if c.prepositions},
        pronouns={role: draw_pronoun(rng, c) for role, c in roles},
        emphasis=rng.choice(("very", "so", "really", "quite", "")),
        front=rng.choice(kept) if kept and rng.random() < 0.4 else "",
        dropped=frozenset(r for r, _ in meaning.details if rng.random() < drop_share),
        stop="." if rng.random() < 0.85 else "",
    )


def draw_form(rng: Random, concept: Concept, other_than: Form | None = None) -> Form:
    """Draw one of a concept's forms, preferably not the given one."""
    others = [form for form in concept.forms if form != other_than]
    if other_than is not None and others and rng.random() < OTHER_FORM_SHARE:
        return rng.choice(others)
    return rng.choice(concept.forms)


def draw_pronoun(rng: Random, concept: Concept) -> str:
    """Return `she` or `he`, or for an animal also `it`; a random one where several fit."""
    if concept.name.startswith("animal/"):
        return rng.choice(("it", "it", "she", "he"))
    return concept.pronoun or rng.choice(("she", "he"))


def like(rng: Random, wording: Wording, old: Meaning, new: Meaning) -> Wording:
    """Return the wording for another meaning, with new choices only where the meanings differ."""
    fresh = draw_wording(rng, new)
    before = dict(old.core + old.details)
    same = {role for role, concept in new.core + new.details if before.get(role) == concept}

    def merged(name: str) -> dict[str, object]:
        """Return the old choices for roles whose concept stays, and new ones for other roles."""
        kept = {r: v for r, v in getattr(wording, name).items() if r in same}
        return getattr(fresh, name) | kept

    result = replace(
        wording,
        way=wording.way if old.frame == new.frame else fresh.way,
        articles=fresh.articles | wording.articles,
        **{name: merged(name) for name in ("forms", "prepositions", "pronouns")},  # type: ignore[arg-type]
    )
    ways = possible_ways(new, result.forms, (result.way,))
    return result if ways else replace(result, way=fresh.way, forms=fresh.forms)


def possible_ways(meaning: Meaning, forms: dict[str, Form], ways: tuple[str, ...]) -> list[str]:
    """Return those of the ``ways`` whose slots the forms of the meaning's concepts can fill."""
    roles = dict(meaning.core)

    def fits(role: str, slot: str) -> bool:
        """Return whether the words drawn for this role can stand in this gap of the sentence's
        pattern."""
        kind, form = roles[role].kind, forms[role]
        if slot == "part":
            return form.is_plain
        if slot == "a" and kind == "words":
            return " " not in form.text  # `a golden ring`, but never `a made of gold ring`
        return slot in SLOTS[kind]

    return [way for way in ways if all(fits(role, slot) for role, slot in slots_of(way))]


def say(meaning: Meaning, wording: Wording) -> str:
    """Return the sentence, with a capital letter and mostly a full stop."""
    clause = fill_way(wording.way, meaning, wording)
    details = {
        role: _detail(role, concept, wording)
        for role, concept in meaning.details
        if role != "look" and role not in wording.dropped
    }
    front = details.pop(wording.front, "")
    sentence = " ".join([f"{front}, {clause}" if front else clause, *details.values()])
    return capitalised(sentence if sentence.endswith('"') else sentence + wording.stop)


def capitalised(text: str) -> str:
    """Return the text with a capital first letter."""
    at = 1 if text.startswith('"') else 0
    return text[:at] + text[at : at + 1].upper() + text[at + 1 :]


def fill_way(way: str, meaning: Meaning, wording: Wording) -> str:
    """Return a way or question with the meaning's concepts in its slots."""
    roles = dict(meaning.core)
    pairs = {(role, slot) for role, slot in slots_of(way)}
    return fill(way, {pair: _words(pair, roles[pair[0]], meaning, wording) for pair in pairs})


def _detail(role: str, concept: Concept, wording: Wording) -> str:
    if concept.kind == "places":
        return f"{wording.prepositions[role]} {_definite(wording.forms[role])}"
    return wording.forms[role].text


def _definite(form: Form) -> str:
    return f"the {form.text}"


def _words(pair: tuple[str, str], concept: Concept, meaning: Meaning, wording: Wording) -> str:
    role, slot = pair
    form = wording.forms[role]
    if concept.kind == "verbs":
        return form.shape(slot)
    if concept.kind == "words":
        emphasis = wording.emphasis if " " not in form.text else ""
        very = f"{emphasis} {form.text}".strip()
        return {"very": very, "a": with_article(form.text)}.get(slot, form.text)
    if concept.kind == "places":
        start = {"at": f"{wording.prepositions.get(role, '')} ", "to": "to "}.get(slot, "")
        return start + _definite(form)
    if slot in PRONOUNS:
        return PRONOUNS[slot].get(wording.pronouns[role], {"he": "it", "his": "its"}[slot])
    look = _look(role, meaning, wording)
    if concept.kind == "names":
        return possessive_of(form.text) if slot == "s" else form.text
    if slot in ("noun", "many"):
        return look + (form.shape("many") if slot == "many" else form.text)
    article = "a" if slot == "a" else wording.articles[role]
    words = _with(article, look + form.text, form.mass)
    return possessive_of(words) if slot == "s" else words


def _with(article: str, words: str, mass: bool) -> str:
    if article == "the":
        return f"the {words}"
    return f"some {words}" if mass else with_article(words)


def _look(role: str, meaning: Meaning, wording: Wording) -> str:
    first = meaning.core[0]
    wanted = role == first[0] and "look" in wording.forms and "look" not in wording.dropped
    return f"{wording.forms['look'].text} " if wanted and takes_look(first[1]) else ""
