"""Measures GGUF files beside llama.cpp, ik_llama.cpp and OpenVINO GenAI: tokens/s of the same file,
what a token reads, and the accuracy of the products.

The files are those of `tools.lab.bench.gguf_shapes`: published shapes with random blocks, in the
mixes of types of llama.cpp's quantiser. Engines, prompts and what is on the clock are as in the
bench `step`: a process for each engine with `THREADS` threads; they take turns, and one that waits
is suspended. A prompt has three turns, as it takes some engines half a minute; the first prompt,
which warms up, is short. Bars are for q05 and q17, and against a peer for the types that people
choose; q4b and Q4_0 are measured beside them. OpenVINO GenAI reads files of Q4_0 and Q8_0.

A decode of one sequence waits for memory, and so the memory's bandwidth is measured in the same
turns, by the bench `limits`' way to stream weights. If 0.9 of it allows fewer tokens/s than a bar,
the bar is lowered to that. "Bytes a token reads" are the bytes of all tensors that our loaded model
holds: its head is its embedding, so each step reads them all. Q4_K_M is compared with our own Q4_0
by these bytes: the format should cost nothing else.

The accuracy is the Kullback-Leibler divergence from the same file's weights in float32, computed by
the stock model, of our engine and of llama.cpp (`tools.lab.measure_gguf`). q4b is left out: it
would take 16 GB. Ours computes in the dtypes that ``auto`` chooses: in float32, on a Zen 4 over a
KV pool in bfloat16. There q05 has 1.00 times llama.cpp's divergence in Q8_0, and 1.04 in Q4_0;
wholly in bfloat16 it had 1.23 and 1.31 (D24). llama.cpp rounds inputs of K-quants in groups of 256,
and there ours has 0.6 or less.

`BENCH_ONLY` is a regular expression that selects measurements by name, such as ``q05 Q4_K_M decode
B=1`` or ``KL``. `BENCH_PEERS` is a comma-separated list of the engines to compare with.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tools.lab.bench import limits
from tools.lab.bench.frame import REPEATS, Row, in_turn, row_of
from tools.lab.bench.gguf_shapes import MIXES, SHAPES, VOCAB, random_gguf, tensor_bytes
from tools.lab.bench.step import BAR_SAME, KV_BYTES, THREADS, Case, Measured
from tools.lab.bench.wire import ROOT
from tools.lab.peers.environments import PEERS, Peer, PeerError
from tools.lab.peers.process import OURS, EngineProcess, start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MEASURES = ("engine/core", "engine/worker", "engine/kernels")

LLAMA, IK, OPENVINO = "llama.cpp", "ik_llama.cpp", "openvino"
STREAM = "bandwidth"
TWIN = "triolet Q4_0"  # our engine with Q4_0, beside that with Q4_K_M
LIKE = {"Q4_K_M": "Q4_0"}
OF_OPENVINO = ("Q4_0", "Q8_0")
WITH_BARS = ("Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS", "Q8_0")
PREFILLS = 3  # turns of a prompt, which takes an engine up to half a minute
SEQUENCES = 8
# Our tokens/s divided by a peer's, by the peer and the case's batch and work.
BARS = {
    (LLAMA, "decode", 1): 1.3,
    (IK, "decode", 1): 1.1,
    (LLAMA, "decode", 8): 1.8,
    (LLAMA, "prefill", 1): 1.5,
    (IK, "prefill", 1): 1.0,
}
BAR_BANDWIDTH = 0.9
BAR_BYTES = 1.03
BAR_LIKE = 0.9
BAR_KL = 1.05
WARM = 64  # tokens of the prompt that warms up a prefill
NAME = "kl"  # of the drawn texts


@dataclass(frozen=True)
class Effort:
    """How much is measured of a shape: its mixes; a decode's steps, of one sequence and of several;
    the prompts' length of several; and the texts for the divergence."""

    mixes: tuple[str, ...] = tuple(MIXES)
    steps: tuple[int, int] = (32, 16)
    many: int = 129
    texts: int = 4  # of `LENGTH` tokens
    has_bars: bool = True


EFFORTS = {
    "q05": Effort(),
    "q17": Effort(steps=(16, 8), many=33, texts=2),
    "q4b": Effort(("Q4_K_M", "Q4_0"), (16, 8), many=33, texts=0, has_bars=False),
}
LENGTH = 64  # tokens of a text


class Prefill(Measured):
    """Measures prefills, the first of which warms up and is short."""

    def __init__(self, engine: EngineProcess, case: Case) -> None:
        super().__init__(engine, case)
        self._turns = count()

    def __call__(self) -> float:
        """Measure once and return the tokens per second."""
        if next(self._turns):
            return super().__call__()
        return float(WARM / self.engine.ask("prefill", "warm", 1, WARM)["seconds"])


