"""The fields of features that do not exist yet, which are refused if they are set.

Rule 1: a field that is set is refused even if its value is neutral (a flag that is false), so that
a client learns at once that the feature is missing. Rule 2: a change that adds a feature removes
its fields from this table and decodes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from google.protobuf.message import Message


# The paths of fields, without the indices of repeated fields, by message.
LATER: Mapping[str, tuple[str, ...]] = {"EmbedRequest": ("inputs.image",)}


def refuse_later(message: Message) -> None:
    """Check that no field of `LATER` is set.

    Raises:
        Unsupported: ``field`` is the first such field; the message names all of them.
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
    """Yield the paths, with indices, at which the field ``names`` is set in ``message``."""
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
