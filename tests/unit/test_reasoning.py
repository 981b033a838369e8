"""How a request's reasoning is switched off in the prompt, and which variables templates have."""

import pytest

from engine.errors import InvalidRequest
from engine.requests.text.answers.format import detect_format
from engine.requests.text.answers.reasoning import closed, inside, switch_of, with_switch
from engine.requests.text.chat_values import Chat
from engine.requests.text.values import ReasoningOptions

CHANNELS = "<|start|><|channel|><|message|>"
ASK = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{%- if enable_thinking is defined and enable_thinking is false %}", "enable_thinking"),
        ("{% if enable_thinking is not defined %}x{% endif %}", "enable_thinking"),
        ("{%- set enable_thinking = enable_thinking | default(false) -%}", "enable_thinking"),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", "thinking"),
        ("{%- if thinking %}{{ 'Think.' }}{% endif %}", "thinking"),
        ("{% if true and\n not thinking %}", "thinking"),
        ("You are thinking. {{ message.thinking }}{{ message['thinking'] }}", ""),
        ('{{ "Keep thinking, then answer" }}', ""),
        ("{% set thinking = message.reasoning %}{% if thinking %}{% endif %}", ""),
        ("{% set ns = namespace(enable_thinking=true) %}{% if ns.enable_thinking %}", ""),
        ("{{ 'enable_thinking is defined' }}", ""),
        ("", ""),
    ],
)
def test_the_variable_that_switches_reasoning_is_found_in_the_templates_code(template, name):
    assert switch_of(template) == name


def test_a_switch_is_set_unless_the_caller_has_set_it_otherwise():
    template = "{% if enable_thinking is defined %}<think>{% endif %}"
    off = ReasoningOptions(enabled=False)
    assert with_switch(Chat(ASK), off, template).template_args == {"enable_thinking": False}
    same = Chat(ASK, template_args={"enable_thinking": False, "a": 1})
    assert with_switch(same, off, template).template_args == same.template_args
    assert with_switch(Chat(ASK), ReasoningOptions(), template).template_args == {}
    assert with_switch(Chat(ASK), off, "<think>").template_args == {}
    with pytest.raises(InvalidRequest, match=r"reasoning\.enabled: differs from"):
        with_switch(Chat(ASK, template_args={"enable_thinking": True}), off, template)


@pytest.mark.parametrize(
    ("template", "prompt", "expected"),
    [
        ("<think>", "hi\n", "hi\n<think>\n\n</think>\n\n"),
        ("<think>", "hi\n<think>\n", "hi\n<think>\n\n</think>\n\n"),
        ("<think>", "hi\n<think>\n\n</think>\n\n", None),
        ("[THINK]", "hi", "hi[THINK]\n\n[/THINK]\n\n"),
        ("no markers", "hi", None),
        (CHANNELS, "<|start|>assistant", "<|start|>assistant<|channel|>final<|message|>"),
        (CHANNELS, "<|start|>assistant<|channel|>final<|message|>", None),
        (
            CHANNELS,
            "<|start|>assistant<|channel|>analysis<|message|>",
            "<|start|>assistant<|channel|>analysis<|message|><|end|><|start|>assistant"
            "<|channel|>final<|message|>",
        ),
    ],
)
def test_reasoning_that_no_switch_turns_off_is_empty_in_the_prompt(template, prompt, expected):
    found = closed(prompt, template, has_tools=False)
    assert found == (prompt if expected is None else expected)
    form = detect_format(template, prompt=found)
    assert form.is_behind == form.reasons
    assert not form.begins_inside


def test_in_channels_with_tools_the_model_may_still_choose_a_call():
    assert closed("<|start|>assistant", CHANNELS, has_tools=True) == "<|start|>assistant"


@pytest.mark.parametrize(
    ("prompt", "is_inside"),
    [
        ("<think>so", True),
        ("<think>so</think> no <think>again", True),
        ("<think>so</think> text", False),
        ("text", False),
    ],
)
def test_a_text_may_end_within_reasoning(prompt, is_inside):
    form = inside(detect_format("<think></think>", prompt=prompt), prompt)
    assert form.begins_inside == is_inside
