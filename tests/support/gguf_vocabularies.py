"""Vocabularies for GGUF files, and texts on which tokenizers differ, drawn by a seed.

Merges are learned from the texts themselves, without any split, so that they reach over every
place at which one pre-tokenizer or another splits: most splits change the tokens. Some words are
tokens that no merge makes. Nothing here uses what it tests, or anything but Python's own library.
"""

import json
import re
from collections import Counter
from collections.abc import Container, Sequence
from functools import cache
from hashlib import blake2s
from itertools import pairwise
from random import Random
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = 200
MERGES, MERGES_AT_ONCE = 1500, 50

# Names that a file may have in tokenizer.ggml.pre, which the product reads. "" is no name.
PRE_TOKENIZERS = (
    "", "default", "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "a.x-4.0", "mellum",
    "modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "starcoder",
    "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2", "llama3",
    "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5", "qwen2",
    "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open",
    "grok-2", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "deepseek-v3",
    "hunyuan-dense", "hy_v4", "joyai-llm", "bailingmoe", "bailingmoe2", "llada-moe", "poro-chat",
    "bloom", "gpt3-finnish", "viking", "deepseek-llm", "deepseek-coder", "tekken", "falcon",
    "qwen35", "minicpm5", "seed-coder", "ufakzeka", "laguna", "superbpe",
)  # fmt: skip
UNMERGED = ("zqzq", " zqzq", " Zq9q", "qxqx's", "東京都")  # tokens that no merge makes
MARKERS = {
    "<|begin_of_text|>": CONTROL,
    "<｜begin▁of▁sentence｜>": CONTROL,
    "<｜User｜>": USER_DEFINED,
    "<think>": USER_DEFINED,
    "<|im_end|>": USER_DEFINED,
    "<|eot_id|>": NORMAL,
    "<｜end▁of▁sentence｜>": NORMAL,
    "<|fim_prefix|>": NORMAL,
    "<|plain|>": NORMAL,
    "<tool call>": CONTROL,
    "<|endoftext|>": CONTROL,
    "<|unknown|>": UNKNOWN,
    "    ": USER_DEFINED,
}
PLAIN = (
    "hello", "World", "HTTPServer", "camelCase", "I'm", "you'LL", "we'd", "they've", "qxqx's",
    "'sword", "it'S", "don't", "1", "42", "365", "1234", "1234567", "3.14", "1,000,000", "v2.0",
    "0x1F", "²", "½", "Ⅷ", "٣٤٥", "zqzq", "Zq9q", "東京都", "日本語テスト", "カタカナ",
    "你好，世界。", "한국어", "שלום", "ไทย", "😀", "👩‍👩‍👧", "🇫🇮", "→", "…", "--", "!!!", "?!",
    "(x)", "[i]", "{}", "a_b", "x=y+1;", "#!/bin", "$5", "^", "`code`", "~", "|", "<b>", "&amp;",
    "\\n", "/usr/lib", "//", "user@example.com", "“q”", "«", "。", "、", "！", "＃",
    "\u200b", "\ufeff", "\u00ad",
)  # fmt: skip
CASED = (
    "é", "Éa", "naïve", "ÀÉ", "übung", "Straße", "привет", "МОСКВА", "Ελλάδα", "e\u0301te\u0301",
    "हिन्दी", "தமிழ்", "বাংলা", "ก\u0e34น", "a\u0308b", "ǅ", "ﬁn", "Ａｂ", "ſ", "ʰ",
)  # fmt: skip
SPACES = (
    "", " ", " ", " ", " ", "  ", "   ", "    ", "\n", "\n\n", "\n\n\n", "\t", "\t\t", "\r\n",
    " \n", "\n ", " \n\n  ", "\u00a0", "\u3000", " \u00a0", "\x0b", "\x85", "\u2009",
)  # fmt: skip

