"""Edits of logits against transformers' own processors on the same logits.

Both ways to sample (by rows, by batch) are tested with each edit alone and all edits in a batch.
Presence and frequency penalties, which transformers lacks, are compared with their definition.
"""

import math
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
import trio
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.common.types import SequenceId
from engine.core.text.plan import AdmittedSequence
from engine.core.text.types import Sampling, Stops, Tokens
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.sampling import candidates, draw_batch, draw_rows, sampler
from engine.worker.sampling.edits import TokenCounts, make_edits
from engine.worker.sampling.sampler import SampleRow, sample
from engine.worker.text.sequences import SequenceState

VOCAB = 60
inf = math.inf


def row_of(sampling, prompt, output, banned=frozenset()):
    """Return a row as a worker makes it: with edits of the prompt and of each output token."""
    edits = make_edits(sampling, prompt)
    for token in output if edits is not None else ():
        edits.push(token)
    return SampleRow(sampling, len(output), banned, edits)


def edited(way, logits, rows):
    """Return the logits [rows, vocab] from which tokens are drawn."""
    if way == "rows":
        arrays = [
            draw_rows._processed(own.numpy(), row) for own, row in zip(logits, rows, strict=True)
        ]
        return torch.stack([torch.from_numpy(array) for array in arrays])
    scores = logits.clone()
    draw_batch._process(scores, rows)
    return scores


def by_transformers(logits, sampling, prompt, output, banned=frozenset()):
    """Edit one row's logits [vocab] by transformers' processors, in the order of its `generate`."""
    scores = logits[None].clone()
    everything = torch.tensor([[*prompt, *output]])
    own = torch.tensor([output], dtype=torch.int64)
    if sampling.logit_bias:
        bias = {(token,): float(value) for token, value in sampling.logit_bias}
        scores = SequenceBiasLogitsProcessor(bias)(everything, scores)
    if sampling.repetition_penalty != 1.0:
        penalty = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        scores = penalty(everything, scores)
    for token in set(output):  # OpenAI's definition, which transformers lacks
        taken = sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
        scores[0, token] -= taken
    if sampling.bad_words:
        words = [list(word) for word in sampling.bad_words]
        scores = NoBadWordsLogitsProcessor(words)(own, scores)
    suppressed = {*sampling.banned_token_ids, *banned}
    if sampling.allowed_token_ids:
        suppressed |= set(range(len(logits))) - {*sampling.allowed_token_ids}
    if suppressed:
        scores = SuppressTokensLogitsProcessor(sorted(suppressed))(everything, scores)
    return scores[0]


