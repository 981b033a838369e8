"""The features that do not exist yet: the one table of fields that are refused until they do.

Rule 1: a set field is refused also at its neutral value (a flag that is false), so that a client
learns of a missing feature at its first try and not at the first other value.
Rule 2: the work that brings a feature takes its entries out of here, and decodes the fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from google.protobuf.message import Message


# By message, the proto paths without the indices of repeated fields.
LATER: Mapping[str, tuple[str, ...]] = {"EmbedRequest": ("inputs.image",)}


def refuse_later(message: Message) -> None:
    """Check that no field of `LATER` is set.

    Raises:
        Unsupported: ``field`` is the first such field, the text names them all.
    """
    found = [
        path
        for later in LATER.get(message.DESCRIPTOR.name, ())
        for path in _set_paths(message, later.split("."))
    ]
    if found:
        verb = "is" if len(found) == 1 else "are"
        raise Unsupported(f"{', '.join(found)} {verb} not supported yet", field=found[0])


def _set_paths(message: Message, names: Sequence[str], prefix: str = "") -> Iterator[str]:
    """The paths, indices filled in, at which the field ``names`` is set in ``message``."""
    name, *rest = names
    path = f"{prefix}{name}"
    field = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if not (message.HasField(name) if field.has_presence else bool(value)):
        return
    if not rest:
        yield path
    elif field.is_repeated:
        for index, item in enumerate(value):
            yield from _set_paths(item, rest, f"{path}[{index}].")
    else:
        yield from _set_paths(value, rest, f"{path}.")
