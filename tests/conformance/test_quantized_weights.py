"""Products with weights of 8 bits or fewer are exact sums of integers, for every shape of block.

The references here compute the same blocks in torch's integers.
"""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.forward import native
from engine.worker.forward.decoder import PackedLinear
from engine.worker.forward.native_attention import NativeBackend
from engine.worker.forward.packer import Packer
from engine.worker.load.refusal import Refusal
from engine.worker.quantized.weight import (
    CENTRED,
    FACTORS,
    NESTED,
    Form,
    QuantizedWeight,
    are_alike,
    defer,
    expand_deferred,
    join,
    quantise,
    weight_of,
)
from engine.worker.skeleton.modules import Linear

MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # 4-bit floats, doubled
UNSIGNED, OF_5, OF_6 = tuple(range(16)), tuple(range(-16, 16)), tuple(range(-32, 32))
OF_2, OF_3 = tuple(range(4)), tuple(range(-4, 4))
TABLES = ((), CENTRED, MXFP4, UNSIGNED, OF_5, OF_6, OF_2, OF_3)
NAMES = ("int8", "int4", "table", "unsigned", "5 bits", "6 bits", "2 bits", "3 bits")
DTYPES = (torch.float32, torch.bfloat16)
GROUPS = (16, 32, 48, 64, 128, 1024)
ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 33, 130, 300)


@pytest.fixture(scope="module")
def backend():
    return NativeBackend(native.load())


