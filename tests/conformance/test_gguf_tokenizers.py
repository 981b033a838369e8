"""Tokenizers of GGUF files give llama.cpp's tokens and end where llama.cpp does.

llama_cpp_tokens.json has llama.cpp's tokens for drawn texts and vocabularies
(`tests.support.llama_cpp_tokens` writes it), so that the tests do not need llama.cpp.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from engine.errors import SpawnFailed
from engine.worker.load.gguf.vocabulary import read_vocabulary
from engine.worker.load.refusal import Refusal
from engine.worker.tokenizing import text_pieces
from engine.worker.tokenizing.gguf_splits import SPLITS
from engine.worker.tokenizing.gguf_tokenizer import build_tokenizer, write_tokenizer_config
from engine.worker.tokenizing.tokenizer import load_tokenizer
from tests.support.gguf_vocabularies import (
    MARKERS,
    NORMAL,
    PRE_TOKENIZERS,
    TEXTS,
    USER_DEFINED,
    byte_level,
    cases,
    digest,
    draw_texts,
)

WANTED = json.loads(Path(__file__).with_name("llama_cpp_tokens.json").read_text())
DIGITS = 6  # hexadecimal digits of a digest


@pytest.fixture(scope="module")
def drawn():
    return cases()


@pytest.fixture
def load(tmp_path):
    """Return a function that makes a tokenizer of a file's metadata, as a load does."""

    def load(fields):
        vocabulary = read_vocabulary(fields)
        write_tokenizer_config(vocabulary, tmp_path)
        return load_tokenizer(tmp_path, build_tokenizer(vocabulary))

    return load


def test_every_name_is_compared():
    assert set(SPLITS) == set(PRE_TOKENIZERS)
    assert {f"pre {name}".rstrip() for name in SPLITS} <= set(WANTED)
    found = [WANTED[f"pre {name}".rstrip()]["tokens"] for name in SPLITS]
    assert all(len(tokens) == DIGITS * TEXTS for tokens in found)
    assert len(set(found)) == len(set(SPLITS.values()))  # each way to split gives other tokens


@pytest.mark.parametrize("name", WANTED)
def test_tokens_and_ends_are_those_of_llama_cpp(drawn, load, name):
    fields, texts = drawn[name]
    wanted = WANTED[name]
    assert sorted(read_vocabulary(fields).ends) == wanted["ends"]
    tokenizer = load(fields)
    starts = range(0, len(wanted["tokens"]), DIGITS)
    other = [
        (text, [tokenizer.token_text(one) for one in tokenizer.encode(text)])
        for text, start in zip(texts, starts, strict=True)
        if digest(tokenizer.encode(text)) != wanted["tokens"][start : start + DIGITS]
    ]
    assert not other, f"{len(other)} of {len(texts)} texts differ, such as {other[0]}"


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_pieces_of_a_long_text_have_its_tokens(drawn, load, monkeypatch, pre):
    monkeypatch.setattr(text_pieces, "PIECE_CHARS", 64)
    monkeypatch.setattr(text_pieces, "LOOK_CHARS", 16)
    fields, texts = drawn[f"pre {pre}".rstrip()]
    tokenizer = load(fields)
    text = "".join(f"{one} key:value}}more " for one in texts[:40])
    jobs = tokenizer.encode_jobs(text)
    assert [one for job in jobs for one in job()] == list(tokenizer.encode(text))
    assert len(jobs) > 20


# Here llama.cpp's expressions differ from those that the models were trained with: llama.cpp would
# not split "éC", splits Hindi at vowel signs, and takes U+3000 for no letter.
@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        (pre, *case)
        for pre in ("tekken", "gpt-4o")
        for case in (
            ("aéCole", ["aé", "Cole"]),
            ("ÉCOLEs", ["ÉCOLEs"]),
            ("हिन्दी दिन", ["हिन्दी", " दिन"]),
            ("приветМир", ["привет", "Мир"]),
        )
    ]
    + [("deepseek-coder", "\u3000\u00ad", ["\u3000", "\u00ad"])],
)
def test_where_llama_cpp_differs_from_training_text_is_split_as_in_training(
    load, pre, text, pieces
):
    backend = load(byte_level(pre, ("a",))).backend
    found = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == pieces


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "deepseek-llm", ""])
def test_a_marker_is_one_id_of_the_file_and_comes_back_as_it_is(load, pre):
    """Markers may have a space, or letters that stand for no byte, such as DeepSeek's."""
    texts = draw_texts(1)
    fields = byte_level(pre, texts)
    tokens = fields["tokenizer.ggml.tokens"]
    tokenizer = load(fields)
    assert tokenizer.vocab_size == len(tokens)
    ends = ("<|eot_id|>", "<｜end▁of▁sentence｜>", "<|fim_prefix|>")  # plain tokens in the file
    for marker in [*ends, *(text for text, kind in MARKERS.items() if kind != NORMAL)]:
        ids = tokenizer.encode(f"a{marker}b", add_special_tokens=False)
        assert ids == tuple(map(tokens.index, ("a", marker, "b")))
        assert tokenizer.decode(ids, skip_special_tokens=False) == f"a{marker}b"
        assert (marker in tokenizer.decode(ids)) == (
            MARKERS[marker] == USER_DEFINED and marker != "<|im_end|>"
        )
    assert len(tokenizer.encode("<|plain|>", add_special_tokens=False)) > 1
    for text in texts:
        ids = tokenizer.encode(text)[SPLITS[pre].adds_bos :]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_name_that_is_not_known_is_refused(load):
    with pytest.raises(SpawnFailed, match=r"pre-tokenizer .* is 'next-gen', which is not known"):
        load(byte_level("next-gen", ("a",)))


def test_a_file_without_a_name_is_warned_of(load, caplog):
    load(byte_level("", ("a",)))
    assert "names no pre-tokenizer (tokenizer.ggml.pre)" in caplog.text


def test_a_plain_token_that_is_named_for_padding_stays_plain(load):
    fields = byte_level("qwen2", ("a",))
    index = fields["tokenizer.ggml.tokens"].index("!")
    tokenizer = load(fields | {"tokenizer.ggml.padding_token_id": index})
    assert tokenizer.decode(tokenizer.encode("hi!")) == "hi!"


def test_an_id_outside_the_vocabulary_names_no_token():
    """Old files have such an id for padding, which llama.cpp ignores."""
    fields = byte_level("qwen2", ("a",)) | {"tokenizer.ggml.padding_token_id": 2**32 - 1}
    assert "pad_token" not in read_vocabulary(fields).special_tokens


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tokens": ["a", "b", "a"]}, "tokens 0 and 2 have the same text, 'a'"),
        ({"token_type": [1]}, "token_type does not have a number for each of"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"bos_token_id": 10**6}, r"begins with a token, .*\(tokenizer.ggml.bos_token_id\)"),
        ({"merges": ["a bb"]}, "a tokenizer that cannot be built"),
    ],
)
def test_what_does_not_fit_together_is_named(load, fields, why):
    given = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    with pytest.raises((Refusal, SpawnFailed), match=why):
        load(byte_level("llama-bpe", ("a",)) | given)
