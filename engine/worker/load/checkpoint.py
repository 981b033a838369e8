"""Reads the tensors of a checkpoint's safetensors files by name.

Rule 1: headers are read first. Names, shapes and dtypes are known, and every refusal by them is
raised, before any weights are read. Rule 2: pickled files are never read.

Tensors are views of the mapped file, which is read when a view is first used.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from engine.worker.load.joined_experts import Joining, is_joined, joining_of
from engine.worker.load.reading import check_readable, has_file
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import WEIGHTS_NAME, weight_files, weight_index

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from engine.worker.load.joined_experts import Piece
    from engine.worker.quantized.weight import Form, QuantizedWeight

# Bytes of a number, by safetensors' name of its type. Checkpoints with other types (integers, 8-bit
# floats) are quantised and are refused.
FLOAT_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
# Names of tensors in checkpoints, and transformers' names of the same parameters: of Mixtral,
# GPT-NeoX, Granite 4 with experts, and Qwen3.5's text model in a checkpoint with a vision tower.
# Source: transformers' table of conversions, with which the tests compare `OLDER_NAMES`.
OLDER_NAMES = (
    (re.compile(r"(?<=\.block_sparse_moe\.experts\.)(\d+)\.w1\b"), r"\1.gate_proj"),
    (re.compile(r"(?<=\.block_sparse_moe\.experts\.)(\d+)\.w3\b"), r"\1.up_proj"),
    (re.compile(r"(?<=\.block_sparse_moe\.experts\.)(\d+)\.w2\b"), r"\1.down_proj"),
    (re.compile(r"\.block_sparse_moe\.(?=experts\.\d|gate\.)"), ".mlp."),
    (re.compile(r"(?<=\.block_sparse_moe\.)input_linear\.weight$"), "experts.gate_up_proj"),
    (re.compile(r"(?<=\.block_sparse_moe\.)output_linear\.weight$"), "experts.down_proj"),
    (re.compile(r"(?<=\.block_sparse_moe\.router\.)layer\.weight$"), "weight"),
    (re.compile(r"^embed_out\."), "lm_head."),
    (re.compile(r"^model\.language_model\."), "model."),
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint by the header of its file. ``file`` is that file's name.
    ``in_blocks`` is the size of a tensor whose numbers are not apart; 0: they are."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: F32, BF16, …
    file: str
    in_blocks: int = 0

    @property
    def num_bytes(self) -> int:
        """The tensor's size in its file."""
        return self.in_blocks or prod(self.shape) * FLOAT_SIZES.get(self.dtype, 1)


