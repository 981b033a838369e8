"""The sampler against transformers' warpers, exact distributions, and rows in other batches.

Everything is deterministic: fixed generators and seeds; Hypothesis only draws inputs. All
implementations, by rows with the compiled kernels and without, and by batch, pass the same tests
and give the same seeded tokens.
"""

import dataclasses
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.core.text.types import Sampling
from engine.worker.forward import native
from engine.worker.sampling import candidates, draw_batch, draw_rows, noise, sampler
from engine.worker.sampling.masks import Mask
from engine.worker.sampling.sample_row import needs_prefix
from engine.worker.sampling.sampler import NothingToSample, SampleRow, sample
from tests.conformance.test_edits import warped
from tests.support import kernel_cases
from tests.support.margins import gumbel_margin

inf = math.inf


def generator(seed: int = 0):
    return torch.Generator().manual_seed(seed)


WAYS = ("rows", "kernels", "batch")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    use(request.param, monkeypatch)
    return request.param


def use(way, patch):
    """Choose one of the implementations."""
    library = native.load() if way == "kernels" else None
    patch.setattr(native, "loaded", lambda: library)
    patch.setattr(sampler, "_is_by_rows", lambda logits: way != "batch")


def kept_ids(way, scores, limits):
    """Return for each row the set of ids that our truncation keeps."""
    if way == "batch":
        return kept_by_batch(scores, limits)
    return [kept_by_rows(own, one) for own, one in zip(scores, limits, strict=True)]


def kept_by_rows(scores, sampling):
    """Return the ids that the implementation by rows keeps of one row."""
    logits = scores.numpy()
    best = int(logits.argmax())
    with np.errstate(over="ignore"):
        if needs_prefix(sampling, len(logits)):
            ids, own = draw_rows.prefix(logits, best, sampling)
            return set(ids[own > -inf].tolist())
        if sampling.min_p == 0.0:  # the scores alone decide, as weights may underflow
            return set(np.flatnonzero(logits > -inf).tolist())
        return set(np.flatnonzero(draw_rows.whole(logits, best, sampling)).tolist())


def kept_by_batch(scores, limits):
    """Return the ids that the implementation by batch keeps of each row."""
    kept = [set() for _ in limits]
    narrow = [i for i, one in enumerate(limits) if needs_prefix(one, scores.shape[1])]
    wide = [i for i in range(len(limits)) if i not in narrow]
    parts = []
    if narrow:
        own = [limits[i] for i in narrow]
        parts += candidates.prefixes(tuple(narrow), scores[narrow], own)
    if wide:
        parts.append(candidates.whole(tuple(wide), scores[wide], [limits[i] for i in wide]))
    for part in parts:
        columns = torch.arange(part.scores.shape[1]).expand_as(part.scores)
        ids = part.token_ids(columns)
        for row, own_ids, own_scores in zip(part.rows, ids, part.scores, strict=True):
            kept[row] = set(own_ids[own_scores > -inf].tolist())
    return kept


def warped_ids(scores, sampling):
    """Return the ids that transformers keeps of a row of scores, temperature applied."""
    kept = warped(scores, replace(sampling, temperature=1.0)) > -inf
    return set(kept.nonzero()[:, 0].tolist())


def distance_to_boundary(scores, sampling):
    """Return by how little probability top_p or min_p misses keeping another set of ids.

    If the probability is very small, float32 may keep another set than exact arithmetic.
    """
    weights = [math.exp(s - max(scores)) for s in scores]
    if sampling.top_k:
        kth = sorted(scores)[-min(sampling.top_k, len(scores))]
        weights = [w if s >= kth else 0.0 for s, w in zip(scores, weights, strict=True)]
    total = sum(weights)
    before, nearest = 0.0, 1.0
    for weight in sorted(weights, reverse=True):
        if sampling.top_p < 1.0:
            nearest = min(nearest, abs(before / total - sampling.top_p))
        before += weight
        if sampling.min_p > 0.0:
            nearest = min(nearest, abs(weight - sampling.min_p))
    return nearest


