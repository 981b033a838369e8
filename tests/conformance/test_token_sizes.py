"""For each kind of tokenizer, a text's length gives a lower bound on its tokens, or no bound."""

import math
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from engine.worker.tokenizing import token_sizes
from engine.worker.tokenizing.token_sizes import BYTES, max_chars_per_token
from tests.checkpoints.encode import words_tokenizer
from tests.support import toy_tokenizers

COMPOSED = "\u1f82"  # one character of three bytes, whose decomposition has four characters
DECOMPOSED = "\u03b1\u0313\u0300\u0345"
SPACES = "\u2581" * 8


def merged(*tokens):
    """Return a vocabulary with these tokens, and the merges that make each from its halves."""
    vocabulary, merges = dict.fromkeys(BYTES), {}

    def add(token):
        if len(token) > 1:
            halves = token[: len(token) // 2], token[len(token) // 2 :]
            for half in halves:
                add(half)
            merges[halves] = None
        vocabulary[token] = None

    for token in tokens:
        add(token)
    return {text: number for number, text in enumerate(vocabulary)}, list(merges)


def bpe(*tokens, normalizer=None, pre_tokenizer=None, **options):
    """Return a tokenizer with these tokens, and with bytes for all other characters."""
    made = Tokenizer(models.BPE(*merged(*tokens), **{"byte_fallback": True, **options}))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizer or pre_tokenizers.Metaspace(prepend_scheme="never")
    return made


def with_added(**options):
    """Return a tokenizer with an added token with these options."""
    made = bpe("ab")
    made.add_special_tokens([AddedToken("<x>", **options)])
    return made


LIGATURE = "\ufdfa"  # a character whose compatibility form has eighteen


def of_bytes(**options):
    """Return a tokenizer whose tokens are bytes, with these options of BPE."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE({one: number for number, one in enumerate(alphabet)}, [], **options)
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def with_normalized():
    """Return a tokenizer with an added token whose normal form is longer than its text."""
    made = of_bytes()
    made.normalizer = normalizers.NFKC()
    made.add_tokens([AddedToken(LIGATURE, normalized=True)])
    return made


BOUNDED = {
    **toy_tokenizers.ALL,
    "composing": lambda: bpe(COMPOSED * 8, normalizer=normalizers.NFC()),
    "composing widely": lambda: bpe(COMPOSED * 8, normalizer=normalizers.NFKC()),
    "decomposing": lambda: bpe(DECOMPOSED, normalizer=normalizers.NFD()),
    "an added token": with_normalized,
    "replacing": lambda: bpe(SPACES, normalizer=normalizers.Replace(" ", "\u2581")),
    "splitting": lambda: bpe(
        SPACES, pre_tokenizer=pre_tokenizers.Split(Regex(r"\d"), behavior="isolated")
    ),
}
# Tokenizers without a bound, each with a text of fewer tokens than its longest token would suggest.
UNBOUNDED = {
    "words": (lambda: words_tokenizer(600), "a" * 999),
    "unigrams": (lambda: Tokenizer(models.Unigram([("<unk>", 0.0), ("a", 0.0)], 0)), "b" * 99),
    "unknown tokens": (
        lambda: bpe("ab", byte_fallback=False, unk_token="ab", fuse_unk=True),
        "x" * 99,
    ),
    "unknown characters": (lambda: bpe("ab", byte_fallback=False), "ab" + "x" * 99),
    "characters inside words": (lambda: of_bytes(continuing_subword_prefix="##"), "a" * 99),
    "characters that end words": (lambda: of_bytes(end_of_word_suffix="</w>"), " b" * 99),
    "splits that drop": (lambda: bpe("ab", pre_tokenizer=pre_tokenizers.Whitespace()), " " * 99),
    "a pattern that drops": (
        lambda: bpe("ab", pre_tokenizer=pre_tokenizers.Split(" ", behavior="removed")),
        " " * 99,
    ),
    "a normalizer that drops": (lambda: bpe("ab", normalizer=normalizers.Strip()), " " * 99),
    "a pattern that shortens": (
        lambda: bpe("ab", normalizer=normalizers.Replace(Regex("x+"), "x")),
        "x" * 99,
    ),
    "a text that shortens": (
        lambda: bpe("ab", normalizer=normalizers.Replace("xxxxxxxxx", "a")),
        "x" * 99,
    ),
    "spaces before": (lambda: with_added(lstrip=True), "a" + " " * 99 + "<x>"),
    "spaces behind": (lambda: with_added(rstrip=True), "<x>" + " " * 99),
}


def fewest(backend, text):
    """Return the least number of tokens that the bound allows for a text of this length."""
    return math.ceil(len(text) / max_chars_per_token(backend))


def length(backend, text):
    return len(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", sorted(BOUNDED))
def test_no_text_has_fewer_tokens_than_its_length_says(name):
    backend = BOUNDED[name]()
    assert max_chars_per_token(backend) < math.inf
    longest = sorted(backend.get_vocab(), key=len)[-30:]
    decoded = [backend.decode([backend.token_to_id(one)]) for one in longest]
    others = COMPOSED, DECOMPOSED, unicodedata.normalize("NFKC", LIGATURE), " ", "\n"
    found = [one for one in (*decoded, *longest, *others) if one]
    for one in found:
        assert length(backend, one * 30) >= fewest(backend, one * 30), one
    piece = st.one_of(st.sampled_from(found), st.text(max_size=4))
    repeated = st.builds(lambda one, count: one * count, piece, st.integers(1, 30))

    @settings(max_examples=60, deadline=None)
    @given(text=st.lists(repeated, max_size=4).map("".join))
    def check(text):
        assert length(backend, text) >= fewest(backend, text)

    check()


@pytest.mark.parametrize("name", sorted(UNBOUNDED))
def test_a_tokenizer_that_can_drop_or_gather_characters_has_no_bound(name):
    make, text = UNBOUNDED[name]
    backend = make()
    assert length(backend, text) * max(map(len, backend.get_vocab())) < len(text)
    assert max_chars_per_token(backend) == math.inf
    assert fewest(backend, text) == 0


def test_a_wrong_bound_is_found(monkeypatch):
    """A bound that ignores the normalizer would turn the tests above red."""
    monkeypatch.setitem(token_sizes.COMPOSED_CHARS, "NFC", 1)
    backend = BOUNDED["composing"]()
    text = DECOMPOSED * 8
    assert length(backend, text) == 1
    assert fewest(backend, text) > 1
