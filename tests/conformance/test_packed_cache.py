"""Packed weights that are kept are those that a load without them packs, whatever happens to their
files."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from mmap import ACCESS_READ, mmap

import pytest
import torch

from engine.worker.forward import native, packed_cache
from engine.worker.forward.block_layer import BlockLayer
from engine.worker.forward.packed_cache import HEADER, PackedCache, open_cache
from engine.worker.forward.user_cache import try_lock
from tests.checkpoints.text import Shape, make
from tests.support.gguf_files import Q4_K, write_model
from tests.support.model_zoo import load_runner
from tests.support.programs import ROOT

LIMIT = 1 << 30
IS_ON_TMPFS = packed_cache._is_on_tmpfs
# A load in a process of its own, which may be killed at one of its writes, counted from the first
# one or, if the number is negative, from the note that vouches for the file.
CHILD = """
import os, signal, sys, threading
from engine.worker.forward import native, packed_cache
from tests.support.model_zoo import load_runner
packed_cache.WORTH = packed_cache.FREE_LEAST = 0
packed_cache.WRITTEN_AT_ONCE = 1 << 14
write, vouch, left = packed_cache._write_at, packed_cache._vouch, [int(sys.argv[3])]
def write_at(*args):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*args)
def count_from_here(*args):
    if int(sys.argv[3]) < 0:
        left[0] = -int(sys.argv[3])
    vouch(*args)
packed_cache._write_at, packed_cache._vouch = write_at, count_from_here
packed_cache._is_on_tmpfs = lambda _: False
print("begun", flush=True)
runner, _ = load_runner(sys.argv[1], packed_cache=sys.argv[2])
print("loaded", flush=True)
runner.close()
for thread in threading.enumerate():
    if thread.name == packed_cache.NOTING:
        thread.join()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a GGUF file with layers of several types, and a packed layer of three pieces."""
    root = tmp_path_factory.mktemp("model")
    checkpoint = make(root / "made", "qwen2", Shape(2, 256, 4, 2, 512, 500, 256))
    return write_model(checkpoint, root / "model.gguf", Q4_K)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Have small files kept, too, in many pieces, on a disk that may be nearly full."""
    monkeypatch.setattr(packed_cache, "WORTH", 0)
    monkeypatch.setattr(packed_cache, "FREE_LEAST", 0)
    monkeypatch.setattr(packed_cache, "WRITTEN_AT_ONCE", 1 << 14)
    monkeypatch.setattr(packed_cache, "SETTLED_S", 0.0)
    monkeypatch.setattr(packed_cache, "_is_on_tmpfs", lambda _: False)  # as /tmp may be


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


class Watch:
    """Counts layers that are packed, hashes of content, and packed files that are read whole."""

    def __init__(self, monkeypatch):
        self.packed = self.hashed = self.checked = 0
        pack, hash_, check = BlockLayer._pack, packed_cache._hash, packed_cache._check

        def count_pack(*args):
            self.packed += 1
            pack(*args)

        def count_hash(*args):
            self.hashed += 1
            return hash_(*args)

        def count_check(*args):
            self.checked += 1
            check(*args)

        monkeypatch.setattr(BlockLayer, "_pack", count_pack)
        monkeypatch.setattr(packed_cache, "_hash", count_hash)
        monkeypatch.setattr(packed_cache, "_check", count_check)


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


def weights_of(model, cache, *, is_noted=True):
    """Return all packed bytes of a model that was loaded with a cache, by default once what vouches
    for its file is noted."""
    runner, _ = load_runner(model, packed_cache=str(cache))
    module = runner._model.module
    tensors = [*module.parameters(), *module.buffers()]
    found = [tensor.detach().contiguous().view(torch.uint8).clone() for tensor in tensors]
    runner.close()
    if is_noted:
        for thread in notes_to_come():
            thread.join()
    return [tensor for tensor in found if tensor.numel()]


def notes_to_come():
    return [one for one in threading.enumerate() if one.name == packed_cache.NOTING]


