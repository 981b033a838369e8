"""Translates the structural tags of gateways into Lark grammars.

A structural tag is JSON that describes an answer: texts, forms, and tags, which are a form between
two texts. Its parts that are known here are those of `_Grammar.PARTS`; any other part or option is
refused by its name. Source: xgrammar 0.1.x, structural_tag.py, and the older form with
"structures" and "triggers".
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from engine.errors import InvalidRequest, Unsupported
from engine.requests.text.answers.dialects import parts_of
from engine.requests.text.answers.reasoning_grammar import Rules, marker, with_escaped_slashes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.core.text.types import Constraint
    from engine.requests.text.answers.reasoning_grammar import FindId

KIND = "structural_tag"
FIELD = f"constraint.{KIND}"
DEPTH_MAX = 32  # parts inside each other; a guess


def lark_of_tags(source: str, find_id: FindId) -> str:
    """Return the grammar of a structural tag. ``find_id`` returns the id of a text that is one
    token of its own in the model's vocabulary.

    Raises:
        InvalidRequest: the text is not JSON, or a part lacks what it needs.
        Unsupported: a part or an option is not known here.
    """
    try:
        tag = json.loads(source)
    except (ValueError, RecursionError):
        raise InvalidRequest.of(FIELD, "is not JSON") from None
    if not isinstance(tag, dict) or tag.get("type") != KIND:
        raise InvalidRequest.of(FIELD, f"is no object of the type {KIND}")
    grammar = _Grammar(find_id)
    if "format" in tag:
        start = grammar.part(tag["format"], 0)
    else:
        start = grammar.part(_of_older_form(tag), 0)
    return "\n".join([f"start: {start}", *grammar.rules]) + "\n"


def _of_older_form(tag: dict[str, Any]) -> dict[str, Any]:
    """Return the part that the older form stands for."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise InvalidRequest.of(FIELD, 'needs "format", or "structures" and "triggers"')
    tags = [
        {
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
            "end": one.get("end"),
        }
        for one in structures
        if isinstance(one, dict)
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Grammar:
    """The rules of a structural tag."""

    def __init__(self, find_id: FindId) -> None:
        self._find_id = find_id
        self._rules = Rules("tag")
        self.PARTS: dict[str, tuple[Callable[..., str], frozenset[str]]] = {
            "const_string": (self._const_string, frozenset({"value"})),
            "json_schema": (self._json_schema, frozenset({"json_schema", "style"})),
            "regex": (self._regex, frozenset({"pattern"})),
            "any_text": (self._any_text, frozenset({"excludes"})),
            "sequence": (self._sequence, frozenset({"elements"})),
            "or": (self._or, frozenset({"elements"})),
            "optional": (self._repeated("?"), frozenset({"content"})),
            "plus": (self._repeated("+"), frozenset({"content"})),
            "star": (self._repeated("*"), frozenset({"content"})),
            "tag": (self._tag, frozenset({"begin", "content", "end"})),
            "triggered_tags": (
                self._triggered_tags,
                frozenset({"triggers", "tags", "at_least_one", "stop_after_first", "excludes"}),
            ),
            "tags_with_separator": (
                self._tags_with_separator,
                frozenset({"tags", "separator", "at_least_one", "stop_after_first"}),
            ),
        }

    @property
    def rules(self) -> list[str]:
        """The rules to which the others refer."""
        return self._rules.lines

    def part(self, part: Any, depth: int, end: str = "") -> str:
        """Return the right side of a rule for a part. ``end`` is the text behind it, which free
        text does not contain."""
        if not isinstance(part, dict):
            raise InvalidRequest.of(FIELD, "has a part that is no object")
        kind = part.get("type", "tag" if "begin" in part else "")
        if not isinstance(kind, str) or kind not in self.PARTS:
            self._refuse(f"a part of the type {kind!r}")
        if depth == DEPTH_MAX:
            raise InvalidRequest.of(FIELD, f"has more than {DEPTH_MAX} parts inside each other")
        write, options = self.PARTS[kind]
        for option in part:
            if option not in options and option != "type" and part[option] not in (None, [], False):
                self._refuse(f"the option {option!r} of {kind}")
        return write(part, depth + 1, end)

    # ---- parts

    def _const_string(self, part: dict[str, Any], depth: int, end: str) -> str:
        return self._literal(self._text_of(part, "value"))

    def _json_schema(self, part: dict[str, Any], depth: int, end: str) -> str:
        if part.get("style", "json") != "json":
            self._refuse(f"the style {part['style']!r} of json_schema")
        return self._rules.add("%json " + json.dumps(part.get("json_schema", {})))

    def _regex(self, part: dict[str, Any], depth: int, end: str) -> str:
        pattern = with_escaped_slashes(self._text_of(part, "pattern"))
        return self._rules.add(f"/{pattern}/", is_terminal=True)

    def _any_text(self, part: dict[str, Any], depth: int, end: str) -> str:
        excluded = self._texts_of(part, "excludes")
        return self._free_text([*excluded, *([end] if end else ())])

    def _sequence(self, part: dict[str, Any], depth: int, end: str) -> str:
        elements = self._list_of(part, "elements")
        written = [self.part(one, depth) for one in elements[:-1]]
        return f"({' '.join([*written, self.part(elements[-1], depth, end)])})"

    def _or(self, part: dict[str, Any], depth: int, end: str) -> str:
        written = [self.part(one, depth, end) for one in self._list_of(part, "elements")]
        return f"({' | '.join(written)})"

    def _repeated(self, sign: str) -> Callable[[dict[str, Any], int, str], str]:
        def write(part: dict[str, Any], depth: int, end: str) -> str:
            return f"({self.part(part.get('content'), depth, end)}){sign}"

        return write

    def _tag(self, part: dict[str, Any], depth: int, end: str, begun: str = "") -> str:
        """Write a tag, whose beginning ``begun`` was written already."""
        begin = self._text_of(part, "begin").removeprefix(begun)
        ends = part.get("end")
        if not isinstance(ends, str):
            ends = self._list_of(part, "end")
        closings = [ends] if isinstance(ends, str) else [str(one) for one in ends]
        inner = part.get("content")
        content = self.part(inner, depth, closings[0])
        is_free = isinstance(inner, dict) and inner.get("type") == "any_text"
        if is_free and len(closings) > 1:
            self._refuse("several ends of a tag with any_text")
        if is_free:
            return f"({self._literal(begin)} {self._ended(content, closings[0])})"
        closing = " | ".join(self._literal(one) for one in closings)
        return f"({self._literal(begin)} {content} ({closing}))"

    def _triggered_tags(self, part: dict[str, Any], depth: int, end: str) -> str:
        triggers = [str(one) for one in self._list_of(part, "triggers")]
        excluded = [*triggers, *self._texts_of(part, "excludes")]
        free = self._free_text(excluded)
        tags = []
        for tag in self._list_of(part, "tags"):
            begin = self._text_of(tag, "begin") if isinstance(tag, dict) else ""
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise InvalidRequest.of(FIELD, f"has the tag {begin!r}, which no trigger begins")
            tags.append(f"{self._ended(free, trigger)} {self._tag(tag, depth, '', trigger)}")
        one = self._rules.add(" | ".join(tags))
        rest = self._free_text([*excluded, *([end] if end else [])])
        if part.get("stop_after_first"):
            return one if part.get("at_least_one") else f"({one} | {rest})"
        return f"({one}{'+' if part.get('at_least_one') else '*'} {rest})"

    def _tags_with_separator(self, part: dict[str, Any], depth: int, end: str) -> str:
        tags = [self.part(tag, depth) for tag in self._list_of(part, "tags")]
        one = self._rules.add(" | ".join(tags))
        separator = self._literal(self._text_of(part, "separator"))
        several = one if part.get("stop_after_first") else f"{one} ({separator} {one})*"
        return f"({several})" if part.get("at_least_one") else f"({several})?"

    # ---- texts

    def _literal(self, text: str) -> str:
        """Return a text whose special tokens stand by their ids."""
        pieces = [text]
        if self._find_id(text) is None:
            # In a pattern of the table of dialects, the brackets stand around what may be missing.
            spans = re.split("([‹›])", text)
            brackets = ("‹", "›")
            pieces = [
                piece
                for span in spans
                for piece in ([span] if span in brackets else [p.text for p in parts_of(span)])
            ]
        return " ".join(marker(piece, self._find_id) for piece in pieces) or '""'

    def _free_text(self, excluded: Sequence[str]) -> str:
        return self._rules.add(
            " & ".join(["/(?s:.*)/", *map(_without, excluded)]), is_terminal=True
        )

    def _ended(self, free: str, trigger: str) -> str:
        """Return free text and the trigger behind it."""
        written = self._literal(trigger)
        if "<[" in written:
            return f"{free} {written}"
        return self._rules.add(f"{free} {written}", is_terminal=True)

    def _text_of(self, part: dict[str, Any], name: str) -> str:
        if not isinstance(part.get(name), str):
            raise InvalidRequest.of(FIELD, f"has a part whose {name!r} is no text")
        return str(part[name])

    def _texts_of(self, part: dict[str, Any], name: str) -> list[str]:
        """Return a list of texts, which may be missing."""
        texts = part.get(name) or []
        if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
            raise InvalidRequest.of(FIELD, f"has a part whose {name!r} is no list of texts")
        return texts

    def _list_of(self, part: dict[str, Any], name: str) -> list[Any]:
        if not isinstance(part.get(name), list) or not part[name]:
            raise InvalidRequest.of(FIELD, f"has a part whose {name!r} is no list, or empty")
        return list(part[name])

    def _refuse(self, what: str) -> NoReturn:
        raise Unsupported(f"{FIELD} has {what}, which is not known here", field=FIELD)


def translated(constraint: Constraint | None, find_id: FindId) -> Constraint | None:
    """Return a constraint that the model's worker compiles.

    Raises:
        InvalidRequest, Unsupported: as `lark_of_tags`.
    """
    if constraint is None or constraint.kind != KIND:
        return constraint
    source = lark_of_tags(constraint.source, find_id)
    return replace(constraint, kind="lark", source=source)


def _without(text: str) -> str:
    """Return the terminal of all texts that do not contain ``text``."""
    escaped = re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")
    return f"~/(?s:.*){escaped}(?s:.*)/"
