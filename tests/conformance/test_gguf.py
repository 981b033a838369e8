"""GGUF files are read as llama.cpp means them: types, names, orders, norms, tokens, templates."""

import re
import struct
from mmap import ACCESS_READ, mmap
from random import Random
from threading import Barrier

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.gguf import reader

from engine.errors import SpawnFailed
from engine.worker.forward import native
from engine.worker.forward.decoder import NativeDecoder
from engine.worker.interface import RunnerSpec
from engine.worker.load.generation_config import read_generation
from engine.worker.load.gguf import file as gguf_file
from engine.worker.load.gguf import header
from engine.worker.load.gguf.file import GgufFile
from engine.worker.load.gguf.header import read_header
from engine.worker.load.gguf.models import LLAMA3_ROPE, MODELS
from engine.worker.load.gguf.vocabulary import STRING_LISTS, TOKENS
from engine.worker.load.loader import read_config
from engine.worker.load.refusal import Refusal
from engine.worker.quantized.gguf_blocks import BLOCK_TYPES, OTHER_TYPES, decode
from engine.worker.skeleton.config import SkeletonConfig
from engine.worker.text import files as model_files
from engine.worker.text import placed_model
from engine.worker.text import runner as text_runner
from engine.worker.text.files import open_files
from engine.worker.text.runner import TorchRunner
from tests.checkpoints.text import PRESETS, Shape, make
from tests.conformance.test_rewrites import (
    Built,
    check_rounded_alike,
    distance,
    round_inputs,
)
from tests.support.gguf_files import (
    ALIGNMENT,
    ENDS,
    F16,
    F32,
    HALVES,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_K,
    Q6_K,
    Q8_0,
    write_file,
    write_model,
)
from tests.support.model_zoo import LLAMA3_ROPE as ZOO_ROPE
from tests.support.model_zoo import load_runner
from tools.lab.measure_quantization import PIECE, STORIES, Model, compare, story_text

