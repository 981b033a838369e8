"""Reads end tokens and sampling defaults from a model's generation_config.json.

Rule 1: a missing field becomes None, so that requests and the engine's defaults decide. A model
with a value outside its range (`RANGES`) is refused, since every request would inherit that value.
Rule 2: a field that changes answers in transformers but not here is named in the log.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from engine.worker.load.reading import has_file
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import read_json
from engine.worker.text.interface import SamplingDefaults

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.worker.load.resolve import Source

FILE_NAME = "generation_config.json"
# The lowest and the highest value of each field, by transformers' names. The ranges are those of
# SamplingParams in inference.proto.
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
    "max_new_tokens": (1, 2**31 - 1),
}
# Fields that change no answer: the file's version, settings of transformers' caches and return
# values, and ids of the first token and the padding, which the tokenizer's files decide.
WITHOUT_EFFECT = frozenset(
    {
        *("transformers_version", "bos_token_id", "pad_token_id", "decoder_start_token_id"),
        *("use_cache", "cache_implementation", "cache_config", "return_legacy_cache"),
        *("return_dict_in_generate", "output_attentions", "output_hidden_states"),
        *("output_scores", "output_logits", "disable_compile", "compile_config"),
        *("prefill_chunk_size", "low_memory"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
    }
)
# Fields that have an effect in transformers and not here, with the value at which they have none.
# With false, 0, null or an empty list, no field has an effect.
NEUTRAL = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "length_penalty": 1,
    "encoder_repetition_penalty": 1,
    "guidance_scale": 1,
    "top_h": 1,
}

log = logging.getLogger(__name__)


def read_generation(source: Source, config: Any) -> tuple[SamplingDefaults, frozenset[int]]:
    """Return the sampling defaults and the end-of-sequence ids. If the file has no such ids, they
    come from the model's config. ``do_sample`` false is a temperature of 0.

    Raises:
        Refusal: The file is broken, or a value is outside its range.
    """
    raw: Mapping[str, Any] = {}
    if has_file(source.directory / FILE_NAME):
        raw = read_json(source.directory, FILE_NAME)
    _log_unfollowed(source.name, raw)
    ends = raw.get("eos_token_id")
    if ends is None:
        ends = getattr(config, "eos_token_id", None)
    defaults = SamplingDefaults(
        temperature=_temperature(raw),
        top_k=_integer(raw, "top_k"),
        top_p=_number(raw, "top_p") or None,
        min_p=_number(raw, "min_p"),
        typical_p=_number(raw, "typical_p"),
        repetition_penalty=_number(raw, "repetition_penalty"),
        presence_penalty=_number(raw, "presence_penalty"),
        frequency_penalty=_number(raw, "frequency_penalty"),
        min_tokens=_integer(raw, "min_new_tokens"),
        max_tokens=_integer(raw, "max_new_tokens"),
    )
    return defaults, _end_ids(ends, int(config.vocab_size))


def _log_unfollowed(model: str, raw: Mapping[str, Any]) -> None:
    followed = {*RANGES, "do_sample", "eos_token_id"}
    names = sorted(
        name
        for name, value in raw.items()
        if not (name in followed or name in WITHOUT_EFFECT or name.startswith("_"))
        and value
        and value != NEUTRAL.get(name)
    )
    if names:
        text = "%s: its %s has fields that are not followed: %s"
        log.warning(text, model, FILE_NAME, ", ".join(names))


def _temperature(raw: Mapping[str, Any]) -> float | None:
    temperature, samples = _number(raw, "temperature"), raw.get("do_sample")
    if samples is not None and not isinstance(samples, bool):
        raise Refusal(
            f"its {FILE_NAME} has do_sample = {samples!r}, which is neither true nor false"
        )
    return 0.0 if samples is False else temperature


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
    """Return the ids of a field that holds one id, a list of ids or nothing. Ids outside the
    vocabulary are left out."""
    if value is None:
        return frozenset()
    listed = value if isinstance(value, list) else [value]
    ids = [item for item in listed if isinstance(item, int)]
    if len(ids) != len(listed):
        raise Refusal(f"its eos_token_id is {value!r}, and must be a token id or a list of them")
    return frozenset(item for item in ids if 0 <= item < vocab_size)
