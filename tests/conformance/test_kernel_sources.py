"""The C++ of the kernels: no compiler warns of it, and no sanitizer finds a fault in it.

Users' machines compile with ``-w``, so that new warnings of newer compilers do not trouble them.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from engine.worker.forward import native
from tests.support import toolchains
from tests.support.programs import ROOT

LIMIT_S = 600
# -Wpsabi warns of vectors in calls between files that are compiled for different processors. The
# kernels are one file, and it exports no function that takes or returns a vector.
FLAGS = ("-std=c++17", "-fopenmp", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-psabi")
IS_X86 = os.uname().machine == "x86_64"
# Targets that together compile every branch of the `#if`s in simd.h and matmul.h: no feature,
# AVX-512 with products of bfloat16, and AMX; in the long run also those between. The code is not
# run.
MARCHES = ("x86-64", "cooperlake", "sapphirerapids") if IS_X86 else ("native",)
OTHER_MARCHES = ("x86-64-v3", "x86-64-v4") if IS_X86 else ()
# ARM: no feature beyond NEON, with products of bytes, and with products of bfloat16.
ARM_MARCHES = ("armv8-a", "armv8.2-a+dotprod", "armv8.6-a+i8mm+bf16")
# Targets that the sanitizers run: this processor, and if it has AVX-512, also the vector code
# without AVX-512.
HAS_AVX512 = bool(torch.cpu.get_capabilities().get("avx512_f"))
MARCHES_RUN = ("native", "x86-64-v3") if IS_X86 and HAS_AVX512 else ("native",)
TESTED = (
    "test_native_products.py",
    "test_packed_blocks.py",
    "test_quantized_weights.py",
    "test_native_attention.py",
    "test_rewrites.py",
    "test_sampler.py",
    "test_kernel_bounds.py",
    "test_request_indices.py",
)


def compile_source(path, *flags, compiler=None):
    """Return the compiler's messages about a source, "" if it compiles without a warning."""
    done = subprocess.run(
        [compiler or native.find_compiler(), *FLAGS, *flags, str(path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize(
    ("march", "level"),
    [
        pytest.param("native", "-O1", marks=pytest.mark.slow),
        *((march, "-fsyntax-only") for march in MARCHES if march != "native"),
        *(
            pytest.param(march, "-O3", marks=pytest.mark.full)
            for march in (*MARCHES, *OTHER_MARCHES)
        ),
    ],
)
def test_the_library_compiles_without_a_warning_for_every_processor(march, level, tmp_path):
    """The optimiser finds causes for warnings that the parser does not, but takes a minute."""
    out = ("-c", "-o", str(tmp_path / "kernels.o"))
    assert compile_source(native.SOURCES / "triolet.cpp", level, f"-march={march}", *out) == ""


@pytest.mark.full
@pytest.mark.parametrize("march", ARM_MARCHES)
def test_the_library_compiles_without_a_warning_for_arm(march, tmp_path):
    compiler, _, _ = toolchains.need_arm()
    flags = ("-O3", f"-march={march}", "-c", "-o", str(tmp_path / "kernels.o"))
    assert compile_source(native.SOURCES / "triolet.cpp", *flags, compiler=compiler) == ""


def test_only_the_files_of_the_processor_know_it():
    """Only the simd headers choose instructions; the other files say what is computed."""
    knows = re.compile(r"__(AVX|AMX|ARM|SSE|F16C|FMA|aarch64|x86)|_mm\d*_|TRIOLET_NEON|arm_neon")
    found = {
        path.name
        for path in native.SOURCES.iterdir()
        if path.suffix in (".h", ".cpp") and knows.search(path.read_text())
    }
    assert found == {"simd.h", "simd_amx.h", "simd_products.h"}


@pytest.mark.parametrize("name", sorted(path.name for path in native.SOURCES.glob("*.h")))
def test_each_header_compiles_alone_without_a_warning(name, tmp_path):
    """Each header includes what it uses. Its functions may be unused, as other files call them."""
    alone = tmp_path / "alone.cpp"
    alone.write_text(f'#include "{native.SOURCES / name}"\n')
    assert compile_source(alone, "-Wno-unused-function", "-fsyntax-only") == ""


# ---- sanitizers

SANITIZED = ("-p", "tests.support.sanitized_kernels")


def run_sanitized(*tests, march="native", sources=native.SOURCES):
    """Run tests in a pytest of their own, with the kernels that `sanitized_kernels` compiles. The
    sanitizer's library is preloaded, so that it sees torch's allocations; so is C++'s library,
    whose exceptions the sanitizer must find."""
    compiler = native.find_compiler()
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--timeout", "900", *SANITIZED, *tests],
        env=os.environ
        | {
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0",  # some memory is never freed
            "KERNELS_MARCH": march,
            "KERNELS_SOURCES": str(sources),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=4 * LIMIT_S,
    )


@pytest.mark.full
@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize("march", MARCHES_RUN)
def test_the_kernels_own_tests_pass_under_the_sanitizers(march):
    done = run_sanitized(*(f"tests/conformance/{name}" for name in TESTED), march=march)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


PRODUCTS = ("tests/conformance/test_native_products.py",)
REFUSES = "test_kernel_bounds.py::test_an_index_outside_its_bounds_refuses_the_step"
FAULTS = {  # file, line, fault in the line's place, the tests that see it, and their message
    "a number behind the end of an array": (
        "triolet.cpp",
        "to[panel_index<T>(k, lane)] = from[k];",
        "to[panel_index<T>(k, lane)] = from[k + 64];",
        PRODUCTS,
        "heap-buffer-overflow",
    ),
    "a sum that overflows": (
        "triolet.cpp",
        "const int64_t panels = (outputs + PANEL - 1) / PANEL;",
        "const int64_t panels = (outputs + PANEL - 1) / PANEL;\n"
        "    volatile int64_t most = INT64_MAX;\n"
        "    most = most + outputs;",
        PRODUCTS,
        "signed integer overflow",
    ),
    "no look at a token's id": (  # the tests remove the engine's own check, too
        "decoder.h",
        "if (!is_inside(id, model.embedding_rows)) {",
        "if (!is_inside(id, INT64_MAX)) {",
        ("tests/conformance/test_request_indices.py", "-k", "not_looked_at"),
        "ERROR: AddressSanitizer",
    ),
    "no look at a step's other indices": (
        "decoder.h",
        "if (!step_fits(model, step)) return OUT_OF_BOUNDS;",
        "(void)step_fits;",
        (f"tests/conformance/{REFUSES}[a slot]",),
        "runtime error: signed integer overflow",
    ),
}


@pytest.mark.full
@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_sanitizers_find_a_planted_fault(fault, tmp_path):
    file, line, planted, tests, said = FAULTS[fault]
    copy = tmp_path / "kernels"
    shutil.copytree(native.SOURCES, copy)
    text = (copy / file).read_text()
    assert text.count(line) == 1
    (copy / file).write_text(text.replace(line, planted))
    done = run_sanitized(*tests, "-s", sources=copy)
    assert done.returncode
    assert said in done.stdout + done.stderr
