"""Reads a model's GGUF file as if it were a checkpoint's directory.

Rule 1: the header is read first, and every refusal is raised before any weights are read. Rule 2: a
tensor in blocks stays in the mapped file until it is decoded.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from mmap import ACCESS_READ, mmap
from typing import TYPE_CHECKING, Any

import torch

from engine.worker.load.checkpoint import Checkpoint, StoredTensor
from engine.worker.load.gguf.header import Damaged, read_header
from engine.worker.load.gguf.models import (
    CONVOLUTION,
    ROPE_FACTORS,
    find_model,
    make_config,
    name_in_checkpoint,
    row_order,
)
from engine.worker.load.gguf.vocabulary import STRING_LISTS, read_vocabulary
from engine.worker.load.reading import check_readable
from engine.worker.load.refusal import Refusal
from engine.worker.quantized.gguf_blocks import BLOCK_TYPES, FLOAT_TYPES, OTHER_TYPES, StoredBlocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.worker.load.gguf.header import Header
    from engine.worker.load.gguf.models import GgufModel
    from engine.worker.load.gguf.vocabulary import Vocabulary
    from engine.worker.quantized.weight import Form, QuantizedWeight


class GgufFile(Checkpoint):
    """The tensors and the metadata of one GGUF file, as a context manager. Tensors have the names
    that transformers gives them. Without ``has_vocabulary``, the texts of tokens and merges are
    skipped: reading them takes most of the metadata's time.

    Raises:
        Refusal: On entering: the file cannot be read, is damaged, or has an unsupported tensor.
    """

    FORMAT = "GGUF"

    def __init__(self, path: Path, *, has_vocabulary: bool = True) -> None:
        super().__init__(path.parent)
        self._path = path
        self._texts = STRING_LISTS if has_vocabulary else ()
        self.metadata: dict[str, Any] = {}
        self._stored: dict[str, Any] = {}  # by transformers' name: name, place and type in the file
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._factors: torch.Tensor | None = None
        self._parsed: tuple[mmap, Header] | None = None

    def __enter__(self) -> GgufFile:
        blob, header = self._parsed or self._parse()
        self._parsed = blob, header
        self.metadata = header.metadata
        self._bytes = _as_tensor(blob)
        find_model(self.metadata)
        alignment = int(self.metadata.get("general.alignment", 32))
        begin = -(-header.end // alignment) * alignment
        for entry in header.tensors:
            self._add(entry.name, entry.shape, entry.kind, begin + entry.offset)
        return self

    def _parse(self) -> tuple[mmap, Header]:
        check_readable(self._path)
        try:
            with self._path.open("rb") as opened:
                blob = mmap(opened.fileno(), 0, access=ACCESS_READ)
            header = read_header(blob, self._texts)
            _refuse_parts(header.metadata)
            if int(header.metadata.get("general.alignment", 32)) < 1:
                raise Damaged("its alignment is no size")
        except Refusal:
            raise
        except Exception as error:  # a damaged file may make the parser raise any error
            raise Refusal(
                f"{self._path.name} is not a GGUF file that can be read",
                detail=f"{type(error).__name__}: {error}",
            ) from error
        return blob, header

    def without_texts(self) -> GgufFile:
        """Return the file, which was entered, to be entered again: the same mapping without the
        texts, which take as much memory as a small model's layers."""
        other = GgufFile(self._path, has_vocabulary=False)
        assert self._parsed is not None
        blob, header = self._parsed
        counts = {name: len(header.metadata[name]) for name in self._texts
                  if isinstance(header.metadata.get(name), list)}  # fmt: skip
        other._parsed = blob, replace(header, metadata=header.metadata | counts)
        return other

    def __exit__(self, *_: object) -> None:
        self._stored.clear()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def config(self) -> dict[str, Any]:
        """Return the content that the model's config.json would have.

        Raises:
            Refusal: The metadata do not describe a served model (`make_config`).
        """
        shapes = {own: self.tensors[name].shape for name, (own, *_) in self._stored.items()}
        return make_config(self.metadata, shapes, self._factors)

    def vocabulary(self) -> Vocabulary:
        """Return the file's tokens.

        Raises:
            Refusal: As `read_vocabulary`, or there are more tokens than rows of the embedding.
        """
        words = read_vocabulary(self.metadata)
        rows = self.config()["vocab_size"]
        if len(words.tokens) > rows:
            raise Refusal(f"its vocabulary has {len(words.tokens)} tokens, and its embedding has "
                          f"{rows} rows")  # fmt: skip
        return words

    def write_config(self, directory: Path) -> None:
        """Write config.json.

        Raises:
            Refusal: The metadata describe no served model.
        """
        content = json.dumps(self.config())
        (directory / "config.json").write_text(content, encoding="utf-8")

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor; a tensor in blocks is expanded to float32."""
        stored = self.small(name)
        if stored is not None:
            return stored().expand()
        own, start, kind = self._stored[name]
        _, dtype = FLOAT_TYPES[kind]
        shape = self.tensors[name].shape
        size = dtype.itemsize * prod(shape)
        tensor = self._bytes[start : start + size].view(dtype).view(shape)
        order = row_order(self._model, self.metadata, own)
        if order is not None:
            tensor = tensor[order]
        if self._model.norm_offset and own.endswith("norm.weight"):
            tensor = tensor - self._model.norm_offset
        return tensor

    def form(self, name: str) -> Form | None:
        """Return the form of a tensor that is kept in 8 or 4 bits, or None for a float tensor."""
        _, _, kind = self._stored[name]
        return BLOCK_TYPES[kind][1].form if kind in BLOCK_TYPES else None

    def small(self, name: str) -> Callable[[], QuantizedWeight] | None:
        """Return a function that reads a tensor in 8 or 4 bits; None for a float tensor."""
        own, start, kind = self._stored[name]
        if kind not in BLOCK_TYPES:
            return None
        block = BLOCK_TYPES[kind][1]
        outputs, inputs = self.tensors[name].shape
        width = inputs // block.inputs * block.num_bytes
        raw = self._bytes[start : start + outputs * width].view(outputs, width)
        return StoredBlocks(raw, kind, row_order(self._model, self.metadata, own), name)

    @property
    def _model(self) -> GgufModel:
        return find_model(self.metadata)

    @property
    def main_dtype(self) -> str:
        """The dtype to compute in: BF16, unless every tensor is F32."""
        kinds = {tensor.dtype for tensor in self.tensors.values()}
        return "BF16" if kinds - {"F32"} else "F32"

    def _add(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> None:
        """Register a tensor that begins at byte ``start`` of the file.

        Raises:
            Refusal: The tensor's type, name or shape is not supported, or the file ends before the
                tensor does.
        """
        if kind in FLOAT_TYPES:
            label, dtype = FLOAT_TYPES[kind]
            size = dtype.itemsize * prod(shape)
        elif kind in BLOCK_TYPES:
            label, block = BLOCK_TYPES[kind]
            if not shape or shape[-1] % block.inputs:
                raise Refusal(f"its tensor {name} has the shape {list(shape)}, and rows of {label} "
                              f"are multiples of {block.inputs}")  # fmt: skip
            size = prod(shape) // block.inputs * block.num_bytes
        else:
            what = OTHER_TYPES.get(kind, f"number {kind}")
            known = ", ".join(name for name, _ in (*FLOAT_TYPES.values(), *BLOCK_TYPES.values()))
            raise Refusal(f"its tensor {name} has the type {what}, which is not read; the types "
                          f"that are read are {known}")  # fmt: skip
        if start + size > len(self._bytes):
            raise Refusal(f"{self._path.name} is cut short: it ends before its tensor {name}")
        if name == ROPE_FACTORS:
            self._factors = self._bytes[start : start + size].view(torch.float32)
            return
        own = name_in_checkpoint(self._model, name)
        if own is None:
            raise Refusal(f"its tensor {name} has no place in a {self._model.class_name}")
        if own.endswith(f".{CONVOLUTION}.weight"):
            if kind in BLOCK_TYPES or len(shape) != 2:
                raise Refusal(f"its tensor {name} is not a matrix of floats")
            shape = (shape[0], 1, shape[1])
            self.tensors[own] = StoredTensor(own, shape, label, self._path.name)
            self._stored[own] = (name, start, kind)
            return
        is_joined = "{expert}" in own
        if is_joined != (len(shape) == 3):
            raise Refusal(f"its tensor {name} has {len(shape)} dimensions")
        count = shape[0] if is_joined else 1
        for expert in range(count):
            part = own.format(expert=expert)
            self.tensors[part] = StoredTensor(
                part, shape[-2:], label, self._path.name, size // count
            )
            self._stored[part] = (name, start + size // count * expert, kind)


def _refuse_parts(metadata: dict[str, Any]) -> None:
    if int(metadata.get("split.count", 1) or 1) > 1:
        raise Refusal(
            "it is one of several parts of a GGUF model; join them with llama.cpp's "
            "'llama-gguf-split --merge' and serve the result"
        )


def _as_tensor(blob: mmap) -> torch.Tensor:
    """Return a mapped file as a tensor. Nothing writes to it, so torch's warning that the file
    cannot be written is not of interest."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(blob, dtype=torch.uint8)
