"""The answer parser gives one answer however the text is cut, loses nothing, and takes linear
time."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.requests.text.answers.dialects import dialect_named
from engine.requests.text.answers.format import ANSWERS, REASONING, AnswerFormat, detect_format
from engine.requests.text.answers.parser import AnswerParser
from engine.requests.text.answers.reader import DEPTH_MAX, ToolCall
from tests.support.examples import examples

MARKS = [marker for pair in (*REASONING, *ANSWERS) for marker in pair[:2]]
PIECES = [
    *MARKS,
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"),
    *("[ARGS]", "[CALL_ID]", "[", "]", "{", "}", '"', "\\", ",", ";", ":", "<", "</", " ", "\n"),
    *('{"name": "f", "arguments": {"x": 1}}', '{"name": "f", "parameters": {}}', '{"name": 1}'),
    *('{"name":"a<b","arguments":{"t":"</tool_call> \\" }"}}', "get_it", "tool_call", "é🌶", "a"),
]
INSIDE = tuple(map(dialect_named, ("hermes", "llama", "mistral")))  # calls marked inside the text
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)
NAMES: dict[str, dict[str, object]] = {name: {} for name in ("f", "a<b", "add", "g", "now")}
formats = st.builds(
    AnswerFormat,
    tools=st.sampled_from([None, *INSIDE]),
    functions=st.just(NAMES),
    reasoning=st.sampled_from([None, *REASONING]),
    answer=st.sampled_from([None, *ANSWERS]),
).flatmap(
    lambda form: st.sampled_from(
        [form, *(replace(form, opened=one.opening) for one in (form.reasoning, form.answer) if one)]
    )
)


def form_of(tools=None, **others):
    """Return a format in which the tools of this file are offered."""
    return AnswerFormat(tools, NAMES, **others)


def parse(form, *pieces):
    """Return the whole answer of a text that comes in pieces."""
    return answer_of(AnswerParser(form), pieces)


def answer_of(parser, pieces):
    """Return the text, the reasoning and the calls of an answer that comes in pieces."""
    parts = [*(parser.feed(piece) for piece in pieces), parser.close()]
    calls = [call for part in parts for call in part.calls]
    text = "".join(part.text for part in parts)
    return text, "".join(part.reasoning for part in parts), calls


@settings(max_examples=examples(300))
@given(form=formats, text=texts)
def test_an_answer_is_the_same_however_its_text_is_cut(form, text):
    check_cuts(parse, form, text)


def check_cuts(parse, form, text):
    """Check that the answer is the same however the text is cut."""
    whole = parse(form, text)
    for cut in range(len(text) + 1):
        assert parse(form, text[:cut], text[cut:]) == whole
    assert parse(form, *text) == whole


@settings(max_examples=examples(300))
@given(form=formats, text=texts)
def test_without_calls_and_markers_the_text_is_unchanged(form, text):
    said, reasoning, calls = parse(form, text)
    if not calls and not any(marker in text for marker in MARKS):
        if form.opened:
            assert (said + reasoning).strip() == text.strip()
        else:
            assert (said, reasoning) == (text, "")


@settings(max_examples=examples(300))
@given(form=formats, text=texts)
def test_nothing_but_markers_and_whitespace_goes_missing(form, text):
    """The parsed text's characters stand in the answer in the same order."""
    said, reasoning, calls = parse(form, text)
    for call in calls:
        assert isinstance(json.loads(call.arguments_json), dict)
        assert call.name in NAMES
    kept = len(re.sub(r"\s", "", said + reasoning))
    in_calls = sum(len(call.name) + len(call.arguments_json) for call in calls)
    markers = sum(text.count(marker) * len(marker) for marker in MARKS)
    lost = len(re.sub(r"\s", "", text)) - kept - in_calls
    overhead = 70 * len(calls)  # bytes for a call's markers and JSON keys
    assert lost <= markers + overhead
    letters = iter(text)
    assert all(letter in letters for letter in said)


@settings(max_examples=examples(300))
@given(text=texts, tools=st.sampled_from(INSIDE))
def test_what_calls_no_tool_that_was_offered_is_text(text, tools):
    """JSON with a key "name", which a model may write as data, is no call either."""
    said, reasoning, calls = parse(AnswerFormat(tools, {"other": {}}), text)
    assert (said, reasoning, calls) == (text, "", [])


OBJECTS = {
    True: st.sampled_from(
        [
            ('{"name": "f", "arguments": {"x": 1}}', ToolCall("f", '{"x": 1}')),
            ('{"name": "g", "parameters": {"s": "]},;"}}', ToolCall("g", '{"s": "]},;"}')),
        ]
    ),
    False: st.sampled_from(
        [('{"name": "h", "arguments": {"x": 1}}', None), ('{"name": "i", "parameters": {}}', None)]
    ),
}
LISTS = {
    INSIDE[0]: ("", "<tool_call>{}</tool_call>", [""], ""),
    INSIDE[1]: ("<|python_tag|>", "{}", ["", ";"], ""),
    INSIDE[2]: ("[TOOL_CALLS][", "{}", [","], "]"),
}


