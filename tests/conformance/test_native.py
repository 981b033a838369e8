"""The kernels' library: built once, found again, and replaced where it cannot be built."""

import errno
import os
import pwd
import subprocess
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.worker.forward import kernel_structs as structs
from engine.worker.forward import native
from engine.worker.forward.backends import pick_backend
from engine.worker.forward.native_attention import NativeBackend
from engine.worker.forward.reference_attention import ReferenceBackend
from engine.worker.forward.variants import VARIANTS, features_of
from engine.worker.interface import RunnerSpec
from engine.worker.load.architectures import LayerShape
from engine.worker.text.runner import TorchRunner
from tests.checkpoints.text import make
from tests.conformance import test_native_attention as attention
from tests.conformance import test_native_products as products
from tests.support.programs import output_of

CPU = torch.device("cpu")
NARROW = [LayerShape(2, 16)]


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Use an empty cache folder, and a process that has not looked for the library yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native._load_once.cache_clear()
    yield tmp_path / "triolet" / "kernels"
    native._load_once.cache_clear()


@pytest.fixture
def quick(monkeypatch):
    """Compile in a second, without optimisation, for tests that compute nothing."""
    flags = tuple("-O0" if flag == "-O3" else flag for flag in native.FLAGS)
    monkeypatch.setattr(native, "FLAGS", flags)


def count_compilations(monkeypatch):
    seen, stock = [], native._compile
    monkeypatch.setattr(
        native, "_compile", lambda *arguments: (seen.append(1), stock(*arguments))[1]
    )
    return seen


@pytest.mark.slow
def test_a_library_is_compiled_once_and_found_again(fresh, quick, monkeypatch):
    compiled = count_compilations(monkeypatch)
    first = native.load()
    assert native.load() is first
    native._load_once.cache_clear()
    assert native.kind(native.load()) == native.kind(first)
    assert len(compiled) == 1
    [path] = fresh.iterdir()
    assert path.name.startswith("kernels-")
    assert not fresh.stat().st_mode & 0o022


