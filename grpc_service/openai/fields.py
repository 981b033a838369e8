"""Reads the fields of a JSON object: each by its name and type, and none is passed over.

Rule 1: null stands for a field that is not set. Rule 2: what `Fields.take` was not asked for is
refused by name at the end (`Fields.done`), so that a request never means more than it is given.
Rule 3: ranges that the engine's values check are not checked here; here is what they cannot hold.
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import TYPE_CHECKING, Any, NoReturn

from engine.errors import FieldViolation, InvalidRequest, RequestTooLarge, Unsupported
from grpc_service._generated.triolet.v1.count_limits import COUNT_LIMITS

if TYPE_CHECKING:
    from collections.abc import Iterator

# What OpenAI's clients, and programs written for them, may send with every request, and what
# changes nothing about an answer. docs/openai.md lists them.
IGNORED = ("user", "safety_identifier", "metadata", "prompt_cache_key", "service_tier", "store")
UINT32_MAX, UINT64_MAX = 2**32 - 1, 2**64 - 1
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "text": ((str,), "a string"),
    "whole": ((int,), "an integer"),
    "number": ((int, float), "a number"),
    "switch": ((bool,), "true or false"),
    "list": ((list,), "a list"),
    "object": ((dict,), "an object"),
}
DATA_URL = "data:"
SHOWN_CHARS = 40


def most_of(path: str) -> int:
    """Return how many values a field may have, by its path in triolet.v1, such as
    ``Chat.messages``."""
    return COUNT_LIMITS[f"triolet.v1.{path}"][0]


class Fields:
    """The fields of one object of a request. ``where`` is its path: "", or ``messages[0].``.
    ``sent_as`` has the names of triolet.v1 whose values came under one of several names here."""

    def __init__(self, given: object, where: str = "") -> None:
        self.where = where
        self.sent_as: dict[str, str] = {}
        if not isinstance(given, dict):
            raise InvalidRequest.of(where.rstrip(".") or "body", "is not an object")
        self._left = {name: value for name, value in given.items() if value is not None}

    def path(self, name: str) -> str:
        """Return the path of a field."""
        return f"{self.where}{name}"

    def refuse(self, name: str, what: str) -> NoReturn:
        """Raise InvalidRequest for a field."""
        raise InvalidRequest.of(self.path(name), what)

    def has(self, name: str) -> bool:
        """Return whether a field is set, and was not taken yet."""
        return name in self._left

    def given(self, name: str) -> Any:
        """Return a field without taking it; None if it is not set."""
        return self._left.get(name)

    def raw(self, name: str) -> Any:
        """Take a field of any type; None if it is not set."""
        return self._left.pop(name, None)

    def take(self, name: str, kind: str) -> Any:
        """Take a field of a type of `KINDS`; None if it is not set.

        Raises:
            InvalidRequest: it has another type.
        """
        value = self._left.pop(name, None)
        if value is None:
            return None
        classes, wanted = KINDS[kind]
        is_switch = isinstance(value, bool)
        if not isinstance(value, classes) or (is_switch and kind != "switch"):
            self.refuse(name, f"is not {wanted}")
        if kind == "number" and (value := _float_of(value)) is None:
            self.refuse(name, "is too large")
        return value

    def text(self, name: str) -> str | None:
        """Take a text."""
        return self.take(name, "text")  # type: ignore[no-any-return]

    def number(self, name: str) -> float | None:
        """Take a number."""
        return self.take(name, "number")  # type: ignore[no-any-return]

    def switch(self, name: str) -> bool | None:
        """Take true or false."""
        return self.take(name, "switch")  # type: ignore[no-any-return]

    def whole(self, name: str, low: int = 0, high: int = UINT32_MAX) -> int | None:
        """Take an integer of a range. Raises InvalidRequest for one outside."""
        value: int | None = self.take(name, "whole")
        if value is not None and not low <= value <= high:
            self.refuse(
                name,
                f"is {value}, outside [{low}, {high}]" if abs(value) < 2**70 else "is too large",
            )
        return value

    def items(self, name: str, most: int) -> list[Any] | None:
        """Take a list of at most ``most`` values."""
        value: list[Any] | None = self.take(name, "list")
        if value is not None and len(value) > most:
            self.refuse(name, f"has {len(value)} values, of at most {most}")
        return value

    def texts(self, name: str, most: int, *, one: bool = False) -> tuple[str, ...]:
        """Take a list of texts; with ``one`` a single text stands for a list of it."""
        if one and isinstance(self._left.get(name), str):
            return (self._left.pop(name),)
        values = self.items(name, most) or []
        for index, value in enumerate(values):
            if not isinstance(value, str):
                self.refuse(f"{name}[{index}]", "is not a string")
        return tuple(values)

    def ids(self, name: str, most: int) -> tuple[int, ...]:
        """Take a list of token ids."""
        values = self.items(name, most) or []
        check_ids(self.path(name), values)
        return tuple(values)

    def numbers(self, name: str, most: int) -> tuple[float, ...]:
        """Take a list of numbers."""
        values = self.items(name, most) or []
        for index, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                self.refuse(f"{name}[{index}]", "is not a number")
            if _float_of(value) is None:
                self.refuse(f"{name}[{index}]", "is too large")
        return tuple(map(float, values))

    def inner(self, name: str) -> Fields | None:
        """Take an object; None if it is not set."""
        value = self.take(name, "object")
        return None if value is None else Fields(value, f"{self.path(name)}.")

    def each(self, name: str, most: int) -> Iterator[Fields]:
        """Take a list of objects."""
        for index, value in enumerate(self.items(name, most) or ()):
            yield Fields(value, f"{self.path(name)}[{index}].")

    def expect(self, name: str, *allowed: object) -> None:
        """Take a field that may have these values alone, which change nothing.

        Raises:
            Unsupported: it has another value.
        """
        value = self._left.pop(name, None)
        if value is None or any(value == one and type(value) is type(one) for one in allowed):
            return
        path = self.path(name)
        shown = repr(value) if isinstance(value, (str, int, float)) else "set"
        raise Unsupported(f"{path} is {shown[:SHOWN_CHARS]}, which is not supported", field=path)

    def is_flex(self) -> bool:
        """Take ``service_tier``, and return whether it asks for background work: "flex", OpenAI's
        word for a cheaper answer that may wait. Its other tiers change nothing."""
        self.sent_as["background"] = "service_tier"
        return self.text("service_tier") == "flex"

    def done(self) -> None:
        """Refuse what was not taken.

        Raises:
            InvalidRequest: it names every such field.
        """
        if not self.where:
            for name in IGNORED:
                self._left.pop(name, None)
        unknown = [name[:SHOWN_CHARS] for name in self._left]
        if unknown:
            what = "is not a field that this server knows"
            raise InvalidRequest([FieldViolation(self.path(name), what) for name in unknown])


def _float_of(value: Any) -> float | None:
    try:
        made = float(value)
    except OverflowError:
        return None
    return made if math.isfinite(made) else None


def is_ids(values: list[Any]) -> bool:
    """Return whether a list has integers alone: one prompt of token ids, not several prompts."""
    return bool(values) and all(type(value) is int for value in values)


def check_ids(path: str, values: list[Any]) -> None:
    """Raise InvalidRequest unless all values are token ids."""
    for index, value in enumerate(values):
        if type(value) is not int or not 0 <= value <= UINT32_MAX:
            raise InvalidRequest.of(f"{path}[{index}]", "is not a token id")


def texts_or_ids(
    fields: Fields, name: str, most_ids: int, least: int, most: int, noun: str = ""
) -> list[str | tuple[int, ...]]:
    """Return the values of a field that is a text, token ids, or a list of ``least`` to ``most`` of
    either; ``noun`` names these in the error.

    Raises:
        InvalidRequest: the field is not set, or not of this form; it names the value.
    """
    given = fields.given(name)
    if given is None:
        fields.refuse(name, "is not set")
    if isinstance(given, str):
        return [fields.raw(name)]
    values = fields.items(name, most_ids) or []
    if is_ids(values):
        check_ids(name, values)
        return [tuple(values)]
    if not least <= len(values) <= most:
        fields.refuse(name, f"has {len(values)}{noun}, outside [1, {most}]")
    for index, value in enumerate(values):
        if isinstance(value, list):
            check_ids(f"{name}[{index}]", value)
        elif not isinstance(value, str):
            fields.refuse(f"{name}[{index}]", "is neither a string nor a list of token ids")
    return [value if isinstance(value, str) else tuple(value) for value in values]


class ImageBytes:
    """Decodes the images of one request, which may have ``most`` bytes together."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self.num_chars = 0  # of what was decoded, in the body

    def decode(self, path: str, url: str) -> bytes:
        """Return the bytes of a data URL.

        Raises:
            Unsupported: it is another URL; none is opened.
            InvalidRequest: it is not base64. RequestTooLarge: the images have too many bytes.
        """
        if not url.startswith(DATA_URL):
            raise Unsupported(
                f"{path} is not a data URL (data:image/png;base64,…); no URL is opened", field=path
            )
        head, comma, text = url.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InvalidRequest.of(path, "is not of the form data:image/png;base64,…")
        size = 3 * (len(text) // 4)
        self._left -= size
        if self._left < 3:
            what = f"makes the images larger than {self._most} bytes (--max-image-bytes)"
            raise RequestTooLarge.of(path, what)
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidRequest.of(path, "is not base64") from None
        self.num_chars += len(url)
        return data
