"""The compiled attention equals the reference (D12).

The comparison covers every head width and grouping, windows, soft caps, contexts of several parts,
and chunks beside decodes, in float32 and bfloat16, over caches of every dtype.
"""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from engine.worker.forward import native
from engine.worker.forward.attention import AttentionCall
from engine.worker.forward.kv_cache import KvCache
from engine.worker.forward.native_attention import NativeBackend
from engine.worker.forward.packing import pack
from engine.worker.forward.reference_attention import ReferenceBackend
from engine.worker.load.architectures import LayerShape

CPU = torch.device("cpu")
# Heads, key heads, width: groups of 1, 2, 3, 7, 12 and 40 heads, widths of 1 to 16 vectors. A task
# computes one key head, or all, or, for the last two shapes, some.
SHAPES = [
    *((4, 4, 16), (4, 2, 64), (9, 3, 64), (14, 2, 64), (12, 1, 32), (2, 1, 80), (3, 1, 256)),
    *((40, 1, 32), (36, 12, 48), (40, 40, 16)),
]
# The dtype of queries and results, that of the cache, and the error of a weighted mean of numbers
# near 1 that comes from rounding queries, weights and results. What the cache rounds, the reference
# rounds alike.
TOLERANCE = {
    (torch.float32, torch.float32): 2e-6,
    (torch.float32, torch.float16): 2e-6,
    (torch.float32, torch.int8): 5e-5,  # with VNNI, the queries of decodes have 16 bits
    (torch.float32, torch.bfloat16): 1.2e-2,
    (torch.bfloat16, torch.bfloat16): 1.2e-2,
    (torch.bfloat16, torch.int8): 1.2e-2,
    (torch.bfloat16, torch.float32): 1.2e-2,
}
FEW = [(torch.float32, torch.float32), (torch.float32, torch.int8), (torch.bfloat16,) * 2]


def named(dtypes):
    """Return the dtypes' names."""
    return " ".join(str(one).removeprefix("torch.") for one in dtypes)


