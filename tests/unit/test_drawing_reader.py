"""The reader of drawings, a program that judges what the demo's image model has drawn."""

import random

import pytest
from PIL import Image, ImageDraw

from tools.lab.demo.drawing_reader import MIXED, NO_SHAPE, read_scene
from tools.lab.demo.drawing_words import describe
from tools.lab.demo.drawings import (
    COLOURS,
    SIDE,
    Scene,
    Thing,
    draw_scene,
    held_out_drawing,
    paint,
    place_plainly,
)

DRAWINGS = 400
CIRCLE = Scene((Thing("large", "red", "circle"),))


def drawn(scene: Scene, seed: int = 0) -> Image.Image:
    """Return a drawing of a scene."""
    return paint(place_plainly(random.Random(seed), scene))


def test_every_drawing_of_the_program_is_read_as_what_it_shows() -> None:
    rng = random.Random(0)
    for _ in range(DRAWINGS):
        scene = draw_scene(rng)
        assert read_scene(paint(place_plainly(rng, scene))) == scene


def test_drawings_in_other_colours_places_and_on_other_grounds_are_read_too() -> None:
    drawings = [held_out_drawing(0, index) for index in range(DRAWINGS)]
    right = [read_scene(paint(one)) == one.scene for one in drawings]
    assert sum(right) >= 0.99 * DRAWINGS, "in some, two large things touch"


def test_a_description_is_true_of_what_is_read_and_not_of_another_drawing() -> None:
    rng = random.Random(1)
    for _ in range(100):
        scene, other = draw_scene(rng), draw_scene(rng)
        _, said = describe(rng, scene)
        assert said.is_true_of(read_scene(drawn(scene)))
        assert said.is_true_of(read_scene(drawn(other))) == said.is_true_of(other)


@pytest.mark.parametrize("shape", ["ellipse", "bar", "half", "ring"])
def test_what_is_no_shape_is_none(shape: str) -> None:
    image = Image.new("RGB", (SIDE, SIDE), "white")
    canvas = ImageDraw.Draw(image)
    if shape == "ellipse":
        canvas.ellipse((12, 24, 52, 40), fill=COLOURS["red"])
    elif shape == "bar":
        canvas.rectangle((12, 28, 52, 36), fill=COLOURS["red"])
    elif shape == "half":
        canvas.pieslice((16, 16, 48, 48), 0, 180, fill=COLOURS["red"])
    else:
        canvas.ellipse((16, 16, 48, 48), outline=COLOURS["red"], width=4)
    [thing] = read_scene(image).things
    assert (thing.colour, thing.kind) == ("red", NO_SHAPE)


def test_a_shape_of_two_colours_has_none() -> None:
    image = drawn(CIRCLE)
    blue = Image.new("RGB", (SIDE, SIDE), COLOURS["blue"])
    left = Image.new("1", (SIDE, SIDE))
    ImageDraw.Draw(left).rectangle((0, 0, SIDE // 2, SIDE), fill=1)
    painted = image.convert("L").point(lambda value: 255 * (value < 128), "1")
    both = Image.new("1", (SIDE, SIDE))
    both.paste(left, mask=painted)
    image.paste(blue, mask=both)
    assert [thing.colour for thing in read_scene(image).things] == [MIXED]


def test_a_third_thing_is_counted_and_a_speck_is_not() -> None:
    image = drawn(CIRCLE)
    canvas = ImageDraw.Draw(image)
    canvas.point((2, 2), fill=COLOURS["black"])
    assert read_scene(image) == CIRCLE
    canvas.rectangle((2, 2, 6, 6), fill=COLOURS["black"])
    assert len(read_scene(image).things) == 2


def test_white_paper_shows_nothing() -> None:
    assert read_scene(Image.new("RGB", (SIDE, SIDE), "white")).things == ()