@pytest.mark.slow
def test_two_processes_that_start_at_once_both_work(fresh, quick):
    found = []
    threads = [threading.Thread(target=lambda: found.append(native._load())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert len(list(fresh.iterdir())) == 1


@pytest.mark.parametrize("what", ["the flags", "the processor", "a source"])
def test_the_librarys_name_depends_on_what_it_is_built_from(fresh, monkeypatch, tmp_path, what):
    compiler = native.find_compiler()
    before = native._key(compiler, native.FLAGS)
    assert native._key(compiler, native.FLAGS) == before
    if what == "the flags":
        monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-g"))
    elif what == "the processor":
        monkeypatch.setattr(native, "_processor", lambda: "another")
    else:
        copy = tmp_path / "kernels"
        copy.mkdir()
        for path in native.SOURCES.glob("*.*"):
            (copy / path.name).write_bytes(path.read_bytes())
        (copy / "simd.h").write_text((copy / "simd.h").read_text() + "\n// more\n")
        monkeypatch.setattr(native, "SOURCES", copy)
    assert native._key(compiler, native.FLAGS) != before


def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(native.shutil, "which", lambda _name: None)
    return "there is no C\\+\\+ compiler"


def a_compiler_that_fails(monkeypatch, tmp_path):
    path = tmp_path / "cxx"
    path.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 1\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return "could not compile them: no such flag"


def a_library_of_another_layout(monkeypatch, tmp_path):
    """Expect another layout of arguments than the library has."""
    monkeypatch.setattr(native, "MIRRORED", structs.MIRRORED[::-1])
    return "has another layout"


def a_variant_of_no_name(monkeypatch, tmp_path):
    """Ask for a variant that does not exist."""
    monkeypatch.setenv(native.SWITCH, "x86-64-v9")
    return "must be off or one of x86-64-v3, x86-64-v3-vnni"


def a_variant_of_another_processor(monkeypatch, tmp_path):
    """Ask for a variant that the processor cannot run."""
    monkeypatch.setattr(native, "_cpuinfo", lambda: "flags : avx2 fma f16c bmi1 bmi2 movbe\n")
    monkeypatch.setenv(native.SWITCH, "x86-64-v3")
    return "ENGINE_KERNELS is x86-64-v3, and the processor has no abm"


def no_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "find_built", lambda *_: None)
    no_home(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    return "no folder to compile them in can be written: No such file or directory"


def no_room_in_the_cache(monkeypatch, tmp_path):
    def fail(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(native, "find_built", lambda *_: None)
    monkeypatch.setattr(tempfile, "mkstemp", fail)
    return "no folder to compile them in can be written: No space left on device"


def switched_off(monkeypatch, tmp_path):
    monkeypatch.setenv(native.SWITCH, "off")
    return "ENGINE_KERNELS is off"


@pytest.mark.parametrize(
    "trouble",
    [
        no_compiler,
        a_compiler_that_fails,
        a_library_of_another_layout,
        a_variant_of_no_name,
        a_variant_of_another_processor,
        no_temporary_folder,
        no_room_in_the_cache,
        switched_off,
    ],
)
def test_without_the_library_the_reference_serves_and_says_why(
    fresh, quick, monkeypatch, tmp_path, trouble
):
    why = trouble(monkeypatch, tmp_path)
    with pytest.raises(native.Unavailable, match=why):
        native.load()
    backend, reason = pick_backend(CPU, torch.float32, NARROW, ())
    assert isinstance(backend, ReferenceBackend)
    assert reason
    assert not list(fresh.glob("*.tmp"))


def test_a_server_without_a_compiler_starts_and_says_so_once(fresh, monkeypatch, tmp_path, caplog):
    no_compiler(monkeypatch, tmp_path)
    directory = make(tmp_path / "model")
    with caplog.at_level("INFO", "engine.worker.forward.backends"):
        runner = TorchRunner(RunnerSpec(str(directory), kv_bytes=1 << 22, threads=1))
        runner.load(lambda _progress: None)
    [record] = caplog.records
    assert "reference attention: there is no C++ compiler" in record.message
    assert isinstance(runner._backend, ReferenceBackend)


@pytest.mark.parametrize(
    ("device", "dtype", "width", "why"),
    [
        ("cpu", torch.float16, 16, "do not compute in torch.float16"),
        ("cpu", torch.float32, 24, "heads are 24 wide"),
        ("cpu", torch.float32, 512, "heads are 512 wide"),
        ("meta", torch.float32, 16, "no kernel for meta"),
    ],
)
def test_the_reference_does_what_the_kernels_cannot(device, dtype, width, why):
    backend, reason = pick_backend(torch.device(device), dtype, [LayerShape(2, width)], ())
    assert isinstance(backend, ReferenceBackend)
    assert why in reason


def no_home(monkeypatch, directory=None):
    """Be a user without HOME and without an entry in the passwd file."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: {}["nobody"])
    return "this user has no home directory; name a folder in XDG_CACHE_HOME"


def a_cache_that_others_can_write(monkeypatch, directory):
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    return f"{directory} cannot keep them (other users may write there); name another folder"


def a_cache_of_another_user(monkeypatch, directory):
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    return f"{directory} cannot keep them (other users may write there); name another folder"


def a_read_only_cache(monkeypatch, directory):
    stock = os.access
    monkeypatch.setattr(os, "access", lambda path, how: path != directory and stock(path, how))
    return f"{directory} cannot keep them (it is read-only); name another folder"


def a_file_in_the_place_of_the_cache(monkeypatch, directory):
    directory.parent.write_text("")
    return f"{directory} cannot keep them (Not a directory); name another folder"


@pytest.mark.parametrize(
    "trouble",
    [
        no_home,
        a_cache_that_others_can_write,
        a_cache_of_another_user,
        a_read_only_cache,
        a_file_in_the_place_of_the_cache,
    ],
)
def test_a_cache_that_cannot_be_used_is_told_once_and_the_kernels_run(
    fresh, monkeypatch, caplog, trouble
):
    monkeypatch.setattr(native, "find_built", lambda *_: None)
    monkeypatch.setattr(native, "_compile", lambda _compiler, _flags, path: path.touch())
    monkeypatch.setattr(native, "_open", lambda path: SimpleNamespace(_name=str(path)))
    why = trouble(monkeypatch, fresh)
    with caplog.at_level("WARNING", "engine.worker.forward.native"):
        assert native.load() is native.load()
    [record] = caplog.records
    assert record.message.startswith(f"the kernels are compiled at every start: {why}")
    assert native.uncached().startswith(why)
    assert not list(fresh.glob("*.so"))


def test_a_library_shows_nothing_but_the_functions_that_python_calls():
    """The loader merges variables that two libraries export under one name, such as the list of
    idle teams. Red if they are exported: with two builds in one process, numbers became NaN."""
    path = native.load()._name
    done = subprocess.run(
        ["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in done.stdout.splitlines()}
    assert "triolet_kind" in names
    assert {name for name in names if not name.startswith("triolet_")} == set()


@pytest.mark.slow
def test_both_use_torchs_own_openmp():
    """Torch and the kernels share one OpenMP library; two would have twice the threads."""
    code = (
        "from engine.worker.forward import native; native.load()\n"
        "print({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line})"
    )
    [path] = eval(output_of(code))  # the program prints a set of strings
    assert Path(path).parent == Path(torch.__file__).resolve().parent / "lib"


# The recorded cases are replayed for x86-64-v3, too (test_kernel_replay.py).
PROCESSORS = ["x86-64", pytest.param("x86-64-v3", marks=pytest.mark.full)]
if torch.cpu.get_capabilities().get("avx512_f"):
    PROCESSORS.append("x86-64-v4")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["-O1", pytest.param("-O3", marks=pytest.mark.full)])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_other_processors_get_the_same_numbers(fresh, monkeypatch, processor, level):
    """Run vector code that this processor does not use by itself.

    The shipped library's optimisation level would take four times as long to compile.
    """
    target = f"-march={processor}" if os.uname().machine == "x86_64" else "-O2"
    others = {"-march=native": target, "-O3": level}
    monkeypatch.setattr(native, "FLAGS", tuple(others.get(flag, flag) for flag in native.FLAGS))
    check_numbers(NativeBackend(native._load().library))


RUNNABLE = [
    variant
    for variant in VARIANTS
    if features_of(Path("/proc/cpuinfo").read_text()).issuperset(variant.needs)
]


@pytest.mark.full
@pytest.mark.parametrize("variant", RUNNABLE, ids=lambda one: one.name)
def test_a_wheels_variant_gets_the_same_numbers(fresh, monkeypatch, variant):
    flags = tuple(flag for flag in native.FLAGS if flag != "-march=native")
    monkeypatch.setattr(native, "FLAGS", flags + variant.flags)
    check_numbers(NativeBackend(native._load().library))


def check_numbers(backend):
    """Compare a library's attention and products with torch's."""
    for dtypes in attention.TOLERANCE:
        for shape in ((9, 3, 64), (2, 1, 80)):
            attention.test_the_result_is_the_references_in_float64(backend, shape, 24, 1.5, dtypes)
        attention.test_keys_and_values_are_written_where_the_slots_say(backend, dtypes)
    for dtype in products.NARROW:
        products.test_weights_of_16_bits_give_the_bits_of_the_same_weights_in_float32(
            backend, dtype, products.SHAPES[2]
        )
    for dtype in products.DTYPES:
        for shape in products.SHAPES[:3]:
            products.test_a_packed_layer_is_the_stock_one(backend, dtype, shape, True)
        products.test_a_rows_product_is_the_same_beside_any_others(backend, dtype)


def test_without_memory_for_the_arena_there_is_an_error():
    library = SimpleNamespace(triolet_arena_new=lambda: None)
    with pytest.raises(MemoryError, match="arena"):
        native.new_arena(library, library)
