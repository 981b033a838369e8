"""Messages in channels give the same answer however their text is cut, and lose nothing."""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.requests.text.answers.channel_parser import ChannelParser
from engine.requests.text.answers.choice_parser import parser_of
from engine.requests.text.answers.dialects import RECIPIENT, dialect_named
from engine.requests.text.answers.format import AnswerFormat, detect_format
from engine.requests.text.answers.reader import ToolCall
from tests.property.test_answer_parser import answer_of, check_cuts, reads
from tests.support.examples import examples

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, RETURN, CALL, CONSTRAIN = "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"
ASSISTANT = f"{START}assistant"
TEMPLATE = f"{ASSISTANT}{CHANNEL}final{MESSAGE}"
PIECES = [
    *(START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN, "assistant", "analysis", "final"),
    *("commentary", "to=functions.f", "to=python", " ", "json", '{"x": 1}', '{"x": ', "{", "}"),
    *("<", "<|", "|>", "to=", "functions.", "é🌶", "a b", "\n", f"{ASSISTANT}{CHANNEL}"),
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)
OPENED = ["", ASSISTANT, f"{ASSISTANT}{CHANNEL}final{MESSAGE}", f"{ASSISTANT}{CHANNEL}analysis",
          f"{ASSISTANT}{CHANNEL}final{MESSAGE}so{END}"]  # fmt: skip
NAMES: dict[str, dict[str, object]] = {"f": {}, "get": {}}
PLAIN = AnswerFormat(has_channels=True, opened=ASSISTANT)
TOOLS = AnswerFormat(dialect_named("channels"), NAMES, has_channels=True, opened=ASSISTANT)
formats = st.builds(replace, st.sampled_from([PLAIN, TOOLS]), opened=st.sampled_from(OPENED))


def parse(form, *pieces):
    """Return the whole answer of a text that comes in pieces: text, reasoning and calls."""
    parser = parser_of(form)
    assert isinstance(parser, ChannelParser)
    return answer_of(parser, pieces)


@settings(max_examples=examples(300), deadline=None)
@given(form=formats, text=texts)
def test_an_answer_is_the_same_however_its_text_is_cut(form, text):
    check_cuts(parse, form, text)


words = st.text("ab c.<|>{}\n", max_size=12)
messages = st.lists(
    st.tuples(st.sampled_from(["analysis", "commentary", "final", "call"]), words),
    min_size=1,
    max_size=5,
)


def written(kind, words):
    """Return a message as a model writes it, from the channel's marker on."""
    if kind != "call":
        return f"{CHANNEL}{kind}{MESSAGE}{words}{END}"
    arguments = json.dumps({"words": words})
    header = f"{CHANNEL}commentary to=functions.f {CONSTRAIN}json{MESSAGE}"
    return f"{header}{arguments}{CALL}"


@settings(max_examples=examples(300), deadline=None)
@given(
    messages=messages,
    cuts=st.lists(st.integers(0, 400), max_size=6),
    form=st.sampled_from([TOOLS, replace(TOOLS, streams_arguments=True)]),
    tail=st.sampled_from(["", "<", "<|", "so <|chan"]),
)
def test_messages_come_out_by_their_channels(messages, cuts, form, tail):
    """The stream is cut anywhere, as tokens may cut it, and may end within a marker."""
    text = ASSISTANT.join(written(*one) for one in messages) + tail
    cuts = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[low:high] for low, high in itertools.pairwise(cuts)]
    said, reasoning, parts = parse(form, *pieces)
    calls = []
    for part in parts:
        if part.name:
            calls.append(part)
        else:
            calls[-1] = calls[-1]._replace(arguments_json=calls[-1][1] + part.arguments_json)
    of = {kind: [own for own_kind, own in messages if own_kind == kind] for kind in
          ("analysis", "call")}  # fmt: skip
    shown = [own for kind, own in messages if kind in ("commentary", "final")]
    assert reasoning == joined(of["analysis"])
    assert said == joined(shown) + tail
    assert [json.loads(call.arguments_json) for call in calls] == [{"words": w} for w in of["call"]]
    assert all(call.name == "f" for call in calls)


def joined(parts):
    """Return messages of one kind in one text, joined by empty lines."""
    return "\n\n".join(part for part in parts if part)


