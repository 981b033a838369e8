"""The drawings that the demo models are trained and measured on, and the questions about them."""

import random
from itertools import pairwise

import numpy as np
import pytest

from tools.lab.demo.drawing_words import ASKING, Facts, describe, questions
from tools.lab.demo.drawings import (
    COLOURS,
    SIDE,
    Drawing,
    Scene,
    Thing,
    held_out_drawing,
    paint,
    similar_drawing,
    training_drawing,
    which_thing,
)

RED_CIRCLE, BLUE_SQUARE = Thing("small", "red", "circle"), Thing("large", "blue", "square")
BESIDE = Scene((RED_CIRCLE, BLUE_SQUARE), is_across=True)


def answer_to(text: str, scene: Scene) -> str:
    """Return the answer to the question with this text; questions are drawn until it comes."""
    for seed in range(5000):
        for question in questions(random.Random(seed), scene):
            if question.text == text:
                return question.answer
    raise AssertionError(f"{text} is never asked")


def test_a_drawing_is_the_same_each_time_and_others_are_different() -> None:
    drawings = [training_drawing(1, index) for index in range(50)]
    assert drawings == [training_drawing(1, index) for index in range(50)]
    pixels = {paint(one).tobytes() for one in drawings}
    assert len(pixels) == 50
    assert paint(drawings[0]).tobytes() == paint(training_drawing(1, 0)).tobytes()
    assert paint(drawings[0]).size == (SIDE, SIDE)


def test_no_training_drawing_has_an_arrangement_that_is_held_out() -> None:
    rng = random.Random(0)
    trained = [training_drawing(1, index) for index in range(4000)]
    trained += [similar_drawing(rng, one.scene) for one in trained]
    held_out = {held_out_drawing(0, index).scene.arrangement for index in range(1000)}
    assert not held_out & {one.scene.arrangement for one in trained}
    assert len(held_out) > 60


def test_things_lie_as_the_scene_says_and_apart_from_the_edges() -> None:
    for index in range(300):
        drawing = training_drawing(2, index)
        for (x, y), radius in zip(drawing.centres, drawing.radii, strict=True):
            assert radius < x < SIDE - radius
            assert radius < y < SIDE - radius
        for (x, y), (other_x, other_y) in pairwise(drawing.centres):
            across, down = other_x - x, other_y - y
            along, beside = (across, down) if drawing.scene.is_across else (down, across)
            assert along > abs(beside)


def test_the_map_of_things_is_of_what_is_painted() -> None:
    for index in range(100):
        drawing = training_drawing(3, index)
        pixels, where = np.asarray(paint(drawing)).astype(int), which_thing(drawing)
        for at, colour in enumerate(drawing.paints):
            off = np.abs(pixels[where == at + 1] - colour).max(1)
            assert np.mean(off < 3) > 0.5, "edges are mixed with the ground"
        assert np.mean(np.abs(pixels[where == 0] - drawing.ground).max(1) < 3) > 0.9


def test_a_similar_drawing_differs_in_what_it_shows() -> None:
    rng = random.Random(4)
    for index in range(300):
        scene = training_drawing(4, index).scene
        assert similar_drawing(rng, scene).scene != scene


def test_a_description_is_true_of_its_own_drawing_and_not_of_one_turned_round() -> None:
    rng = random.Random(5)
    for index in range(300):
        scene = training_drawing(5, index).scene
        text, said = describe(rng, scene)
        assert said.is_true_of(scene)
        assert all(thing.name in text for thing in scene.things)
        turned = Scene(scene.things[::-1], scene.is_across)
        assert len(scene.things) == 1 or not said.is_true_of(turned)


def test_a_description_without_sizes_is_true_of_every_size() -> None:
    said = Facts(tuple(thing._replace(size="") for thing in BESIDE.things), is_across=True)
    larger = Scene((RED_CIRCLE._replace(size="large"), BLUE_SQUARE), is_across=True)
    assert said.is_true_of(BESIDE)
    assert said.is_true_of(larger)
    assert not Facts(BESIDE.things, is_across=True).is_true_of(larger)
    assert not said.is_true_of(Scene(BESIDE.things, is_across=False))
    assert not said.is_true_of(Scene((RED_CIRCLE,)))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Describe the picture.", "A red circle left of a blue square."),
        ("How many shapes are there?", "Two."),
        ("How many stars are there?", "None."),
        ("What colour is the circle?", "Red."),
        ("Which shape is blue?", "A square."),
        ("What is green?", "Nothing."),
        ("Is the circle small or large?", "Small."),
        ("How large is the blue square?", "Large."),
        ("What is left of the blue square?", "A red circle."),
        ("What is right of the blue square?", "Nothing."),
        ("What is above the circle?", "Nothing."),
        ("Where is the red circle?", "Left of the blue square."),
        ("Where is the square?", "Right of the red circle."),
        ("Is there a red circle?", "Yes."),
        ("Is there a blue circle?", "No."),
        ("Is the circle left of the square?", "Yes."),
        ("Is the circle right of the square?", "No."),
    ],
)
def test_a_question_has_the_right_answer(text: str, answer: str) -> None:
    assert answer_to(text, BESIDE) == answer


def test_questions_name_things_so_that_only_one_can_be_meant() -> None:
    scene = Scene((RED_CIRCLE, RED_CIRCLE._replace(colour="blue")), is_across=False)
    for seed in range(300):
        for question in questions(random.Random(seed), scene):
            assert "the circle" not in question.text
            assert not question.text.endswith("is the circle?")


def test_a_drawing_of_one_thing_has_no_questions_about_two() -> None:
    kinds = {question.kind for question in questions(random.Random(0), Scene((RED_CIRCLE,)))}
    assert kinds == set(ASKING) - {"place", "relation"}


def test_a_colour_is_nearer_to_its_own_name_than_to_others() -> None:
    def painted(index: int) -> Drawing:
        return training_drawing(6, index)

    for index in range(500):
        drawing = painted(index)
        for thing, colour in zip(drawing.scene.things, drawing.paints, strict=True):
            far = {
                name: np.abs(np.subtract(colour, other)).sum() for name, other in COLOURS.items()
            }
            assert min(far, key=lambda name: far[name]) == thing.colour
