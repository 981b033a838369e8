"""Each kind of chat template gets turns with tool calls in the form that it reads."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from engine.requests.text.prepare_chat import _in_parts
from engine.worker.tokenizing.call_turns import form_of
from engine.worker.tokenizing.tokenizer import HfTokenizer
from tests.support import toy_tokenizers

ARGUMENTS = {"city": "Łódź", "days": [1, 2.5]}
WRITTEN = '{"city":  "Łódź", "days": [1,2.50]}'  # as a model may write the arguments
LOOP = "{% for m in messages %}<{{ m.role }}>"
END = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
CALLS = "{% for c in m.tool_calls %}[{{ c.function.name }} "
AS_JSON, AS_TEXT = "{{ c.function.arguments | tojson }}]", "{{ '' + c.function.arguments }}]"
MISSING, EMPTY, NULL = {}, {"content": ""}, {"content": None}

# Chat templates. Each has the forms of a call's content and arguments with which transformers
# renders the call by this template.
TEMPLATES = {
    "the common kind": (
        f"{LOOP}{{{{ m.content }}}}{CALLS}{AS_JSON}{{% endfor %}}{END}", MISSING, ARGUMENTS),
    "either arguments": (
        f"{LOOP}{{{{ m.content }}}}{CALLS}{{% set a = c.function.arguments %}}"
        f"{{{{ a if a is string else a | tojson }}}}]{{% endfor %}}{END}", MISSING, ARGUMENTS),
    "calls where content is none": (
        f"{LOOP}{{% if m.content is none %}}{CALLS}{AS_JSON}{{% endfor %}}{{% else %}}"
        f"{{{{ m.content }}}}{{% endif %}}{END}", NULL, ARGUMENTS),
    "a word where content is none": (
        f"{LOOP}{{% if m.content is none %}}[weather {{% else %}}{{{{ m.content }}}}{{% endif %}}"
        f"{END}", NULL, ARGUMENTS),
    "calls where content is missing": (
        f"{LOOP}{{% if m.content is defined %}}{{{{ m.content }}}}{{% else %}}{CALLS}{AS_JSON}"
        f"{{% endfor %}}{{% endif %}}{END}", MISSING, ARGUMENTS),
    "content that must be text": (
        f"{LOOP}{{{{ '' + m.content }}}}{CALLS}{AS_JSON}{{% endfor %}}{END}", EMPTY, ARGUMENTS),
    "arguments joined as text": (
        f"{LOOP}{{{{ m.content }}}}{CALLS}{AS_TEXT}{{% endfor %}}{END}", MISSING, WRITTEN),
    "arguments printed": (
        f"{LOOP}{{{{ m.content }}}}{CALLS}{{{{ c.function.arguments }}}}]{{% endfor %}}{END}",
        MISSING, WRITTEN),
    "DeepSeek's distilled models": (
        f"{LOOP}{{% if m.role == 'assistant' and m.content is none %}}{CALLS}{AS_TEXT}"
        f"{{% endfor %}}{{% endif %}}{{% if m.content is not none %}}"
        f"{{{{ '' + m.content }}}}{{% endif %}}{END}",
        NULL, WRITTEN),
    "DeepSeek V3": (
        f"{LOOP}{CALLS}{{% if m.content is none %}}{AS_TEXT}{{% else %}}{{{{ '' + m.content }}}}"
        f"{AS_TEXT}{{% endif %}}{{% endfor %}}{END}", EMPTY, WRITTEN),
    "calls only beside tools": (
        f"{{% if not tools %}}{{{{ raise_exception('no tools') }}}}{{% endif %}}"
        f"{LOOP}{{{{ m.content }}}}{CALLS}{AS_JSON}{{% endfor %}}{END}", MISSING, ARGUMENTS),
    "no calls, and a content as JSON": (
        f"{LOOP}{{{{ m.content if m.content is string else m.content | tojson }}}}{END}",
        EMPTY, ARGUMENTS),
    "no calls at all": (f"{LOOP}{{{{ '' + m.content }}}}{END}", EMPTY, ARGUMENTS),
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def chat(content, arguments):
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "abc123def", "type": "function", "function": function}
    turn = {"role": "assistant", **content, "tool_calls": [call]}
    return [{"role": "user", "content": "Rain?"}, turn]


def ours(template, messages):
    tokenizer = HfTokenizer(toy_tokenizers.byte_level(), chat_templates={"default": template})
    tools = [TOOL] if "tools" in template else []
    return tokenizer.render_chat(messages, tools=tools)


@pytest.mark.parametrize("given_arguments", [ARGUMENTS, WRITTEN], ids=["object", "text"])
@pytest.mark.parametrize("given_content", [MISSING, EMPTY, NULL], ids=["missing", "empty", "null"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_is_written_as_in_transformers_in_the_form_that_it_wants(
    name, given_content, given_arguments
):
    """A client may give the empty content and the arguments in any form."""
    template, content, arguments = TEMPLATES[name]
    if given_arguments is ARGUMENTS and arguments is WRITTEN:
        arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
    [expected], _ = render_jinja_template(
        [chat(content, arguments)],
        tools=[TOOL],
        chat_template=template,
        add_generation_prompt=True,
    )
    assert ours(template, chat(given_content, given_arguments)) == expected
    assert ("[weather " in expected) == (not name.startswith("no calls"))


def test_what_a_turn_with_calls_says_stays_and_so_does_a_turn_without_calls():
    template = TEMPLATES["calls where content is none"][0]
    assert (
        ours(template, chat({"content": "So."}, ARGUMENTS))
        == "<user>Rain?<assistant>So.<assistant>"
    )
    silent = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": ""}]
    assert ours(template, silent) == "<user>Rain?<assistant><assistant>"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)


@settings(deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=3), values, max_size=3),
    name=st.sampled_from(sorted(TEMPLATES)),
)
def test_any_arguments_reach_a_template_as_the_same_object(arguments, name):
    template, *_ = TEMPLATES[name]
    texts = [
        ours(template, chat(EMPTY, one)) for one in (arguments, json.dumps(arguments, indent=1))
    ]
    for text in texts:
        _, found, call = text.partition("[weather ")
        if found and call != "<assistant>":
            assert json.loads(call.removesuffix("<assistant>").removesuffix("]")) == arguments


def test_a_template_is_tried_once(monkeypatch):
    """Trying a template again would cost seconds of a thread."""
    count = 0

    def render(*args, **options):
        nonlocal count
        count += 1
        return stock(*args, **options)

    from engine.worker.tokenizing import call_turns

    stock = call_turns.render
    monkeypatch.setattr(call_turns, "render", render)
    form_of.cache_clear()
    for _ in range(3):
        ours(TEMPLATES["DeepSeek V3"][0], chat(EMPTY, ARGUMENTS))
    assert 2 <= count <= 7


def test_a_turn_with_calls_and_no_content_gets_no_parts():
    """For models that read images, the content of all other turns is a list of parts."""
    silent = chat(EMPTY, ARGUMENTS)[1]
    assert _in_parts(silent) == silent
    assert _in_parts({"role": "user", "content": ""})["content"] == [{"type": "text", "text": ""}]
