"""With a draft model, a model gives the same tokens as without one (D27).

Here a model drafts for itself, and a random share of its drafted tokens is made wrong, so that the
draft model's cache is rolled back at any place. Answers are compared as in test_drafts.py. The
shipped draft model is tested at the end.
"""

import json
import random
import shutil
from collections import Counter

import pytest

from engine.api._generated.blocking import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.text.drafting.draft_lengths import Lengths
from engine.core.text.types import Constraint, Tokens
from engine.errors import SpawnFailed
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.factory import runner_of, runner_spec
from engine.worker.text import draft_model, sequences
from engine.worker.text.draft_cache import Resident
from engine.worker.text.draft_model import DraftModel
from tests.checkpoints.text import Shape, make
from tests.simulator.mutants import Mutant, planted
from tests.support.draft_rows import (
    PROMPT,
    Lying,
    ask,
    compare,
    config_of,
    crowd,
    draft_by,
    drafts_of,
)


@pytest.fixture(scope="module", autouse=True)
def only_the_model():
    """Let the draft model draft, and no other drafter (`draft_by`)."""
    with pytest.MonkeyPatch.context() as patch:
        draft_by(patch, "model")
        yield


def with_model(zoo, **fields):
    directory = zoo.directory("llama")
    return config_of(directory, "model", draft_model=directory, **fields)


@pytest.fixture(scope="module")
def drafting(zoo):
    with open_engine(with_model(zoo)) as engine:
        yield engine


def greedy(**fields):
    sampling = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, **fields}
    return GenerateRequest(token_ids=PROMPT, sampling=SamplingParams(**sampling))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.1, "seed": 4}, {"n": 3, "seed": 9}])
def test_a_model_that_drafts_for_itself_is_always_right(plain, drafting, sampling):
    """Red if a draft is greedy, or has the noise of another position or choice than the target."""
    sampling = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **sampling}
    n = sampling.pop("n", None)
    if n:
        sampling["temperature"] = 1.0
    sampling |= {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "top_p": 0.9}
    request = GenerateRequest(token_ids=PROMPT, sampling=SamplingParams(**sampling), n=n)
    drafted = compare(plain, drafting, request, acceptance=1.0)
    assert drafted["accepted"] > 15
    assert drafted["accepted"] >= 0.95 * drafted["drafted"]


def test_a_constraint_bounds_what_is_drafted(plain, drafting):
    constraint = Constraint("regex", "[a-z ]{30,60}")
    request = GenerateRequest(
        token_ids=PROMPT,
        sampling=SamplingParams(temperature=0.9, seed=3, max_tokens=50),
        constraint=constraint,
    )
    drafted = compare(plain, drafting, request, acceptance=1.0)
    assert drafted["accepted"] >= 0.9 * drafted["drafted"] > 5


def test_what_a_constraint_forces_needs_no_draft_model(zoo, plain):
    """A draft begins with the forced tokens; if these are enough, the draft model is not run."""
    schema = (
        '{"type": "object", "properties": {"first name": {"const": "boat and lamp"}}, '
        '"required": ["first name"], "additionalProperties": false}'
    )
    request = GenerateRequest(
        token_ids=PROMPT,
        sampling=SamplingParams(temperature=0.0, max_tokens=60),
        constraint=Constraint("json_schema", schema),
    )
    with open_engine(with_model(zoo)) as engine:
        drafted = compare(plain, engine, request, acceptance=0.0)
        assert drafted["accepted"] > 5
        before = {one.drafter: one for one in drafts_of(engine)}
        assert compare(plain, engine, greedy(), acceptance=1.0)["accepted"] > 10  # drafts again
        after = {one.drafter: one for one in drafts_of(engine)}
    assert before["constraint"].accepted > 5
    assert before["constraint"] == after["constraint"], "each drafter counts its own"
    assert after["model"].accepted > before["model"].accepted + 10
    assert after["lookup"].drafted == 0


