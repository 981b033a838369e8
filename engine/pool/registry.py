"""Which models are configured, by name, alias and capability; and whether they may be used.

Everything here belongs to the Trio thread, except that any thread may call `Registry.require_open`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import AdapterConfig
from engine.errors import ConfigError, InvalidRequest, ModelNotFound, NoWorkers, ShuttingDown
from engine.pool.adapter_version import AdapterVersion
from engine.pool.capabilities import TRAITS, can
from engine.pool.entry import Entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.config import EngineConfig, ModelConfig
    from engine.status import Capability, ModelStatus

    FindCapability = Callable[[ModelConfig], Capability | None]

RETRY_AFTER_S = 5.0  # retry-after of refusals; a guess: by then an unload has ended


class Registry:
    """The configured models, in the order of the configuration.

    ``entries`` has them by name. ``find_capability`` returns the capability of a model whose
    configuration names none, or None if it is unknown until the model has loaded. The pool's parts
    call ``on_change`` whenever a model's state may have changed. ``is_closed``: the pool is ending,
    and no model may be used or loaded any more.
    """

    def __init__(
        self,
        config: EngineConfig,
        find_capability: FindCapability | None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.on_change = on_change
        find = find_capability or (lambda model: None)
        self.entries = {
            model.name: Entry(model, model.capability or find(model)) for model in config.models
        }
        self._names = {
            alias: model.name for model in config.models for alias in (model.name, *model.aliases)
        }
        self._adapters: dict[str, tuple[Entry, AdapterVersion]] = {}  # by BASE:NAME and alias
        for entry in self.entries.values():
            for adapter in entry.config.adapters:
                self.set_adapter(entry, AdapterVersion(entry.config.name, adapter))
        self.is_closed = False

    def close(self) -> None:
        """Have `require_open` refuse from now on. Idempotent."""
        self.is_closed = True

    def find(self, name: str, capability: Capability | None = None) -> Entry:
        """Return the model with this name or alias. For an empty name, return the first configured
        model that has the capability; None stands for any.

        Raises:
            ModelNotFound: no model has this name, or no model the capability.
            InvalidRequest: the named model has another capability, or is an adapter.
        """
        if not name:
            return self._first(capability)
        if name in self._adapters:
            base = self._adapters[name][0].config.name
            raise InvalidRequest.of(
                "model", f"{name} is an adapter of {base}; name that model, or use LoadAdapter and "
                "UnloadAdapter"
            )  # fmt: skip
        try:
            entry = self.entries[self._names[name]]
        except KeyError:
            raise self._unknown_model(name) from None
        self._require_capability(entry, capability)
        return entry

    def find_base(self, name: str, capability: Capability | None = None) -> Entry:
        """Return the base of the adapter with this name; other names are looked up as by `find`."""
        if name not in self._adapters:
            return self.find(name, capability)
        entry = self._adapters[name][0]
        self._require_capability(entry, capability)
        return entry

    def _unknown_model(self, name: str) -> ModelNotFound:
        adapters = [a.name for entry in self.entries.values() for a in entry.adapters.values()]
        known = ", ".join((*self.entries, *adapters))
        return ModelNotFound(f"no model is named {name!r}; the configured models are: {known}")

    # ---- adapters

    def find_adapter(self, name: str) -> AdapterVersion | None:
        """Return the adapter with this name or alias; None if there is none."""
        return self._adapters[name][1] if name in self._adapters else None

    def names_of(self, name: str) -> tuple[str, str]:
        """Return the names of the model and the adapter that a name stands for; "" for what there
        is not."""
        if name in self._adapters:
            entry, version = self._adapters[name]
            return entry.config.name, version.name
        return self._names.get(name, ""), ""

    def require_adapter(self, name: str) -> tuple[Entry, AdapterVersion]:
        """Return an adapter and its base.

        Raises:
            ModelNotFound: no model has this name. InvalidRequest: it is not an adapter.
        """
        if name in self._adapters:
            return self._adapters[name]
        if name in self._names:
            raise InvalidRequest.of("model", f"{name} is not an adapter; use UnloadModel")
        raise self._unknown_model(name)

    def adapter_config(
        self, name: str, directory: str, aliases: tuple[str, ...]
    ) -> tuple[Entry, AdapterConfig]:
        """Return the base and the configuration of an adapter that is to be loaded.

        Raises:
            ModelNotFound: its base is not configured.
            InvalidRequest: the name is not ``BASE:NAME``, its base is divided among processes, or a
                name is taken (`require_names`).
        """
        base, _, own = name.rpartition(":")
        if not base or not own:
            raise InvalidRequest.of("model", f"is {name!r}, and must be BASE:NAME")
        entry = self.find(base)
        if entry.config.tp > 1:
            raise InvalidRequest.of(
                "model",
                f"{base} is divided among {entry.config.tp} processes (--tensor-parallel-size), "
                "and a divided model takes no adapters",
            )
        try:
            config = AdapterConfig(own, directory, tuple(dict.fromkeys(aliases)))
        except ConfigError as error:
            raise InvalidRequest.of("directory", str(error)) from error
        self.require_names(entry, config)
        return entry, config

    def require_names(self, entry: Entry, config: AdapterConfig) -> None:
        """Check that an adapter may have its names. Loads of two adapters may ask for one name at
        the same time, so `set_adapter` needs this check right before it.

        Raises:
            InvalidRequest: a name stands for another model, or an alias is the adapter's own name.
        """
        full = f"{entry.config.name}:{config.name}"
        for alias in (full, *config.aliases):
            known = self.find_adapter(alias)
            if alias in self._names or (known is not None and known.name != full):
                field = "model" if alias == full else "aliases"
                raise InvalidRequest.of(field, f"{alias} is the name of another model")
        if full in config.aliases:
            raise InvalidRequest.of("aliases", f"{full} is the adapter's own name; leave it out")

    def set_adapter(self, entry: Entry, version: AdapterVersion) -> None:
        """Give an adapter its names, and take them from the version that had them before."""
        old = entry.adapters.get(version.name)
        if old is not None:
            self.forget_adapter(entry, old)
        entry.adapters[version.name] = version
        for name in (version.name, *version.config.aliases):
            self._adapters[name] = (entry, version)

    def forget_adapter(self, entry: Entry, version: AdapterVersion) -> None:
        """Take away the names that stand for this version of an adapter."""
        if entry.adapters.get(version.name) is version:
            del entry.adapters[version.name]
        for name in (version.name, *version.config.aliases):
            if self.find_adapter(name) is version:
                del self._adapters[name]

    def status_of(self, name: str) -> ModelStatus:
        """Return the snapshot of a model or an adapter.

        Raises:
            ModelNotFound: no model has this name.
        """
        if name in self._adapters:
            entry, version = self._adapters[name]
            return entry.adapter_status(version)
        return self.find(name).status()

    def _first(self, capability: Capability | None) -> Entry:
        for entry in self.entries.values():
            if can(entry.likely_capability, capability):
                return entry
        assert capability is not None
        raise ModelNotFound(f"no model that {TRAITS[capability].description} is configured")

    def _require_capability(self, entry: Entry, capability: Capability | None) -> None:
        """Check that a model has a capability, unless the model's capability is unknown yet.

        Raises:
            InvalidRequest: the model has another capability.
        """
        if entry.capability is None or can(entry.capability, capability):
            return
        assert capability is not None
        raise InvalidRequest.of(
            "model",
            f"{entry.config.name} {entry.traits.description}, but the request needs a model that "
            f"{TRAITS[capability].description}",
        )

    def require_open(self, entry: Entry | None = None) -> None:
        """Check that requests may use the pool's models and, if given, the model ``entry``.

        Raises:
            ShuttingDown: the pool is ending.
            NoWorkers: the operator is unloading the model.
        """
        if self.is_closed:
            raise ShuttingDown("the server takes no new requests", retry_after_s=RETRY_AFTER_S)
        if entry is not None and entry.num_unloads:
            name = entry.config.name
            raise NoWorkers(f"{name} is being unloaded", retry_after_s=RETRY_AFTER_S)
