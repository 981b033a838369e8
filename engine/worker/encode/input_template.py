"""Renders inputs by a model's chat template: a text, or the pair of a query and a document.

The messages are those of sentence-transformers: the roles are "system" for the prompt, "user" for a
text, and "query" and "document" for a pair. Rule: every input is used as text, while the library
would open a text that looks like the address of an image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.errors import InvalidRequest
from engine.worker.load.refusal import Refusal
from engine.worker.tokenizing.templates import check_syntax, render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenizers import Tokenizer

    Input = str | tuple[str, str]

# Inputs whose rendered texts differ if the template writes all their texts.
TEXT_PROBES = ("alpha", "bravo")
PAIR_PROBES = (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))
# Two texts without common tokens, which find the template's end: the tokens at which the inputs
# rendered with one and with the other end alike. In a pair, both texts are the same.
FILLERS = ("0", "1 2 3 4")
# Settings that this file follows; all other settings are arguments of the template.
FOLLOWED = {"add_generation_prompt", "restore_suffix"}


class InputTemplate:
    """A chat template for inputs, which are pairs or texts. ``settings`` are the template's
    arguments in the model's files. With ``in_parts``, a message's content is a list of parts.
    ``prompt`` is the model's default prompt; "" for none.

    Raises:
        Refusal: The template leaves out a text of an input, or fails; or the settings cut the
            template's end.
        SpawnFailed: The template cannot be parsed.
    """

    def __init__(
        self,
        template: str,
        *,
        has_pairs: bool,
        special_tokens: Mapping[str, Any],
        settings: Mapping[str, Any],
        in_parts: bool,
        prompt: str,
    ) -> None:
        check_syntax(template, "its tokenizer's files")
        if not settings.get("restore_suffix", True):
            raise Refusal(
                "its processing_kwargs.chat_template sets restore_suffix to false, so that an "
                "input that is cut loses the end of the template, behind which its values are "
                "read; remove it"
            )
        self._template = template
        self._has_pairs = has_pairs
        self._args = dict(special_tokens) | {
            name: value for name, value in settings.items() if name not in FOLLOWED
        }
        self._generation = bool(settings.get("add_generation_prompt", False))
        self._in_parts = in_parts
        self._check_roles(PAIR_PROBES if has_pairs else TEXT_PROBES, prompt)

    def _check_roles(self, probes: Sequence[Input], prompt: str) -> None:
        try:
            first, *others = [self.text_of(probe, prompt) for probe in probes]
        except InvalidRequest as error:
            first, others = "", [""]
            detail = error.log_detail
        else:
            detail = ""
        if first in others:
            what = "a query and a document" if self._has_pairs else "a text"
            instead = ", or one that was converted to a classifier" if self._has_pairs else ""
            raise Refusal(
                f"its chat template has no place for {what}; choose a checkpoint that "
                f"sentence-transformers saved{instead}",
                detail=detail,
            )

    def text_of(self, given: Input, prompt: str) -> str:
        """Return the text of an input with a prompt; "" for none.

        Raises:
            InvalidRequest: The template refused the input.
        """
        turns = [("system", prompt)] if prompt else []
        if isinstance(given, str):
            turns.append(("user", given))
        else:
            turns += zip(("query", "document"), given, strict=True)
        messages = [{"role": role, "content": self._content(text)} for role, text in turns]
        return render(
            self._template, messages, None, self._args, add_generation_prompt=self._generation
        )

    def _content(self, text: str) -> object:
        return [{"type": "text", "text": text}] if self._in_parts else text

    def end(self, tokenizer: Tokenizer, prompt: str) -> tuple[int, ...]:
        """Return the tokens at the end of every input with a prompt. They must stay when an input
        is cut.

        Raises:
            InvalidRequest: The template refuses the prompt.
        """
        fillers: list[Input] = [(text, text) if self._has_pairs else text for text in FILLERS]
        first, second = (
            tokenizer.encode(self.text_of(text, prompt), add_special_tokens=False).ids
            for text in fillers
        )
        count = 0
        while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
            count += 1
        return tuple(first[len(first) - count :])
