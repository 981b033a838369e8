"""Reads a GGUF model, in one file or more, as if it were a checkpoint's directory.

Rule 1: headers are read first, and every refusal is raised before any weights are read. Rule 2: a
tensor in blocks stays in the mapped file until it is decoded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import prod
from mmap import ACCESS_READ, mmap
from typing import TYPE_CHECKING, Any

import torch

from engine.worker.forward import native
from engine.worker.load.checkpoint import Checkpoint, StoredTensor
from engine.worker.load.gguf.header import Damaged, JoinedTexts, read_header
from engine.worker.load.gguf.models import (
    CONVOLUTION,
    ROPE_FACTORS,
    SHARED_GATE,
    find_model,
    make_config,
    name_in_checkpoint,
    row_order,
)
from engine.worker.load.gguf.parts import TENSORS, check_part
from engine.worker.load.gguf.vocabulary import STRING_LISTS, read_vocabulary
from engine.worker.load.reading import check_readable
from engine.worker.load.refusal import Refusal
from engine.worker.quantized.gguf_blocks import (
    BLOCK_TYPES,
    FLOAT_TYPES,
    INSTEAD,
    OTHER_TYPES,
    StoredBlocks,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from ctypes import CDLL
    from pathlib import Path

    from engine.worker.load.gguf.header import Header
    from engine.worker.load.gguf.models import GgufModel
    from engine.worker.load.gguf.vocabulary import Vocabulary
    from engine.worker.quantized.weight import Form, QuantizedWeight

# Routers are floats in every file. Float weights are multiplied by inputs in float32 at half of
# bfloat16's speed: so few do not show.
FLOATS_MOST = 1 / 16


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is: its name in its file, the bytes of that file, of which it begins at
    ``start``, and GGUF's number of its type."""

    name: str
    file: torch.Tensor
    start: int
    kind: int