class Checkpoint:
    """The open files of one checkpoint, as a context manager. If no ``files`` are named, names and
    ``index`` are those of transformers' layout. A tensor counts in the file that the index names
    for it; copies in other files are ignored.

    Raises:
        Refusal: On entering: there are no files, or one is missing, cannot be read, is cut short,
            or is not a safetensors file.
    """

    FORMAT = "safetensors"

    def __init__(
        self,
        directory: Path,
        files: tuple[str, ...] = (),
        index: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self._names = files
        self._index = index or {}
        self._has_copies = False
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self._joined: dict[str, tuple[str, Piece]] = {}  # where experts' weights and biases are
        self._joining = Joining()
        self._older: dict[str, str] = {}  # tensors' names in the files, by their current names

    def __enter__(self) -> Checkpoint:
        try:
            names = self._names or weight_files(self._directory)
            if not self._names:
                self._index = weight_index(self._directory)
                is_whole = has_file(self._directory / WEIGHTS_NAME)
                self._has_copies = is_whole and WEIGHTS_NAME not in names
            for name in names:
                self._open(name)
            self._split_experts()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored: a view of the mapped file, valid even after closing. A
        tensor that is kept in 8 bits or fewer is expanded to float32."""
        stored = self.small(name)
        if stored is not None:
            return stored().expand()
        file = self.tensors[name].file
        if name not in self._joined:
            return self._view(name, file)
        whole, piece = self._joined[name]
        return self._joining.take(self._view(whole, file), piece)

    def _view(self, name: str, file: str) -> torch.Tensor:
        return self._files[file].get_tensor(self._older.get(name, name))

    def without_copies(self) -> dict[str, torch.Tensor] | None:
        """Return copies of all tensors, by their names in the files, for a library that ignores the
        index and so would read other copies; None if there are no other copies."""
        if not self._has_copies:
            return None
        wholes = {name: self._joined[name][0] if name in self._joined else name
                  for name in self.tensors}  # fmt: skip
        return {
            self._older.get(whole, whole): self._view(whole, self.tensors[name].file).clone()
            for name, whole in wholes.items()
        }

    def form(self, name: str) -> Form | None:
        """Return the form of a tensor stored in 8 bits or fewer, or None for a float tensor."""
        return None

    def small(self, name: str) -> Callable[[], QuantizedWeight] | None:
        """Return a function that reads a tensor in 8 bits or fewer, also after the checkpoint is
        closed; None for a float tensor."""
        return None

    @property
    def quantization(self) -> str:
        """The types of the tensors in 8 bits or fewer, for messages; "" without such tensors."""
        kinds = {tensor.dtype for tensor in self.tensors.values() if self.form(tensor.name)}
        return ", ".join(sorted(kinds))

    def check_finite(self, name: str) -> None:
        """Check that a tensor holds no NaN and no infinity.

        Raises:
            Refusal: The tensor holds one, and the model would compute nothing but NaN.
        """
        tensor = self.read(name)
        if not is_finite(tensor):
            what = "NaN" if bool(tensor.isnan().any()) else "infinity"
            raise Refusal(
                f"its tensor {name} in {self.tensors[name].file} holds {what}; the file is "
                "damaged, or the model's training failed"
            )

    @property
    def num_values(self) -> int:
        """The total size of the tensors, counted in numbers."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def main_dtype(self) -> str:
        """The dtype of most of the bytes."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
        return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else "F32"

    @property
    def rounds_inputs(self) -> bool:
        """Whether the compiled products of nearly all weights round their inputs to int8. Then
        activations in bfloat16 would be rounded twice, and save no time (D24)."""
        return False

    @property
    def stored(self) -> str:
        """The format, and the types of the tensors by their share of the bytes, for people."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
        return f"{self.FORMAT} ({', '.join(sorted(sizes, key=lambda dtype: -sizes[dtype]))})"

    @property
    def file_bytes(self) -> int:
        """The bytes of the files that have the tensors."""
        files = {tensor.file for tensor in self.tensors.values()}
        return sum((self._directory / name).stat().st_size for name in files)

    def _open(self, name: str) -> None:
        path = self._directory / name
        if not has_file(path):
            raise Refusal(f"its weight file {name} is missing")
        check_readable(path)
        try:
            file = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            for key in file.keys():  # noqa: SIM118  (not a dict: it has no __iter__)
                if self._index.get(key, name) != name:
                    self._has_copies = True
                    continue
                part = file.get_slice(key)
                shape = tuple(part.get_shape())
                own = current_name(key)
                if own != key:
                    self._older[own] = key
                self.tensors[own] = StoredTensor(own, shape, part.get_dtype(), name)
        except (SafetensorError, OSError, ValueError) as error:
            raise Refusal(
                f"its weight file {name} is cut short or is not a safetensors file",
                detail=f"{type(error).__name__}: {error}",
            ) from error
        self._files[name] = file

    def _split_experts(self) -> None:
        """Replace each tensor that joins a layer's experts by one tensor for each expert."""
        self._joining = joining_of(self.tensors)
        for whole in [x for x in self.tensors.values() if is_joined(x.name, x.shape)]:
            del self.tensors[whole.name]
            shape = self._joining.shape(whole.name, whole.shape)
            for piece in self._joining.pieces(whole.name, whole.shape):
                self.tensors[piece.name] = replace(whole, name=piece.name, shape=shape)
                self._joined[piece.name] = whole.name, piece


def current_name(name: str) -> str:
    """Return the name that a stored tensor has in transformers' module."""
    for older, current in OLDER_NAMES:
        name = older.sub(current, name)
    return name


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds no NaN and no infinity. This takes a tenth of the time that
    copying the tensor takes (measured in three dtypes)."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(bool(end.isfinite()) for end in torch.aminmax(tensor))
