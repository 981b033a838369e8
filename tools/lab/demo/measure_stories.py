"""Measures the shipped story model against its bars; exits with 1 if one is missed.

    python -m tools.lab.measure_demo                       prints every figure
    python -m tools.lab.measure_demo --json FILE           and writes them
    python -m tools.lab.measure_demo --samples 5           and prints five of the stories

Triolet itself writes all stories at once, sampled at temperature 0.8 from the whole vocabulary (no
top-k, top-p or min-p). Those of `default_stories_parse` are sampled by the model's
generation_config, as for a request without options. A story depends on its seed alone, and not on
its place in a batch or on its neighbours (D10).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.requests.text.values import SamplingParams
from tools.lab.demo.corpus import named_prompt, request_and_story, training_stories
from tools.lab.demo.figures import Figures, report, share, size_of
from tools.lab.demo.grammar import count_derivations
from tools.lab.demo.notation import split_sentences
from tools.lab.demo.parser import story_parser
from tools.lab.demo.writer import TrioletWriter, Written

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL = Path(__file__).parents[3] / "engine" / "demo" / "stories"
MAX_NEW_TOKENS = 400
WHOLE_VOCABULARY = SamplingParams(
    temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, max_tokens=MAX_NEW_TOKENS
)
AS_CONFIGURED = SamplingParams(max_tokens=MAX_NEW_TOKENS)
"""A story has at most about 260 tokens, so reaching this limit means that it does not end."""

STORIES = 200
SIDE_STORIES = 100

SIZE_BYTES_MAX = 12 * 1000 * 1000
BARS = {
    "sentences_accepted": 0.95,
    "name_recurs": 0.95,
    "not_in_training_text": 0.95,
    "derivations": 10**6,
}

UNKNOWN_NAMES = ("Zorblax", "Xiaolan", "Quentin", "Bartholomew", "Saoirse", "Chidi", "Ulrike")
UNKNOWN_NAMES += ("Hyacinth", "Tchaikovsky", "Okonkwo", "Aoife", "Ximena", "Wojciech", "Eleanor")


def measure(writer: TrioletWriter, folder: Path) -> tuple[Figures, list[str]]:
    """Return every figure, and the stories that they were computed from (prompt and
    continuation)."""
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    seeds = range(STORIES)
    prompts, names = zip(*(named_prompt(seed) for seed in seeds), strict=True)
    written = writer.generate_stories(prompts, seeds)
    stories = [prompt + w.text for prompt, w in zip(prompts, written, strict=True)]
    known = set(training_stories(training["seed"], training["documents"]))
    parser = story_parser()
    figures: Figures = {
        "stories": STORIES,
        "sentences_accepted": accepted_share(written),
        "name_recurs": recurring_share(names, written),
        "not_in_training_text": share(story not in known for story in stories),
        "ended_by_itself": share(w.ended for w in written),
        "whole_story_accepted": share(parser.accepts_story(story) for story in stories),
        "mean_words": round(sum(len(s.split()) for s in stories) / STORIES, 1),
        "derivations": count_derivations(),
        "training_documents": training["documents"],
        "size_bytes": size_of(folder),
    }
    return figures | _side_figures(writer) | _default_figures(folder), stories


def _default_figures(folder: Path) -> Figures:
    """Return the share of stories, over many seeds, that end by themselves and that the grammar
    accepts. Their prompt is "Once upon a time"."""
    writer, parser = TrioletWriter(folder, AS_CONFIGURED), story_parser()
    prompt = "Once upon a time"
    written = writer.generate_stories([prompt] * STORIES, range(STORIES))
    sentences = [split_sentences(prompt + w.text) for w in written]
    parses = (all(map(parser.accepts_sentence, story)) for story in sentences)
    ends = (w.ended for w in written)
    return {"default_stories_parse": share(a and b for a, b in zip(parses, ends, strict=True))}


def _side_figures(writer: TrioletWriter) -> Figures:
    """Return the figures without a bar: of chats, of the prompt "Once upon a time", and of heroes
    whose names are not in the grammar."""
    seeds = range(SIDE_STORIES)
    plain = writer.generate_stories(["Once upon a time"] * SIDE_STORIES, seeds)
    starts = [Written("Once upon a time" + w.text, w.ended) for w in plain]
    asked = [_named_request(seed) for seed in seeds]
    answers = writer.answer_requests([request for request, _ in asked], seeds)
    unknown = [UNKNOWN_NAMES[seed % len(UNKNOWN_NAMES)] for seed in seeds]
    odd = writer.generate_stories(
        [f"Once upon a time there was a brave fox named {name}." for name in unknown], seeds
    )
    return {
        "plain_prompt_sentences_accepted": accepted_share(starts),
        "chat_sentences_accepted": accepted_share(answers),
        "chat_name_recurs": recurring_share([name for _, name in asked], answers),
        "chat_ended_by_itself": share(w.ended for w in answers),
        "unknown_name_recurs": recurring_share(unknown, odd),
    }


def _named_request(seed: int) -> tuple[str, str]:
    """Return a chat request that names its hero, and the name. No training text has its seed."""
    rng = random.Random(f"request/{seed}")
    while True:
        request, story = request_and_story(rng)
        if story.hero in request:
            return request, story.hero


def accepted_share(written: Sequence[Written]) -> float:
    """Return the share of written sentences that the grammar's parser accepts. A sentence that is
    cut off counts as written."""
    parser = story_parser()
    sentences = [s for w in written for s in split_sentences(w.text)]
    return share(parser.accepts_sentence(sentence) for sentence in sentences)


_NO_MARKS = str.maketrans(dict.fromkeys('.,!?"', " "))


def recurring_share(names: Sequence[str], written: Sequence[Written]) -> float:
    """Return the share of continuations that contain the prompt's name as a separate word."""
    return share(
        name in w.text.replace("'s", "").translate(_NO_MARKS).split()
        for name, w in zip(names, written, strict=True)
    )


def main() -> int:
    """Print the figures and return the exit code."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--model", type=Path, default=MODEL)
    options.add_argument("--json", type=Path, help="also write the figures here")
    options.add_argument("--samples", type=int, default=0, help="stories to print")
    given = options.parse_args()
    writer = TrioletWriter(given.model, WHOLE_VOCABULARY)
    figures, stories = measure(writer, given.model)
    for story in stories[: given.samples]:
        print(story, end="\n\n")
    return report(figures, BARS, given.json, SIZE_BYTES_MAX)


if __name__ == "__main__":
    sys.exit(main())
