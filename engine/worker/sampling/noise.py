"""The noise of seeded draws: a counter hash, without a generator and without state (D10).

Rule 1: a number depends on (seed, choice, position, token id) and on nothing else: not on the
batch, the order of the rows, the process, the thread count or the device.
Rule 2: changing a constant changes every seeded text. A test compares some values.

A draw's key is made by three rounds of splitmix64 over (seed, choice, position). A token's bits are
the finaliser of splitmix64 at ``key + (id + 1) * GOLDEN``, which is that generator's output number
``id`` if it starts at ``key``. Two draws share noise only if their keys are less than a vocabulary
apart on this walk; the probability for a pair of draws is 2 * vocab / 2**64.

There are two implementations of the same numbers: one in numpy for a CPU, where torch would start
its threads for each operation, and one in torch for other devices.

Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014); the
constants are the variant 13 of Stafford's mixers that java.util.SplittableRandom also uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
# The bits of a token's noise, from which a uniform number (bits + 0.5) / 2**BITS is made. It has to
# be exact in float64: with 53 bits, the largest number would round up to 1.0.
BITS = 52

_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK_64 = (1 << 64) - 1
_ROUNDS = ((30, _MIX_1), (27, _MIX_2), (31, 1))


def draw_key(seed: int, choice: int, position: int) -> int:
    """Return the key of one draw, 0 ≤ key < 2**64. The seed counts modulo 2**64."""
    key = _mix(seed + GOLDEN)
    key = _mix(key + (choice + 1) * GOLDEN)
    return _mix(key + (position + 1) * GOLDEN)


def draw_uniforms(seed: int, choice: int, position: int) -> tuple[float, float]:
    """Return the two numbers in [0, 1) by which a draw without a client's seed inverts the CDF."""
    key = draw_key(seed, choice, position)
    return ((key >> 11) * 2.0**-53, (_mix(key + GOLDEN) >> 11) * 2.0**-53)


def _mix(value: int) -> int:
    value &= _MASK_64
    for shift, factor in _ROUNDS:
        value = ((value ^ (value >> shift)) * factor) & _MASK_64
    return value


# --- numpy ----------------------------------------------------------------------------------


def walk(ids: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Return (id + 1) * GOLDEN modulo 2**64 for each of ``ids``, to which a draw adds its key."""
    return (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)


def mix(places: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Turn ``places`` (`walk` plus a key) into noise bits, 0 ≤ bits < 2**52, in place, and return
    them. ``scratch`` has the same shape."""
    for shift, factor in _ROUNDS:
        np.right_shift(places, np.uint64(shift), out=scratch)
        np.bitwise_xor(places, scratch, out=places)
        if factor != 1:
            np.multiply(places, np.uint64(factor), out=places)
    return np.right_shift(places, np.uint64(64 - BITS), out=places)


def exponentials(key: int, ids: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the exponential noise of tokens in one draw, in the shape of ``ids``. Its ``-log`` is
    Gumbel noise."""
    places = walk(ids) + np.uint64(key)
    uniform = (mix(places, np.empty_like(places)) + 0.5) * 2.0**-BITS
    return -np.log1p(-uniform)


# --- torch ----------------------------------------------------------------------------------


def uniforms(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return numbers strictly inside (0, 1), one for each pair of key and token id.

    ``keys`` (see `signed`) and ``ids`` are int64 and are broadcast against each other. The result
    has their common shape, is float64, and each number is an odd multiple of 2**-53.
    """
    bits = (ids + 1) * signed(GOLDEN) + keys  # int64, wraps
    for shift, factor in _ROUNDS:
        # torch shifts int64 arithmetically; the mask clears the copies of the sign.
        bits ^= (bits >> shift) & ((1 << (64 - shift)) - 1)
        bits *= signed(factor)
    bits = (bits >> (64 - BITS)) & ((1 << BITS) - 1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-BITS)


def gumbel(uniform: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float64 in the same shape, between -3.61 and 36.74. Small
    uniforms give large noise."""
    return torch.log1p(-uniform).neg_().log_().neg_()


def signed(value: int) -> int:
    """Return an unsigned 64-bit value as the int64 of the same bits, for torch."""
    return value - (1 << 64) if value >= 1 << 63 else value
