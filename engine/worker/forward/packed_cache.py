"""Keeps packed weights in files, which later loads and other processes map.

A file has the packed layers of one content: a header of `HEADER` bytes, the layers, and an index of
their places by their signatures. Its name is a hash of the model file's content and of the kernels'
layout.

Rule 1: what is read is what was written. The folder and its files belong to the server's own user,
and nobody else may use them; a file counts only if its checksum is right, and is removed otherwise.
It is read whole for that once, and then only if it can have changed (`_is_vouched`); its header and
index are checked at every load. Rule 2: a file is written aside, under a name that ends in
`PARTIAL`, and renamed when it is whole. So it does not matter when a writer is killed, or how many
write at once. Rule 3: the cache never makes a load fail. Where it cannot be read or written,
weights are packed in memory.

The content of a model file is known by a SHA-256 of its bytes. Reading 2.5 GB for it takes a second
or more, so the hash is noted beside the file's identity: device, inode, size, and the times of its
last changes. A file that is written in place has another time of change, which no program can set;
a copy has another inode, and is hashed. Only a shared mapping may change pages without a time:
those that it changed before, until they are on the disk. An identity is noted only once the file is
`SETTLED_S` old, because two changes within one tick of the file system's clock have the same time.

A packed file has such a note, too, which vouches for its checksum. It is made only once the file
system's clock has passed the file's times, so that a later write shows in them, and once the disk
has taken the file, because the system drops what a disk refuses. What no program changes shows in
no time: after a crash a file may lack what was never written to the disk, and a disk may return
other bytes than it was given. So a note counts only until the system is started again, and only if
all of the file is in memory now; else it is read whole.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import logging
import os
import struct
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.worker.forward.block_layer import Packed
from engine.worker.forward.user_cache import (
    NoCache,
    open_own,
    private_folder,
    read_own,
    try_lock,
    user_cache,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.worker.forward.block_layer import BlockLayer

OFF = "off"  # the setting's value for no cache
MAGIC = b"TrioletPacked 2\n"
HEADER = 4096  # a page, so that layers are aligned as the mapping is
ALIGNMENT = 64  # a layer's tensors begin at multiples of this many bytes, as cache lines do
WHOLE, PARTIAL, LOCK, KNOWN, VOUCHED = ".packed", ".partial", ".lock", ".known", ".vouched"
WORTH = 32 << 20  # bytes of a model file; a smaller one is packed as fast as it would be checked
WRITTEN_AT_ONCE = 16 << 20  # bytes that are packed, and then written
HASHED_AT_ONCE = 1 << 20
SETTLED_S = 2.0  # more than a tick of any file system's clock, FAT's included
TICK_LIMIT_S = 0.05  # how long a load waits for a tick: ten of Linux' usual clock
BOOT = Path("/proc/sys/kernel/random/boot_id")  # another number after each start of the system
NOTING = "triolet-packed-note"  # the thread that makes the note of a packed file
TMPFS = 0x01021994  # its type. Source: linux/magic.h
KNOWN_MOST = 1000  # identities that are noted
FREE_LEAST = 1 << 30  # bytes that a file leaves free on its disk
# A load gives the file up after so many seconds of writing beyond those at this speed, in bytes a
# second: the system makes a writer wait for its disk once it has written much.
SLOW_S, FAST = 10.0, 500e6
LOCK_LIMIT_S = 60.0  # how long a load waits for another one that packs the same weights
_LOCK_STEP_S = 0.05
# Magic, bytes of the layers and of the index, the checksum of both, and that of the index.
_FIELDS = struct.Struct("<16sQQQQ")

log = logging.getLogger(__name__)


class Layers:
    """Packs each layer into memory of its own."""

    def packed(self, layer: BlockLayer) -> Packed:
        """Return a packed layer.

        Raises:
            Refusal: Half precision cannot hold a scale.
        """
        made = Packed(*(large_empty(size) for size in layer.sizes))
        layer.pack(made)
        return made

    def finish(self) -> None:
        """Keep what was packed. Call it once, after the last layer."""

    def close(self) -> None:
        """End the use of the files; packed layers stay valid. Idempotent."""


def large_empty(size: int) -> torch.Tensor:
    """Return uint8 memory that the system may provide in large pages: providing it in small ones
    takes a second per gigabyte."""
    tensor = torch.empty(size, dtype=torch.uint8)
    page = 2 << 20
    first = -(-tensor.data_ptr() // page) * page
    whole = (tensor.data_ptr() + size - first) // page * page
    if whole > 0:
        advise = _libc().madvise
        advise(ctypes.c_void_p(first), ctypes.c_size_t(whole), 14)  # MADV_HUGEPAGE; may be refused
    return tensor


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class PackedCache:
    """A folder of packed weights, of at most ``limit`` bytes."""

    folder: Path
    limit: int

    def layers_of(
        self, files: Sequence[Path], library: ctypes.CDLL, bound: int, expected: int
    ) -> Layers:
        """Return the layers of a model in one file or more: those that were kept or, if there are
        none, layers that will be kept. ``bound`` is the most bytes that they can have, and
        ``expected`` about what they will have."""
        try:
            size = sum(file.stat().st_size for file in files)
            if size < WORTH:
                return Layers()
            contents = (self._content(file) for file in files)
            content = " ".join((str(library.triolet_layout()), *contents))
            name = hashlib.sha256(content.encode()).hexdigest()[:40]
            path = self.folder / f"{name}{WHOLE}"
            kept = _open_kept(path, library)
            if kept is not None:
                return kept
            if expected > self.limit:
                log.warning("packed weights of %s would take more than --packed-cache-bytes, and "
                            "are not kept", files[0].name)  # fmt: skip
                return Layers()
            with ExitStack() as stack:
                lock = _locked(path)
                stack.callback(os.close, lock)
                kept = _open_kept(path, library)  # another load may have written the file meanwhile
                if kept is not None:
                    return kept
                _make_room(self.folder, self.limit - expected)
                stack.pop_all()  # the layers close it
            return _WrittenLayers(path, library, bound, expected, lock)
        except OSError as error:
            log.warning("packed weights are not kept in %s: %s", self.folder, error.strerror)
            return Layers()

    def _content(self, file: Path) -> str:
        """Return the hash of a model file's content."""
        with file.open("rb") as opened:
            state = os.fstat(opened.fileno())
            identity = _identity(state)
            note = self.folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:40]}{KNOWN}"
            with suppress(OSError, ValueError):
                noted, content = read_own(note, HEADER).decode().split("\n")
                if noted == identity:
                    os.utime(note)
                    return content
            content = _hash(opened.fileno(), state.st_size)
            is_same = _identity(os.fstat(opened.fileno())) == identity
        if is_same and time.time() - _last_change(state) / 1e9 > SETTLED_S:
            with suppress(OSError):
                _write(note, f"{identity}\n{content}".encode())
        return content


