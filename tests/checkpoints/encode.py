"""Writes a random-weight encoder: BERT in the format of sentence-transformers, CLIP or SigLIP.

    python -m tests.checkpoints.encode --preset minilm --out DIR
    python -m tests.checkpoints.encode --preset tiny --pooling cls --normalize --out DIR
    python -m tests.checkpoints.encode --preset tiny --rerank --out DIR
    python -m tests.checkpoints.encode --preset tiny --images siglip --out DIR

Rule 1: the same arguments write the same weights; all randomness comes from ``--seed``. Rule 2: the
libraries themselves write the files, so that they are like those of real models.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS = """
the a of to and in that it is was for on are as with his they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out them
then she many some so these would other into has more her two like him see time could no make than
first been its who now people my made over did down only way find use may water long little very
after words called just where most know dog cat bird fish tree river house road story child king
queen ship star moon sun rain snow wind fire stone gold silver query document passage search answer
question red green blue small large old young happy sad
"""
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


# The architectures that embed images, and how the names of their classes in transformers begin.
IMAGE_ARCHS = {"clip": "CLIP", "siglip": "Siglip", "siglip2": "Siglip2"}


@dataclass(frozen=True, slots=True)
class Shape:
    """An encoder's size, by the names of BERT's config."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    mlp: int = 64
    vocab: int = 600
    max_len: int = 64


PRESETS = {
    "tiny": Shape(),
    # sentence-transformers/all-MiniLM-L6-v2, the shape that `python -m tools.lab.bench embed` times
    "minilm": Shape(6, 384, 12, 1536, 30522, 512),
}