ALL_SLIDING = ["sliding_attention"] * 3  # Gemma 3's layer_types for three layers
FULL = ["full_attention"] * 5
# transformers' model types by llama.cpp's, and further fields of the config.
WRITTEN = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3_moe", {}),
    "phi3": ("phi3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"layer_types": ALL_SLIDING}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "qwen2moe": ("qwen2_moe", {"moe_intermediate_size": 64}),
    "gpt-oss": ("gpt_oss", {"swiglu_limit": 7.0}),
    "smollm3": (
        "smollm3",
        {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1], "layer_types": FULL},
    ),
    "mistral3": ("ministral3", {}),
    "lfm2": ("lfm2", {}),
    "lfm2, biases": ("lfm2", {"conv_bias": True}),
    "llama, untied, biases": (
        "llama",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return a function that makes a checkpoint at its first use."""
    made = {}

    def checkpoint(name):
        if name not in made:
            arch, extra = WRITTEN[name]
            made[name] = make(tmp_path_factory.mktemp("made"), arch, extra=extra)
        return made[name]

    return checkpoint


def load_gguf(path, dtype="float32", **fields):
    return load_runner(path, dtype=dtype, **fields)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']"),
        PermissionError(13, "Permission denied", "/tmp/triolet-gguf-1"),
        OSError(28, "No space left on device", "/tmp/triolet-gguf-1"),
        OSError(30, "Read-only file system"),
    ],
)
@pytest.mark.parametrize("at", ["made", "written"])
def test_without_a_writable_temporary_folder_the_sentence_says_so(
    checkpoints, tmp_path, monkeypatch, error, at
):
    def fail(*_args, **_fields):
        raise error

    path = write_model(checkpoints("llama"), tmp_path / "model.gguf")
    if at == "made":
        monkeypatch.setattr(model_files, "TemporaryDirectory", fail)
    else:
        monkeypatch.setattr(GgufFile, "write_config", fail)
    with pytest.raises(SpawnFailed) as failed:
        load_gguf(path)
    said = (
        f"needs a temporary folder, and none can be written: {error.strerror}; name one in TMPDIR"
    )
    assert said in str(failed.value)


def greedy(runner, info, length=8):
    from tests.support.mini_planner import MiniPlanner

    planner = MiniPlanner(runner, info, seed=1, chunks=500)
    planner.add(list(range(5, 45)), length)
    return planner.run()


def test_every_architecture_that_is_read_is_tested():
    assert {name.partition(",")[0] for name in WRITTEN} == set(MODELS)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_of_floats_is_the_checkpoint_that_it_was_made_from(checkpoints, tmp_path, name):
    """Red if the rows of queries stay in llama.cpp's order, if the 1 stays added to Gemma's norms,
    or if norms are swapped."""
    checkpoint = checkpoints(name)
    path = write_model(checkpoint, tmp_path / "model.gguf")
    with GgufFile(path) as file:
        file.write_config(tmp_path)
        read = {one: file.read(one) for one in file.tensors}
    stock = Built(checkpoint, torch.float32, is_stock=False)
    ours = Built(tmp_path, torch.float32, is_stock=False, weights=GgufFile(path))
    assert len(read) >= 20
    assert isinstance(read_config(tmp_path)[1], SkeletonConfig)
    assert isinstance(ours.execution.model.module, NativeDecoder)
    assert distance(ours.logits(), stock.logits()) < (1e-5 if "gemma" in name else 1e-9)


@pytest.mark.parametrize("name", ["llama", "granite"])
def test_heads_that_are_not_turned_back_give_other_logits(checkpoints, tmp_path, monkeypatch, name):
    """The test above fails if queries' rows are left in llama.cpp's order."""
    path = write_model(checkpoints(name), tmp_path / "model.gguf")
    with GgufFile(path) as file:
        file.write_config(tmp_path)
    stock = Built(checkpoints(name), torch.float32, is_stock=False)
    monkeypatch.setattr(gguf_file, "row_order", lambda *_: None)
    ours = Built(tmp_path, torch.float32, is_stock=False, weights=GgufFile(path))
    assert distance(ours.logits(), stock.logits()) > 0.01


@pytest.mark.parametrize("library", [native.load(), None], ids=["kernels", "none"])
@pytest.mark.parametrize("name", ["llama", "lfm2", "qwen3moe"])
def test_a_header_is_read_as_transformers_reads_it(checkpoints, tmp_path, name, library):
    """Red if sizes are not reversed, a list's type is ignored, or tensors' offsets count from
    another place."""
    more = {"a.flag": True, "a.text": "größer", "a.half": 0.5, "a.flags": [1, 2, 3]}
    path = write_model(checkpoints(name), tmp_path / "model.gguf", Q8_0, metadata=more)
    theirs, names = reader.read_gguf_metadata(str(path), STRING_LISTS)
    entries = reader.GgufHeader.from_file(str(path))
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as blob:
        ours = read_header(blob, STRING_LISTS, library)
        without_texts = read_header(blob, (), library)
    assert ours.metadata == theirs
    assert tuple(entry.name for entry in ours.tensors) == names
    assert [(e.name, e.shape, e.kind, e.offset) for e in ours.tensors] == [
        (e.name, e.shape, e.ggml_type, e.offset) for e in entries.tensors
    ]
    assert -(-ours.end // 32) * 32 == entries.data_start
    assert without_texts.tensors == ours.tensors
    assert without_texts.metadata[TOKENS] == len(theirs[TOKENS])


TEXTS = {
    "of all lengths": ["", "a", "größer", "▁日本", "x" * 300, "\n", " "],
    "one that is empty": [""],
    "with the byte that ends them elsewhere": ["a\0b", "\0", "c"],
}


@pytest.mark.parametrize("texts", TEXTS.values(), ids=TEXTS)
def test_texts_are_read_with_and_without_the_kernels_alike(tmp_path, texts):
    write_file(tmp_path / "m", {"general.architecture": "a", TOKENS: texts, "behind": 7}, {})
    with (tmp_path / "m").open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as blob:
        for library in (native.load(), None):
            for lists in (STRING_LISTS, ()):
                found = read_header(blob, lists, library).metadata
                assert found[TOKENS] == (texts if lists else len(texts))
                assert found["behind"] == 7


@pytest.mark.parametrize("library", [native.load(), None], ids=["kernels", "none"])
@pytest.mark.parametrize("count", [100, 1 << 30, 1 << 62, (1 << 64) - 1])
def test_a_list_of_more_texts_than_the_file_has_is_damaged(tmp_path, count, library):
    write_file(tmp_path / "m", {"general.architecture": "a", TOKENS: ["a", "b", "c"]}, {})
    data = (tmp_path / "m").read_bytes()
    at = data.index(TOKENS.encode()) + len(TOKENS) + 8
    assert data[at : at + 8] == (3).to_bytes(8, "little")
    (tmp_path / "m").write_bytes(data[:at] + count.to_bytes(8, "little") + data[at + 8 :])
    with (tmp_path / "m").open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as blob:
        for lists in (STRING_LISTS, ()):
            with pytest.raises((header.Damaged, struct.error)):
                read_header(blob, lists, library)


@pytest.mark.parametrize("library", [native.load(), None], ids=["kernels", "none"])
def test_a_header_that_is_cut_or_altered_anywhere_is_refused_or_read(
    checkpoints, tmp_path, monkeypatch, library
):
    """No changed byte of a header makes the reader raise anything but a refusal, or take long."""
    monkeypatch.setattr(gguf_file, "_kernels", lambda: library)
    path = write_model(checkpoints("llama"), tmp_path / "model.gguf", Q8_0)
    whole = path.read_bytes()
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as blob:
        end = read_header(blob, STRING_LISTS).end
    draw, refused = Random(59), 0
    for _ in range(300):
        place = draw.randrange(end)
        altered = bytearray(whole)
        altered[place : place + 4] = draw.randbytes(4)
        path.write_bytes(draw.choice((altered, whole[:place])))
        try:
            with GgufFile(path) as file:
                file.config()
                file.vocabulary()
        except Refusal:
            refused += 1
    assert refused > 150


def place_of(path, name):
    """Return where a file's header has the offset of a tensor, and the type before it."""
    head = path.read_bytes()
    text = struct.pack("<Q", len(name)) + name.encode()
    place = head.index(text) + len(text)
    (dimensions,) = struct.unpack_from("<I", head, place)
    return place + 4 + 8 * dimensions + 4


def moved(path, name, by):
    """Add to the offset of a tensor of a file."""
    whole, place = bytearray(path.read_bytes()), place_of(path, name)
    (offset,) = struct.unpack_from("<Q", whole, place)
    struct.pack_into("<Q", whole, place, offset + by)
    path.write_bytes(whole)


@pytest.mark.parametrize("by", [1, 2, 3, -31])
@pytest.mark.parametrize(
    "name", ["blk.1.attn_norm.weight", "blk.1.attn_q.weight", "blk.1.ffn_up.weight"]
)
def test_numbers_that_begin_between_two_numbers_are_refused_by_their_tensors_name(
    checkpoints, tmp_path, name, by
):
    """Numbers of F32 begin at multiples of four bytes, and those of F16 at multiples of two. Blocks
    may begin anywhere."""
    types = {"ffn_up.weight": Q8_0}
    path = write_model(checkpoints("llama"), tmp_path / "model.gguf", F16, types=types)
    moved(path, name, by)
    if "ffn" in name or by % (4 if "norm" in name else 2) == 0:
        with GgufFile(path) as file:
            assert all(len(file.read(one)) for one in file.tensors)
        return
    with pytest.raises(SpawnFailed, match=f"model.gguf is damaged: its tensor {name} begins at"):
        load_gguf(path)


@pytest.mark.parametrize("alignment", [1, 2, 7])
def test_a_file_of_another_alignment_is_read_or_refused_by_a_tensors_name(
    checkpoints, tmp_path, alignment
):
    """The data begin behind the header, at the next multiple of the alignment."""
    plain = write_model(checkpoints("llama"), tmp_path / "plain.gguf", Q8_0)
    with GgufFile(plain) as file:
        wanted = {name: file.read(name).clone() for name in file.tensors}
    refused = []
    for length in range(8):  # of a text in the header, so that the header ends anywhere
        told = {"general.alignment": alignment, "general.name": "x" * length}
        path = write_model(checkpoints("llama"), tmp_path / "model.gguf", Q8_0, metadata=told)
        whole = path.read_bytes()
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as blob:
            end = read_header(blob, ()).end
        path.write_bytes(
            whole[:end] + bytes(-end % alignment) + whole[-(-end // ALIGNMENT) * ALIGNMENT :]
        )
        try:
            with GgufFile(path) as file:
                own = {name: file.read(name) for name in file.tensors}
        except Refusal as refusal:
            refused.append(str(refusal))
            continue
        assert all(torch.equal(own[name], tensor) for name, tensor in wanted.items())
    assert 0 < len(refused) < 8
    assert all(re.search(r"damaged: its tensor \S+ begins at byte", one) for one in refused)


def test_tensors_whose_types_and_offsets_are_altered_are_refused_or_read(checkpoints, tmp_path):
    """No type, offset or alignment makes the reader raise anything but a refusal, or read what is
    not in the file."""
    types = {"attn_q.weight": F16, "ffn_up.weight": Q4_0}
    path = write_model(checkpoints("llama"), tmp_path / "model.gguf", Q8_0, types=types)
    whole = path.read_bytes()
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as blob:
        entries = read_header(blob, ()).tensors
    draw, refused = Random(60), 0
    for _ in range(300):
        altered, entry = bytearray(whole), draw.choice(entries)
        place = place_of(path, entry.name)
        kind = draw.choice((entry.kind, F32, F16, *BLOCK_TYPES))
        offset = draw.choice((entry.offset, draw.randrange(len(whole)), 1 << draw.randrange(64)))
        struct.pack_into("<IQ", altered, place - 4, kind, offset)
        other = tmp_path / "altered.gguf"
        other.write_bytes(altered)
        try:
            with GgufFile(other) as file:
                file.config()
                assert all(len(file.read(name)) for name in file.tensors)
        except Refusal:
            refused += 1
    assert 100 < refused < 300


@pytest.mark.parametrize("kind", [Q4_0, Q8_0, IQ4_NL, MXFP4], ids=lambda kind: BLOCK_TYPES[kind][0])
@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3moe", "qwen2moe", "phi3", "llama, untied, biases", "lfm2"]
)
def test_a_file_of_blocks_computes_what_torch_does_with_the_same_roundings(
    checkpoints, tmp_path, name, kind
):
    path = write_model(checkpoints(name), tmp_path / "model.gguf", kind)
    with GgufFile(path) as file:
        file.write_config(tmp_path)
        assert file.quantization == ", ".join(sorted({BLOCK_TYPES[kind][0], "Q8_0"}))
    small = Built(tmp_path, torch.float32, is_stock=False, weights=GgufFile(path))
    exact = Built(
        tmp_path, torch.float32, is_stock=True, weights=GgufFile(path), is_rounding_inputs=True
    )
    check_rounded_alike(small, exact)


# By a file's type, the layers whose inputs are rounded in blocks of 16: groups have as many.
FINER = ("v_proj", "down_proj", "lm_head")  # Q6_K
IN_BLOCKS_OF_16 = {
    Q2_K: ("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj"),
    Q3_K: ("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", *FINER),
    Q4_K: FINER,
    IQ4_XS: FINER,
}
# How far the weights of a type may be from the floats.
NEAR = {Q2_K: 0.4, Q3_K: 0.2, Q4_K: 0.09, IQ4_XS: 0.09, Q6_K: 0.03}


@pytest.mark.parametrize("kind", IN_BLOCKS_OF_16, ids=lambda kind: BLOCK_TYPES[kind][0])
def test_a_mixed_file_computes_what_torch_does_with_the_same_roundings(tmp_path, kind):
    """In a Q4_K_M file, value projections, down projections and the embedding are Q6_K, so that the
    joint product of queries, keys and values has parts. Weights are near the floats."""
    checkpoint = make(tmp_path / "made", "llama", Shape(2, 256, 4, 2, 512, 500, 256))
    path = write_model(checkpoint, tmp_path / "model.gguf", kind)
    with GgufFile(path) as file:
        file.write_config(tmp_path)
        kinds = {one.split(".", 3)[-1]: stored.dtype for one, stored in file.tensors.items()}
        assert kinds["self_attn.q_proj.weight"] == BLOCK_TYPES[kind][0]
        assert kinds["self_attn.v_proj.weight"] == BLOCK_TYPES[ENDS[kind]][0]
        assert kinds["mlp.down_proj.weight"] == BLOCK_TYPES[ENDS[kind]][0]
        for one, weight in load_file(checkpoint / "model.safetensors").items():
            own = next((k for k in NEAR if BLOCK_TYPES[k][0] == file.tensors[one].dtype), None)
            limit = NEAR.get(own, 1e-9)
            assert distance(file.read(one), weight) <= limit
    small = Built(tmp_path, torch.float32, is_stock=False, weights=GgufFile(path))
    exact = Built(tmp_path, torch.float32, is_stock=True, weights=GgufFile(path))
    round_inputs(exact.execution.model.module, IN_BLOCKS_OF_16[kind])
    check_rounded_alike(small, exact)


@pytest.mark.parametrize(
    "types",
    [
        {"attn_q.weight": Q8_0, "attn_k.weight": Q6_K, "attn_v.weight": F32},
        {"ffn_gate.weight": Q6_K},
        {"ffn_up.weight": F32, "ffn_down.weight": Q3_K},
    ],
    ids=", ".join,
)
def test_every_tensor_may_have_a_type_of_its_own(tmp_path, types):
    """Red if a part of queries, keys and values begins at a wrong output, if gates are in the place
    of ups, or if rows are rounded as another part needs them."""
    checkpoint = make(tmp_path / "made", "llama", Shape(2, 256, 4, 2, 512, 500, 256))
    types = types | {"token_embd.weight": Q4_K}
    path = write_model(checkpoint, tmp_path / "model.gguf", Q4_0, types=types)
    with GgufFile(path) as file:
        file.write_config(tmp_path)
    small = Built(tmp_path, torch.float32, is_stock=False, weights=GgufFile(path))
    exact = Built(tmp_path, torch.float32, is_stock=True, weights=GgufFile(path))
    names = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "ffn_gate": "gate_proj",
             "ffn_up": "up_proj", "ffn_down": "down_proj"}  # fmt: skip
    own = {names[one.partition(".")[0]]: kind for one, kind in types.items() if "embd" not in one}
    finer = tuple(name for name, kind in own.items() if kind in (Q3_K, Q6_K))
    floats = tuple(name for name, kind in own.items() if kind == F32)
    round_inputs(exact.execution.model.module, finer, floats)
    check_rounded_alike(small, exact)


@pytest.mark.parametrize(
    "kind", [Q2_K, Q3_K, Q4_0, Q4_K, Q8_0], ids=lambda kind: BLOCK_TYPES[kind][0]
)
@pytest.mark.parametrize("types", [{}, {"attn_k.weight": Q8_0, "ffn_up.weight": Q6_K}], ids=len)
def test_a_token_reads_the_bytes_of_its_file(tmp_path, kind, types):
    """A token reads every packed weight, norm and bias once. Red if a tensor is widened because
    another one beside it has more bits."""
    shape = Shape(layers=2, hidden=512, heads=8, kv_heads=4, mlp=1024, vocab=2048)
    checkpoint = make(tmp_path / "made", "llama", shape)
    path = write_model(checkpoint, tmp_path / "model.gguf", kind, types=types)
    with GgufFile(path) as file:
        file.write_config(tmp_path)
        stored = sum(tensor.num_bytes for tensor in file.tensors.values())
    built = Built(tmp_path, torch.float32, is_stock=False, weights=GgufFile(path))
    module = built.execution.model.module
    read = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    assert 0.99 * stored <= read <= 1.03 * stored


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["the story model's", "random"])
def test_rounding_here_costs_no_more_than_llama_cpps_own_types(tmp_path, weights):
    """The KL divergence is compared over text that the model was not trained on."""
    shape = Shape(layers=4, hidden=256, mlp=512)
    source = STORIES if weights != "random" else make(tmp_path / "random", "llama", shape)
    found = {}
    stock = Model(str(source), "float32", "none", is_stock=True)
    tokens = stock.tokens_of(story_text())
    pieces = [tokens[start : start + PIECE] for start in range(0, 4 * PIECE, PIECE)]
    exact = [stock.logits(piece) for piece in pieces]
    for kind, name in ((Q8_0, "Q8_0"), (Q4_0, "Q4_0")):
        found[name] = (str(write_model(source, tmp_path / f"{name}.gguf", kind)), "none")
    found |= {name: (str(source), name) for name in ("int8", "int4")}
    for name, (model, quantization) in found.items():
        rounded = Model(model, "float32", quantization, is_stock=False)
        logits = [rounded.logits(piece) for piece in pieces]
        found[name] = compare(logits, exact, pieces)["mean_kl_nats"]
        print(f"{weights} weights, {name}: {found[name]:.6f} nats")
        rounded.close()
    stock.close()
    assert found["int8"] <= 1.05 * found["Q8_0"]
    assert found["int4"] <= found["Q4_0"]
    if weights != "random":  # rounding changes a model with random weights far more
        assert 1.05 * found["Q8_0"] <= 0.001
        assert found["Q4_0"] <= 0.1


