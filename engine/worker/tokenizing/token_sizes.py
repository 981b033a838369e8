"""The most characters of a text that one token can stand for, by which a text that is too long is
refused before it is tokenised.

Rule: for a kind of normalizer, pre-tokenizer or model that is not named here there is no bound, as
it may drop characters, or turn any number of them into one token.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from tokenizers.pre_tokenizers import ByteLevel

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from tokenizers import Tokenizer

# The most characters that each Unicode normalization form may compose to one. Source: Unicode,
# "Normalization FAQ": a character is decomposed into at most four.
COMPOSED_CHARS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1}
BYTES = tuple(f"<0x{value:02X}>" for value in range(256))


def max_chars_per_token(backend: Tokenizer, tokens: Collection[str] = ()) -> float:
    """Return the most characters of a text that one token can stand for; infinity if unknown.
    ``tokens`` are all of the backend's, if they are known."""
    vocabulary = tokens or backend.get_vocab(with_added_tokens=True)
    splits = [*_parts(backend.pre_tokenizer, "pretokenizers")]
    added = backend.get_added_tokens_decoder().values()
    is_bounded = (
        type(backend.model).__name__ == "BPE"
        and _has_every_character(backend, vocabulary, splits)
        and all(map(_keeps_all, splits))
        and not any(token.lstrip or token.rstrip for token in added)
    )
    if not (is_bounded and vocabulary):
        return math.inf
    normalizer, longest = backend.normalizer, max(map(len, vocabulary))
    if normalizer is not None:  # texts are searched for the normalised form of such added tokens
        forms = (normalizer.normalize_str(token.content) for token in added if token.normalized)
        longest = max(longest, *map(len, forms), 0)
    factor = math.prod(map(_shrinkage, _parts(normalizer, "normalizers")))
    return factor * longest


def _parts(component: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the parts of a normalizer or a pre-tokenizer, in the form of tokenizer.json."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop(0)
        if part["type"] == "Sequence":
            waiting = part[name] + waiting
        else:
            yield part


def _has_every_character(
    backend: Tokenizer, vocabulary: Collection[str], splits: list[dict[str, Any]]
) -> bool:
    """Return whether every character has tokens. If not, many may be one unknown token, or none."""
    model = backend.model
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False  # characters have other tokens inside words or at their ends
    if any(split["type"] == "ByteLevel" for split in splits):
        return all(byte in vocabulary for byte in ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(byte in vocabulary for byte in BYTES)


def _keeps_all(split: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer drops no character."""
    if split["type"] in {"Split", "Punctuation"}:
        return bool(split["behavior"] != "Removed")
    return split["type"] in {"ByteLevel", "Digits", "Metaspace"}


def _shrinkage(normalizer: Mapping[str, Any]) -> float:
    """Return the most characters that a normalizer may turn into one."""
    if normalizer["type"] == "Prepend":
        return 1
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String", "")
        return 1 if 0 < len(pattern) <= len(normalizer["content"]) else math.inf
    return COMPOSED_CHARS.get(normalizer["type"], math.inf)
