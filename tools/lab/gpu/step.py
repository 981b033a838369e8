"""Measures decoding beside transformers' continuous batching, and the memory that it takes.

The same work is on the clock as in `tools.lab.bench.step`. The two engines run one after the other
with the same checkpoint, because a device may have memory for one of them only.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from tools.lab.bench.frame import Row, row_of
from tools.lab.gpu.checkpoints import REAL, TINY, write
from tools.lab.peers.environments import PEERS
from tools.lab.peers.process import OURS, start

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.lab.gpu.checkpoints import Model
    from tools.lab.gpu.target import Target
    from tools.lab.peers.environments import Peer

BATCHES = (1, 8, 64, 256)
SMALL_BATCHES = (1, 4)
CONTEXT = 128  # tokens before the first that is decoded
STEPS = 32
ROOM = 288  # how many tokens some sequences may decode while others' prompts are still computed
REPEATS = 3
MIB = 1 << 20


def run(target: Target) -> None:
    """Measure every shape, batch and engine that is selected."""
    for model in REAL if target.is_cuda else (TINY,):
        batches = [
            batch
            for batch in (BATCHES if target.is_cuda else SMALL_BATCHES)
            if target.wants(_title(model, batch))
        ]
        if batches:
            ours = _measure(target, model, OURS, batches)
            theirs = _measure(target, model, PEERS["transformers-cb"], batches)
            target.add(
                Row(f"{_title(model, batch)}: against transformers'", ours[batch] / theirs[batch],
                    "×", n=REPEATS, better="higher")
                for batch in batches
                if batch in ours and batch in theirs
            )  # fmt: skip


def _title(model: Model, batch: int) -> str:
    return f"step, {model.name}, B={batch}"


def _settings(target: Target, model: Model, most: int) -> dict[str, Any]:
    shape = model.shape
    per_token = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim
    return {
        "model": str(write(model, target.folder, target.device)),
        "vocab": shape.vocab,
        "device": target.device,
        "dtype": "bfloat16",
        "threads": 2,
        "kv_bytes": max(most * (CONTEXT + ROOM) * per_token * 5 // 4, 64 * MIB),
        "seqs": max(most, 8),
        "cache_tokens": max(most * (CONTEXT + 2 * STEPS), 16_384),
        "tokens_at_once": 8_192 if target.is_cuda else 1_024,
    }


def _measure(target: Target, model: Model, peer: Peer, batches: Sequence[int]) -> dict[int, float]:
    """Add an engine's rows and return its tokens per second by batch. An engine that fails leaves
    a row without a value."""
    found: dict[int, float] = {}
    engine = start(peer, _settings(target, model, max(batches)))
    if engine is None:
        target.add([Row(f"step, {model.name}: {peer.name}", None, "", note="did not start")])
        return found
    target.add([row_of(f"step, {model.name}: {peer.name} loads", [engine.load_s], "s")])
    try:
        for batch in batches:
            answers = [
                engine.ask("decode", f"{batch} {turn}", batch, CONTEXT + 1, STEPS)
                for turn in range(REPEATS + 1)
            ][1:]
            rates = [batch * STEPS / answer["seconds"] for answer in answers]
            found[batch] = statistics.median(rates)
            name = f"{_title(model, batch)}: {peer.name}"
            target.add([row_of(name, rates, "tokens/s", better="higher")])
        if "peak_bytes" in answers[-1]:
            target.add(_memory_rows(model, answers[-1], 1.0 if target.is_cuda else None))
    except Exception as error:  # the other engine is measured all the same
        target.add([Row(f"step, {model.name}: {peer.name}", None, "", note=str(error))])
    finally:
        engine.close()
    return found


def _memory_rows(model: Model, answer: dict[str, Any], bar: float | None) -> list[Row]:
    """Return the most memory in use (on a GPU by tensors, on a CPU by the process), the memory that
    the engine reported at its load, and the ratio."""
    peak, reported = answer["peak_bytes"] / MIB, answer["memory_bytes"] / MIB
    return [
        Row(f"memory, {model.name}: most in use", peak, "MiB", n=1),
        Row(f"memory, {model.name}: reported at load", reported, "MiB", n=1),
        Row(f"memory, {model.name}: in use of what was reported", peak / reported, "×", bar, n=1),
    ]
