"""Generate over real gRPC, from a server process with the fake model: what comes, in which order.

`core_driver.expected_tokens` is the oracle of the fake's tokens.
"""

import threading
import time

import grpc
import pytest

from engine.worker.fakes.digests import fake_logprob
from engine.worker.fakes.tokenizer import BYTE_OFFSET
from tests.support.core_driver import expected_tokens
from tests.support.server import fake
from tests.support.wire import (
    LENGTH,
    STOP,
    Generation,
    broken_fields,
    details,
    ended,
    generate,
    list_models,
    reason,
    stats,
    tokenize,
    wait_idle,
    wait_serving,
)

PROMPT = [5, 6, 7]
MAX_MODEL_LEN = 256


@pytest.fixture(scope="module")
def server():
    """Serve three models: `slow` takes 50 ms a step, `ending` sometimes samples an end."""
    models = [
        {"name": "quick", "aliases": ["q"]},
        {"name": "slow", "script": {"step_s": 0.05}},
        {"name": "ending", "script": {"eos_every": 10}},
    ]
    with fake(models=models, runner={"max_model_len": MAX_MODEL_LEN}) as one:
        wait_serving(one.channel)
        yield one


@pytest.fixture
def channel(server):
    """Yield a channel, and check that the test leaves an idle engine behind."""
    yield server.channel
    wait_idle(server.channel)


def shown(ids):
    """Return the fake's text for token ids."""
    return "".join(f"<{i}>" for i in ids)


def ids_of(text):
    """Return the fake's ids for a text without <…>."""
    return [byte + BYTE_OFFSET for byte in text.encode()]


# ---- messages ---------------------------------------------------------------------------------


def test_a_stream_is_started_then_deltas_then_finished_with_the_models_own_tokens(channel):
    heard = generate(channel, prompt_ids=PROMPT, max_tokens=20, request_id="mine")
    assert heard.error is None
    assert heard.kinds == ["started", *["delta"] * len(heard.deltas), "finished"]
    assert heard.ids() == expected_tokens(PROMPT, count=20)
    assert heard.text() == shown(heard.ids())
    started, finished = heard.started, heard.finished()
    assert (started.request_id, started.model, started.prompt_tokens) == ("mine", "quick", 3)
    assert (finished.reason, finished.WhichOneof("matched")) == (LENGTH, None)
    usage = finished.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (3, 0, 20)


def test_tokens_come_while_later_ones_are_still_being_made(channel):
    """Of 20 steps of 50 ms, the first few bring the first token."""
    start = time.monotonic()
    with Generation(channel, model="slow", prompt_ids=[1], max_tokens=20) as call:
        call.read_deltas(1)
        first_s = time.monotonic() - start
        heard = call.finish()
    assert len(heard.deltas) > 15
    assert first_s < (time.monotonic() - start) / 2


def test_token_ids_come_only_on_request(channel):
    heard = generate(channel, prompt_ids=PROMPT, max_tokens=5, output={})
    assert heard.ids() == []
    assert heard.text() == shown(expected_tokens(PROMPT, count=5))


def test_a_text_is_tokenised_by_the_server(channel):
    prompt = ids_of("Once é")
    assert tokenize(channel, "Once é") == prompt
    heard = generate(channel, text="Once é", max_tokens=4)
    assert heard.started.prompt_tokens == len(prompt) == 7
    assert heard.ids() == expected_tokens(prompt, count=4)


def test_a_long_text_is_tokenised_in_a_thread_with_the_same_result(channel):
    """Above 4 KiB a thread tokenises; the prompt is then cut to fit the model."""
    text = "".join(chr(97 + i % 26) for i in range(6000))
    heard = generate(channel, text=text, max_tokens=3, prompt={"truncate_to": 50})
    assert heard.ids() == expected_tokens(ids_of(text)[-50:], count=3)


def test_a_chat_is_rendered_by_the_models_template(channel):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    heard = generate(channel, chat={"messages": messages}, max_tokens=3)
    assert heard.ids() == expected_tokens(ids_of("system: be\nuser: hi"), count=3)


