"""`HfTokenizer` against transformers' AutoTokenizer on the same folder, and its own rules."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from engine.core.text.types import Stops
from engine.errors import FieldViolation, InvalidRequest, RequestTooLarge, SpawnFailed
from engine.worker.encode.tokenizer import InputTokenizer
from engine.worker.interface import Tokenizer
from engine.worker.tokenizing.detokenizer import TextState
from engine.worker.tokenizing.tokenizer import HfTokenizer, load_tokenizer
from tests.checkpoints.text import write_tokenizer
from tests.support import toy_tokenizers
from tests.support.programs import imported_by
from tests.support.wire import wait_until

DEMO = Path(__file__).parents[2] / "engine" / "demo" / "stories"
MODEL_TYPES = {
    "byte_level": "gpt2",
    "llama3_like": "llama",
    "llama_like": "llama",
    "qwen_like": "qwen2",
}
TEXTS = [
    "",
    " ",
    "Once upon a time",
    "  two  spaces \n\n and\ttabs \r\n",
    "é e\u0301 한국어 漢字 🌶 👩‍👩‍👧",
    "a<|endoftext|>b <|im_start|>user\nhi<|im_end|>\n<think>x</think>",
    "<s> hi </s> <unk> <0x41>",
    "\u2581low line, \x00 and \x7f",
    "1234567890 3.14",
]


@pytest.fixture(scope="module", params=sorted(toy_tokenizers.ALL))
def both(request, tmp_path_factory):
    """Return our tokenizer and transformers' of one folder."""
    directory = toy_tokenizers.save(request.param, tmp_path_factory.mktemp(request.param))
    config = json.dumps({"model_type": MODEL_TYPES[request.param]})
    (directory / "config.json").write_text(config)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    return load_tokenizer(directory), theirs


@pytest.fixture
def directory(tmp_path):
    """Return a folder with a tokenizer of Qwen's kind."""
    return toy_tokenizers.save("qwen_like", tmp_path)


def ids_of(theirs, text, add):
    """Return transformers' ids of a text."""
    return tuple(theirs(text, add_special_tokens=add)["input_ids"])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add", [True, False])
def test_encode_equals_transformers(both, text, add):
    ours, theirs = both
    assert ours.encode(text, add_special_tokens=add) == ids_of(theirs, text, add)


def test_encode_equals_transformers_on_any_text(both):
    ours, theirs = both
    fragments = st.sampled_from([*TEXTS, " ", "a", "▁", "🌶", "<|im_end|>", "</s>", "\u0301"])
    text = st.lists(st.one_of(fragments, st.text(max_size=8)), max_size=6).map("".join)

    @settings(max_examples=60, deadline=None)
    @given(text=text, add=st.booleans())
    def check(text, add):
        assert ours.encode(text, add_special_tokens=add) == ids_of(theirs, text, add)

    check()


def test_other_threads_run_while_many_ids_are_decoded():
    """If other processes keep all cores busy, this may take several attempts."""
    ours = HfTokenizer(toy_tokenizers.byte_level())
    ids = ours.encode(toy_tokenizers.TEXTS[0] * 2000)
    ticks, is_over = 0, threading.Event()

    def tick():
        nonlocal ticks
        while not is_over.wait(0.0005):
            ticks += 1

    def num_meanwhile():
        before = ticks
        found = ours.decode(ids)
        after = ticks
        assert found == ours.backend.decode(ids)
        return after - before

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        wait_until(lambda: num_meanwhile() > 3, 20, "other threads")
    finally:
        is_over.set()
        thread.join()


def test_decode_equals_transformers_on_any_ids(both):
    ours, theirs = both

    @settings(max_examples=60, deadline=None)
    @given(ids=st.lists(st.integers(0, ours.vocab_size + 50), max_size=40), skip=st.booleans())
    def check(ids, skip):
        expected = theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=skip) == expected

    check()


def test_special_tokens_equal_transformers(both):
    ours, theirs = both
    check_ends(ours, theirs)
    assert ours.special_tokens.items() <= theirs.special_tokens_map.items()
    assert ours.special_ids == set(theirs.all_special_ids) | {
        i for i, token in theirs.added_tokens_decoder.items() if token.special
    }


