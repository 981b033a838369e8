"""A tokenizer without a vocabulary, for fakes.

Rule: this file imports no torch.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import TYPE_CHECKING

from engine.errors import InvalidRequest
from engine.worker.interface import TokenSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine.worker.fakes.text import FakeScript

_WRITTEN = re.compile(r"<(\d+)>")
BYTE_OFFSET = 1  # ids 1 to 256 are the bytes of text that is not written as <id>
EOS = 0
IMAGE_ID = 999  # the id of an image's tokens
IMAGE_TOKEN = f"<{IMAGE_ID}>"
LONG_TEXT_CHARS = 4096  # from this length on, encoding a text takes the script's ``encode_s``


class FakeTokenizer:
    """Implements `engine.worker.interface.Tokenizer` without a vocabulary.

    The text ``<12><7>`` is the ids 12 and 7; other text is its UTF-8 bytes, offset by 1.
    """

    max_chars_per_token = math.inf  # an id may be written with any number of leading zeros

    def __init__(self, script: FakeScript | None = None) -> None:
        self._script = script

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the ids of a text.

        Raises:
            InvalidRequest: The text is not Unicode.
        """
        return tuple(span.token_id for span in self.encode_spans(text))

    def encode_spans(self, text: str, *, add_special_tokens: bool = True) -> tuple[TokenSpan, ...]:
        """Return the tokens of a text, each with its range of characters.

        Raises:
            InvalidRequest: the text is not Unicode.
        """
        if self._script is not None and len(text) >= LONG_TEXT_CHARS:
            self._script.sleep(self._script.encode_s)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest.of("text", "is not valid Unicode") from None
        spans = []
        position = 0
        while position < len(text):
            written = _WRITTEN.match(text, position)
            end = written.end() if written else position + 1
            piece = text[position:end]
            ids = [int(written[1])] if written else [b + BYTE_OFFSET for b in piece.encode()]
            spans += [TokenSpan(token_id, piece, position, end) for token_id in ids]
            position = end
        return tuple(spans)

    def encode_jobs(
        self, text: str, *, add_special_tokens: bool = True
    ) -> list[Callable[[], tuple[int, ...]]]:
        """Return one function, which returns the ids of a text."""
        return [partial(self.encode, text, add_special_tokens=add_special_tokens)]

    def span_jobs(
        self, text: str, *, add_special_tokens: bool = True
    ) -> list[Callable[[], tuple[TokenSpan, ...]]]:
        """Return one function, which returns the tokens of a text."""
        return [partial(self.encode_spans, text, add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return each id as the script's ``markers`` have it, or else as ``<id>``."""
        shown = (i for i in token_ids if not (skip_special_tokens and i == EOS))
        markers = {} if self._script is None else self._script.markers
        return "".join(markers.get(token_id, f"<{token_id}>") for token_id in shown)

    def is_known(self, token_id: int) -> bool:
        """Return False, because there is no vocabulary."""
        return False

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        template_args: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return one line for each message, then the script's ``answer_opening``, unless the last
        message is continued. An image of a message becomes its token."""
        written = "\n".join(f"{m.get('role')}: {_written(m.get('content'))}" for m in messages)
        if self._script is None or continue_final_message:
            return written
        return written + self._script.answer_opening

    def chat_template(self, *, has_tools: bool) -> str:
        """Return the script's ``chat_template``."""
        return "" if self._script is None else self._script.chat_template

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text's bytes, even if the text is written as an id."""
        return tuple(byte + BYTE_OFFSET for byte in text.encode())

    def special_ids_of(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the empty set."""
        return frozenset()

    def added_id_of(self, text: str) -> int | None:
        """Return the id for which the script's ``markers`` have a text."""
        markers = {} if self._script is None else self._script.markers
        return next((token_id for token_id, own in markers.items() if own == text), None)


def _written(content: object) -> object:
    """Return a message's content as text; its images are tokens."""
    if not isinstance(content, list):
        return content
    return "".join(str(part["text"]) if "text" in part else IMAGE_TOKEN for part in content)
