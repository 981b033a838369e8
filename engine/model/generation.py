"""What a model's generation_config.json says: end tokens and sampling defaults.

Rule 1: what it does not say is None and is decided elsewhere; a value out of its range
(`RANGES`) refuses the model, as every request would inherit it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.core.plan import SamplingDefaults
from engine.model.refusal import Refusal
from engine.model.resolve import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILE_NAME = "generation_config.json"
# Lowest and highest value of each field, as SamplingParams in inference.proto has them; the names
# are transformers'.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, float("inf")),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "top_k": (0, 2**31 - 1),
    "min_new_tokens": (0, 2**31 - 1),
}


def read_generation(directory: Path, config: Any) -> tuple[SamplingDefaults, frozenset[int]]:
    """Sampling defaults and end-of-sequence ids; the ids fall back to the model's config.

    Raises:
        Refusal: the file is broken, or a value is out of its range.
    """
    raw: Mapping[str, Any] = {}
    if (directory / FILE_NAME).is_file():
        raw = read_json(directory, FILE_NAME)
    ends = raw.get("eos_token_id")
    if ends is None:
        ends = getattr(config, "eos_token_id", None)
    defaults = SamplingDefaults(
        temperature=_number(raw, "temperature"),
        top_k=_integer(raw, "top_k"),
        top_p=_number(raw, "top_p") or None,
        min_p=_number(raw, "min_p"),
        typical_p=_number(raw, "typical_p"),
        repetition_penalty=_number(raw, "repetition_penalty"),
        presence_penalty=_number(raw, "presence_penalty"),
        frequency_penalty=_number(raw, "frequency_penalty"),
        min_tokens=_integer(raw, "min_new_tokens"),
    )
    return defaults, _end_ids(ends, int(config.vocab_size))


def _number(raw: Mapping[str, Any], name: str) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    low, high = RANGES[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise Refusal(f"its {FILE_NAME} has {name} = {value!r}, which is out of range")
    return float(value)


def _integer(raw: Mapping[str, Any], name: str) -> int | None:
    value = _number(raw, name)
    return None if value is None else int(value)


def _end_ids(value: object, vocab_size: int) -> frozenset[int]:
    """One id, a list of ids or none; ids the model cannot produce are left out."""
    if value is None:
        return frozenset()
    listed = value if isinstance(value, list) else [value]
    ids = [item for item in listed if isinstance(item, int)]
    if len(ids) != len(listed):
        raise Refusal(f"its eos_token_id is {value!r}, and must be a token id or a list of them")
    return frozenset(item for item in ids if 0 <= item < vocab_size)