@pytest.mark.parametrize("n", [2, 5, 16])
def test_several_choices_have_tokens_of_their_own_and_one_end_each(channel, n):
    heard = generate(channel, prompt_ids=PROMPT, max_tokens=7, n=n)
    assert heard.error is None
    assert heard.kinds.count("started") == 1
    assert heard.kinds.count("finished") == n
    for choice in range(n):
        assert heard.ids(choice) == expected_tokens(PROMPT, count=7, choice=choice)
        assert heard.finished(choice).usage.completion_tokens == 7
    ends = {}
    for place, message in enumerate(heard.messages):
        if message.HasField("delta"):
            assert message.delta.choice not in ends, "a delta after its choice's end"
        elif message.HasField("finished"):
            ends[message.finished.choice] = place
    assert sorted(ends) == list(range(n))


def test_a_seed_makes_other_tokens_and_the_same_ones_again(channel):
    first, again, other = (
        generate(channel, prompt_ids=PROMPT, max_tokens=9, seed=seed).ids()
        for seed in (2**64 - 1, 2**64 - 1, 0)
    )
    assert first == again == expected_tokens(PROMPT, count=9, seed=2**64 - 1)
    assert other == expected_tokens(PROMPT, count=9, seed=0) != first


def test_a_repeated_prompt_comes_from_the_prefix_cache(channel):
    prompt = [9, *range(100, 150)]
    first = generate(channel, prompt_ids=prompt, max_tokens=2)
    again = generate(channel, prompt_ids=prompt, max_tokens=2)
    salted = generate(channel, prompt_ids=prompt, max_tokens=2, prompt={"cache_salt": "me"})
    bypassed = generate(
        channel, prompt_ids=prompt, max_tokens=2, prompt={"bypass_prefix_cache": True}
    )
    cached = [h.finished().usage.cached_tokens for h in (first, again, salted, bypassed)]
    assert cached == [0, 48, 0, 0]  # three whole blocks of 16 tokens
    assert first.ids() == again.ids() == salted.ids() == bypassed.ids()


def test_echo_gives_the_prompt_back_before_the_completion(channel):
    heard = generate(
        channel, text="ab", max_tokens=2, n=2, output={"echo": True, "token_ids": True}
    )
    for choice in range(2):
        tokens = expected_tokens(ids_of("ab"), count=2, choice=choice)
        assert heard.text(choice) == shown(ids_of("ab")) + shown(tokens)
        assert heard.ids(choice) == tokens


def test_log_probabilities_come_with_tokens_and_those_of_the_prompt_with_started(channel):
    output = {"logprobs": 2, "prompt_logprobs": 1, "token_ids": True}
    heard = generate(channel, prompt_ids=PROMPT, max_tokens=3, n=2, output=output)
    assert heard.kinds[0] == "started"
    assert heard.kinds.count("started") == 1
    told = heard.started.prompt_logprobs
    assert [entry.token_id for entry in told] == PROMPT
    assert [entry.HasField("logprob") for entry in told] == [False, True, True]
    assert [len(entry.alternatives) for entry in told] == [0, 1, 1]
    for choice in range(2):
        entries = [e for d in heard.deltas if d.choice == choice for e in d.logprobs]
        assert [entry.token_id for entry in entries] == heard.ids(choice)
        assert heard.ids(choice) == expected_tokens(PROMPT, count=3, choice=choice)
        want = [fake_logprob(token, 2) for token in heard.ids(choice)]
        assert [(e.text, e.logprob) for e in entries] == [(e.text, e.logprob) for e in want]
        assert {tuple(a.rank for a in entry.alternatives) for entry in entries} == {(1, 2)}


def test_no_alternatives_and_no_log_probabilities_differ(channel):
    asked = generate(channel, prompt_ids=PROMPT, max_tokens=2, output={"logprobs": 0})
    entries = [entry for delta in asked.deltas for entry in delta.logprobs]
    assert len(entries) == 2
    assert not any(entry.alternatives for entry in entries)
    plain = generate(channel, prompt_ids=PROMPT, max_tokens=2)
    assert not plain.started.prompt_logprobs
    assert not any(delta.logprobs for delta in plain.deltas)


