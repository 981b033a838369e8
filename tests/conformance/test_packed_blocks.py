"""GGUF's blocks are packed to the same bytes as the weights that they are decoded to, and take no
more memory than in their file."""

import os
from mmap import ACCESS_READ, PAGESIZE, mmap

import numpy as np
import pytest
import torch

from engine.worker.forward import native
from engine.worker.forward.block_layer import BlockLayer, Packed
from engine.worker.forward.packer import Packer
from engine.worker.load.refusal import Refusal
from engine.worker.quantized.gguf_blocks import BLOCK_TYPES, StoredBlocks
from engine.worker.quantized.weight import defer
from engine.worker.skeleton.modules import Linear
from tests.support.gguf_files import (
    HALVES,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_K,
    Q6_K,
    Q8_0,
)

Q4_1, Q5_0, Q5_K = 3, 6, 13
LARGEST = 143  # the byte of the largest scale of MXFP4 that half precision holds
LAYERS = {name: [(kind, 40)] for kind, (name, _) in BLOCK_TYPES.items()} | {
    "of one type": [(Q5_K, 48), (Q5_K, 20), (Q5_K, 7)],
    "of three types": [(Q4_K, 48), (Q5_K, 32), (Q6_K, 7)],
    "of two groups": [(Q8_0, 16), (Q6_K, 33)],
    "of one table": [(IQ4_NL, 32), (IQ4_XS, 30)],
    "of a table and numbers": [(IQ4_XS, 16), (Q6_K, 16), (MXFP4, 7)],
    "of groups of 16": [(Q3_K, 32), (Q2_K, 16), (Q4_K, 7)],
}
PAIRS = {
    "two": [(Q4_K, 40), (Q4_K, 40)],
    "two types": [(Q4_0, 48), (Q6_K, 48)],
    "joined": [(Q4_K, 72)],
    "joined, whole panels": [(Q5_0, 64)],
}
# The most bytes for a byte of a file: scales of K-quants have 8 bits here, and 6 there, and MXFP4's
# 16 and 8.
WIDENED = {Q3_K: 1.04, MXFP4: 1.06}


@pytest.fixture(scope="module")
def library():
    return native.load()


