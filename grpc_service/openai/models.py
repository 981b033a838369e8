"""The models in OpenAI's form: one entry for each name and alias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.api.engine import Engine
    from engine.status import ModelStatus

PREFIX = "/v1/models/"


def encode_models(engine: Engine) -> dict[str, Any]:
    """Return the list of models; adapters are models, whose ``parent`` is their base."""
    return {"object": "list", "data": list(_entries(engine))}


def encode_one(engine: Engine, name: str) -> dict[str, Any] | None:
    """Return the entry of one name; None if there is no such model."""
    return next((one for one in _entries(engine) if one["id"] == name), None)


def _entries(engine: Engine) -> Iterator[dict[str, Any]]:
    for status in engine.list_models():
        for name in (status.name, *status.aliases):
            yield _entry(status, name)


def _entry(status: ModelStatus, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,  # as nothing here depends on it
        "owned_by": "triolet",
        "root": status.name,
        "parent": status.base or None,
        "max_model_len": status.max_model_len or None,
        "capability": status.capability.value,
        "state": status.state.value,
    }
