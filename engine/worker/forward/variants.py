"""How the kernels are compiled, and the processors that a released wheel has them for
(`tools/wheel_kernels.py`).

Rule: a variant's ``flags`` (the compiler's names) and its ``needs`` (Linux's names) are the same
features, so that a library never runs on a processor without one of its instructions. This file
imports the standard library only: a wheel is built where nothing else is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Environment variable. "off" or "0": run without the kernels. The name of a variant: run that one,
# from the wheel or compiled here. Unset: the best.
SWITCH = "ENGINE_KERNELS"
COMPILERS = ("c++", "g++", "clang++")  # The first one that is installed compiles.
# Flags of every build; a processor's own follow. A library's variables are hidden from the
# loader, which would share those of inline functions and classes between loaded libraries.
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared", "-w", "-fvisibility=hidden")
DIRECTORY = "built"  # The folder of compiled libraries in a wheel, beside the sources.
# The features of x86-64-v3 and x86-64-v4. Not every processor with AVX2 or AVX-512 has all of them.
# Source: the x86-64 psABI, "Micro-Architecture Levels".
_V3 = ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


@dataclass(frozen=True, slots=True)
class Variant:
    """A library's name, the compiler's flags, and the features that a processor must have, by
    their names in /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    needs: tuple[str, ...]

    @property
    def file(self) -> str:
        """The library's path below the kernels' sources."""
        return f"{DIRECTORY}/{self.name}.so"


# In ascending order: a processor's best variant is the last that it can run.
VARIANTS = (
    Variant("x86-64-v3", ("-march=x86-64-v3",), _V3),
    Variant("x86-64-v3-vnni", ("-march=x86-64-v3", "-mavxvnni"), (*_V3, "avx_vnni")),
    Variant("x86-64-v4", ("-march=x86-64-v4",), _V4),
    Variant("x86-64-v4-vnni", ("-march=x86-64-v4", "-mavx512vnni"), (*_V4, "avx512_vnni")),
    Variant(
        "x86-64-v4-bf16",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        (*_V4, "avx512_vnni", "avx512_bf16"),
    ),
    Variant(
        "x86-64-v4-amx",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        (*_V4, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"),
    ),
)


def best_variant(features: set[str]) -> Variant | None:
    """Return the best variant for a processor, or None if it can run none."""
    able = [variant for variant in VARIANTS if features.issuperset(variant.needs)]
    return able[-1] if able else None


def variant_named(name: str) -> Variant | None:
    """Return the variant of this name, or None."""
    return next((variant for variant in VARIANTS if variant.name == name), None)


def features_of(cpuinfo: str) -> set[str]:
    """Return the features of the first processor that the text of /proc/cpuinfo describes."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return set(value.split())
    return set()


def find_built(sources: Path, cpuinfo: str, name: str = "") -> Path | None:
    """Return the library in the wheel that this processor runs best, or the library of the variant
    ``name``. None if there is none: the wheel was made without libraries, or the processor is too
    old or of another kind."""
    features = features_of(cpuinfo)
    variant = variant_named(name) if name else best_variant(features)
    if variant is None or not features.issuperset(variant.needs):
        return None
    path = sources / variant.file
    return path if path.is_file() else None
