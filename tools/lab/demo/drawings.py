"""Drawings of coloured shapes: which there are, which are held out, and how they look.

    python -m tools.lab.demo.drawings --count N --out DIR    draws some, named by what they show

Rule 1: drawing `index` of `seed` is always the same one, on every machine. Rule 2: one in eight
arrangements (the kinds and colours of both shapes, and how they lie) is held out, by a hash of its
name, and is in no training drawing.
"""

from __future__ import annotations

import argparse
import io
import random
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from math import cos, pi, sin
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from random import Random
    from typing import Any

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]

SIDE = 64  # of a drawing, in pixels
KINDS = ("circle", "square", "triangle", "star")
COLOURS = {
    "red": (225, 25, 30),
    "green": (25, 145, 45),
    "blue": (25, 55, 230),
    "yellow": (248, 220, 25),
    "purple": (140, 35, 160),
    "black": (25, 25, 25),
}
COLOUR_SPREAD = 30
"""How far each of the three numbers of a colour may be from those above (guess: so that a red is
recognised that somebody else calls so)."""

WHITE = (255, 255, 255)
SIZES = {"small": (7.0, 9.0), "large": (11.5, 13.5)}  # a shape's least and greatest radius
HELD_OUT_OF_256 = 32
SHARPNESS = 4  # a drawing is painted this many times larger and scaled down, for smooth edges


class Thing(NamedTuple):
    """A shape in words: "small", "red", "circle"."""

    size: str
    colour: str
    kind: str

    @property
    def name(self) -> str:
        """Its colour and kind, such as "red circle"."""
        return f"{self.colour} {self.kind}"


@dataclass(frozen=True, slots=True)
class Scene:
    """What a drawing shows. If there are two things, the first is left of the second one
    (``is_across``) or above it."""

    things: tuple[Thing, ...]
    is_across: bool = False

    @property
    def arrangement(self) -> str:
        """The things' colours, kinds and relation, such as "red circle above blue star"."""
        between = " left of " if self.is_across else " above "
        return between.join(thing.name for thing in self.things)

    @property
    def is_held_out(self) -> bool:
        """Whether its arrangement is in no training drawing."""
        return _is_held_out(self.arrangement)


@dataclass(frozen=True, slots=True)
class Drawing:
    """A scene with all that is needed to paint it: for each thing the centre and radius in pixels
    and the exact colour in bytes, and the colour of the ground."""

    scene: Scene
    centres: tuple[tuple[float, float], ...]
    radii: tuple[float, ...]
    paints: tuple[tuple[int, int, int], ...]
    ground: tuple[int, int, int]


@cache
def _is_held_out(arrangement: str) -> bool:
    return sha256(arrangement.encode()).digest()[0] < HELD_OUT_OF_256


def draw_scene(rng: Random) -> Scene:
    """Return a random scene: one thing in a sixth of the scenes, otherwise two that differ in
    colour or kind."""
    first = draw_thing(rng)
    if rng.random() < 1 / 6:
        return Scene((first,))
    second = draw_thing(rng)
    while second.name == first.name:
        second = draw_thing(rng)
    return Scene((first, second), rng.random() < 0.5)


def draw_thing(rng: Random) -> Thing:
    """Return a random thing."""
    return Thing(rng.choice(tuple(SIZES)), rng.choice(tuple(COLOURS)), rng.choice(KINDS))


def training_drawing(seed: int, index: int) -> Drawing:
    """Return a drawing to learn from."""
    return _first(random.Random(f"drawing/{seed}/{index}"), held_out=False)


def held_out_drawing(seed: int, index: int) -> Drawing:
    """Return a drawing to measure with, whose arrangement is in no training drawing."""
    return _first(random.Random(f"held out drawing/{seed}/{index}"), held_out=True)


def _first(rng: Random, *, held_out: bool) -> Drawing:
    while True:
        scene = draw_scene(rng)
        if scene.is_held_out == held_out:
            return place(rng, scene)


def similar_drawing(rng: Random, scene: Scene) -> Drawing:
    """Return a training drawing that differs from a scene in one respect: places, sizes, colours or
    kinds are exchanged, or one thing has another size, colour or kind."""
    while True:
        other = _changed(rng, scene)
        names = [thing.name for thing in other.things]
        if other != scene and len(set(names)) == len(names) and not other.is_held_out:
            return place(rng, other)


def _changed(rng: Random, scene: Scene) -> Scene:
    at = rng.randrange(len(scene.things))
    things = list(scene.things)
    field = rng.choice(("size", "colour", "kind"))
    way = rng.choice(("turn", "swap", "exchange", "replace"))
    if len(things) == 1 or way == "replace":
        things[at] = things[at]._replace(**{field: getattr(draw_thing(rng), field)})
        return replace(scene, things=tuple(things))
    if way == "turn":
        return replace(scene, is_across=not scene.is_across)
    first, second = things
    if way == "swap":
        return replace(scene, things=(second, first))
    one, other = getattr(first, field), getattr(second, field)
    return replace(
        scene, things=(first._replace(**{field: other}), second._replace(**{field: one}))
    )


