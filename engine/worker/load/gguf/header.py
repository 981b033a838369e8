"""Parses the header of a GGUF file: its metadata, and where each tensor is.

Rule: the bytes are interpreted elsewhere. Lists of texts that nobody needs are skipped. The library
of the kernels joins a list's texts, which are split at once if they are needed one by one: for
150,000 texts this takes 15 ms, and 70 ms without the library, where each is read by itself. Source:
ggml's docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import create_string_buffer
from dataclasses import dataclass
from struct import Struct, calcsize, unpack_from
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from ctypes import CDLL
    from mmap import mmap

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # Version 1, of 2023, has counts of 32 bits and is not read.
# The struct formats of values of a fixed size, by GGUF's numbers of types; TEXT and LIST have none.
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
           12: "d"}  # fmt: skip
TEXT, LIST = 8, 9
DIMENSIONS_MOST = 4
_LENGTH = Struct("<Q")


class Damaged(ValueError):
    """The bytes are no GGUF header; the message says what is wrong."""


class JoinedTexts(Sequence[str]):
    """The texts of a list as one text, ``joined``, with a zero byte between them. Dividing 150,000
    of them takes 15 ms, which is left to whoever needs each."""

    def __init__(self, joined: str, count: int) -> None:
        self.joined = joined
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        return self.joined.split("\0")[at]

    def __iter__(self) -> Iterator[str]:
        return iter(self.joined.split("\0"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as the header describes it: its shape, outermost dimension first, GGUF's number of
    its type, and the offset of its first byte from the end of the header."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """A file's metadata and tensors. The header's bytes end at ``end``, without padding."""

    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]
    end: int


def read_header(blob: mmap, text_lists: Container[str], library: CDLL | None = None) -> Header:
    """Parse the header of a mapped file. A list of texts that is not among ``text_lists`` is
    skipped; its number of texts stands for it. ``library`` is the kernels', if there is one.

    Raises:
        Damaged, struct.error, UnicodeDecodeError: The bytes are no header, or end within it.
    """
    if blob[: len(MAGIC)] != MAGIC:
        raise Damaged("it does not begin with GGUF")
    version, num_tensors, num_fields = unpack_from("<IQQ", blob, 4)
    if version not in VERSIONS:
        raise Damaged(f"its version is {version}; {VERSIONS[0]} and {VERSIONS[1]} are read")
    texts = TextLists(blob, library)
    place, metadata = 24, {}
    for _ in range(num_fields):
        key, place = _text(blob, place)
        (kind,) = unpack_from("<I", blob, place)
        metadata[key], place = _value(blob, place + 4, kind, texts, keeps_texts=key in text_lists)
    # Only the first part of a split file names the architecture.
    if "general.architecture" not in metadata and "split.count" not in metadata:
        raise Damaged("it names no architecture (general.architecture)")
    entries = []
    for _ in range(num_tensors):
        entry, place = _entry(blob, place)
        entries.append(entry)
    return Header(metadata, tuple(entries), place)


def _entry(blob: mmap, place: int) -> tuple[TensorEntry, int]:
    name, place = _text(blob, place)
    (count,) = unpack_from("<I", blob, place)
    if count > DIMENSIONS_MOST:
        raise Damaged(f"its tensor {name} has {count} dimensions")
    sizes = unpack_from(f"<{count}Q", blob, place + 4)
    place += 4 + 8 * count
    kind, offset = unpack_from("<IQ", blob, place)
    return TensorEntry(name, tuple(reversed(sizes)), kind, offset), place + 12


def _value(
    blob: mmap, place: int, kind: int, texts: TextLists, *, keeps_texts: bool
) -> tuple[Any, int]:
    """Return a value of the metadata and the offset of its end. ``kind`` is GGUF's type number."""
    if kind == TEXT:
        return _text(blob, place)
    if kind != LIST:
        form = f"<{_format(kind)}"
        return unpack_from(form, blob, place)[0], place + calcsize(form)
    kind, count = unpack_from("<IQ", blob, place)
    place += 12
    if count > len(blob):
        raise Damaged("it ends within a list")
    if kind == TEXT:
        return texts.read(place, count) if keeps_texts else (count, texts.end(place, count))
    form = f"<{count}{_format(kind)}"
    if calcsize(form) > len(blob) - place:  # before a tuple of so many numbers is made
        raise Damaged("it ends within a list")
    return list(unpack_from(form, blob, place)), place + calcsize(form)


def _format(kind: int) -> str:
    if kind not in FORMATS:
        raise Damaged(f"it has a value of type {kind}")
    return FORMATS[kind]


def _text(blob: mmap, place: int) -> tuple[str, int]:
    [text], end = _texts(blob, place, 1)
    return text, end


class TextLists:
    """Reads lists of texts of a mapped file, each text behind its length."""

    def __init__(self, blob: mmap, library: CDLL | None) -> None:
        self._blob = blob
        self._library = library
        self._address = int(np.frombuffer(blob, np.uint8).ctypes.data)

    def read(self, place: int, count: int) -> tuple[list[str] | JoinedTexts, int]:
        """Return ``count`` texts from the offset ``place`` on, and the offset of their end."""
        if self._library is None or not count:
            return _texts(self._blob, place, count)
        size = self._size(place, count)
        joined = create_string_buffer(size)
        if self._library.triolet_texts(self._address + place, size, count, joined) < 0:
            return _texts(self._blob, place, count)  # a text has the byte that would end it
        length = size - 7 * count
        text = str(memoryview(joined)[: length - 1], "utf-8")
        return JoinedTexts(text, count), place + size

    def end(self, place: int, count: int) -> int:
        """Return the offset of the end of ``count`` texts from the offset ``place`` on."""
        if self._library is not None:
            return place + self._size(place, count)
        length_at, end = _LENGTH.unpack_from, len(self._blob)
        for _ in range(count):
            place += 8 + length_at(self._blob, place)[0]
            if place > end:
                raise Damaged("it ends within a text")
        return place

    def _size(self, place: int, count: int) -> int:
        assert self._library is not None
        left = len(self._blob) - place
        size: int = self._library.triolet_texts(self._address + place, left, count, None)
        if size < 0:
            raise Damaged("it ends within a text")
        return size


def _texts(blob: mmap, place: int, count: int) -> tuple[list[str], int]:
    """Return ``count`` texts, each behind its length, and the place behind them."""
    length_at, found, end = _LENGTH.unpack_from, [], len(blob)
    for _ in range(count):
        first = place + 8
        place = first + length_at(blob, place)[0]
        if place > end:
            raise Damaged("it ends within a text")
        found.append(str(blob[first:place], "utf-8"))
    return found, place
