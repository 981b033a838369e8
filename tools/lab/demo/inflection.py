"""Inflects English words by regular rules: tenses of verbs, plurals of nouns.

Rule: a word that no rule here gets right has its forms in the grammar file.
"""

from __future__ import annotations

import re

VOWELS = "aeiou"
_DOUBLING = re.compile(r"[^aeiou]*[aeiou][^aeiouwxy]")
"""A word of one syllable that ends in one vowel and one consonant: stop, stopped, stopping."""


def past_of(base: str) -> str:
    """Return a verb's past: `chased`, `hugged`, `cried`."""
    if base.endswith("e"):
        return base + "d"
    if _ends_in_y(base):
        return base[:-1] + "ied"
    return _doubled(base) + "ed"


def ing_of(base: str) -> str:
    """Return a verb's participle: `chasing`, `hugging`, `lying`. `being` and `seeing` keep their
    e."""
    if base.endswith("ie"):
        return base[:-2] + "ying"
    if base.endswith("e") and not base.endswith(("ee", "oe")) and len(base) > 2:
        return base[:-1] + "ing"
    return _doubled(base) + "ing"


def third_of(base: str) -> str:
    """Return a verb's third person: `chases`, `catches`, `cries`. Only `have` and `be` are
    irregular."""
    if base in ("have", "be"):
        return {"have": "has", "be": "is"}[base]
    return plural_of(base)


def plural_of(word: str) -> str:
    """Return a noun's plural: `foxes`, `ponies`, `owls`."""
    if _ends_in_y(word):
        return word[:-1] + "ies"
    hissing = word.endswith(("s", "x", "z", "ch", "sh")) or word in ("go", "do")
    return word + ("es" if hissing else "s")


def with_article(words: str) -> str:
    """Return the words with their article: `a fox`, `an owl`, `an honest fox`."""
    vowel = words[0] in VOWELS and not words.startswith(("one", "uni", "useful"))
    return f"{'an' if vowel or words.startswith('honest') else 'a'} {words}"


def possessive_of(words: str) -> str:
    """Return the possessive: `the fox's`."""
    return f"{words}'s"


def _ends_in_y(word: str) -> bool:
    return len(word) > 1 and word.endswith("y") and word[-2] not in VOWELS


def _doubled(base: str) -> str:
    return base + base[-1] if _DOUBLING.fullmatch(base) else base