class GgufFile(Checkpoint):
    """The tensors and the metadata of a GGUF model, as a context manager. ``paths`` are its file,
    or all its parts in their order. Tensors have the names that transformers gives them. Without
    ``has_vocabulary``, the texts of tokens and merges are skipped: reading them takes most of the
    metadata's time.

    Raises:
        Refusal: On entering: a file cannot be read, is damaged, is another part, or has an
            unsupported tensor.
    """

    FORMAT = "GGUF"

    def __init__(self, *paths: Path, has_vocabulary: bool = True) -> None:
        super().__init__(paths[0].parent)
        self._paths = paths
        self._texts = STRING_LISTS if has_vocabulary else ()
        self.metadata: dict[str, Any] = {}  # the first part's key-value pairs
        self._stored: dict[str, _Place] = {}  # by transformers' names
        self._factors: torch.Tensor | None = None
        self._parsed: list[tuple[mmap, Header]] = []

    def __enter__(self) -> GgufFile:
        if not self._parsed:
            self._parsed = [self._parse(number) for number in range(len(self._paths))]
        headers = [header for _, header in self._parsed]
        self.metadata = headers[0].metadata
        find_model(self.metadata)
        count, expected = sum(len(one.tensors) for one in headers), self.metadata.get(TENSORS)
        if expected not in (None, count):
            raise Refusal(f"its files have {count} tensors, and its {TENSORS} is {expected}")
        for path, (blob, header) in zip(self._paths, self._parsed, strict=True):
            file = _as_tensor(blob)
            alignment = int(header.metadata.get("general.alignment", 32))
            begin = -(-header.end // alignment) * alignment
            for entry in header.tensors:
                place = _Place(entry.name, file, begin + entry.offset, entry.kind)
                self._add(place, entry.shape, path.name)
        return self

    def _parse(self, number: int) -> tuple[mmap, Header]:
        path = self._paths[number]
        check_readable(path)
        try:
            with path.open("rb") as opened:
                blob = mmap(opened.fileno(), 0, access=ACCESS_READ)
            header = read_header(blob, self._texts, _kernels())
            check_part(path, header.metadata, number, len(self._paths))
            if int(header.metadata.get("general.alignment", 32)) < 1:
                raise Damaged("its alignment is no size")
        except Refusal:
            raise
        except Exception as error:  # a damaged file may make the parser raise any error
            raise Refusal(
                f"{path.name} is not a GGUF file that can be read",
                detail=f"{type(error).__name__}: {error}",
            ) from error
        return blob, header

    def without_texts(self) -> GgufFile:
        """Return the model, which was entered, to be entered again: the same mappings without the
        texts, which take as much memory as a small model's layers."""
        other = GgufFile(*self._paths, has_vocabulary=False)
        (blob, header), *others = self._parsed
        counts = {name: len(header.metadata[name]) for name in self._texts
                  if isinstance(header.metadata.get(name), (list, JoinedTexts))}  # fmt: skip
        other._parsed = [(blob, replace(header, metadata=header.metadata | counts)), *others]
        return other

    def __exit__(self, *_: object) -> None:
        self._stored.clear()

    def config(self) -> dict[str, Any]:
        """Return the content that the model's config.json would have.

        Raises:
            Refusal: The metadata do not describe a served model (`make_config`).
        """
        shapes = {place.name: self.tensors[name].shape for name, place in self._stored.items()}
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
        place = self._stored[name]
        _, dtype = FLOAT_TYPES[place.kind]
        shape = self.tensors[name].shape
        size = dtype.itemsize * prod(shape)
        tensor = place.file[place.start : place.start + size].view(dtype).view(shape)
        order = row_order(self._model, self.metadata, place.name)
        if order is not None:
            tensor = tensor[order]
        if self._model.norm_offset and place.name.endswith("norm.weight"):
            tensor = tensor - self._model.norm_offset
        return tensor

    def form(self, name: str) -> Form | None:
        """Return the form of a tensor kept in 8 bits or fewer, or None for a float tensor."""
        kind = self._stored[name].kind
        return BLOCK_TYPES[kind][1].form if kind in BLOCK_TYPES else None

    def small(self, name: str) -> Callable[[], QuantizedWeight] | None:
        """Return a function that reads a tensor in 8 bits or fewer; None for a float tensor."""
        place = self._stored[name]
        if place.kind not in BLOCK_TYPES:
            return None
        block = BLOCK_TYPES[place.kind][1]
        outputs, inputs = self.tensors[name].shape
        width = inputs // block.inputs * block.num_bytes
        raw = place.file[place.start : place.start + outputs * width].view(outputs, width)
        order = row_order(self._model, self.metadata, place.name)
        return StoredBlocks(raw, place.kind, order, name)

    @property
    def _model(self) -> GgufModel:
        return find_model(self.metadata)

    @property
    def main_dtype(self) -> str:
        """The dtype to compute in: BF16, unless every tensor is F32."""
        kinds = {tensor.dtype for tensor in self.tensors.values()}
        return "BF16" if kinds - {"F32"} else "F32"

    @property
    def rounds_inputs(self) -> bool:
        """Whether at most `FLOATS_MOST` of its matrices' numbers are not in blocks."""
        matrices = [one for one in self.tensors.values() if len(one.shape) == 2]
        floats = sum(prod(one.shape) for one in matrices if self.form(one.name) is None)
        return floats <= FLOATS_MOST * sum(prod(one.shape) for one in matrices)

    def _add(self, place: _Place, shape: tuple[int, ...], file: str) -> None:
        """Register a tensor of the named file.

        Raises:
            Refusal: The tensor's type, name or shape is not supported, or the file ends before the
                tensor does.
        """
        name, kind, start = place.name, place.kind, place.start
        if kind in FLOAT_TYPES:
            label, dtype = FLOAT_TYPES[kind]
            size = dtype.itemsize * prod(shape)
        elif kind in BLOCK_TYPES:
            label, block = BLOCK_TYPES[kind]
            if len(shape) < 2 or shape[-1] % block.inputs:
                raise Refusal(f"its tensor {name} has the shape {list(shape)}, and {label} has "
                              f"rows that are multiples of {block.inputs}")  # fmt: skip
            size = prod(shape) // block.inputs * block.num_bytes
        else:
            what = OTHER_TYPES.get(kind, f"number {kind}")
            known = ", ".join(name for name, _ in (*FLOAT_TYPES.values(), *BLOCK_TYPES.values()))
            near = next((own for start, own in INSTEAD.items() if what.startswith(start)), "")
            best = f"the model's {near} file instead, or another" if near else "a file"
            raise Refusal(f"its tensor {name} has the type {what}, which is not read; download "
                          f"{best} of {known}")  # fmt: skip
        if start + size > len(place.file):
            raise Refusal(f"{file} is cut short: it ends before its tensor {name}")
        if kind in FLOAT_TYPES and start % dtype.itemsize:
            raise Refusal(f"{file} is damaged: its tensor {name} begins at byte {start:,}, and "
                          f"numbers of {label} at multiples of {dtype.itemsize}")  # fmt: skip
        if name == ROPE_FACTORS:
            if label != "F32":
                raise Refusal(f"its tensor {name} has the type {label}, and F32 is read")
            self._factors = place.file[start : start + size].view(torch.float32)
            return
        own = name_in_checkpoint(self._model, name)
        if own is None:
            raise Refusal(f"its tensor {name} has no place in a {self._model.class_name}")
        if own.endswith(f".{CONVOLUTION}.weight"):
            if kind in BLOCK_TYPES or len(shape) != 2:
                raise Refusal(f"its tensor {name} is not a matrix of floats")
            shape = (shape[0], 1, shape[1])
            self.tensors[own] = StoredTensor(own, shape, label, file)
            self._stored[own] = place
            return
        if own.endswith(f".{SHARED_GATE}.weight"):
            shape = (1, shape[-1])
        is_joined = "{expert}" in own
        if is_joined != (len(shape) == (2 if own.endswith(".bias") else 3)):
            raise Refusal(f"its tensor {name} has {len(shape)} dimensions")
        count, own_shape = (shape[0], shape[1:]) if is_joined else (1, shape)
        for expert in range(count):
            part = own.format(expert=expert)
            self.tensors[part] = StoredTensor(part, own_shape, label, file, size // count)
            self._stored[part] = replace(place, start=start + size // count * expert)


def _kernels() -> CDLL | None:
    try:
        return native.load()
    except native.Unavailable:
        return None


def _as_tensor(blob: mmap) -> torch.Tensor:
    """Return a mapped file as a tensor. Nothing writes to it, so torch's warning that the file
    cannot be written is not of interest."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(blob, dtype=torch.uint8)