def blocks(kind, rows, inputs, seed, *, is_ordered=False):
    """Return rows of random blocks whose scales are normal, subnormal, negative and zero."""
    draw = np.random.default_rng(seed)
    block = BLOCK_TYPES[kind][1]
    raw = draw.integers(0, 256, (rows, inputs // block.inputs, block.num_bytes), dtype=np.uint8)
    for place in HALVES[kind]:
        own = draw.normal(0, 1, raw.shape[:2]) * draw.choice([1, 1e-3, 1e-6, 0], raw.shape[:2])
        raw[..., place : place + 2] = own.astype("<f2")[..., None].view(np.uint8)
    if kind == MXFP4:
        raw[..., 0] = draw.integers(90, LARGEST + 1, raw.shape[:2])
    order = torch.from_numpy(draw.permutation(rows)) if is_ordered else None
    return StoredBlocks(torch.from_numpy(raw.reshape(rows, -1)), kind, order)


def packed(library, stored, *, is_paired):
    """Return what a packer makes of layers: the struct, and the bytes of its tensors."""
    layers = []
    for one in stored:
        layer = Linear(512, 8)
        defer(layer, one, torch.float32)
        layers.append(layer)
    packer = Packer(library, torch.float32)
    linear = packer.linear(layers, is_paired=is_paired)
    tensors = [tensor for tensor in (*packer.packed, *packer.small) if tensor.numel()]
    return linear, [tensor.view(torch.uint8) for tensor in tensors]


def check_alike(library, stored, *, is_paired=False):
    mine, ours = packed(library, stored, is_paired=is_paired)
    other, theirs = packed(library, [lambda one=one: one() for one in stored], is_paired=is_paired)
    for name in ("outputs", "inputs", "group", "bits", "centre", "nested", "alternates"):
        assert getattr(mine, name) == getattr(other, name)
    for name in ("scales", "offsets", "table", "parts"):
        assert (getattr(mine, name) is None) == (getattr(other, name) is None)
    assert len(ours) == len(theirs)
    assert all(torch.equal(own, their) for own, their in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_bytes_of_its_decoded_weights(library, name, is_ordered):
    """Planted faults that this finds: a nibble too high, a row too far, minima that are not
    subtracted, the upper bits of another input."""
    stored = [
        blocks(kind, rows, 512, seed, is_ordered=is_ordered)
        for seed, (kind, rows) in enumerate(LAYERS[name])
    ]
    check_alike(library, stored)


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_gates_and_ups_alternate(library, name, is_ordered):
    stored = [
        blocks(kind, rows, 512, seed, is_ordered=is_ordered)
        for seed, (kind, rows) in enumerate(PAIRS[name])
    ]
    check_alike(library, stored, is_paired=True)


def is_mixed(name):
    return len({kind for kind, _ in PAIRS[name]}) > 1


@pytest.mark.parametrize("most", [1, 5000, 20000, 1 << 20])
@pytest.mark.parametrize("name", PAIRS)
def test_the_pieces_of_a_layer_are_its_bytes(library, name, most):
    stored = [blocks(kind, rows, 512, seed) for seed, (kind, rows) in enumerate(PAIRS[name])]
    layer = BlockLayer(library, stored[:1] if is_mixed(name) else stored, is_paired=True)
    whole, joined = (
        Packed(*(torch.zeros(size, dtype=torch.uint8) for size in layer.sizes)) for _ in range(2)
    )
    layer.pack(whole)
    count = 0
    for piece in layer.pieces(torch.empty(most, dtype=torch.uint8)):
        count += 1
        for one, to, first in zip(piece.packed, joined, piece.firsts, strict=True):
            to[first : first + len(one)] = one
    assert all(torch.equal(one, other) for one, other in zip(whole, joined, strict=True))
    assert (count > 1) == (most < sum(layer.sizes))


@pytest.mark.parametrize("kind", [Q4_0, Q5_0, Q8_0])
def test_rows_of_a_few_blocks_are_packed_alike(library, kind):
    check_alike(library, [blocks(kind, 19, 96, seed=3)])


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_a_scale_that_is_not_finite_is_refused_wherever_it_is(library, kind, bits):
    """The scale is in the first block of the first row, or in the last block of the last row."""
    whole = blocks(kind, 33, 512, seed=5)
    for row, place in ((0, 0), (32, -1)):
        stored = StoredBlocks(whole.raw.clone(), kind)
        ends = stored.raw[row].view(-1, stored.type.num_bytes)[place]
        for at in HALVES[kind][-1:]:
            ends[at : at + 2] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
        if kind == MXFP4:
            ends[0] = LARGEST + 1
        with pytest.raises(Refusal, match="a scale that half precision cannot hold"):
            packed(library, [stored], is_paired=False)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_layer_takes_the_bytes_of_its_file(library, kind):
    stored = blocks(kind, 256, 2048, seed=7)
    layer = BlockLayer(library, [stored])
    assert sum(layer.sizes) == layer.form.num_bytes((256, 2048))
    assert sum(layer.sizes) <= WIDENED.get(kind, 1.03) * stored.raw.nbytes


def test_the_layouts_version_is_raised_with_the_bytes(library):
    """A cache of packed weights is used for as long as the version is the same. If this fails,
    raise PACKED_LAYOUT in engine/kernels/small_weights.h, and write the new number here."""
    total = 0
    for kind in (Q4_K, Q5_K, Q6_K, Q8_0):
        layer = BlockLayer(library, [blocks(kind, 40, 512, seed=11)])
        tensors = Packed(*(torch.empty(size, dtype=torch.uint8) for size in layer.sizes))
        layer.pack(tensors)
        if layer.form.bits == 8:
            tensors.panels.bitwise_xor_(library.triolet_layout() & 255)  # of this processor
        for tensor in tensors:
            total = total * 31 + library.triolet_checksum(tensor.data_ptr(), tensor.nbytes)
    assert library.triolet_layout() >> 8 == 2
    assert total % (1 << 64) == 0x65BA0FB4C9B216D8


@pytest.mark.parametrize("count", [0, 1, 63, 64, 255, 256, 257, 1 << 18, (1 << 18) + 1, 3 << 18])
def test_a_checksum_changes_with_any_byte(library, count):
    draw = np.random.default_rng(count)
    data = torch.from_numpy(draw.integers(0, 256, count + 8, dtype=np.uint8))
    whole = library.triolet_checksum(data.data_ptr(), count)
    assert library.triolet_checksum(data.data_ptr(), count + 1) != whole
    for place in {0, count // 2, count - 1} if count else ():
        for bit in (1, 128):
            data[place] ^= bit
            assert library.triolet_checksum(data.data_ptr(), count) != whole
            data[place] ^= bit
    assert library.triolet_checksum(data.data_ptr(), count) == whole
    if count > 1 << 18:  # the order of the parts counts, too
        turned = torch.cat((data[1 << 18 : count], data[: 1 << 18]))
        assert library.triolet_checksum(turned.data_ptr(), count) != whole


@pytest.mark.parametrize("missing", [0, 1, 4095, 4096, 4999])
def test_a_file_is_in_memory_once_each_of_its_pages_is(library, tmp_path, missing):
    """A page that was never written is in no memory, whatever the file system."""
    page, path = PAGESIZE, tmp_path / "file"
    with path.open("w+b") as file:
        for place in {*range(5000)} - {missing}:
            os.pwrite(file.fileno(), b"x", place * page)
        os.ftruncate(file.fileno(), 5000 * page - 7)
        mapped = mmap(file.fileno(), 0, access=ACCESS_READ)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        assert library.triolet_in_memory(address, len(mapped)) == 0
        os.pwrite(file.fileno(), b"x", missing * page)
        assert library.triolet_in_memory(address, len(mapped)) == 1
