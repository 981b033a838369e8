"""With drafts, a model gives the same tokens as without them (D27).

Here two drafters propose tokens that are right at random, one in the n-gram drafter's place, one in
the draft model's. So drafts are accepted, rejected and cut at every place, as n-grams of a random
model seldom are. The n-gram drafter itself is tested at the end, and so are tokens that a
constraint forces.
"""

import random
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api._generated.blocking import open_engine
from engine.core.common.types import BlockId, PlanId, SequenceId
from engine.core.text.plan import (
    AdmittedSequence,
    BlockDelta,
    Logits,
    Row,
    StepPlan,
)
from engine.core.text.types import Constraint, Sampling, Stops
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.sampling.constraint_compiler import Matching
from engine.worker.text import runner as text_runner
from engine.worker.text import sequences
from engine.worker.text.ngram_drafter import REST_MAX, NgramDrafter
from engine.worker.text.runner import NO_SCORES, TorchRunner
from tests.simulator.mutants import Mutant, planted
from tests.support.draft_rows import (
    PROMPT,
    ROWS,
    SAMPLING,
    ask,
    ask_together,
    compare,
    config_of,
    crowd,
    draft_by,
    drafts_of,
    know,
    request_of,
)
from tests.support.examples import examples
from tests.support.model_zoo import load_runner


@pytest.fixture(scope="module", params=["model", "lookup"])
def drafting(zoo, request):
    """Yield an engine of the tiny model with a drafter whose tokens are right at random."""
    with (
        pytest.MonkeyPatch.context() as patch,
        open_engine(config_for(zoo, draft_by(patch, request.param))) as engine,
    ):
        yield engine


def config_for(zoo, drafter, **fields):
    """Return the config of an engine with this drafter. The model may draft for itself."""
    directory = zoo.directory("llama")
    draft_model = directory if drafter == "model" else ""
    return config_of(directory, drafter, draft_model=draft_model, **fields)


def test_the_rows_have_every_sampling_parameter():
    fields = {field for field in SamplingParams.__slots__ if field != "speculation"}
    assert fields == {*SAMPLING}


ACCEPTED: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by drafter


@settings(max_examples=examples(40), deadline=None)
@given(row=ROWS)
def test_on_equals_off_for_every_parameter(plain, drafting, row):
    found = compare(plain, drafting, request_of(row), acceptance=row["acceptance"])
    ACCEPTED[drafting.config.models[0].speculation].update(found)


@pytest.mark.slow
def test_the_drawn_rows_were_drafted(drafting):
    """Red if the drafter drafted nothing in the test above."""
    counts = ACCEPTED[drafting.config.models[0].speculation]
    assert counts["drafted"] > counts["accepted"] > 50


@pytest.mark.full
@settings(max_examples=1000, deadline=None)
@given(row=ROWS)
def test_on_equals_off_for_many_rows(plain, drafting, row):
    compare(plain, drafting, request_of(row), acceptance=row["acceptance"])


@pytest.mark.parametrize("position", range(1, 12))
def test_a_stop_string_inside_a_draft_ends_the_text_there(plain, drafting, position):
    base = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    text = ask(plain, GenerateRequest(token_ids=PROMPT, sampling=base))[0][1][0]
    stop = text[position : position + 3]
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=(stop,))
    request = GenerateRequest(token_ids=PROMPT, sampling=sampling)
    compare(plain, drafting, request, acceptance=1.0)


def test_a_request_can_switch_drafts_off(drafting, plain):
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, speculation=False)
    request = GenerateRequest(token_ids=PROMPT, sampling=sampling)
    assert compare(plain, drafting, request, acceptance=1.0)["drafted"] == 0


@pytest.mark.parametrize(
    ("drafter", "runner"),
    [
        ("lookup", "thread"),
        pytest.param("model", "thread", marks=pytest.mark.slow),
        pytest.param("model", "process", marks=pytest.mark.slow),
    ],
)
def test_preempted_and_cached_sequences_draft_the_same_tokens(
    zoo, plain, monkeypatch, drafter, runner
):
    """Eight requests share a pool for two, so that they are often preempted, between drafts."""
    requests = crowd()
    wanted = [ask(plain, request)[0][0][0] for request in requests]
    know(requests, wanted, acceptance=0.8)
    config = config_for(zoo, draft_by(monkeypatch, drafter), runner=runner, kv_cache_memory=300_000)
    with open_engine(config) as engine:
        for _ in range(2):  # the second time with cached prefixes
            found, accepted = ask_together(engine, requests)
            assert found == wanted
        totals = engine.statistics().totals
    # How often this happens depends on the order in which requests are read.
    assert totals.preemptions > 0
    assert totals.prefix_hits > 0
    assert accepted > 0


