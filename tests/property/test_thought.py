"""The reasoning of an answer: counted, bounded and ended, whatever tokens spell it.

The oracle reads the whole text of the answer at once; the code reads it token by token.
"""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.text.thought import Thought
from engine.core.text.types import Reasoning
from engine.requests.text.answers.choice_parser import parser_of
from engine.requests.text.answers.dialects import dialect_named
from engine.requests.text.answers.format import REASONING, AnswerFormat
from engine.requests.text.answers.reasoning import reasoning_of
from tests.support.examples import examples

WORDS = (
    "so",
    " we",
    " see",
    ". ",
    ".\n",
    " 3.",
    "14",
    "!",
    "\n",
    " <",
    "/",
    "漢。",
    "",
    '."',
    " a b",
)
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
IN_CHANNELS = AnswerFormat(
    dialect_named("channels"), {"get": {}}, has_channels=True, opened=f"{START}assistant"
)


class Spelling:
    """Stands for a tokenizer in which these texts are tokens of their own."""

    def __init__(self, texts=()):
        self._texts = list(texts)

    def added_id_of(self, text):
        return self._texts.index(text) if text in self._texts else None

    def encode(self, text, *, add_special_tokens):
        return [len(self._texts)]


CHANNELS = reasoning_of(IN_CHANNELS, "", None, Spelling(), is_enforced=False)


@st.composite
def vocabularies(draw):
    """Return a pair of markers, the texts of the tokens, and the tokens of the closing marker: one
    token, or several that may also be parts of words."""
    pair = draw(st.sampled_from(REASONING))
    texts, closing = list(WORDS), []
    for marker in (pair.opening, pair.closing):
        cuts = sorted(draw(st.sets(st.integers(1, len(marker) - 1), max_size=3)))
        pieces = [marker[a:b] for a, b in zip([0, *cuts], [*cuts, len(marker)], strict=True)]
        if draw(st.booleans()) and marker == pair.opening:
            pieces[-1] += draw(st.sampled_from(["\n", "so"]))
        closing = [*range(len(texts), len(texts) + len(pieces))]
        texts += pieces
    return pair, texts, tuple(closing)


def write(rules, texts, wishes, *, fork_at=None):
    """Write an answer whose model wishes these tokens; return its tokens, how many of them were
    forced, and the state."""
    thought, tokens, num_forced = Thought(rules, texts.__getitem__), [], 0
    # A token may have the end of the opening marker and reasoning behind it: no budget stops that.
    goes_on = re.compile(re.escape(rules.opening[-1:]) + r"\s*\w")
    most = max(rules.tokens_max, rules.opening != "" and any(map(goes_on.search, texts)))
    for number, wish in enumerate(wishes):
        if number == fork_at:
            stale, thought = thought, thought.fork()
            stale.push(0)  # a fork is independent
        token = thought.owed[0] if thought.owed else wish
        num_forced += bool(thought.owed)
        thought.push(token)
        assert rules.budget is None or thought.num_tokens <= most
        tokens.append(token)
    return tokens, num_forced, thought


def is_reasoning_next(pair, rules, text):
    """Return whether the reader of answers takes what follows ``text`` as reasoning."""
    reader = parser_of(AnswerFormat(reasoning=pair, opened=pair.opening if rules.begun else ""))
    reader.feed(text)
    before = reader.feed("Z")
    after = reader.close()
    return (before.reasoning + after.reasoning).endswith("Z")


@given(vocabularies(), st.data())
def test_the_reasoning_never_exceeds_its_budget_and_ends_with_one_marker(vocabulary, data):
    pair, texts, ending = vocabulary
    is_open = data.draw(st.booleans())
    budget = data.draw(st.integers(0, 30))
    begun = pair.opening + "\n" if is_open else ""
    rules = Reasoning(pair.opening, (pair.closing,), begun, budget=budget, ending=ending)
    opening = [] if is_open else [*range(len(WORDS), ending[0])]
    wishes = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=80))
    fork_at = data.draw(st.integers(0, 80))
    tokens, num_forced, thought = write(rules, texts, [*opening, *wishes], fork_at=fork_at)
    assert num_forced <= len(ending)
    if len(wishes) >= rules.tokens_max + len(ending):
        assert not is_reasoning_next(pair, rules, "".join(texts[token] for token in tokens))
    if not thought.owed:
        free, _, _ = write(replace(rules, budget=None), texts, [*opening, *wishes])
        assert num_forced or tokens == free


@given(vocabularies(), st.data())
def test_the_state_agrees_with_the_reader_of_answers_at_every_token(vocabulary, data):
    pair, texts, ending = vocabulary
    rules = Reasoning(pair.opening, (pair.closing,), pair.opening)
    ids = st.integers(0, len(texts) - 1)
    wishes = data.draw(st.lists(ids, max_size=30)) + list(ending)[: data.draw(st.integers(0, 4))]
    wishes += data.draw(st.lists(ids, max_size=5))
    thought, text = Thought(rules, texts.__getitem__), ""
    for wish in wishes:
        count = thought.num_tokens
        thought.push(wish)
        text += texts[wish]
        is_inside = is_reasoning_next(pair, rules, text)
        assert thought.num_tokens == count + 1 if is_inside else thought.num_tokens <= count


