"""Measures the kernels of processors with AVX2 beside this machine's own: one stream's decode.

The bench `quantized-weights` includes these rows. `ENGINE_KERNELS` has an engine run a variant of
the kernels that is not this processor's best. The peer is llama.cpp built for AVX2, with a GGUF
file of the same weights: BF16, Q8_0 and Q4_0.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from engine.worker.forward.variants import SWITCH, VARIANTS, features_of
from tools.lab.bench.checkpoints import gguf
from tools.lab.bench.frame import Row, repeat_in_turn, row_of
from tools.lab.bench.step import Case, Measured, settings
from tools.lab.peers.environments import PEERS
from tools.lab.peers.process import OURS, EngineProcess, start

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

CPUINFO = Path("/proc/cpuinfo")
NAMES = ("x86-64-v3", "x86-64-v3-vnni")
PEER = "llama.cpp-avx2"
FORMATS = {"bfloat16": ("none", ""), "int8": ("int8", "Q8_0"), "int4": ("int4", "Q4_0")}
BAR_OWN, BAR_PEER = 0.6, 1.0


def runnable() -> list[str]:
    """Return those of `NAMES` that this processor can run."""
    features = features_of(CPUINFO.read_text(encoding="ascii"))
    return [one.name for one in VARIANTS if one.name in NAMES and features.issuperset(one.needs)]


def compare(
    case: Case, way: str, names: Sequence[str], engines: Sequence[EngineProcess]
) -> list[Row]:
    """Return the rows of one format. ``engines`` run, in this order: our best kernels, the variants
    ``names``, and the peer if it is installed."""
    labels = ["this processor's", *names, PEER][: len(engines)]
    samples = repeat_in_turn([Measured(engine, case) for engine in engines])
    by_name = dict(zip(labels, samples, strict=True))
    title = f"{case.name} {way}"
    rows = [
        row_of(f"{title}: {name}", found, "tokens/s", better="higher")
        for name, found in by_name.items()
    ]
    for name in names:
        for other, bar in ((labels[0], BAR_OWN), (PEER, BAR_PEER)):
            if other not in by_name:
                rows.append(Row(f"{title}: {name} against {other}", None, "×"))
                continue
            pairs = zip(by_name[name], by_name[other], strict=True)
            ratios = [own / theirs for own, theirs in pairs]
            against = f"{title}: {name} against {other}"
            rows.append(row_of(against, ratios, "×", bar=bar, better="higher"))
    return rows


def run(shapes: Sequence[str], wanted: re.Pattern[str]) -> list[Row]:
    """Return the rows of the shapes and formats whose names are ``wanted``, such as
    "s135 decode B=1 at 128 int4, variants"."""
    names = runnable()
    rows: list[Row] = []
    for shape in shapes if names else ():
        case = Case(shape, "decode", 1, 129, None)
        for way, (quantization, kind) in FORMATS.items():
            if not wanted.search(f"{case.name} {way}, variants"):
                continue
            with ExitStack() as stack:
                own = settings(shape, 1) | {"quantization": quantization}
                engines = [
                    EngineProcess(OURS, own, {SWITCH: name})
                    for name in (os.environ.get(SWITCH, ""), *names)
                ]
                if PEERS[PEER].is_installed:
                    peer = start(PEERS[PEER], own | {"gguf": str(gguf(shape, kind) or "")})
                    engines += [peer] if peer else []
                else:
                    print(f"{PEER} is not installed: python -m tools.lab.peers install {PEER}",
                          file=sys.stderr)  # fmt: skip
                for engine in engines:
                    stack.callback(engine.close)
                rows += compare(case, way, names, engines)
    return rows
