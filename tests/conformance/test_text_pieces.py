"""The tokens of a text's pieces, joined, are the tokens of the whole text (`TextDivider`).

No library divides texts, so that pieces are compared with our own tokens of the whole text.
"""

from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

import engine
from engine.worker.tokenizing import text_pieces
from engine.worker.tokenizing.text_pieces import TextDivider
from engine.worker.tokenizing.tokenizer import HfTokenizer
from tests.checkpoints.encode import words_tokenizer
from tests.support import toy_tokenizers

DEMO = Path(engine.__file__).parent / "demo"
SIZE = 48  # characters of a piece, in place of `PIECE_CHARS`
CONTEXT = 12
SCRAPS = [
    *toy_tokenizers.TEXTS,
    *("\n\n", "  ", "   \n", "\t", "a\r\nb ", "don't ", "e.g. ", "x_y z", "123 456 "),
    *('{"a":1,"b":[2,3]}', "foo(bar)\n", "中文，标点。没有", "e\u0301 ", "\ufb01n ", "<s>"),
    *("<|endoftext|>", "<|im_start|>user\n", "<think>", "<mask> ", "the dog ran ", "aaaa"),
]


def from_legacy() -> Tokenizer:
    """Return Llama 2's kind of tokenizer, as in its older files: a normalizer writes the spaces."""
    made = Tokenizer.from_str(toy_tokenizers.llama_like().to_str())
    made.pre_tokenizer = None
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return made


def of_unigrams(*, splits: bool) -> Tokenizer:
    """Return a tokenizer that can split a word in several ways of equal probability."""
    pieces = ["\u2581", "a", "aa", "the", "\u2581the", "dog", "\u2581dog", *"hedogrn,."]
    made = Tokenizer(models.Unigram([("<unk>", -9.0), *((one, -1.0) for one in pieces)], 0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(split=splits)
    return made


def with_wide_tokens() -> Tokenizer:
    """Return a byte-level tokenizer with tokens of several words."""
    made = Tokenizer.from_str(toy_tokenizers.byte_level().to_str())
    model = models.BPE(
        {
            one: at
            for at, one in enumerate([*pre_tokenizers.ByteLevel.alphabet(), "e\u0120", "e\u0120d"])
        },
        [("e", "\u0120"), ("e\u0120", "d")],
    )
    made.model = model
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return made


def with_greedy_mask() -> Tokenizer:
    """Return a tokenizer with a special token that includes the spaces beside it."""
    made = Tokenizer.from_str(toy_tokenizers.byte_level().to_str())
    made.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return made


def with_inner_end() -> Tokenizer:
    """Return a tokenizer that writes special tokens on both sides of a text."""
    made = Tokenizer.from_str(toy_tokenizers.byte_level().to_str())
    made.add_special_tokens(["<s>", "</s>"])
    ids = [(one, made.token_to_id(one)) for one in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s> <s>", pair="<s> $A $B </s>", special_tokens=ids
    )
    return made


KINDS = {
    **toy_tokenizers.ALL,
    "llama_legacy": from_legacy,
    "words": lambda: words_tokenizer(600),
    "unigrams": lambda: of_unigrams(splits=True),
    "a greedy mask": with_greedy_mask,
    "special tokens on both sides": with_inner_end,
    "wide tokens": with_wide_tokens,
    "unigrams in one unit": lambda: of_unigrams(splits=False),
    **{
        f"demo {name}": lambda name=name: Tokenizer.from_file(str(DEMO / name / "tokenizer.json"))
        for name in ("stories", "embed", "clip", "see")
    },
}
NEVER = {"unigrams in one unit"}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(text_pieces, "PIECE_CHARS", SIZE)
    monkeypatch.setattr(text_pieces, "LOOK_CHARS", 8)
    monkeypatch.setattr(text_pieces, "CONTEXT_CHARS", CONTEXT)


def made(jobs):
    return [one for job in jobs for one in job()]


def differences(tokenizer, text):
    """Return which of ids and spans differ between a text and its pieces."""
    found = []
    for adds in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=adds)
        spans = tokenizer.encode_spans(text, add_special_tokens=adds)
        if made(tokenizer.encode_jobs(text, add_special_tokens=adds)) != list(ids):
            found.append("ids")
        if made(tokenizer.span_jobs(text, add_special_tokens=adds)) != list(spans):
            found.append("spans")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_tokens_of_the_text(kind):
    tokenizer = HfTokenizer(KINDS[kind]())
    count = 0

    @settings(max_examples=60)
    @given(st.lists(st.sampled_from(SCRAPS), min_size=1, max_size=30).map("".join))
    def check(text):
        nonlocal count
        assert not differences(tokenizer, text)
        count += len(tokenizer._divider.divide(text)) - 1

    check()
    assert (count == 0) == (kind in NEVER)


@pytest.mark.parametrize("kind", ["llama_legacy", "wide tokens", "a greedy mask", "byte_level"])
def test_places_that_are_not_compared_give_other_tokens(kind, monkeypatch):
    """Without Rule 2 of `text_pieces`, some text has other tokens in pieces than as a whole."""
    tokenizer = HfTokenizer(KINDS[kind]())
    monkeypatch.setattr(TextDivider, "_is_place", lambda *_, **__: True)
    monkeypatch.setattr(text_pieces, "_starts_within", lambda *_: set())  # switches off Rule 1, too
    monkeypatch.setattr(text_pieces, "WORD", ".")
    texts = ["<mask> the dog " * 9, "the dog  ran,  " * 9, "the dog\n\nran " * 9]
    assert any(differences(tokenizer, text) for text in texts)


def test_a_token_over_a_place_is_seen_in_the_vocabulary(monkeypatch):
    """Rule 1 finds long tokens over a place: Rule 2 compares too little text to see their ends."""
    monkeypatch.setattr(text_pieces, "CONTEXT_CHARS", 1)
    tokenizer = HfTokenizer(with_wide_tokens())
    text = "the dog the day the dot " * 20
    assert not differences(tokenizer, text)
    pieces = tokenizer._divider.divide(text)
    assert len(pieces) == 1 or all(piece.text[0] != " " for piece in pieces)


def test_a_text_without_places_is_one_piece(monkeypatch):
    monkeypatch.setattr(text_pieces, "FAR_CHARS", 200)
    divider = HfTokenizer(toy_tokenizers.byte_level())._divider
    pieces = divider.divide("the dog " * 20 + "a" * 2000 + " the dog" * 20)
    assert sum(len(one.text) > SIZE for one in pieces) == 1
    assert len(pieces) > 2


def test_places_of_a_kind_that_never_holds_do_not_hide_others():
    """Tokenizers of Llama 2's kind write a space before each text, so that they can divide it only
    at spaces. Red if a table with many commas makes the divider give up on the spaces behind it."""
    divider = HfTokenizer(from_legacy())._divider
    text = "1,2,3,4,5,6,7,8,9,10," * 100 + "the dog " * 100 + "1,2,3," * 3
    assert len(divider.divide(text)) > 10


@pytest.mark.parametrize("kind", ["byte_level", "llama_like", "demo stories"])
def test_a_long_text_of_words_has_no_piece_that_is_too_long(kind, monkeypatch):
    monkeypatch.undo()
    divider = HfTokenizer(KINDS[kind]())._divider
    text = "the dog ran to the sea, and " * 10_000
    pieces = divider.divide(text)
    assert max(len(one.text) for one in pieces) <= text_pieces.PIECE_CHARS
    assert len(pieces) <= 2 * len(text) / text_pieces.PIECE_CHARS
