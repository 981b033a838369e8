"""Draws the meanings that the demo encoders read about: random, slightly different, or held out.

Rule 1: every choice is drawn from the given `Random`. Rule 2: a meaning's key alone decides whether
it is held out. A meaning that is held out appears nowhere in the training text, not even as a
negative example.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.lab.demo.corpus import strange_name
from tools.lab.demo.meaning_notation import Concept, Form, Frame, lexicon

if TYPE_CHECKING:
    from random import Random

HELD_OUT_ONE_IN = 10
"""One in this many keys is held out (guess: enough for both sets)."""

DETAIL_SHARE = 0.3
STRANGE_SHARE = 0.3
"""The shares of details that are used, and of names that are in no list (guesses)."""

NEAR_SHARE = 0.5
"""How often a changed role gets a concept of the same list (guess)."""

Roles = tuple[tuple[str, Concept], ...]


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of a sentence: a frame, the concepts in its roles, and details in its order."""

    frame: str
    core: Roles
    details: Roles = ()

    @property
    def key(self) -> str:
        """The combination that is held out or not: the frame and the concepts in its first two
        roles, in any order if the frame's meaning does not depend on it (a mirror frame)."""
        names = [concept.name for _, concept in self.core[:2]]
        if lexicon().frames[self.frame].is_mirror:
            names.sort()
        return "/".join([self.frame, *names])

    @property
    def is_held_out(self) -> bool:
        """Whether this combination is not used for the training."""
        digest = hashlib.sha256(self.key.encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0

    def role(self, name: str) -> Concept:
        """Return the concept of a role or a detail; raise KeyError if the meaning lacks it."""
        return dict(self.core + self.details)[name]

    def says(self, frame: str, wanted: Roles) -> bool:
        """Return whether the meaning is a statement of the frame with these concepts in its roles.
        Agent and patient of a mirror frame may change places."""
        if self.frame != frame:
            return False
        roles = dict(self.core)
        if all(roles.get(role) == concept for role, concept in wanted):
            return True
        if not lexicon().frames[frame].is_mirror:
            return False
        roles["agent"], roles["patient"] = roles["patient"], roles["agent"]
        return all(roles.get(role) == concept for role, concept in wanted)


def draw_meaning(
    rng: Random,
    held_out: bool = False,
    agent: Concept | None = None,
    not_kin: str = "",
) -> Meaning:
    """Draw a meaning. With `agent`, it has that agent and no frame of the kind `not_kin`."""
    frames = list(lexicon().frames.values())
    weights = [len(frame.sources) for frame in frames]
    while True:
        frame = rng.choices(frames, weights)[0]
        if agent is not None and not (
            "agent" in frame.sources
            and frame.kin != not_kin
            and may_fill(agent, frame.sources["agent"])
        ):
            continue
        core = {role: draw_concept(rng, source) for role, source in frame.sources.items()}
        if agent is not None:
            core["agent"] = agent
        meaning = Meaning(frame.name, tuple(core.items()), _draw_details(rng, frame, core))
        if len(set(core.values())) == len(core) and meaning.is_held_out == held_out:
            return meaning


def draw_concept(rng: Random, sources: tuple[str, ...]) -> Concept:
    """Draw a concept from the lists. A name may be a new one that is in no list."""
    source = rng.choice(sources)
    concept = rng.choice(lexicon().concepts[source])
    if concept.kind != "names" or rng.random() >= STRANGE_SHARE:
        return concept
    name = strange_name(rng, ending=concept.forms[0].text[-1])
    return Concept(f"{source}/{name}", "names", (Form(name),), concept.pronoun)


def may_fill(concept: Concept, sources: tuple[str, ...]) -> bool:
    """Return whether one of these lists of the grammar has the concept."""
    return concept.name.split("/")[0] in sources


def _draw_details(rng: Random, frame: Frame, core: dict[str, Concept]) -> Roles:
    details: list[tuple[str, Concept]] = []
    for role in frame.details:
        if rng.random() >= DETAIL_SHARE or len(details) == 2:
            continue
        if role == "look" and not takes_look(next(iter(core.values()))):
            continue
        details.append((role, draw_concept(rng, (role,))))
    return tuple(details)


def takes_look(concept: Concept) -> bool:
    """Return whether an adjective can be put before a concept: not before a name, and not before
    `old woman`."""
    return concept.kind == "nouns" and not any(" " in form.text for form in concept.forms)


def differing(
    rng: Random,
    meaning: Meaning,
    wanted: Roles | None = None,
    held_out: bool = True,
) -> tuple[Meaning, str]:
    """Return a meaning that differs slightly, and how: the name of the role or detail that has
    another concept, "swap" (two roles are exchanged) or "contrary" (the frame of the contrary).

    The meaning differs in a role or, without `wanted`, perhaps only in a detail. With `wanted`,
    which must not be empty, it lacks some of these roles' concepts. Without `held_out`, it is not a
    held-out one.
    """
    kinds = {"role": 6, "swap": 5, "contrary": 2}
    if wanted is None and meaning.details:
        kinds["detail"] = 1
    while True:
        [kind] = rng.choices(list(kinds), list(kinds.values()))
        found = _CHANGES[kind](rng, meaning)
        if found is None or (found[0].is_held_out and not held_out):
            continue
        says_same = found[0].says(meaning.frame, meaning.core if wanted is None else wanted)
        if kind == "detail" or not says_same:
            return found


def _with_other_role(rng: Random, meaning: Meaning) -> tuple[Meaning, str] | None:
    core = dict(meaning.core)
    role = rng.choice(list(core))
    near = core[role].name.split("/")[0]
    sources = lexicon().frames[meaning.frame].sources[role]
    core[role] = draw_concept(rng, (near,) if rng.random() < NEAR_SHARE else sources)
    if len(set(core.values())) < len(core):
        return None
    return Meaning(meaning.frame, tuple(core.items()), meaning.details), role


def _with_other_detail(rng: Random, meaning: Meaning) -> tuple[Meaning, str] | None:
    role, old = rng.choice(meaning.details)
    new = draw_concept(rng, (role,))
    details = tuple((r, new if r == role else c) for r, c in meaning.details)
    return (Meaning(meaning.frame, meaning.core, details), role) if new != old else None


def _contrary(rng: Random, meaning: Meaning) -> tuple[Meaning, str] | None:
    core = dict(meaning.core)
    contrary = lexicon().frames.get(lexicon().frames[meaning.frame].unlike)
    if contrary is None or not set(contrary.sources) <= set(core):
        return None
    if not all(may_fill(core[role], source) for role, source in contrary.sources.items()):
        return None
    roles = tuple((role, core[role]) for role in contrary.sources)
    details = tuple(d for d in meaning.details if d[0] in contrary.details)
    return Meaning(contrary.name, roles, details), "contrary"


def swapped(rng: Random, meaning: Meaning) -> tuple[Meaning, str] | None:
    """Return the meaning with two of its people exchanged (agent, patient, other), and the word
    "swap" for the kind of change. None if that says the same or says nothing."""
    frame = lexicon().frames[meaning.frame]
    core = dict(meaning.core)
    people = [role for role in ("agent", "patient", "other") if role in core]
    if frame.is_mirror or len(people) < 2:
        return None
    one, two = rng.sample(people, 2)
    core[one], core[two] = core[two], core[one]
    if not all(may_fill(core[role], frame.sources[role]) for role in (one, two)):
        return None
    return Meaning(frame.name, tuple(core.items()), meaning.details), "swap"


_CHANGES = {
    "role": _with_other_role,
    "swap": swapped,
    "contrary": _contrary,
    "detail": _with_other_detail,
}
