"""Measures the shipped model that reads drawings against its bars; exits with 1 if one is missed.

    python -m tools.lab.measure_demo see               prints every figure
    python -m tools.lab.measure_demo see --verbose     and the questions that are answered wrongly

Of each held-out drawing, one question of each kind is asked that it allows, each in a chat of its
own. An answer is right if it is the expected one to the letter. Triolet itself answers, with
greedy decoding.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import engine
from tools.lab.demo.drawing_words import ASKING, questions
from tools.lab.demo.drawings import Drawing, held_out_drawing, png_of
from tools.lab.demo.figures import Figures, print_measured, read_options, share, size_of
from tools.lab.demo.writer import TrioletWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.lab.demo.drawing_words import Question
    from tools.lab.demo.writer import Content

MODEL = Path(__file__).parents[3] / "engine" / "demo" / "see"
DRAWINGS = 200
AT_ONCE = 128
GREEDY = engine.SamplingParams(temperature=0.0, max_tokens=32)
BARS = {"answers_right": 0.9, "describe_right": 0.9}
SIZE_BYTES_MAX = 5 * 1000 * 1000


class Asked(NamedTuple):
    """A question about a drawing."""

    drawing: Drawing
    question: Question

    @property
    def content(self) -> Content:
        """The parts of a chat message with the drawing and the question."""
        return [
            {"type": "image", "image": png_of(self.drawing)},
            {"type": "text", "text": self.question.text},
        ]


def held_out_questions(seed: int, count: int) -> list[Asked]:
    """Return the questions about ``count`` drawings."""
    asked: list[Asked] = []
    for index in range(count):
        drawing = held_out_drawing(seed, index)
        rng = random.Random(f"question/{seed}/{index}")
        asked += [Asked(drawing, question) for question in questions(rng, drawing.scene)]
    return asked


def answers(folder: Path, asked: Sequence[Asked]) -> list[str]:
    """Return the model's answer to each question."""
    writer = TrioletWriter(folder, GREEDY)
    written = writer.answer_requests([one.content for one in asked], range(len(asked)))
    return [one.text for one in written]


def measure(folder: Path, seed: int, count: int) -> tuple[Figures, list[str]]:
    """Return every figure, and a line for each wrong answer."""
    asked = held_out_questions(seed, count)
    given = answers(folder, asked)
    pairs = list(zip(asked, given, strict=True))
    figures: Figures = {
        "seed": seed,
        "drawings": count,
        "questions": len(asked),
        "answers_right": share(one.question.answer == answer for one, answer in pairs),
    }
    for kind in ASKING:
        of_kind = [pair for pair in pairs if pair[0].question.kind == kind]
        right = share(one.question.answer == answer for one, answer in of_kind)
        figures[f"{kind}_right"] = right
    figures["size_bytes"] = size_of(folder)
    wrong = [
        f"{one.drawing.scene.arrangement}: {one.question.text} {answer}"
        for one, answer in pairs
        if one.question.answer != answer
    ]
    return figures, wrong


def main() -> int:
    """Print the figures and return the exit code."""
    given = read_options(__doc__, MODEL, DRAWINGS)
    measured = measure(given.model, given.seed, given.count)
    return print_measured(given, measured, BARS, SIZE_BYTES_MAX)


if __name__ == "__main__":
    sys.exit(main())
