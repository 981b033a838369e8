"""Opens the files of a text model: a directory with safetensors, or a GGUF model.

All other code reads a checkpoint's directory. So the config and the chat templates of a GGUF file
are written into a temporary directory. Its tokenizer is built in memory: writing and reading a
tokenizer.json of 150,000 tokens takes a second.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from engine.worker.load.checkpoint import Checkpoint
from engine.worker.load.gguf.file import GgufFile
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import read_json, resolve
from engine.worker.quantized.mxfp4_checkpoint import Mxfp4Checkpoint, is_mxfp4
from engine.worker.quantized.packed_checkpoint import PackedCheckpoint, read_layout
from engine.worker.tokenizing.gguf_templates import write_templates
from engine.worker.tokenizing.gguf_tokenizer import (
    build_tokenizer,
    check_splits,
    write_generation_config,
    write_tokenizer_config,
)
from engine.worker.tokenizing.tokenizer import load_tokenizer, read_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.worker.load.gguf.vocabulary import Vocabulary
    from engine.worker.load.resolve import Source
    from engine.worker.tokenizing.tokenizer import HfTokenizer


@dataclass(slots=True)
class ModelFiles:
    """A model's source, whose directory has its config. ``vocabulary`` are the tokens of a GGUF
    file, if they were read, until `tokenizer_later` takes them."""

    source: Source
    gguf: GgufFile | None
    vocabulary: Vocabulary | None = None

    def open_weights(self) -> Checkpoint:
        """Return the model's weights, to be entered.

        Raises:
            Refusal: Its quantised layout is not supported. On entering: as `Checkpoint`.
        """
        if self.gguf is not None:
            return self.gguf
        config = read_json(self.source.directory, "config.json")
        if is_mxfp4(config):
            return Mxfp4Checkpoint(self.source.directory)
        layout = read_layout(config)
        if layout is not None:
            return PackedCheckpoint(self.source.directory, layout)
        return Checkpoint(self.source.directory)

    def tokenizer(self) -> HfTokenizer:
        """Return the model's tokenizer. Call this or `tokenizer_later` once; both raise the
        same."""
        return self.tokenizer_later()()

    def tokenizer_later(self) -> Callable[[], HfTokenizer]:
        """Return a function that returns the model's tokenizer, also when the files are closed. It
        builds that of a GGUF file, for which the library holds Python's lock for 0.2 s.

        Raises:
            SpawnFailed, Refusal: It is missing or damaged (`load_tokenizer`). The function: That of
                a GGUF file cannot be built.
        """
        vocabulary, self.vocabulary = self.vocabulary, None
        directory = self.source.directory
        if vocabulary is None:
            tokenizer = load_tokenizer(directory)
            return lambda: tokenizer
        check_splits(vocabulary)
        complete = read_beside(directory)
        return lambda: complete(build_tokenizer(vocabulary), vocabulary.index.keys())


@contextmanager
def open_files(model: str, revision: str, *, with_tokenizer: bool) -> Iterator[ModelFiles]:
    """Find a model's files. Without a tokenizer, the texts of a GGUF file's tokens are not read.

    Raises:
        Refusal: There is no such model, its GGUF file is not supported, or no temporary directory
            can be written.
    """
    source = resolve(model, revision)
    if not source.gguf:
        yield ModelFiles(source, None)
        return
    with ExitStack() as stack:
        with _needs_temporary_folder():
            written = Path(stack.enter_context(TemporaryDirectory(prefix="triolet-gguf-")))
        weights, vocabulary = _open_gguf(source.gguf, written, with_tokenizer=with_tokenizer)
        yield ModelFiles(replace(source, directory=written), weights, vocabulary)


def _open_gguf(
    paths: tuple[Path, ...], written: Path, *, with_tokenizer: bool
) -> tuple[GgufFile, Vocabulary | None]:
    """Write what other code reads of a GGUF file. Return its weights and its tokens."""
    with GgufFile(*paths, has_vocabulary=with_tokenizer) as file:
        vocabulary = file.vocabulary() if with_tokenizer else None
        with _needs_temporary_folder():
            file.write_config(written)
            if vocabulary is not None:
                write_generation_config(vocabulary, written)
                write_tokenizer_config(vocabulary, written)
                write_templates(file.metadata, written)
        return file.without_texts(), vocabulary


@contextmanager
def _needs_temporary_folder() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"needs a temporary folder, and none can be written: {error.strerror}"
        raise Refusal(f"{problem}; name one in TMPDIR") from error
