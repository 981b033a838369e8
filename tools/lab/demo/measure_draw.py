"""Measures a model that draws against its bar; exits with 1 if it is missed.

    python -m tools.lab.measure_demo draw               prints every figure
    python -m tools.lab.measure_demo draw --verbose     and the descriptions that are drawn wrongly

A drawing is right if `tools.lab.demo.drawing_reader`, which sees the pixels alone, finds in it all
that the held-out description says and nothing else: the number of shapes, and the kind, the colour,
the place and, if it is said, the size of each. Triolet itself draws, each description once, with
the defaults of `GenerateImage` and the description's number as the seed.
"""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import trio
from PIL import Image

import engine
from tools.lab.demo.drawing_reader import read_scene
from tools.lab.demo.drawing_words import Facts, describe_plainly
from tools.lab.demo.drawings import held_out_drawing
from tools.lab.demo.figures import Figures, print_measured, read_options, share, size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.lab.demo.drawings import Scene

MODEL = Path(__file__).parents[3] / "build" / "draw"  # where the training writes it
DESCRIPTIONS = 300
BARS = {"drawings_right": 0.9}
SIZE_BYTES_MAX = 6 * 1000 * 1000


class Asked(NamedTuple):
    """A description of a drawing, and what it says."""

    text: str
    facts: Facts


def held_out_descriptions(seed: int, count: int) -> list[Asked]:
    """Return descriptions of arrangements that no training drawing has."""
    rngs = [random.Random(f"draw/{seed}/{at}") for at in range(count)]
    return [
        Asked(*describe_plainly(rng, held_out_drawing(seed, at).scene))
        for at, rng in enumerate(rngs)
    ]


def drawn(folder: Path, texts: Sequence[str]) -> list[Scene]:
    """Have the model draw each text, and return the scene that `read_scene` finds in each image."""
    return trio.run(_draw, engine.ModelConfig(str(folder)), texts)


async def _draw(model: engine.ModelConfig, texts: Sequence[str]) -> list[Scene]:
    async with engine.open_engine(engine.EngineConfig(models=(model,))) as eng:
        return [await _scene_of(eng, text, seed) for seed, text in enumerate(texts)]


async def _scene_of(eng: engine.Engine, text: str, seed: int) -> Scene:
    async with eng.draw(engine.DrawRequest(prompt=text, seed=seed)) as stream:
        files = [one.data async for one in stream if isinstance(one, engine.GeneratedImage)]
    with Image.open(io.BytesIO(files[0])) as image:
        return read_scene(image)


def measure(folder: Path, seed: int, count: int) -> tuple[Figures, list[str]]:
    """Return every figure, and a line for each wrong drawing."""
    asked = held_out_descriptions(seed, count)
    found = drawn(folder, [one.text for one in asked])
    pairs = list(zip(asked, found, strict=True))
    right = [one.facts.is_true_of(scene) for one, scene in pairs]
    figures: Figures = {"seed": seed, "descriptions": count, "drawings_right": share(right)}
    for number, name in ((1, "one"), (2, "two")):
        of_number = [ok for ok, (one, _) in zip(right, pairs, strict=True)
                     if len(one.facts.things) == number]  # fmt: skip
        figures[f"{name}_right"] = share(of_number)
    figures["size_bytes"] = size_of(folder)
    wrong = [
        f"{one.text}: {scene}" for ok, (one, scene) in zip(right, pairs, strict=True) if not ok
    ]
    return figures, wrong


def main() -> int:
    """Print the figures and return the exit code."""
    given = read_options(__doc__, MODEL, DESCRIPTIONS)
    measured = measure(given.model, given.seed, given.count)
    return print_measured(given, measured, BARS, SIZE_BYTES_MAX)


if __name__ == "__main__":
    sys.exit(main())
