"""A wheel's compiled kernels are used where the processor can run them, the best ones first."""

import pytest

from engine.worker.forward.variants import VARIANTS, best_variant, features_of, find_built

V3 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm", "sse4_2"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
CPUINFO = "processor\t: 0\nflags\t\t: {}\n\nprocessor\t: 1\nflags\t\t: fpu\n"
# A processor's features as Linux lists them, and the best variant for it.
PROCESSORS = {
    "Sandy Bridge": ({"avx", "sse4_2"}, None),
    "Haswell, Zen 2": (V3, "x86-64-v3"),
    "Alder Lake": (V3 | {"avx_vnni"}, "x86-64-v3-vnni"),
    "Skylake X": (V4, "x86-64-v4"),
    "Ice Lake": (V4 | {"avx512_vnni"}, "x86-64-v4-vnni"),
    "Zen 4": (V4 | {"avx512_vnni", "avx512_bf16"}, "x86-64-v4-bf16"),
    "Sapphire Rapids": (
        V4 | {"avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8"},
        "x86-64-v4-amx",
    ),
    "one whose hypervisor hides AVX-512's doublewords": (V4 - {"avx512dq"}, "x86-64-v3"),
    "one without fused multiply-add": (V4 - {"fma"}, None),
}


@pytest.mark.parametrize(("features", "name"), PROCESSORS.values(), ids=PROCESSORS)
def test_a_processor_gets_the_best_variant_that_it_can_run(features, name):
    found = best_variant(features)
    assert (found and found.name) == name


def test_every_variant_is_the_best_one_of_some_processor():
    """Red if a better variant is listed behind a worse one: then no processor would get it."""
    assert {best_variant(set(one.needs)) for one in VARIANTS} == set(VARIANTS)


def test_a_library_is_found_only_where_the_wheel_has_it(tmp_path):
    zen = CPUINFO.format(" ".join(PROCESSORS["Zen 4"][0]))
    assert features_of(zen) == PROCESSORS["Zen 4"][0]
    assert find_built(tmp_path, zen) is None
    path = tmp_path / "built" / "x86-64-v4-bf16.so"
    path.parent.mkdir()
    path.touch()
    assert find_built(tmp_path, zen) == path
    assert find_built(tmp_path, CPUINFO.format("avx2")) is None
    assert find_built(tmp_path, "") is None


def test_a_named_variant_is_found_where_the_processor_can_run_it(tmp_path):
    zen, haswell = (CPUINFO.format(" ".join(one)) for one in (PROCESSORS["Zen 4"][0], V3))
    path = tmp_path / "built" / "x86-64-v3.so"
    path.parent.mkdir()
    path.touch()
    (tmp_path / "built" / "x86-64-v4-bf16.so").touch()
    assert find_built(tmp_path, zen, "x86-64-v3") == path
    assert find_built(tmp_path, haswell, "x86-64-v4-bf16") is None
    assert find_built(tmp_path, zen, "x86-64-v9") is None