def test_a_scored_prompt_is_computed_and_then_cached(channel):
    prompt = [8, *range(200, 290)]
    output = {"prompt_logprobs": 0}
    heard = [
        generate(channel, prompt_ids=prompt, max_tokens=2, output=own)
        for own in ({}, output, output, {})
    ]
    assert [h.finished().usage.cached_tokens for h in heard] == [0, 0, 0, 80]
    assert [len(h.started.prompt_logprobs) for h in heard] == [0, 91, 91, 0]
    assert len({h.text() for h in heard}) == 1


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"truncate_to": 2}, PROMPT[-2:]),
        ({"truncate_to": 2, "truncate_left": True}, PROMPT[-2:]),
        ({"truncate_to": 2, "truncate_left": False}, PROMPT[:2]),
        ({"truncate_to": 3}, PROMPT),
        ({"truncate_to": 4}, PROMPT),
    ],
)
def test_a_prompt_is_cut_from_the_left_by_default(channel, options, kept):
    heard = generate(channel, prompt_ids=PROMPT, max_tokens=3, prompt=options)
    assert heard.started.prompt_tokens == len(kept)
    assert heard.ids() == expected_tokens(kept, count=3)


# ---- ends ------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_output_and_is_left_out(channel):
    tokens = expected_tokens(PROMPT, count=6)
    stop = f"<{tokens[3]}><{tokens[4]}"
    heard = generate(channel, prompt_ids=PROMPT, max_tokens=50, stop=["nothing", stop])
    assert heard.text() == shown(tokens[:3])
    finished = heard.finished()
    assert (finished.reason, finished.stop) == (STOP, stop)
    assert finished.usage.completion_tokens == 5


def test_a_stop_string_is_kept_on_request(channel):
    tokens = expected_tokens(PROMPT, count=6)
    sampling = {"include_stop": True, "stop": [f"<{tokens[3]}>"], "max_tokens": 50}
    heard = generate(channel, prompt_ids=PROMPT, sampling=sampling)
    assert heard.text() == shown(tokens[:4])


def test_text_that_could_become_a_stop_string_is_held_back_and_then_sent(channel):
    tokens = expected_tokens(PROMPT, count=3)
    heard = generate(channel, prompt_ids=PROMPT, max_tokens=3, stop=[f"<{tokens[0]}>never"])
    assert heard.text() == shown(tokens)
    assert heard.finished().reason == LENGTH


def test_a_stop_token_ends_the_output_and_is_named(channel):
    tokens = expected_tokens(PROMPT, count=4)
    heard = generate(channel, prompt_ids=PROMPT, max_tokens=50, stop_token_ids=[tokens[3]])
    finished = heard.finished()
    assert (finished.reason, finished.WhichOneof("matched")) == (STOP, "stop_token_id")
    assert finished.stop_token_id == tokens[3]
    assert heard.ids() == tokens


def test_min_tokens_lets_an_early_stop_pass(channel):
    tokens = expected_tokens(PROMPT, count=6)
    heard = generate(
        channel, prompt_ids=PROMPT, max_tokens=6, min_tokens=3, stop_token_ids=[tokens[1]]
    )
    assert heard.ids() == tokens
    assert heard.finished().reason == LENGTH


def test_the_models_own_end_is_a_stop_unless_it_is_ignored(channel):
    fields = {"model": "ending", "prompt_ids": [3], "max_tokens": 30}
    heard = generate(channel, **fields)
    assert heard.finished().reason == STOP
    assert heard.finished().stop_token_id == 0
    assert heard.ids()[-1] == 0
    assert heard.text() == shown(heard.ids()[:-1])
    longer = generate(channel, sampling={"ignore_eos": True}, **fields)
    assert longer.finished().reason == LENGTH
    assert len(longer.ids()) == 30


@pytest.mark.parametrize("max_tokens", [None, 10_000])
def test_without_a_fitting_max_tokens_the_rest_of_the_context_is_filled(channel, max_tokens):
    sampling = {} if max_tokens is None else {"max_tokens": max_tokens}
    heard = generate(channel, prompt_ids=PROMPT, sampling=sampling)
    assert len(heard.ids()) == MAX_MODEL_LEN - len(PROMPT)
    assert heard.finished().reason == LENGTH


def test_the_longest_prompt_still_gets_one_token(channel):
    prompt = list(range(1, MAX_MODEL_LEN))
    assert generate(channel, prompt_ids=prompt).ids() == expected_tokens(prompt, count=1)


# ---- names -----------------------------------------------------------------------------------


def test_a_model_is_found_by_name_and_alias_and_the_first_without_one(channel):
    answered = [
        generate(channel, model=name, max_tokens=1).started.model
        for name in ("", "quick", "q", "slow")
    ]
    assert answered == ["quick", "quick", "quick", "slow"]
    assert [(m.name, list(m.aliases)) for m in list_models(channel)] == [
        ("quick", ["q"]),
        ("slow", []),
        ("ending", []),
    ]