def ask_slowly(engine, requests, rng):
    """Return the tokens of each request, read one message at a time from a random stream."""
    found = [[] for _ in requests]
    left = dict(enumerate(map(iter, map(engine.generate, requests))))
    while left:
        index = rng.choice(list(left))
        event = next(left[index], None)
        if event is None:
            del left[index]
        elif isinstance(event, Tokens):
            found[index] += event.token_ids
    return found


@pytest.mark.parametrize("fields", [{}, {"kv_cache_memory": 300_000}, {"in_process_buffer": 2}])
def test_both_drafters_of_drawn_lengths_change_no_token_of_a_crowd(zoo, plain, monkeypatch, fields):
    """Either drafter may draft, any number of tokens, in a small pool and with readers that have
    credit for two messages. The n-gram drafter's drafts are random."""
    rng, requests = random.Random(7), crowd()
    lengths = lambda _, most, *costs: (rng.randint(0, most), 1.0 + rng.random())  # noqa: E731
    monkeypatch.setattr(Lengths, "best", lengths)
    monkeypatch.setattr(
        sequences.NgramDrafter,
        "draft",
        lambda _, tokens, behind, most: [rng.randrange(512) for _ in range(rng.randint(0, most))],
    )
    Lying.acceptance = 0.9
    wanted = [ask(plain, request)[0][0][0] for request in requests]
    with open_engine(with_model(zoo, **fields)) as engine:
        for _ in range(2):
            assert ask_slowly(engine, requests, rng) == wanted
        counts = {one.drafter: one for one in drafts_of(engine)}
    assert counts["lookup"].drafted > 20
    assert counts["model"].accepted > 20


def acceptance_of(plain, drafting):
    """Return the share of accepted tokens of drafts, of which most are made right."""
    total = Counter()
    Lying.random.seed(1)
    for seed in range(8):
        request = greedy(temperature=0.3, seed=seed, max_tokens=100)
        total.update(compare(plain, drafting, request, acceptance=0.6))
    assert total["drafted"] > 100
    return total["accepted"] / total["drafted"]


