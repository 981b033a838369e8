"""Draw messages of any type from their descriptors, as a hostile client might send them.

Values are biased to those that have broken servers: ends of ranges, NaN and infinities, empty and
odd texts, unknown enum values. Nesting is bounded, because Struct and similar types are recursive.
"""

import math

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

DEPTH_MAX = 4
REPEATED_MAX = 3
WORDS = ("", "fake", "user", "tool", "Once", "\x00", "\x1f", "\u202e", "\U0010ffff", "a" * 300, "{")
WORDS += ("r1", "[0-9]+", '{"type": "object"}', "start: /a/")


def _integers(bits, *, is_signed):
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
    edges = [value for value in (0, 1, 2, 16, 100, low, high, high - 1) if low <= value <= high]
    return st.sampled_from(edges) | st.integers(low, high)


REALS = st.sampled_from([0.0, 1.0, 0.5, -1.0, 2.0, 1e-9, math.nan, math.inf, -math.inf, 1e308])
REALS |= st.floats()
TEXTS = st.sampled_from(WORDS) | st.text(st.characters(codec="utf-8"), max_size=30)
SCALARS = {
    Field.TYPE_DOUBLE: REALS,
    Field.TYPE_FLOAT: st.floats(width=32),
    Field.TYPE_INT32: _integers(32, is_signed=True),
    Field.TYPE_INT64: _integers(64, is_signed=True),
    Field.TYPE_UINT32: _integers(32, is_signed=False),
    Field.TYPE_UINT64: _integers(64, is_signed=False),
    Field.TYPE_BOOL: st.booleans(),
    Field.TYPE_STRING: TEXTS,
    Field.TYPE_BYTES: st.binary(max_size=40),
    Field.TYPE_ENUM: st.integers(0, 4) | _integers(32, is_signed=True),  # proto3's enums are open
}


@st.composite
def messages(draw, descriptor, depth=0):
    """Draw a message of this type; each field is set or left out."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        is_message = field.type == Field.TYPE_MESSAGE
        if (is_message and depth >= DEPTH_MAX) or not draw(st.integers(0, 2)):
            continue
        _set(draw, message, field, depth)
    return message


@st.composite
def nearly_right(draw, base):
    """Return ``base``, a valid message, with up to two fields drawn anew, at any depth."""
    message = type(base)()
    message.CopyFrom(base)
    for _ in range(draw(st.integers(0, 2))):
        inside, depth = message, 0
        field = draw(_field_of(inside))
        while _is_one_message(field) and draw(st.booleans()):
            inside, depth = getattr(inside, field.name), depth + 1
            inside.SetInParent()
            field = draw(_field_of(inside))
        _set(draw, inside, field, depth)
    return message


def _field_of(message):
    return st.sampled_from(list(message.DESCRIPTOR.fields))


def _is_one_message(field):
    return field.type == Field.TYPE_MESSAGE and not field.is_repeated


def _set(draw, message, field, depth):
    is_message = field.type == Field.TYPE_MESSAGE
    if is_message and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        target = getattr(message, field.name)
        for _ in range(draw(st.integers(0, REPEATED_MAX))):
            at = draw(SCALARS[key.type])
            if value.type == Field.TYPE_MESSAGE:
                target[at].CopyFrom(draw(messages(value.message_type, depth + 1)))
            else:
                target[at] = draw(SCALARS[value.type])
        return
    one = messages(field.message_type, depth + 1) if is_message else SCALARS[field.type]
    if field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(one, max_size=REPEATED_MAX)))
    elif is_message:
        getattr(message, field.name).CopyFrom(draw(one))
    else:
        setattr(message, field.name, draw(one))