@given(
    tools=st.sampled_from(INSIDE),
    objects=st.lists(st.booleans().flatmap(OBJECTS.get), min_size=1, max_size=5),
    data=st.data(),
)
def test_an_offered_call_is_a_call_whatever_stands_beside_it(tools, objects, data):
    """Beside offered calls, those of tools that were not offered stay in the text as written."""
    opening, frame, separators, closing = LISTS[tools]
    spaces = st.sampled_from(["", " ", "\n"])
    text = opening
    for number, (written, _) in enumerate(objects):
        if number:
            text += data.draw(spaces) + data.draw(st.sampled_from(separators)) + data.draw(spaces)
        text += frame.format(written)
    text += data.draw(spaces) + closing
    said, _, calls = parse(form_of(tools), text)
    assert calls == [call for _, call in objects if call is not None]
    left = said
    for written in (written for written, call in objects if call is None):
        before, found, left_behind = left.partition(written)
        assert found
        left = before + left_behind
    for marker in (opening, *frame.split("{}")):
        left = left.replace(marker, "") if marker else left
    assert set(left) <= set(",;] \n")
    if not calls:
        assert said == text


@pytest.mark.parametrize(
    "fields",
    [
        '"name": "\\ud83d", "arguments": {}',
        '"name": "f", "arguments": {}, "id": "\\udc00"',
        '"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\"}"',
    ],
)
def test_a_call_with_half_a_character_in_it_is_text(fields):
    """JSON can write half a surrogate pair, and no message can carry one."""
    text = f"<tool_call>{{{fields}}}"
    assert parse(form_of(INSIDE[0]), text) == (text, "", [])


@given(form=formats, text=texts)
def test_plain_text_comes_at_once(form, text):
    """Only text that may become a marker, a call or whitespace beside one is held back."""
    word = re.sub(r"[\s<\[{;,\]]", "", text) + "x"
    parser = AnswerParser(form)
    parser.feed("y")
    part = parser.feed(word)
    assert (part.text or part.reasoning).endswith("x")


CALL = '{"name": "add", "arguments": {"a": 1.0, "b": "}</tool_call>"}}'
ADD = ToolCall("add", '{"a": 1.0, "b": "}</tool_call>"}')
HERMES, LLAMA, MISTRAL = (form_of(tools) for tools in INSIDE)
THINKING = form_of(INSIDE[0], reasoning=REASONING[0])
IN_ANSWER = form_of(reasoning=REASONING[0], answer=ANSWERS[0], opened="<answer>")
INSIDE_THOUGHT = replace(THINKING, opened="<think>")


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", ("", "", [ADD])),
        (HERMES, f"Let me.\n<tool_call>{CALL}</tool_call>", ("Let me.", "", [ADD])),
        (HERMES, f"<tool_call>{CALL}</tool_call>\n" * 2, ("", "", [ADD, ADD])),
        (HERMES, f"<tool_call>{CALL}</tool_call> so", (" so", "", [ADD])),
        (HERMES, f"<tool_call>{CALL}", ("", "", [ADD])),  # the end of the answer ends the call, too
        (HERMES, f"<tool_call>{CALL}<tool_call>{CALL}", ("", "", [ADD, ADD])),
        (HERMES, '<tool_call>{"name": "now"}', ("", "", [ToolCall("now", "{}")])),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}',
            ("", "", [ToolCall("f", '{"a": 2}')]),
        ),
        (HERMES, f"{CALL}", (CALL, "", [])),
        (LLAMA, f" {CALL}; {CALL}", ("", "", [ADD, ADD])),
        (LLAMA, f"<|python_tag|>{CALL}", ("", "", [ADD])),
        (LLAMA, f"It is {CALL}", (f"It is {CALL}", "", [])),
        (LLAMA, '{"answer": 42} is it', ('{"answer": 42} is it', "", [])),
        (LLAMA, "<|python_tag|>f.call(x=1)", ("<|python_tag|>f.call(x=1)", "", [])),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]", ("", "", [ADD, ADD])),
        (MISTRAL, 'Hm.[TOOL_CALLS]f[ARGS]{"a": 1}', ("Hm.", "", [ToolCall("f", '{"a": 1}')])),
        (
            MISTRAL,
            "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]g{}",
            ("", "", [ToolCall("f", "{}", "abc123def"), ToolCall("g", "{}")]),
        ),
        (
            MISTRAL,
            '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc123def"}]',
            ("", "", [ToolCall("f", "{}", "abc123def")]),
        ),
        (MISTRAL, "an array: [1, 2]", ("an array: [1, 2]", "", [])),
        (THINKING, f"<think>\nWell,\n</think>\n\n<tool_call>{CALL}", ("", "Well,", [ADD])),
        (THINKING, "\n<think>a\n\nb</think> c", ("c", "a\n\nb", [])),
        (THINKING, "<think>never <tool_call>", ("", "never <tool_call>", [])),
        (THINKING, "say <think>not</think>", ("say <think>not</think>", "", [])),
        (INSIDE_THOUGHT, "a < b\n</think>\nc", ("c", "a < b", [])),
        (INSIDE_THOUGHT, "\n<think>\na</think>c", ("c", "a", [])),
        (INSIDE_THOUGHT, "a <think> b</think>c", ("c", "a <think> b", [])),
        (LLAMA, '{"name": "Ada", "born": 1815}', ('{"name": "Ada", "born": 1815}', "", [])),
        (LLAMA, '{"name": "f"}', ('{"name": "f"}', "", [])),
        (LLAMA, '{"name": "h", "parameters": {}}', ('{"name": "h", "parameters": {}}', "", [])),
    ],
)
def test_formats(form, text, expected):
    assert parse(form, text) == expected
    assert parse(form, *text) == expected


