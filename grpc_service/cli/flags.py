"""The flags of ``triolet serve``, and the configurations made of arguments and a TOML file.

Rule 1: a flag is a setting with a help text in one of the configurations. Its key in the file is
its name with underscores. Rule 2: an unknown flag or key is refused, and the message names it. An
argument overrides the file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.config import DEMO_MODELS, AdapterConfig, EngineConfig, ModelConfig
from engine.errors import ConfigError
from engine.settings import flag_of, setting_of, settings_of
from grpc_service.app.server_config import ServerConfig
from grpc_service.cli.config_file import read_file, read_table
from grpc_service.cli.values import Kind, kind_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    Target = type[EngineConfig] | type[ServerConfig] | type[ModelConfig]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of serve. Its value goes to ``field`` of ``target``; with ``is_inverted``, a switch
    sets the field to False. A field of `ModelConfig` is set for every model whose own table does
    not set it. ``section`` is its heading in the help."""

    name: str
    target: Target
    field: str
    kind: Kind
    help: str
    default: str  # as the help shows it; "" for no default
    section: str
    is_inverted: bool = False

    @property
    def key(self) -> str:
        """The flag's key in the file."""
        return self.name.replace("-", "_")

    def help_text(self) -> str:
        """Return the help text with the default, if there is one to show."""
        return f"{self.help} (default: {self.default})" if self.default else self.help


def flags_of(target: Target) -> Iterator[Flag]:
    """Yield the flags of a configuration's settings."""
    for section, field in settings_of(target):
        setting, kind, off = setting_of(field), kind_of(field), field.default is True
        if setting is None or kind is None or not setting.help:
            continue
        shown = "" if kind.is_switch or field.default in (None, "", ()) else str(field.default)
        yield Flag(
            f"no-{flag_of(field)}" if off else flag_of(field),
            target,
            field.name,
            kind,
            setting.help,
            setting.unset or shown,
            section,
            off,
        )


FLAGS = (*flags_of(ModelConfig), *flags_of(ServerConfig), *flags_of(EngineConfig))
BY_KEY = {flag.key: flag for flag in FLAGS}
KINDS = {flag.key: flag.kind for flag in FLAGS}


def configs_of(
    args: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[EngineConfig, ServerConfig]:
    """Return the configs made of the arguments, the file that they name and ``ENGINE_CHECK``.

    Raises:
        ConfigError: the message names the setting and what to change.
    """
    settings, models = ({}, []) if args.config is None else read_file(args.config, KINDS)
    settings |= {key: value for key, value in vars(args).items() if key in BY_KEY}
    engine = _fields(EngineConfig, settings)
    engine["models"] = _models(args, models, _fields(ModelConfig, settings))
    if "ENGINE_CHECK" in environ:
        engine["check_level"] = _check_level(environ["ENGINE_CHECK"])
    return EngineConfig(**engine), ServerConfig(**_fields(ServerConfig, settings))


def engine_config_of(table: Mapping[str, Any]) -> EngineConfig:
    """Return the config of an engine without a server of its own, from a table with the keys of the
    file.

    Raises:
        ConfigError: the message names the key and what to change.
    """
    kinds = {flag.key: flag.kind for flag in FLAGS if flag.target is not ServerConfig}
    settings, tables = read_table(table, kinds)
    common = _fields(ModelConfig, settings)
    tables = tables or [{"model": model} for model in DEMO_MODELS]
    models = tuple(ModelConfig(**common | table) for table in tables)
    return EngineConfig(models=models, **_fields(EngineConfig, settings))


def _fields(target: Target, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are fields of ``target``, by the fields' names."""
    return {
        flag.field: settings[flag.key] != flag.is_inverted
        if flag.kind.is_switch
        else tuple(settings[flag.key])
        if flag.kind.is_repeated
        else settings[flag.key]
        for flag in FLAGS
        if flag.target is target and flag.key in settings
    }


def _models(
    args: argparse.Namespace, tables: list[dict[str, Any]], common: dict[str, Any]
) -> tuple[ModelConfig, ...]:
    """Return the models of the arguments, or else of the file, or else the shipped ones. The names
    of --served-model-name go to them in order."""
    if "model" in args:
        tables = [{"model": model} for model in args.model]
    tables = tables or [{"model": model} for model in DEMO_MODELS]
    names = getattr(args, "served_model_name", [])
    if len(names) > len(tables):
        raise ConfigError(
            f"--served-model-name is given {len(names)} times for {len(tables)} model(s); it "
            "names the models in order"
        )
    for table, name in zip(tables, names, strict=False):
        table["name"] = name
    models = tuple(ModelConfig(**common | table) for table in tables)
    models = _with_adapters(models, getattr(args, "adapter", []))
    if "model" not in args and not names:  # the file alone names the models
        _check_names(args.config, models)
    return models


def _check_names(path: str, models: tuple[ModelConfig, ...]) -> None:
    """Check that no two models of the file share a name.

    Raises:
        ConfigError: two models have one name; the message has the keys that set it.
    """
    keys: dict[str, str] = {}
    for index, model in enumerate(models):
        for key, names in (("name", (model.name,)), ("aliases", model.aliases)):
            own = f"models[{index}].{key}"
            for name in names:
                if name in keys:
                    what = f"is taken by {keys[name]}; give one of them another name"
                    raise ConfigError(f"{path}: {own}: {name!r} {what}")
                keys[name] = own


def _check_level(text: str) -> int:
    if text not in ("0", "1", "2"):
        raise ConfigError(f"ENGINE_CHECK is {text!r}; use 0, 1 or 2")
    return int(text)


def _with_adapters(
    models: tuple[ModelConfig, ...], given: list[tuple[str, str, str]]
) -> tuple[ModelConfig, ...]:
    """Return the models with the adapters of ``--adapter``, each a base, a name and a directory."""
    names = [model.name for model in models]
    for base, name, _ in given:
        if base not in names:
            raise ConfigError(
                f"--adapter {base}:{name} has the base {base!r}, but the models are: "
                f"{', '.join(names)}"
            )
    return tuple(
        dataclasses.replace(
            model,
            adapters=model.adapters
            + tuple(AdapterConfig(name, path) for base, name, path in given if base == model.name),
        )
        for model in models
    )
