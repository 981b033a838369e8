"""Chat templates, run within bounds: the program of a stranger, on data of another.

Rule 1: the sandbox, the filters and the variables are transformers', whose compiled templates are
cached there. Rule 2: whatever a template does, `render` ends: after `SECONDS_MAX` of processor time
or `CHARS_MAX` of text. It is for worker threads; the bound is the thread's own.

A template is code from a model's directory. The sandbox keeps it from the machine, not from
looping: three nested loops over a list of 100,000 run for years. Jinja has no hook inside of a loop
without calls, so the lines of the compiled template are traced; measured on 4,000 messages, each
then takes 25 µs for 8. What one expression does, such as repeating a text 10**9 times, is between
two lines: that can cost memory, as much as the sandbox lets it.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidRequest, RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

SECONDS_MAX = 10.0  # guess: 5 times what 4 MiB of messages of 60 characters took
CHARS_MAX = 16 * 2**20  # guess: four times the largest request; JSON that is indented may grow so
LINES_PER_LOOK = 256  # a look at the clock costs about as much as ten lines
MESSAGE_MAX = 200  # characters of a template's own complaint that a client sees; guess
TEMPLATE_FILE = "<template>"  # what Jinja calls the file of a template from a string


class _TooLong(BaseException):
    """The template's time is over. No Exception: a template's filters may catch those."""


def render(
    template: str,
    messages: list[dict[str, object]],
    tools: list[dict[str, object]] | None,
    args: dict[str, object],
    *,
    add_generation_prompt: bool,
) -> str:
    """The text that a template makes of a chat.

    Raises:
        InvalidRequest: the template refused it, failed, or took too long; the field is ``chat``.
        RequestTooLarge: it wrote more than `CHARS_MAX`.
    """
    # costs nothing in a server, whose model code has imported transformers already (alone: 0.9 s)
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        with _bounded_time():
            rendered, _ = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                **args,
            )
    except _TooLong:
        what = f"takes the model's chat template longer than {SECONDS_MAX:g} s"
        raise InvalidRequest.of("chat", what) from None
    except Exception as error:
        # Only a template's own raise_exception() is exactly a TemplateError and written for users.
        own = str(error)[:MESSAGE_MAX] if type(error) is TemplateError else ""
        what = "the model's chat template refused the chat" + (f": {own}" if own else "")
        refused = InvalidRequest.of("chat", what)
        refused.log_detail = f"{type(error).__name__}: {error}"
        raise refused from error
    text: str = rendered[0]
    if len(text) > CHARS_MAX:
        raise RequestTooLarge.of("chat", f"becomes {len(text)} characters, of at most {CHARS_MAX}")
    return text


@contextmanager
def _bounded_time() -> Iterator[None]:
    """Let the templates of this thread run for `SECONDS_MAX` of its processor time. Whoever traces
    the thread already, a debugger or coverage, misses the block."""
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
