"""The training text: stories, and chats that ask for stories, one document per index.

Rule 1: document `index` of `seed` is the same text everywhere and at any time, so that one can ask
whether a generated story was in the training text without the text being kept.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.demo.grammar import STORIES, Story, Teller, story_from_seed, write_story
from tools.demo.notation import Tables, load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

CHAT = "chat.grammar"
CHAT_SHARE = 0.3
"""Share of the documents that are chats (guess: enough to learn a simple form)."""

STRANGE_SHARE = 0.25
"""Share of the documents whose first hero has a name that no list holds (guess)."""

CONSONANTS = "bcdfghjklmnpqrstvwxz"

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Document:
    """One training document: a bare story, or a chat with the stories told in it.

    Where `strange` names a hero, the model is not to learn the name's first mention, only to repeat
    it: so it learns to take over any name from a prompt, and still invents none of its own.
    """

    messages: tuple[Message, ...]
    stories: tuple[str, ...]
    strange: str | None = None


def document(seed: int, index: int) -> Document:
    """The training document of an index."""
    rng = random.Random(f"document/{seed}/{index}")
    messages, stories = converse(rng) if rng.random() < CHAT_SHARE else ([], [write_story(rng)])
    texts = tuple(story.text for story in stories)
    if not stories or rng.random() >= STRANGE_SHARE:
        return Document(tuple(messages), texts)
    hero = re.compile(rf"\b{stories[0].hero}\b")
    strange = strange_name(rng, ending=stories[0].hero[-1])
    renamed = tuple(m | {"content": hero.sub(strange, m["content"])} for m in messages)
    return Document(renamed, tuple(hero.sub(strange, text) for text in texts), strange)


def strange_name(rng: Random, ending: str) -> str:
    """A name of random letters, with the ending (which hints at the gender) of a listed one."""
    letters = ""
    for _ in range(rng.randint(1, 3)):
        letters += rng.choice(CONSONANTS) * (rng.random() < 0.85)
        letters += rng.choice(CONSONANTS) * (rng.random() < 0.2)
        letters += rng.choice("aeiou") + rng.choice("aeiouy") * (rng.random() < 0.15)
    last = rng.choice(CONSONANTS) * (rng.random() < 0.7) + ending
    return (letters + last).capitalize()


def training_stories(seed: int, documents: int) -> Iterator[str]:
    """The text of every story in the first `documents` documents, repeated ones too."""
    for index in range(documents):
        yield from document(seed, index).stories


def converse(rng: Random) -> tuple[list[Message], list[Story]]:
    """A chat of one to three exchanges, most of them a request and its story."""
    tables = load(STORIES, CHAT)
    messages: list[Message] = []
    stories: list[Story] = []
    if rng.random() < 0.3:
        messages.append(_message("system", _say(rng, tables, "system")))
    exchanges = rng.choices((1, 2, 3), weights=(7, 2, 1))[0]
    for _ in range(exchanges):
        if rng.random() < 0.25:
            asked, answers = tables.talks[rng.choice(list(tables.talks))]
            messages.append(_message("user", rng.choice(asked)))
            messages.append(_message("assistant", rng.choice(answers)))
            continue
        request, story = request_and_story(rng, again=bool(stories))
        messages += [_message("user", request), _message("assistant", story.text)]
        stories.append(story)
    return messages, stories


def request_and_story(rng: Random, again: bool = False) -> tuple[str, Story]:
    """A request and the story that answers it; both have the roles that the request names."""
    tables = load(STORIES, CHAT)
    plot = rng.choice(list(tables.plots))
    beat = f"request_{plot}" if rng.random() < 0.2 else "again" if again else "request"
    teller = Teller(rng, tables)
    request = " ".join(teller.tell(rng.choice(tables.beats[beat])))
    return request, write_story(rng, teller.values, plot)


def _say(rng: Random, tables: Tables, beat: str) -> str:
    return " ".join(Teller(rng, tables).tell(rng.choice(tables.beats[beat])))


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def named_prompt(seed: int) -> tuple[str, str]:
    """A story's beginning up to the sentence that names the hero, and that name.

    The seeds' stories are not the training documents: they are drawn from other random numbers.
    """
    story = story_from_seed(f"prompt/{seed}")
    beginning: list[str] = []
    for sentence in story.sentences:
        beginning.append(sentence)
        if story.hero in sentence:
            break
    return " ".join(beginning), story.hero
