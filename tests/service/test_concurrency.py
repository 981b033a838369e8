"""64 clients of the demo model at once: each gets its answer alone, in shared steps."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.server import DEMO
from tests.support.wire import LENGTH, generate, list_models, stats, tokenize, wait_idle

pytestmark = pytest.mark.model

NUM_CLIENTS = 64
SEED = 3
PROMPT_TOKENS = (1, 500)
MAX_TOKENS = (5, 60)
WORDS = (
    ("Mia", "Tom", "Anna", "Ben", "Lucy", "Sam"),
    ("fox", "cat", "dog", "owl", "duck", "bear"),
    ("river", "forest", "garden", "hill", "village", "sea"),
    ("sunny", "rainy", "windy", "cold", "warm", "foggy"),
)


def text_of(draw, num_sentences):
    """Return a text like a story."""
    sentences = []
    for _ in range(num_sentences):
        name, animal, place, weather = (draw.choice(words) for words in WORDS)
        sentences.append(f"One {weather} day {name} saw a {animal} by the {place}.")
    return " ".join(sentences)


def requests_of(channel):
    """Return requests with prompts of 1 to 500 tokens, each from another place of a text."""
    draw = random.Random(SEED)
    ids = tokenize(channel, text_of(draw, 200))
    assert len(ids) > 2 * PROMPT_TOKENS[1]
    low, high = MAX_TOKENS
    sizes = [
        (draw.randint(*PROMPT_TOKENS), round(draw.triangular(low, high, low)))
        for _ in range(NUM_CLIENTS - 2)
    ]
    sizes += zip(PROMPT_TOKENS, MAX_TOKENS, strict=True)
    for length, max_tokens in sizes:
        start = draw.randrange(len(ids) - length)
        yield {
            "prompt_ids": ids[start : start + length],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "sampling": {"ignore_eos": True},
        }


@pytest.mark.slow
def test_64_clients_at_once_get_the_same_as_alone_in_steps_of_many_rows(demo, capsys):
    channel = demo.channel
    [model] = list_models(channel)
    assert model.dtype == "float32", f"{DEMO} must be in float32 to be compared exactly"
    requests = list(requests_of(channel))
    alone = [generate(channel, **request) for request in requests]
    before = wait_idle(channel)
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        together = list(clients.map(lambda request: generate(channel, **request), requests))
    after = wait_idle(channel)
    for number, (request, one, other) in enumerate(zip(requests, alone, together, strict=True)):
        assert other.error is None, number
        assert len(other.ids()) == request["max_tokens"], number
        assert other.ids() == one.ids(), number
        assert other.text() == one.text(), number
        assert other.finished().reason == LENGTH
    steps = after.step_count - before.step_count
    rows = after.step_rows_total - before.step_rows_total
    with capsys.disabled():
        print(f"\n[{NUM_CLIENTS} clients] {rows} rows in {steps} steps: {rows / steps:.1f}", end="")
    assert rows / steps > 8  # not 64, as on a busy machine clients do not begin at once
    assert (stats(channel).running, stats(channel).waiting) == (0, 0)
