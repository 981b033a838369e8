"""Measures KV pools of 16 and 8 bits against float32, and weights of 16 bits against float32 where
the processor has no bfloat16: bytes, and tokens/s of a decode.

The tokens/s are those of the bench `step`: engines without a server, each in a process of its own,
with the same random-weight checkpoint and prompts. They take turns; one that waits is suspended.
Two kinds of kernels are measured: this processor's own, where a model computes in bfloat16, and
those for AVX2 (`x86-64-v3`), where it computes in float32 with weights of 16 bits, as ``auto`` has
it on a processor without bfloat16.

A decode of one sequence waits for memory: the weights, and the sequence's keys and values. "What
the bytes allow" is the ratio of these bytes; a row says how much of it is reached. The bench
`quantization` measures what narrow pools cost in accuracy. The bar of weights of 16 bits is for
q05: a third of a step of s135 is work that does not depend on the weights' bytes (with weights of 4
bits it takes 6 ms of the 11).

`BENCH_ONLY` is a regular expression that selects measurements by name.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tools.lab.bench.checkpoints import checkpoint, in_float32
from tools.lab.bench.frame import Row, repeat_in_turn, row_of
from tools.lab.bench.step import Case, Measured, settings
from tools.lab.bench.variants import runnable
from tools.lab.peers.process import OURS, EngineProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MEASURES = ("engine/worker", "engine/kernels")

SHAPE = "s135"
LENGTH = 4097  # of the prompt, whose last token is the first to be decoded
BATCHES = (1, 8)
AVX2 = "x86-64-v3"
WIDE = "float32"
BAR_BATCH = 1.3  # 16 bits against float32, with the largest batch
BAR_OF_BYTES = 0.9  # of what the bytes allow, with one sequence
BAR_WEIGHTS = {"q05": 1.4}  # by the shape
BARS_BYTES = {"bfloat16": 0.5, "float16": 0.5, "int8": 0.27}


@dataclass(frozen=True)
class Kernels:
    """A build of the kernels, the dtype in which models compute with it, and the pools measured."""

    name: str
    dtype: str
    pools: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


def kinds() -> list[Kernels]:
    """Return the kernels that this processor can run."""
    found = [Kernels("this processor's kernels", "bfloat16", (WIDE, "bfloat16", "int8"))]
    if AVX2 in runnable():
        variables = {"ENGINE_KERNELS": AVX2}
        found.append(Kernels("AVX2", "float32", (WIDE, "float16", "int8"), variables))
    return found


def pool_bytes(pool: str) -> int:
    """Return the bytes of a token's keys and values."""
    from engine.worker.forward.kv_cache import DTYPES, token_bytes
    from engine.worker.load.architectures import layer_shapes
    from engine.worker.load.loader import read_config

    _, config = read_config(checkpoint(SHAPE))
    return token_bytes(layer_shapes(config), DTYPES[pool])


def weights_bytes() -> int:
    """Return the bytes of the weights, of 16 bits."""
    return (checkpoint(SHAPE) / "model.safetensors").stat().st_size


def byte_rows() -> Iterator[Row]:
    """Yield the bytes of each pool for a sequence of 4,096 tokens."""
    wide = pool_bytes(WIDE)
    for pool in (WIDE, *BARS_BYTES):
        own = pool_bytes(pool)
        name = f"{SHAPE} KV bytes at {LENGTH - 1}"
        yield Row(f"{name}: {pool}", own * (LENGTH - 1) / 1e6, "MB", n=1)
        if pool != WIDE:
            bar = BARS_BYTES[pool]
            yield Row(f"{name}, against {WIDE}: {pool}", own / wide, "×", bar=bar, n=1)


def engine(kernels: Kernels, model: str, pool: str, shape: str = SHAPE) -> EngineProcess:
    """Start an engine."""
    own: dict[str, Any] = settings(shape, max(BATCHES)) | {"model": model, "dtype": kernels.dtype}
    return EngineProcess(OURS, own | {"kv_cache_dtype": pool}, kernels.variables)


def pool_rows(kernels: Kernels, case: Case, engines: Sequence[EngineProcess]) -> Iterator[Row]:
    """Yield the rows of each pool for a batch."""
    samples = repeat_in_turn([Measured(one, case) for one in engines])
    by_pool = dict(zip(kernels.pools, samples, strict=True))
    title = f"{kernels.name}, {case.name}"
    for pool, found in by_pool.items():
        yield row_of(f"{title}: KV {pool}", found, "tokens/s", better="higher")
    for pool in kernels.pools[1:]:
        pairs = zip(by_pool[pool], by_pool[WIDE], strict=True)
        ratios = [own / wide for own, wide in pairs]
        bar = BAR_BATCH if case.batch == max(BATCHES) else None
        name = f"{title}, against {WIDE}: KV {pool}"
        yield row_of(name, ratios, "×", bar=bar, better="higher")
        if case.batch > 1:
            continue
        wide, own = (weights_bytes() + LENGTH * pool_bytes(one) for one in (WIDE, pool))
        reached = [ratio * own / wide for ratio in ratios]
        note = f"the bytes allow {wide / own:.2f} ×"
        name = f"{title}, of what the bytes allow: KV {pool}"
        yield row_of(name, reached, "×", bar=BAR_OF_BYTES, better="higher", note=note)


def weight_rows(kernels: Kernels, shape: str) -> Iterator[Row]:
    """Yield the rows of weights of 16 bits against the same weights in float32."""
    with ExitStack() as stack:
        engines = []
        for directory, pool in ((in_float32(shape), WIDE), (checkpoint(shape), kernels.pools[1])):
            engines.append(engine(kernels, str(directory), pool, shape))
            stack.callback(engines[-1].close)
        for batch in BATCHES:
            case = Case(shape, "decode", batch, 129, None)
            wide, narrow = repeat_in_turn([Measured(one, case) for one in engines])
            title = f"{kernels.name}, {case.name}"
            yield row_of(f"{title}: weights float32", wide, "tokens/s", better="higher")
            yield row_of(f"{title}: weights bfloat16", narrow, "tokens/s", better="higher")
            ratios = [own / other for own, other in zip(narrow, wide, strict=True)]
            name = f"{title}, against float32: weights bfloat16"
            bar = BAR_WEIGHTS.get(shape) if batch == 1 else None
            yield row_of(name, ratios, "×", bar=bar, better="higher")


def run() -> Iterator[Row]:
    """Yield the bench's rows."""
    wanted = re.compile(os.environ.get("BENCH_ONLY", ""))
    yield from byte_rows()
    for kernels in kinds():
        cases = [Case(SHAPE, "decode", batch, LENGTH, None) for batch in BATCHES]
        chosen = [case for case in cases if wanted.search(f"{kernels.name}, {case.name}: KV")]
        with ExitStack() as stack:
            engines = []
            for pool in kernels.pools if chosen else ():
                engines.append(engine(kernels, str(checkpoint(SHAPE)), pool))
                stack.callback(engines[-1].close)
            for case in chosen:
                yield from pool_rows(kernels, case, engines)
        for shape in (SHAPE, *BAR_WEIGHTS):
            if kernels.variables and wanted.search(f"{kernels.name}, {shape}: weights"):
                yield from weight_rows(kernels, shape)
