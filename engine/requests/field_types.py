"""Converts the fields of a request from what a Python program may write to what the engine uses.

Rule 1: a value that can mean only one thing is converted: a list for a tuple, one text for a tuple
of one, a mapping for the options that it names. Any other value is a TypeError that names the field
and says what it takes, so that nothing wrong fails later, inside the engine. Rule 2: a field that
has its type already, as every field from the gRPC server has, costs one check of its type; a list
of texts or of token ids costs one check of each item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.errors import FieldViolation

_Bytes = bytes | bytearray | memoryview
SHOWN_CHARS_MAX = 60  # most characters of a wrong value that a message shows
PART = 2**16  # values whose types are read at a time, while other threads wait


class TypedFields:
    """A frozen dataclass whose fields are converted to their types when it is made. A field's type
    is that of its annotation (`ANNOTATED`), unless the class has one for it in ``TYPES``.

    Raises:
        TypeError: a field has a value that it cannot take.
    """

    __slots__ = ()
    TYPES: ClassVar[dict[str, FieldType]] = {}

    def __init_subclass__(cls) -> None:
        annotations = {
            name: text
            for name, text in cls.__annotations__.items()
            if name not in cls.TYPES and not text.startswith(("InitVar", "ClassVar"))
        }
        cls.TYPES = {name: ANNOTATED[text] for name, text in annotations.items()} | cls.TYPES

    def __post_init__(self) -> None:
        convert_fields(self, self.TYPES)


class CheckedFields(TypedFields):
    """A request that finds its broken fields. It is validated when made, unless ``check`` is
    False."""

    __slots__ = ()

    def __post_init__(self, check: bool = True) -> None:
        convert_fields(self, self.TYPES)
        if check:
            self.validate()

    def violations(self) -> Iterator[FieldViolation]:
        """Yield every broken field, by proto path."""
        raise NotImplementedError

    def validate(self) -> None:
        """Check every range that needs no model.

        Raises:
            InvalidRequest: The error has one violation for each wrong field.
        """
        violations = list(self.violations())
        if violations:
            raise InvalidRequest(violations)


class FieldType(NamedTuple):
    """The type of a field, which takes ``unset`` and values of ``classes`` as they are. ``convert``
    converts any other value; it gets the field's name, for the TypeError of a wrong value.
    """

    unset: object
    classes: tuple[type, ...]
    convert: Callable[[str, Any], Any]


def convert_fields(owner: object, types: Mapping[str, FieldType]) -> None:
    """Convert the fields of a frozen dataclass that has just been made.

    Raises:
        TypeError: a field has a value that it cannot take.
    """
    for name, (unset, classes, convert) in types.items():  # takes 0.1 µs for each unset field
        given = getattr(owner, name)
        if given is not unset and type(given) not in classes:
            object.__setattr__(owner, name, convert(f"{type(owner).__name__}.{name}", given))


def wrong_type(name: str, wanted: str, given: object) -> TypeError:
    """Return the error of a value that a field or an argument cannot take."""
    text, kind = repr(given), type(given).__name__
    shown = f"{text} ({kind})" if len(text) <= SHOWN_CHARS_MAX else f"a value of type {kind}"
    return TypeError(f"{name} takes {wanted}, not {shown}")


def options(made: type[Any]) -> FieldType:
    """Return the type of a field that has an object of the dataclass ``made``. A mapping stands for
    the object with these fields, and None for an object without any."""

    def convert(name: str, given: Any) -> Any:
        if not isinstance(given, Mapping | None):
            raise wrong_type(name, f"{made.__name__} or a mapping of its fields", given)
        known = [field.name for field in fields(made)]
        for key in given or ():
            if key not in known:
                raise TypeError(f"{name} has no field {key!r}; its fields are {', '.join(known)}")
        return made(**given or {})

    return FieldType(made(), (made,), convert)


def several(made: type[Any]) -> FieldType:
    """Return the type of a field that has a tuple of objects of the dataclass ``made``. A mapping
    stands for the object with these fields."""
    message = options(made)

    def convert(name: str, given: Any) -> Any:
        if isinstance(given, str | Mapping):
            raise wrong_type(name, f"a list of {made.__name__}", given)
        entries = enumerate(_tuple(given))
        return tuple(
            entry if type(entry) is made else message.convert(f"{name}[{index}]", entry)
            for index, entry in entries
        )

    return FieldType((), (), convert)


def instance(made: type[Any], wanted: str) -> FieldType:
    """Return the type of an optional field that has an object of a class; nothing is converted."""
    return _field_type(wanted, None, (made,), _refuse)


def _field_type(
    wanted: str, unset: object, classes: tuple[type, ...], function: Callable[[Any], Any]
) -> FieldType:
    """Return the type of a field. ``function`` raises TypeError for a value that it cannot take."""

    def convert(name: str, given: Any) -> Any:
        try:
            return function(given)
        except TypeError:
            raise wrong_type(name, wanted, given) from None

    return FieldType(unset, classes, convert)


def _refuse(given: object) -> Any:
    raise TypeError


def _text(given: Any) -> str:
    return given if isinstance(given, str) else _refuse(given)


def _data(given: Any) -> bytes:
    return bytes(given) if isinstance(given, _Bytes) else _refuse(given)


def _number(given: Any) -> float:
    return float(given) if isinstance(given, Real) else _refuse(given)


def _mapping(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else _refuse(given)


def _tuple(given: Any) -> tuple[Any, ...]:
    return () if given is None else tuple(given)


def _texts(given: Any) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else _tuple(given)
    return texts if _types(texts) <= {str} else tuple(map(_text, texts))


def _ids(given: Any) -> tuple[int, ...]:
    ids = _tuple(given)
    return ids if _types(ids) <= {int} else tuple(map(index, ids))


def _types(values: tuple[Any, ...]) -> set[type]:
    types: set[type] = set()
    for at in range(0, len(values), PART):
        types |= set(map(type, values[at : at + PART]))
    return types


def _inputs(given: Any) -> tuple[str | bytes | tuple[int, ...], ...]:
    if isinstance(given, str | _Bytes):
        return (_input(given),)
    inputs = _tuple(given)
    return inputs if set(map(type, inputs)) <= {str, bytes} else tuple(map(_input, inputs))


def _input(given: Any) -> str | bytes | tuple[int, ...]:
    if isinstance(given, str):
        return given
    return bytes(given) if isinstance(given, _Bytes) else _ids(given)


def _labelled(given: Any) -> tuple[str | tuple[int, ...] | tuple[str, str], ...]:
    inputs = (given,) if isinstance(given, str) else _tuple(given)
    return inputs if set(map(type, inputs)) <= {str} else tuple(map(_labelled_one, inputs))


def _labelled_one(given: Any) -> str | tuple[int, ...] | tuple[str, str]:
    if isinstance(given, str):
        return given
    texts = _tuple(given)
    if _types(texts) != {str}:
        return _ids(given)
    return texts if len(texts) == 2 else _refuse(given)


def _ranges(given: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    rows = [tuple(map(_number, row)) for row in given]
    return (rows[0], rows[1]) if len(rows) == 2 else _refuse(given)


def _mappings(given: Any) -> tuple[Mapping[str, Any], ...]:
    return tuple(map(_mapping, _tuple(given)))


def _biases(given: Any) -> dict[int, float]:
    biases: Mapping[Any, Any] = {} if given is None else _mapping(given)
    return {index(token): _number(bias) for token, bias in biases.items()}


NUMBER = _field_type("a number", None, (float, int), _number)
WHOLE = _field_type("a whole number", None, (int,), index)
SWITCH = _field_type("True or False", None, (bool,), _refuse)
NAME = _field_type("a text", "", (str,), _text)
# The types of fields, by their annotations.
ANNOTATED = {
    "float | None": NUMBER,
    "int | None": WHOLE,
    "bool": SWITCH,
    "bool | None": SWITCH,
    "str": NAME,
    "str | None": _field_type("a text", None, (str,), _text),
    "bytes | None": _field_type("bytes", None, (bytes,), _data),
    "tuple[str, ...]": _field_type("a list of texts", (), (), _texts),
    "tuple[int, ...]": _field_type("a list of token ids", (), (), _ids),
    "tuple[int, ...] | None": _field_type("a list of token ids", None, (), _ids),
    "Mapping[int, float]": _field_type("a mapping of token ids to numbers", None, (), _biases),
}
INPUTS = _field_type("a list of texts, lists of token ids, or bytes of images", (), (), _inputs)
LABELLED = _field_type("a list of texts, pairs of texts, or lists of token ids", (), (), _labelled)
RANGES = _field_type("two lists of numbers, the least and the greatest", None, (), _ranges)
MAPPING = _field_type("a mapping", None, (dict,), _mapping)
MESSAGES = _field_type("a list of mappings, each with role and content", (), (), _mappings)
TOOLS = _field_type("a list of mappings, each with a function", (), (), _mappings)
