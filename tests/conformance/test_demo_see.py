"""The shipped model that answers questions about drawings, as the engine serves it by its id.

The model reaches its bars on a part of the held-out drawings. `python -m tools.lab.measure_demo
see` measures all of them.
"""

from random import Random

import pytest

import engine
from engine.worker.load.resolve import resolve
from tools.lab.demo import measure_see
from tools.lab.demo.drawing_words import NO_PICTURE, ask_description
from tools.lab.demo.drawings import held_out_drawing, png_of
from tools.lab.demo.figures import missed_bars

SOURCE = resolve("demo-see")
DRAWINGS = 25


@pytest.fixture(scope="module")
def eng():
    config = engine.EngineConfig(models=(engine.ModelConfig("demo-see"),))
    with engine.blocking.open_engine(config) as one:
        yield one


def test_the_engine_answers_questions_about_drawings():
    figures, wrong = measure_see.measure(SOURCE.directory, seed=0, count=DRAWINGS)
    assert not missed_bars(figures, measure_see.BARS, measure_see.SIZE_BYTES_MAX), wrong


def answer(eng, messages):
    request = engine.GenerateRequest(chat=engine.Chat(tuple(messages)), sampling=measure_see.GREEDY)
    events = list(eng.generate(request))
    return "".join(event.text for event in events if isinstance(event, engine.Tokens))


def test_a_chat_goes_on_about_its_picture_and_then_about_another_one(eng):
    first, second = held_out_drawing(0, 0), held_out_drawing(0, 1)
    messages = []
    for drawing in (first, second):
        image = {"type": "image", "image": png_of(drawing)}
        asked = {"type": "text", "text": "Describe the picture."}
        messages.append({"role": "user", "content": [image, asked]})
        described = answer(eng, messages)
        assert described == ask_description(Random(0), drawing.scene).answer
        messages.append({"role": "assistant", "content": described})
    messages.append({"role": "user", "content": "How many shapes are there?"})
    assert answer(eng, messages) == {1: "One.", 2: "Two."}[len(second.scene.things)]


def test_a_question_without_a_picture_is_answered_so(eng):
    assert answer(eng, [{"role": "user", "content": "Describe the picture."}]) == NO_PICTURE