def logits_of(seed, rows=1, vocab=VOCAB):
    """Return random logits [rows, vocab]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * 3.0


PROMPT, OUTPUT = [3, 3, 8, 11, 40], [8, 20, 8, 5, 6]
ALONE = {
    "bias": Sampling(logit_bias=((3, 5.0), (20, -100.0), (59, 0.25))),
    "repetition above 1": Sampling(repetition_penalty=1.3),
    "repetition below 1": Sampling(repetition_penalty=0.6),
    "presence": Sampling(presence_penalty=1.5),
    "presence below 0": Sampling(presence_penalty=-2.0),
    "frequency": Sampling(frequency_penalty=0.7),
    "both and repetition": Sampling(
        presence_penalty=0.3, frequency_penalty=-0.4, repetition_penalty=1.1
    ),
    "banned": Sampling(banned_token_ids=(0, 8, 59)),
    "allowed": Sampling(allowed_token_ids=(5, 8, 9)),
    "bad words of one token": Sampling(bad_words=((8,), (9,))),
    "bad words that end now": Sampling(bad_words=((5, 6, 7), (6, 1), (8, 20, 8, 5, 6, 2))),
    "bad words that do not": Sampling(bad_words=((5, 7), (6, 5, 6), (1,) * 9)),
    "bad words across the prompt": Sampling(bad_words=((40, 8, 20, 8, 5, 6, 9),)),
    "all": Sampling(
        logit_bias=((8, 2.0), (30, -1.0)),
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        banned_token_ids=(1, 2),
        allowed_token_ids=tuple(range(0, 60, 2)),
        bad_words=((6, 10), (12,)),
    ),
    "none": Sampling(),
}


@pytest.mark.parametrize("way", ["rows", "batch"])
@pytest.mark.parametrize("name", ALONE)
def test_an_edit_alone_is_that_of_transformers(way, name):
    sampling, logits = ALONE[name], logits_of(len(name))
    for prompt, output in ((PROMPT, OUTPUT), (PROMPT, []), ([1], OUTPUT)):
        ours = edited(way, logits, [row_of(sampling, prompt, output)])[0]
        theirs = by_transformers(logits[0], sampling, prompt, output)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    inert = ("none", "bad words that do not", "bad words across the prompt")
    assert (ours == logits[0]).all() == (name in inert)


ids = st.integers(0, VOCAB - 1)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 0, 7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 2.0]),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=5).map(
        lambda biases: tuple(biases.items())
    ),
    allowed_token_ids=st.one_of(st.just(()), st.sets(ids, min_size=9).map(tuple)),
    banned_token_ids=st.sets(ids, max_size=3).map(tuple),
    bad_words=st.lists(
        st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=3, unique=True
    ).map(tuple),
    seed=st.sampled_from([None, 9]),
)
cases = st.tuples(
    samplings,
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.lists(st.integers(0, 5), max_size=12),
    st.sampled_from([frozenset(), frozenset({4, 7})]),
)


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(cases, min_size=1, max_size=6), seed=st.integers(0, 99))
def test_a_mixed_batch_is_edited_row_by_row_as_by_transformers(batch, seed):
    logits = logits_of(seed, len(batch))
    rows = [row_of(*case) for case in batch]
    theirs = torch.stack(
        [by_transformers(own, *case) for own, case in zip(logits, batch, strict=True)]
    )
    before = logits.clone()
    for way in ("rows", "batch"):
        torch.testing.assert_close(edited(way, logits, rows), theirs, rtol=1e-6, atol=1e-5)
    assert torch.equal(logits, before)


@settings(max_examples=40, deadline=None)
@given(batch=st.lists(cases, min_size=2, max_size=6), seed=st.integers(0, 99))
def test_a_rows_token_is_the_same_alone_in_a_batch_and_either_way(batch, seed):
    """Only greedy and seeded rows are compared; the other rows advance the generator."""
    logits = logits_of(seed, len(batch))
    rows = [row_of(*case) for case in batch]
    theirs = [by_transformers(own, *case) for own, case in zip(logits, batch, strict=True)]
    assume(all(scores.max() > -inf for scores in theirs))
    fixed = [i for i, r in enumerate(rows) if r.sampling.is_greedy or r.sampling.seed is not None]
    found = []
    for way in ("rows", "batch"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler, "_is_by_rows", lambda _, way=way: way == "rows")
            together = sample(logits, rows, torch.Generator())
            alone = [sample(logits[[i]], [rows[i]], torch.Generator())[0] for i in fixed]
        assert [together[i] for i in fixed] == alone
        assert all(scores[token] > -inf for scores, token in zip(theirs, together, strict=True))
        found.append(alone)
    assert found[0] == found[1]
    for i, token in zip(fixed, found[0], strict=True):
        if rows[i].sampling.is_greedy:
            assert theirs[i][token] >= theirs[i].max() - 1e-5


@pytest.mark.parametrize("way", ["rows", "batch"])
def test_min_tokens_is_transformers_min_new_tokens(way):
    prompt, ends, logits = (1, 2, 3), [4, 9], logits_of(1)
    stops = Stops(max_tokens=9, min_tokens=2, token_ids=frozenset(ends))
    state = SequenceState.admit(AdmittedSequence(SequenceId(1), prompt, Sampling(0.0), stops))
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), 2, ends, device="cpu")
    for count in range(4):
        ours = edited(way, logits, [state.sample_row()])
        assert torch.equal(ours, processor(torch.tensor([state.tokens]), logits.clone()))
        assert torch.isinf(ours).any() == (count < 2)
        state.tokens.append(5)


# --- typical_p ------------------------------------------------------------------------------


def kept_by_us(way, scores, sampling):
    """Return the ids that our truncation keeps of one row [vocab]."""
    if way == "rows":
        found, own = draw_rows.listed(scores.numpy(), int(scores.argmax()), sampling)
        return set(found[own > -inf].tolist())
    row = SampleRow(sampling, 0)
    kind = draw_batch._kind_of(row, len(scores))
    [part] = draw_batch._candidates(kind, (0,), scores[None], [row])
    columns = (part.scores[0] > -inf).nonzero()[None, :, 0]
    return set(part.token_ids(columns)[0].tolist())


def warped(scores, sampling):
    """Return one row's scores after transformers' warpers."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, scores[None])
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p > 0.0:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    if sampling.typical_p < 1.0:
        scores = TypicalLogitsWarper(sampling.typical_p)(None, scores)
    return scores[0]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.5, 1.0, 1.7]),
        top_k=st.sampled_from([0, 0, 5, 30]),
        top_p=st.sampled_from([1.0, 1.0, 0.8]),
        min_p=st.sampled_from([0.0, 0.0, 0.05]),
        typical_p=st.floats(0.02, 0.98),
    ),
)
def test_typical_p_keeps_what_transformers_keeps(seed, spread, sampling):
    scores = logits_of(seed)[0] * spread
    theirs = set((warped(scores, sampling) > -inf).nonzero()[:, 0].tolist())
    near = (sampling.typical_p - 1e-5, sampling.typical_p + 1e-5)
    assume(  # exact arithmetic may differ from float32 at the boundary
        all(
            (warped(scores, replace(sampling, typical_p=p)) > -inf).sum() == len(theirs)
            for p in near
        )
    )
    assert kept_by_us("rows", scores, sampling) == theirs
    assert kept_by_us("batch", scores, sampling) == theirs


