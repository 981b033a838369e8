"""JSON of requests and answers: parsed within limits, written without spaces.

Rule 1: as for gRPC's messages (`grpc_service.services.value_counts`), values are counted before any
object is made of them, and trees have limited levels. Rule 2: a text that has no UTF-8 form, a
number that is none, or a field that is written twice is refused, as nothing behind this page
expects them.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidRequest
from engine.requests.text.answers.reader import refuse_constant
from grpc_service.services.value_counts import VALUES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

LEVELS_MAX = 48  # of a body: those of a tool's parameters, 30, and of what is around them
STRUCTURE = b",[{:"  # a value of a list or an object follows each of them
STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(data: bytes) -> dict[str, Any]:
    """Return the object that is the body of a request.

    Raises:
        InvalidRequest: it is no JSON object, or too large a one; the message says where.
    """
    if sum(map(data.count, STRUCTURE_BYTES)) > VALUES_MAX:
        bare = STRINGS.sub(b"", data)
        if sum(map(bare.count, STRUCTURE_BYTES)) > VALUES_MAX:
            raise _refusal(f"the body has more than {VALUES_MAX} values")
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode()
        body = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=_object_of)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _refusal(f"the body is not JSON: {error.msg} ({where})") from None
    except UnicodeDecodeError:
        raise _refusal("the body is not UTF-8") from None
    except RecursionError:
        raise _refusal("the body is nested too deep") from None
    except ValueError as error:
        raise _refusal(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise _refusal("the body is not a JSON object")
    _check_levels(body)
    if SURROGATE.search(data):
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            where = next(_halves(body, ""), "body")
            raise InvalidRequest.of(where, "has half a surrogate pair") from None
    return body


def _halves(value: Any, path: str) -> Iterator[str]:
    """Yield the paths of the texts, and of the objects with names, that have no UTF-8 form."""
    if isinstance(value, str):
        if any("\ud800" <= char <= "\udfff" for char in value):
            yield path
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _halves(name, path)
            yield from _halves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _halves(inner, f"{path}[{index}]")


STRUCTURE_BYTES = tuple(STRUCTURE[at : at + 1] for at in range(len(STRUCTURE)))


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"an object has the field {name[:60]!r} twice")
            seen.add(name)
    return made


def _check_levels(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(LEVELS_MAX):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise _refusal(f"the body is nested more than {LEVELS_MAX} levels deep")


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest([], message=message)


def encode_json(value: Any) -> bytes:
    """Return the bytes of a value in JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