def cases(shape: str, mix: str) -> list[Case]:
    """Return what is measured with a file."""
    many = EFFORTS[shape].many
    found = (("decode", 1, 129), ("decode", SEQUENCES, many), ("prefill", 1, 1024))
    return [Case(f"{shape} {mix}", *one, None) for one in found]


def bar_of(case: Case, peer: str) -> float | None:
    """Return the bar against a peer, before the bandwidth is looked at."""
    shape, mix = case.shape.split()
    if not EFFORTS[shape].has_bars or mix not in WITH_BARS:
        return None
    return BARS.get((peer, case.what, case.batch))


@torch.inference_mode()
def bandwidth() -> Callable[[], float]:
    """Return a measurement of the memory's bandwidth in GB/s, by the fastest of `limits`' ways."""
    torch.set_num_threads(THREADS)
    ways = limits.streams().values()
    fastest = max(ways, key=lambda measure: max(measure() for _ in range(3)))
    return torch.inference_mode()(fastest)


def measure(
    case: Case, engines: Sequence[EngineProcess]
) -> tuple[dict[str, list[float]], dict[str, Measured]]:
    """Return the tokens/s of each engine that answers, and its answers. If one sequence is decoded,
    the bandwidth of the same turns is among the former, in GB/s. An engine that ends is left out,
    after a message."""
    effort = EFFORTS[case.shape.split()[0]]
    is_single = case.what == "decode" and case.batch == 1
    asked: dict[str, Measured] = {}
    for engine in engines:
        own = (
            Prefill(engine, case)
            if case.what == "prefill"
            else Measured(engine, case, effort.steps[not is_single])
        )
        try:
            own()  # warms it up
        except PeerError as error:
            print(f"{case.name}: {error}; its messages are above", file=sys.stderr)
            continue
        asked[engine.name] = own
    measures: dict[str, Callable[[], float]] = dict(asked)
    if is_single:
        measures[STREAM] = bandwidth()
    turns = PREFILLS if case.what == "prefill" else REPEATS
    return dict(zip(measures, in_turn(list(measures.values()), turns), strict=True)), asked


def rows_of(
    case: Case, found: dict[str, list[float]], compared: Sequence[str], token_bytes: dict[str, int]
) -> Iterator[Row]:
    """Yield the rows of a case from the samples of `measure`. ``token_bytes`` has what a token
    reads in our engines, by their names."""
    for name in (OURS.name, *compared):
        title = f"{case.name}: {name}"
        yield (
            row_of(title, found[name], "tokens/s", better="higher")
            if name in found
            else Row(title, None, "tokens/s")
        )
    if (ours := found.get(OURS.name)) is None:
        return
    allowed = None
    if STREAM in found:
        allowed = [one * 1e9 / token_bytes[OURS.name] for one in found[STREAM]]
        yield row_of(f"{case.name}, memory's bandwidth", found[STREAM], "GB/s", better="higher")
        name = f"{case.name}, of the bandwidth"
        yield row_of(name, _ratios(ours, allowed), "×", better="higher")
    for peer in compared:
        yield _against(case, peer, ours, found.get(peer), allowed)
    if TWIN in found:
        yield _against_twin(case, ours, found[TWIN], token_bytes)


def _against(
    case: Case,
    peer: str,
    ours: list[float],
    theirs: list[float] | None,
    allowed: list[float] | None,
) -> Row:
    """Return the row of our engine against a peer. Its bar is lowered to what is ``allowed`` by the
    bandwidth, in tokens/s, if that is less."""
    name, bar, note = f"{case.name}, against {peer}", bar_of(case, peer), ""
    if theirs is None:
        return Row(name, None, "×", bar, "higher")
    if bar is not None and allowed is not None:
        most = BAR_BANDWIDTH * statistics.median(_ratios(allowed, theirs))
        if most < bar:
            note = f"{BAR_BANDWIDTH:g} of the bandwidth, which is less than {bar:g}"
            bar = most
    return row_of(name, _ratios(ours, theirs), "×", bar=bar, better="higher", note=note)


def _against_twin(
    case: Case, ours: list[float], twins: list[float], token_bytes: dict[str, int]
) -> Row:
    """Return the row of our engine against itself with the plainer type, in bytes/s of a decode or
    in tokens/s of a prefill."""
    ratios = _ratios(ours, twins)
    name, bar = f"{case.name}, against {TWIN}", BAR_LIKE
    if case.what == "decode":
        name += " by bytes"
        ratios = [one * token_bytes[OURS.name] / token_bytes[TWIN] for one in ratios]
    has_bar = case.batch == 1 and EFFORTS[case.shape.split()[0]].has_bars
    return row_of(name, ratios, "×", bar=bar if has_bar else None, better="higher")


