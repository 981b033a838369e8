"""Tools in ``triolet chat``: the file that offers them, and the calls that a model asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import ParseDict, ParseError

from engine.errors import ConfigError
from grpc_service.client import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grpc_service.cli.images import Turn


def read_tools(path: str) -> list[messages.Tool]:
    """Return the tools of a JSON file: a list of functions, each as it is or as OpenAI's API wraps
    it. No path has none.

    Raises:
        ConfigError: the file cannot be read, or is no such list.
    """
    if not path:
        return []
    try:
        listed = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise ConfigError(f"--tools {path} cannot be read: {reason}") from None
    if not isinstance(listed, list):
        raise ConfigError(f"--tools {path} cannot be read: it is no list of functions")
    return [_tool_of(path, index, one) for index, one in enumerate(listed)]


def _tool_of(path: str, index: int, one: Any) -> messages.Tool:
    function = one.get("function", one) if isinstance(one, dict) else one
    try:
        if not isinstance(function, dict):
            raise ParseError("it is no object")
        # "strict" asks OpenAI's models for what tool_choice enforces here.
        fields = {name: value for name, value in function.items() if name != "strict"}
        return ParseDict(fields, messages.Tool())
    except ParseError as error:
        raise ConfigError(f"--tools {path} cannot be read: [{index}]: {error}") from None


class Calls:
    """The calls of one answer, whose parts `add` takes as they come."""

    def __init__(self) -> None:
        self._calls: list[messages.ToolCall] = []

    def add(self, parts: Sequence[messages.ToolCallDelta]) -> None:
        """Take parts of calls: a name begins a call, other parts go on with the last one."""
        for part in parts:
            if part.name:
                self._calls.append(messages.ToolCall(id=part.id, name=part.name))
            self._calls[-1].arguments_json += part.arguments_json

    def __iter__(self) -> Any:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)


def shown(call: messages.ToolCall) -> str:
    """Return a call as a line of text."""
    return f"{call.name}({call.arguments_json})"


def result_turn(call: messages.ToolCall, result: str) -> Turn:
    """Return a tool's message: what a call has returned."""
    return {"role": "tool", "content": result, "tool_call_id": call.id, "name": call.name}