@pytest.mark.parametrize(
    "bad",
    [
        '{"name": "f", "arguments": {"a": }}',
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": "f", "arguments": {"a": "\n"}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": "f", "arguments": {"a": ' + "[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1) + "}}",
        '{"arguments": {}}',
        "f(a=1)",
        "",
    ],
)
@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
def test_a_malformed_call_comes_through_as_it_was_written(form, bad):
    text = {
        HERMES: f"so <tool_call>\n{bad}\n</tool_call> it is",
        LLAMA: f"{bad} it is",
        MISTRAL: f"so [TOOL_CALLS] [{bad}] it is",
    }[form]
    assert parse(form, text) == (text, "", [])
    assert parse(form, *text) == (text, "", [])


def test_a_call_after_a_malformed_one_is_found():
    text = f'<tool_call>{{"name": <tool_call>{CALL}</tool_call>'
    assert parse(HERMES, text) == ('<tool_call>{"name": ', "", [ADD])


def test_a_call_is_sent_when_its_json_is_complete():
    parser = AnswerParser(HERMES)
    assert parser.feed(f"<tool_call>{CALL[:-1]}") == ("", "", ())
    assert parser.feed(CALL[-1]).calls == (ADD,)


@pytest.mark.parametrize(
    "piece",
    ['<tool_call>{"a":"', '<tool_call>{"a":{', "<", " ", "[{", "\\", "</answer>", "<think> "],
)
@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL, THINKING, IN_ANSWER])
def test_the_work_grows_with_the_text_alone(form, piece, monkeypatch):
    """Work is the number of characters read, some twice, behind text that looked like a marker."""
    text = piece * (20_000 // len(piece))
    assert len(text) <= reads(parse, form, text, AnswerParser, monkeypatch) <= 4 * len(text)


def reads(parse, form, text, parser, monkeypatch):
    """Return how many characters the parser class ``parser`` reads while it parses a text."""
    read, stock = [], parser._advance
    monkeypatch.setattr(parser, "_advance", lambda self: (read.append(1), stock(self))[1])
    parse(form, text)
    return len(read)


# ---- which format


@pytest.mark.parametrize(
    ("template", "tools"),
    [
        ("{% if tools %}<tool_call></tool_call>{% endif %}", INSIDE[0]),
        ("[AVAILABLE_TOOLS] … [TOOL_CALLS]", INSIDE[2]),
        ("{{ '<|python_tag|>' }}", INSIDE[1]),
        (
            'format {"name": function name, "parameters": dictionary of argument name and its '
            "value}",
            INSIDE[1],
        ),
        ("{{ messages }}", None),
    ],
)
def test_the_format_of_calls_is_read_from_the_template(template, tools):
    assert detect_format(template, functions=NAMES, prompt="").tools is tools
    assert detect_format(template, prompt="").tools is None


@pytest.mark.parametrize(
    ("prompt", "inside"), [("…<think>\n", True), ("…<think>\n\n</think>\n\n", False), ("…", False)]
)
def test_a_prompt_may_have_opened_the_reasoning(prompt, inside):
    for template in ("<think> … </think>", "</think>", "<think>"):  # each alone is enough
        form = detect_format(template, prompt=prompt)
        assert (form.reasoning, form.begins_inside) == (REASONING[0], inside)
    assert detect_format("", functions=NAMES, prompt=prompt).is_plain


@pytest.mark.parametrize("prompt", ["…<think>\n", "…"])
def test_an_answer_in_a_form_is_text_unless_the_form_writes_reasoning(prompt):
    def find(constraint):
        return detect_format(
            "</think><response></response><tool_call>",
            functions=NAMES,
            prompt=prompt,
            constraint=constraint,
        )

    assert find('{"type": "object"}').is_plain
    assert find("").is_plain  # the constraint "" means any JSON object, so no calls
    reasoned = find('start: /[^<]+/ "</think>" /[0-9]+/')
    assert (reasoned.tools, reasoned.reasoning, reasoned.answer) == (None, REASONING[0], None)
    assert reasoned.begins_inside == prompt.endswith("<think>\n")
