"""If a file of a model cannot be read, the load fails with the file's name and the system's reason.

The files are found by walking checkpoints, and the patterns of files that are downloaded: a new
kind of file is tested as soon as it has a maker or a pattern.
"""

import shutil
from fnmatch import fnmatchcase
from functools import partial
from pathlib import PurePosixPath

import pytest

from engine.config import EngineConfig, ModelConfig
from engine.errors import SpawnFailed
from engine.status import Capability
from engine.worker.encode import files as encoder_files
from engine.worker.factory import make_runner
from engine.worker.image_generation import pipelines
from engine.worker.load.adapter import measure_adapter, read_adapter
from engine.worker.load.capability import find
from engine.worker.load.checkpoint import Checkpoint
from engine.worker.load.generation_config import read_generation
from engine.worker.load.gguf.file import GgufFile
from engine.worker.load.loader import read_config
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import WANTED_FILES, Source
from engine.worker.text.vision.inputs import read_processor
from engine.worker.tokenizing.tokenizer import load_tokenizer
from tests.checkpoints import encode as encoder
from tests.checkpoints import image_generation as diffusion
from tests.checkpoints import text, vision
from tests.support.adapters import write_by_hand
from tests.support.gguf_files import write_model
from tests.support.unreadable import FAULTS, as_nobody, broken, open_folder, reason

KINDS = ("text", "shards", "gguf", "vision", "encoder", "reranker", "images", "drawing", "adapter")


@pytest.fixture(scope="module")
def models():
    """Return a directory with a model of each kind."""
    with open_folder() as root:
        plain = text.make(root / "text")
        (plain / "generation_config.json").write_text("{}")
        text.make(root / "shards", max_shard_size="200KB")
        (root / "gguf").mkdir()
        write_model(plain, root / "gguf" / "tiny.gguf")
        vision.make(root / "vision")
        encoder.make_embedder(root / "encoder", normalize=True, dense=8)
        encoder.make_reranker(root / "reranker")
        encoder.make_image_embedder(root / "images")
        diffusion.make(root / "drawing")
        write_by_hand(root / "adapter", plain)
        for path in root.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield root


def names_in(directory):
    """Return the names of all files of a directory and of its folders."""
    return sorted(
        str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()
    )


def load(directory):
    """Load the model or the adapter that is in a directory, or raise the refusal."""
    if directory.name == "adapter":
        return read_adapter(str(directory), {}, "lm_head")
    find(str(directory))  # the pool reads the small files first, and ignores this fault
    model = ModelConfig(str(directory))
    return make_runner(model, EngineConfig(models=(model,))).load(lambda _progress: None)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_cannot_be_read_ends_the_load_with_its_reason(models, kind, fault):
    directory = models / kind
    for name in names_in(directory):
        with broken(directory / name, fault), pytest.raises((SpawnFailed, Refusal)) as refused:
            load(directory)
        said = f"its {name} cannot be read ({reason(fault)})"
        assert str(refused.value).removeprefix("Worker spawn failed: ") == said


@pytest.mark.parametrize("fault", FAULTS)
def test_every_file_that_is_downloaded_is_one_that_must_be_readable(models, fault):
    """Libraries ignore an optional file that they cannot read, and would serve without its
    content."""
    for pattern in WANTED_FILES:
        name = pattern.replace("[0-9]", "1").replace("*", "x")
        directory = models / "text"
        with broken(directory / name, fault), pytest.raises(SpawnFailed) as refused:
            load(directory)
        assert str(refused.value).endswith(f"its {name} cannot be read ({reason(fault)})")


def enter(opened):
    """Open weights, and close them."""
    with opened:
        pass


# Each reader is tested alone, since a file may vanish after the first check: its call with a
# directory, that directory's kind, and the files that it reads there.
READERS = {
    "weights": (lambda at: enter(Checkpoint(at)), "text", {"model.safetensors"}),
    "shards": (
        lambda at: enter(Checkpoint(at)),
        "shards",
        {"model.safetensors.index.json", "model-*.safetensors"},
    ),
    "GGUF": (lambda at: enter(GgufFile(at / "tiny.gguf")), "gguf", {"tiny.gguf"}),
    "config": (read_config, "text", {"config.json"}),
    "generation config": (
        lambda at: read_generation(Source(at, "x"), read_config(at)[1]),
        "text",
        {"config.json", "generation_config.json"},
    ),
    "tokenizer": (
        load_tokenizer,
        "vision",
        {"tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja"},
    ),
    "image processor": (
        partial(read_processor, default="smolvlm"),
        "vision",
        {"processor_config.json"},
    ),
    "encoder": (
        partial(encoder_files.check, capability=Capability.TEXT_EMBEDDING),
        "encoder",
        {
            *("modules.json", "config_sentence_transformers.json", "config.json"),
            *("model.safetensors", "2_Dense/config.json", "2_Dense/model.safetensors"),
            "sentence_bert_config.json",
        },
    ),
    "drawing": (
        pipelines.read,
        "drawing",
        {"model_index.json", "scheduler/scheduler_config.json", "*/config.json"},
    ),
    "adapter": (
        lambda at: read_adapter(str(at), {"model.layers.0.self_attn.q_proj": (1, 1)}, "lm_head"),
        "adapter",
        {"adapter_config.json", "adapter_model.safetensors"},
    ),
    "adapter's size": (
        lambda at: measure_adapter(str(at)),
        "adapter",
        {"adapter_config.json", "adapter_model.safetensors"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("reader", READERS)
def test_each_reader_says_what_it_cannot_read(models, reader, fault):
    read, kind, patterns = READERS[reader]
    directory = models / kind
    told = {}
    for name in names_in(directory):
        with broken(directory / name, fault):
            try:
                read(directory)
            except (SpawnFailed, Refusal) as refusal:
                told[name] = str(refusal)
    said = f"its {{}} cannot be read ({reason(fault)})"
    told = {name: text for name, text in told.items() if "cannot be read" in text}
    assert told == {name: said.format(PurePosixPath(name).name) for name in told}
    assert [name for name in told if not any(fnmatchcase(name, one) for one in patterns)] == []
    assert all(any(fnmatchcase(name, one) for name in told) for one in patterns)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_path_that_cannot_be_read_says_so(models, fault):
    """The operator names GGUF files and directories, so that no pattern lists them."""
    for name in ("tiny.gguf", "model"):
        with broken(models / name, fault), pytest.raises(SpawnFailed) as refused:
            load(models / name)
        wanted = f"its {name} cannot be read ({reason(fault)})"
        if fault == "a folder":  # a folder is read as a model's directory
            wanted = "its directory is empty"
        assert str(refused.value).endswith(wanted)


def test_a_directory_that_may_not_be_searched_says_so(models):
    directory = models / "closed"
    shutil.copytree(models / "text", directory)
    for mode in (0o000, 0o444, 0o111):
        directory.chmod(mode)
        with as_nobody(), pytest.raises(SpawnFailed, match=r"cannot be read \(Permission denied\)"):
            load(directory)
        directory.chmod(0o755)