def test_spans_are_code_points_of_the_input(both):
    ours, _ = both
    text = "Once 🐕 upon é a time"
    spans = ours.encode_spans(text)
    assert tuple(s.token_id for s in spans) == ours.encode(text)
    inside = [s for s in spans if s.start < s.end]
    covered = {i for s in inside for i in range(s.start, s.end)}
    # With trim_offsets in tokenizer.json, the space before a word belongs to no token.
    assert covered | {i for i, c in enumerate(text) if c == " "} == set(range(len(text)))
    dog = [s for s in spans if text[s.start : s.end].strip() == "🐕"]
    assert len(dog) >= 2, "split into bytes, which share the character"
    for span in inside:
        if "\ufffd" not in span.text:
            assert span.text.strip() == text[span.start : span.end].strip()


def test_special_tokens_have_an_empty_span():
    ours = HfTokenizer(toy_tokenizers.llama_like())
    first, *rest = ours.encode_spans("Once")
    assert (first.text, first.start, first.end) == ("<s>", 0, 0)
    assert [(s.text, s.start, s.end) for s in rest] == [(" Once", 0, 4)]


def test_token_text_shows_a_token_as_inside_a_text(both):
    ours, _ = both
    ids = ours.encode("Once upon a time", add_special_tokens=False)
    assert [ours.token_text(i) for i in ids][1:] == [" upon", " a", " time"]
    byte = next(i for i in range(ours.vocab_size) if ours.token_text(i) == "\ufffd")
    assert ours.token_text(byte) == "\ufffd"
    assert ours.token_text(ours.vocab_size + 5) == ""


def test_the_tokenizer_implements_the_interface(both):
    assert isinstance(both[0], Tokenizer)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "ok \ud83d\ude00"])
def test_a_lone_surrogate_is_the_clients_mistake(both, text):
    for method in (both[0].encode, both[0].encode_spans):
        with pytest.raises(InvalidRequest) as caught:
            method(text)
        assert [v.field for v in caught.value.violations] == ["text"]
        assert "surrogate" in str(caught.value)
        assert "a\udfffb" not in str(caught.value)


def test_a_character_without_a_token_is_the_clients_mistake():
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    ours = HfTokenizer(Backend(models.WordLevel({"a": 0}, unk_token="<unk>")))
    with pytest.raises(InvalidRequest, match="cannot encode"):
        ours.encode("b")


# --- loading --------------------------------------------------------------------------------


def test_no_tokenizer_json_fails_the_spawn_in_one_sentence(tmp_path):
    with pytest.raises(SpawnFailed) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == "Worker spawn failed: the model has no tokenizer.json"
    assert str(tmp_path) in caught.value.log_detail


def save_older(name, directory, model_type, vocab_size):
    """Write a toy tokenizer of GPT-2's kind into the folder as its vocabulary and merges."""
    state = json.loads(toy_tokenizers.ALL[name]().to_str())
    model = state["model"]
    added = {token["content"]: token["id"] for token in state["added_tokens"]}
    (directory / "vocab.json").write_text(json.dumps(added | model["vocab"]))
    (directory / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])))
    config = {"model_type": model_type, "vocab_size": vocab_size}
    (directory / "config.json").write_text(json.dumps(config))


def check_ends(ours, theirs):
    """Check that our tokenizer has the begin and end tokens of transformers' tokenizer."""
    for name in ("bos_token", "eos_token"):
        assert ours.special_tokens.get(name) == getattr(theirs, name)


def check_equal(ours, theirs):
    """Check that our tokenizer has the ids, texts and special tokens of transformers' tokenizer."""
    for text in TEXTS:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == ids_of(theirs, text, add)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    check_ends(ours, theirs)
    assert ours.special_ids == set(theirs.all_special_ids)


