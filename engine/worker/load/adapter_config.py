"""Reads the adapter_config.json of a LoRA adapter that peft wrote: which layers it changes, and
how.

Rule 1: a field either is honoured here, or has no effect on the answers, or is refused by its name.
A field that is not known is refused unless it is off. Rule 2: layers are matched as peft matches
them, by the names that transformers gives them. Rule 3: a file's patterns are not trusted. Each
match has a time limit, and other threads run meanwhile.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ALL_LINEAR = "all-linear"  # Peft's name for every linear layer except the head.
MATCH_S = 0.2  # The time limit of a match; an honest pattern takes microseconds.
RANK_MAX = 4096  # A larger rank is taken for a mistake: it is far above any in use.
HONOURED = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
}
# Fields without an effect on answers: they say how the adapter was trained, or for which task.
WITHOUT_EFFECT = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "lora_dropout", "fan_in_fan_out", "init_lora_weights"),
    *("megatron_core", "loftq_config", "eva_config", "runtime_config", "qalora_group_size"),
}
REFUSED = {
    "use_dora": "DoRA (use_dora), which also scales the base's weights",
    "modules_to_save": "whole layers (modules_to_save)",
    "alora_invocation_tokens": "aLoRA (alora_invocation_tokens), which begins inside a prompt",
    "target_parameters": "adapters of single parameters (target_parameters)",
    "lora_bias": "biases (lora_bias)",
    "trainable_token_indices": "trained embeddings of tokens (trainable_token_indices)",
    "layer_replication": "replicated layers (layer_replication)",
    "use_qalora": "QALoRA (use_qalora)",
}
# Values of init_lora_weights that leave the base's own weights unchanged. Other values change them,
# so that the adapter does not fit the base unless peft converted it when it was saved.
KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """Which layers an adapter changes, and with what rank and scale."""

    rank: int
    alpha: float
    is_root_scaled: bool  # rslora: alpha is divided by the square root of the rank
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...]  # empty: all
    layers_patterns: tuple[str, ...]

    def has(self, name: str, head: str) -> bool:
        """Return whether the adapter changes the linear layer ``name``. ``head`` is the name of the
        model's head."""
        if self.excluded and _matches(self.excluded, name):
            return False
        if self.targets == ALL_LINEAR:
            return name != head
        if isinstance(self.targets, str) or name in self.targets:
            return _matches(self.targets, name)
        return _matches(self.targets, name) and self._has_layer(name)

    def _has_layer(self, name: str) -> bool:
        if not self.layers:
            return True
        patterns = [rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\." for name in self.layers_patterns]
        for pattern in patterns or [r".*?\.[^.]*\.(?P<idx>\d+)\."]:
            if (match := _match(pattern, name)) is not None:
                return int(match["idx"]) in self.layers
        return False

    def rank_of(self, name: str) -> int:
        """Return the rank that the adapter has at a layer."""
        return int(_by_pattern(self.ranks, name, self.rank))

    def scale_of(self, name: str) -> float:
        """Return the factor of the adapter's product at a layer."""
        rank = self.rank_of(name)
        alpha = float(_by_pattern(self.alphas, name, self.alpha))
        return alpha / math.sqrt(rank) if self.is_root_scaled else alpha / rank


def _matches(patterns: str | Sequence[str], name: str) -> bool:
    """Return whether a regular expression matches a layer's whole name, or whether one of several
    names is the layer's name or its end, from a dot on."""
    if isinstance(patterns, str):
        return _match(patterns, name, "fullmatch") is not None
    return name in patterns or any(name.endswith(f".{pattern}") for pattern in patterns)


def _by_pattern(values: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    for pattern, value in values.items():
        if _match(rf"(.*\.)?({pattern})$", name):
            return value
    return otherwise


def _match(pattern: str, name: str, how: str = "match") -> Any:
    """Return the result of `regex`'s function ``how`` for a pattern and a layer's name.

    Raises:
        Refusal: The match takes too long (rule 3), or the pattern is no regular expression.
    """
    import regex  # late, as few models have adapters

    try:
        return getattr(regex, how)(pattern, name, concurrent=True, timeout=MATCH_S)
    except TimeoutError as error:
        raise Refusal(f"its pattern {pattern[:200]!r} takes too long to match {name}") from error
    except (regex.error, RecursionError) as error:
        raise _not_a_pattern(pattern, error) from error


def _not_a_pattern(pattern: str, error: Exception) -> Refusal:
    return Refusal(f"its pattern {pattern[:200]!r} is no regular expression ({error})")


def read_form(text: bytes) -> AdapterForm:
    """Return the form of an adapter from the text of its adapter_config.json.

    Raises:
        Refusal: The text is no JSON, or its adapter is not LoRA of a kind that is served.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refusal("its adapter_config.json is not JSON", detail=str(error)) from error
    if not isinstance(raw, dict):
        raise Refusal("its adapter_config.json is not a JSON object")
    _refuse_unserved(raw)
    form = AdapterForm(
        rank=_rank(raw.get("r", 8), "r"),
        alpha=_number(raw.get("lora_alpha", 8), "lora_alpha"),
        is_root_scaled=bool(raw.get("use_rslora")),
        ranks={key: _rank(value, "rank_pattern") for key, value in _table(raw, "rank_pattern")},
        alphas={
            key: _number(value, "alpha_pattern") for key, value in _table(raw, "alpha_pattern")
        },
        targets=_names(raw, "target_modules"),
        excluded=_names(raw, "exclude_modules"),
        layers=_layers(raw.get("layers_to_transform")),
        layers_patterns=_as_tuple(_names(raw, "layers_pattern")),
    )
    if not form.targets:
        raise Refusal("its adapter_config.json names no target_modules")
    _check_patterns(form)
    return form


def _refuse_unserved(raw: Mapping[str, Any]) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise Refusal(f"it is an adapter of the type {kind!r} (peft_type), and only LORA is served")
    for name, what in REFUSED.items():
        if raw.get(name):
            raise Refusal(f"it has {what}, and these are not served")
    if raw.get("bias", "none") != "none":
        raise Refusal(f"it has biases (bias is {raw['bias']!r}), and these are not served")
    begun = raw.get("init_lora_weights", True)
    if begun not in KEEPS_BASE:
        raise Refusal(
            f"its training began by {begun!r} (init_lora_weights), which changes the base's own "
            "weights; convert it by peft's path_initial_model_for_weight_conversion"
        )
    known = HONOURED | WITHOUT_EFFECT | REFUSED.keys() | {"bias"}
    unknown = [name for name, value in raw.items() if name not in known and value]
    if unknown:
        raise Refusal(f"its adapter_config.json sets {unknown[0]}, which is not served")


def _rank(value: Any, name: str) -> int:
    if type(value) is not int or not 0 < value <= RANK_MAX:
        raise Refusal(f"its {name} has the rank {value!r}, outside [1, {RANK_MAX}]")
    return value


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise Refusal(f"its {name} has a value that is not a finite number")
    return float(value)


def _table(raw: Mapping[str, Any], name: str) -> Iterable[tuple[str, Any]]:
    table = raw.get(name) or {}
    if not isinstance(table, dict):
        raise Refusal(f"its {name} is not a table of names")
    return table.items()


def _names(raw: Mapping[str, Any], name: str) -> str | tuple[str, ...]:
    names = raw.get(name) or ()
    if isinstance(names, str):
        return names
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise Refusal(f"its {name} is neither a text nor a list of names")
    return tuple(names)


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) and names else tuple(names)


def _layers(given: Any) -> tuple[int, ...]:
    layers = [given] if type(given) is int else given or []
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise Refusal("its layers_to_transform is neither a number nor a list of numbers")
    return tuple(layers)


def _check_patterns(form: AdapterForm) -> None:
    """Compile every regular expression of the file, so that none fails later."""
    given = [*form.ranks, *form.alphas, *form.layers_patterns]
    given += [pattern for pattern in (form.targets, form.excluded) if isinstance(pattern, str)]
    import regex

    for pattern in given:
        try:
            regex.compile(pattern)
        except (regex.error, RecursionError) as error:
            raise _not_a_pattern(pattern, error) from error