MUTANTS = (
    Mutant(
        "a penalty is counted twice",
        sequences.Ahead.push,
        "self.edits.push(token)",
        "self.edits.push(token); self.edits.push(token)",
    ),
    Mutant("a penalty is not counted", sequences.Ahead.push, "self.edits.push(token)", "pass"),
    Mutant("a draw is repeated", sequences.Ahead.push, "self.position += 1", "pass"),
    Mutant(
        "a token behind a wrong one is kept",
        TorchRunner._choose,
        "if state.drafts and token == state.drafts[0]:",
        "if state.drafts:",
    ),
    Mutant(
        "all log-probabilities are of the first position",
        text_runner.score_batch,
        "choice.logits + place",
        "choice.logits",
        owner=text_runner,
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.title)
def test_a_planted_bug_is_found(plain, drafting, mutant):
    """The comparison of the tests above finds each bug in eight requests. The requests may sample
    only eight different tokens, so that drafted tokens occur again soon and penalties matter."""

    def compare_all():
        for seed in range(8):
            sampling = SamplingParams(
                **{"seed": seed, "temperature": 0.7, "max_tokens": 24, "ignore_eos": True},
                **{"frequency_penalty": 1.0, "repetition_penalty": 1.3},
                allowed_token_ids=tuple(range(60, 68)),
            )
            request = GenerateRequest(token_ids=PROMPT, sampling=sampling, output={"logprobs": 0})
            compare(plain, drafting, request, acceptance=0.8)

    compare_all()
    with planted(mutant), pytest.raises(AssertionError):
        compare_all()


# ---- short rows


def logits_of(runner, tokens, counts, blocks):
    """Return the logits of every position from the prompt's end on, computed in rows of
    ``counts``."""
    plan_id = PlanId(0)
    start = len(tokens) - sum(counts)
    new = AdmittedSequence(SequenceId(1), tuple(tokens), Sampling(temperature=0.0), Stops(99))
    taken: list[np.ndarray] = []
    delta = BlockDelta(0, blocks)
    runner._forget([SequenceId(1)])
    runner._admit([new])
    rows = [(start + sum(counts[:i]), count) for i, count in enumerate(counts)]
    for first, count in [(0, start)] * bool(start) + rows:
        row = Row(SequenceId(1), first, count, delta, Logits.NONE)
        batch = runner._pack((row,))
        keep = np.arange(count, dtype=np.int64)
        with torch.inference_mode():
            logits = runner._forward(replace(batch, keep=keep))
        runner._finish((row,), batch, {}, NO_SCORES)
        if first >= start:
            taken.append(logits.numpy().copy())
        delta = None
    runner.execute(StepPlan(plan_id, (), released=(SequenceId(1),)))
    return np.concatenate(taken)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("arch", ["llama", "gemma2", "qwen3_moe"])
def test_short_rows_have_the_bits_of_decodes(zoo, arch, dtype, quantization):
    """Rows of 2 to 16 tokens (drafts, short prompts, last chunks) over contexts of no, one and two
    parts have the same logits, bit for bit, as one token after the other."""
    runner, info = load_runner(zoo.directory(arch), dtype=dtype, quantization=quantization)
    rng = random.Random(2)
    with closing(runner):
        for start in (0, 7, 509 if info.max_model_len > 540 else 60):
            tokens = [rng.randrange(1, 500) for _ in range(start + 24)]
            blocks = tuple(BlockId(i) for i in range(-(-len(tokens) // 16)))
            one = logits_of(runner, tokens, [1] * 24, blocks)
            for counts in ([2] * 12, [5, 3, 16], [16, 8], [7, 15, 2]):
                assert np.array_equal(logits_of(runner, tokens, counts, blocks), one), counts


# ---- the n-gram drafter


def test_a_draft_is_what_followed_the_same_tokens_before():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5]
    assert NgramDrafter().draft(tokens, [], 4) == [6, 7, 8, 1]
    assert NgramDrafter().draft(tokens[:-1], [5], 4) == [6, 7, 8, 1]
    assert NgramDrafter().draft(tokens[:-2], [], 9) == [4, 5, 6]
    assert NgramDrafter().draft([1, 2, 3] * 3, [], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert NgramDrafter().draft([1, 2, 3, 4], [], 3) == []
    assert NgramDrafter().draft([1], [], 3) == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=300), st.integers(1, 15), st.data())
def test_growing_sequences_are_drafted_like_whole_ones(tokens, most, data):
    """A drafter that rests after failed lookups drafts nothing, and is not compared. Each drafted
    token once followed the same three tokens."""
    grown = NgramDrafter()
    end = 0
    while end < len(tokens):
        end = min(len(tokens), end + data.draw(st.integers(1, 90)))
        begun = tokens[:end]
        rests = end < grown._rests_until and end == grown._size + 1
        draft = grown.draft(begun, [], most)
        if rests:
            assert draft == []
            continue
        assert len(draft) in (0, most) or len(draft) == 3
        assert draft == NgramDrafter().draft(begun, [], most)
        whole = [*begun, *draft]
        for place in range(end, len(whole)):
            last = whole[place - 3 : place + 1]
            assert any(whole[i : i + 4] == last for i in range(place - 3))


def test_a_text_that_repeats_nothing_is_looked_up_seldom_and_its_first_repetition_is_found(
    monkeypatch,
):
    """Red if the drafter looks up each token, which took 1.6 % of the time of eight stories."""
    lookups, real = [], NgramDrafter._lookup
    monkeypatch.setattr(NgramDrafter, "_lookup", lambda *args: lookups.append(1) or real(*args))
    one, tokens = NgramDrafter(), []
    for token in range(1000):
        tokens.append(token)
        assert one.draft(tokens, [], 8) == []
    assert len(lookups) < 120
    for token in range(900, 903 + REST_MAX):
        tokens.append(token)
        if draft := one.draft(tokens, [], 8):
            break
    assert draft == list(range(token + 1, token + 9))
    tokens += draft[:2]  # the drafter takes growth by several tokens for an accepted draft
    assert one.draft(tokens, [], 8) == list(range(token + 3, token + 11))


def test_drafts_that_nobody_takes_are_looked_up_at_each_fourth_token(monkeypatch):
    """Red if a draft that is not used or not accepted keeps the drafter from resting. After an
    accepted draft, the drafter looks up each token again."""
    lookups, real = [], NgramDrafter._lookup
    monkeypatch.setattr(NgramDrafter, "_lookup", lambda *args: lookups.append(1) or real(*args))
    one, tokens = NgramDrafter(), [*range(10)]
    for index in range(400):
        tokens.append(index % 10)
        one.draft(tokens, [], 8)
    assert 100 < len(lookups) < 120
    while not one.draft(tokens, [], 8):
        tokens.append(len(tokens) % 10)
    for _ in range(3):
        tokens += [len(tokens) % 10, (len(tokens) + 1) % 10]
        assert one.draft(tokens, [], 8)[0] == len(tokens) % 10


def test_the_memory_of_an_ngram_drafter_is_bounded():
    rng = random.Random(5)
    one, tokens = NgramDrafter(), []
    for _ in range(60):
        tokens += [rng.randrange(150_000) for _ in range(1000)]
        one.draft(tokens, [], 8)
    assert len(one._long) * one._long.itemsize <= 1 << 16
    assert len(one._short) == len(one._long)


FORMS = {
    '{"first name": "boat", "second name": "a lamp by the sea"}': (
        '{"type": "object", "properties": {"first name": {"const": "boat"}, "second name": '
        '{"const": "a lamp by the sea"}}, "required": ["first name", "second name"], '
        '"additionalProperties": false}'
    ),
    '"the secret of the old man was a small secret"': (
        '{"const": "the secret of the old man was a small secret"}'
    ),
}


@pytest.mark.parametrize("answer", FORMS)
def test_forced_tokens_are_those_that_the_tokenizer_writes(answer):
    """Models are trained on the tokens that the tokenizer makes of a text, and so accept these."""
    runner, _ = load_runner("demo-stories")
    with closing(runner):
        constraint = Constraint("json_schema", FORMS[answer])
        runner.compile(constraint)
        matching, count = runner._grammars.start(constraint), 0
        tokens = list(runner.tokenizer.encode(answer, add_special_tokens=False))
        for place, token in enumerate(tokens):
            forced = matching.forced()
            assert forced == tokens[place : place + len(forced)], place
            count += len(forced) > 0
            matching.push(token)
        assert count > len(tokens) // 2


@pytest.mark.parametrize("lie", [[5], [70, 71], list(range(60, 75))])
def test_tokens_that_a_constraint_forces_wrongly_are_only_rejected(plain, zoo, monkeypatch, lie):
    """Forced tokens are verified like any draft."""
    constraint = Constraint("regex", "[a-z ]{20,40}")
    request = GenerateRequest(
        token_ids=PROMPT,
        sampling=SamplingParams(seed=2, temperature=0.9, max_tokens=50),
        constraint=constraint,
    )
    wanted = ask(plain, request)[0]
    monkeypatch.setattr(Matching, "forced", lambda self: list(lie))
    with open_engine(config_of(zoo.directory("llama"), "lookup")) as engine:
        assert ask(engine, request)[0] == wanted


def test_what_a_grammar_forces_is_drafted(zoo):
    """In an answer by a strict schema most tokens are forced, and the model accepts them."""
    schema = (
        '{"type": "object", "properties": {"first name": {"const": "boat"}, '
        '"second name": {"const": "lamp"}}, "required": ["first name", "second name"], '
        '"additionalProperties": false}'
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=90)
    request = GenerateRequest(
        token_ids=PROMPT, sampling=sampling, constraint=Constraint("json_schema", schema)
    )
    found = {}
    for speculation in ("off", "lookup"):
        with open_engine(config_of(zoo.directory("llama"), speculation)) as engine:
            answer, _, drafted = ask(engine, request)
            found[speculation] = answer
            counts = {one.drafter: one for one in drafts_of(engine)}
    assert found["off"] == found["lookup"]
    assert drafted["accepted"] > 10
    assert counts["constraint"].accepted > 10
    assert drafted["drafted"] == sum(one.drafted for one in counts.values())