def test_a_vocabulary_with_merges_is_converted_as_in_transformers(tmp_path):
    save_older("byte_level", tmp_path, "gpt2", 600)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "hi"}))
    ours = load_tokenizer(tmp_path)
    check_equal(ours, transformers.AutoTokenizer.from_pretrained(tmp_path))
    assert ours.vocab_size == toy_tokenizers.byte_level().get_vocab_size()
    assert ours.encode("Once upon a time") == tuple(
        toy_tokenizers.byte_level().encode("Once upon a time").ids
    )
    assert ours.render_chat(MESSAGES) == "hi"


def test_a_sentencepiece_model_is_converted_as_in_transformers(tmp_path):
    import sentencepiece

    texts = iter([text for text in toy_tokenizers.TEXTS for _ in range(3)])
    with (tmp_path / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=texts, model_writer=file, model_type="bpe", vocab_size=450,
            byte_fallback=True, minloglevel=2,
        )  # fmt: skip
    config = {"model_type": "llama", "vocab_size": 450}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = load_tokenizer(tmp_path)
    check_equal(ours, transformers.AutoTokenizer.from_pretrained(tmp_path))
    assert ours.vocab_size == 450
    assert ours.decode(ours.encode("Once upon a time 🌶")) == "Once upon a time 🌶"


def test_a_sentencepiece_model_without_the_package_names_it(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    monkeypatch.setattr("engine.worker.tokenizing.tokenizer.find_spec", lambda name: None)
    with pytest.raises(SpawnFailed) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == (
        "Worker spawn failed: the model has tokenizer.model instead of tokenizer.json, which "
        "cannot be converted here; pip install 'triolet[sentencepiece]'"
    )


CONVERT = (
    "Worker spawn failed: the model has vocab.json and merges.txt instead of tokenizer.json, which "
    "cannot be converted here; where transformers can, AutoTokenizer's save_pretrained writes "
    "tokenizer.json"
)


def test_files_of_a_class_that_does_not_know_them_are_refused(tmp_path):
    """transformers' LlamaTokenizer would make a tokenizer of three tokens from such files."""
    save_older("byte_level", tmp_path, "llama", 600)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(SpawnFailed) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == CONVERT


def test_code_of_the_checkpoint_is_not_run_to_convert_a_tokenizer(tmp_path):
    save_older("byte_level", tmp_path, "gpt2", 600)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(SpawnFailed) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == CONVERT
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_fails_the_spawn(directory, name):
    (directory / name).write_text("{")
    with pytest.raises(SpawnFailed, match=name.replace(".", r"\.")) as caught:
        load_tokenizer(str(directory))
    assert str(directory) not in str(caught.value)


def test_truncation_and_padding_in_tokenizer_json_are_off(tmp_path):
    toy_tokenizers.save("byte_level", tmp_path)
    backend = load_tokenizer(tmp_path).backend
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=50, pad_token="<|endoftext|>")
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("Once upon a time")) == 4


def test_special_tokens_map_counts_where_the_config_lists_no_added_tokens(directory):
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert load_tokenizer(directory).special_tokens["eos_token"] == "<|endoftext|>"
    config["added_tokens_decoder"] = {}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(directory).special_tokens["eos_token"] == "<|im_end|>"


def added_fields(token):
    """Return the fields of an added token that matter."""
    names = ("content", "special", "lstrip", "rstrip", "single_word", "normalized")
    return {name: getattr(token, name) for name in names}


def test_tokens_that_only_the_config_names_are_added_as_transformers_does(directory):
    config = json.loads((directory / "tokenizer_config.json").read_text())
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    backend = toy_tokenizers.qwen_like()
    config["added_tokens_decoder"] = {
        **{str(i): added_fields(t) for i, t in backend.get_added_tokens_decoder().items()},
        "493": {"content": "<tool>", "special": False, **flags},
        "494": {"content": "<|call|>", "special": True, **flags},
    }
    config["pad_token"] = "<|pad|>"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text('{"model_type": "qwen2"}')
    ours = load_tokenizer(directory)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    text = "a<tool>b<|call|>c<|pad|>"
    ids = ours.encode(text)
    assert ids == ids_of(theirs, text, True)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a<tool>bc"


