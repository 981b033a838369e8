"""Tokenizers in which the markers of answers are tokens or texts, and random walks through
grammars, which stand for a model that would rather write anything else.
"""

import random

from tokenizers import AddedToken, Tokenizer

from engine.requests.text.answers.dialects import DIALECTS
from engine.worker.sampling.constraint_compiler import ConstraintCompiler
from engine.worker.tokenizing.tokenizer import HfTokenizer
from tests.support import toy_tokenizers

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>")
MARKERS += ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|start|>", "<|channel|>", "<|message|>")
MARKERS += ("<|end|>", "<|constrain|>", "<|call|>", "[THINK]", "[/THINK]")
MARKERS += tuple(
    marker
    for dialect in DIALECTS
    for marker in dialect.markers
    if marker not in MARKERS and marker[0] + marker[-1] in ("<>", "[]")
)


def tokenizer_with(markers, kind=toy_tokenizers.byte_level):
    """Return a tokenizer of a kind in which these markers are tokens of their own."""
    backend = Tokenizer.from_str(kind().to_str())
    backend.add_special_tokens([AddedToken(one, normalized=False) for one in markers[::2]])
    backend.add_tokens([AddedToken(one, normalized=False) for one in markers[1::2]])
    return HfTokenizer(backend)


def compiler_of(tokenizer):
    """Return a compiler of constraints for such a tokenizer."""
    end = tokenizer.backend.token_to_id("<|endoftext|>")
    return ConstraintCompiler(tokenizer, tokenizer.vocab_size, frozenset({end}))


def walk(matching, seed, begin=()):
    """Return the tokens ``begin``, which the grammar must allow, and random ones until it ends."""
    rng, tokens = random.Random(seed), []
    while True:
        mask = matching.new_mask()
        matching.fill(mask)
        assert not mask.trouble
        allowed = mask.bits(32 * len(mask.words)).nonzero()[0]
        token = begin[len(tokens)] if len(tokens) < len(begin) else int(rng.choice(allowed))
        assert token in allowed
        if token in matching.ends:
            return tokens
        tokens.append(token)
        if matching.push(token):
            return tokens
