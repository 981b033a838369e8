"""Log-probabilities of sampled tokens and of prompts, against transformers' log-softmax.

The log-probabilities are the model's own, before temperature and every edit, and do not depend on
the schedule: chunks, preemption, forks, the prefix cache.
"""

import math
import random

import pytest
import torch
import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.common.events import Finished
from engine.core.text.plan import Logits
from engine.core.text.types import Sampling, Tokens
from engine.errors import EngineBug
from engine.requests.text.values import GenerateRequest, OutputOptions, SamplingParams, Started
from engine.worker.sampling import logprobs as logprobs_module
from engine.worker.sampling.logprobs import Wanted, score
from tests.support.mini_planner import MiniPlanner
from tests.support.model_zoo import seeded_prompt

TOLERANCE = 1e-4


def text_of(token):
    return f"<{token}>"


# --- from logits ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["rows", "batch"])
@pytest.mark.parametrize("vocab", [1, 5, 700, 49_152])
def test_scores_are_log_softmax_and_its_likeliest(way, vocab):
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * 4 + 30
    wanted = [Wanted(row, (row * 7) % vocab, count) for row, count in ((3, 0), (0, 20), (0, 2))]
    exact = logits.double().log_softmax(1)
    # The tolerance is four float32 steps at the size of these logits, as a sum of 49,152 terms is
    # rounded differently by each processor.
    near = 4 * torch.finfo(torch.float32).eps * logits.abs().max().item()
    if way == "batch":
        scored = logprobs_module._score_batch(logits, wanted)
    else:
        scored = [logprobs_module._score_row(logits[one.row].numpy(), one) for one in wanted]
    for one, (logprob, likely) in zip(wanted, scored, strict=True):
        values, ids = exact[one.row].topk(min(one.alternatives, vocab))
        assert logprob == pytest.approx(exact[one.row, one.token].item(), abs=near)
        assert [i for i, _ in likely] == ids.tolist()
        assert [p for _, p in likely] == pytest.approx(values.tolist(), abs=near)


def test_scores_of_a_batch_come_to_the_host_in_one_copy(monkeypatch):
    logits, copies, stock = torch.randn(4, 60), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda one: copies.append(one) or stock(one))
    logprobs_module._score_batch(logits, [Wanted(0, 3, 2), Wanted(2, 5, 0)])
    assert len(copies) == 1


def test_alternatives_have_their_text_and_rank_and_equal_ones_go_by_id():
    logits = torch.tensor([[0.0, 2.0, -math.inf, 2.0]])
    [entry] = score(logits, [Wanted(0, 2, 3)], text_of)
    assert (entry.token_id, entry.text, entry.logprob) == (2, "<2>", -math.inf)
    assert [(a.token_id, a.text, a.rank) for a in entry.alternatives] == [
        (1, "<1>", 0),
        (3, "<3>", 1),
        (0, "<0>", 2),
    ]
    assert sum(math.exp(a.logprob) for a in entry.alternatives) == pytest.approx(1.0)
    assert score(logits, [], text_of) == []


# --- from a model ---------------------------------------------------------------------------


def check_entries(loaded, entries, logits, tokens, alternatives):
    """Check the entry of each token against its row of ``logits`` [tokens, vocab]."""
    assert [entry.token_id for entry in entries] == list(tokens)
    exact = logits.double().log_softmax(1)
    for entry, row in zip(entries, exact, strict=True):
        assert entry.text == loaded.runner.tokenizer.token_text(entry.token_id)
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=TOLERANCE)
        own = [alternative.logprob for alternative in entry.alternatives]
        assert own == pytest.approx(row.topk(alternatives).values.tolist(), abs=TOLERANCE)
        ids = [alternative.token_id for alternative in entry.alternatives]
        assert row[ids].tolist() == pytest.approx(own, abs=TOLERANCE)
        assert [a.rank for a in entry.alternatives] == list(range(alternatives))


def check(loaded, one):
    """Check all entries of one sequence against transformers on prompt and output."""
    logits, _ = loaded.oracle.next_logits(one.tokens)
    size, sampling = len(one.prompt), one.sampling
    if sampling.logprobs is not None:
        own = logits[size - 1 : len(one.tokens) - 1]
        check_entries(loaded, one.logprobs, own, one.output, sampling.logprobs)
    else:
        assert one.logprobs == []
    if sampling.prompt_logprobs is not None:
        first, *others = one.prompt_logprobs
        assert (first.token_id, first.logprob, first.alternatives) == (one.prompt[0], None, ())
        rows = logits[: size - 1]
        check_entries(loaded, others, rows, one.prompt[1:], sampling.prompt_logprobs)
    else:
        assert one.prompt_logprobs == []


