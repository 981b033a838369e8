"""Reads the shapes back from the pixels of an image, to judge what a model drew.

    python -m tools.lab.demo.drawing_reader FILE…    says what the images show

Rule: the reader decides by pixels alone, and does not know what was asked for. A connected area of
paint is the shape that covers it best, in the colour that most of its pixels are nearest to. What
is no shape, or is of several colours, is read as such, so that it is never right.
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from tools.lab.demo.drawings import (
    COLOURS,
    KINDS,
    SIDE,
    SIZES,
    WHITE,
    Drawing,
    Scene,
    Thing,
    paint,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Mask = np.ndarray[Any, np.dtype[np.bool_]]
    Pixels = np.ndarray[Any, np.dtype[np.uint8]]

PAINTED = 114
"""How far the darkest channel of a painted pixel is below white at least: half of what it is in
every colour, so that a pixel of an edge counts where more than half of it is painted."""

AREA_MIN = 12  # pixels of an area of paint; a small star has 50 or more, a speck has fewer than 12
OVERLAP_MIN, COLOUR_MIN = 0.75, 0.75
"""The least share of an area and its shape together that both have, and of an area's inner pixels
that have its colour."""

BLACK = COLOURS["black"]
NO_SHAPE, MIXED = "blob", "mixed"  # an unknown kind and an unknown colour
BORDER_RADIUS = (SIZES["small"][1] + SIZES["large"][0]) / 2


class Found(NamedTuple):
    """A shape that was found, and the middle of its area in pixels."""

    thing: Thing
    x: float
    y: float


def read_scene(image: Image.Image) -> Scene:
    """Return what an image of `SIDE` × `SIDE` pixels shows. Two shapes are beside one another if
    they are farther apart across than down. Three or more shapes are in no order."""
    pixels = np.asarray(image.convert("RGB"))
    found = [_found(pixels, area) for area in _areas(pixels)]
    if len(found) != 2:
        return Scene(tuple(one.thing for one in found))
    first, second = found
    is_across = abs(first.x - second.x) > abs(first.y - second.y)
    found.sort(key=lambda one: one.x if is_across else one.y)
    return Scene(tuple(one.thing for one in found), is_across)


def _areas(pixels: Pixels) -> Iterator[Mask]:
    """Yield the pixels of each connected area of paint."""
    left = 255 - pixels.min(-1) > PAINTED
    while left.any():
        area = _connected(left)
        left = left & ~area
        if area.sum() >= AREA_MIN:
            yield area


def _connected(mask: Mask) -> Mask:
    """Return the connected area of a mask that has its first pixel."""
    area = np.zeros_like(mask)
    area.flat[mask.argmax()] = True
    while True:
        grown = _grown(area) & mask
        if (grown == area).all():
            return area
        area = grown


def _grown(area: Mask) -> Mask:
    """Return an area with the pixels next to it."""
    grown = area.copy()
    grown[1:] |= area[:-1]
    grown[:-1] |= area[1:]
    grown[:, 1:] |= area[:, :-1]
    grown[:, :-1] |= area[:, 1:]
    return grown


def _found(pixels: Pixels, area: Mask) -> Found:
    """Return which kind of shape, placed at an area's middle and as large, covers the area best."""
    rows, columns = np.nonzero(area)
    x, y = float(columns.mean()) + 0.5, float(rows.mean()) + 0.5
    fits = []
    for kind in KINDS:
        radius = float(np.sqrt(area.sum() / _unit_area(kind)))
        shape = _shape(kind, x, y, radius)
        fits.append((float((area & shape).sum() / (area | shape).sum()), kind, radius))
    overlap, kind, radius = max(fits)
    size = "small" if radius < BORDER_RADIUS else "large"
    kind = kind if overlap >= OVERLAP_MIN else NO_SHAPE
    return Found(Thing(size, _colour_of(pixels, area), kind), x, y)


def _colour_of(pixels: Pixels, area: Mask) -> str:
    """Return the colour of most inner pixels of an area; at its edges, colours are mixed."""
    inner = ~_grown(~area)
    inside = pixels[inner if inner.any() else area].astype(int)
    far = np.square(inside[:, None] - np.array(list(COLOURS.values()))).sum(-1)
    counts = np.bincount(far.argmin(-1), minlength=len(COLOURS))
    is_one = counts.max() >= COLOUR_MIN * len(inside)
    return tuple(COLOURS)[int(counts.argmax())] if is_one else MIXED


@cache
def _unit_area(kind: str) -> float:
    """Return how many pixels a shape has, divided by the square of its radius."""
    radius = SIDE / 4
    return float(_shape(kind, SIDE / 2, SIDE / 2, radius).sum() / radius**2)


def _shape(kind: str, x: float, y: float, radius: float) -> Mask:
    """Return the pixels that a shape covers: [SIDE, SIDE]."""
    drawing = Drawing(Scene((Thing("", "", kind),)), ((x, y),), (radius,), (BLACK,), WHITE)
    return 255 - np.asarray(paint(drawing)).min(-1) > PAINTED


def main() -> None:
    """Print what images show."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("files", type=Path, nargs="+")
    for file in options.parse_args().files:
        with Image.open(file) as image:
            print(f"{file}: {read_scene(image)}")


if __name__ == "__main__":
    main()
