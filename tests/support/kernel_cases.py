"""Records cases of the kernels, and builds and runs the driver in C++ that replays them.

A case has its inputs and what comes out: for weights of few bits, the bits of the references in
`tests.conformance.test_quantized_weights`; for the others, numbers in float64 and the tolerance of
their tests. The driver (tests/support/kernel_replay.cpp) needs no Python, so that it also runs
where only an emulator is.
"""

import random
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from engine.worker.forward import kernel_structs as structs
from engine.worker.forward import native, variants
from engine.worker.forward.attention import AttentionCall
from engine.worker.forward.native_attention import NativeStep
from engine.worker.quantized.weight import centre_of
from tests.conformance import test_native_attention as attention
from tests.conformance import test_native_products as products
from tests.conformance import test_quantized_weights as small

DRIVER = Path(__file__).with_name("kernel_replay.cpp")
LIMIT_S = 300
ROWS = (1, 1, 2, 3, 5, 9, 33, 130)
GROUPS = (16, 32, 48, 128)
WIDTHS = (1, 17, 33, 100, 200, 415)  # numbers of inputs: odd ones, and ones that no group divides
LENGTHS = [(0, 1), (20, 1), (0, 33), (700, 1), (90, 50), (530, 40)]


def write_cases(path: Path, count: int) -> int:
    """Write drawn cases, about ``count`` of each kind, and return how many there are."""
    found = [*small_cases(count), *float_cases(count), *attention_cases(max(2, count // 4))]
    path.write_bytes(struct.pack("<q", len(found)) + b"".join(found))
    return len(found)


def small_cases(count: int) -> Iterator[bytes]:
    """Yield products with weights of 8 bits or fewer."""
    for seed in range(count):
        rng = random.Random(seed)
        is_exact, dtype = rng.random() < 0.3, rng.choice(small.DTYPES)
        shape, rows = (rng.choice((1, 15, 16, 40, 129)), rng.choice(WIDTHS)), rng.choice(ROWS)
        weight = small.make_weight(
            shape,
            rng.choice(GROUPS),
            small.TABLES[seed % len(small.TABLES)],
            has_offsets=rng.random() < 0.5,
            seed=seed,
            is_exact=is_exact,
            is_nested=rng.random() < 0.4,
        )
        drawn = torch.randn((rows, shape[1]), generator=torch.Generator().manual_seed(seed))
        x = (small.whole_rows(rows, shape[1], seed) if is_exact else drawn).to(dtype)
        bias = torch.arange(shape[0]).float() if rng.random() < 0.3 else None
        wanted = small.reference(weight, x, bias).to(dtype)
        own = weight.in_halves()
        name = f"{weight.bits} bits, {shape}, group {weight.group}, {rows} rows, {dtype}"
        name += f", nested {own.form.nested}"
        scales = (own.scales, own.offsets, own.factors, own.offset_factors)
        centre = centre_of(own.table) if own.table else 0
        table = b"" if centre is not None else bytes(n & 255 for n in own.table)
        yield b"".join(
            (
                array(name.encode()),
                wholes(0, structs.KINDS[dtype], weight.bits, rows, 0, *shape, weight.group),
                wholes(own.form.nested, centre or 0),
                *map(
                    array, (raw(own.numbers), *(b"" if one is None else raw(one) for one in scales))
                ),
                array(table),
                *map(array, (b"" if bias is None else raw(bias), raw(x), raw(wanted), b"")),
                struct.pack("<d", 0.0),
            )
        )


def float_cases(count: int) -> Iterator[bytes]:
    """Yield products with weights in float32, bfloat16 and, for rows in float32, float16."""
    for seed in range(count):
        rng = random.Random(seed)
        dtype, of_weight = products.FORMS[seed % len(products.FORMS)]
        rows = rng.choice(ROWS)
        shape = (rng.choice((1, 16, 40, 129)), rng.choice(WIDTHS))
        layer = products.make_linear(*shape, of_weight, bias=rng.random() < 0.5)
        x = torch.randn(rows, shape[1]).to(dtype)
        wanted = x.double() @ layer.weight.double().T
        wanted += 0.0 if layer.bias is None else layer.bias.double()
        error = float((layer.to(dtype)(x).double() - wanted).norm() / wanted.norm())
        bias = b"" if layer.bias is None else raw(layer.bias.float())
        weight = layer.weight.to(of_weight)
        kind = 0 if dtype == of_weight else structs.WEIGHT_KINDS[of_weight]
        yield b"".join(
            (
                array(f"{dtype}, {of_weight} weights, {shape}, {rows} rows".encode()),
                wholes(0, structs.KINDS[dtype], 0, rows, kind, *shape, 0, 0, 0),
                *map(array, (raw(weight), *(b"",) * 5, bias, raw(x), b"", raw(wanted))),
                struct.pack("<d", max(1.5 * error, 1e-6 if dtype == torch.float32 else 3e-3)),
            )
        )


def attention_cases(count: int) -> Iterator[bytes]:
    """Yield attention of rows of one token and of several."""
    for seed in range(count):
        rng = random.Random(seed)
        dtypes = list(attention.TOLERANCE)[seed % len(attention.TOLERANCE)]
        shape = rng.choice([(4, 4, 16), (9, 3, 64), (2, 1, 80)])
        case = attention.make_case(seed, shape, dtypes, rng.sample(LENGTHS, 4))
        window, softcap = rng.choice([0, 24]), rng.choice([0.0, 1.5])
        sinks = torch.randn(shape[0]) if rng.random() < 0.5 else None
        call = AttentionCall(0, shape[2] ** -0.5, window or None, softcap or None, sinks)
        wanted = attention.in_float64(case, call)
        step = NativeStep(None, case.rows, case.cache)
        tensors = (case.cache.keys[0], case.cache.values[0], case.query, case.key, case.value)
        scales = [raw(each[0]) if each else b"" for each in case.cache.scales]
        own = b"" if sinks is None else raw(sinks)
        yield b"".join(
            (
                array(f"attention, {shape}, window {window}, cap {softcap}, {dtypes}".encode()),
                wholes(1, structs.KINDS[dtypes[0]], structs.CACHE_KINDS[dtypes[1]]),
                wholes(*shape, window),
                struct.pack("<dd", call.scaling, softcap),
                *(array(one.tobytes()) for one in step._arrays),
                wholes(case.rows.block_size, case.cache.num_blocks),
                *map(array, (*map(raw, tensors), *scales, own, raw(wanted))),
                struct.pack("<d", attention.TOLERANCE[dtypes]),
            )
        )


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes, row by row."""
    return np.ascontiguousarray(tensor.detach().contiguous().view(torch.uint8)).tobytes()


def array(data: bytes) -> bytes:
    """Return bytes with their number before them."""
    return struct.pack("<q", len(data)) + data


def wholes(*numbers: int) -> bytes:
    """Return whole numbers of 8 bytes."""
    return struct.pack(f"<{len(numbers)}q", *numbers)


def build_driver(compiler: str, to: Path) -> Path:
    """Compile the driver."""
    flags = ("-std=c++17", "-O1", "-fopenmp", "-w", "-Wno-psabi", f"-I{native.SOURCES}")
    return _compiled([compiler, *flags, "-o", str(to), str(DRIVER), "-ldl"], to)


def build_library(
    compiler: str, flags: Sequence[str], to: Path, sources: Path = native.SOURCES
) -> Path:
    """Compile the kernels, as a user's machine does."""
    common = [flag if flag != "-O3" else "-O1" for flag in variants.FLAGS]
    return _compiled([compiler, *common, *flags, "-o", str(to), str(sources / "triolet.cpp")], to)


def replay(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command: the driver with its arguments, or an emulator with them."""
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def _compiled(command: list[str], to: Path) -> Path:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return to
