"""What can be said of a drawing: descriptions, and questions with their answers.

Rule: a description is true of the scene, and a question has one right answer, which is among those
written here, to the letter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tools.lab.demo.drawings import COLOURS, KINDS, Scene, draw_thing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from random import Random

    from tools.lab.demo.drawings import Thing

RELATIONS = ("left of", "right of", "above", "below")
OPENINGS = ("", "", "", "", "a picture of ", "a drawing of ")
NUMBERS = ("none", "one", "two")
NOTHING = "Nothing."
NO_PICTURE = "I see no picture."


class Facts(NamedTuple):
    """What a description says of a scene. A size is "" if the description names none. The first
    thing is the left or upper one, even if the description names the other first."""

    things: tuple[Thing, ...]
    is_across: bool

    def is_true_of(self, scene: Scene) -> bool:
        """Return whether a scene is as the description says."""
        if self.is_across != scene.is_across or len(self.things) != len(scene.things):
            return False
        return all(
            said.name == seen.name and said.size in ("", seen.size)
            for said, seen in zip(self.things, scene.things, strict=True)
        )


class Question(NamedTuple):
    """A question about a drawing, with its answer. Measurements have a figure for each ``kind``."""

    kind: str
    text: str
    answer: str


def related(scene: Scene) -> list[tuple[Thing, str, Thing]]:
    """Return for each of two things its place relative to the other: (thing, "left of", other)."""
    if len(scene.things) == 1:
        return []
    first, second = scene.things
    there, back = RELATIONS[:2] if scene.is_across else RELATIONS[2:]
    return [(first, there, second), (second, back, first)]


def describe(rng: Random, scene: Scene) -> tuple[str, Facts]:
    """Return a random description of a scene, and what it says."""
    said = tuple(t if rng.random() < 0.5 else t._replace(size="") for t in scene.things)
    facts = Facts(said, scene.is_across)
    pairs = related(Scene(said, scene.is_across))
    if not pairs:
        return rng.choice(OPENINGS) + with_article(said[0]), facts
    first, relation, second = rng.choice(pairs)
    to_the = "to the " if relation in RELATIONS[:2] and rng.random() < 0.3 else ""
    text = f"{with_article(first)} {to_the}{relation} {with_article(second)}"
    return rng.choice(OPENINGS) + text, facts


def describe_plainly(rng: Random, scene: Scene) -> tuple[str, Facts]:
    """Return a description that names the things in their order, as "a red circle above a small
    blue square", and what it says."""
    said = tuple(t if rng.random() < 0.5 else t._replace(size="") for t in scene.things)
    relation = " left of " if scene.is_across else " above "
    return relation.join(with_article(thing) for thing in said), Facts(said, scene.is_across)


def with_article(thing: Thing) -> str:
    """Return words such as "a small red circle"."""
    return f"a {thing.size} {thing.name}" if thing.size else f"a {thing.name}"


def sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop."""
    return text[0].upper() + text[1:] + "."


def named(rng: Random, scene: Scene, thing: Thing) -> str:
    """Return the words for a thing in a question: colour and kind, or often the kind alone if no
    other thing has it."""
    is_only = sum(other.kind == thing.kind for other in scene.things) == 1
    return f"the {thing.kind}" if is_only and rng.random() < 0.5 else f"the {thing.name}"


def ask_description(rng: Random, scene: Scene) -> Question:
    """Ask what the drawing shows."""
    asked = rng.choice(
        ("Describe the picture.", "Describe this picture.", "Describe the image.",
         "What is in the picture?", "What is in this picture?", "What do you see?",
         "What does the picture show?")
    )  # fmt: skip
    return Question("describe", asked, sentence(f"a {scene.arrangement}".replace(" of ", " of a ")
                    .replace(" above ", " above a ")))  # fmt: skip


def ask_number(rng: Random, scene: Scene) -> Question:
    """Ask how many shapes the drawing has, or how many circles, stars, …"""
    if rng.random() < 0.6:
        asked = rng.choice(("How many shapes are there?", "How many shapes are in the picture?",
                            "How many shapes do you see?"))  # fmt: skip
        return Question("number", asked, sentence(NUMBERS[len(scene.things)]))
    kind = rng.choice((*KINDS, *(thing.kind for thing in scene.things)))
    number = sum(thing.kind == kind for thing in scene.things)
    return Question("number", f"How many {kind}s are there?", sentence(NUMBERS[number]))


def ask_colour(rng: Random, scene: Scene) -> Question | None:
    """Ask the colour of a thing that is the only one of its kind."""
    kinds = [thing.kind for thing in scene.things]
    only = [thing for thing in scene.things if kinds.count(thing.kind) == 1]
    if not only:
        return None
    thing = rng.choice(only)
    colour = rng.choice(("colour", "color"))
    asked = rng.choice((f"What {colour} is the {thing.kind}?",
                        f"Which {colour} is the {thing.kind}?"))  # fmt: skip
    return Question("colour", asked, sentence(thing.colour))


def ask_kind(rng: Random, scene: Scene) -> Question | None:
    """Ask which shape has a colour; the answer may be that none has."""
    colour = rng.choice((*COLOURS, *[thing.colour for thing in scene.things] * 3))
    found = [thing for thing in scene.things if thing.colour == colour]
    if len(found) > 1:
        return None
    answer = sentence(f"a {found[0].kind}") if found else NOTHING
    return Question("kind", rng.choice((f"What is {colour}?", f"Which shape is {colour}?")), answer)


def ask_size(rng: Random, scene: Scene) -> Question:
    """Ask whether a thing is small or large."""
    thing = rng.choice(scene.things)
    name = named(rng, scene, thing)
    asked = rng.choice((f"Is {name} small or large?", f"Is {name} large or small?",
                        f"How large is {name}?"))  # fmt: skip
    return Question("size", asked, sentence(thing.size))


def ask_beside(rng: Random, scene: Scene) -> Question:
    """Ask what lies left or right of a thing, or above or below it."""
    thing = rng.choice(scene.things)
    relation = rng.choice((*RELATIONS, *[how for _, how, _ in related(scene)] * 2))
    found = [one for one, how, of in related(scene) if how == relation and of == thing]
    answer = sentence(f"a {found[0].name}") if found else NOTHING
    return Question("beside", f"What is {relation} {named(rng, scene, thing)}?", answer)


def ask_place(rng: Random, scene: Scene) -> Question | None:
    """Ask where one of two things lies."""
    pairs = related(scene)
    if not pairs:
        return None
    thing, how, of = rng.choice(pairs)
    return Question(
        "place", f"Where is {named(rng, scene, thing)}?", sentence(f"{how} the {of.name}")
    )


def ask_presence(rng: Random, scene: Scene) -> Question:
    """Ask whether a thing is there. It often has one thing's colour and another's kind, so that
    both must be seen together."""
    seen = [thing.name for thing in scene.things]
    name = rng.choice(seen)
    if rng.random() < 0.5:
        kind = rng.choice((*KINDS, *(thing.kind for thing in scene.things)))
        name = f"{rng.choice([draw_thing(rng), *scene.things]).colour} {kind}"
    return Question("presence", f"Is there a {name}?", yes_or_no(name in seen))


def ask_relation(rng: Random, scene: Scene) -> Question | None:
    """Ask whether one thing lies left of another, or right of it, or so."""
    pairs = related(scene)
    if not pairs:
        return None
    thing, how, of = rng.choice(pairs)
    asked = how if rng.random() < 0.5 else rng.choice(RELATIONS)
    text = f"Is {named(rng, scene, thing)} {asked} {named(rng, scene, of)}?"
    return Question("relation", text, yes_or_no(asked == how))


def yes_or_no(is_so: bool) -> str:
    """Return "Yes." or "No."."""
    return "Yes." if is_so else "No."


ASKING: dict[str, Callable[[Random, Scene], Question | None]] = {
    "describe": ask_description,
    "number": ask_number,
    "colour": ask_colour,
    "kind": ask_kind,
    "size": ask_size,
    "beside": ask_beside,
    "place": ask_place,
    "presence": ask_presence,
    "relation": ask_relation,
}


def questions(rng: Random, scene: Scene, kinds: Iterable[str] = tuple(ASKING)) -> list[Question]:
    """Return a question of each kind that can be asked about the scene, in a random order."""
    asked = [ASKING[kind](rng, scene) for kind in kinds]
    found = [question for question in asked if question is not None]
    rng.shuffle(found)
    return found
