"""The laws of the estimate of step times (D4, D18), whatever the steps took."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.text.step_times import CHUNK_MIN, KEPT, TOKENS_EACH
from tests.support.step_times import note, step_times


@given(
    fixed_s=st.floats(1e-3, 0.1),
    row_s=st.floats(1e-5, 1e-2),
    token_s=st.floats(1e-5, 1e-2),
    noise=st.lists(st.floats(0.9, 1.1), min_size=KEPT, max_size=KEPT),
    decodes=st.integers(1, 40),
    prompt=st.sampled_from([64, 512, 2048]),
    factor=st.sampled_from([1.0, 0.1, 10.0]),
    stall=st.sampled_from([1.0, 100.0]),
)
def test_linear_times_are_found_in_noise_after_the_machine_changed_and_beside_an_accident(
    fixed_s, row_s, token_s, noise, decodes, prompt, factor, stall
):
    """The machine was ``factor`` times as slow before, and one outlier is ``stall`` times as
    long."""
    times, decodes_s, prompt_s = step_times(), fixed_s + row_s * decodes, token_s * prompt
    for _ in range(2 * KEPT):
        note(times, factor * decodes_s, decodes=decodes)
        note(times, factor * (decodes_s + prompt_s), decodes=decodes, prompt=prompt)
    noise[KEPT // 2] *= stall
    for off in noise:
        note(times, off * decodes_s, decodes=decodes)
        note(times, off * prompt_s, prompt=prompt)
    assert times.decodes_s(decodes) == pytest.approx(decodes_s, rel=0.101)
    assert times.least_s(prompt) == pytest.approx(prompt_s * min(noise))


STEPS = st.tuples(
    st.integers(0, 40),  # decodes
    st.integers(0, 80).filter(lambda count: count != 1),  # tokens of a prompt
    st.integers(0, 15),  # drafts, if the step has no prompt
    st.sampled_from([0, 0, 40]),  # the cost of images, in tokens
    st.sampled_from([-1.0, 0.0, 1e-9, 0.001, 0.02, 4.0, 1e6]),
)


@given(st.lists(STEPS), st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40))))
def test_whatever_is_told_every_answer_is_a_time_or_a_number_of_tokens(steps, asked):
    times = step_times(100, step_s=0.2, beside_s=0.02)
    for decodes, prompt, drafts, image_cost, seconds in steps:
        if decodes + prompt:
            drafts = drafts if decodes and not prompt else 0
            work = {"decodes": decodes, "prompt": prompt, "drafts": drafts}
            note(times, seconds, **work, image_cost=image_cost)
            times.note_passes(max(1, decodes), 1 + drafts, seconds)
        for tokens, rows in asked:
            answers = times.decodes_s(rows), times.least_s(tokens), times.in_steps(rows, 1.0)
            assert all(0.0 <= answer < math.inf for answer in (*answers, times.pass_ratio))
            assert 1.0 <= times.ratio(1 + tokens % 15) < math.inf
            assert 1 <= times.prompt_tokens(tokens, 8, rows) <= tokens
            times.note_refusal(tokens)


@given(
    target_s=st.sampled_from([0.02, 0.05, 0.3]),
    token_s=st.floats(1e-5, 1e-2),
    chunk_s=st.floats(0, 0.02),
    decode_s=st.floats(1e-3, 0.5),
    num_decodes=st.integers(1, 200),
    num_waiting=st.integers(1, 50),
    first=st.integers(2, 2048),
)
def test_a_step_takes_the_target_or_twice_its_decodes_or_some_tokens_for_each_sequence(
    target_s, token_s, chunk_s, decode_s, num_decodes, num_waiting, first
):
    """A step with prompts takes ``chunk_s`` and ``token_s`` a token longer than its decodes
    alone."""
    times = step_times(beside_s=target_s)
    note(times, chunk_s + token_s * first, prompt=first)
    for _ in range(60):
        note(times, decode_s, decodes=num_decodes)
        count = times.prompt_tokens(2048, num_decodes + num_waiting, num_decodes)
        takes_s = decode_s + chunk_s + token_s * count
        note(times, takes_s, prompt=count, decodes=num_decodes)
    at_least = max(CHUNK_MIN, TOKENS_EACH * (num_decodes + num_waiting))
    allowed_s = max(target_s, 2 * decode_s)
    assert count >= min(at_least, 2048)
    assert count <= at_least or takes_s <= 1.2 * allowed_s
    is_half_used = takes_s - decode_s > 0.4 * (allowed_s - decode_s)
    assert count == 2048 or is_half_used