@settings(max_examples=examples(300), deadline=None)
@given(form=formats, text=texts)
def test_each_character_of_the_answer_is_in_the_text_in_order(form, text):
    said, reasoning, calls = parse(form, text)
    letters = iter(text)
    assert all(letter in letters for letter in said.replace("\n", ""))
    letters = iter(text)
    assert all(letter in letters for letter in reasoning.replace("\n", ""))
    for call in calls:
        assert form.tools is TOOLS.tools
        assert isinstance(json.loads(call.arguments_json), dict)
    if RECIPIENT not in text:  # the header of a message to another recipient is text
        assert not any(marker in said + reasoning for marker in form.markers)


# What may stand in a header, in any order; other text ends at the next marker.
HEADER_PIECES = [
    *(CHANNEL, f"{CHANNEL}analysis", f"{CHANNEL}final", f"{CHANNEL}commentary", ASSISTANT, START),
    *(f"{CHANNEL}commentary to=assistant", f"{CONSTRAIN}json", CONSTRAIN, " "),
]
headers = st.lists(st.sampled_from(HEADER_PIECES), max_size=4).map("".join)
free = st.text("xyz. 1?", max_size=12).map(lambda words: f"?{words}?")


@settings(max_examples=examples(300), deadline=None)
@given(parts=st.lists(st.tuples(headers, free), min_size=1, max_size=4), form=formats)
def test_malformed_headers_leave_their_free_text_and_nothing_else(parts, form):
    """gpt-oss writes such headers in about one answer of twenty-five (llama.cpp's issue 27720)."""
    text = "".join(f"{CHANNEL}{header}{words}{END}" for header, words in parts)
    said, reasoning, calls = parse(replace(form, opened=ASSISTANT), text)
    assert calls == []
    # the last header of each
    last = [(CHANNEL + header).rpartition(START)[2] for header, _ in parts]
    thought = [header.rpartition(CHANNEL)[2].startswith("analysis") for header in last]
    for found, is_thought in ((said, False), (reasoning, True)):
        wanted = [
            words for (_, words), own in zip(parts, thought, strict=True) if own == is_thought
        ]
        assert found.replace("\n\n", "") == "".join(wanted)


@given(text=st.text("abc <|>.=", max_size=40))
def test_an_answer_without_markers_is_text(text):
    assert parse(PLAIN, text) == (text, "", [])