def place(rng: Random, scene: Scene) -> Drawing:
    """Return a drawing of a scene, whose things do not touch each other or an edge."""
    radii = tuple(rng.uniform(*SIZES[thing.size]) for thing in scene.things)
    if len(radii) == 1:
        centres = [(rng.uniform(16, 48), rng.uniform(16, 48))]
    else:
        along = rng.uniform(radii[0] + 2, 20), rng.uniform(44, SIDE - 2 - radii[1])
        middle = rng.uniform(23, 41)
        beside = [middle + rng.uniform(-7, 7) for _ in radii]
        centres = list(zip(along, beside, strict=True))
        if not scene.is_across:
            centres = [(x, y) for y, x in centres]
    paints = tuple(_near(rng, COLOURS[thing.colour]) for thing in scene.things)
    return Drawing(scene, tuple(centres), radii, paints, _ground(rng))


def place_plainly(rng: Random, scene: Scene) -> Drawing:
    """Return a drawing of a scene in its exact colours on white: two things lie near the middles of
    their halves, and one thing near the middle, so that only a few pixels are left to chance."""
    radii = tuple(rng.uniform(*SIZES[thing.size]) for thing in scene.things)
    along = (SIDE / 2,) if len(radii) == 1 else (SIDE / 4, 3 * SIDE / 4)
    centres = [(at + rng.uniform(-1.5, 1.5), SIDE / 2 + rng.uniform(-2, 2)) for at in along]
    if not scene.is_across:
        centres = [(x, y) for y, x in centres]
    paints = tuple(COLOURS[thing.colour] for thing in scene.things)
    return Drawing(scene, tuple(centres), radii, paints, WHITE)


def _near(rng: Random, colour: tuple[int, int, int]) -> tuple[int, int, int]:
    red, green, blue = (
        min(255, max(0, value + rng.randint(-COLOUR_SPREAD, COLOUR_SPREAD))) for value in colour
    )
    return red, green, blue


def _ground(rng: Random) -> tuple[int, int, int]:
    if rng.random() < 0.5:
        return WHITE
    return rng.randint(225, 255), rng.randint(225, 255), rng.randint(225, 255)


def paint(drawing: Drawing) -> Image.Image:
    """Return the drawing as an RGB image of `SIDE` × `SIDE` pixels."""
    large = Image.new("RGB", (SIDE * SHARPNESS,) * 2, drawing.ground)
    canvas = ImageDraw.Draw(large)
    for at, colour in enumerate(drawing.paints):
        _paint_thing(canvas, drawing, at, colour, SHARPNESS)
    return large.reduce(SHARPNESS)


def png_of(drawing: Drawing) -> bytes:
    """Return a drawing as a PNG file."""
    file = io.BytesIO()
    paint(drawing).save(file, "PNG")
    return file.getvalue()


def which_thing(drawing: Drawing) -> Pixels:
    """Return for each pixel which thing covers it (from 1; 0: none), as [SIDE, SIDE] uint8."""
    map_of_things = Image.new("L", (SIDE, SIDE), 0)
    canvas = ImageDraw.Draw(map_of_things)
    for at in range(len(drawing.radii)):
        _paint_thing(canvas, drawing, at, at + 1, 1)
    return np.asarray(map_of_things)


def _paint_thing(
    canvas: ImageDraw.ImageDraw, drawing: Drawing, at: int, colour: Any, scale: int
) -> None:
    x, y = (value * scale for value in drawing.centres[at])
    radius = drawing.radii[at] * scale
    kind = drawing.scene.things[at].kind
    if kind == "circle":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif kind == "square":
        half = 0.86 * radius
        canvas.rectangle((x - half, y - half, x + half, y + half), fill=colour)
    else:
        canvas.polygon(_corners(kind, x, y, radius), fill=colour)


def _corners(kind: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Return the corners of a triangle or a star that points upwards."""
    radii = [radius] * 3 if kind == "triangle" else [radius, 0.45 * radius] * 5
    turn = 2 * pi / len(radii)
    return [
        (x + length * sin(number * turn), y - length * cos(number * turn))
        for number, length in enumerate(radii)
    ]


def main() -> None:
    """Write held-out drawings as PNG files."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--count", type=int, default=3)
    options.add_argument("--out", type=Path, default=Path("drawings"))
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for index in range(given.count):
        drawing = held_out_drawing(given.seed, index)
        file = given.out / f"{drawing.scene.arrangement.replace(' ', '-')}.png"
        file.write_bytes(png_of(drawing))
        print(file)


if __name__ == "__main__":
    main()
