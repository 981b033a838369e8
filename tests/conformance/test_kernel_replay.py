"""Recorded cases of the kernels, replayed by a driver in C++: on this machine, and as ARM's code in
an emulator. Integer products are the same to the last bit on all processors."""

import shutil
from pathlib import Path

import pytest

from engine.worker.forward import native
from engine.worker.forward.variants import VARIANTS, features_of
from tests.support import kernel_cases, toolchains

CPUINFO = Path("/proc/cpuinfo").read_text()
RUNNABLE = [one for one in VARIANTS if features_of(CPUINFO).issuperset(one.needs)]
IN_SHORT = "x86-64-v3"  # the quick run's variant, which most laptops can run
# The compiler's target; an emulated processor with no further features; the instructions used.
ARM = {
    "armv8-a": ("cortex-a53", "NEON, NEON"),
    "armv8.2-a+dotprod": ("cortex-a76", "NEON, NEON-DOTPROD"),
    "armv8.6-a+i8mm+bf16": ("max", "NEON-BF16, NEON-I8MM"),
}
FAULTS = {  # part of the names of cases that fail, a file, its line, and what replaces it
    "the codes of 4 bits are in the other order": (
        " bits, ",
        "triolet.cpp",
        "|= (from[k] & 15) << (quad % 2 ? 4 : 0);",
        "|= (from[k] & 15) << (quad % 2 ? 0 : 4);",
    ),
    "the last lane of a panel is dropped": (
        " bits, ",
        "small_weights.h",
        "to_floats(whole.total(m, n, start(m)))",
        "to_floats((i16v)((u16v)whole.total(m, n, start(m)) & (u16v)(lane_numbers() < 15)))",
    ),
    "what codes have more than their numbers is not taken off": (
        "4 bits, ",
        "small_weights.h",
        "return linear.bits == 8 || linear.table ? ZERO : (int32_t)linear.centre;",
        "return linear.centre ? 8 : ZERO;",
    ),
    "the upper bits of a code are those of the next input but four": (
        "6 bits, ",
        "small_weights.h",
        "constexpr int UP = 4 - QUAD * (BITS - 4);",
        "constexpr int UP = 4 - (QUAD ^ 1) * (BITS - 4);",
    ),
    "the fifth bit is dropped": (
        "5 bits, ",
        "small_weights.h",
        "(uint8_t)((1 << BITS) - 16)",
        "(uint8_t)((1 << BITS) - 16 & 32)",
    ),
    "a group has the scales of the one before": (
        "nested 2",
        "small_weights.h",
        "(input % NESTED >> shift));",
        "((input % NESTED >> shift) / 2 * 2));",
    ),
    "offsets have the factors of scales": (
        "nested 2",
        "small_weights.h",
        "return load((const f16 *)(own + factors) + PANEL) *",
        "return load((const f16 *)(own + factors)) *",
    ),
    "scales and offsets of a byte change places": (
        "nested 3",
        "small_weights.h",
        "w.nested == 3 ? load_nibbles<false>(own + at)",
        "w.nested == 3 ? load_nibbles<true>(own + at)",
    ),
    "the third bit of a code is that of the next input but four": (
        "3 bits, ",
        "small_weights.h",
        "upper << (2 - QUAD % 3)",
        "upper << (1 - QUAD % 2)",
    ),
    "offsets of a tile are its scales": (
        "130 rows, ",
        "small_weights.h",
        "load((const float *)tile + (PANELS + n) * PANEL);",
        "load((const float *)tile + n * PANEL);",
    ),
    "codes of any table are their numbers and a centre": (
        " bits, ",
        "small_weights.h",
        "own.has_table = linear.table;",
        "own.has_table = false;",
    ),
    "values have the scales of keys": (
        "attention, ",
        "attention_decode.h",
        "scales_at[length + j] = call.value_scales + place;",
        "scales_at[length + j] = call.key_scales + place;",
    ),
    "a chunk's keys have the scales of their position's first head": (
        "attention, ",
        "attention_prefill.h",
        "scale_at(call.key_scales, place)",
        "scale_at(call.key_scales, place - kv_head)",
    ),
    "int8 is rounded to even numbers only": (
        "attention, ",
        "paged_cache.h",
        "store_bytes(to + i, to_integers(number));",
        "store_bytes(to + i, (i16v)((u16v)to_integers(number) & 0xfffffffeu));",
    ),
    "numbers are written a thousandth too large": (
        "attention, ",
        "paged_cache.h",
        "for (long i = 0; i < width; i += LANES) store(to + i, load(from + i));",
        "for (long i = 0; i < width; i += LANES) store(to + i, load(from + i) * 1.001f);",
    ),
    "half precision is read as bfloat16": (
        "torch.float16 weights, ",
        "small_weights.h",
        "if (kind == WEIGHTS_F16) return use((const f16 *)weights);",
        "if (kind == WEIGHTS_F16) return use((const bf16 *)weights);",
    ),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Return the file of the recorded cases."""
    path = tmp_path_factory.mktemp("kernels") / "cases"
    assert kernel_cases.write_cases(path, 60) > 120
    return path


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    to = tmp_path_factory.mktemp("driver") / "driver"
    return kernel_cases.build_driver(native.find_compiler(), to)


def check(done, kinds):
    """Check that every case passed, computed with these instructions."""
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("0 of "), last
    assert last.endswith(kinds), last


def test_the_library_of_this_machine_gives_what_was_recorded(cases, driver):
    library = native.load()
    kinds = f"{native.kind(library)}, {native.integer_kind(library)}"
    check(kernel_cases.replay(driver, library._name, cases), kinds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(one, id=one.name, marks=[] if one.name == IN_SHORT else [pytest.mark.full])
        for one in RUNNABLE
    ],
)
def test_a_wheels_variant_gives_what_was_recorded(cases, driver, tmp_path, variant):
    compiler = native.find_compiler()
    library = kernel_cases.build_library(compiler, variant.flags, tmp_path / "kernels.so")
    check(kernel_cases.replay(driver, library, cases), "")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ARM)
def test_arms_code_gives_what_was_recorded(cases, tmp_path, target):
    compiler, emulator, root = toolchains.need_arm()
    own = kernel_cases.build_driver(compiler, tmp_path / "driver")
    library = kernel_cases.build_library(compiler, [f"-march={target}"], tmp_path / "kernels.so")
    processor, kinds = ARM[target]
    check(kernel_cases.replay(emulator, "-cpu", processor, "-L", root, own, library, cases), kinds)


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(cases, driver, tmp_path, fault):
    wanted, name, line, planted = FAULTS[fault]
    copy = tmp_path / "kernels"
    shutil.copytree(native.SOURCES, copy)
    text = Path(copy / name).read_text()
    assert text.count(line) == 1
    (copy / name).write_text(text.replace(line, planted))
    flags = ["-march=native"]
    library = kernel_cases.build_library(native.find_compiler(), flags, tmp_path / "k.so", copy)
    done = kernel_cases.replay(driver, library, cases)
    assert done.returncode == 1, done.stdout
    assert wanted in done.stdout
