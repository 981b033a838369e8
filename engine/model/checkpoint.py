"""A checkpoint's tensors by name, from safetensors files only.

Rule 1: headers first. Names, shapes and dtypes are known, and every refusal is made, before a
byte of weights is read. Rule 2: no pickle, ever.

Tensors are views of the mapped file, read when they are first touched.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from engine.model.refusal import Refusal
from engine.model.resolve import weight_files

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    import torch

# Bytes of a number, by safetensors' name of its type; the others (integers, 8-bit floats) are
# those of quantised checkpoints, which are refused.
FLOAT_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the checkpoint, as its file's header describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: F32, BF16, …
    file: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * FLOAT_SIZES.get(self.dtype, 1)


class Checkpoint:
    """The open files of one checkpoint; a context manager.

    Raises:
        Refusal: (on entering) no files, one is missing, cut short, or no safetensors file.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._files: list[Any] = []
        self.tensors: dict[str, StoredTensor] = {}

    def __enter__(self) -> Checkpoint:
        try:
            for name in weight_files(self._directory):
                self._open(name)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, name: str) -> torch.Tensor:
        """The tensor as it is stored: a view of the mapped file, valid after closing."""
        return self._files[self.tensors[name].file].get_tensor(name)

    @property
    def num_values(self) -> int:
        """Numbers in all of its tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def main_dtype(self) -> str:
        """The dtype that most of the bytes are stored in."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
        return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else "F32"

    def _open(self, name: str) -> None:
        path = self._directory / name
        if not path.is_file():
            raise Refusal(f"its weight file {name} is missing")
        try:
            file = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            for key in file.keys():  # noqa: SIM118  (not a dict: it has no __iter__)
                part = file.get_slice(key)
                shape = tuple(part.get_shape())
                self.tensors[key] = StoredTensor(key, shape, part.get_dtype(), len(self._files))
        except (SafetensorError, OSError, ValueError) as error:
            raise Refusal(
                f"its weight file {name} is cut short or is not a safetensors file",
                detail=f"{type(error).__name__}: {error}",
            ) from error
        self._files.append(file)
