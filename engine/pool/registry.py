"""Which models are configured, by name, alias and capability; and whether they may be used.

Everything here belongs to the Trio thread, except that any thread may call `Registry.require_open`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import InvalidRequest, ModelNotFound, NoWorkers, ShuttingDown
from engine.pool.capabilities import TRAITS
from engine.pool.entry import Entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.config import EngineConfig, ModelConfig
    from engine.status import Capability

    FindCapability = Callable[[ModelConfig], Capability | None]

RETRY_AFTER_S = 5.0  # guess: until an unload has ended, or another server has taken over


class Registry:
    """The configured models, in the order of the configuration.

    ``entries`` has them by name. ``find_capability`` returns the capability of a model whose
    configuration names none, or None if it is unknown until the model has loaded.
    """

    def __init__(self, config: EngineConfig, find_capability: FindCapability | None) -> None:
        find = find_capability or (lambda model: None)
        self.entries = {
            model.name: Entry(model, model.capability or find(model)) for model in config.models
        }
        self._names = {
            alias: model.name for model in config.models for alias in (model.name, *model.aliases)
        }
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the pool is ending, so that no model may be used or loaded any more."""
        return self._is_closed

    def close(self) -> None:
        """Have `require_open` refuse from now on. Idempotent."""
        self._is_closed = True

    def find(self, name: str, capability: Capability | None = None) -> Entry:
        """Return the model with this name or alias. For an empty name, return the first configured
        model that has the capability; None stands for any.

        Raises:
            ModelNotFound: no model has this name, or none the capability.
            InvalidRequest: the named model has another capability.
        """
        if not name:
            return self._first(capability)
        try:
            entry = self.entries[self._names[name]]
        except KeyError:
            known = ", ".join(self.entries)
            raise ModelNotFound(
                f"no model is named {name!r}; the configured models are: {known}"
            ) from None
        self.require_capability(entry, capability)
        return entry

    def _first(self, capability: Capability | None) -> Entry:
        for entry in self.entries.values():
            if capability in (None, entry.likely_capability):
                return entry
        assert capability is not None
        raise ModelNotFound(f"no model that {TRAITS[capability].description} is configured")

    def require_capability(self, entry: Entry, capability: Capability | None) -> None:
        """Check that a model has a capability, unless its own is unknown.

        Raises:
            InvalidRequest: it has another one.
        """
        if capability is None or entry.capability in (None, capability):
            return
        raise InvalidRequest.of(
            "model",
            f"{entry.config.name} {entry.traits.description}, but the request needs a model that "
            f"{TRAITS[capability].description}",
        )

    def require_open(self, entry: Entry | None = None) -> None:
        """Check that requests may use the pool's models and, if given, this one.

        Raises:
            ShuttingDown: the pool is ending.
            NoWorkers: the operator is unloading the model.
        """
        if self._is_closed:
            raise ShuttingDown("the server takes no new requests", retry_after_s=RETRY_AFTER_S)
        if entry is not None and entry.num_unloads:
            name = entry.config.name
            raise NoWorkers(f"{name} is being unloaded", retry_after_s=RETRY_AFTER_S)