def test_neither_loading_nor_a_chat_imports_torch_or_transformers(directory):
    code = (
        "from engine.worker.tokenizing.tokenizer import load_tokenizer;"
        f"made = load_tokenizer({str(directory)!r}); made.encode('hi');"
        "made.render_chat([{'role': 'user', 'content': 'hi'}])"
    )
    assert not {"torch", "transformers", "grpc", "asyncio"} & imported_by(code)


# --- chat -----------------------------------------------------------------------------------

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>&\n", "name": None},
]


def write_template(directory, template):
    """Write a chat template into a model's folder, and return its tokenizer."""
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return load_tokenizer(directory)


def test_a_chat_renders_as_in_transformers(directory):
    (directory / "config.json").write_text('{"model_type": "qwen2"}')
    ours = load_tokenizer(directory)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    for add in (True, False):
        text = ours.render_chat(MESSAGES, add_generation_prompt=add)
        assert text == theirs.apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=add
        )
        encoded = theirs.apply_chat_template(MESSAGES, add_generation_prompt=add)
        assert ours.encode(text, add_special_tokens=False) == tuple(encoded["input_ids"])


@pytest.mark.parametrize("begun", ["Once", "Once upon ", "hi", "a\n\nb  "])
def test_a_final_message_is_left_open_as_in_transformers(directory, begun):
    (directory / "config.json").write_text('{"model_type": "qwen2"}')
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = load_tokenizer(directory).render_chat(messages, **options)
    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
    assert text.endswith(begun)


@pytest.mark.parametrize(
    "template", ["fixed", "{{ messages[-1].content * 2 }}", "{{ messages[-1].content | upper }}"]
)
def test_a_template_that_changes_the_final_message_is_refused_by_name(directory, template):
    ours = write_template(directory, template)
    with pytest.raises(InvalidRequest, match="template changes the last message") as caught:
        ours.render_chat(
            [{"role": "assistant", "content": "abc"}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
    assert [one.field for one in caught.value.violations] == ["chat.continue_final_message"]


@pytest.mark.parametrize("name", ["the shipped model", "llama", "gemma3_text"])
def test_a_checkpoints_tokens_and_chats_are_those_of_transformers(name, tmp_path):
    directory = DEMO
    if name != "the shipped model":
        directory = tmp_path
        write_tokenizer(directory, 512)
        (directory / "config.json").write_text(json.dumps({"model_type": name}))
    ours = load_tokenizer(directory)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == ids_of(theirs, text, True)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    for add in (True, False):
        assert ours.render_chat(MESSAGES, add_generation_prompt=add) == theirs.apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=add
        )


class Colour(str):
    """A subclass of str with methods of its own."""

    name = "RED"

    def __str__(self):
        return "another text"


@dataclass
class Place:
    """A dataclass, of which templates may see the fields."""

    city: str
    at: tuple


# Templates that use what transformers offers, and the values that programs give to templates.
TEMPLATES = {
    "a scope of its own": "{% set a = 1 %}"
    "{% generation %}{% set a = 2 %}{% endgeneration %}{{ a }}",
    "JSON": "{{ x | tojson }}{{ x | tojson(indent=2) }}{{ x | tojson(ensure_ascii=true, "
    "sort_keys=true, separators=(',', ':')) }}",
    "a namespace": "{% set n = namespace(self=1, b='x') %}{% set n.b = n.b ~ 2 %}"
    "{{ n.b }}{{ n.self }}",
    "a hidden name in a namespace": "{% set n = namespace(_a=1) %}{{ n._a }}",
    "a hidden name set in a namespace": "{% set n = namespace() %}{% set n.__a = 1 %}",
    "a dict": "{{ dict(a=1) }}{{ dict.fromkeys(['a'], 2) }}",
    "the class of a dict": "{{ dict.mro() }}",
    "a changed list": "{{ messages.append(1) }}",
    "an attribute of Python": "{{ messages.__class__.__mro__ }}",
    "a format that reads attributes": "{{ '{0.__class__}'.format(x) }}",
    "blocks and blanks": "  {% if true %}\n  a\n  {%- endif %}\n b",
    "loops": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}"
    "{{ m.role }}{% endfor %}",
    "its own error": "{{ raise_exception('no ' ~ messages[0].role) }}",
    "the year": "{{ strftime_now('%Y') }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }};{% endfor %}",
    "what is not there": "{{ nothing }}{{ nothing is defined }}{{ tools is none }}{{ documents }}",
    "an unknown filter": "{{ 1 | nothing }}",
    "objects": "{{ x }}{{ x.colour.upper() }}{{ x.colour.name }}{{ x.place.city }}{{ x.many }}",
    "HTML": "{{ '<b>&' }}{{ ('<b>' | e) ~ '&' }}",
}
SEEN = {
    "colour": Colour("red"),
    "place": Place("Łódź", (1, 2.5)),
    "many": [np.int64(3), np.float32(0.5), np.bool_(False), Path("a"), True, None],
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_can_do_what_it_can_in_transformers(template):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho", "reasoning": "hm"},
        {"role": "assistant", "content": "Ho", "thinking": "a", "reasoning_content": "b"},
    ]
    ours = HfTokenizer(toy_tokenizers.qwen_like(), chat_templates={"default": template})
    theirs, error = "", None
    try:
        [[theirs], _] = render_jinja_template(
            conversations=[messages], chat_template=template, add_generation_prompt=True, x=SEEN
        )
    except Exception as raised:
        error = raised
    if error is None:
        assert ours.render_chat(messages, template_args={"x": SEEN}) == theirs
        return
    with pytest.raises(InvalidRequest) as refused:
        ours.render_chat(messages, template_args={"x": SEEN})
    cause = refused.value.__cause__
    assert type(cause) is type(error)
    if type(cause) is TemplateError:  # the message is the template's own text
        assert str(cause) == str(error)