def make_weight(shape, group, table, *, has_offsets, seed, is_exact=True, is_nested=False):
    """Return a random weight, whose groups are multiples of 32 in 5 bits, and of 16 or 32 if it is
    nested. If ``is_exact``, its scales are powers of two (or factors are, and scales whole numbers)
    and its offsets multiples of 1/8, so that no sum in float32 is rounded."""
    rng = torch.Generator().manual_seed(seed)
    outputs, inputs = shape
    group = 16 if is_nested and group % 32 else 32 if is_nested else group
    group += -group % (32 if table == OF_5 else 16)
    low, high, kind = (0, len(table), torch.uint8) if table else (-128, 128, torch.int8)
    numbers = torch.randint(low, high, shape, generator=rng, dtype=torch.int16).to(kind)
    groups = -(-inputs // group)
    drawn = torch.rand((outputs, groups), generator=rng)
    scales = torch.exp2((drawn * 4).floor() - 3) if is_exact else drawn * 0.01
    offsets = torch.randint(-8, 9, (outputs, groups), generator=rng) / 8 if has_offsets else None
    if is_nested:
        most = 4 if is_exact else 127
        return nested(numbers, scales, group, table, rng, most, has_offsets=has_offsets)
    return QuantizedWeight(numbers, scales.half(), group, offsets if offsets is None
                       else offsets.half(), table)  # fmt: skip


def nested(numbers, scales, group, table, rng, most, *, has_offsets):
    """Return a weight with nested scales of up to ``most``; those of ``scales`` [outputs, groups]
    are the factors."""
    first = slice(0, None, NESTED // group)
    low, high = (0, min(most, 15)) if has_offsets and table == OF_2 else (-most - 1, most)
    draw = partial(torch.randint, low, high + 1, scales.shape, generator=rng)
    own = {
        "scales": draw().to(torch.int8),
        "factors": torch.tensor(scales[:, first].tolist()).half(),
    }
    if has_offsets:
        own |= {"offsets": draw().to(torch.int8), "offset_factors": -own["factors"]}
    return QuantizedWeight(numbers, group=group, table=table, **own)


def per_group(grouped, factors, group):
    """Return scales or offsets, one for each group, [outputs, groups] float32."""
    if factors is None:
        return grouped.float()
    every = factors.float().repeat_interleave(NESTED // group, 1)
    return every[:, : grouped.shape[1]] * grouped.float()


def round_row_blocks(x, block):
    """Return the rounded numbers [rows, blocks, block] and the steps [rows, blocks] of rows."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 32))
    blocks = padded.view(len(x), -1, block)
    largest = blocks.abs().amax(2)
    # `127.0 / largest` would be 127 times a reciprocal, and so rounded twice.
    factors = torch.where(largest == 0, largest, torch.full_like(largest, 127.0) / largest)
    return (blocks * factors[:, :, None]).round(), largest / 127.0


def fused(a, b, c):
    """Return a * b + c in float32, rounded once."""
    return torch.from_numpy(
        (a.numpy().astype(np.longdouble) * b.numpy() + c.numpy()).astype(np.float32)
    )


def reference(weight, x, bias=None):
    """Return the product as the kernels define it: block by block, in integers."""
    block = 16 if weight.group % 32 else 32
    numbers, steps = round_row_blocks(x, block)
    own = weight.plain_numbers().double()
    scales = per_group(weight.scales, weight.factors, weight.group)
    if weight.offsets is not None:
        offsets = per_group(weight.offsets, weight.offset_factors, weight.group)
    own = torch.nn.functional.pad(own, (0, numbers[0].numel() - own.shape[1]))
    own = own.view(len(own), -1, block)
    total = torch.zeros(len(x), len(own))
    for index in range(own.shape[1]):
        group = min(index * block // weight.group, scales.shape[1] - 1)
        whole = (numbers[:, index].double() @ own[:, index].T).float()
        scale = scales[:, group][None] * steps[:, index, None]
        total = fused(whole, scale, total)
        if weight.offsets is not None:
            offset = offsets[:, group][None].expand_as(total)
            sums = (steps[:, index] * numbers[:, index].sum(1))[:, None]
            total = fused(offset, sums, total)
    return total if bias is None else total + bias


def pack(backend, weight, dtype, bias=None):
    """Return a layer of the kernels with this weight."""
    layer = PackedLinear(torch.nn.Linear(32, 16, bias=False), backend, dtype)
    packer = Packer(backend.library, dtype)
    layer._linear, layer._packer = packer.pack(weight, bias), packer
    layer._outputs = len(weight.numbers)
    return layer


def whole_rows(rows, inputs, seed):
    """Return rows of whole numbers. Each block of 16 numbers has a 127, so that its step is 1."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(-127, 128, (rows, inputs), generator=rng).float()
    x[:, ::16] = 127.0
    return x


@given(
    outputs=st.integers(1, 150),
    inputs=st.integers(1, 700),
    rows=st.sampled_from(ROWS),
    group=st.sampled_from(GROUPS),
    table=st.sampled_from(TABLES),
    dtype=st.sampled_from(DTYPES),
    has_offsets=st.booleans(),
    is_nested=st.booleans(),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(deadline=None)
def test_a_product_of_whole_numbers_is_exact(
    backend, outputs, inputs, rows, group, table, dtype, has_offsets, is_nested, has_bias, seed
):
    """The product is exact to the bit, whichever instructions the processor has."""
    weight = make_weight(
        (outputs, inputs), group, table, has_offsets=has_offsets, seed=seed, is_nested=is_nested
    )
    bias = torch.arange(outputs).float() if has_bias else None
    x = whole_rows(rows, inputs, seed)
    wanted = x.double() @ weight.expand().double().T + (bias if has_bias else 0)
    out = pack(backend, weight, dtype, bias)(x.to(dtype))
    assert out.dtype == dtype
    assert torch.equal(out, wanted.to(dtype))


@given(
    shape=st.tuples(st.integers(1, 100), st.integers(1, 700)),
    rows=st.sampled_from(ROWS),
    group=st.sampled_from(GROUPS),
    table=st.sampled_from(TABLES),
    has_offsets=st.booleans(),
    is_nested=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(deadline=None)
def test_a_product_is_the_references(
    backend, shape, rows, group, table, has_offsets, is_nested, seed
):
    """Products are equal to the bit on processors with a fused multiply-add, which rounds once."""
    weight = make_weight(
        shape,
        group,
        table,
        has_offsets=has_offsets,
        seed=seed,
        is_exact=False,
        is_nested=is_nested,
    )
    x = torch.randn((rows, shape[1]), generator=torch.Generator().manual_seed(seed))
    out, wanted = pack(backend, weight, torch.float32)(x), reference(weight, x)
    if native.kind(backend.library) != "vectors":
        assert torch.equal(out, wanted)
    assert (out - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("table", TABLES, ids=NAMES)
def test_a_rows_product_is_the_same_beside_any_others(backend, dtype, table):
    weight = make_weight((257, 1100), 32, table, has_offsets=True, seed=5, is_exact=False)
    layer = pack(backend, weight, dtype)
    x = torch.randn(300, 1100).to(dtype)
    together = layer(x)
    for low, high in ((0, 1), (5, 7), (9, 12), (17, 48), (40, 290)):
        assert torch.equal(layer(x[low:high]), together[low:high])


@pytest.mark.parametrize("rows", [1, 2, 4, 7, 40])
@pytest.mark.parametrize("table", TABLES, ids=NAMES)
def test_the_largest_numbers_give_the_largest_sums(backend, table, rows):
    """The extreme numbers of a block give sums that the processor's instructions still hold."""
    for number in (max(table or [127]), min(table or [-128])):
        code = table.index(number) if table else number
        kind = torch.uint8 if table else torch.int8
        numbers = torch.full((35, 160), code, dtype=kind)
        weight = QuantizedWeight(numbers, torch.ones(35, 5).half(), 32, None, table)
        for x in (torch.full((rows, 160), 127.0), torch.full((rows, 160), -127.0)):
            assert torch.equal(pack(backend, weight, torch.float32)(x), x @ weight.expand().T)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_no_finite_number(backend, value):
    """The sampler then refuses the row; rows beside it are unchanged."""
    layer = pack(backend, quantise(torch.randn(40, 96), 4), torch.float32)
    x = torch.randn(5, 96)
    before = layer(x)
    x[3, 70] = value
    after = layer(x)
    assert not after[3].isfinite().any()
    keep = [0, 1, 2, 4]
    assert torch.equal(after[keep], before[keep])


def test_rows_of_zeros_and_of_the_smallest_numbers_give_finite_results(backend):
    layer = pack(backend, quantise(torch.randn(40, 96), 8), torch.float32, torch.ones(40))
    for value in (0.0, 1e-45, 1e-38, 1e-31):
        assert torch.allclose(layer(torch.full((2, 96), value)), torch.ones(2, 40))


def test_8_bits_round_to_nearest():
    weight = torch.randn(100, 300)
    small = quantise(weight, 8)
    assert small.numbers.dtype == torch.int8
    limit = 0.501 * small.scales.float().repeat_interleave(32, 1)[:, :300]
    assert (small.expand() - weight).abs().le(limit + 1e-3 * weight.abs()).all()


def test_4_bits_are_nearer_than_the_largest_magnitudes_scale_alone():
    """llama.cpp's Q4_0 takes the scale from the largest magnitude alone."""
    weight = torch.randn(200, 512)
    groups = weight.view(200, -1, 32)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = largest / -8
    plain = (groups / scale).round().clamp(-8, 7) * scale
    error = (quantise(weight, 4).expand() - weight).square().mean()
    assert error < 0.93 * (plain.view_as(weight) - weight).square().mean()
    assert FACTORS[0] == 1.0  # so that no group's error is larger than with Q4_0's scale


def test_6_bits_round_to_nearest():
    weight = torch.randn(100, 300)
    small = quantise(weight, 6)
    assert small.bits == 6
    limit = 0.501 * small.scales.float().abs().repeat_interleave(32, 1)[:, :300]
    is_near = (small.expand() - weight).abs().le(limit + 1e-3 * weight.abs())
    assert is_near.float().mean() > 0.99  # the largest magnitude's negative is cut to 31 of 32
    assert (small.expand() - weight).abs().le(2.1 * limit).all()


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_rounding_holds_zeros_and_whole_outputs_alone(bits):
    """An output is rounded alone, whatever outputs are beside it."""
    weight = torch.randn(64, 100)
    weight[7] = 0
    whole, part = quantise(weight, bits), quantise(weight[5:9], bits)
    assert torch.equal(whole.expand()[5:9], part.expand())
    assert not part.expand()[2].any()
    size = sum(t.numel() * t.element_size() for t in (whole.numbers, whole.scales))
    assert Form(bits, 32).num_bytes(weight.shape) == size - 64 * 100 * (8 - bits) // 8


@pytest.mark.parametrize("is_paired", [False, True])
def test_parts_of_different_forms_are_one_product(backend, is_paired):
    """Planted faults that this finds: a part that begins a panel late, gates in the place of ups,
    rows that are rounded in the blocks of another part."""
    weights = [
        make_weight((32, 192), 32, CENTRED, has_offsets=True, seed=1),
        make_weight((16, 192), 16, OF_6, has_offsets=False, seed=2, is_nested=True),
        make_weight((40, 192), 64, (), has_offsets=False, seed=3),
    ][: 2 if is_paired else 3]
    if is_paired:
        weights[1] = make_weight((32, 192), 16, OF_6, has_offsets=False, seed=2, is_nested=True)
    layers = []
    for weight in weights:
        layer = Linear(192, len(weight.numbers))
        defer(layer, lambda weight=weight: weight, torch.float32)
        layers.append(layer)
    if not is_paired:
        layers.insert(1, torch.nn.Linear(192, 48))
    floats = layers[1].weight.detach().clone() if not is_paired else None
    biases = [None if layer.bias is None else layer.bias.detach().clone() for layer in layers]
    whole = PackedLinear(torch.nn.Linear(32, 16, bias=False), backend, torch.float32)
    packer = Packer(backend.library, torch.float32)
    whole._linear, whole._packer = packer.linear(layers, is_paired=is_paired), packer
    whole._outputs = whole._linear.outputs
    for rows in (1, 3, 40, 200):
        x = torch.randn(rows, 192)
        wanted = [reference(weight, x) for weight in weights]
        if is_paired:
            wanted = [torch.stack([one.view(rows, -1, 16) for one in wanted], 2).flatten(1)]
            assert torch.equal(whole(x), wanted[0])
            continue
        own = whole(x)
        places = (32, 80, 96)
        exact = own.tensor_split(places, 1)
        assert torch.equal(exact[0], wanted[0])
        assert torch.allclose(exact[1], x @ floats.T + biases[1], atol=1e-4)
        assert torch.equal(exact[2], wanted[1])
        assert torch.equal(exact[3], wanted[2])


@pytest.mark.parametrize("outputs", [(24, 32), (32, 8, 16), (1, 16)], ids=str)
def test_a_part_without_whole_panels_before_another_is_refused(backend, outputs):
    """The outputs of the parts behind it would be computed from other weights. The last part, and
    gates and ups, need no whole panels."""
    layers = []
    for seed, count in enumerate(outputs):
        table = (CENTRED, OF_6, ())[seed]
        weight = make_weight((count, 64), 32, table, has_offsets=False, seed=seed)
        layer = Linear(64, count)
        defer(layer, lambda weight=weight: weight, torch.float32)
        layers.append(layer)
    packer = Packer(backend.library, torch.float32)
    with pytest.raises(Refusal, match=f"of {', '.join(map(str, outputs))} outputs .* of 16$"):
        packer.linear(layers)


def test_weights_of_one_form_are_joined():
    weight = make_weight((16, 96), 32, CENTRED, has_offsets=True, seed=1)
    other = make_weight((32, 96), 16, (), has_offsets=False, seed=2)
    assert are_alike([weight, weight])
    assert not are_alike([weight, other])
    alike = join([weight, weight])
    assert alike.form == weight.form == Form(4, 32, has_offsets=True)
    assert torch.equal(alike.expand(), weight.expand().repeat(2, 1))


def test_a_scale_beyond_half_precision_is_refused():
    weight = make_weight((16, 32), 32, (), has_offsets=False, seed=1)
    large = QuantizedWeight(weight.numbers, torch.full((16, 1), 1e6), 32)
    with pytest.raises(Refusal, match="half precision"):
        large.in_halves()


def test_a_deferred_layer_gets_its_weight_when_it_is_expanded():
    weight = quantise(torch.randn(48, 64), 4)
    module = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(48, 64), "head": torch.nn.Linear(64, 48, bias=False)}
    )

    def stored():
        return weight

    for layer in module.values():
        defer(layer, stored, torch.bfloat16)
    assert weight_of(module["embed"]) is weight_of(module["head"])
    zeros = module["head"](module["embed"](torch.tensor([[1, 2]])))
    assert zeros.shape == (1, 2, 48)
    assert zeros.dtype == torch.bfloat16
    assert not list(module.parameters())
    expand_deferred(module, torch.float32, torch.device("cpu"))
    assert module["embed"].weight is module["head"].weight
    assert torch.equal(module["head"](torch.eye(64)).T, weight.expand())