usual = st.floats(-12, 12, width=32)
tied = st.sampled_from([-3.0, -1.0, 0.0, -0.0, 0.5, 0.5, 2.0])
extreme = st.sampled_from([-inf, -3e38, -1e4, -88.0, 0.0, 1e-30, 40.0, 1e4, 3e38])
logit_rows = st.one_of(
    st.lists(usual, min_size=1, max_size=60),
    st.lists(tied, min_size=1, max_size=60),
    st.lists(extreme, min_size=1, max_size=30),
    st.lists(st.one_of(usual, tied, extreme), min_size=1, max_size=60),
)
samplings = st.builds(
    Sampling,
    top_k=st.one_of(st.just(0), st.integers(1, 70)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)


def assert_kept_as_transformers(way, row, sampling, prefix):
    """Check that our truncation keeps the ids that transformers keeps."""
    scores = torch.tensor(row, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "PREFIX", prefix)
        patch.setattr(draw_rows, "PREFIX", prefix)
        ours = kept_ids(way, scores[None], [sampling])[0]
    theirs = warped_ids(scores, sampling)
    if ours != theirs:  # of equal scores at top_p's boundary, transformers may keep other ids
        assert sampling.top_p < 1.0
        assert sorted(scores[[*ours]].tolist()) == sorted(scores[[*theirs]].tolist())
        assert len({row[i] for i in ours ^ theirs}) == 1
        cut = row[min(ours ^ theirs)]
        equal = [i for i, score in enumerate(row) if score == cut]
        assert ours & {*equal} == {*equal[: len(ours & {*equal})]}, "the lowest ids stay"


@settings(max_examples=200, deadline=None)
@given(row=logit_rows, sampling=samplings, prefix=st.sampled_from([2, 5, 256]))
def test_candidates_are_those_of_transformers_warpers(row, sampling, prefix):
    assume(max(row) > -inf)
    assume(distance_to_boundary(row, sampling) > 1e-5)
    for way in ("rows", "batch"):
        assert_kept_as_transformers(way, row, sampling, prefix)


@pytest.mark.parametrize("way", ["rows", "batch"])
@pytest.mark.parametrize("prefix", [2, 256])
@pytest.mark.parametrize(
    ("row", "sampling"),
    [
        ([0.0] * 4, Sampling(top_p=0.5)),
        ([-1e4] * 8, Sampling(top_p=0.25)),
        ([0.0] * 8 + [9.0], Sampling(top_k=3)),
        ([1.0, 1.0, 1.0, 0.0], Sampling(top_k=2, top_p=0.5)),
        ([1.0, 1.0, 1.0, 0.0], Sampling(top_k=2, min_p=1.0)),
        ([2.0, -inf, -inf], Sampling(top_k=2, top_p=0.9)),
        ([3.0, 3.0], Sampling(top_k=2, top_p=0.75)),
        ([0.0, -0.0, 0.0], Sampling(top_p=0.01)),
    ],
)
def test_exact_boundaries_and_ties_are_those_of_transformers(way, row, sampling, prefix):
    assert_kept_as_transformers(way, row, sampling, prefix)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), vocab=st.integers(1, 50), num_rows=st.integers(2, 6))
def test_candidates_of_a_row_do_not_depend_on_the_other_rows(data, vocab, num_rows):
    values = st.lists(st.one_of(usual, tied), min_size=vocab, max_size=vocab)
    scores = torch.tensor([data.draw(values) for _ in range(num_rows)])
    limits = [data.draw(samplings) for _ in range(num_rows)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "PREFIX", 3)
        patch.setattr(draw_rows, "PREFIX", 3)
        together = kept_ids("batch", scores, limits)
        alone = [kept_ids("batch", scores[i : i + 1], [limits[i]])[0] for i in range(num_rows)]
        by_rows = kept_ids("rows", scores, limits)
    assert together == alone == by_rows