def alike(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.fixture(scope="module")
def plain(model):
    """Return the bytes of a load without a cache."""
    return weights_of(model, "off")


def files(folder, suffix=".packed"):
    return sorted(path for path in folder.iterdir() if path.name.endswith(suffix))


def only(folder):
    [path] = files(folder)
    return path


def test_the_second_load_maps_what_the_first_one_packed(model, plain, folder, watch):
    assert alike(weights_of(model, folder), plain)
    assert watch.packed > 10
    assert watch.hashed == 1
    watch.packed = watch.hashed = 0
    os.utime(note_of(folder), (1, 1))
    assert alike(weights_of(model, folder), plain)
    assert (watch.packed, watch.hashed, watch.checked) == (0, 0, 0)
    assert note_of(folder).stat().st_mtime > 1  # the file's last use
    assert sorted(path.suffix for path in folder.iterdir()) == [".known", ".packed", ".vouched"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_two_replicas_share_the_pages_of_one_file(model, folder):
    weights_of(model, folder)
    runners = [load_runner(model, packed_cache=str(folder))[0] for _ in range(2)]
    with open("/proc/self/maps") as maps:
        mapped = [line.split() for line in maps if str(only(folder)) in line]
    assert len(mapped) == 2
    assert len({fields[4] for fields in mapped}) == 1  # the inode
    assert {fields[1] for fields in mapped} == {"r--s"}
    for runner in runners:
        runner.close()


PLACES = ("magic", "sizes", "layers", "the last layer", "index", "end")


@pytest.mark.parametrize("what", PLACES)
def test_an_altered_file_is_discarded_and_packed_anew(model, plain, folder, watch, what):
    """One bit anywhere, in the same file and with its time set back: each tensor's bytes, the
    index, and the header."""
    weights_of(model, folder)
    path = only(folder)
    state = path.stat()
    data = bytearray(path.read_bytes())
    layers = int.from_bytes(data[16:24], "little")
    places = (3, 17, HEADER + 5, HEADER + layers - 70, HEADER + layers + 9, len(data) - 1)
    data[dict(zip(PLACES, places, strict=True))[what]] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_mtime_ns == state.st_mtime_ns
    assert (path.stat().st_ino, path.stat().st_size) == (state.st_ino, state.st_size)
    watch.packed = 0
    assert alike(weights_of(model, folder), plain)
    assert watch.packed
    watch.packed = 0
    assert alike(weights_of(model, folder), plain)
    assert not watch.packed


def note_of(folder):
    [note] = files(folder, ".vouched")
    return note


def spoil(folder, place=HEADER + 5, flipped=4):
    """Change a byte of the packed file, a weight's by default, and have its note vouch for it: as
    if the disk returned other bytes than it was given, which no time shows."""
    path, note = only(folder), note_of(folder)
    data = bytearray(path.read_bytes())
    data[place] ^= flipped
    path.write_bytes(data)
    note.write_text(packed_cache.BOOT.read_text() + packed_cache._identity(path.stat()))


@pytest.mark.parametrize("why", ["not in memory", "another boot", "of others", "a link"])
def test_a_note_that_does_not_count_has_the_file_read_whole(
    model, plain, folder, tmp_path, watch, monkeypatch, why
):
    weights_of(model, folder)
    spoil(folder)
    assert not alike(weights_of(model, folder), plain)  # such a note is all that vouches
    assert not watch.checked
    if why == "not in memory":
        monkeypatch.setattr(native.load(), "triolet_in_memory", lambda *_: 0)
    elif why == "another boot":
        (tmp_path / "boot").write_text("another\n")
        monkeypatch.setattr(packed_cache, "BOOT", tmp_path / "boot")
    elif why == "of others":
        note_of(folder).chmod(0o644)
    else:
        note_of(folder).rename(tmp_path / "elsewhere")
        (folder / f"{only(folder).stem}.vouched").symlink_to(tmp_path / "elsewhere")
    watch.packed = 0
    assert alike(weights_of(model, folder), plain)
    assert watch.packed
    assert watch.checked


@pytest.mark.parametrize("what", ["magic", "size", "index's size", "name", "place", "bracket"])
def test_a_note_does_not_vouch_for_the_header_and_the_index(model, plain, folder, watch, what):
    """They say where the weights are; one damaged byte of them has the file packed anew."""
    weights_of(model, folder)
    data = only(folder).read_bytes()
    index = HEADER + int.from_bytes(data[16:24], "little")
    spoil(folder, {
        "magic": 3,
        "size": 17,
        "index's size": 24,
        "name": index + 4,
        "place": data.index(b"[[", index) + 2,
        "bracket": index,
    }[what], 1)  # fmt: skip
    watch.packed = 0
    assert alike(weights_of(model, folder), plain)
    packed = watch.packed
    assert packed > 10
    assert alike(weights_of(model, folder), plain)
    assert watch.packed == packed


@pytest.mark.parametrize("place", [[HEADER - 1, 1], [HEADER, 101], [HEADER + 101, 0], [HEADER, -1]])
def test_an_index_that_points_outside_of_its_layers_is_refused(tmp_path, place):
    library, index = native.load(), json.dumps({"a": [[HEADER, 100], place]}).encode()
    data = torch.frombuffer(bytearray(index), dtype=torch.uint8)
    own = library.triolet_checksum(data.data_ptr(), len(data))
    head = packed_cache._FIELDS.pack(packed_cache.MAGIC, 100, len(index), 0, own)
    path = tmp_path / "own.packed"
    path.write_bytes(head.ljust(HEADER, b"\0") + bytes(100) + index)
    with path.open("rb") as file, pytest.raises(ValueError, match="a layer outside of it"):
        packed_cache._index_of(mmap(file.fileno(), 0, access=ACCESS_READ), library)


@pytest.mark.parametrize("note", [b"", b"a\n", b"\xff", None])
def test_a_file_without_a_note_is_read_whole_once(model, plain, folder, watch, note):
    weights_of(model, folder)
    if note is None:
        note_of(folder).unlink()
    else:
        note_of(folder).write_bytes(note)
    watch.packed = 0
    for _ in range(3):
        assert alike(weights_of(model, folder), plain)
    assert (watch.packed, watch.checked) == (0, 1)


def test_a_file_that_changes_while_it_is_read_gets_no_note(
    model, plain, folder, watch, monkeypatch
):
    weights_of(model, folder)
    note_of(folder).unlink()
    check = packed_cache._check

    def check_and_change(*args):
        check(*args)
        os.utime(only(folder))

    monkeypatch.setattr(packed_cache, "_check", check_and_change)
    for count in (1, 2):
        assert alike(weights_of(model, folder), plain)
        assert watch.checked == count
        assert not files(folder, ".vouched")


@pytest.mark.parametrize("limit_s", [0.0, 0.02])
def test_a_file_that_changed_within_the_last_tick_gets_no_note(
    model, plain, folder, watch, monkeypatch, limit_s
):
    """A later change may have the same time. Here the clock stands still, or is not read."""
    real = packed_cache._last_change
    monkeypatch.setattr(packed_cache, "TICK_LIMIT_S", limit_s)
    monkeypatch.setattr(packed_cache, "_last_change", lambda state: real(state) + 10**12)
    for count in (0, 1, 2):
        assert alike(weights_of(model, folder), plain)
        assert watch.checked == count
    assert not files(folder, ".vouched")
    assert not files(folder, ".partial")


def test_a_note_that_cannot_be_written_costs_time_only(model, plain, folder, watch, monkeypatch):
    weights_of(model, folder)
    note_of(folder).unlink()

    def pwrite(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    watch.packed = 0
    for count in (1, 2):
        os.utime(only(folder), (1, 1))
        assert alike(weights_of(model, folder), plain)
        assert (watch.packed, watch.checked) == (0, count)
        assert only(folder).stat().st_mtime > 1  # the file's last use
    assert {path.suffix for path in folder.iterdir()} == {".known", ".packed"}
    monkeypatch.undo()


def test_a_file_in_memory_alone_gets_no_note(model, plain, folder, watch, monkeypatch):
    """On tmpfs, a store through a shared mapping may change no time of the file."""
    monkeypatch.setattr(packed_cache, "_is_on_tmpfs", lambda _: True)
    for count in (0, 1, 2):
        assert alike(weights_of(model, folder), plain)
        assert watch.checked == count
    assert not files(folder, ".vouched")


def test_a_file_in_memory_alone_is_known():
    memory = os.memfd_create("memory")
    with open("/proc/self/maps") as of_kernel:
        assert [IS_ON_TMPFS(handle) for handle in (memory, of_kernel.fileno())] == [True, False]
    os.close(memory)


def test_a_file_that_the_disk_did_not_take_is_not_vouched_for(
    model, plain, folder, watch, monkeypatch, caplog
):
    """The system drops the pages that it could not write, and no time of the file shows it."""
    monkeypatch.setattr(os, "fdatasync", failing(errno.EIO))
    for count in (1, 2):
        watch.packed = 0
        assert alike(weights_of(model, folder), plain)
        assert watch.packed
        assert caplog.text.count("the disk did not take") == count
        assert {path.suffix for path in folder.iterdir()} == {".known"}


def test_a_file_that_was_left_unsynced_is_synced_before_its_note(
    model, plain, folder, watch, monkeypatch
):
    weights_of(model, folder)
    note_of(folder).unlink()
    monkeypatch.setattr(os, "fdatasync", failing(errno.EIO))
    assert alike(weights_of(model, folder), plain)
    assert watch.checked
    assert {path.suffix for path in folder.iterdir()} == {".known"}


def failing(error):
    def fail(*_):
        raise OSError(error, os.strerror(error))

    return fail


def test_a_load_does_not_wait_for_the_disk(model, plain, folder, watch, monkeypatch):
    """The note is made once the disk has the file; until then, others read it whole."""
    may_end, sync = threading.Event(), os.fdatasync

    def fdatasync(handle):
        assert may_end.wait(30)
        sync(handle)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    for count in (0, 1):
        assert alike(weights_of(model, folder, is_noted=False), plain)
        assert watch.checked == count
        assert notes_to_come()
        assert not files(folder, ".vouched")
    may_end.set()
    assert alike(weights_of(model, folder), plain)
    assert note_of(folder)
    for _ in range(2):
        watch.checked = 0
        assert alike(weights_of(model, folder), plain)
    assert not watch.checked


@pytest.mark.parametrize("size", [0, 20, HEADER, HEADER + 1000, -1])
def test_a_truncated_file_is_discarded_and_packed_anew(model, plain, folder, watch, size):
    weights_of(model, folder)
    path = only(folder)
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    watch.packed = 0
    assert alike(weights_of(model, folder), plain)
    assert watch.packed
    assert only(folder).stat().st_size > HEADER + 1000


@pytest.mark.parametrize("what", ["others may read it", "a link", "a folder"])
def test_what_is_not_the_users_own_file_is_not_read(model, plain, folder, tmp_path, watch, what):
    weights_of(model, folder)
    path = only(folder)
    if what == "others may read it":
        path.chmod(0o644)
    elif what == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        path.mkdir()
    watch.packed = 0
    assert alike(weights_of(model, folder), plain)
    assert watch.packed


def test_a_folder_that_others_may_use_is_not_used(model, plain, folder, caplog):
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    assert alike(weights_of(model, folder), plain)
    assert not [*folder.iterdir()]
    assert "other users may use it" in caplog.text


@pytest.mark.parametrize("at", [1, 7, 25])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_is_full_costs_time_only(
    model, plain, folder, watch, monkeypatch, caplog, at, error
):
    """At any write; then all layers are in memory, and the folder has nothing of them."""
    written, write = [], os.pwrite

    def pwrite(handle, data, place):
        written.append(place)
        if len(written) >= at:
            raise OSError(error, os.strerror(error))
        return write(handle, data, place)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert alike(weights_of(model, folder), plain)
    assert os.strerror(error) in caplog.text
    assert {path.suffix for path in folder.iterdir()} <= {".known"}
    monkeypatch.undo()


def test_a_disk_with_little_room_is_left_alone(model, plain, folder, monkeypatch, caplog):
    monkeypatch.setattr(packed_cache, "FREE_LEAST", 1 << 60)
    assert alike(weights_of(model, folder), plain)
    assert "No space left" in caplog.text
    assert not files(folder)
    assert not files(folder, ".partial")


def test_a_disk_that_is_slow_is_given_up(model, plain, folder, monkeypatch, caplog):
    monkeypatch.setattr(packed_cache, "SLOW_S", -1.0)
    assert alike(weights_of(model, folder), plain)
    assert "the disk is slow" in caplog.text
    assert not files(folder)


def child(model, folder, writes):
    """Start a load that is killed at one of its writes; 0: it is not."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(model), str(folder), str(writes)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("writes", [2, 9, 25])
def test_what_a_killed_load_leaves_is_removed(model, plain, folder, watch, writes):
    with child(model, folder, writes) as process:
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    [left] = files(folder, ".partial")
    assert not files(folder)
    assert alike(weights_of(model, folder), plain)
    assert not left.exists()
    watch.packed = 0
    assert alike(weights_of(model, folder), plain)
    assert not watch.packed


def test_a_load_that_is_killed_at_its_note_leaves_a_whole_file(model, plain, folder, watch):
    with child(model, folder, -1) as process:
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not files(folder, ".vouched")
    for _ in range(2):
        assert alike(weights_of(model, folder), plain)
    assert (watch.packed, watch.checked) == (0, 1)


def test_two_servers_at_once_check_and_note_one_file(model, plain, folder, watch):
    weights_of(model, folder)
    note_of(folder).unlink()
    both = [child(model, folder, 0) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert said == ["begun\nloaded\n"] * 2
    assert not files(folder, ".partial")
    watch.packed = 0
    assert alike(weights_of(model, folder), plain)
    assert (watch.packed, watch.checked) == (0, 0)


def test_two_servers_at_once_make_one_file(model, plain, folder, watch):
    both = [child(model, folder, 0) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert said == ["begun\nloaded\n"] * 2
    assert len(files(folder)) == 1
    assert not files(folder, ".partial")
    assert alike(weights_of(model, folder), plain)
    assert not watch.packed


def test_a_load_waits_for_another_one_that_packs_the_same(model, plain, folder, watch, monkeypatch):
    """The second one packs nothing."""
    begun, may_go_on = threading.Event(), threading.Event()
    write = packed_cache._WrittenLayers._write_layer

    def write_layer(self, layer, places):
        begun.set()
        assert may_go_on.wait(30)
        write(self, layer, places)

    monkeypatch.setattr(packed_cache._WrittenLayers, "_write_layer", write_layer)
    found = {}
    first = threading.Thread(target=lambda: found.update(first=weights_of(model, folder)))
    first.start()
    assert begun.wait(30)
    second = threading.Thread(target=lambda: found.update(second=weights_of(model, folder)))
    second.start()
    time.sleep(0.2)
    watch.packed = 0
    may_go_on.set()
    first.join()
    packed = watch.packed
    second.join()
    assert watch.packed == packed
    assert alike(found["first"], plain)
    assert alike(found["second"], plain)


@pytest.mark.parametrize("where", ["_make_room", "_open_kept"])
def test_a_load_that_cannot_use_its_folder_holds_no_lock(
    model, plain, folder, monkeypatch, caplog, where
):
    """Else the next one would wait for it."""
    calls, real = [], getattr(packed_cache, where)

    def fail(*args):
        calls.append(args)
        if where == "_open_kept" and len(calls) == 1:
            return real(*args)
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(packed_cache, where, fail)
    assert alike(weights_of(model, folder), plain)
    assert "Permission denied" in caplog.text
    [lock] = files(folder, ".lock")
    with lock.open() as file:
        assert try_lock(file.fileno())


def test_a_load_that_hangs_is_not_waited_for_for_ever(model, plain, folder, monkeypatch):
    """Another one then packs by itself."""
    weights_of(model, folder)
    path = only(folder)
    path.unlink()
    lock = packed_cache._locked(path)
    monkeypatch.setattr(packed_cache, "LOCK_LIMIT_S", 0.1)
    assert alike(weights_of(model, folder), plain)
    os.close(lock)
    assert only(folder) == path


def test_the_content_decides_and_not_the_name_or_the_times(model, folder, tmp_path, watch):
    """A copy has the same packed weights; another content in its place, of the same size and with
    the times set back, has others."""
    own = tmp_path / "own.gguf"
    shutil.copyfile(model, own)
    weights_of(model, folder)
    watch.packed = 0
    first = weights_of(own, folder)
    assert not watch.packed
    state = own.stat()
    data = bytearray(own.read_bytes())
    data[len(data) // 2] ^= 1  # of a tensor in blocks
    own.write_bytes(data)
    os.utime(own, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert own.stat().st_mtime_ns == state.st_mtime_ns
    assert own.stat().st_ino == state.st_ino
    second = weights_of(own, folder)
    assert watch.packed
    assert not alike(first, second)
    assert alike(second, weights_of(own, "off"))
    assert len(files(folder)) == 2


def test_a_file_that_changed_just_now_is_hashed_again(model, folder, watch, monkeypatch):
    """Two changes within a tick of the file system's clock have the same times."""
    monkeypatch.setattr(packed_cache, "SETTLED_S", 1e6)
    for _ in range(2):
        weights_of(model, folder)
    assert watch.hashed == 2
    assert not files(folder, ".known")


@pytest.mark.parametrize("note", [b"", b"a\nb", b"\xff", b"\n\n\n"])
def test_a_note_of_content_that_is_damaged_is_not_read(model, plain, folder, watch, note):
    weights_of(model, folder)
    files(folder, ".known")[0].write_bytes(note)
    assert alike(weights_of(model, folder), plain)
    assert watch.hashed == 2


def test_another_layout_has_another_file(model, folder, watch, monkeypatch):
    weights_of(model, folder)
    content = PackedCache._content
    monkeypatch.setattr(PackedCache, "_content", lambda self, file: content(self, file) + "x")
    watch.packed = 0
    weights_of(model, folder)
    assert watch.packed
    assert len(files(folder)) == 2


def test_layers_that_are_joined_otherwise_are_packed_anew(model, plain, folder, watch, monkeypatch):
    weights_of(model, folder)
    monkeypatch.setattr(BlockLayer, "signature", property(lambda self: str(self.outputs)))
    watch.packed = 0
    assert alike(weights_of(model, folder), plain)
    assert watch.packed
    assert not files(folder)


def test_the_files_used_longest_ago_are_removed(folder):
    cache = open_cache(str(folder), LIMIT)
    for name, age in (("oldest", 30), ("used", 40), ("newest", 10)):
        path = cache.folder / f"{name}.packed"
        path.write_bytes(bytes(100))
        os.utime(path, (time.time() - age,) * 2)
    (folder / "used.vouched").write_bytes(b"")  # its time is that of the last use
    (folder / "gone.vouched").write_bytes(b"")
    packed_cache._make_room(folder, 250)
    assert [path.stem for path in files(folder)] == ["newest", "used"]
    assert [path.stem for path in files(folder, ".vouched")] == ["used"]
    packed_cache._make_room(folder, 100)
    assert [path.stem for path in files(folder)] == ["used"]


def test_a_model_that_exceeds_the_bound_is_not_kept(model, plain, folder, caplog):
    runner, _ = load_runner(model, packed_cache=str(folder), packed_cache_bytes=1000)
    runner.close()
    assert "would take more than --packed-cache-bytes" in caplog.text
    assert not files(folder)


@pytest.mark.parametrize(("setting", "limit"), [("off", LIMIT), ("", 0)])
def test_the_cache_can_be_turned_off(setting, limit):
    assert open_cache(setting, limit) is None


def test_by_default_the_cache_is_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = open_cache("", LIMIT)
    assert cache.folder == tmp_path / "triolet" / "packed"
    assert cache.folder.stat().st_mode & 0o777 == 0o700
