"""Reads the TOML file of ``triolet serve --config``: all flags, and settings of single models.

Rule 1: an unknown key is refused; the message names it and the most similar known key.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from engine.config import AdapterConfig, ModelConfig, WorkerConfig
from engine.errors import ConfigError
from grpc_service.cli.values import kinds_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from grpc_service.cli.values import Kind

NESTED = {"workers": WorkerConfig, "adapters": AdapterConfig}  # fields of a model that are tables
TABLES = {
    "models": kinds_of(ModelConfig),
    **{f"models.{key}": kinds_of(config) for key, config in NESTED.items()},
}


def read_file(path: str, kinds: Mapping[str, Kind]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the file's settings by key, and its models as fields of ModelConfig. ``kinds`` has
    the kind of each setting that the file may have.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong; the message names the
            first one.
    """
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    try:
        return read_table(table, kinds)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_table(
    table: Mapping[str, Any], kinds: Mapping[str, Kind]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the settings of a table as `read_file` does.

    Raises:
        ConfigError: a key or value is wrong; the message names the first one.
    """
    settings = dict(table)
    models = [
        _given(ModelConfig, dict(entry), f"models[{index}].")
        for index, entry in enumerate(_tables(settings.pop("models", []), "models"))
    ]
    return _read(settings, kinds, ""), models


def _given(config: type[Any], table: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values that a table of the file has for the fields of ``config``."""
    extra = [field.name for field in fields(config) if field.name in ("aliases", *NESTED)]
    values: dict[str, Any] = {}
    for key in extra:
        given = table.pop(key, [])
        if key in NESTED:
            values[key] = tuple(
                _made(NESTED[key], entry, f"{prefix}{key}[{index}].")
                for index, entry in enumerate(_tables(given, f"{prefix}{key}"))
            )
        elif isinstance(given, list) and all(isinstance(alias, str) for alias in given):
            values[key] = tuple(given)
        else:
            raise ConfigError(f"{prefix}{key} must be a list of names")
    values |= _read(table, kinds_of(config), prefix, extra)
    for field in fields(config):
        if field.default is field.default_factory is MISSING and field.name not in values:
            raise ConfigError(f"{prefix}{field.name} is missing")
    return values


def _made(config: type[Any], table: dict[str, Any], prefix: str) -> Any:
    values = _given(config, table, prefix)
    try:
        return config(**values)
    except ConfigError as error:
        raise ConfigError(f"{prefix.rstrip('.')}: {error}") from None


def _read(
    table: dict[str, Any], kinds: Mapping[str, Kind], prefix: str, extra: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the values of ``table`` after checking every key and value. The ``extra`` keys are
    read elsewhere; error messages may propose them."""
    values = {}
    for key, given in table.items():
        if key not in kinds:
            raise ConfigError(f"{prefix}{key} is not a setting{_hint(key, (*kinds, *extra))}")
        try:
            values[key] = kinds[key].read(given)
        except ValueError:
            wanted = kinds[key].wanted
            raise ConfigError(f"{prefix}{key} is {given!r}, but must be {wanted}") from None
    return values


def _tables(given: object, name: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(entry, dict) for entry in given):
        table = re.sub(r"\[\d+\]", "", name)
        raise ConfigError(f"{name} must be written as [[{table}]] tables")
    return given


def _hint(key: str, known: Iterable[str]) -> str:
    if key in ("model", "served_model_name"):
        return "; write a [[models]] table with model and name"
    places = [f"[[{table}]]" for table, keys in TABLES.items() if key in keys]
    if places:
        return f"; it belongs to {' or '.join(places)}"
    near = difflib.get_close_matches(key.replace("-", "_"), list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
