"""Reasoning, text and calls are told apart for every architecture that is served.

The table is `tests.support.chat_formats`. A new format of answers is a row there.
"""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.requests.text.answers.choice_parser import parser_of
from engine.requests.text.answers.format import detect_format
from engine.worker.load.architectures import SERVED
from engine.worker.load.vision_architectures import VISION
from engine.worker.tokenizing.templates import render
from tests.support.chat_formats import ROWS
from tests.support.examples import examples

ASK = [{"role": "user", "content": "q"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def format_of(row):
    """Return the format of an answer to a chat that offers a tool."""
    prompt = render(row.template, ASK, [TOOL], {}, add_generation_prompt=True)
    return detect_format(row.template, functions={"f": {}}, prompt=prompt)


def parse(form, *pieces):
    """Return an answer's text, its reasoning and its number of calls."""
    parser = parser_of(form)
    parts = [*(parser.feed(piece) for piece in pieces), parser.close()]
    text = "".join(part.text for part in parts)
    return text, "".join(part.reasoning for part in parts), sum(len(p.calls) for p in parts)


def test_every_architecture_has_a_row_with_its_source():
    labels = {label for row in ROWS for label in row.labels}
    assert labels == {one.label for one in (*SERVED.values(), *VISION.values())}
    for row in ROWS:
        is_digest = re.fullmatch(r"[0-9a-f]{64}", row.source)
        is_file = re.fullmatch(r"[\w.-]+/[\w.-]+:[\w./-]+", row.source)
        assert is_digest or is_file or row.published.startswith("none"), row.published


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.published.partition(" ")[0])
def test_the_markers_are_read_from_the_template_and_the_prompt(row):
    form = format_of(row)
    assert (form.reasoning, form.answer) == (row.reasoning, row.answer)
    for pair in (row.reasoning, row.answer):
        assert pair is None or set(pair[:2]) <= set(form.markers)
    for answer, expected in row.samples:
        assert parse(form, answer) == expected, answer


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), row=st.sampled_from(ROWS))
def test_answers_are_split_alike_however_they_come(data, row):
    form = format_of(row)
    answer, expected = data.draw(st.sampled_from(row.samples))
    cuts = data.draw(st.lists(st.integers(0, len(answer)), max_size=6).map(sorted))
    edges = [0, *cuts, len(answer)]
    pieces = [answer[low:high] for low, high in itertools.pairwise(edges)]
    assert parse(form, *pieces) == expected