@pytest.mark.parametrize("way", ["rows", "batch"])
def test_a_flat_top_p_looks_beyond_the_prefix_and_keeps_the_right_number(way):
    vocab = 5000
    scores = torch.zeros(1, vocab)
    assert kept_ids(way, scores, [Sampling(top_p=0.5)]) == [set(range(2500))]
    scores = -torch.arange(vocab)[None] * 1e-4
    weights = scores[0].double().exp()
    share = weights.cumsum(0) / weights.sum()
    expected = int((share - weights / weights.sum() < 0.9).sum())
    assert kept_ids(way, scores, [Sampling(top_p=0.9)]) == [set(range(expected))]


def test_a_peaked_top_p_sorts_no_vocabulary(monkeypatch):
    scores = torch.randn(2, 50_000, generator=generator())
    scores[:, 7] = 30.0
    limits = [Sampling(top_p=0.9), Sampling(top_p=0.95)]
    monkeypatch.setattr(torch.Tensor, "sort", None)
    widths = []

    def topk(self, k, **rest):
        widths.append(k)
        return stock_topk(self, k, **rest)

    stock_topk = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", topk)
    assert kept_ids("batch", scores, limits) == [{7}, {7}]
    assert widths == [candidates.PREFIX]
    assert len(draw_rows.likeliest(scores[0].numpy(), 256)) < 400


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.one_of(usual, tied), min_size=1, max_size=300),
    repeats=st.integers(1, 20),
    count=st.integers(1, 300),
)
def test_the_likeliest_are_complete_and_in_order(values, repeats, count):
    scores = np.array(values * repeats, np.float32)
    ids = draw_rows.likeliest(scores, count).tolist()
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    assert len(ids) >= min(count, len(scores))
    assert ids == order[: len(ids)]
    assert len(ids) == len(scores) or scores[order[len(ids)]] < scores[ids[-1]]


# --- greedy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 2, 7, 1000, 151_936])
def test_greedy_takes_the_lowest_of_equal_ids(way, vocab):
    logits = torch.full((3, vocab), -1.0)
    logits[0, vocab // 2 :] = 2.0
    logits[1, vocab - 1] = 3.0
    row = SampleRow(Sampling(temperature=0.0, top_k=3, top_p=0.1), 0)
    assert sample(logits, [row] * 3, generator()) == [vocab // 2, vocab - 1, 0]


def test_greedy_draws_nothing_from_the_generator_and_leaves_the_logits(way):
    logits = torch.randn(4, 100, generator=generator(1))
    before, gen = logits.clone(), generator(2)
    state = gen.get_state()
    rows = [SampleRow(Sampling(temperature=0.0), 0, frozenset({int(logits[0].argmax())}))] * 4
    assert sample(logits, rows, gen)[0] != int(logits[0].argmax())
    assert torch.equal(logits, before)
    assert torch.equal(gen.get_state(), state)


def test_temperatures_towards_zero_become_greedy(way):
    logits = torch.randn(64, 500, generator=generator(3))
    best = logits.argmax(1).tolist()
    for temperature in (1e-6, 1e-20, 5e-324):
        for seed in (None, 5):
            row = SampleRow(Sampling(temperature=temperature, seed=seed), 0)
            assert sample(logits, [row] * 64, generator()) == best


# --- distributions --------------------------------------------------------------------------


def chi_square_is_fine(tokens, probabilities):
    """Return whether the statistic is below its mean plus five of its standard deviations."""
    counts = torch.bincount(torch.tensor(tokens), minlength=len(probabilities)).double()
    expected = probabilities * len(tokens)
    assert counts[expected == 0].sum() == 0
    used = expected > 0
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum().item()
    freedom = int(used.sum()) - 1
    return statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1))


def expected_probabilities(logits, sampling):
    """Return the exact probabilities of one row's tokens."""
    scores = logits.double() / sampling.temperature
    keep = kept_ids("batch", (logits / sampling.temperature)[None], [sampling])[0]
    mask = torch.full_like(scores, -inf)
    mask[sorted(keep)] = 0.0
    return (scores + mask).softmax(0)


SETTINGS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(top_k=12),
    Sampling(temperature=1.5, top_p=0.8),
    Sampling(min_p=0.1),
    Sampling(temperature=0.9, top_k=30, top_p=0.95, min_p=0.02),
]


