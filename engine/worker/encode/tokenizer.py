"""Tokenises an encoder's inputs as sentence-transformers does.

Rule: no tokenizer is changed after it was made, so that every method may be called from any thread.
Therefore there are two tokenizers, with and without truncation. Neither pads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from engine.core.encode.types import CharSpan, EncodeInput, TokenizedInput
from engine.errors import FieldViolation, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenizers import Encoding

    from engine.worker.encode.input_template import InputTemplate

# Texts passed to the library at once, which divides them among its threads and releases the GIL for
# a millisecond or two. Not tuned.
TEXTS_AT_ONCE = 64
# A long query is cut after this many times the tokens that a pair may have: a token may depend on
# the text after it, but not on text so far away.
QUERY_SHARE = 2


class Spans:
    """Finds the characters of tokens, and which tokens go on with a word. ``model`` is that of a
    tokenizer. One with a prefix for such tokens, like BERT's, has words; in others a token goes on
    unless a space is at its beginning or before it. ``unknown_id`` is of the token that begins a
    word in either.

    Source: transformers, pipelines/token_classification.py; only the behaviour is the same.
    """

    def __init__(self, model: Any, unknown_id: int | None) -> None:
        self._has_words = bool(getattr(model, "continuing_subword_prefix", None))
        self._unknown_id = unknown_id

    def of(self, text: str, encoding: Encoding) -> tuple[CharSpan | None, ...]:
        """Return the span of each token; None for tokens that are not in the text."""
        rows = zip(
            *(encoding.tokens, encoding.ids, encoding.offsets, encoding.special_tokens_mask),
            strict=True,
        )
        return tuple(
            None if special else CharSpan(start, end, self._is_inside(text, token, id_, start, end))
            for token, id_, (start, end), special in rows
        )

    def _is_inside(self, text: str, token: str, id_: int, start: int, end: int) -> bool:
        if id_ == self._unknown_id:
            return False
        if self._has_words:
            return len(token) != end - start
        return start > 0 and " " not in text[start - 1 : start + 1]


class InputTokenizer:
    """An `engine.worker.encode.interface.EncoderTokenizer` over a tokenizer of the tokenizers
    library.

    ``prompts`` are the model's prompts by name; "" is the default. ``max_tokens`` is the limit of
    an input. ``template`` renders the inputs of a model that reads chats; None: the prompt is put
    before the text or the query. ``spans`` finds the characters of the tokens; None: nobody needs
    them.
    """

    def __init__(
        self,
        backend: Tokenizer,
        *,
        max_tokens: int,
        prompts: Mapping[str, str],
        special_ids: frozenset[int],
        template: InputTemplate | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._whole = Tokenizer.from_str(backend.to_str())
        self._whole.no_padding()
        self._whole.no_truncation()
        self._cut = Tokenizer.from_str(self._whole.to_str())
        self._cut.enable_truncation(max_tokens, strategy="longest_first")
        self._max_tokens = max_tokens
        self._template = template
        self._spans = spans
        self._prompts = dict(prompts)
        # As in sentence-transformers, pooling does not exclude a prompt in a template.
        self._prompt_tokens = {
            name: self._length_of(text, special_ids)
            for name, text in self._prompts.items()
            if template is None
        }

    def _length_of(self, prompt: str, special_ids: frozenset[int]) -> int:
        """Count a prompt's tokens as sentence-transformers does: including the special tokens
        before the prompt, but not the special token after it."""
        ids = self._cut.encode(prompt).ids if prompt else []
        return len(ids) - (bool(ids) and ids[-1] in special_ids)

    def encode_texts(self, texts: Sequence[str], prompt_name: str) -> list[TokenizedInput]:
        """Return texts as inputs, each after the named prompt."""
        prompt = self._prompts.get(prompt_name, "")
        count = self._prompt_tokens.get(prompt_name, 0)
        _check_unicode(texts)
        if self._template is not None:
            return self._encode_chats(self._template, texts, prompt)
        return self._encode([prompt + text for text in texts], count)

    def encode_pairs(self, query: str, documents: Sequence[str]) -> list[TokenizedInput]:
        """Return each document with the query as one input."""
        _check_unicode([query], "query")
        _check_unicode(documents)
        prompt = self._prompts.get("", "")
        if self._template is None:
            query = prompt + query
        if len(query) <= QUERY_SHARE * self._max_tokens:
            return self._encode_pairs([(query, document) for document in documents])
        return self._encode_long(query, documents)

    def _encode_long(self, query: str, documents: Sequence[str]) -> list[TokenizedInput]:
        """Encode pairs with a long query. First the query is cut to the tokens that a pair can use.

        Otherwise the whole query would be tokenised again for each document, and a query of 1 MiB
        takes seconds and 100 MB. A query with more tokens than the document still has more after
        the cut, because a character of the document has at most four tokens. ``full_tokens`` may be
        wrong by the tokens of the character at the cut.
        """
        whole = self._whole.encode_batch([query], add_special_tokens=False)[0]
        pairs, cut_off = [], []
        for document in documents:
            kept = max(QUERY_SHARE * self._max_tokens, 4 * len(document) + 1)
            is_cut = kept < len(whole)
            chars = whole.token_to_chars(kept) if is_cut else None
            end = len(query) if chars is None else chars[0]
            pairs.append((query[:end], document))
            cut_off.append(len(whole) - kept if is_cut else 0)
        tokenized = self._encode_pairs(pairs)
        return [
            TokenizedInput(input_.input, input_.full_tokens + more)
            for input_, more in zip(tokenized, cut_off, strict=True)
        ]

    def _encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[TokenizedInput]:
        if self._template is None:
            return self._encode(pairs, 0)
        return self._encode_chats(self._template, pairs, self._prompts.get("", ""))

    def _encode(
        self, inputs: Sequence[str | tuple[str, str]], prompt_tokens: int
    ) -> list[TokenizedInput]:
        tokenized: list[TokenizedInput] = []
        for start in range(0, len(inputs), TEXTS_AT_ONCE):
            part = inputs[start : start + TEXTS_AT_ONCE]
            encodings = self._whole.encode_batch(list(part))
            for text, encoding in zip(part, encodings, strict=True):
                full = len(encoding.ids)
                if full > self._max_tokens:
                    encoding = self._cut.encode_batch([text])[0]
                made = _input_of(encoding, prompt_tokens)
                if self._spans is not None and isinstance(text, str):
                    made = made._replace(spans=self._spans.of(text, encoding))
                tokenized.append(TokenizedInput(made, full))
        return tokenized

    def _encode_chats(
        self, template: InputTemplate, inputs: Sequence[str | tuple[str, str]], prompt: str
    ) -> list[TokenizedInput]:
        """Return the tokens of inputs rendered by the template. If an input is cut, the template's
        end replaces its last tokens, as in sentence-transformers, because values are read after
        it."""
        tokenized: list[TokenizedInput] = []
        for start in range(0, len(inputs), TEXTS_AT_ONCE):
            part = enumerate(inputs[start : start + TEXTS_AT_ONCE], start)
            texts = [_text_of(template, chat, prompt, index) for index, chat in part]
            for encoding in self._whole.encode_batch(texts, add_special_tokens=False):
                ids = tuple(encoding.ids)
                if len(ids) > self._max_tokens:
                    end = template.end(self._whole, prompt)[-self._max_tokens :]
                    ids = ids[: self._max_tokens - len(end)] + end
                tokenized.append(TokenizedInput(EncodeInput(ids, (), 0), len(encoding.ids)))
        return tokenized


def _text_of(template: InputTemplate, given: str | tuple[str, str], prompt: str, index: int) -> str:
    """Return the text of the input with this index. If the template refuses it, the error's field
    is the index."""
    try:
        return template.text_of(given, prompt)
    except InvalidRequest as error:
        raise error.renamed(lambda _field: str(index)) from error


def _input_of(encoding: Encoding, prompt_tokens: int) -> EncodeInput:
    types = tuple(encoding.type_ids)
    return EncodeInput(tuple(encoding.ids), types if any(types) else (), prompt_tokens)


def _check_unicode(texts: Sequence[str], field: str = "") -> None:
    """Raise InvalidRequest for texts with half a surrogate pair, at which the library panics."""
    violations = []
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            violations.append(FieldViolation(field or str(index), "is not valid Unicode"))
    if violations:
        raise InvalidRequest(violations)