def test_a_request_without_an_id_gets_one_of_its_own(channel):
    ids = {generate(channel, max_tokens=1).started.request_id for _ in range(3)}
    assert len(ids) == 3
    assert all(ids)


def test_a_live_request_id_is_refused_and_the_live_one_goes_on(channel):
    fields = {"model": "slow", "request_id": "twice"}
    with Generation(channel, prompt_ids=[1], max_tokens=8, **fields) as first:
        first.read_deltas(1)
        for model in ("slow", "quick"):
            second = generate(channel, **fields | {"model": model}, max_tokens=1)
            assert second.error.code() is grpc.StatusCode.ALREADY_EXISTS
            assert reason(second.error) == "DUPLICATE_REQUEST"
            assert second.messages == []
        assert first.finish().ids() == expected_tokens([1], count=8)
    assert generate(channel, **fields, max_tokens=1).error is None, "the id is free again"


# ---- figures ---------------------------------------------------------------------------------


def test_timings_add_up_to_the_requests_life(channel):
    start = time.monotonic()
    heard = generate(channel, model="slow", prompt_ids=[8], max_tokens=6)
    life_s = time.monotonic() - start
    timings = heard.finished().timings
    seconds = {
        field.name: getattr(timings, field.name).ToTimedelta().total_seconds()
        for field in timings.DESCRIPTOR.fields
    }
    assert seconds["prefill"] >= 0.05
    assert seconds["decode"] >= 5 * 0.05
    assert seconds["parked"] == 0
    assert 6 * 0.05 <= sum(seconds.values()) <= life_s


def test_statistics_count_what_was_done(channel):
    before, ends = stats(channel), ended(channel)
    generate(channel, prompt_ids=[4, 4, 4, 4], max_tokens=11)
    generate(channel, model="nobody")
    after = wait_idle(channel)
    assert after.prompt_tokens_total - before.prompt_tokens_total == 4
    assert after.completion_tokens_total - before.completion_tokens_total == 11
    assert after.step_count - before.step_count == 11
    assert after.step_rows_total - before.step_rows_total == 11
    assert ended(channel) == ends | {
        "finished": ends["finished"] + 1,
        "refused": ends.get("refused", 0) + 1,
    }


# ---- many at once ----------------------------------------------------------------------------


def test_requests_at_once_share_steps_and_get_their_own_tokens(channel):
    """12 requests of 10 tokens take little more time than one."""
    before = stats(channel)
    heard = {}

    def ask(number):
        fields = {"prompt_ids": [200 + number], "max_tokens": 10}
        heard[number] = generate(channel, model="slow", **fields)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    after = stats(channel)
    for number in range(12):
        assert heard[number].ids() == expected_tokens([200 + number], count=10)
    assert after.step_rows_total - before.step_rows_total == 120
    assert after.step_count - before.step_count < 40


def test_a_full_queue_refuses_with_a_retry_delay_and_keeps_its_requests():
    """One request runs, one waits, and the third gets the time after which to retry."""
    engine = {"max_num_seqs": 1, "max_queued_requests": 1}
    with fake(script={"step_s": 0.05}, engine=engine) as server:
        channel = server.channel
        with Generation(channel, prompt_ids=[1], max_tokens=1000) as running:
            running.read_deltas(1)
            with Generation(channel, prompt_ids=[2], max_tokens=2) as waiting:
                assert waiting.read().HasField("started")
                refused = generate(channel, prompt_ids=[3])
                assert refused.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert reason(refused.error) == "QUEUE_FULL"
                delay = details(refused.error)["RetryInfo"].retry_delay.ToTimedelta()
                assert 1 <= delay.total_seconds() <= 30
                ids = running.read_deltas(5).heard.ids()
                assert ids == expected_tokens([1], count=len(ids))
                running.cancel()
                assert waiting.finish().ids() == expected_tokens([2], count=2)
        wait_idle(channel)
        assert ended(channel) == {"finished": 1, "cancelled": 1, "refused": 1}


def test_more_choices_than_the_engine_can_run_are_too_large():
    with fake(engine={"max_num_seqs": 4}) as server:
        error = generate(server.channel, n=5).error
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason(error) == "REQUEST_TOO_LARGE"
        assert broken_fields(error) == ["n"]
        assert generate(server.channel, n=4, max_tokens=1).error is None