@dataclass
class Case:
    """Inputs of an attention: rows over shuffled blocks, and numbers that both dtypes have."""

    cache: KvCache
    rows: object
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def make_case(seed, shape, dtypes, lengths, block_size=16, wholes=()):
    """Return a case. ``lengths`` has (start, count) of each row, ``wholes`` the spans of tokens
    that see each other. Unwritten slots hold NaN."""
    dtype, of_cache = dtypes
    heads, kv_heads, width = shape
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tables, starts, counts = [], [start for start, _ in lengths], [count for _, count in lengths]
    num_blocks = sum(-(-(start + count) // block_size) for start, count in lengths) + 2
    kv = LayerShape(kv_heads, width)
    cache = KvCache([kv], num_blocks, block_size, dtype=of_cache, device=CPU)
    for tensor in cache._tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 101)
    free = rng.sample(range(num_blocks), num_blocks)
    for start, count in lengths:
        blocks = -(-(start + count) // block_size)
        tables.append(np.array([free.pop() for _ in range(blocks)]))
        slots = [int(tables[-1][p // block_size]) * block_size + p % block_size
                 for p in range(start)]  # fmt: skip
        past = torch.randn(2, start, kv_heads, width).to(dtype)
        cache.write(0, torch.tensor(slots, dtype=torch.int64), *past)
    rows = pack(starts, counts, tables, block_size, wholes)
    numbers = [
        torch.randn(rows.num_tokens, n, width).to(dtype) for n in (heads, kv_heads, kv_heads)
    ]
    return Case(cache, rows, *numbers)


def copied(cache):
    """Return the same cache in float64."""
    own = KvCache(cache.shapes, cache.num_blocks, cache.block_size, dtype=torch.float64, device=CPU)
    every = torch.arange(cache.num_blocks * cache.block_size)
    own.write(0, every, *cache.read(0, every, torch.float64))
    return own


def attend(backend, case, call):
    return backend.prepare(case.rows, case.cache).attend(call, case.query, case.key, case.value)


def in_float64(case, call):
    """Return the reference's attention for a case, computed in float64 with keys and values as the
    cache rounds them."""
    scratch = KvCache(case.cache.shapes, len(case.key), 1, dtype=case.cache.dtype, device=CPU)
    each = torch.arange(len(case.key))
    scratch.write(0, each, case.key, case.value)
    rounded = scratch.read(0, each, torch.float64)
    wide = Case(copied(case.cache), case.rows, case.query.double(), *rounded)
    return attend(ReferenceBackend(), wide, call)


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def backend(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield NativeBackend(native.load())
    torch.set_num_threads(before)


MIXED = [(0, 1), (20, 1), (0, 33), (700, 1), (90, 50), (511, 1), (512, 1), (1100, 1), (530, 40)]


@pytest.mark.parametrize("dtypes", FEW, ids=named)
@pytest.mark.parametrize("window", [None, 24, 600])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sinks_take_their_share(backend, shape, window, dtypes):
    """The sinks lie from far below all scores to far above them."""
    case = make_case(2, shape, dtypes, MIXED)
    sinks = torch.linspace(-60.0, 60.0, shape[0]).to(dtypes[0])
    call = AttentionCall(0, 2.0 * shape[2] ** -0.5, window, sinks=sinks)
    out, wanted = attend(backend, case, call).double(), in_float64(case, call)
    assert out.isfinite().all()
    torch.testing.assert_close(out, wanted, rtol=0, atol=5 * TOLERANCE[dtypes])
    bare = attend(backend, case, replace(call, sinks=None)).double()
    assert (bare - out).norm() > 0.1 * bare.norm()


@pytest.mark.parametrize("dtypes", TOLERANCE, ids=named)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 24, 600])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_result_is_the_references_in_float64(backend, shape, window, softcap, dtypes):
    case = make_case(1, shape, dtypes, MIXED)
    call = AttentionCall(0, 2.0 * shape[2] ** -0.5, window, softcap)  # scores spread by about 2
    wanted = in_float64(case, call)
    out = attend(backend, case, call)
    assert out.dtype == dtypes[0]
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=5 * TOLERANCE[dtypes])
    error = (out.double() - wanted).norm() / wanted.norm()
    assert error < TOLERANCE[dtypes]


@pytest.mark.parametrize("dtypes", FEW, ids=named)
@pytest.mark.parametrize("seed", range(10))
def test_random_rows_and_blocks(backend, seed, dtypes):
    rng = random.Random(seed)
    shape = rng.choice(SHAPES)
    lengths = [(rng.choice([0, rng.randint(0, 900)]), rng.choice([1, 1, 2, 31, 32, 33, 200]))
               for _ in range(rng.randint(1, 9))]  # fmt: skip
    case = make_case(seed, shape, dtypes, lengths, rng.choice([1, 4, 16, 32]))
    call = AttentionCall(0, shape[2] ** -0.5, rng.choice([None, 5, 100]), None)
    out, wanted = attend(backend, case, call).double(), in_float64(case, call)
    torch.testing.assert_close(out, wanted, rtol=0, atol=5 * TOLERANCE[dtypes])


@pytest.mark.parametrize("dtypes", FEW, ids=named)
@pytest.mark.parametrize("seed", range(10))
def test_tokens_of_an_image_see_each_other(backend, seed, dtypes):
    """Images in long and short rows are masked as by transformers, one across the border between
    two parts of a context. A window bounds only the tokens before an image's token."""
    rng = random.Random(seed)
    lengths = [(rng.randint(400, 500), rng.choice([9, 40, 250])) for _ in range(3)] + [(70, 1)]
    wholes, first = [], 0
    for _, count in lengths[:3]:
        begin = first + rng.randint(0, count // 2)
        wholes.append((begin, rng.randint(begin + 1, first + count)))
        first += count
    shape, window = rng.choice(SHAPES), rng.choice([None, 7, 100])
    case = make_case(seed, shape, dtypes, lengths, wholes=wholes)
    call = AttentionCall(0, shape[2] ** -0.5, window, None)
    wanted = in_float64(case, call)
    out = attend(backend, case, call)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=5 * TOLERANCE[dtypes])
    torch.testing.assert_close(wanted, masked(case, call, wholes), rtol=0, atol=1e-9)
    causal = Case(case.cache, replace(case.rows, untils=case.rows.positions + 1),
                  case.query, case.key, case.value)  # fmt: skip
    if any(end - begin > 1 for begin, end in wholes):
        assert not torch.allclose(attend(backend, causal, call), out, atol=5 * TOLERANCE[dtypes])


def masked(case, call, wholes):
    """Return a case's attention by the masks of transformers, in float64."""
    rows, groups = case.rows, case.query.shape[1] // case.key.shape[1]
    image = np.full(rows.num_tokens, -1)
    for name, (begin, end) in enumerate(wholes):
        image[begin:end] = name
    out = []
    for row, end in enumerate(rows.ends.tolist()):
        low, high = int(rows.offsets[row]), int(rows.offsets[row + 1])
        slots = torch.from_numpy(rows.slots_at(np.array([row]), np.arange(end)[None]))
        keys, values = (one[0] for one in case.cache.read(0, slots, torch.float64))
        images = np.concatenate((np.full(end - (high - low), -1), image[low:high]))
        q, k = np.arange(end - (high - low), end)[:, None], np.arange(end)[None]
        both = (images[k] == images[q]) & (images[q] >= 0)
        seen = (k <= q) | both
        if call.sliding_window is not None:
            seen &= k > q - call.sliding_window
        query = case.query[low:high].double()
        keys, values = (one.repeat_interleave(groups, 1) for one in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * call.scaling
        scores = scores.masked_fill(~torch.from_numpy(seen), -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(out)


@pytest.mark.parametrize("dtypes", TOLERANCE, ids=named)
@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("shape", [(9, 3, 64), (36, 12, 48), (40, 40, 16)], ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(backend, shape, window, dtypes):
    """A row's result is the same to the last bit, whatever rows or chunks are beside it, and
    whether a task computes one key head or all."""
    case = make_case(3, shape, dtypes, MIXED)
    call = AttentionCall(0, 0.125, window, None)
    together = attend(backend, case, call)
    rows = case.rows
    for row in range(len(MIXED)):
        low, high = int(rows.offsets[row]), int(rows.offsets[row + 1])
        table = rows.tables[row]
        alone = pack([int(rows.starts[row])], [high - low], [table], rows.block_size)
        own = Case(case.cache, alone, *(t[low:high] for t in (case.query, case.key, case.value)))
        assert torch.equal(attend(backend, own, call), together[low:high])


@pytest.mark.parametrize("dtypes", TOLERANCE, ids=named)
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_a_number_that_is_not_finite_makes_its_row_alone_not_finite(backend, which, dtypes):
    case = make_case(4, (4, 2, 64), dtypes, [(40, 1), (0, 20), (60, 1)])
    getattr(case, which)[0, 1, 3] = float("nan")
    out = attend(backend, case, AttentionCall(0, 0.1, None, None))
    of_row = out[0, 1] if which == "query" else out[0, 2:]
    assert of_row.isnan().any(-1).all()
    out[0] = 0.0
    assert out.isfinite().all()


@pytest.mark.parametrize("dtypes", TOLERANCE, ids=named)
def test_keys_and_values_are_written_where_the_slots_say(backend, dtypes):
    """The kernels round them as `KvCache.write` does: ties to even, numbers beyond float16 to its
    largest one, zeros without a scale."""
    case = make_case(5, (4, 2, 64), dtypes, [(3, 5), (31, 1)])
    case.key[0, 0, :6] = torch.tensor([1e5, -7e4, 65519.0, 1e-7, -6e-8, 2049.0])
    case.key[1] = 0.0
    attend(backend, case, AttentionCall(0, 0.1, None, None))
    slots = torch.from_numpy(case.rows.slots)
    found = case.cache.read(0, slots, torch.float64)
    case.cache.write(0, slots, case.key, case.value)
    wanted = case.cache.read(0, slots, torch.float64)
    assert torch.equal(torch.stack(found), torch.stack(wanted))
