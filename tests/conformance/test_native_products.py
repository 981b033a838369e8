"""Compiled matrix products equal torch's, for every shape of a block.

A row's product does not depend on the rows beside it.
"""

import pytest
import torch

from engine.worker.forward import native
from engine.worker.forward.decoder import PackedLinear
from engine.worker.forward.native_attention import NativeBackend

DTYPES = [torch.float32, torch.bfloat16]
NARROW = [torch.bfloat16, torch.float16]
FORMS = [*((dtype, dtype) for dtype in DTYPES), *((torch.float32, dtype) for dtype in NARROW)]
ROWS = [1, 2, 3, 7, 8, 12, 13, 16, 17, 20, 24, 31, 32, 33, 36, 64, 65, 100, 129, 300]
SHAPES = [(16, 32), (40, 64), (100, 17), (257, 200), (512, 1100)]  # outputs, inputs


@pytest.fixture(scope="module")
def backend():
    return NativeBackend(native.load())


def make_linear(outputs, inputs, dtype, *, bias=False):
    torch.manual_seed(outputs * inputs)
    layer = torch.nn.Linear(inputs, outputs, bias=bias).to(dtype)
    return layer.requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_layer_is_the_stock_one(backend, dtype, shape, bias):
    stock = make_linear(*shape, dtype, bias=bias)
    wide = torch.nn.Linear(shape[1], shape[0], bias=bias).double()
    wide.load_state_dict({k: v.double() for k, v in stock.state_dict().items()})
    x = torch.randn(max(ROWS), shape[1]).to(dtype)
    wanted, plain = wide(x.double()), stock(x)
    packed = PackedLinear(stock, backend, dtype)
    for rows in ROWS:
        out = packed(x[None, :rows])[0]
        assert out.dtype == dtype
        error = (out.double() - wanted[:rows]).norm() / wanted[:rows].norm()
        stock_error = (plain[:rows].double() - wanted[:rows]).norm() / wanted[:rows].norm()
        assert error <= max(1.1 * stock_error, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_product_is_the_same_beside_any_others(backend, dtype):
    packed = PackedLinear(make_linear(257, 1100, dtype), backend, dtype)
    x = torch.randn(300, 1100).to(dtype)
    together = packed(x)
    for low, high in ((0, 1), (5, 7), (17, 48), (60, 80), (100, 124), (130, 194), (40, 290)):
        assert torch.equal(packed(x[low:high]), together[low:high])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_weights_of_16_bits_give_the_bits_of_the_same_weights_in_float32(backend, dtype, shape):
    """The kernels widen the weights exactly, also subnormal ones, and keep half as many bytes."""
    narrow = make_linear(*shape, dtype, bias=True)
    narrow.weight.view(-1)[:4] = torch.tensor([6e-8, -3e-5, 2.5, -0.0])
    wide = make_linear(*shape, torch.float32, bias=True)
    wide.load_state_dict({k: v.float() for k, v in narrow.state_dict().items()})
    x = torch.randn(max(ROWS), shape[1])
    small, large = (PackedLinear(one, backend, torch.float32) for one in (narrow, wide))
    assert small.packed.dtype == dtype
    assert 2 * small.packed.nbytes == large.packed.nbytes
    for rows in ROWS:
        assert torch.equal(small(x[:rows]), large(x[:rows]))


def test_packing_frees_the_stock_layer(backend):
    stock = make_linear(64, 64, torch.float32)
    weight = stock.weight
    packed = PackedLinear(stock, backend, torch.float32)
    assert stock.weight is None
    assert packed.packed.numel() == weight.numel()