THOUGHT = f"{CHANNEL}analysis{MESSAGE}Hm, "
GET = f"{CHANNEL}commentary to=functions.get {CONSTRAIN}json{MESSAGE}"


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (PLAIN, f"{THOUGHT}so.{END}{ASSISTANT}{CHANNEL}final{MESSAGE}Hi{RETURN}",
         ("Hi", "Hm, so.", [])),
        (PLAIN, f"{CHANNEL}final{MESSAGE}cut", ("cut", "", [])),
        (PLAIN, THOUGHT, ("", "Hm, ", [])),
        (PLAIN, f"{THOUGHT}{ASSISTANT}{CHANNEL}final{MESSAGE}Hi", ("Hi", "Hm, ", [])),
        (PLAIN, f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}{{}}", ("{}", "", [])),
        (PLAIN, f"{MESSAGE}bare", ("bare", "", [])),
        (PLAIN, "Hello.", ("Hello.", "", [])),
        (PLAIN, f"{CHANNEL}fin", ("", "", [])),
        (PLAIN, f"{CHANNEL}analysis{MESSAGE}Hm{END}{START}assi", ("", "Hm", [])),
        (PLAIN, f"{CHANNEL}final It is 4.{RETURN}", ("It is 4.", "", [])),
        (PLAIN, f"{CHANNEL}finalx{MESSAGE}It is 4.", ("It is 4.", "", [])),
        (PLAIN, f"{CHANNEL}{MESSAGE}It is 4.", ("It is 4.", "", [])),
        (PLAIN, f"{CHANNEL}It is 4.{END}{START}{ASSISTANT}{CHANNEL}analysis{MESSAGE}Hm",
         ("It is 4.", "Hm", [])),
        (PLAIN, f"{CHANNEL}commentary to=assistant{CHANNEL}commentary?no{END}", ("?no", "", [])),
        (PLAIN, f"{CHANNEL}analysis?? Hm{CHANNEL}final{MESSAGE}Hi", ("Hi", "?? Hm", [])),
        (PLAIN, f"Hi{END} so {CONSTRAIN}", ("Hi so ", "", [])),
        (PLAIN, "to=x, it is", ("to=x, it is", "", [])),
        (PLAIN, f"{GET}{{}}{CALL}", (f"{GET}{{}}", "", [])),
        (PLAIN, f"{CHANNEL}analysis to=python code{MESSAGE}1{CALL}", ("", "1", [])),
        (TOOLS, f"{GET}{{\"a\": 1}}{CALL}", ("", "", [ToolCall("get", '{"a": 1}')])),
        (TOOLS, f"{GET} {{\"a\": 1}}\n", ("", "", [ToolCall("get", '{"a": 1}')])),
        (TOOLS, f"{GET}{{\"a\": {CALL}", (f"{GET}{{\"a\": ", "", [])),
        (TOOLS, f"{GET}none{CALL}", (f"{GET}none", "", [])),
        (TOOLS, f" to=functions.get{CHANNEL}commentary json{MESSAGE}{{}}{CALL}",
         ("", "", [ToolCall("get", "{}")])),
        (TOOLS, f"{CHANNEL}analysis to=functions.get{MESSAGE}{{}}{CALL}",
         ("", "", [ToolCall("get", "{}")])),
        (TOOLS, f"{CHANNEL}commentary{MESSAGE}I look.{END}{ASSISTANT}{GET}{{}}{CALL}",
         ("I look.", "", [ToolCall("get", "{}")])),
        (TOOLS, f"{CHANNEL}commentary to=functions.get {CONSTRAIN}json{{}}{CALL}",
         ("", "", [ToolCall("get", "{}")])),
        (TOOLS, f"{CHANNEL}commentary to=functions.get ? {{}}{CALL}",
         ("to=functions.get ? {}", "", [])),
        (TOOLS, f"{CHANNEL}commentary to=functions.other json{MESSAGE}{{}}{CALL}",
         (f"{CHANNEL}commentary to=functions.other json{MESSAGE}{{}}", "", [])),
        (TOOLS, f"{THOUGHT}1{END}{ASSISTANT}{THOUGHT}2{END}", ("", "Hm, 1\n\nHm, 2", [])),
        (TOOLS, f"{CHANNEL}final to=browser.find{MESSAGE}x",
         (f"{CHANNEL}final to=browser.find{MESSAGE}x", "", [])),
    ],
)  # fmt: skip
def test_messages(form, text, expected):
    assert parse(form, text) == expected
    assert parse(form, *text) == expected


def test_an_answer_may_begin_inside_a_message():
    inside = detect_format(TEMPLATE, prompt=f"{START}user{MESSAGE}?{END}{TEMPLATE}")
    assert parse(inside, f"and so on.{RETURN}") == ("and so on.", "", [])
    named = replace(TOOLS, opened=ASSISTANT + GET[:-11])
    assert parse(named, f'{MESSAGE}{{"a": 1}}') == ("", "", [ToolCall("get", '{"a": 1}')])


def test_text_comes_at_once():
    parser = parser_of(PLAIN)
    assert parser.feed(f"{CHANNEL}final{MESSAGE}H").text == "H"
    assert parser.feed("i <").text == "i "
    assert parser.feed("b>").text == "<b>"
    assert parser.feed(f"{END}{ASSISTANT}{CHANNEL}analysis{MESSAGE}so").reasoning == "so"


@pytest.mark.parametrize("piece", [START, CHANNEL, "<|", " to=", "a ", f"{GET}{{", f"{CHANNEL}a "])
def test_the_work_grows_with_the_text_alone(piece, monkeypatch):
    """Work is the number of characters read, some twice, behind text that looked like a marker."""
    text = piece * (20_000 // len(piece))
    assert reads(parse, TOOLS, text, ChannelParser, monkeypatch) <= 4 * len(text)


def test_a_template_with_channels_is_recognised():
    prompt = f"{START}user{MESSAGE}Hi{END}{ASSISTANT}"
    form = detect_format(TEMPLATE, functions=NAMES, prompt=prompt)
    assert form == TOOLS
    assert detect_format(TEMPLATE, prompt=prompt) == PLAIN
    assert {CHANNEL, MESSAGE, END, CALL} <= set(form.markers)
    assert not form.is_plain
    assert detect_format(TEMPLATE, functions=NAMES, prompt=prompt, constraint="{}").is_plain
    in_channels = detect_format(TEMPLATE, functions=NAMES, prompt=prompt, constraint=TEMPLATE)
    assert in_channels == PLAIN
