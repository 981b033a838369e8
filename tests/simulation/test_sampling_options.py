"""Which sampling and output options reach the worker, and the order of the events that come
back."""

import dataclasses

import pytest

from engine.core.common.events import Finished
from engine.core.text.types import Sampling, Stops, Tokens
from engine.errors import InvalidRequest, RequestTooLarge
from engine.requests.text.continuation import Continuation, ContinuedChoice
from engine.requests.text.values import (
    MAX_PROMPT_LOGPROBS,
    GenerateRequest,
    OutputOptions,
    SamplingParams,
    Started,
)
from engine.worker.fakes.text import FakeRunner, FakeScript
from engine.worker.text.interface import SamplingDefaults
from tests.simulator.determinism import run_deterministically
from tests.support.virtual_engine import fake_engine, read_all


def run(request, *, buffer=16, seed=0, runner=None, **config):
    """Return a request's events, its error, and every sequence that the worker got."""
    admitted = []
    script = FakeScript(step_s=0.01, plan_fault=lambda plan: admitted.extend(plan.admitted))
    runner = runner or FakeRunner()
    runner.script = script

    async def main():
        async with fake_engine(script, lambda script: runner, waits=False, **config) as engine:
            generation = engine.submit(request, buffer=buffer)
            events = await read_all(generation)
            await engine.wait_idle()
            return events, generation.error, admitted

    return run_deterministically(main, seed)


@pytest.mark.parametrize("buffer", [4, 5, 16])
@pytest.mark.parametrize("seed", range(3))
def test_started_has_the_prompts_log_probabilities_and_still_comes_first(buffer, seed):
    prompt = tuple(range(5, 105))
    request = GenerateRequest(
        token_ids=prompt,
        n=2,
        sampling=SamplingParams(max_tokens=3),
        output=OutputOptions(echo=True, prompt_logprobs=2, logprobs=1),
    )
    events, error, _ = run(request, buffer=buffer, seed=seed)
    assert error is None
    first, *rest = events
    assert isinstance(first, Started)
    assert [entry.token_id for entry in first.prompt_logprobs] == list(prompt)
    assert [entry.logprob is None for entry in first.prompt_logprobs[:2]] == [True, False]
    assert not any(isinstance(event, Started) for event in rest)
    for choice in range(2):
        told = [e for e in rest if isinstance(e, Tokens) and e.choice == choice]
        own = "".join(f"<{i}>" for e in told for i in e.token_ids)
        assert "".join(e.text for e in told) == "".join(f"<{i}>" for i in prompt) + own
        assert [len(e.logprobs) for e in told] == [1, 1, 1]
        assert not any(e.prompt_logprobs for e in told)
    assert sum(isinstance(event, Finished) for event in rest) == 2


def test_more_log_probabilities_than_the_maximum_are_refused_by_name():
    runner = FakeRunner(num_blocks=1000, max_model_len=8000)
    size = MAX_PROMPT_LOGPROBS // 21
    for extra, is_refused in ((0, False), (1, True)):
        request = GenerateRequest(
            token_ids=(7,) * (size + extra),
            sampling=SamplingParams(max_tokens=1),
            output=OutputOptions(prompt_logprobs=20),
        )
        events, error, _ = run(request, runner=runner)
        assert isinstance(error, RequestTooLarge) == is_refused
        assert len(events) == (0 if is_refused else 3)
    assert [violation.field for violation in error.violations] == ["output.prompt_logprobs"]


def sampled(sampling, **defaults):
    """Return the sampling and stops that the worker gets."""
    runner = FakeRunner()
    object.__setattr__(runner.info, "defaults", SamplingDefaults(**defaults))
    request = GenerateRequest(token_ids=(1,), sampling=sampling)
    _, error, [admitted] = run(request, runner=runner)
    assert error is None
    return admitted