ASKED = [
    Sampling(0.0, logprobs=4, prompt_logprobs=2),
    Sampling(1.4, seed=3, logprobs=0, prompt_logprobs=0),
    Sampling(0.8, seed=3, top_k=4, repetition_penalty=1.5, banned_token_ids=(9,), logprobs=20),
    Sampling(0.0, prompt_logprobs=20),
    Sampling(0.0),
]


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gpt2", "granite", "phi3"])
def test_log_probabilities_are_transformers_log_softmax(zoo, name):
    """The prompts are in one batch, in chunks of any size, preempted in prompt and output."""
    loaded = zoo.load(name)
    planner = MiniPlanner(loaded.runner, loaded.info, seed=5, chunks=9)
    done = [
        planner.add(seeded_prompt(length, seed), 8, sampling=sampling)
        for seed, sampling in enumerate(ASKED)
        for length in (1, 2, 17, 40)
    ]
    rng = random.Random(2)
    while live := [one for one in done if not one.is_done]:
        planner.step(live)
        if rng.random() < 0.4:
            planner.preempt(rng.choice(live))
    for one in done:
        assert one.failure is None
        check(loaded, one)
    planner.run()


def test_each_choice_has_its_own_and_the_prompts_come_once(llama):
    sampling = Sampling(1.0, seed=4, logprobs=2, prompt_logprobs=1)
    planner = MiniPlanner(llama.runner, llama.info, seed=5, chunks=7)
    planner.add(seeded_prompt(21), 6, sampling=sampling, choices=3)
    while live := [one for one in planner.sequences.values() if not one.is_done]:
        planner.step(live)
    first, *others = planner.sequences.values()
    assert len(others) == 2
    check(llama, first)
    for one in others:
        assert one.prompt_logprobs == []
        logits, _ = llama.oracle.next_logits(one.tokens)
        check_entries(llama, one.logprobs, logits[20:-1], one.output, 2)
    planner.run()


def test_a_step_that_raises_while_scoring_can_be_executed_again(llama, monkeypatch):
    planner = MiniPlanner(llama.runner, llama.info, seed=5, chunks=9)
    one = planner.add(seeded_prompt(30), 3, sampling=ASKED[0])
    planner.step([one])
    stock = llama.runner.execute

    def twice(plan):
        with monkeypatch.context() as broken:
            broken.setattr(type(llama.runner), "_finish", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                stock(plan)
        return stock(plan)

    with monkeypatch.context() as patch:
        patch.setattr(llama.runner, "execute", twice)
        while not one.is_done:
            planner.step([one])
    check(llama, one)
    planner.run()


@pytest.mark.parametrize("skipped", [{Logits.PROMPT}, {Logits.PROMPT, Logits.ALL}])
def test_a_plan_that_skips_scores_is_an_engine_bug(llama, monkeypatch, skipped):
    planner = MiniPlanner(llama.runner, llama.info, seed=5, chunks=9)
    one = planner.add(seeded_prompt(30), 3, sampling=ASKED[0])
    plain = {Logits.PROMPT: Logits.NONE, Logits.ALL: Logits.LAST}
    stock = planner._row

    def unscored(*args):
        row = stock(*args)
        return row._replace(logits=plain[row.logits]) if row.logits in skipped else row

    monkeypatch.setattr(planner, "_row", unscored)

    def run_to_its_end():
        while not one.is_done:
            planner.step([one])

    with pytest.raises(EngineBug):
        run_to_its_end()
    assert not one.output
    planner.release(one)
    planner.run()


# --- through the engine ---------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["chunked", "cached"])
def test_a_prompt_is_scored_completely_even_if_it_is_cached(llama, schedule):
    """A scored prompt is computed from its first token on, and its blocks are cached for others."""
    prompt = tuple(seeded_prompt(150))
    asked = GenerateRequest(
        token_ids=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
        output=OutputOptions(prompt_logprobs=2, logprobs=1),
        n=2,
    )
    plain = GenerateRequest(token_ids=prompt, sampling=asked.sampling)
    config = EngineConfig(
        models=(ModelConfig(str(llama.directory)),),
        check_level=2,
        max_num_seqs=8,
        max_num_batched_tokens=24 if schedule == "chunked" else 512,
    )

    async def main():
        async with open_engine(config) as engine:
            if schedule == "cached":
                await heard(engine, plain)
            told, cached, tokens, scores = await heard(engine, asked)
            assert cached == 0
            assert (await heard(engine, plain))[1] == 144, "nine whole blocks"
            return told, tokens, scores

    async def heard(engine, request):
        tokens, scores, started = {0: [], 1: []}, {0: [], 1: []}, []
        async with engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, Started):
                    started.append(event)
                    assert not tokens[0]
                elif isinstance(event, Tokens):
                    assert event.prompt_logprobs == ()
                    tokens[event.choice] += event.token_ids
                    scores[event.choice] += event.logprobs
                elif isinstance(event, Finished) and event.choice == 0:
                    cached = event.usage.cached_tokens
        [only] = started
        return only.prompt_logprobs, cached, tokens, scores

    told, tokens, scores = trio.run(main)
    logits, _ = llama.oracle.next_logits([*prompt, *tokens[0]])
    assert told[0].logprob is None
    check_entries(llama, told[1:], logits[: len(prompt) - 1], prompt[1:], 2)
    for choice in range(2):
        check_entries(llama, scores[choice], logits[len(prompt) - 1 : -1], tokens[choice], 1)