def words_tokenizer(vocab: int) -> Any:
    """Return a tokenizer like BERT's, of words and letters, with [CLS] and [SEP]."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-éüß漢"
    pieces = [
        *SPECIAL,
        *dict.fromkeys(WORDS.split()),
        *letters,
        *(f"##{letter}" for letter in letters),
    ]
    pieces = list(dict.fromkeys(pieces))
    pieces += [f"[unused{number}]" for number in range(vocab - len(pieces))]
    ids = {piece: number for number, piece in enumerate(pieces[:vocab])}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    cls, sep = ids["[CLS]"], ids["[SEP]"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", cls), ("[SEP]", sep)],
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def _write_base(out: Path, shape: Shape, seed: int, *, head: str = "Model", **labels: int) -> None:
    """Write the transformer and its tokenizer. ``head`` is the end of the name of BERT's class."""
    import torch
    import transformers
    from transformers import BertConfig, PreTrainedTokenizerFast

    config = BertConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.mlp,
        max_position_embeddings=shape.max_len,
        initializer_range=0.2,  # wide enough that different texts have different values
        **labels,
    )
    torch.manual_seed(seed)
    getattr(transformers, f"Bert{head}")(config).save_pretrained(str(out))
    PreTrainedTokenizerFast(
        tokenizer_object=words_tokenizer(shape.vocab),
        model_max_length=shape.max_len,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(str(out))


def make_embedder(
    out: Path | str,
    shape: Shape = PRESETS["tiny"],
    *,
    pooling: str = "mean",
    normalize: bool = False,
    dense: int | None = None,
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
    include_prompt: bool = True,
    seed: int = 0,
) -> Path:
    """Write an embedding model into ``out`` and return the path. ``dense`` adds a layer of that
    width."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    with tempfile.TemporaryDirectory() as base:
        _write_base(Path(base), shape, seed)
        torch.manual_seed(seed + 1)
        modules: list[Any] = [
            Transformer(base, max_seq_length=shape.max_len),
            Pooling(shape.hidden, pooling, include_prompt=include_prompt),
        ]
        if dense is not None:
            modules.append(Dense(shape.hidden, dense))
        if normalize:
            modules.append(Normalize())
        model = SentenceTransformer(
            modules=modules, prompts=prompts, default_prompt_name=default_prompt, device="cpu"
        )
        model.save(str(out), create_model_card=False)
    return Path(out)


def make_reranker(
    out: Path | str,
    shape: Shape = PRESETS["tiny"],
    *,
    activation: str | None = None,
    seed: int = 0,
) -> Path:
    """Write a cross-encoder into ``out``, in the format of transformers, and return the path.
    ``activation`` is the torch class that its config names."""
    out = Path(out)
    _write_base(out, shape, seed, head="ForSequenceClassification", num_labels=1)
    if activation is not None:
        path = out / "config.json"
        config = json.loads(path.read_text())
        config["sentence_transformers"] = {"activation_fn": activation}
        path.write_text(json.dumps(config))
    return out


def make_sparse_embedder(
    out: Path | str,
    shape: Shape = PRESETS["tiny"],
    *,
    pooling: str = "max",
    activation: str = "relu",
    most: int | None = None,
    prompts: dict[str, str] | None = None,
    seed: int = 0,
) -> Path:
    """Write a SPLADE model into ``out`` and return the path. ``most`` is the model's own number of
    weights."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer

    with tempfile.TemporaryDirectory() as base:
        _write_base(Path(base), shape, seed, head="ForMaskedLM")
        model = SparseEncoder(
            modules=[
                Transformer(base, max_seq_length=shape.max_len, transformer_task="fill-mask"),
                SpladePooling(pooling, activation_function=activation),
            ],
            max_active_dims=most,
            prompts=prompts,
            device="cpu",
        )
        model.save(str(out), create_model_card=False)
    return Path(out)


EXPANSION = {"strategy": "fixed", "attend": False, "length": 16}


def make_multi_vector_embedder(
    out: Path | str,
    shape: Shape = PRESETS["tiny"],
    *,
    width: int = 8,
    settings: dict[str, Any] | None = None,
    skipped: str = "",
    normalize: bool = True,
    more: Sequence[Any] = (),
    similarity: str | None = None,
    prompts: dict[str, str] | None = None,
    seed: int = 0,
) -> Path:
    """Write a ColBERT model into ``out``, as sentence-transformers saves it, and return the path.
    ``settings`` are those of its Transformer, such as query_expansion, ``skipped`` the words of its
    mask, and ``more`` modules at the end."""
    import torch
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    name = "token_embeddings"
    with tempfile.TemporaryDirectory() as base:
        _write_base(Path(base), shape, seed)
        torch.manual_seed(seed + 1)
        identity = torch.nn.Identity()
        projection = {"bias": False, "activation_function": identity, "module_input_name": name}
        modules: list[Any] = [
            Transformer(base, max_seq_length=shape.max_len, **(settings or {})),
            Dense(shape.hidden, width, **projection),
            MultiVectorMask(skiplist_words=list(skipped)),
        ]
        modules += [Normalize(module_input_name=name)] if normalize else []
        model = MultiVectorEncoder(
            modules=[*modules, *more],
            prompts=prompts,
            similarity_fn_name=similarity,
            device="cpu",
        )
        model.save(str(out), create_model_card=False)
    return Path(out)


def make_pylate(out: Path | str, **config: Any) -> Path:
    """Write a ColBERT model as PyLate 1 saves it: a Transformer, its own Dense, and the rest in
    ``config``."""
    out = make_multi_vector_embedder(out, normalize=False)
    types = "sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"
    modules = json.loads((out / "modules.json").read_text())[:2]
    for module, kind in zip(modules, types, strict=True):
        module["type"] = kind
    (out / "modules.json").write_text(json.dumps(modules))
    own = out / "config_sentence_transformers.json"
    told = {"model_type": "ColBERT", "query_prefix": "[MASK] ", "document_prefix": "[UNK] "}
    own.write_text(json.dumps({"prompts": {}, "default_prompt_name": None} | told | config))
    settings = out / "sentence_bert_config.json"
    settings.write_text(json.dumps({"max_seq_length": 63, "do_lower_case": False}))
    return out


def make_stanford(out: Path | str, shape: Shape = PRESETS["tiny"], *, seed: int = 0) -> Path:
    """Write a ColBERT model as its authors publish it: BERT and a projection in one file."""
    import torch
    from safetensors.torch import load_file, save_file

    out = Path(out)
    _write_base(out, shape, seed)
    tensors = load_file(out / "model.safetensors")
    tensors = {f"bert.{name}": tensor for name, tensor in tensors.items() if "pooler" not in name}
    torch.manual_seed(seed + 1)
    tensors["linear.weight"] = torch.randn(8, shape.hidden)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (out / "config.json").write_text(json.dumps(config))
    told = {"query_maxlen": 20, "doc_maxlen": 40, "mask_punctuation": True}
    (out / "artifact.metadata").write_text(json.dumps(told))
    return out


def make_image_embedder(
    out: Path | str,
    arch: str = "clip",
    shape: Shape = PRESETS["tiny"],
    *,
    side: int = 32,
    patch: int = 8,
    seed: int = 0,
) -> Path:
    """Write a model that embeds texts and images into ``out``, in the format of transformers, and
    return the path. ``arch`` is one of `IMAGE_ARCHS`. Images have ``side`` × ``side`` pixels in
    patches of ``patch`` × ``patch``; those of SigLIP 2 have up to 256 patches of 16 × 16."""
    import torch
    import transformers
    from transformers import AutoModel, PreTrainedTokenizerFast

    out = Path(out)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words_tokenizer(shape.vocab),
        model_max_length=shape.max_len,
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="[CLS]",
        eos_token="[SEP]",
        model_input_names=["input_ids", "attention_mask"],
    )
    tower: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.mlp,
    }
    text = tower | {
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_len,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = tower | {"patch_size": patch}
    names = IMAGE_ARCHS[arch]
    square = {"height": side, "width": side}
    settings: dict[str, Any] = {"size": square}
    if arch == "clip":
        settings = {"size": {"shortest_edge": side}, "crop_size": square}
        text["projection_dim"] = vision["projection_dim"] = shape.hidden // 2
    if arch == "siglip2":
        settings = {"patch_size": 16, "max_num_patches": 256}  # its processor takes no others
        vision |= {"patch_size": 16, "num_patches": 16}
    else:
        vision["image_size"] = side
    more = {"projection_dim": shape.hidden // 2} if arch == "clip" else {}
    config = getattr(transformers, f"{names}Config")(text_config=text, vision_config=vision, **more)
    torch.manual_seed(seed)
    model = AutoModel.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)  # wide enough that different inputs have different vectors
    model.save_pretrained(str(out))
    images = getattr(transformers, f"{names}ImageProcessorPil")(**settings)
    getattr(transformers, f"{names}Processor")(
        image_processor=images, tokenizer=tokenizer
    ).save_pretrained(str(out))
    return out


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.checkpoints.encode",
        description=(__doc__ or "").split("\n", 1)[0],
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--rerank", action="store_true")
    parser.add_argument("--images", choices=sorted(IMAGE_ARCHS))
    parser.add_argument("--pooling", default="mean")
    parser.add_argument("--normalize", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shape = PRESETS[args.preset]
    if args.images:
        made = make_image_embedder(args.out, args.images, shape, seed=args.seed)
    elif args.rerank:
        made = make_reranker(args.out, shape, seed=args.seed)
    else:
        made = make_embedder(
            args.out, shape, pooling=args.pooling, normalize=args.normalize, seed=args.seed
        )
    print(made)


if __name__ == "__main__":
    main()