def test_unset_options_come_from_the_models_generation_config():
    configured = {
        "typical_p": 0.4,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "min_tokens": 2,
    }
    given = sampled(SamplingParams(max_tokens=3), **configured)
    for name in ("typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert getattr(given.sampling, name) == configured[name]
    assert given.stops.min_tokens == 2
    assert sampled(SamplingParams(max_tokens=1), **configured).stops.min_tokens == 1
    neutral = SamplingParams(
        max_tokens=3,
        typical_p=1.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        min_tokens=0,
    )
    own = sampled(neutral, **configured)
    plain = sampled(SamplingParams(max_tokens=3))
    drawn = own.sampling.drawn_seed  # drawn anew for each request
    assert own.stops == plain.stops
    assert own.sampling == dataclasses.replace(plain.sampling, drawn_seed=drawn)


def asked_again(heard, **fields):
    """Return the events, the error and the admitted sequences of a request that is continued."""
    fields = {"n": len(heard), "sampling": SamplingParams(max_tokens=4)} | fields
    choices = tuple(ContinuedChoice(ids, finished=ids is None) for ids in heard)
    continuation = Continuation(choices, seed=fields.pop("drawn", None))
    return run(GenerateRequest(token_ids=(5, 6), continuation=continuation, **fields))


def test_a_continued_request_computes_only_what_is_left_of_each_choice():
    first, error, _ = run(GenerateRequest(token_ids=(5, 6), n=3, sampling={"max_tokens": 4}))
    assert error is None
    whole = [
        tuple(i for e in first if isinstance(e, Tokens) and e.choice == c for i in e.token_ids)
        for c in range(3)
    ]
    heard = (whole[0][:3], None, ())
    rest, error, admitted = asked_again(heard)
    assert error is None
    assert [(one.output, one.sampling.choice) for one in admitted] == [(heard[0], 0), ((), 2)]
    tokens = {(e.choice, e.token_ids) for e in rest if isinstance(e, Tokens)}
    assert tokens == {(0, whole[0][3:]), *((2, (i,)) for i in whole[2])}
    ends = {e.choice: e.usage for e in rest if isinstance(e, Finished)}
    assert {c: (u.completion_tokens, u.resumed_tokens) for c, u in ends.items()} == {
        0: (4, 3),
        2: (4, 0),
    }
    assert isinstance(rest[0], Started)
    assert rest[0].prompt_tokens == 2


def test_a_choice_of_which_only_the_end_was_lost_gets_its_end_and_no_token():
    first, _, _ = run(GenerateRequest(token_ids=(5, 6), sampling={"max_tokens": 4}))
    heard = tuple(i for e in first if isinstance(e, Tokens) for i in e.token_ids)
    started, *rest = asked_again([heard])[0]
    assert isinstance(started, Started)
    [end] = rest
    assert (end.reason, end.usage) == (
        first[-1].reason,
        dataclasses.replace(first[-1].usage, resumed_tokens=4),
    )


@pytest.mark.parametrize(
    ("heard", "field"),
    [
        ([(1, 2, 3, 4, 5)], "continuation.choices[0].token_ids"),
        ([(), (7, 1000)], "continuation.choices[1].token_ids[1]"),
    ],
)
def test_tokens_that_the_request_cannot_have_are_refused_by_name(heard, field):
    events, error, _ = asked_again(heard)
    assert events == []
    assert [violation.field for violation in error.violations] == [field]


def test_the_seed_is_told_and_a_continuation_keeps_it():
    """Red if each request draws a new seed (`TextStream.seed`): a continuation would differ."""
    events, _, [admitted] = run(GenerateRequest(token_ids=(5,), sampling={"max_tokens": 2}))
    seed = events[0].seed
    assert 0 <= seed < 2**53
    assert (admitted.sampling.seed, admitted.sampling.drawn_seed) == (None, seed)
    events, _, [admitted] = asked_again([(5,)], drawn=seed)
    assert (events[0].seed, admitted.sampling.drawn_seed) == (seed, seed)
    own = SamplingParams(max_tokens=4, seed=2**64 - 1)
    for drawn in (None, 2**64 - 1):
        events, _, [admitted] = asked_again([(5,)], drawn=drawn, sampling=own)
        assert events[0].seed == admitted.sampling.seed == 2**64 - 1
        assert admitted.sampling.drawn_seed is None


def test_the_prompts_log_probabilities_are_not_computed_again():
    output = OutputOptions(prompt_logprobs=2, echo=True)
    events, error, [admitted] = asked_again([(5,)], output=output)
    assert error is None
    assert events[0].prompt_logprobs == ()
    assert admitted.sampling.prompt_logprobs is None
    assert not any("<6>" in e.text for e in events[1:2])
    fresh, _, [admitted] = asked_again([()], output=output)
    assert len(fresh[0].prompt_logprobs) == 2
    assert admitted.sampling.prompt_logprobs == 2
    assert fresh[1].text.startswith("<5><6>")


CONFIGURED = {  # the model's default, and a request's zero or neutral value
    "temperature": (0.3, 0.0),
    "top_k": (7, 0),
    "top_p": (0.6, 1.0),
    "min_p": (0.2, 0.0),
    "typical_p": (0.5, 0.0),
    "repetition_penalty": (1.3, 1.0),
    "presence_penalty": (0.4, 0.0),
    "frequency_penalty": (0.4, 0.0),
    "min_tokens": (2, 0),
}


def test_every_default_that_a_model_may_have_is_in_the_table():
    names = {field.name for field in dataclasses.fields(SamplingDefaults)}
    assert names == {*CONFIGURED, "max_tokens"}


@pytest.mark.parametrize("name", CONFIGURED)
def test_unset_is_the_models_default_and_zero_is_zero(name):
    own, asked = CONFIGURED[name]

    def used(value, **configured):
        found = sampled(SamplingParams(max_tokens=3, **{name: value}), **configured)
        return getattr(found.stops if name == "min_tokens" else found.sampling, name)

    assert used(None, **{name: own}) == own
    assert used(asked, **{name: own}) == asked
    usual = getattr(Stops(1) if name == "min_tokens" else Sampling(), name)
    assert used(None) == usual
    assert own not in (asked, usual)


def test_the_models_most_tokens_count_where_the_request_names_none():
    def most(asked=None, *, own=4, **fields):
        params = SamplingParams(max_tokens=asked, **fields)
        return sampled(params, max_tokens=own).stops.max_tokens

    assert most() == 4
    assert most(6) == 6
    assert most(own=99_999) == FakeRunner().info.max_model_len - 1  # bounded by the context
    assert most(min_tokens=9) == 9  # the request's field outweighs the model's


def test_bad_words_become_their_tokens_with_and_without_a_space_before():
    """A token's id is its byte plus one; a word that the model cannot write is dropped."""
    words = SamplingParams(max_tokens=1, bad_words=("ab", "<12>", "ab", "<1000>"))
    space = ord(" ") + 1
    assert sampled(words).sampling.bad_words == ((98, 99), (space, 98, 99), (12,), (space, 12))


def test_a_bad_word_that_cannot_be_encoded_is_named():
    request = GenerateRequest(token_ids=(1,), sampling=SamplingParams(bad_words=("fine", "\ud800")))
    _, error, _ = run(request)
    assert isinstance(error, InvalidRequest)
    assert [violation.field for violation in error.violations] == ["sampling.bad_words[1]"]


def test_min_tokens_that_no_token_can_reach_is_the_clients_mistake():
    sampling = SamplingParams(min_tokens=2, stop_token_ids=tuple(range(1000)))
    _, error, _ = run(GenerateRequest(text="x", sampling=sampling))
    assert isinstance(error, InvalidRequest)
    assert "sampling.min_tokens" in str(error)
