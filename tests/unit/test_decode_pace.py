"""How many prompt tokens a step has beside decodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.text.pace.decode_pace import CHUNK_MIN, TOKENS_EACH, DecodePace
from tests.support.core_driver import Driver, make_request

MAX_TOKENS = 2048


def test_without_a_measurement_or_a_target_only_the_budget_counts():
    assert DecodePace(MAX_TOKENS, 0.05).prompt_tokens(MAX_TOKENS, 4, 3) == MAX_TOKENS
    pace = DecodePace(MAX_TOKENS, 0.0)
    pace.note(100, 0, 10.0)
    pace.note(0, 3, 10.0)
    assert pace.prompt_tokens(MAX_TOKENS, 4, 3) == MAX_TOKENS


@given(
    target_s=st.sampled_from([0.02, 0.05, 0.3]),
    token_s=st.floats(1e-5, 1e-2),
    chunk_s=st.floats(0, 0.02),
    decode_s=st.floats(1e-3, 0.5),
    num_decodes=st.integers(1, 200),
    num_waiting=st.integers(1, 50),
    first=st.integers(1, MAX_TOKENS),
)
def test_a_step_takes_the_target_or_twice_its_decodes_or_some_tokens_for_each_sequence(
    target_s, token_s, chunk_s, decode_s, num_decodes, num_waiting, first
):
    """A step with prompts takes ``chunk_s`` and ``token_s`` a token longer than its decodes."""
    pace = DecodePace(MAX_TOKENS, target_s)
    pace.note(first, 0, chunk_s + token_s * first)
    for _ in range(60):
        pace.note(0, num_decodes, decode_s)
        count = pace.prompt_tokens(MAX_TOKENS, num_decodes + num_waiting, num_decodes)
        takes_s = decode_s + chunk_s + token_s * count
        pace.note(count, num_decodes, takes_s)
    at_least = max(CHUNK_MIN, TOKENS_EACH * (num_decodes + num_waiting))
    allowed_s = max(target_s, 2 * decode_s)
    assert count >= min(at_least, MAX_TOKENS)
    assert count <= at_least or takes_s <= 1.2 * allowed_s
    is_half_used = takes_s - decode_s > 0.4 * (allowed_s - decode_s)
    assert count == MAX_TOKENS or is_half_used


def test_costs_that_change_are_followed():
    """As those of attention do, with the length of the context."""
    pace = DecodePace(MAX_TOKENS, 0.05)
    counts = []
    for token_s in [1e-3] * 30 + [2e-3] * 30 + [5e-4] * 30:
        pace.note(0, 4, 0.01)
        counts.append(pace.prompt_tokens(MAX_TOKENS, 4, 4))
        pace.note(counts[-1], 4, 0.01 + token_s * counts[-1])
    assert counts[29] == pytest.approx(40, rel=0.1)
    assert counts[59] == pytest.approx(20, rel=0.1)
    assert counts[89] == pytest.approx(80, rel=0.1)


def test_a_size_whose_smallest_step_takes_too_long_is_left():
    """Steps of 32 tokens and of 31 are of different sizes. Once those of 32 take longer than they
    may, steps become smaller, though those of 31 were fast when they were measured last."""
    pace = DecodePace(MAX_TOKENS, 0.05)
    for count, token_s in [(31, 1e-3), (32, 2e-3)]:
        pace.note(0, 4, 0.01)
        pace.note(count, 4, 0.01 + token_s * count)
    counts = []
    for _ in range(10):
        counts.append(pace.prompt_tokens(MAX_TOKENS, 4, 4))
        pace.note(counts[-1], 4, 0.01 + 2e-3 * counts[-1])
    assert counts[-1] == pytest.approx(20, rel=0.1), counts


def test_many_sequences_have_some_tokens_each_within_the_limit():
    pace = DecodePace(MAX_TOKENS, 0.02)
    pace.note(1000, 0, 1.0)
    pace.note(0, 8, 0.014)
    assert pace.prompt_tokens(MAX_TOKENS, 8, 8) == CHUNK_MIN
    assert pace.prompt_tokens(MAX_TOKENS, 60, 8) == 60 * TOKENS_EACH
    assert pace.prompt_tokens(100, 60, 8) == 100


def test_more_decodes_than_were_measured_count_as_those_that_were():
    pace = DecodePace(MAX_TOKENS, 0.1)
    pace.note(1000, 0, 1.0)
    pace.note(0, 4, 0.04)
    assert pace.prompt_tokens(MAX_TOKENS, 4, 4) == pace.prompt_tokens(MAX_TOKENS, 30, 30) == 60
    assert pace.prompt_tokens(MAX_TOKENS, 1, 1) == 100, "fewer were never measured"


@pytest.mark.parametrize("prepared_plans", [False, True])
def test_a_prompt_beside_an_answer_is_computed_in_small_steps_and_alone_in_large_ones(
    prepared_plans,
):
    driver = Driver(
        max_num_batched_tokens=512,
        max_model_len=1024,
        max_num_seqs=8,
        inter_token_target_s=0.1,
        prepared_plans=prepared_plans,
    )
    counts = []

    def step():
        plan = driver.begin_step()
        counts.append(sum(row.count for row in plan.rows if row.count > 1))
        driver.now += 0.01 + counts[-1] * 1e-3
        driver.end_step()

    driver.submit(make_request("answer", range(1, 129), max_tokens=100))
    for _ in range(5):
        step()
        driver.read("answer")
    assert counts == [128, 0, 0, 0, 0]
    driver.submit(make_request("prompt", range(1000, 1400), max_tokens=1))
    for _ in range(20):
        step()
        driver.read("answer")
    beside = [count for count in counts[5:] if count]
    assert sum(beside) == 400
    assert len(beside) >= 4
    assert max(beside) <= 120
