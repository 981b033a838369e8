"""Counts the values of a request in its bytes, before any object is made of them.

An empty value takes two bytes on the wire and some hundred in memory, and to parse it takes a
thousand times as long as to skip it. Rule 1: every repeated field and every map of a request has a
limit, which the comment of the field in the proto says; a field is counted over the whole request.
Rule 2: the walk ends at the first limit that is exceeded, and after `VALUES_MAX` values, so that
its time, and that of dropping the request, is bounded by the limits and not by the message. Rule 3:
bytes that are no message are left to the parser, which refuses them.
Source: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.struct_pb2 import ListValue, Struct, Value

from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from google.protobuf.descriptor import Descriptor, ServiceDescriptor

    # By a field's full name: the most values, and the most levels of a tree of JSON values.
    Limits = Mapping[str, tuple[int, int | None]]

# Upper bound of a request's values: all fields on the wire, also unknown and nested ones, and
# packed numbers. The longest prompt of ids has 2**18 values, and two trees of JSON values have as
# many (an object's value takes four); 2**16 are left for other fields.
VALUES_MAX = 2**18 + 2**16
VARINT_BYTES_MAX = 10
COUNTED_BYTES = 2**20  # bytes of packed numbers that are counted at once, in about a millisecond
CONTINUED = bytes(range(0x80, 0x100))  # every byte of a number but its last one
VARINT, FIXED64, LENGTH_DELIMITED, GROUP, GROUP_END, FIXED32 = range(6)  # protobuf's wire types
KINDS = {
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64), FIXED64),
    **dict.fromkeys((FieldDescriptor.TYPE_SFIXED64,), FIXED64),
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32), FIXED32),
    **dict.fromkeys((FieldDescriptor.TYPE_SFIXED32,), FIXED32),
    **dict.fromkeys((FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES), LENGTH_DELIMITED),
    **dict.fromkeys((FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_GROUP), LENGTH_DELIMITED),
}
TREES = {m.DESCRIPTOR.full_name for m in (Struct, ListValue, Value)}
LEVELS = {m.DESCRIPTOR.full_name for m in (Struct, ListValue)}  # message types that open a level


class Counted(NamedTuple):
    """A path of a request, such as ``chat.messages``, which may have ``most`` values and, if these
    are trees of JSON values, ``levels`` levels."""

    path: str
    most: int
    levels: int | None = None


class _Field(NamedTuple):
    """What the walk does at a field. ``counter`` is the index of its `Counted`, or None.
    ``value_kind`` is the wire type of a value that may be packed; otherwise None."""

    counter: int | None
    value_kind: int | None
    inside: _Plan | None


class _Plan:
    """The fields of a message that the walk acts on, by their tags. ``counter`` is the index of a
    JSON tree's `Counted`, if the message is a level of the tree; otherwise None."""

    __slots__ = ("counter", "fields")

    def __init__(self, counter: int | None) -> None:
        self.fields: dict[int, _Field] = {}
        self.counter = counter


class CountJudge:
    """Counts the values of requests of one type. ``counted`` has every path with a limit."""

    def __init__(self, request: Descriptor, limits: Limits) -> None:
        self._limits = limits
        self.counted: list[Counted] = []
        self._plan = self._plan_of(request, "")

    def __call__(self, data: bytes) -> None:
        """Check the bytes of a request.

        Raises:
            InvalidRequest: a field has too many values, and the error names it; or the request has
                more than `VALUES_MAX`.
        """
        walk = _Walk(data, self.counted)
        try:
            walk.inside(self._plan, 0, len(data), 0)
        except (IndexError, ValueError):
            return

    def _plan_of(self, message: Descriptor, path: str) -> _Plan:
        plan = _Plan(None)
        for field in message.fields:
            self._add(plan, field, f"{path}.{field.name}" if path else field.name)
        return plan

    def _add(self, plan: _Plan, field: FieldDescriptor, path: str) -> None:
        inner, kind = field.message_type, KINDS.get(field.type, VARINT)
        counter = self._counter(field, path) if field.is_repeated else None
        inside: _Plan | None = None
        if inner is not None and inner.full_name in TREES:
            tree = self._counter(field, path) if counter is None else counter
            inside = self._tree(inner, tree, {})
        elif inner is not None:
            of_inner = self._plan_of(inner, path)
            inside = of_inner if of_inner.fields else None
        if counter is None and inside is None:
            return
        is_number = counter is not None and kind != LENGTH_DELIMITED
        planned = _Field(counter, kind if is_number else None, inside)
        plan.fields[field.number << 3 | LENGTH_DELIMITED] = planned
        if is_number:
            plan.fields[field.number << 3 | kind] = planned

    def _tree(self, message: Descriptor, counter: int, made: dict[str, _Plan]) -> _Plan:
        """Return the plan of a tree of JSON values, whose values share one counter."""
        if message.full_name in made:
            return made[message.full_name]
        plan = _Plan(counter if message.full_name in LEVELS else None)
        made[message.full_name] = plan
        for field in message.fields:
            if field.message_type is not None:
                inside = self._tree(field.message_type, counter, made)
                own = counter if field.is_repeated else None
                plan.fields[field.number << 3 | LENGTH_DELIMITED] = _Field(own, None, inside)
        return plan

    def _counter(self, field: FieldDescriptor, path: str) -> int:
        self.counted.append(Counted(path, *self._limits[field.full_name]))
        return len(self.counted) - 1