def variants(sampling, num_draws):
    """Yield rows with the settings: unseeded, and seeded with rising positions, seeds and
    choices."""
    yield [SampleRow(sampling, 0)] * num_draws
    yield [SampleRow(replace(sampling, seed=7), i) for i in range(num_draws)]
    yield [SampleRow(replace(sampling, seed=i), 3) for i in range(num_draws)]
    yield [SampleRow(replace(sampling, seed=7, choice=i), 3) for i in range(num_draws)]


@pytest.mark.parametrize("sampling", SETTINGS, ids=range(len(SETTINGS)))
def test_draws_follow_the_distribution(way, sampling):
    num_draws, vocab = 4_000, 300
    logits = torch.randn(vocab, generator=generator(vocab)) * 1.5
    expected = expected_probabilities(logits, sampling)
    for rows in variants(sampling, num_draws):
        tokens = sample(logits.expand(num_draws, vocab), rows, generator(11))
        assert chi_square_is_fine(tokens, expected)


def test_the_distribution_test_notices_a_wrong_sampler():
    logits = torch.randn(40, generator=generator(40)) * 1.5
    rows = [SampleRow(Sampling(temperature=1.3), 0)] * 4_000
    tokens = sample(logits.expand(4_000, 40), rows, generator(11))
    assert not chi_square_is_fine(tokens, expected_probabilities(logits, Sampling()))


def test_a_token_of_probability_zero_is_never_drawn(way):
    logits = torch.full((1, 400), -inf)
    logits[0, 129] = 0.0
    logits[0, 257] = -200.0  # exp underflows
    for rows in variants(Sampling(), 500):
        assert set(sample(logits.expand(500, 400), rows, generator())) == {129}


# --- seeded draws ---------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
    vocab=st.integers(1, 3000),
    spread=st.sampled_from([0.0, 0.3, 2.0, 30.0]),
)
def test_a_seeded_token_is_the_argmax_of_score_plus_noise(seed, position, vocab, spread):
    """Implementations that skip tokens which cannot win draw the same token."""
    logits = torch.randn(5, vocab, generator=generator(vocab)) * spread
    for choice, temperature in ((0, 1.0), (3, 0.5)):
        sampling = Sampling(temperature=temperature, seed=seed, choice=choice)
        keys = torch.tensor([[noise.signed(noise.draw_key(seed, choice, position))]])
        perturbed = noise.gumbel(noise.uniforms(keys, torch.arange(vocab)))
        perturbed = perturbed + (logits / temperature).double()
        rows = [SampleRow(sampling, position)] * 5
        for way in WAYS:
            with pytest.MonkeyPatch.context() as patch:
                use(way, patch)
                assert sample(logits, rows, generator()) == perturbed.argmax(1).tolist()
        best = perturbed.topk(min(2, vocab), dim=1).values
        margins = gumbel_margin(logits, rows)
        expected = (best[:, 0] - best[:, -1]).tolist() if vocab > 1 else [inf] * 5
        assert margins == pytest.approx(expected)