# Spaces that llama.cpp strips otherwise behind Phi-3's markers: those beyond ASCII, and a marker of
# four spaces, which Phi-3 lacks.
STRIPPED = ("\u00a0", "\u3000", " \u00a0", "\x85", "\u2009", "    ")
# By pre-tokenizer: words and spaces that llama.cpp splits otherwise than the models were trained
# with, so that no text has them. As its comments say, in some regular expressions it takes letters
# other than A to Z for both cases and marks for no letters, and ranges have only ASCII's spaces.
WITHOUT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), CASED),
    "deepseek-llm": ("\u3000",),
    "deepseek-coder": ("\u3000",),
    "pieces, Phi-3": STRIPPED,
}
BYTE_LEVEL_FIELDS = (
    ("both ends", "qwen2", {"add_bos_token": True, "add_eos_token": True}),
    ("no beginning", "llama-bpe", {"add_bos_token": False}),
)
PIECES_FIELDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pieces", {}),
    ("pieces, no space", {"add_space_prefix": False}),
    ("pieces, no ends, space", {"add_bos_token": False, "add_space_prefix": True}),
    ("pieces, end", {"add_eos_token": True, "bos_token_id": 2, "eos_token_id": 1}),
    ("pieces, Phi-3", {"general.name": "Phi-3 Mini"}),
)
ENDS = 40
ENDS_AND_OTHERS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[", "<|end_of_role|>", "<|im_start|>", "<|eot|>", "<|file_sep|>",
    "<end_of_sentence>", "<|channel|>", "<｜Assistant｜>",
)  # fmt: skip
FILL = (
    ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("<|fim_prefix|>", "<fim-prefix>", "<PRE>", "<|prefix|>"),
)


def draw_texts(seed: int, without: Container[str] = (), count: int = TEXTS) -> tuple[str, ...]:
    """Return ``count`` texts that have none of the words and spaces of ``without``."""
    rng = Random(seed)
    words = [word for word in (*PLAIN, *CASED, *MARKERS) if word not in without]
    spaces = [space for space in SPACES if space not in without]

    def one(items: Sequence[str]) -> str:
        return items[int(rng.random() * len(items))]

    return tuple(
        "".join(one(spaces) + one(words) for _ in range(1 + int(rng.random() * 12))) + one(spaces)
        for _ in range(count)
    )


def between_markers(texts: Sequence[str]) -> list[str]:
    """Return what lies between the markers of texts."""
    pattern = "|".join(re.escape(marker) for marker in MARKERS)
    return [part for text in texts for part in re.split(pattern, text) if part]


def byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a byte-level vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


