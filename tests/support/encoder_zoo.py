"""Tiny encoders with random weights, of each kind in the table of docs/features.md, with the files
that their authors publish."""

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.checkpoints.encode import words_tokenizer

LENGTH = 64
SIZES: dict[str, Any] = {
    "vocab_size": 600, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": LENGTH, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
DECODER = GROUPED | {"head_dim": 8}
GPT2 = {"vocab_size": 600, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
PROMPTS = {"query": "search the document: ", "document": ""}
# Short form of the template of Qwen3's rerankers: prompt, both texts, begin of the answer.
PAIRS_TEMPLATE = (
    "{%- set ns = namespace(i='find') -%}{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{%- set ns.i = m.content -%}{%- endif -%}{%- endfor -%}"
    "question: {{ ns.i }}\n"
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "document: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content')"
    " | first }}[SEP]"
    "{%- if add_generation_prompt %}\nanswer ?{% endif -%}"
)
# Like an instruct model's template: turns between marks, then the mark of the answer.
TURNS_TEMPLATE = (
    "{% for m in messages %}[CLS] {{ m.role }} : {{ m.content }} [SEP]\n{% endfor %}answer ! [SEP]"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Kind:
    """One kind of encoder: how the name of its class in transformers begins, the ``sizes`` and the
    ``extra`` fields of its config, and the modules behind the transformer. ``ends``: its tokenizer
    is that of a decoder, which ends a text with [SEP]."""

    name: str
    extra: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)
    ends: bool = False
    pooling: str = "mean"
    dense: tuple[int, ...] = ()
    normalize: bool = False
    template: str = ""


EMBEDDERS = {
    "RoBERTa and its kin": Kind("Roberta", {"max_position_embeddings": LENGTH + 1}),
    "ModernBERT": Kind("ModernBert", {"local_attention": 16}, pooling="cls"),
    "Nomic": Kind("NomicBert"),
    "GTE": Kind("Gte", pooling="cls", normalize=True),
    "Jina 3": Kind("JinaEmbeddingsV3", normalize=True),
    "EuroBERT": Kind("EuroBert", GROUPED),
    "Qwen3-Embedding": Kind("Qwen3", DECODER, ends=True, pooling="lasttoken", normalize=True),
    "GTE-Qwen2": Kind(
        "Qwen2", GROUPED | {"is_causal": False}, ends=True, pooling="lasttoken", normalize=True
    ),
    "E5-Mistral": Kind("Mistral", GROUPED, ends=True, pooling="lasttoken"),
    "EmbeddingGemma": Kind(
        "Gemma3Text",
        DECODER | {"use_bidirectional_attention": True, "sliding_window": 16},
        ends=True,
        dense=(48, 24),
        normalize=True,
    ),
    "Decoders with a chat template": Kind(
        "Qwen3", DECODER, ends=True, pooling="lasttoken", template=TURNS_TEMPLATE
    ),
}
# Encoders with learnt positions. Those of RoBERTa's kin begin behind the padding id.
POSITIONED = {
    **{
        name: Kind(name)
        for name in (
            *("Bert", "Electra", "Albert", "DistilBert", "MobileBert", "Ernie", "DebertaV2"),
            *("Nystromformer", "Roberta", "XLMRoberta", "Camembert", "MPNet", "Data2VecText"),
            *("RobertaPreLayerNorm", "XLMRobertaXL", "IBert", "Esm", "Luke"),
        )
    },
    "Xmod": Kind("Xmod", {"languages": ["en_XX"], "default_language": "en_XX"}),
    "Longformer": Kind("Longformer", {"attention_window": 8}),
}
CLASSIFIERS = {
    "ModernBERT rerankers": Kind("ModernBert", {"local_attention": 16}),
    "GTE rerankers": Kind("Gte"),
    "Qwen3-Reranker, converted": Kind("Qwen3", DECODER, ends=True),
}
GENERATORS = {
    "Qwen3-Reranker": Kind("Qwen3", DECODER, ends=True, template=PAIRS_TEMPLATE),
    "Rerankers without a template": Kind("Qwen3", DECODER, ends=True),
    "Rerankers with learnt positions": Kind("GPT2", sizes=GPT2, ends=True),
}


def _tokenizer(kind: Kind) -> Any:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    words = words_tokenizer(600)
    names: dict[str, Any] = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    if kind.ends:
        words.post_processor = processors.TemplateProcessing(
            single="$A [SEP]",
            pair="$A $B [SEP]",
            special_tokens=[("[SEP]", words.token_to_id("[SEP]"))],
        )
        names = {"eos_token": "[SEP]", "padding_side": "left"}
    made = PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=LENGTH,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "attention_mask"],
        **names,
    )
    if kind.template:
        made.chat_template = kind.template
    return made


def write(out: Path, kind: Kind, ending: str, **more: Any) -> Path:
    """Write the transformer of a kind with its tokenizer, by transformers' class whose name ends
    with ``ending``."""
    import torch
    import transformers

    config = getattr(transformers, f"{kind.name}Config")(**kind.sizes | kind.extra | more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind.name}{ending}")(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)  # wide enough that different texts have different values
    model.save_pretrained(str(out))
    _tokenizer(kind).save_pretrained(str(out))
    return out


def write_embedder(out: Path, kind: Kind) -> Path:
    """Write an embedding model of a kind."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    with tempfile.TemporaryDirectory() as base:
        write(Path(base), kind, "Model")
        width = kind.sizes["hidden_size"]
        modules: list[Any] = [Transformer(base), Pooling(width, kind.pooling)]
        for next_width in kind.dense:
            identity = torch.nn.Identity()
            modules.append(Dense(width, next_width, bias=False, activation_function=identity))
            width = next_width
        modules += [Normalize()] if kind.normalize else []
        model = SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu")
        model.save(str(out), create_model_card=False)
    return out


def write_generator(out: Path, kind: Kind) -> Path:
    """Write a reranker whose score is what the next token's logits say of two words."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    with tempfile.TemporaryDirectory() as base:
        write(Path(base), kind, "LMHeadModel" if kind.name == "GPT2" else "ForCausalLM")
        chat = {"chat_template": {"add_generation_prompt": True}}
        settings = {"processing_kwargs": chat} if kind.template else {}
        modules = [
            Transformer(base, transformer_task="text-generation", **settings),
            LogitScore(true_token_id=20, false_token_id=21),
        ]
        model = CrossEncoder(
            modules=modules,
            device="cpu",
            prompts={"web": "find the answer"},
            default_prompt_name="web",
        )
        model.save_pretrained(str(out))
    return out


def edit_json(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_config(directory: Path, **fields: Any) -> None:
    """Set fields of a model's config."""
    edit_json(directory / "config.json", **fields)