@given(vocabularies(), st.data())
def test_the_count_is_that_of_the_tokens_before_the_marker(vocabulary, data):
    pair, texts, ending = vocabulary
    words = data.draw(st.lists(st.integers(0, 7), max_size=40))
    rules = Reasoning(pair.opening, (pair.closing,), begun=pair.opening)
    behind = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=9))
    _, _, thought = write(rules, texts, [*words, *ending, *behind])
    assert thought.num_tokens == len(words)


@pytest.mark.parametrize(
    ("last", "at"),
    [(".", 9), (".\n", 9), ("!", 9), ("\n", 9), ('."', 9), ("漢。", 9), (" 3.", 10), (" so", 10)],
)
def test_a_spent_budget_ends_the_reasoning_with_the_sentence_but_not_within_a_number(last, at):
    texts = [" so", "</think>", last, "14"]
    rules = Reasoning("<think>", ("</think>",), "<think>", budget=8, ending=(1,))
    tokens, _, thought = write(rules, texts, [*[0] * 8, 2, 3, 3, 3])
    assert (tokens.index(1), thought.num_tokens) == (at, at)


@given(st.data())
def test_in_channels_all_reasoning_counts_and_none_begins_behind_a_spent_budget(data):
    texts = [*WORDS, START, "assistant", CHANNEL, "analysis", "final", MESSAGE, END]
    start, assistant, channel, analysis, final, message, end = range(len(WORDS), len(texts))
    budget = data.draw(st.integers(0, 20))
    offers_tools = data.draw(st.booleans())
    ending = (end, start, assistant, channel)
    rules = replace(
        CHANNELS,
        budget=budget,
        ending=ending if offers_tools else (*ending, final, message),
        shunned=frozenset([analysis]) if offers_tools else frozenset(),
    )
    head = [channel, analysis, message]
    wishes = [*head]
    for _ in range(data.draw(st.integers(1, 4))):
        wishes += data.draw(st.lists(st.integers(0, 7), max_size=20))
        wishes += [end, start, assistant, *head]
    thought, tokens = Thought(rules, texts.__getitem__), []
    for wish in wishes:
        token = thought.owed[0] if thought.owed else wish
        if token in thought.shunned:
            assert tokens[-1] == channel
            token = final
        thought.push(token)
        tokens.append(token)
        assert thought.num_tokens <= rules.tokens_max
    count, is_inside = 0, False
    for number, token in enumerate(tokens):
        is_inside = is_inside and token != end
        count += is_inside
        is_inside |= tokens[number - 2 : number + 1] == head
    assert thought.num_tokens == count


FREE = "?"  # a token that no header has
# What may stand in the header of a message, in any order.
CHANNEL_PIECES = [CHANNEL, f"{CHANNEL}analysis", f"{CHANNEL} analysis", f"{CHANNEL}final"]
RECIPIENTS = ["", " to=python", " to=functions.get", " to=functions.other"]
HEADER_PIECES = [*CHANNEL_PIECES, "analysis", "final", " ", "\n"]
HEADER_PIECES += ["<|constrain|>json", f"{START}assistant", f"{CHANNEL}commentary"]
PLACES = [
    (False, False),
    (True, False),
    (False, True),
]  # of a recipient: before the channel, behind


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_in_channels_a_token_counts_if_the_reader_takes_it_as_reasoning(data):
    """Whatever the headers are; each free token has a character of its own, by which it is found
    in the reader's reasoning."""
    pieces = []
    for _ in range(data.draw(st.integers(1, 4))):
        before, inside = data.draw(st.sampled_from(PLACES))
        to = data.draw(st.sampled_from(RECIPIENTS))
        pieces += [f"{START}assistant", to] if before else []
        pieces.append(data.draw(st.sampled_from(CHANNEL_PIECES)))
        pieces += data.draw(st.lists(st.sampled_from(HEADER_PIECES), max_size=2))
        pieces += [to] if inside else []
        pieces += data.draw(st.lists(st.sampled_from(HEADER_PIECES), max_size=2))
        pieces += data.draw(st.sampled_from([[], [MESSAGE], [" json", MESSAGE]]))
        pieces += [FREE] * data.draw(st.integers(1, 3))
        pieces += data.draw(st.sampled_from([[], [END], ["<|call|>"]]))
    texts = [chr(0xE000 + at) if piece == FREE else piece for at, piece in enumerate(pieces)]
    if data.draw(st.booleans()):  # markers and words of several tokens
        texts = [letter for text in texts for letter in text]
    parser, thought = parser_of(IN_CHANNELS), Thought(CHANNELS, texts.__getitem__)
    reasoning = "".join(part.reasoning for part in (*map(parser.feed, texts), parser.close()))
    counted = []
    for index, text in enumerate(texts):
        before = thought.num_tokens
        thought.push(index)
        if text >= chr(0xE000):
            counted += text * (thought.num_tokens - before)
    assert counted == [letter for letter in reasoning if letter >= chr(0xE000)]
