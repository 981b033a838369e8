"""Small tokenizers of the common kinds, trained on the spot in a few milliseconds.

`byte_level` is GPT-2's kind. `llama3_like` adds a first token to every text. `qwen_like` has
normalisation, a split expression and chat tokens. `llama_like` is SentencePiece's kind: spaces as
U+2581, byte fallback, and a first space that decoding strips. `save` writes one as a model folder
holds it.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "Once upon a time there was a small dog named Ada who lived by the sea.",
    "The dog said: 'I'm happy!' and ran, ran, ran 1234 times; 56.78 % of them uphill.",
    "def main(args):\n    return [x for x in args if x != None]\n\n",
    "Él comió piñas en el café, naïve façade, übermütig, 漢字かな交じり文, 한국어, русский язык.",
    "emoji 🌶 👩‍👩‍👧 🏳️‍🌈 and more text, one two three four five six seven",
]
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def byte_level() -> Tokenizer:
    """Return GPT-2's kind: <|endoftext|> is special, and nothing is added to a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    _train(tokenizer, ["<|endoftext|>"])
    return tokenizer


@cache
def qwen_like() -> Tokenizer:
    """Return Qwen's kind, with two chat tokens and one added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    _train(tokenizer, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


@cache
def llama3_like() -> Tokenizer:
    """Return Llama 3's kind: byte-level, with <|begin_of_text|> before every text."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
                special_tokens=[("<|begin_of_text|>", begin)],
            ),
        ]
    )
    return tokenizer


@cache
def llama_like() -> Tokenizer:
    """Return Llama 2's kind: <s> before every text, byte tokens for missing characters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
        show_progress=False,
    )
    words = [" ".join(TEXTS[:2])] * 3
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer = _without_special(tokenizer, byte_tokens)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer


ALL = {
    "byte_level": byte_level,
    "llama3_like": llama3_like,
    "llama_like": llama_like,
    "qwen_like": qwen_like,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "byte_level": {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    },
    "llama3_like": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "clean_up_tokenization_spaces": True,
    },
    "qwen_like": {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "chat_template": CHATML,
    },
    "llama_like": {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "normalized": False},
        "eos_token": {"__type": "AddedToken", "content": "</s>", "normalized": False},
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": False,
    },
}


def save(name: str, directory: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json as a model folder has them."""
    directory.mkdir(parents=True, exist_ok=True)
    ALL[name]().save(str(directory / "tokenizer.json"))
    config = json.dumps(CONFIGS[name])
    (directory / "tokenizer_config.json").write_text(config, encoding="utf-8")
    return directory


def _train(tokenizer: Tokenizer, special_tokens: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)


def _without_special(tokenizer: Tokenizer, names: list[str]) -> Tokenizer:
    """Return the tokenizer with ``names`` as plain vocabulary, as SentencePiece has its bytes."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [one for one in state["added_tokens"] if one["content"] not in names]
    return Tokenizer.from_str(json.dumps(state))