def test_without_kernels_a_file_of_blocks_gives_the_tokens_of_the_expanded_model(
    checkpoints, tmp_path, monkeypatch
):
    path = write_model(checkpoints("llama"), tmp_path / "model.gguf", Q4_0)
    expanded = tmp_path / "expanded"
    expanded.mkdir()
    with GgufFile(path) as file:
        file.write_config(expanded)
        save_file(
            {one: file.read(one).contiguous() for one in file.tensors},
            expanded / "model.safetensors",
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (expanded / name).write_bytes((checkpoints("llama") / name).read_bytes())
    monkeypatch.setenv("ENGINE_KERNELS", "off")
    assert greedy(*load_gguf(path)) == greedy(*load_gguf(expanded))


def test_a_file_is_served_by_its_path_alone(checkpoints, tmp_path):
    """The file's tokenizer, template and end tokens are used. Its directory works, too."""
    checkpoint = checkpoints("llama")
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    path = write_model(
        checkpoint,
        tmp_path / "tiny-Q4_0.gguf",
        Q4_0,
        metadata={
            "tokenizer.chat_template": template,
            "tokenizer.ggml.bos_token_id": 5,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.eot_token_id": 7,
        },
    )
    runner, info = load_gguf(path)
    assert info.eos_token_ids == {0, 7}
    assert info.quantization == "Q4_0, Q8_0"
    stock, _ = load_runner(checkpoint)
    text = "Once upon a time, 12 dogs sat by the fire."
    wanted = stock.tokenizer.encode(text)
    assert runner.tokenizer.encode(text) == (5, *wanted)
    assert runner.tokenizer.encode(text, add_special_tokens=False) == wanted
    assert runner.tokenizer.decode(wanted) == stock.tokenizer.decode(wanted)
    assert runner.tokenizer.chat_template(has_tools=False)
    estimate = TorchRunner(RunnerSpec(str(tmp_path), kv_bytes=1 << 24, dtype="float32", threads=1))
    assert 0.5 * info.memory_bytes <= estimate.estimate().num_bytes <= 2 * info.memory_bytes


def test_a_distilled_files_markers_and_ends_are_ids_of_the_file(checkpoints, tmp_path):
    """The file has markers whose letters stand for no byte, a turn's end that is stored as a plain
    token, and a begin token that only the pre-tokenizer's name asks for."""
    checkpoint = checkpoints("llama")
    path = write_model(checkpoint, tmp_path / "model.gguf")
    with GgufFile(path) as file:
        tokens = list(file.metadata[TOKENS])
    kinds = [1] * len(tokens)
    markers = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<|im_end|>", "<｜User｜>")
    places = [tokens.index(letter) for letter in "ĀāĂă"]  # tokens in no merge
    for place, marker, kind in zip(places, markers, (3, 3, 1, 4), strict=True):
        tokens[place], kinds[place] = marker, kind
    write_model(
        checkpoint,
        path,
        metadata={
            TOKENS: tokens,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.bos_token_id": places[0],
            "tokenizer.ggml.eos_token_id": places[1],
        },
    )
    runner, info = load_gguf(path)
    assert info.eos_token_ids >= {places[1], places[2]}
    assert runner.tokenizer.vocab_size == len(tokens)
    text = "".join(markers)
    assert list(runner.tokenizer.encode(text)) == [places[0], *places]
    assert runner.tokenizer.decode(places, skip_special_tokens=False) == text


def test_more_tokens_than_rows_of_the_embedding_are_refused(checkpoints, tmp_path):
    checkpoint = checkpoints("llama")
    path = write_model(checkpoint, tmp_path / "model.gguf")
    with GgufFile(path) as file:
        tokens = file.metadata[TOKENS]
    more = {TOKENS: [*tokens, "[PAD]"], "tokenizer.ggml.token_type": [1] * (len(tokens) + 1)}
    write_model(checkpoint, path, metadata=more)
    with pytest.raises(SpawnFailed, match=f"{len(tokens) + 1} tokens, .* {len(tokens)} rows"):
        load_gguf(path)


def test_llama_3s_rotary_factors_become_its_settings(tmp_path):
    rope = ZOO_ROPE | {"factor": 8.0, "original_max_position_embeddings": 8192}
    checkpoint = make(tmp_path / "made", "llama", extra={"rope_parameters": rope})
    width = PRESETS["tiny"].head_dim
    waves = 2 * np.pi * 10000.0 ** (np.arange(0, width, 2) / width)
    smooth = np.clip((8192 / waves - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    for scale in (1.0, 1.01):
        path = write_model(
            checkpoint, tmp_path / "model.gguf", tensors={"rope_freqs.weight": factors * scale}
        )
        with GgufFile(path) as file:
            if scale == 1.0:
                assert file.config()["rope_parameters"] == {
                    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, **LLAMA3_ROPE,
                }  # fmt: skip
                continue
            with pytest.raises(Exception, match="not those of Llama 3"):
                file.config()
    whole, place = bytearray(path.read_bytes()), place_of(path, "rope_freqs.weight") - 4
    struct.pack_into("<I", whole, place, F16)
    path.write_bytes(whole)
    with pytest.raises(Refusal, match=r"rope_freqs.weight has the type F16, and F32 is read"):
        GgufFile(path).__enter__()


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_are_decoded_as_ggufs_own_package_does(kind):
    """Random bytes are decoded equally, bit for bit, so that any wrong order of bits shows."""
    gguf = pytest.importorskip("gguf")
    _, block = BLOCK_TYPES[kind]
    rng = np.random.default_rng(kind)
    raw = rng.integers(0, 256, (400, 3 * block.num_bytes), dtype=np.uint8)
    blocks = raw.reshape(-1, block.num_bytes)
    for place in HALVES[kind]:
        halves = rng.normal(0, 0.1, (len(blocks), 1)).astype(np.float16)
        blocks[:, place : place + 2] = halves.view(np.uint8)
    with np.errstate(over="ignore"):  # powers of two that are near float32's largest
        wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))
    small = decode(torch.from_numpy(raw), block)
    assert torch.equal(small.expand(), torch.from_numpy(wanted))
    assert small.bits == block.form.bits
    assert (small.offsets is not None) == block.form.has_offsets
    order = torch.randperm(400)
    assert torch.equal(decode(torch.from_numpy(raw), block, order).expand(), small.expand()[order])


def broken(path, what):
    """Damage a whole GGUF file, or replace it by one with an unserved type."""
    data = path.read_bytes()
    if what == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif what == "header":
        path.write_bytes(data[:100])
    else:
        kind = next(k for k, name in OTHER_TYPES.items() if name == "IQ2_XS")
        vector = (F32, (64,), bytes(256))
        write_file(
            path,
            {"general.architecture": "llama"},
            {"blk.0.attn_norm.weight": vector, "blk.0.attn_q.weight": (kind, (64, 256), bytes(9))},
        )


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("cut", "is cut short: it ends before its tensor"),
        ("header", "is not a GGUF file that can be read"),
        (
            "type",
            "its tensor blk.0.attn_q.weight has the type IQ2_XS, which is not read; download the "
            "model's Q2_K file instead, or another of F32, F16, BF16, Q4_0,",
        ),
    ],
)
def test_a_damaged_or_unknown_file_is_refused_by_what_is_wrong(checkpoints, tmp_path, what, why):
    path = write_model(checkpoints("llama"), tmp_path / "model.gguf", F16)
    broken(path, what)
    with pytest.raises(SpawnFailed, match=why):
        load_gguf(path)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"split.count": 2}, r"model.gguf is one of 2 parts .* ends in -00001-of-00002\.gguf"),
        ({"general.alignment": 0}, "is not a GGUF file that can be read"),
        ({"general.architecture": "mamba"}, "architecture 'mamba' are not read"),
        ({"llama.rope.scaling.type": "longrope"}, "rotary embedding is of type 'longrope'"),
        ({"llama.rope.dimension_count": 8}, "turns 8 of 16 numbers"),
        ({"llama.attention.head_count_kv": [2, 2, 1]}, "layers differ in attention.head_count_kv"),
        (
            {"tokenizer.ggml.model": "none"},
            r"no tokenizer that is read \(tokenizer.ggml.model is 'none'",
        ),
    ],
)
def test_what_a_file_has_and_is_not_understood_is_named(checkpoints, tmp_path, metadata, why):
    path = write_model(checkpoints("llama"), tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(SpawnFailed, match=why):
        load_gguf(path)


def test_the_texts_of_a_vocabulary_are_read_once(checkpoints, tmp_path, monkeypatch):
    """The vocabulary's texts take most of the time in which a file's metadata are read."""
    path, read = write_model(checkpoints("llama"), tmp_path / "model.gguf"), []
    texts = header.TextLists.read

    def note(self, place, count):
        read.append(place)
        return texts(self, place, count)

    monkeypatch.setattr(header.TextLists, "read", note)
    with open_files(str(path), "", with_tokenizer=True) as files, files.open_weights() as weights:
        assert weights.tensors
    assert len(read) == len(set(read)) == len(STRING_LISTS)
    with open_files(str(path), "", with_tokenizer=False) as files, files.open_weights() as weights:
        assert weights.tensors
    assert len(read) == len(STRING_LISTS)


def test_the_progress_of_a_load_counts_each_byte_once_when_it_is_packed(tmp_path):
    """In blocks or not, tied or not; packing takes most of a load."""
    for is_tied in (True, False):
        shape = Shape(2, 256, 4, 2, 512, 500, 256, is_tied)
        checkpoint = make(tmp_path / f"made{is_tied}", "llama", shape)
        path = write_model(checkpoint, tmp_path / "model.gguf", Q4_K)
        with GgufFile(path) as file:
            whole = sum(tensor.num_bytes for tensor in file.tensors.values())
        assert 0 <= path.stat().st_size - whole < 30_000  # the header
        seen = []
        runner = TorchRunner(RunnerSpec(str(path), kv_bytes=1 << 24, threads=1))
        runner.load(seen.append)
        runner.close()
        done = [stage.bytes_done for stage in seen if stage.phase == "weights"]
        assert done == sorted(done)
        assert done[-1] == whole
        assert len([size for size in done if 0.1 * whole < size < 0.9 * whole]) > 4
        assert seen[0].phase == "config"
        assert seen[-1].phase == "warm-up"


def test_a_tokenizer_is_built_beside_the_first_step(checkpoints, tmp_path, monkeypatch):
    path, both = write_model(checkpoints("llama"), tmp_path / "model.gguf"), Barrier(2)

    def waits(module, name):
        function = getattr(module, name)

        def wait(*args):
            both.wait(60)
            return function(*args)

        monkeypatch.setattr(module, name, wait)

    waits(model_files, "build_tokenizer")
    waits(text_runner, "compute")
    runner, _ = load_gguf(path)
    runner.close()


def test_a_tokenizer_is_built_before_blocks_are_packed_into_memory(
    checkpoints, tmp_path, monkeypatch
):
    """What building takes for a while would come atop the weights."""
    path, order = write_model(checkpoints("llama"), tmp_path / "model.gguf", Q8_0), []

    def notes(module, name):
        function = getattr(module, name)

        def note(*args):
            order.append(name)
            return function(*args)

        monkeypatch.setattr(module, name, note)

    notes(model_files, "build_tokenizer")
    notes(placed_model, "_prepared")
    runner, _ = load_gguf(path, packed_cache="off")
    runner.close()
    assert order == ["build_tokenizer", "_prepared"]


def test_a_tokenizer_that_cannot_be_built_is_named_and_not_the_step(
    checkpoints, tmp_path, monkeypatch
):
    def fail(*_):
        raise SpawnFailed("a tokenizer that cannot be built")

    monkeypatch.setattr(model_files, "build_tokenizer", fail)
    path = write_model(checkpoints("llama"), tmp_path / "model.gguf")
    with pytest.raises(SpawnFailed, match="a tokenizer that cannot be built"):
        load_gguf(path)


def test_a_tokenizer_that_is_not_known_is_refused_before_weights_are_read(checkpoints, tmp_path):
    metadata = {"tokenizer.ggml.pre": "of another time"}
    path, seen = write_model(checkpoints("llama"), tmp_path / "model.gguf", metadata=metadata), []
    runner = TorchRunner(RunnerSpec(str(path), kv_bytes=1 << 24, threads=1))
    with pytest.raises(SpawnFailed, match="'of another time', which is not known"):
        runner.load(seen.append)
    assert [stage.phase for stage in seen] == ["config"]


@pytest.mark.parametrize("value", [[1, 2], ["a"], [[1]], "x"], ids=str)
def test_no_value_of_another_kind_is_unexpected(checkpoints, tmp_path, value):
    """Each key in turn has a value of another kind: the file is refused, or the value is
    ignored."""
    checkpoint, path = checkpoints("llama"), tmp_path / "model.gguf"
    with GgufFile(write_model(checkpoint, path)) as file:
        keys = [*file.metadata, "tokenizer.ggml.eot_token_id", "llama.rope.scaling.factor"]
    refused = 0
    for key in keys:
        write_model(checkpoint, path, metadata={key: value})
        try:
            with open_files(str(path), "", with_tokenizer=True) as files:
                config = read_config(files.source.directory)[1]
                files.tokenizer()
                read_generation(files.source, config)
        except (SpawnFailed, Refusal):
            refused += 1
    assert refused >= 8


def test_a_token_id_that_is_a_list_is_named(checkpoints, tmp_path):
    metadata = {"tokenizer.ggml.eos_token_id": [1, 2]}
    path = write_model(checkpoints("llama"), tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(SpawnFailed, match=r"eos_token_id is \[1, 2\], and must be one token id"):
        load_gguf(path)


def test_a_quantised_file_is_not_rounded_again(checkpoints, tmp_path):
    path = write_model(checkpoints("llama"), tmp_path / "model.gguf", Q4_0)
    with pytest.raises(SpawnFailed, match=r"quantised already .*; leave --quantization out"):
        load_gguf(path, quantization="int4")


def test_a_file_of_floats_may_be_rounded(checkpoints, tmp_path):
    path = write_model(checkpoints("llama"), tmp_path / "model.gguf", F16)
    _, info = load_gguf(path, dtype="bfloat16", quantization="int4")
    assert (info.quantization, info.dtype) == ("int4", "bfloat16")