def test_typical_p_drops_the_likeliest_where_it_is_not_typical():
    """typical_p does not keep a prefix of the tokens sorted by probability."""
    scores = torch.tensor([4.0, *[1.0] * 40])
    sampling = Sampling(typical_p=0.4)
    for way in ("rows", "batch"):
        assert kept_by_us(way, scores, sampling) == set(range(1, 41))
    assert kept_by_us("rows", scores, replace(sampling, typical_p=0.0)) == set(range(1, 41))


@pytest.mark.parametrize("seed", [None, 4])
def test_rows_with_and_without_typical_p_share_a_batch(monkeypatch, seed):
    scores = torch.tensor([4.0, *[1.0] * 40]).expand(200, 41)
    limits = [Sampling(typical_p=0.4 if i % 2 else 1.0, seed=seed) for i in range(200)]
    rows = [SampleRow(one, i) for i, one in enumerate(limits)]
    found = []
    for way in ("rows", "batch"):
        monkeypatch.setattr(sampler, "_is_by_rows", lambda _, way=way: way == "rows")
        tokens = sample(scores, rows, torch.Generator().manual_seed(1))
        assert 0 not in tokens[1::2]
        assert 0 in tokens[::2]
        found.append(tokens)
    assert seed is None or found[0] == found[1]


# --- through the engine ---------------------------------------------------------------------


def test_a_story_avoids_its_bad_words():
    """The tokenizer is a real one, whose words begin with a space."""

    async def texts(bad_words):
        config = EngineConfig(models=(ModelConfig("demo-stories"),), check_level=2)
        sampling = SamplingParams(seed=3, max_tokens=50, bad_words=bad_words)
        request = GenerateRequest(text="Once upon a time", n=8, sampling=sampling)
        found = [""] * 8
        async with open_engine(config) as engine, engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    found[event.choice] += event.text
        return found

    plain = " ".join(trio.run(texts, ()))
    common = [word for word, _ in Counter(re.findall(r"[a-z]{3,}", plain)).most_common(4)]
    without = " ".join(trio.run(texts, tuple(common)))
    assert len(without) > len(plain) / 3
    assert not {*common} & {*re.findall(r"[a-z]+", without)}


# --- state ----------------------------------------------------------------------------------


def test_token_counts_grow_and_fork():
    rng = random.Random(1)
    counts, pushed = TokenCounts([7, 7, 2]), []
    for _ in range(500):
        pushed.append(rng.randrange(400))
        counts.add(pushed[-1])
    twin = counts.fork()
    twin.add(7)
    twin.add(100_000)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {7: 0.0, 2: 0.0} | {t: float(pushed.count(t)) for t in {*pushed}}
    assert len(twin.ids) == len(counts.ids) + 1


def test_a_request_that_asks_for_nothing_has_no_edits_and_its_logits_are_not_copied():
    plain = Sampling(temperature=0.5, top_k=3, seed=1, typical_p=0.5, logprobs=3)
    assert make_edits(plain, [1, 2]) is None
    logits = logits_of(0)[0].numpy()
    assert draw_rows._processed(logits, SampleRow(plain, 0)) is logits
    assert not draw_batch._kind_of(SampleRow(plain, 0), VOCAB).is_edited


@pytest.mark.parametrize("way", ["rows", "batch"])
@pytest.mark.parametrize("penalty", [1e-300, 1e-20, 1e20, 1e300])
def test_an_extreme_penalty_never_looks_like_a_broken_model(monkeypatch, way, penalty):
    """A client's extreme penalty must not count as the model's failure; a NaN in its logits
    must."""
    monkeypatch.setattr(sampler, "_is_by_rows", lambda _: way == "rows")
    logits = torch.tensor([[2.0, 0.0, -1.0, -inf]])
    row = row_of(Sampling(temperature=0.0, repetition_penalty=penalty), [0, 1, 2, 3], [])
    assert sample(logits, [row], torch.Generator()) == [0]
    for broken in (math.nan, inf):
        logits[0, 2] = broken
        with pytest.raises(sampler.NothingToSample):
            sample(logits, [row], torch.Generator())


def test_truncation_typical_leaves_a_part_that_does_not_ask_for_it():
    part = candidates.Candidates((0,), torch.zeros(1, 3))
    assert candidates.typical(part, [Sampling()]) is part
