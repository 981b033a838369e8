"""Reads the tokens of a GGUF file from its metadata: their kinds, and which of them end an answer.

Rule: a known token's kind follows from its text, because many files store a wrong kind. The texts
and the default ids are those of llama.cpp's ``llama_vocab``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.worker.load.gguf.header import JoinedTexts
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PREFIX = "tokenizer.ggml."
TOKENS, MERGES = f"{PREFIX}tokens", f"{PREFIX}merges"
STRING_LISTS = (TOKENS, MERGES)  # lists of texts that the header's parser must not skip
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # GGUF's kinds of tokens.
MARKERS = (UNKNOWN, CONTROL, USER_DEFINED)  # A text is first split at tokens of these kinds.

END_TEXTS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
))  # fmt: skip
# Texts of tokens for filling in the middle (FIM) that end an answer, by the metadata field that
# names the token.
FIM_END_TEXTS = {
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": (
        "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>",
    ),
    "fim_sep_token_id": ("<|file_sep|>",),
}  # fmt: skip
FIM_TEXTS = frozenset((
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
    "<|code_prefix|>", "<|prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>",
    "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>",
    "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
    "<|middle|>",
))  # fmt: skip
END_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# (texts, text, kind): if the tokens of all ``texts`` end an answer, that of ``text`` does not, and
# is of this kind.
NO_END_BESIDE = (
    ({"<|return|>", "<|call|>"}, "<|end|>", USER_DEFINED),
    ({"<|flush|>", "<|call|>"}, "<|end|>", USER_DEFINED),
    ({"<|flush|>", "<|calls|>"}, "<|end|>", USER_DEFINED),
    ({"<|tool_response>"}, "</s>", NORMAL),
)
# The ids of special tokens if a file lacks the fields, by the kind of vocabulary. For byte-level
# ones, llama.cpp takes 11 for both ends of a text, which is right for Falcon's only.
DEFAULT_IDS = {
    SENTENCEPIECE: {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    BYTE_LEVEL: {},
}


# Chat templates' names of special tokens, and the metadata fields. The two of NAMES_IF_MARKED count
# only if their kind is special: some files name a plain token, such as "!", for padding.
NAMES = {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}
NAMES_IF_MARKED = {"unk_token": "unknown_token_id", "pad_token": "padding_token_id"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of a GGUF file.

    ``tokens`` are texts as they are stored, ``index`` has their ids, and ``kinds`` are GGUF's kinds
    of them, corrected. ``scores`` are the tokens' scores in a sentencepiece vocabulary. ``merges``
    is None for a file without merges. ``ids`` maps metadata fields to ids of special tokens.
    ``ends`` are the ids at which an answer ends. A flag is None if the file does not set it.
    """

    model: str
    pre_tokenizer: str
    tokens: Sequence[str]
    index: dict[str, int]
    kinds: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str] | None
    ids: Mapping[str, int]
    ends: frozenset[int]
    adds_bos: bool | None
    adds_eos: bool | None
    adds_space: bool | None
    strips_behind_markers: bool

    @property
    def is_byte_level(self) -> bool:
        """Whether the tokens are spelled in letters that stand for bytes."""
        return self.model == BYTE_LEVEL

    @property
    def markers(self) -> dict[str, bool]:
        """The texts of the tokens that a text is first split at, and whether each is special."""
        marked = [index for index, kind in enumerate(self.kinds) if kind in MARKERS]
        return {self.tokens[index]: self.kinds[index] != USER_DEFINED for index in marked}

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of special tokens by chat templates' names for them."""
        named = {name: self.ids.get(field) for name, field in NAMES.items()}
        for name, field in NAMES_IF_MARKED.items():
            index = self.ids.get(field)
            if index is not None and self.kinds[index] in (UNKNOWN, CONTROL):
                named[name] = index
        return {name: self.tokens[index] for name, index in named.items() if index is not None}


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Return the tokens that the metadata describe.

    Raises:
        Refusal: There are no tokens, their kind is not read, or two have the same text.
    """
    model = str(metadata.get(f"{PREFIX}model", "none"))
    tokens = _texts(metadata.get(TOKENS))
    if model not in DEFAULT_IDS or not tokens:
        raise Refusal(
            f"it has no tokenizer that is read ({PREFIX}model is {model!r}, with {len(tokens)} "
            f"tokens); the kinds that are read are {', '.join(DEFAULT_IDS)}"
        )
    ids = _special_ids(metadata, len(tokens), DEFAULT_IDS[model])
    index = _index(tokens)
    ends, kinds = _ends(index, tokens, ids), _numbers(metadata, "token_type", len(tokens), NORMAL)
    _correct(kinds, index, ends)
    merges = metadata.get(MERGES)
    name = str(metadata.get("general.name", "")).lower()
    return Vocabulary(
        model=model,
        pre_tokenizer=str(metadata.get(f"{PREFIX}pre", "")),
        tokens=tokens,
        index=index,
        kinds=kinds,
        scores=_numbers(metadata, "scores", len(tokens), 0.0),
        merges=merges if isinstance(merges, (list, JoinedTexts)) else None,
        ids=ids,
        ends=ends,
        adds_bos=_flag(metadata, "add_bos_token"),
        adds_eos=_flag(metadata, "add_eos_token"),
        adds_space=_flag(metadata, "add_space_prefix"),
        strips_behind_markers="phi-3" in name or "phi3" in name,
    )


def _texts(stored: Any) -> list[str]:
    """Return the texts of all tokens. As in llama.cpp, an empty text is replaced by a name."""
    if not isinstance(stored, (list, JoinedTexts)):
        return []
    texts = list(stored)
    if "" not in texts:
        return texts
    return [text or f"[EMPTY_{index}]" for index, text in enumerate(texts)]


def _index(texts: Sequence[str]) -> dict[str, int]:
    """Return the ids of all tokens.

    Raises:
        Refusal: Two are alike, so that one of the tokens could never be produced from a text.
    """
    index = dict(zip(texts, range(len(texts)), strict=True))
    if len(index) < len(texts):
        second, text = next((i, text) for i, text in enumerate(texts) if index[text] != i)
        first, second = second, texts.index(text, second + 1)
        raise Refusal(f"its tokens {first} and {second} have the same text, {text!r}")
    return index


def _special_ids(
    metadata: Mapping[str, Any], count: int, otherwise: Mapping[str, int]
) -> dict[str, int]:
    """Return the ids of special tokens by their fields. As in llama.cpp, an id outside the
    vocabulary, which old files have for a padding token, names no token.

    Raises:
        Refusal: A field has a value that is no id.
    """
    names = ("bos_token_id", "unknown_token_id", "padding_token_id", *END_FIELDS, *FIM_END_TEXTS)
    ids = dict(otherwise)
    for name in names:
        value = metadata.get(f"{PREFIX}{name}")
        if value is None:
            continue
        if type(value) is not int:
            shown = str(value)[:200]
            raise Refusal(f"its {PREFIX}{name} is {shown}, and must be one token id")
        ids[name] = value
    return {name: value for name, value in ids.items() if 0 <= value < count}


def _ends(
    index: Mapping[str, int], tokens: Sequence[str], ids: Mapping[str, int]
) -> frozenset[int]:
    """Return the ids at which an answer ends."""
    texts = set(END_TEXTS)
    for field, fim_texts in FIM_END_TEXTS.items():
        if field not in ids:
            texts.update(fim_texts)
    ends = {index[text] for text in texts if text in index}
    ends |= {ids[field] for field in (*END_FIELDS, *FIM_END_TEXTS) if field in ids}
    end_texts = {tokens[end] for end in ends}
    no_ends = {text for beside, text, _ in NO_END_BESIDE if beside <= end_texts}
    return frozenset(end for end in ends if tokens[end] not in no_ends)


def _correct(kinds: list[int], index: Mapping[str, int], ends: frozenset[int]) -> None:
    """Make the tokens that are markers by their texts control tokens, whatever kind is stored."""
    markers = END_TEXTS.union(FIM_TEXTS, *FIM_END_TEXTS.values())
    other = {text: kind for _, text, kind in NO_END_BESIDE}
    for text in markers & index.keys():
        own = index[text]
        kinds[own] = CONTROL if own in ends or text not in other else other[text]


def _numbers(metadata: Mapping[str, Any], name: str, count: int, otherwise: Any) -> list[Any]:
    """Return a field that has a number for each token.

    Raises:
        Refusal: The field has fewer numbers than there are tokens.
    """
    numbers = metadata.get(f"{PREFIX}{name}")
    if numbers is None:
        return [otherwise] * count
    if not isinstance(numbers, list) or len(numbers) < count:
        raise Refusal(f"its {PREFIX}{name} does not have a number for each of {count} tokens")
    return list(numbers[:count])


def _flag(metadata: Mapping[str, Any], name: str) -> bool | None:
    flag = metadata.get(f"{PREFIX}{name}")
    return None if flag is None else bool(flag)
