"""Requests with many values, as bytes on the wire, drawn from the descriptors of a service.

No message of protobuf's is made for them, so that a request of any size costs nothing to make.
"""

from __future__ import annotations

from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.descriptor import FieldDescriptor as Field

from grpc_service._generated.triolet.v1.count_limits import COUNT_LIMITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from google.protobuf.descriptor import Descriptor, ServiceDescriptor

    Limits = Mapping[str, tuple[int, int | None]]

FIXED = {
    **dict.fromkeys((Field.TYPE_DOUBLE, Field.TYPE_FIXED64, Field.TYPE_SFIXED64), (1, 8)),
    **dict.fromkeys((Field.TYPE_FLOAT, Field.TYPE_FIXED32, Field.TYPE_SFIXED32), (5, 4)),
}
STRUCT = "google/protobuf/struct.proto"
DELIMITED = {Field.TYPE_STRING, Field.TYPE_BYTES, Field.TYPE_MESSAGE}


class Path(NamedTuple):
    """The fields from a request to one of its repeated fields or maps, which is the last one."""

    service: str
    method: str
    fields: tuple[Field, ...]

    @property
    def full_method(self) -> str:
        """The method's path in HTTP/2."""
        return f"/{self.service}/{self.method}"

    @property
    def name(self) -> str:
        """The field's path, without the entries of maps."""
        return ".".join(one.name for one in self.fields)

    def __str__(self) -> str:
        return f"{self.method} {self.name}"


def varint(number: int) -> bytes:
    """Encode a number."""
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def delimited(field: Field, data: bytes) -> bytes:
    """Encode a field of bytes, text or a message."""
    return varint(field.number << 3 | 2) + varint(len(data)) + data


def paths_of(service: ServiceDescriptor) -> list[Path]:
    """Return every repeated field and every map that requests of a service can have. A type that
    holds itself is followed once."""
    return [
        Path(service.full_name, method.name, fields)
        for method in service.methods
        for fields in _paths(method.input_type, (), ())
    ]


def _paths(
    message: Descriptor, before: tuple[Field, ...], types: tuple[str, ...]
) -> Iterator[tuple[Field, ...]]:
    if message.full_name in types:
        return
    for field in message.fields:
        fields = (*before, field)
        if field.is_repeated:
            yield fields
        if field.message_type is not None:
            yield from _paths(field.message_type, fields, (*types, message.full_name))


def request_with(path: Path, num_values: int, *, is_packed: bool = True) -> bytes:
    """Return a request whose field has ``num_values`` of the smallest values; the keys of a map all
    differ. Unless ``is_packed``, each number has a tag of its own."""
    *outer, field = path.fields
    return wrapped(outer, b"".join(values_of(field, num_values, is_packed=is_packed)))


def wrapped(outer: list[Field], data: bytes) -> bytes:
    """Return a request with ``data`` inside the messages of ``outer``."""
    for one in reversed(outer):
        data = delimited(one, data)
    return data


def values_of(field: Field, num_values: int, *, is_packed: bool = True) -> Iterator[bytes]:
    """Yield ``num_values`` values of a field in as few bytes as they can have, with their tags. Of
    packed numbers, all values are one field of the wire."""
    if field.type in DELIMITED:
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            yield from islice((delimited(field, key) for key in _keys(entry)), num_values)
        else:
            yield delimited(field, b"") * num_values
        return
    kind, size = FIXED.get(field.type, (0, 1))
    if is_packed:
        yield delimited(field, bytes(size * num_values))
    else:
        yield (varint(field.number << 3 | kind) + bytes(size)) * num_values


def _keys(entry: Descriptor) -> Iterator[bytes]:
    key = entry.fields_by_name["key"]
    for number in count(1):
        if key.type in DELIMITED:
            yield delimited(key, f"{number:x}".encode())
        else:
            yield varint(key.number << 3) + varint(number)


def allowed_values(path: Path, limits: Limits = COUNT_LIMITS) -> tuple[str, int]:
    """Return the path that a refusal of the field's values names, and how many values the field may
    have. Values in a tree of JSON values count with those around them."""
    names: list[str] = []
    for index, field in enumerate(path.fields):
        names.append(field.name)
        if field.full_name in limits and (index + 1 == len(path.fields) or _is_tree(field)):
            inside = path.fields[index + 1 : -1]
            around = sum(one.is_repeated for one in inside)
            return ".".join(names), limits[field.full_name][0] - around
    raise KeyError(str(path))


def _is_tree(field: Field) -> bool:
    return field.message_type is not None and field.message_type.file.name == STRUCT


def worst_request(path: Path, max_bytes: int, *, is_packed: bool = True) -> bytes:
    """Return a request with as many of the smallest values as ``max_bytes`` hold."""
    sample = min(2**15, max_bytes)  # enough values to estimate the bytes of one
    most = max_bytes * sample // len(request_with(path, sample, is_packed=is_packed))
    while len(data := request_with(path, most, is_packed=is_packed)) > max_bytes:
        most = most * max_bytes // len(data) - 8
    return data