def _ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [mine / theirs for mine, theirs in zip(one, other, strict=True)]


def same_rows(case: Case, asked: dict[str, Measured], compared: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of how often our engine's first token was a peer's."""
    for peer in compared:
        if OURS.name in asked and peer in asked:
            share = asked[OURS.name].same_share(asked[peer])
            name = f"{case.name}, first tokens as {peer}"
            yield row_of(name, [share], "share", bar=BAR_SAME, better="higher")


def divergence_rows(shape: str, mix: str) -> Iterator[Row]:
    """Yield the rows of the divergence from the same weights in float32."""
    name, texts = f"{shape} {mix} KL", EFFORTS[shape].texts
    found = divergences(random_gguf(shape, mix), texts)
    for engine in (OURS.name, LLAMA):
        yield Row(f"{name}: {engine}", found.get(engine), "nats", n=texts * LENGTH)
    ratio = found[OURS.name] / found[LLAMA] if LLAMA in found and OURS.name in found else None
    yield Row(f"{name}, against {LLAMA}", ratio, "×", BAR_KL, n=texts * LENGTH)


def divergences(file: Path, texts: int) -> dict[str, float]:
    """Return the mean divergences by engine; an engine that cannot be asked is missing."""
    sizes = [str(number) for number in (texts, LENGTH, VOCAB)]
    peer = PEERS[LLAMA]
    with tempfile.TemporaryDirectory() as directory:
        logits = Path(directory) / "logits.npy"
        if peer.is_installed:
            command = [str(peer.python), "-m", "tools.lab.peers.logits", str(file), NAME]
            subprocess.run(
                [*command, *sizes, str(logits)], cwd=ROOT, env=peer.environment(), check=True
            )
        command = [sys.executable, "-m", "tools.lab.measure_gguf", str(file), NAME, *sizes]
        done = subprocess.run(
            [*command, *([str(logits)] if peer.is_installed else [])],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode:
        return {}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def file_rows(shape: str, mix: str, token_bytes: int) -> Iterator[Row]:
    """Yield the rows of what a token reads."""
    stored = tensor_bytes(SHAPES[shape], MIXES[mix])
    name = f"{shape} {mix} bytes a token reads"
    yield Row(name, token_bytes / 1e6, "MB", n=1)
    bar = BAR_BYTES if EFFORTS[shape].has_bars else None
    yield Row(f"{name}, of the file's", token_bytes / stored, "×", bar, n=1)


def of_file(shape: str, mix: str, chosen: Sequence[Case], peers: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of all ``chosen`` cases of a file."""
    compared = [name for name in peers if name != OPENVINO or mix in OF_OPENVINO]
    with ExitStack() as stack:

        def opened(peer: Peer, kind: str, name: str) -> EngineProcess | None:
            engine = start(peer, settings(random_gguf(shape, kind)))
            if engine is not None:
                engine.name = name
                stack.callback(engine.close)
            return engine

        wanted = [(OURS, mix, OURS.name), *((PEERS[name], mix, name) for name in compared)]
        if mix in LIKE:
            wanted.append((OURS, LIKE[mix], TWIN))
        engines = [engine for one in wanted if (engine := opened(*one)) is not None]
        token_bytes = {
            engine.name: int(engine.ask("decode", "warm", 1, WARM, 1)["weights_bytes"])
            for engine in engines
            if engine.name in (OURS.name, TWIN)
        }
        for case in chosen:
            samples, asked = measure(case, engines)
            yield from rows_of(case, samples, compared, token_bytes)
            yield from same_rows(case, asked, compared) if case.batch > 1 else ()
        if OURS.name in token_bytes:
            yield from file_rows(shape, mix, token_bytes[OURS.name])


def settings(file: Path) -> dict[str, Any]:
    """Return the settings of an engine's process."""
    return {
        "model": str(file),
        "gguf": str(file),
        "vocab": VOCAB,
        "dtype": "auto",
        "threads": THREADS,
        "kv_bytes": KV_BYTES,
        "seqs": SEQUENCES,
    }


def run() -> Iterator[Row]:
    """Yield the bench's rows."""
    wanted = re.compile(os.environ.get("BENCH_ONLY", ""))
    named = os.environ.get("BENCH_PEERS")
    every = (LLAMA, IK, OPENVINO)
    peers = every if named is None else [name for name in named.split(",") if name]
    for shape, effort in EFFORTS.items():
        for mix in effort.mixes:
            if effort.texts and wanted.search(f"{shape} {mix} KL"):
                yield from divergence_rows(shape, mix)
            chosen = [case for case in cases(shape, mix) if wanted.search(case.name)]
            if chosen:
                yield from of_file(shape, mix, chosen, peers)
