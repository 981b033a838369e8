"""The Jinja environment of chat templates, the same as transformers' but without its import.

Rule 1: a template renders as in transformers (`tests/conformance/test_tokenizer.py`): the same
sandbox, filters, globals and tags, and the same data. Rule 2: a template sees only plain data.
Objects with methods of their own never reach it, and a namespace accepts no name that begins with
an underscore.

Importing transformers for its own function takes 0.9 s and 33 MB.
Source: transformers 5.23, utils/chat_template_utils.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.parser import Parser
    from jinja2.runtime import Macro

COMPILED_MAX = 128  # as many templates as transformers keep compiled
# Names of the field with a message's reasoning. Most templates read the first, gpt-oss's another.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class _Generation(Extension):
    """The tag ``generation``, which in transformers marks text that the model has written. It
    changes no text, but gives the text between the tags a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it as a set)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a call of `_body` with the nodes between the tag and its end."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """The ``dict`` of templates: a class of its own, which keeps the real ``dict`` from them."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return a dict with these keys."""
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """The ``namespace`` of templates, whose names may not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may name a value ``self``
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a chat template stores {name!r} in a namespace, and no name may begin with an "
            "underscore"
        )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # in local time, as in transformers


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


def parse(template: str) -> None:
    """Check that a template can be parsed, without running it.

    Raises:
        jinja2.TemplateSyntaxError: It cannot be parsed.
    """
    _environment().parse(template)


@lru_cache(maxsize=COMPILED_MAX)
def compiled(template: str) -> Template:
    """Return a template, compiled in an environment of its own.

    Raises:
        jinja2.TemplateSyntaxError: It cannot be parsed, or names a filter that does not exist.
    """
    return _environment().from_string(template)


def variables_of(
    messages: list[dict[str, object]],
    tools: list[dict[str, object]] | None,
    args: Mapping[str, object],
    *,
    add_generation_prompt: bool,
) -> dict[str, Any]:
    """Return a template's variables: plain copies, with each message's reasoning under two names.

    Raises:
        TypeError: ``args`` has ``documents`` that are not a list of objects.
    """
    documents: Any = args.get("documents")
    if documents is not None and not all(isinstance(document, dict) for document in documents):
        raise TypeError("documents must be a list of objects")
    plain: dict[str, Any] = {"documents": None, **{key: _plain(args[key]) for key in args}}
    return plain | {
        "messages": [_with_reasoning(_plain(message)) for message in messages],
        "tools": _plain(tools),
        "add_generation_prompt": add_generation_prompt,
    }


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Return a copy with JSON's types only. An object of an unknown type becomes a text that names
    the type."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    # A subclass has methods of its own, as a member of an Enum does.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return _plain(value.item())  # a number of NumPy
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())  # a model of Pydantic
    return f"<{type(value).__name__}>"