@pytest.mark.parametrize("documents", [["a"], 5])
def test_documents_that_are_none_are_refused_as_in_transformers(documents):
    ours = HfTokenizer(toy_tokenizers.qwen_like(), chat_templates={"default": "ok"})
    with pytest.raises(InvalidRequest) as refused:
        ours.render_chat(MESSAGES, template_args={"documents": documents})
    assert isinstance(refused.value.__cause__, TypeError)


def test_a_template_gets_tools_arguments_and_special_tokens_but_no_none(directory):
    template = (
        "{{ eos_token }}|{{ tools[0].name if tools else 'none' }}|{{ enable_thinking }}|"
        "{{ 'name' in messages[1] }}|{{ {'a': '<é>'} | tojson }}"
    )
    ours = write_template(directory, template)
    args = {"enable_thinking": False}
    text = ours.render_chat(MESSAGES, tools=[{"name": "add"}], template_args=args)
    assert text == '<|im_end|>|add|False|False|{"a": "<é>"}'
    assert ours.render_chat(MESSAGES).split("|")[-3:-1] == ["", "False"]


def test_template_files_win_over_the_config_and_tools_choose_theirs(directory):
    ours = write_template(directory, "file")
    assert ours.render_chat(MESSAGES) == "file"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].name }}")
    ours = load_tokenizer(directory)
    assert ours.render_chat(MESSAGES) == "file"
    assert ours.render_chat(MESSAGES, tools=[{"name": "x"}]) == "x"


@pytest.mark.parametrize(
    "template",
    ["hello", "You have tools. {# tools #}", "{{ messages[0].tool_calls }} tools {{ 1 }}"],
)
def test_tools_for_a_template_that_would_drop_them_are_refused_by_name(directory, template):
    ours = write_template(directory, template)
    assert ours.render_chat(MESSAGES)
    with pytest.raises(InvalidRequest, match="this model's chat template has no tools") as caught:
        ours.render_chat(MESSAGES, tools=[WEATHER])
    assert [violation.field for violation in caught.value.violations] == ["chat.tools"]


