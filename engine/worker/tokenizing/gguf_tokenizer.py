"""Builds the tokenizer inside a GGUF file, and writes what is stored beside one in a checkpoint.

It is a tokenizer of the `tokenizers` library, whose parts are chosen here. Rule: the vocabulary is
exactly the file's tokens, with their ids and spelling. The tokens that a text begins and ends with
become the post-processor, which `engine.worker.tokenizing.tokenizer` runs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from engine.errors import SpawnFailed
from engine.worker.import_lock import holds_import_lock
from engine.worker.load.gguf.header import JoinedTexts
from engine.worker.tokenizing.gguf_splits import SPLITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engine.worker.load.gguf.vocabulary import Vocabulary

SPACE = "▁"  # sentencepiece's character for a space
NO_SEPARATORS = bytes({*range(256)} - {*b" \0"})

log = logging.getLogger(__name__)


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer of a GGUF file's vocabulary.

    Raises:
        SpawnFailed: Its pre-tokenizer is not known, or its parts do not fit together.
    """
    try:
        backend = _byte_level(vocabulary) if vocabulary.is_byte_level else _pieces(vocabulary)
        markers = vocabulary.markers
        for is_special, add in ((True, backend.add_special_tokens), (False, backend.add_tokens)):
            add(
                [
                    AddedToken(
                        text,
                        special=is_special,
                        normalized=False,
                        rstrip=_strips(vocabulary, text),
                    )
                    for text, marker in markers.items()
                    if marker is is_special
                ]
            )
        _add_ends(backend, vocabulary)
    except SpawnFailed:
        raise
    except Exception as error:  # for example, the file lacks a token of a merge
        raise SpawnFailed(
            "the GGUF file has a tokenizer that cannot be built",
            log_detail=f"{type(error).__name__}: {error}",
        ) from error
    return backend


def write_tokenizer_config(vocabulary: Vocabulary, directory: Path) -> None:
    """Write tokenizer_config.json, which names the special tokens."""
    content = json.dumps(vocabulary.special_tokens)
    (directory / "tokenizer_config.json").write_text(content, encoding="utf-8")


def write_generation_config(vocabulary: Vocabulary, directory: Path) -> None:
    """Write generation_config.json, which lists the ids at which an answer ends."""
    content = json.dumps({"eos_token_id": sorted(vocabulary.ends)})
    (directory / "generation_config.json").write_text(content, encoding="utf-8")


def check_splits(vocabulary: Vocabulary) -> None:
    """Check that it is known how text is split before merges.

    Raises:
        SpawnFailed: The file names another pre-tokenizer.
    """
    name = vocabulary.pre_tokenizer
    if vocabulary.is_byte_level and name not in SPLITS:
        raise SpawnFailed(
            f"the GGUF file's pre-tokenizer (tokenizer.ggml.pre) is {name!r}, which is not known, "
            f"so that its text would be split wrongly; known are {', '.join(filter(None, SPLITS))}"
        )


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    """Return a tokenizer of byte-level BPE.

    Raises:
        SpawnFailed: Its pre-tokenizer is not known.
    """
    check_splits(vocabulary)
    name = vocabulary.pre_tokenizer
    if not name:
        log.warning(
            "the GGUF file names no pre-tokenizer (tokenizer.ggml.pre); its text is split as "
            "'default', as llama.cpp does, which may not be how the model was trained"
        )
    splits = SPLITS[name]
    backend = Tokenizer(
        models.BPE(
            vocabulary.index,
            _pairs(vocabulary.merges or ()),
            ignore_merges=splits.ignores_merges,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(e), behavior="isolated") for e in splits.expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces(vocabulary: Vocabulary) -> Tokenizer:
    """Return a tokenizer of sentencepiece's BPE, whose merges follow from the scores."""
    tokens = vocabulary.index
    unknown = vocabulary.special_tokens.get("unk_token")
    has_space = vocabulary.adds_space is not False
    backend = Tokenizer(
        models.BPE(tokens, _merges(vocabulary, tokens), unk_token=unknown, fuse_unk=True,
                   byte_fallback=True)
    )  # fmt: skip
    spelling = normalizers.Replace(" ", SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), spelling]) if has_space else spelling
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if has_space else []),
        ]
    )
    return backend


@holds_import_lock
def _generate_merges() -> Callable[..., list[tuple[str, str]]]:
    """Return transformers' function for a vocabulary's merges. Importing it takes seconds."""
    from transformers.tokenization_utils_base import generate_merges

    return generate_merges


def _merges(vocabulary: Vocabulary, tokens: dict[str, int]) -> Sequence[tuple[str, str]]:
    """Return the merges of a sentencepiece vocabulary: those of the file or, if it has none, each
    pair whose join is a token, ordered by that token's score and then its id."""
    if vocabulary.merges is not None:
        return _pairs(vocabulary.merges)
    order = sorted(range(len(tokens)), key=lambda index: (-vocabulary.scores[index], index))
    ranks = {vocabulary.tokens[index]: -float(rank) for rank, index in enumerate(order)}
    return _generate_merges()(tokens, ranks)


class _Neighbours(Sequence[tuple[str, str]]):
    """The first and the second text of a list, the third and the fourth, and so on. The library
    copies each pair before it takes the next: so no more than one exists at a time, and 150,000
    tuples are not made."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts) // 2

    def __getitem__(self, at: Any) -> Any:  # no slices
        return self._texts[2 * at], self._texts[2 * at + 1]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        texts = iter(self._texts)
        return zip(texts, texts, strict=True)


def _pairs(merges: Sequence[str]) -> Sequence[tuple[str, str]]:
    """Return the two tokens of each merge, between which is its first space."""
    joined = merges.joined if isinstance(merges, JoinedTexts) else "\0".join(merges)
    if merges and joined.encode().translate(None, NO_SEPARATORS) == (len(merges) * b" \0")[:-1]:
        return _Neighbours(joined.replace(" ", "\0").split("\0"))
    return [(parts[0], parts[2]) for parts in [merge.partition(" ") for merge in merges]]


def _strips(vocabulary: Vocabulary, text: str) -> bool:
    """Return whether spaces after a special token belong to it. GGUF files do not say that; as in
    llama.cpp, they do in models named Phi-3."""
    return vocabulary.strips_behind_markers and text not in ("<unk>", "<s>", "<|endoftext|>")


def _add_ends(backend: Tokenizer, vocabulary: Vocabulary) -> None:
    """Make the tokenizer add the tokens that a text begins and ends with.

    Raises:
        SpawnFailed: The file does not name such a token.
    """
    by_name = SPLITS[vocabulary.pre_tokenizer].adds_bos if vocabulary.is_byte_level else True
    begins = by_name if vocabulary.adds_bos is None else vocabulary.adds_bos
    before = _end(vocabulary, "begins", "bos_token") if begins else []
    behind = _end(vocabulary, "ends", "eos_token") if vocabulary.adds_eos else []
    if before or behind:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *behind],
            pair=[*before, "$A", *behind, *before, "$B:1", *behind],
            special_tokens=[(token, backend.token_to_id(token)) for token in before + behind],
        )


def _end(vocabulary: Vocabulary, what: str, name: str) -> list[str]:
    """Return the token that a text begins or ends with."""
    token = vocabulary.special_tokens.get(name)
    if token is None:
        raise SpawnFailed(
            f"a text of the GGUF file's model {what} with a token, and the file names none that it "
            f"has (tokenizer.ggml.{name}_id)"
        )
    return [token]
