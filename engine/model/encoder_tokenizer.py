"""Texts to an encoder's inputs, as sentence-transformers makes them.

Rule: nothing here changes a tokenizer after it was made, so that every method may be called from
any thread: there is one that cuts and one that does not, and none that pads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from engine.core.encode_types import EncodeInput, TokenizedInput
from engine.errors import FieldViolation, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenizers import Encoding

# Texts handed over at once. The library splits them among its threads, without Python's lock.
TEXTS_AT_ONCE = 64  # guess: a millisecond or two
# A query is cut behind so many times the tokens that a pair may have: how a text is split depends
# on what follows, but not so far.
QUERY_SHARE = 2


class InputTokenizer:
    """`engine.core.encode_types.EncoderTokenizer` over one tokenizer of the library's own kind.

    ``prompts`` are the model's, by name; "" is its default. ``max_tokens`` is what it takes.
    """

    def __init__(
        self,
        backend: Tokenizer,
        *,
        max_tokens: int,
        prompts: Mapping[str, str],
        special_ids: frozenset[int],
    ) -> None:
        self._whole = Tokenizer.from_str(backend.to_str())
        self._whole.no_padding()
        self._whole.no_truncation()
        self._cut = Tokenizer.from_str(self._whole.to_str())
        self._cut.enable_truncation(max_tokens, strategy="longest_first")
        self._max_tokens = max_tokens
        self._prompts = dict(prompts)
        self._prompt_tokens = {
            name: self._length_of(text, special_ids) for name, text in self._prompts.items()
        }

    def _length_of(self, prompt: str, special_ids: frozenset[int]) -> int:
        """A prompt's tokens as sentence-transformers counts them: with what the tokenizer puts
        before it, and without the one special token after it."""
        ids = self._cut.encode(prompt).ids if prompt else []
        return len(ids) - (bool(ids) and ids[-1] in special_ids)

    def encode_texts(self, texts: Sequence[str], prompt_name: str) -> list[TokenizedInput]:
        prompt = self._prompts.get(prompt_name, "")
        count = self._prompt_tokens.get(prompt_name, 0)
        _check_unicode(texts)
        return self._encode([prompt + text for text in texts], count)

    def encode_pairs(self, query: str, documents: Sequence[str]) -> list[TokenizedInput]:
        _check_unicode([query], "query")
        _check_unicode(documents)
        if len(query) <= QUERY_SHARE * self._max_tokens:
            return self._encode([(query, document) for document in documents], 0)
        return self._encode_long(query, documents)

    def _encode_long(self, query: str, documents: Sequence[str]) -> list[TokenizedInput]:
        """As with the whole query, of which each pair gets no more tokens than can tell in it: else
        each document would have all of it split again, and a MiB takes seconds and 100 MB. The
        longer text of a pair is the longer one still: a character has at most four tokens. Its
        ``full_tokens`` may be off by the tokens of the character that the cut is at.
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
        found = self._encode(pairs, 0)
        return [
            TokenizedInput(one.input, one.full_tokens + more)
            for one, more in zip(found, cut_off, strict=True)
        ]

    def _encode(
        self, inputs: Sequence[str | tuple[str, str]], prompt_tokens: int
    ) -> list[TokenizedInput]:
        found: list[TokenizedInput] = []
        for start in range(0, len(inputs), TEXTS_AT_ONCE):
            part = inputs[start : start + TEXTS_AT_ONCE]
            encodings = self._whole.encode_batch(list(part))
            for one, encoding in zip(part, encodings, strict=True):
                full = len(encoding.ids)
                if full > self._max_tokens:
                    encoding = self._cut.encode_batch([one])[0]
                found.append(TokenizedInput(_input_of(encoding, prompt_tokens), full))
        return found


def _input_of(encoding: Encoding, prompt_tokens: int) -> EncodeInput:
    types = tuple(encoding.type_ids)
    return EncodeInput(tuple(encoding.ids), types if any(types) else (), prompt_tokens)


def _check_unicode(texts: Sequence[str], field: str = "") -> None:
    """Half a surrogate pair cannot be encoded; the library panics at it."""
    found = []
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            found.append(FieldViolation(field or str(index), "is not valid Unicode"))
    if found:
        raise InvalidRequest(found)
