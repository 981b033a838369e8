"""Calls in every dialect are read as they were written, whatever tokens a tokenizer makes of them.

The text comes as a server's detokenizer returns it, token by token, and in two pieces that are cut
after each token. tests/property/test_dialects.py cuts the same turns at every character.
"""

import json

import pytest

from engine.core.text.types import Stops
from engine.worker.tokenizing.detokenizer import TextState
from engine.worker.tokenizing.tokenizer import HfTokenizer
from tests.property.test_dialects import EVERY, form_of, parse, said_of
from tests.support import toy_tokenizers
from tests.support.dialect_turns import FAMILIES, draw
from tests.support.grammar_walks import MARKERS, tokenizer_with

TOKENIZERS = {
    "bytes": lambda: HfTokenizer(toy_tokenizers.byte_level()),
    "bytes, markers are tokens": lambda: tokenizer_with(MARKERS),
    "words, markers are tokens": lambda: tokenizer_with(MARKERS, toy_tokenizers.qwen_like),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    """Return a tokenizer of a common kind."""
    return TOKENIZERS[request.param]()


def pieces_of(tokenizer, text):
    """Return a text in the pieces in which the detokenizer returns its tokens."""
    tokens = tokenizer.encode(f"a{text}", add_special_tokens=False)
    stops = Stops(max_tokens=len(tokens), skip_special=False)
    state = TextState(tokenizer, stops, ())
    first, *pieces = [state.push(token).text for token in tokens]
    return [first.lstrip().removeprefix("a"), *pieces]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "as generated"])
@pytest.mark.parametrize("name", FAMILIES)
def test_drawn_calls_are_read_from_a_tokenizers_tokens(tokenizer, name, streams):
    family = FAMILIES[name]
    for seed in EVERY:
        functions, turn = draw(family, seed)
        written = family.write(turn)
        pieces = pieces_of(tokenizer, written)
        assert "".join(pieces) == written, seed
        form = form_of(family, functions, streams=streams)
        text, reasoning, calls = answer = parse(form, pieces)
        assert (text, reasoning) == said_of(turn), (seed, pieces)
        found = [(called, json.loads(arguments)) for called, arguments in calls]
        assert found == turn.calls, (seed, pieces)
        for at in range(1, len(pieces)):
            halves = ["".join(pieces[:at]), "".join(pieces[at:])]
            assert parse(form, halves) == answer, (seed, halves)
