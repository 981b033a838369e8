"""A GGUF model that is divided into several files is the model in one file."""

import shutil

import pytest
import torch

from engine.errors import SpawnFailed
from engine.worker.forward import packed_cache
from engine.worker.load.gguf.file import GgufFile
from engine.worker.load.gguf.parts import parts_of
from engine.worker.load.resolve import resolve
from tests.checkpoints.text import Shape, make
from tests.conformance.test_packed_cache import alike, files, weights_of
from tests.support.gguf_files import Q4_K, part_path, write_model
from tests.support.model_zoo import load_runner

SHAPE = Shape(2, 256, 4, 2, 512, 500, 256)
PARTS = {"evenly": (8, 8), "the first without tensors": (0, 5), "one": (), "two": (3,)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made"), "qwen2", SHAPE)


@pytest.fixture
def divided(checkpoint, tmp_path):
    """Return the path of the first of three parts, in a directory without other files."""
    (tmp_path / "parts").mkdir()
    return write_model(checkpoint, tmp_path / "parts" / "model.gguf", Q4_K, parts=(8, 8))


def read(*paths):
    with GgufFile(*paths) as file:
        return {name: file.read(name) for name in file.tensors}, file.config()


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_all_parts_together_are_the_file_in_one(checkpoint, tmp_path, parts):
    whole = write_model(checkpoint, tmp_path / "whole.gguf", Q4_K)
    first = write_model(checkpoint, tmp_path / "m-q4.gguf", Q4_K, parts=parts)
    paths = parts_of(first)
    assert len(paths) == len(parts) + 1
    (tensors, config), (wanted, its_config) = read(*paths), read(whole)
    assert config == its_config
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("by", ["the first part", "another part", "the directory"])
def test_a_model_in_parts_is_served_by_any_of_its_names(checkpoint, divided, tmp_path, by):
    paths = parts_of(divided)
    (divided.parent / "notes.txt").write_text("not a part")
    name = {"the first part": divided, "another part": paths[2], "the directory": divided.parent}
    assert resolve(str(name[by])).gguf == paths
    whole = write_model(checkpoint, tmp_path / "whole.gguf", Q4_K)
    assert alike(weights_of(name[by], "off"), weights_of(whole, "off"))


@pytest.mark.parametrize("missing", [(0,), (1,), (0, 2)])
@pytest.mark.parametrize("by", ["the first part", "the directory"])
def test_missing_parts_are_named(divided, missing, by):
    paths = parts_of(divided)
    for number in missing:
        paths[number].unlink()
    verb = "is" if len(missing) == 1 else "are"
    names = ", ".join(paths[number].name for number in missing)
    with pytest.raises(SpawnFailed, match=f"of its 3 parts, {names} {verb} missing; download"):
        load_runner(divided if by == "the first part" else divided.parent)


def test_of_many_missing_parts_a_few_are_named(divided):
    lonely = divided.with_name("other-00001-of-00400.gguf")
    divided.rename(lonely)
    with pytest.raises(SpawnFailed, match=r"other-00006-of-00400.gguf and 394 more are missing"):
        load_runner(lonely)


def test_two_models_in_one_directory_must_be_chosen_from(checkpoint, divided):
    write_model(checkpoint, divided.with_name("other.gguf"), Q4_K, parts=(4,))
    with pytest.raises(SpawnFailed, match=f"has 2 GGUF models; .* such as parts/{divided.name}"):
        load_runner(divided.parent)


def test_a_part_under_a_wrong_name_is_refused(checkpoint, divided):
    paths = parts_of(divided)
    shutil.copyfile(paths[2], paths[1])
    with pytest.raises(SpawnFailed, match=f"{paths[1].name} has the name of another part"):
        load_runner(divided)
    whole = divided.with_name("renamed.gguf")
    shutil.copyfile(paths[2], whole)
    with pytest.raises(SpawnFailed, match=r"one of 3 parts .* ends in -00003-of-00003\.gguf"):
        load_runner(whole)
    plain = write_model(checkpoint, divided.with_name("plain.gguf"), Q4_K)
    shutil.copyfile(plain, paths[1])
    with pytest.raises(SpawnFailed, match=r"its split.no is 0, and its split.count 0"):
        load_runner(divided)


def test_a_part_of_another_model_is_found_by_the_number_of_tensors(checkpoint, divided, tmp_path):
    other = write_model(checkpoint, tmp_path / "other.gguf", Q4_K, parts=(8, 9))
    shutil.copyfile(parts_of(other)[1], parts_of(divided)[1])
    with pytest.raises(SpawnFailed, match=r"have \d+ tensors, and its split.tensors.count is \d+"):
        load_runner(divided)


def test_a_part_that_is_cut_short_is_named(divided):
    second = parts_of(divided)[1]
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(SpawnFailed, match=f"{second.name} is cut short"):
        load_runner(divided)


def test_packed_weights_of_all_parts_are_kept_together(divided, tmp_path, monkeypatch):
    """A change of any part makes others."""
    for name in ("WORTH", "FREE_LEAST", "SETTLED_S"):
        monkeypatch.setattr(packed_cache, name, 0)
    folder = tmp_path / "cache"
    plain = weights_of(divided, "off")
    for _ in range(2):
        assert alike(weights_of(divided, folder), plain)
    assert (len(files(folder)), len(files(folder, ".known"))) == (1, 3)
    for number, path in enumerate(parts_of(divided)):
        data = bytearray(path.read_bytes())
        data[len(data) - 1000] ^= 1
        path.write_bytes(data)
        assert alike(weights_of(divided, folder), weights_of(divided, "off"))
        assert len(files(folder)) == number + 2


def test_a_name_with_an_impossible_number_is_that_of_a_file_in_one(tmp_path):
    for name in ("m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-1-of-3.gguf"):
        assert parts_of(tmp_path / name) == (tmp_path / name,)
    assert parts_of(tmp_path / "m-00002-of-00002.gguf") == (
        part_path(tmp_path / "m.gguf", 0, 2), part_path(tmp_path / "m.gguf", 1, 2),
    )  # fmt: skip
