"""Runs chat templates, the code of a model's author, within limits of time and output.

Rule 1: a template gets the same variables as in transformers
(`engine.worker.tokenizing.template_environment`). Rule 2: `render` bounds a template's time and
output. The template may take `SECONDS_MAX` of its thread's processor time and write `CHARS_MAX`
characters. Call `render` in a worker thread.

The sandbox keeps a template away from the machine, but does not keep it from looping: three nested
loops over a list of 100,000 run for years. Jinja calls no hook inside a loop, so the lines of the
compiled template are traced (sys.settrace). On 4,000 messages that takes 25 µs a message instead of
8 (measured). A single expression, such as one that repeats a text 10**9 times, is not interrupted;
it can take as much memory as the sandbox allows.
"""

from __future__ import annotations

import re
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidRequest, RequestTooLarge, SpawnFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from jinja2 import TemplateSyntaxError

SECONDS_MAX = 10.0  # Not tuned: 4 MiB of messages of 60 characters take a fifth of it.
CHARS_MAX = 16 * 2**20  # Not tuned: four times the largest request, for indented JSON.
LINES_PER_LOOK = 256  # Lines between two readings of the clock, one of which costs ten lines' time.
MESSAGE_MAX = 200  # Not tuned: a client sees so much of a template's own error message.
TOOLS_READ = re.compile(r"\{[{%](?:(?![}%]\}).)*\btools\b", re.DOTALL)  # Finds ``tools`` in code.
TEMPLATE_FILE = "<template>"  # Jinja's file name for a template that comes from a string.


def takes_tools(template: str) -> bool:
    """Return whether a template writes tools into the prompt: its code has the name ``tools``."""
    return TOOLS_READ.search(template) is not None


class _TooLong(BaseException):
    """The template took too long. It derives from BaseException because the filters that a template
    calls may catch every Exception."""


def check_syntax(template: str, place: str) -> None:
    """Check that Jinja can parse a template, with the same tags as in transformers. The template
    does not run. ``place`` is the name of the template's file.

    Raises:
        SpawnFailed: Jinja cannot parse the template; the message has the line.
    """
    from jinja2 import TemplateSyntaxError

    from engine.worker.tokenizing.template_environment import parse

    try:
        parse(template)
    except TemplateSyntaxError as error:
        what = f"the model's chat template in {place} is wrong at {_place_of(error)}"
        raise SpawnFailed(what) from error


def _place_of(error: TemplateSyntaxError) -> str:
    return f"line {error.lineno} of the template: {str(error.message)[:MESSAGE_MAX]}"


def render(
    template: str,
    messages: list[dict[str, object]],
    tools: list[dict[str, object]] | None,
    args: dict[str, object],
    *,
    add_generation_prompt: bool,
) -> str:
    """Return the text of a chat, rendered by a template.

    Raises:
        InvalidRequest: The template refused the chat, failed, or took too long; the violation names
            the field ``chat``.
        RequestTooLarge: The template wrote more than `CHARS_MAX`.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    from engine.worker.tokenizing.template_environment import compiled, variables_of

    try:
        with _bounded_time():
            seen = variables_of(messages, tools, args, add_generation_prompt=add_generation_prompt)
            text = compiled(template).render(seen)
    except _TooLong:
        what = f"takes the model's chat template longer than {SECONDS_MAX:g} s"
        raise InvalidRequest.of("chat", what) from None
    except Exception as error:
        # A template's own raise_exception() raises exactly TemplateError, with a text for users.
        own = str(error)[:MESSAGE_MAX] if type(error) is TemplateError else ""
        what = "the model's chat template refused the chat" + (f": {own}" if own else "")
        if isinstance(error, TemplateSyntaxError):
            what = f"the model's chat template is wrong at {_place_of(error)}"
        refused = InvalidRequest.of("chat", what)
        refused.log_detail = f"{type(error).__name__}: {error}"
        raise refused from error
    if len(text) > CHARS_MAX:
        raise RequestTooLarge.of("chat", f"becomes {len(text)} characters, of at most {CHARS_MAX}")
    return text


@contextmanager
def _bounded_time() -> Iterator[None]:
    """Raise `_TooLong` in a template that takes more than `SECONDS_MAX` of this thread's processor
    time. A debugger or a coverage tool that traces the thread does not see the block."""
    limit = time.thread_time() + SECONDS_MAX
    lines_left = LINES_PER_LOOK

    def trace_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines_left
        lines_left -= 1
        if lines_left <= 0:
            lines_left = LINES_PER_LOOK
            if time.thread_time() > limit:
                raise _TooLong
        return trace_line

    def trace_call(frame: FrameType, event: str, _: Any) -> Any:
        return trace_line if frame.f_code.co_filename == TEMPLATE_FILE else None

    before = sys.gettrace()
    sys.settrace(trace_call)
    try:
        yield
    finally:
        sys.settrace(before)