def mixed_rows(count):
    """Return rows of every kind of sampling."""
    kinds = [
        {},
        {"top_p": 0.9},
        {"top_k": 40},
        {"temperature": 0.6, "min_p": 0.05},
        {"temperature": 0.0},
        {"temperature": 1.4, "top_k": 700, "top_p": 0.99, "min_p": 0.001},
    ]
    rows = []
    for i in range(count):
        seeded = Sampling(seed=i // 3, choice=i % 3, **kinds[i % len(kinds)])
        rows.append(SampleRow(seeded, position=i, banned=frozenset(range(i % 4))))
    return rows


@pytest.mark.parametrize("vocab", [97, 5000, 49_152])
def test_all_ways_give_the_same_seeded_tokens(vocab, monkeypatch):
    """Tokens differ only where a row's margin is within rounding, so any device agrees, too."""
    logits = torch.randn(96, vocab, generator=generator(vocab)) * 2.5
    rows = mixed_rows(96)
    found = []
    for way in WAYS:
        use(way, monkeypatch)
        found.append(sample(logits, rows, generator()))
    margins = gumbel_margin(logits, rows)
    differ = [m for m, *tokens in zip(margins, *found, strict=True) if len({*tokens}) > 1]
    assert all(margin < 1e-4 for margin in differ)
    assert sum(margin < 1e-4 for margin in margins) <= 1


FAULTS = {  # a part of engine/kernels/draws.h, and the fault that replaces it
    "a token that can still win is left out": ("lead * SLACK", "lead * 0.5f"),
    "the rough noise is that of the next token": ("(first + i + 1)", "(first + i + 2)"),
    "the exact noise is that of the next token": ("(token + 1)", "(token + 2)"),
    "the last tokens of a row are left out": ("first + i < count ?", "first + i + 1 < count ?"),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_the_kernels_changes_tokens(fault, tmp_path, monkeypatch):
    part, planted = FAULTS[fault]
    sources = shutil.copytree(native.SOURCES, tmp_path / "kernels")
    text = (sources / "draws.h").read_text()
    assert text.count(part) == 1
    (sources / "draws.h").write_text(text.replace(part, planted))
    compiler, flags = native.find_compiler(), ["-march=native", "-O1"]
    built = kernel_cases.build_library(compiler, flags, tmp_path / "k.so", sources)
    faulty = native._open(Path(built))
    logits = torch.randn(2000, 53, generator=generator(5))
    rows = [SampleRow(Sampling(seed=3), position) for position in range(len(logits))]
    use("kernels", monkeypatch)
    right = sample(logits, rows, generator())
    monkeypatch.setattr(native, "loaded", lambda: faulty)
    assert sample(logits, rows, generator()) != right


@pytest.mark.parametrize("vocab", [97, 5000, 49_152])
def test_seeded_rows_are_equal_alone_and_in_any_batch(way, vocab):
    logits = torch.randn(32, vocab, generator=generator(vocab)) * 2.5
    rows = mixed_rows(32)
    alone = [sample(logits[i : i + 1], [rows[i]], generator())[0] for i in range(32)]
    assert sample(logits, rows, generator(9)) == alone
    for shuffle in range(3):
        order = random.Random(shuffle).sample(range(32), 32)
        got = sample(logits[order], [rows[i] for i in order], generator(shuffle))
        assert got == [alone[i] for i in order]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert sample(logits, rows, generator()) == alone
    finally:
        torch.set_num_threads(threads)


def test_seeded_rows_ignore_unseeded_neighbours_and_the_generator(way):
    logits = torch.randn(32, 2000, generator=generator(4))
    rows = mixed_rows(32)
    alone = sample(logits, rows, generator())
    mixed = [r if i % 2 else SampleRow(Sampling(top_p=0.9), 0) for i, r in enumerate(rows)]
    for seed in range(3):
        assert sample(logits, mixed, generator(seed))[1::2] == alone[1::2]


def test_float_noise_of_1e_5_flips_no_seeded_token_with_a_margin(way):
    vocab, count = 3000, 600
    logits = torch.randn(count, vocab, generator=generator(5)) * 2
    nudged = logits + (torch.rand(count, vocab, generator=generator(6)) - 0.5) * 2e-5
    rows = [SampleRow(Sampling(seed=i, top_p=0.95 if i % 2 else 1.0), i) for i in range(count)]
    margins = gumbel_margin(logits, rows)
    pairs = zip(sample(logits, rows, generator()), sample(nudged, rows, generator()), strict=True)
    flipped = [i for i, (a, b) in enumerate(pairs) if a != b]
    assert all(margins[i] <= 1e-4 for i in flipped)
    assert sum(m <= 1e-4 for m in margins) <= 2


def test_a_margin_needs_a_draw_that_can_be_repeated():
    with pytest.raises(ValueError, match="row 0 has no seed"):
        gumbel_margin(torch.zeros(1, 3), [SampleRow(Sampling(), 0)])
    greedy = SampleRow(Sampling(temperature=0.0), 0)
    assert gumbel_margin(torch.tensor([[1.0, 4.0, 2.5]]), [greedy]) == [1.5]


def test_an_unseeded_batch_repeats_with_its_generator(way):
    logits = torch.randn(64, 1000, generator=generator(8))
    rows = [SampleRow(Sampling(top_p=0.9 if i % 2 else 1.0), 0) for i in range(64)]
    assert sample(logits, rows, generator(1)) == sample(logits, rows, generator(1))
    assert sample(logits, rows, generator(1)) != sample(logits, rows, generator(2))


def test_a_drawn_seed_alone_decides_a_draw_without_a_seed(way):
    """Red if the generator decides: a stream could not be continued at another server."""
    logits = torch.randn(64, 1000, generator=generator(8)) * 2
    options = [Sampling(), Sampling(top_p=0.9), Sampling(temperature=0.6, top_k=40)]
    rows = [
        SampleRow(dataclasses.replace(options[i % 3], drawn_seed=i % 4, choice=i % 2), i // 3)
        for i in range(64)
    ]
    together = sample(logits, rows, generator(1))
    assert together == sample(logits, rows, generator(2))
    alone = [sample(logits[i : i + 1], [rows[i]], generator(i))[0] for i in range(64)]
    assert together == alone
    mixed = [SampleRow(Sampling(), 0) if i % 2 else rows[i] for i in range(64)]
    assert sample(logits, mixed, generator(3))[::2] == together[::2]
    for changes in ({"drawn_seed": 9}, {"choice": 5}):
        others = [
            SampleRow(dataclasses.replace(row.sampling, **changes), row.position) for row in rows
        ]
        assert sample(logits, others, generator(1)) != together
    assert sample(logits, [SampleRow(r.sampling, r.position + 9) for r in rows], None) != together


def test_draws_by_drawn_seeds_follow_the_distribution():
    """The shares of 20,000 draws differ from the probabilities by at most five deviations."""
    vocab, count = 400, 20_000
    logits = torch.randn(vocab, generator=generator(21)) * 1.5
    rows = [SampleRow(Sampling(drawn_seed=i % 100), i // 100) for i in range(count)]
    tokens = torch.tensor(sample(logits.expand(count, vocab), rows, generator()))
    shares = torch.bincount(tokens, minlength=vocab) / count
    expected = logits.double().softmax(0)
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((shares - expected).abs() <= 5 * deviation + 1 / count).all()


# --- noise ----------------------------------------------------------------------------------


def test_noise_never_changes():
    """If one of these pinned values changes, the text of every seeded request changes."""
    assert noise.draw_key(0, 0, 0) == PINNED_KEYS[0]
    assert noise.draw_key(2**64 - 1, 15, 100_000) == PINNED_KEYS[1]
    key, ids = noise.draw_key(42, 1, 9), [0, 1, 151_935]
    assert noise.uniforms(torch.tensor([[key]]), torch.tensor(ids))[0].tolist() == PINNED_UNIFORMS
    expected = [-math.log1p(-u) for u in PINNED_UNIFORMS]
    assert noise.exponentials(key, np.array(ids)).tolist() == pytest.approx(expected, rel=1e-15)


PINNED_KEYS = [2558736989570252433, 11632874361793595049]
PINNED_UNIFORMS = [0.255047457777981, 0.38398295828921036, 0.4106591962291607]


def test_noise_is_splitmix64():
    """The oracle is the published SplitMix64, started at the key."""
    key = noise.draw_key(1, 2, 3)
    state, mask, bits = key, 2**64 - 1, []
    for _ in range(50):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        bits.append((z ^ (z >> 31)) >> 12)
    keys, ids = torch.tensor([[noise.signed(key)]]), torch.arange(50)
    assert noise.uniforms(keys, ids)[0].tolist() == [(b + 0.5) * 2.0**-52 for b in bits]
    places = noise.walk(ids.numpy()) + np.uint64(key)
    assert noise.mix(places, np.empty_like(places)).tolist() == bits


def test_uniforms_lie_strictly_inside_and_gumbel_is_finite():
    edges = torch.tensor([0.5, 2.0**52 - 0.5], dtype=torch.float64) * 2.0**-52
    assert edges[0].item() > 0.0
    assert edges[1].item() < 1.0
    low, high = noise.gumbel(edges).tolist()
    assert 36.7 < low < 36.8
    assert -3.7 < high < -3.6


def test_neighbouring_counters_give_unrelated_noise():
    ids = torch.arange(4000)
    draws = [(s, c, p) for s in (0, 1, 2**63) for c in (0, 1) for p in (0, 1, 2)]
    keys = torch.tensor([[noise.signed(noise.draw_key(*draw))] for draw in draws])
    u = noise.uniforms(keys, ids)
    assert ((u.mean(1) - 0.5).abs() < 5 / math.sqrt(12 * 4000)).all()
    off_diagonal = torch.corrcoef(u) - torch.eye(len(draws))
    assert (off_diagonal.abs() < 5 / math.sqrt(4000)).all()
    lagged = torch.corrcoef(torch.stack([u[0, :-1], u[0, 1:]]))[0, 1]
    assert lagged.abs() < 5 / math.sqrt(4000)


# --- banned tokens and rows that cannot be sampled -----------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    sampling=samplings,
    seed=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    banned=st.sets(st.integers(-3, 60), max_size=45),
)
def test_a_banned_token_is_never_sampled(sampling, seed, temperature, banned):
    assume(len(banned & set(range(50))) < 50)
    sampling = replace(sampling, seed=seed, temperature=temperature)
    logits = torch.randn(1, 50, generator=generator(1))
    logits[0, list(range(0, 50, 3))] += 20.0
    rows = [SampleRow(sampling, i, frozenset(banned)) for i in range(100)]
    for way in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            use(way, patch)
            tokens = sample(logits.expand(100, 50), rows, generator(2))
        assert not banned & set(tokens)
        assert all(0 <= token < 50 for token in tokens)


@pytest.mark.parametrize("bad", ["banned", "-inf", "nan", "one nan", "inf", "3e38"])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.0), Sampling(), Sampling(seed=1), Sampling(top_p=0.5), SETTINGS[-1]],
    ids=["greedy", "unseeded", "seeded", "top_p", "all"],
)
def test_a_row_with_nothing_to_sample_is_named(way, bad, sampling):
    logits = torch.randn(4, 60, generator=generator())
    rows = [SampleRow(sampling, 0) for _ in range(4)]
    if bad == "banned":
        rows[2] = SampleRow(sampling, 0, frozenset(range(60)))
    elif bad == "one nan":
        logits[2, 5] = math.nan
    else:
        logits[2] = float(bad)
    with pytest.raises(NothingToSample, match="row 2") as caught:
        sample(logits, rows, generator())
    assert caught.value.row == 2
    assert isinstance(caught.value, ValueError)


COPIES = ("tolist", "item", "numpy", "__bool__", "__int__", "__float__")


def test_rows_of_every_kind_come_to_the_host_in_one_copy(monkeypatch):
    """The rows are greedy, unseeded, seeded, banned and masked."""
    kinds = [Sampling(temperature=0.0), Sampling(), Sampling(seed=1), Sampling(min_p=0.1, seed=2)]
    rows = [SampleRow(kind, 0, banned) for kind in kinds for banned in (frozenset(), {3})]
    mask = Mask(2, (0,))
    mask.words[:] = -1
    rows += [SampleRow(kind, 0, mask=mask) for kind in kinds]
    logits = torch.randn(len(rows), 60, generator=generator())
    drawer, copies = generator(), []
    for name in COPIES:
        stock = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda one, s=stock, n=name: copies.append(n) or s(one)
        )
    assert len(draw_batch.sample_batch(logits, rows, drawer)) == len(rows)
    assert copies == ["tolist"]


def test_rows_and_logits_must_agree_and_an_empty_batch_is_allowed():
    with pytest.raises(ValueError, match="2 rows"):
        sample(torch.zeros(3, 5), [SampleRow(Sampling(), 0)] * 2, generator())
    assert sample(torch.zeros(0, 5), [], generator()) == []


def test_sampling_works_inside_inference_mode(way):
    with torch.inference_mode():
        logits = torch.randn(32, 500)
        assert len(sample(logits, mixed_rows(32), generator())) == 32
