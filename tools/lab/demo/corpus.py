"""The training text of the story model: stories, and chats that ask for stories.

Rule: document `index` of `seed` is always the same text, on every machine. So it can be checked
whether a generated story was in the training text, without keeping the text.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.lab.demo.grammar import STORIES, SlotFiller, Story, story_from_seed, write_story
from tools.lab.demo.notation import Tables, load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

CHAT = "chat.grammar"
CHAT_SHARE = 0.3
"""The share of documents that are chats (guess: enough to learn a simple form)."""

STRANGE_SHARE = 0.25
"""The share of documents whose first hero has a name that is in no list (guess)."""

CONSONANTS = "bcdfghjklmnpqrstvwxz"

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Document:
    """A training document: a bare story, or a chat with its stories.

    If `strange` names a hero, the model does not learn to write the name's first mention, only to
    repeat the name. So it learns to use any name from a prompt, but not to invent such names.
    """

    messages: tuple[Message, ...]
    stories: tuple[str, ...]
    strange: str | None = None


def document(seed: int, index: int) -> Document:
    """Return the training document number ``index``: in some, a random name replaces the hero's."""
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
    """Return a name of random letters with a listed name's ending, which hints at the gender."""
    letters = ""
    for _ in range(rng.randint(1, 3)):
        letters += rng.choice(CONSONANTS) * (rng.random() < 0.85)
        letters += rng.choice(CONSONANTS) * (rng.random() < 0.2)
        letters += rng.choice("aeiou") + rng.choice("aeiouy") * (rng.random() < 0.15)
    last = rng.choice(CONSONANTS) * (rng.random() < 0.7) + ending
    return (letters + last).capitalize()


def training_stories(seed: int, documents: int) -> Iterator[str]:
    """Yield the text of every story in the first `documents` documents, including repeated ones."""
    for index in range(documents):
        yield from document(seed, index).stories


def converse(rng: Random) -> tuple[list[Message], list[Story]]:
    """Return a chat of one to three exchanges, most of which are a request and its story."""
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
    """Return a request and a story that answers it. What the request names (such as the hero or a
    place) is in the story."""
    tables = load(STORIES, CHAT)
    plot = rng.choice(list(tables.plots))
    beat = f"request_{plot}" if rng.random() < 0.2 else "again" if again else "request"
    filler = SlotFiller(rng, tables)
    request = " ".join(filler.fill(rng.choice(tables.beats[beat])))
    return request, write_story(rng, filler.values, plot)


def _say(rng: Random, tables: Tables, beat: str) -> str:
    return " ".join(SlotFiller(rng, tables).fill(rng.choice(tables.beats[beat])))


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def named_prompt(seed: int) -> tuple[str, str]:
    """Return a story's beginning up to the sentence that names the hero, and that name.

    The seeds of these stories are not those of the training documents.
    """
    story = story_from_seed(f"prompt/{seed}")
    beginning: list[str] = []
    for sentence in story.sentences:
        beginning.append(sentence)
        if story.hero in sentence:
            break
    return " ".join(beginning), story.hero
