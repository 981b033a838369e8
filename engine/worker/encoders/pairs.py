"""Writes a query and a document by a model's chat template, as rerankers that generate read them.

The messages are those of sentence-transformers: the roles are "system" for the model's prompt,
"query" and "document". Rule: a text is a text here. The library would open one that looks like the
address of an image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.errors import InvalidRequest
from engine.worker.load.refusal import Refusal
from engine.worker.text.templates import check_syntax, render

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Tokenizer

# A pair, and the same with another query and with another document: a template that writes both
# texts writes three different ones.
PROBES = (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))
# Two texts without common tokens: what their pairs have in common at the end is the template's end.
# A pair has the same text twice.
FILLERS = ("0", "1 2 3 4")
# Settings that are followed here; all others are arguments of the template.
FOLLOWED = {"add_generation_prompt", "restore_suffix"}


class PairTemplate:
    """A chat template for pairs. ``settings`` are the arguments that the model's files give it.
    ``in_parts`` says whether a message's content is a list of parts. ``prompt`` is the model's
    default prompt, which becomes the message of the system; "" for none.

    Raises:
        Refusal: The template leaves out the query or the document, or fails; or the settings cut
            the template's end.
        SpawnFailed: It is not a template.
    """

    def __init__(
        self,
        template: str,
        *,
        special_tokens: Mapping[str, Any],
        settings: Mapping[str, Any],
        in_parts: bool,
        prompt: str,
    ) -> None:
        check_syntax(template, "its tokenizer's files")
        if not settings.get("restore_suffix", True):
            raise Refusal(
                "its processing_kwargs.chat_template sets restore_suffix to false, so that a pair "
                "that is cut loses the end of the template, where its score is read; remove it"
            )
        self._template = template
        self._args = dict(special_tokens) | {
            name: value for name, value in settings.items() if name not in FOLLOWED
        }
        self._generation = bool(settings.get("add_generation_prompt", False))
        self._in_parts = in_parts
        self._prompt = prompt
        self._check_roles()

    def _check_roles(self) -> None:
        try:
            first, *others = [self.text_of(query, document) for query, document in PROBES]
        except InvalidRequest as error:
            first, others = "", [""]
            detail = error.log_detail
        else:
            detail = ""
        if first in others:
            raise Refusal(
                "its chat template has no place for a query and a document; choose a checkpoint "
                "that sentence-transformers saved, or one that was converted to a classifier",
                detail=detail,
            )

    def text_of(self, query: str, document: str) -> str:
        """Return the text of a pair.

        Raises:
            InvalidRequest: The template refused it.
        """
        turns = [("system", self._prompt)] if self._prompt else []
        turns += [("query", query), ("document", document)]
        messages = [{"role": role, "content": self._content(text)} for role, text in turns]
        return render(
            self._template, messages, None, self._args, add_generation_prompt=self._generation
        )

    def _content(self, text: str) -> object:
        return [{"type": "text", "text": text}] if self._in_parts else text

    def end(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the tokens at the end of every pair, which cutting a pair must leave there."""
        first, second = (
            tokenizer.encode(self.text_of(one, one), add_special_tokens=False).ids
            for one in FILLERS
        )
        count = 0
        while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
            count += 1
        return tuple(first[len(first) - count :])