@cache
def learn_merges(texts: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return merges of neighbours by how often they occur, without any split of the texts."""
    words = [list(text) for text in texts]
    merges: dict[tuple[str, str], None] = {}
    while len(merges) < MERGES:
        counts = Counter(pair for word in words for pair in pairwise(word))
        if not counts:
            break
        best = sorted(counts, key=lambda pair: (-counts[pair], pair))[:MERGES_AT_ONCE]
        merges |= dict.fromkeys(best)
        words = [merged(word, set(best)) for word in words]
    return list(merges)


def merged(word: list[str], pairs: set[tuple[str, str]]) -> list[str]:
    """Return the pieces of a word after joining neighbours that are a pair, from the left."""
    found: list[str] = []
    for letter in word:
        if found and (found[-1], letter) in pairs:
            found[-1] += letter
        else:
            found.append(letter)
    return found


def byte_level(pre: str, texts: Sequence[str], **fields: Any) -> dict[str, Any]:
    """Return the metadata of a byte-level vocabulary whose merges fit the texts. ``fields`` are
    further fields of tokenizer.ggml."""
    letters = byte_letters()

    def spell(text: str) -> str:
        return "".join(letters[byte] for byte in text.encode())

    merges = learn_merges(tuple(spell(text) for text in between_markers(texts)))
    made = dict.fromkeys([*letters, *(one + two for one, two in merges)])
    tokens = list(made | dict.fromkeys(spell(word) for word in UNMERGED))
    named = {} if not pre else {"pre": pre}
    return metadata(
        {
            "model": "gpt2",
            **named,
            "tokens": [*tokens, *MARKERS],
            "token_type": [*[NORMAL] * len(tokens), *MARKERS.values()],
            "merges": [f"{one} {two}" for one, two in merges],
            "bos_token_id": len(tokens),
            "eos_token_id": len(tokens) + 5,
            **fields,
        }
    )


def pieces(texts: Sequence[str], **fields: Any) -> dict[str, Any]:
    """Return the metadata of a sentencepiece vocabulary that fits the texts."""
    spelled = ["▁" + text.replace(" ", "▁") for text in between_markers(texts)]
    seen = Counter("".join(spelled))
    letters = sorted(letter for letter in seen if seen[letter] > 2)  # others are bytes
    known = tuple("".join(letter for letter in text if letter in letters) for text in spelled)
    made = dict.fromkeys(one + two for one, two in learn_merges(known))
    ends = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    kinds = ends | {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    kinds |= dict.fromkeys([*made, *letters], NORMAL) | MARKERS
    ranks = {text: -float(rank) for rank, text in enumerate([*made, *letters])}
    return metadata(
        {
            "model": "llama",
            "tokens": list(kinds),
            "token_type": list(kinds.values()),
            "scores": [ranks.get(text, 0.0) for text in kinds],
            **fields,
        }
    )


def metadata(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a file without weights. Names of ``fields`` get the prefix
    "tokenizer.ggml." unless they begin with "general."."""
    named = {
        name if name.startswith("general.") else f"tokenizer.ggml.{name}": value
        for name, value in fields.items()
    }
    return {"general.architecture": "llama"} | named


def cases() -> dict[str, tuple[dict[str, Any], tuple[str, ...]]]:
    """Return the vocabularies that are compared with llama.cpp, and the texts for each."""
    found = {}
    for pre in PRE_TOKENIZERS:
        texts = draw_texts(1, WITHOUT.get(pre, ()))
        found[f"pre {pre}".rstrip()] = (byte_level(pre, texts), texts)
    for name, pre, fields in BYTE_LEVEL_FIELDS:
        texts = draw_texts(1)
        found[name] = (byte_level(pre, texts, **fields), texts)
    for name, fields in PIECES_FIELDS:
        texts = draw_texts(1, WITHOUT.get(name, ()))
        found[name] = (pieces(texts, **fields), texts)
    return found | {f"ends {seed}": (draw_ends(seed), ()) for seed in range(ENDS)}


def digest(ids: Sequence[int]) -> str:
    """Return six hexadecimal digits; two lists of ids share them one time in 16 million."""
    return blake2s(json.dumps(list(ids)).encode(), digest_size=3).hexdigest()


def draw_ends(seed: int) -> dict[str, Any]:
    """Return the metadata of a vocabulary with drawn markers (ends of answers, markers for filling
    in a text, and others), each of a drawn token type."""
    rng = Random(seed)
    letters = byte_letters()
    drawn = [text for text in ENDS_AND_OTHERS if rng.random() < 0.3]
    for alike in FILL:  # at most one marker of each row: of several, llama.cpp takes any one
        drawn += [alike[int(rng.random() * len(alike))]] if rng.random() < 0.3 else []
    tokens = [*letters, "ab", *drawn]
    fields = {
        name: int(rng.random() * len(tokens))
        for name in ("eos_token_id", "eot_token_id", "eom_token_id", "fim_pad_token_id",
                     "fim_rep_token_id", "fim_sep_token_id")
        if rng.random() < (0.8 if name == "eos_token_id" else 0.2)
    }  # fmt: skip
    # llama.cpp takes id 11 where a file names no end; Triolet takes none
    fields.setdefault("eos_token_id", 11)
    kinds = [(NORMAL, CONTROL, USER_DEFINED)[int(rng.random() * 3)] for _ in drawn]
    return metadata(
        {
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": tokens,
            "token_type": [*[NORMAL] * (len(letters) + 1), *kinds],
            "merges": ["a b"],
            **fields,
        }
    )
