"""Checks of whether a config field's value is usual. Transformers reads a config with any other
value.

Rule: a check looks at one value alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], bool]


def is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def is_index(value: Any) -> bool:
    return type(value) is int and value >= 0


def is_id(value: Any) -> bool:
    return value is None or type(value) is int


def is_ids(value: Any) -> bool:
    return is_id(value) or (isinstance(value, list) and all(type(item) is int for item in value))


def is_real(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def is_number(value: Any) -> bool:
    return type(value) is int or is_real(value)


def is_share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def is_flag(value: Any) -> bool:
    return type(value) is bool


def is_off(value: Any) -> bool:
    return value is None or value is False


def is_rope(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def is_list_of(*values: Any) -> Check:
    """Return a check that accepts a list of ``values``, and None."""
    return lambda value: (
        value is None or (isinstance(value, list) and all(item in values for item in value))
    )


def is_indices(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(is_index(item) for item in value))


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def one_of(*values: Any) -> Check:
    return lambda value: value in values


ANY: Check = lambda _value: True  # noqa: E731
SILU = ("silu", "swish")
GELU_TANH = "gelu_pytorch_tanh"
OPTIONAL_COUNT = or_none(is_count)
is_types = is_list_of("full_attention", "sliding_attention")
is_hybrid_types = is_list_of("full_attention", "conv")
is_unwindowed = or_none(is_list_of("full_attention"))
is_switches = is_list_of(0, 1)