def open_cache(setting: str, limit: int) -> PackedCache | None:
    """Return the cache that a value of ``--packed-cache`` means: a folder, `OFF`, or "" for the
    default folder. Return None if there is none, or the folder cannot be used, which is logged."""
    if setting == OFF or not limit:
        return None
    try:
        folder = Path(os.path.expanduser(setting)) if setting else user_cache("packed")
        return PackedCache(private_folder(folder, is_secret=True), limit)
    except NoCache as error:
        log.warning("weights are packed at every start: %s", error)
        return None


def bound_of(shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the most bytes that packed layers of these shapes, [outputs, inputs], can have:
    numbers of 8 bits in groups of 16 with offsets, and a panel more for each end."""
    return HEADER + sum((outputs + 32) * inputs * 5 // 4 + 1024 for outputs, inputs in shapes)


# ---- layers that were kept


class _KeptLayers(Layers):
    """The layers of a whole file, mapped. A layer that the file lacks is packed in memory."""

    def __init__(self, path: Path, mapped: mmap, index: dict[str, list[list[int]]]) -> None:
        self._path = path
        self._mapped = mapped
        self._index = index

    def packed(self, layer: BlockLayer) -> Packed:
        places = self._index.get(layer.signature)
        if places is None or tuple(size for _, size in places) != layer.sizes:
            log.warning("%s lacks a layer; it is removed", self._path.name)
            self._path.unlink(missing_ok=True)
            return super().packed(layer)
        return Packed(*(_view(self._mapped, start, size) for start, size in places))


def _open_kept(path: Path, library: ctypes.CDLL) -> _KeptLayers | None:
    """Return a file's layers, and note its use. Return None if there is no such file, or it is
    damaged, which removes it.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        handle = open_own(path)
        try:
            mapped = mmap(handle, 0, access=ACCESS_READ)
            index = _index_of(mapped, library)
            if not _is_vouched(path, handle, mapped, library):
                vow = _vow_of(path.parent, handle)
                _check(mapped, library)
                _vouch_later(path, handle, vow)
        finally:
            os.close(handle)
    except FileNotFoundError:
        return None
    except (ValueError, struct.error) as error:
        log.warning("%s cannot be used (%s); its weights are packed anew", path.name, error)
        path.unlink(missing_ok=True)
        return None
    return _KeptLayers(path, mapped, index)


def _index_of(mapped: mmap, library: ctypes.CDLL) -> dict[str, list[list[int]]]:
    """Check the header and the index of a mapped file, and return the index.

    Raises:
        ValueError, struct.error: They are not as they were written.
    """
    magic, layers, length, _, checksum = _FIELDS.unpack_from(mapped)
    end = HEADER + layers
    if magic != MAGIC or len(mapped) != end + length:
        raise ValueError("its header is another")
    if library.triolet_checksum(_view(mapped, end, length).data_ptr(), length) != checksum:
        raise ValueError("its index is another")
    index: dict[str, list[list[int]]] = json.loads(mapped[end:])
    places = [place for own in index.values() for place in own]
    if not all(HEADER <= start <= start + size <= end for start, size in places):
        raise ValueError("its index has a layer outside of it")
    return index


def _check(mapped: mmap, library: ctypes.CDLL) -> None:
    """Read a mapped file whole, whose header `_index_of` has checked.

    Raises:
        ValueError: The file is not as it was written.
    """
    _, layers, index, checksum, _ = _FIELDS.unpack_from(mapped)
    whole = _view(mapped, HEADER, layers + index)
    if library.triolet_checksum(whole.data_ptr(), layers + index) != checksum:
        raise ValueError("its checksum is another")


def _is_vouched(path: Path, handle: int, mapped: mmap, library: ctypes.CDLL) -> bool:
    """Return whether a file is still as it was when it was checked or written, by its note, and
    note its use. All its pages are in memory then, and mapped."""
    note, size = path.with_suffix(VOUCHED), len(mapped)
    with suppress(OSError, ValueError):
        if read_own(note, HEADER) == _vow(os.fstat(handle)):
            os.utime(note)
            return bool(library.triolet_in_memory(_view(mapped, 0, size).data_ptr(), size))
    return False


def _vow_of(folder: Path, handle: int) -> bytes:
    """Wait until the clock of a folder's file system has passed the times of a file in it, and
    return what vouches for the file if it is found whole now; empty if nothing can."""
    if _is_on_tmpfs(handle):
        return b""
    state, end = os.fstat(handle), time.monotonic() + TICK_LIMIT_S
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as clock:
        while time.monotonic() < end:
            os.utime(clock.fileno())
            if os.fstat(clock.fileno()).st_ctime_ns > _last_change(state):
                return _vow(state)
            time.sleep(TICK_LIMIT_S / 50)
    return b""


def _is_on_tmpfs(handle: int) -> bool:
    """Return whether a file is in memory alone. There a shared mapping may always change pages
    without a time, because they are never on a disk."""
    of_system = (ctypes.c_long * 512)()  # larger than `struct statfs`, which begins with its type
    return not _libc().fstatfs(handle, of_system) and of_system[0] == TMPFS


def _vouch_later(path: Path, handle: int, vow: bytes) -> None:
    """Have a thread call `_vouch`. Nothing waits for it, because the disk may take long: it ends
    with the process, and the next load reads the file whole."""
    own = os.dup(handle)

    def vouch() -> None:
        with os.fdopen(own, "rb"):
            _vouch(path, own, vow)

    try:
        threading.Thread(target=vouch, name=NOTING, daemon=True).start()
    except RuntimeError:  # no more threads
        os.close(own)


def _vouch(path: Path, handle: int, vow: bytes) -> None:
    """Wait until the disk has a file, and note that it is whole, unless it has changed since
    `_vow_of` returned ``vow``. Remove a file that the disk did not take: the system drops the pages
    that it could not write, and reads other bytes in their place."""
    try:
        os.fdatasync(handle)
    except OSError as error:
        log.warning("the disk did not take %s, which is removed; a server that has it open should "
                    "be restarted: %s", path, error.strerror)  # fmt: skip
        with suppress(OSError):
            path.unlink()
        return
    with suppress(OSError):
        if vow and vow == _vow(os.fstat(handle)):
            _write(path.with_suffix(VOUCHED), vow)
            return
    with suppress(OSError):  # no note tells of the file's use
        os.utime(handle)


def _vow(state: os.stat_result) -> bytes:
    return f"{BOOT.read_text()}{_identity(state)}".encode()


def _identity(state: os.stat_result) -> str:
    """Return what another content in a file's place cannot have."""
    return repr((state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))


def _last_change(state: os.stat_result) -> int:
    return max(state.st_mtime_ns, state.st_ctime_ns)


def _view(mapped: mmap, start: int, size: int) -> torch.Tensor:
    import warnings

    if not size:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nothing writes to these tensors
        return torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=start)