def test_a_list_of_templates_in_the_config(directory):
    config = {"chat_template": [{"name": "tool_use", "template": "t"}]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match="no default"):
        load_tokenizer(directory).render_chat(MESSAGES)
    config["chat_template"].append({"name": "default", "template": "d"})
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(directory).render_chat(MESSAGES) == "d"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ raise_exception('x' * 999) }}", "x" * 200),
        ("{{ messages[5].content }}", ""),
        ("{{ messages.append(1) }}", ""),
        ("{{ ''.__class__.__mro__ }}", ""),
        ("{{ 1 / 0 }}", ""),
    ],
)
def test_a_template_that_refuses_is_the_clients_mistake(directory, template, told):
    with pytest.raises(InvalidRequest) as caught:
        write_template(directory, template).render_chat(MESSAGES)
    expected = "the model's chat template refused the chat" + (f": {told}" if told else "")
    assert [(v.field, v.description) for v in caught.value.violations] == [("chat", expected)]
    assert caught.value.log_detail


BROKEN_TEMPLATE = "{% for message in messages %}\n{{ message.content }}\n{% if %}{% endfor %}"


def test_a_template_with_a_syntax_error_fails_the_spawn_with_file_and_line(directory):
    with pytest.raises(SpawnFailed) as caught:
        write_template(directory, BROKEN_TEMPLATE)
    assert str(caught.value) == (
        "Worker spawn failed: the model's chat template in chat_template.jinja is wrong at line 3 "
        "of the template: Expected an expression, got 'end of statement block'"
    )
    (directory / "chat_template.jinja").unlink()
    config = {"chat_template": [{"name": "default", "template": BROKEN_TEMPLATE}]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(SpawnFailed, match=r"in tokenizer_config\.json is wrong at line 3"):
        load_tokenizer(directory)


def test_the_tags_that_transformers_knows_are_no_syntax_errors(directory):
    template = (
        "{% for message in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
    )
    assert write_template(directory, template).render_chat(MESSAGES) == "Be brief."


def test_a_chat_that_cannot_be_rendered_at_all(directory):
    ours = load_tokenizer(directory)
    with pytest.raises(InvalidRequest, match="at least one message"):
        ours.render_chat([])
    for name in ("messages", "self", "add_generation_prompt"):
        with pytest.raises(InvalidRequest) as caught:
            ours.render_chat(MESSAGES, template_args={name: [], "x": 1})
        [violation] = caught.value.violations
        assert violation == FieldViolation("chat.template_args", f"cannot set {name}")
    plain = HfTokenizer(toy_tokenizers.byte_level())
    assert plain.chat_template(has_tools=True) == ""
    with pytest.raises(InvalidRequest, match="chat: this model has no chat template"):
        plain.render_chat(MESSAGES)


# --- threads --------------------------------------------------------------------------------


def test_many_threads_share_one_tokenizer(both):
    ours, _ = both
    texts = [t for t in TEXTS if t] * 3

    def work(text):
        ids = ours.encode(text)
        state = TextState(ours, Stops(max_tokens=len(ids), skip_special=False), ())
        return ids, ours.decode(ids), "".join(state.push(i).text for i in ids)

    alone = [work(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert list(pool.map(work, texts)) == alone


# --- tools, and bounds ----------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
WITH_CALLS = [
    {"role": "user", "content": "Rain?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "abc123def",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Łódź"}},
            }
        ],
    },
    {"role": "tool", "content": "yes", "tool_call_id": "abc123def", "name": "weather"},
]
TOOL_TEMPLATE = (
    "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif -%}"
    "{%- for document in documents or [] %}[{{ document.title }}]{% endfor -%}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{{ message.tool_call_id }}<|im_end|>\n{% endfor -%}"
)


def test_tools_calls_and_documents_reach_the_template_as_in_transformers(directory):
    ours = write_template(directory, TOOL_TEMPLATE)
    (directory / "config.json").write_text('{"model_type": "qwen2"}')
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    documents = [{"title": "Rain", "text": "wet"}]
    text = ours.render_chat(WITH_CALLS, tools=[WEATHER], template_args={"documents": documents})
    assert text == theirs.apply_chat_template(
        WITH_CALLS, tools=[WEATHER], documents=documents, tokenize=False, add_generation_prompt=True
    )
    assert '{"name": "weather", "arguments": {"city": "Łódź"}}' in text
    assert text.startswith('{"type": "function"')
    assert "[Rain]" in text
    assert ours.chat_template(has_tools=True) == TOOL_TEMPLATE