CACHE_FAULTS = (
    Mutant(
        "rejected drafts stay in the cache",
        Resident.roll_back,
        "del self.tokens[self.known :]",
        "pass",
    ),
    Mutant(
        "the draft is of another position's noise",
        DraftModel._take,
        "writing.ahead.push(token)",
        "writing.ahead.push(token) and not setattr(writing.ahead, 'position', 0)",
    ),
    Mutant(
        "a token is not read", DraftModel._take, "writing.unread = [token]", "writing.unread = [0]"
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("fault", CACHE_FAULTS, ids=lambda fault: fault.title)
def test_a_fault_of_the_draft_model_costs_acceptance_and_no_token(plain, drafting, fault):
    """`acceptance_of` checks the tokens with the fault, too."""
    right = acceptance_of(plain, drafting)
    with planted(fault):
        wrong = acceptance_of(plain, drafting)
    assert right > 0.25
    assert wrong < 0.9 * right


def test_a_draft_model_that_fails_drafts_nothing_and_fails_no_request(zoo, plain, caplog):
    request = greedy()
    wanted = ask(plain, request)[0]
    with open_engine(with_model(zoo)) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lying, "_forward", None)
        assert ask(engine, request)[0] == wanted
        assert ask(engine, request)[2]["drafted"] == 0
    assert "the draft model failed" in caplog.text


def test_a_long_prompt_is_read_in_parts(zoo, plain, monkeypatch):
    """The draft model reads at most `READ_MAX` tokens of the prompt for each step."""
    monkeypatch.setattr(draft_model, "READ_MAX", 8)
    with open_engine(with_model(zoo)) as engine:
        drafted = compare(plain, engine, greedy(), acceptance=1.0)
    assert drafted["accepted"] > 10
    assert drafted["accepted"] >= 0.9 * drafted["drafted"]


# ---- memory and loading


def test_the_draft_model_counts_in_the_estimate_and_in_what_is_loaded(zoo):
    config = with_model(zoo)
    spec = runner_spec(config.models[0], config)
    config = config_of(zoo.directory("llama"), "off")
    plain_spec = runner_spec(config.models[0], config)
    found = {}
    for name, one in (("with", spec), ("without", plain_spec)):
        runner = runner_of(one, None)
        estimate = runner.estimate().num_bytes
        info = runner.load(lambda _: None)
        cache = 0
        if name == "with":
            pool = runner._drafter._placed.pool
            weights = runner._drafter._placed.execution.model.num_bytes
            cache = pool.num_bytes + weights
            assert pool.num_blocks * pool.block_size >= info.max_model_len
            assert pool.num_bytes <= max(
                runner._cache.num_blocks * pool.bytes_per_block // draft_model.CACHE_PART,
                -(-info.max_model_len // pool.block_size) * pool.bytes_per_block,
            )
        found[name] = (estimate, info.memory_bytes, cache)
        runner.close()
    assert found["with"][0] - found["without"][0] >= found["with"][2]
    assert found["with"][1] - found["without"][1] >= found["with"][2]
    assert found["with"][1] <= found["with"][0]


def test_a_draft_model_of_another_vocabulary_is_refused_by_both_names(zoo, tmp_path):
    other = shutil.copytree(zoo.directory("llama"), tmp_path / "other-words")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    added.append({**added[-1], "id": 511, "content": "<|another|>"})
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = config_of(zoo.directory("llama"), "model", draft_model=other)
    runner = runner_of(runner_spec(config.models[0], config), None)
    with pytest.raises(SpawnFailed) as caught:
        runner.load(lambda _: None)
    assert str(caught.value).removeprefix("Worker spawn failed: ") == (
        "the draft model other-words has another vocabulary than llama; give a --draft-model of "
        "the same tokenizer"
    )


def test_a_draft_model_with_fewer_rows_reads_none_outside_them(tmp_path):
    """The smallest model of a family may have an embedding with less padding than the others."""
    large = make(tmp_path / "large", "llama", Shape(vocab=544))
    small = make(tmp_path / "small", "llama", Shape(vocab=512))
    shutil.copy(large / "tokenizer.json", small / "tokenizer.json")
    request = GenerateRequest(
        token_ids=(*PROMPT, 543, 512, 520),
        sampling=SamplingParams(
            temperature=0.0, max_tokens=40, logit_bias={540: 30.0, 7: 30.0}, repetition_penalty=1.3
        ),
    )
    answers = []
    for speculation, draft in (("off", ""), ("model", small)):
        config = config_of(large, speculation, draft_model=str(draft))
        with open_engine(config) as engine:
            (tokens, *_), _, drafted = ask(engine, request)
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert max(answers[0][0]) >= 512
    assert drafted["drafted"]


def test_a_draft_model_that_cannot_be_served_is_named(zoo, tmp_path):
    config = config_of(zoo.directory("llama"), "model", draft_model=tmp_path / "nothing")
    runner = runner_of(runner_spec(config.models[0], config), None)
    for attempt in (runner.estimate, lambda: runner.load(lambda _: None)):
        with pytest.raises(SpawnFailed, match="the draft model nothing: "):
            attempt()


# ---- the shipped draft model


def test_the_shipped_draft_model_is_right_mostly_and_changes_no_story():
    """The shipped draft model is a quarter of the story model's size; most drafts are accepted."""
    requests = [
        GenerateRequest(
            text=text, sampling=SamplingParams(max_tokens=120, ignore_eos=True, **sampling)
        )
        for text in ("Lily had a secret.", "One day a dog found a bone in the park.")
        for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5})
    ]
    found = {}
    for speculation, drafts in (("off", ""), ("model", "demo-draft")):
        model = ModelConfig("demo-stories", threads=1, speculation=speculation, draft_model=drafts)
        total = Counter()
        with (
            pytest.MonkeyPatch.context() as patch,
            open_engine(EngineConfig(models=(model,), check_level=2)) as engine,
        ):
            patch.setattr(draft_model.DraftModel, "acceptance", 1.0)
            answers = []
            for request in requests:
                answer, _, drafted = ask(engine, request)
                answers.append(answer)
                total.update(drafted)
        found[speculation] = answers
    assert found["off"] == found["model"]
    assert total["drafted"] > 100
    assert total["accepted"] > 0.6 * total["drafted"]