# ---- layers that will be kept


@dataclass(slots=True)
class _Places:
    """Where the layers of a file are: the places and sizes of each one's tensors."""

    index: dict[str, list[list[int]]] = field(default_factory=dict)
    end: int = HEADER

    def add(self, layer: BlockLayer) -> list[list[int]]:
        """Return the places of one more layer."""
        own = []
        for size in layer.sizes:
            own.append([self.end, size])
            self.end += -(-size // ALIGNMENT) * ALIGNMENT
        self.index[layer.signature] = own
        return own


class _WrittenLayers(Layers):
    """Layers that are packed piece by piece and written to a file, of which they are mapped.

    1. The file has `PARTIAL` at the end of its name, and a lock for as long as its writer lives.
    2. Its mapping is as long as the layers can become. A layer's pages exist once it is written.
    3. If a write fails, memory takes the mapping's place, and all layers are packed into it.
    4. `finish` writes the index and the header, and renames the file.
    """

    def __init__(
        self, path: Path, library: ctypes.CDLL, bound: int, expected: int, lock: int
    ) -> None:
        self._path = path
        self._library = library
        self._lock = lock
        self._places = _Places()
        self._layers: list[tuple[BlockLayer, list[list[int]]]] = []
        self._file = -1
        self._partial = Path()
        self._written_s = 0.0
        # One piece of memory for all layers: many of different sizes would leave gaps between them.
        self._room = torch.empty(WRITTEN_AT_ONCE, dtype=torch.uint8)
        try:
            self._file, name = tempfile.mkstemp(PARTIAL, f"{path.stem}-", path.parent)
            self._partial = Path(name)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            free = os.fstatvfs(self._file)
            if free.f_bavail * free.f_frsize < expected + FREE_LEAST:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(self._file, bound)
            self._mapped = mmap(self._file, bound, access=ACCESS_READ)
        except BaseException:
            self.close()
            raise

    def packed(self, layer: BlockLayer) -> Packed:
        places = self._places.add(layer)
        views = Packed(*(_view(self._mapped, start, size) for start, size in places))
        self._layers.append((layer, places))
        if self._file < 0:
            layer.pack(views)
            return views
        try:
            self._write_layer(layer, places)
        except OSError as error:
            log.warning("packed weights are not kept in %s: %s", self._path.parent, error.strerror)
            self._move_to_memory()
        return views

    def finish(self) -> None:
        if self._file < 0 or not self._layers:
            self.close()
            return
        try:
            index = json.dumps(self._places.index).encode()
            _write_at(self._file, index, self._places.end)
            os.ftruncate(self._file, self._places.end + len(index))
            size = self._places.end - HEADER
            whole = _view(mmap(self._file, 0, access=ACCESS_READ), HEADER, size + len(index))
            checksums = (
                self._library.triolet_checksum(whole[first:].data_ptr(), len(whole) - first)
                for first in (0, size)
            )
            head = _FIELDS.pack(MAGIC, size, len(index), *checksums)
            _write_at(self._file, head.ljust(HEADER, b"\0"), 0)
            self._partial.replace(self._path)  # until now, nobody else knew of the file
            _vouch_later(self._path, self._file, _vow_of(self._path.parent, self._file))
        except OSError as error:
            log.warning("packed weights are not kept in %s: %s", self._path.parent, error.strerror)
            self._move_to_memory()
        self.close()

    def close(self) -> None:
        if self._file >= 0:
            if self._partial.exists():
                self._partial.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1
        if self._lock >= 0:  # a load that waits for it then holds a lock without a file: no harm
            self._path.with_suffix(LOCK).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1
        self._layers.clear()
        self._room = torch.empty(0, dtype=torch.uint8)

    def _write_layer(self, layer: BlockLayer, places: list[list[int]]) -> None:
        for piece in layer.pieces(self._room):
            begin = time.monotonic()
            for tensor, first, (start, _) in zip(piece.packed, piece.firsts, places, strict=True):
                _write_at(self._file, tensor.numpy().data, start + first)
            self._written_s += time.monotonic() - begin
            if self._written_s > SLOW_S + self._places.end / FAST:
                raise OSError(errno.ETIMEDOUT, "the disk is slow")

    def _move_to_memory(self) -> None:
        """Put memory into the mapping's place, pack all layers into it, and remove the file, whose
        blocks its disk then has again."""
        length = len(self._mapped)
        address = _view(self._mapped, 0, length).data_ptr()
        _map_memory(address, length)
        for layer, places in self._layers:
            layer.pack(Packed(*(_view(self._mapped, start, size) for start, size in places)))
        self.close()


def _map_memory(address: int, length: int) -> None:
    """Map new memory at an address, in the place of what is mapped there."""
    map_ = _libc().mmap
    map_.restype = ctypes.c_void_p
    map_.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    writable, fixed_private_memory = 3, 0x32  # PROT_READ | PROT_WRITE; MAP_* of Linux
    if map_(address, length, writable, fixed_private_memory, -1, 0) != address:
        raise MemoryError("no memory for packed weights")


# ---- files


def _make_room(folder: Path, left: int) -> None:
    """Remove what killed writers left, old notes, and the files that were used longest ago, so that
    at most ``left`` bytes stay."""
    for path in folder.glob(f"*{PARTIAL}"):
        _remove_if_left(path)
    for path in folder.glob(f"*{VOUCHED}"):
        if not path.with_suffix(WHOLE).exists():
            path.unlink(missing_ok=True)
    for path in _newest_first(folder.glob(f"*{KNOWN}"))[KNOWN_MOST:]:
        path.unlink(missing_ok=True)
    for path in _newest_first(folder.glob(f"*{WHOLE}")):
        with suppress(FileNotFoundError):
            left -= path.stat().st_size
            if left < 0:
                path.unlink()


def _hash(handle: int, size: int) -> str:
    """Return the hash of an open file's ``size`` bytes: of parts, which all cores read."""
    from concurrent.futures import ThreadPoolExecutor

    part = max(64 << 20, -(-size // 64))

    def of_part(start: int) -> bytes:
        digest, buffer = hashlib.sha256(), bytearray(HASHED_AT_ONCE)
        for place in range(start, min(start + part, size), HASHED_AT_ONCE):
            count = os.preadv(handle, [memoryview(buffer)[: start + part - place]], place)
            digest.update(memoryview(buffer)[:count])
        return digest.digest()

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        digests = b"".join(pool.map(of_part, range(0, size, part)))
    return hashlib.sha256(digests + str((size, part)).encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Write a small file aside and rename it."""
    handle, name = tempfile.mkstemp(PARTIAL, dir=path.parent)
    try:
        _write_at(handle, data, 0)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def _write_at(handle: int, data: bytes | memoryview, place: int) -> None:
    left = memoryview(data)
    while left:
        count = os.pwrite(handle, left, place)
        left, place = left[count:], place + count


def _locked(path: Path) -> int:
    """Wait until no other load packs these weights, and return the lock's descriptor. A lock ends
    with its process; one that is held for longer than `LOCK_LIMIT_S` is ignored."""
    lock = os.open(
        path.with_suffix(LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    end = time.monotonic() + LOCK_LIMIT_S
    while not try_lock(lock) and time.monotonic() < end:
        time.sleep(_LOCK_STEP_S)
    return lock


def _remove_if_left(path: Path) -> None:
    """Remove a file that is being written unless its writer lives, whose lock it has."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if try_lock(handle):
                path.unlink()
        finally:
            os.close(handle)


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    """Sort files by their last use: of a packed file, its note's time tells it, or its own."""
    times: dict[Path, float] = {}
    for path in paths:
        for file in (path, path.with_suffix(VOUCHED)):
            with suppress(FileNotFoundError):
                times[path] = max(times.get(path, 0.0), file.stat().st_mtime)
    return sorted(times, key=lambda path: -times[path])