LOOPS = "{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% set x = range(100000) %}" + LOOPS,
        "{% macro f(n) %}{% for i in range(99999) %}{{ f(n) }}{% endfor %}{% endmacro %}"
        "{% set x = range(99999) | list %}" + LOOPS,
    ],
)
def test_an_endless_template_is_ended(directory, template, monkeypatch):
    monkeypatch.setattr("engine.worker.tokenizing.templates.SECONDS_MAX", 0.2)
    with pytest.raises(InvalidRequest, match=r"chat: takes .* longer than 0\.2 s"):
        write_template(directory, template).render_chat(MESSAGES)
    assert write_template(directory, "ok").render_chat(MESSAGES) == "ok"


def test_a_template_writes_no_more_than_it_may(directory, monkeypatch):
    monkeypatch.setattr("engine.worker.tokenizing.templates.CHARS_MAX", 1000)
    template = "{% for i in range(1001) %}x{% endfor %}"
    with pytest.raises(RequestTooLarge, match="becomes 1001 characters, of at most 1000"):
        write_template(directory, template).render_chat(MESSAGES)


def test_a_marker_that_is_a_special_token_is_found_and_can_be_shown():
    backend = toy_tokenizers.qwen_like()
    copy = type(backend).from_str(backend.to_str())
    copy.add_special_tokens(["[TOOL_CALLS]"])
    ours = HfTokenizer(copy)
    shown = ours.special_ids_of(["[TOOL_CALLS]", "<think>", "[ARGS]"])
    [marker] = shown
    ids = (*ours.encode("a[TOOL_CALLS]b"), ours.encode("<|im_end|>")[0])

    def said(**stops):
        state = TextState(ours, Stops(max_tokens=len(ids), **stops), ())
        return "".join(state.push(i).text for i in ids)

    assert marker in ids
    assert said() == "ab"
    assert said(shown=shown) == "a[TOOL_CALLS]b"
    assert said(skip_special=False) == "a[TOOL_CALLS]b<|im_end|>"


# ---- pairs of an encoder


def pairs_of(backend, max_tokens):
    """Return a tokenizer for the pairs of a cross-encoder."""
    return InputTokenizer(backend, max_tokens=max_tokens, prompts={}, special_ids=frozenset())


@pytest.mark.parametrize("make", [toy_tokenizers.byte_level, toy_tokenizers.qwen_like])
@pytest.mark.parametrize("max_tokens", [7, 8])
def test_a_long_query_is_cut_as_if_each_pair_had_all_of_it(make, max_tokens):
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(make().to_str())
    documents = ["", "a", "the dog", "é🌶 " * 3, "the dog and " * 6, "fish " * 300, "🌶" * 40]
    pairs = pairs_of(backend, max_tokens)
    for query in ["dog", "the old dog " * 4, "the old dog " * 40, "🌶é" * 60, "a" * 200]:
        found = pairs.encode_pairs(query, documents)
        backend.no_truncation()
        whole = [len(backend.encode(query, document).ids) for document in documents]
        backend.enable_truncation(max_tokens, strategy="longest_first")
        cut = [tuple(backend.encode(query, document).ids) for document in documents]
        assert [one.input.token_ids for one in found] == cut
        for one, full in zip(found, whole, strict=True):
            assert abs(one.full_tokens - full) < 4  # a query may be cut inside a character
            assert (one.full_tokens > max_tokens) == (full > max_tokens)


def test_a_long_query_costs_each_document_little():
    pairs = pairs_of(toy_tokenizers.byte_level(), 32)

    def seconds(count):
        start = time.process_time()
        pairs.encode_pairs("! " * 100_000, ["a"] * count)
        return time.process_time() - start

    seconds(1)
    assert seconds(200) < 20 * seconds(1)
