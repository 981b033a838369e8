"""The laws of the estimate of how long prompts take, whatever the steps took."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.text.prompt_pace import DOUBLING, KEPT, PromptPace


def pairs_of(start, end):
    """Return the sum of the contexts of a prompt's tokens from ``start`` to ``end``."""
    return (end - start) * (end + start) / 2


@given(
    base_s=st.floats(1e-5, 1e-1),
    doubling=st.floats(3000, 100_000),
    chunk=st.sampled_from([256, 512]),
    noise=st.lists(st.floats(0.97, 1.03), min_size=64, max_size=64),
    accident=st.integers(0, 63),
)
def test_at_half_a_prompt_the_rest_is_estimated_within_a_fifth(
    base_s, doubling, chunk, noise, accident
):
    """One step took ten times as long, because something else ran."""
    pace, total = PromptPace(), 16 * chunk

    def seconds(start, end):
        return base_s * (end - start + pairs_of(start, end) / doubling)

    for index, start in enumerate(range(0, total // 2, chunk)):
        slow = 10 if index == accident else noise[index]
        pace.note(chunk, pairs_of(start, start + chunk), slow * seconds(start, start + chunk))
    got = pace.seconds(total // 2, pairs_of(total // 2, total), chunk)
    assert got == pytest.approx(seconds(total // 2, total), rel=0.2)


@given(base_s=st.floats(1e-5, 1e-1), chunk=st.integers(16, 2048))
def test_one_step_is_enough_for_an_estimate_of_usual_attention(base_s, chunk):
    pace = PromptPace()
    pace.note(chunk, pairs_of(0, chunk), base_s * (chunk + pairs_of(0, chunk) / DOUBLING))
    got = pace.seconds(chunk, pairs_of(chunk, 2 * chunk), chunk)
    assert got == pytest.approx(base_s * (chunk + pairs_of(chunk, 2 * chunk) / DOUBLING))


STEPS = st.tuples(
    st.integers(2, 2048), st.integers(0, 100_000), st.sampled_from([1e-9, 0.001, 0.02, 4.0, 1e6])
)


@given(st.lists(STEPS, max_size=2 * KEPT), st.integers(1, 10_000), st.integers(0, 10_000),
       st.integers(1, 2048))  # fmt: skip
def test_whatever_is_told_an_answer_is_a_time_and_more_tokens_take_longer(
    steps, num_tokens, start, chunk
):
    pace = PromptPace()
    assert pace.seconds(num_tokens, 1.0, chunk) is None
    for count, first, seconds in steps:
        pace.note(count, pairs_of(first, first + count), seconds)
    got = pace.seconds(num_tokens, pairs_of(start, start + num_tokens), chunk)
    if got is None:
        assert all(2 * count < min(chunk, num_tokens) for count, _, _ in steps[-KEPT:])
        return
    assert 0.0 < got < math.inf
    end = start + num_tokens
    later = pace.seconds(num_tokens, pairs_of(end, end + num_tokens), chunk)
    assert later is not None
    assert later >= got


def test_small_steps_say_nothing_of_large_ones():
    pace = PromptPace()
    pace.note(16, 8.0 * 16, 1.0)
    assert pace.seconds(4000, 1.0, 256) is None
    assert pace.seconds(16, 8.0 * 16, 256) == pytest.approx(1.0)