class _Walk:
    """One walk over the bytes of a request."""

    def __init__(self, data: bytes, counted: list[Counted]) -> None:
        self._data = data
        self._counted = counted
        self._left = [count.most for count in counted]
        self._values_left = VALUES_MAX

    def inside(self, plan: _Plan, at: int, end: int, level: int) -> None:
        """Count the values of the message from ``at`` to ``end``, on a level of a tree.

        Raises:
            InvalidRequest: a limit is exceeded (`CountJudge`).
            IndexError, ValueError: the bytes are no message.
        """
        data, fields, num_groups = self._data, plan.fields, 0
        if plan.counter is not None:
            level += 1
            self._check_level(plan.counter, level)
        while at < end:
            tag, at = (data[at], at + 1) if data[at] < 0x80 else varint(data, at)
            self._count(1)
            kind, start = tag & 7, at
            if kind == LENGTH_DELIMITED:
                size, start = (data[at], at + 1) if data[at] < 0x80 else varint(data, at)
                at = start + size
                if at > end:
                    raise ValueError("a field that goes beyond its message")
            elif kind == VARINT:
                at = at + 1 if data[at] < 0x80 else varint(data, at)[1]
            elif kind == FIXED32:
                at += 4
            elif kind == FIXED64:
                at += 8
            elif kind == GROUP:  # no request has groups, so all fields in one are unknown
                num_groups += 1
            elif kind == GROUP_END:
                num_groups -= 1
            else:
                raise ValueError("an unknown wire type")
            field = None if num_groups else fields.get(tag)
            if field is None:
                continue
            if field.counter is not None:
                is_packed = field.value_kind is not None and kind == LENGTH_DELIMITED
                count = self._num_packed(field, start, at) if is_packed else 1
                self._left[field.counter] -= count
                if self._left[field.counter] < 0:
                    self._refuse(field.counter)
                if is_packed:
                    self._count(count)
            if field.inside is not None:
                self.inside(field.inside, start, at, level)
        if at != end or num_groups:
            raise ValueError("a message that breaks off")

    def _num_packed(self, field: _Field, start: int, end: int) -> int:
        """Return how many numbers are packed in the bytes from ``start`` to ``end``, or one more
        than the limit."""
        if field.value_kind != VARINT:
            return (end - start) // (4 if field.value_kind == FIXED32 else 8)
        assert field.counter is not None
        count, most = 0, self._left[field.counter]
        while start < end and count <= most:
            part = self._data[start : min(end, start + COUNTED_BYTES)]
            count += len(part.translate(None, CONTINUED))
            start += len(part)
        return count

    def _count(self, num_values: int) -> None:
        self._values_left -= num_values
        if self._values_left < 0:
            raise InvalidRequest([], message=f"the request has more than {VALUES_MAX} values")

    def _check_level(self, counter: int, level: int) -> None:
        _, _, levels = self._counted[counter]
        if levels is not None and level > levels:
            path = self._counted[counter].path
            raise InvalidRequest.of(path, f"is nested more than {levels} levels deep")

    def _refuse(self, counter: int) -> None:
        path, most, _ = self._counted[counter]
        raise InvalidRequest.of(path, f"has more than {most} values")


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number in protobuf's encoding at index ``at``, and the index after it."""
    number = 0
    for shift in range(0, 7 * VARINT_BYTES_MAX, 7):
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise ValueError("a number that does not end")


def judges_of(
    service: ServiceDescriptor,
    limits: Limits,
    others: Mapping[str, Callable[[bytes], None]] | None = None,
) -> dict[str, Callable[[bytes], None]]:
    """Return, by the name of each method, a function that checks the bytes of its request: first as
    the method's function in ``others`` does, if there is one, then by a `CountJudge`."""
    judges: dict[str, Callable[[bytes], None]] = {}
    for method in service.methods:
        counts = CountJudge(method.input_type, limits)
        other = (others or {}).get(method.name)
        judges[method.name] = counts if other is None else _in_turn((other, counts))
    return judges


def _in_turn(judges: Sequence[Callable[[bytes], None]]) -> Callable[[bytes], None]:
    def judge(data: bytes) -> None:
        for judge in judges:
            judge(data)

    return judge
