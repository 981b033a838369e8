"""Measures adapters (LoRA): tokens/s of mixed batches, of base-only steps, and memory.

One runner, without a server, decodes for eight sequences. Three cases take turns: the base model
alone; the base model alone while four adapters are loaded; and two sequences with each of these
adapters. The adapters have rank 16 on all linear layers and random numbers.

The memory of an adapter is the growth of the process's allocated memory (RssAnon) by its load, at
the end and at most, against what the pool reserves for it.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.common.types import BlockId, PlanId, SequenceId
from engine.core.text.plan import AdmittedSequence, BlockDelta, Logits, StepPlan
from engine.core.text.plan import Row as PlannedRow
from engine.core.text.types import Sampling, Stops
from engine.worker.interface import RunnerSpec
from tools.lab.bench.checkpoints import checkpoint
from tools.lab.bench.frame import Row, repeat_in_turn, row_of
from tools.lab.bench.quantized_weights import Watch, anonymous_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

MEASURES = ("engine/worker", "engine/kernels")

SHAPE = "q05"
RANK, BATCH, ADAPTERS = 16, 8, 4
PROMPT, STEPS, BLOCK = 64, 24, 16
BAR_MIXED = 0.8  # tokens/s as a share of the base model's
BAR_LOADED = 0.99
BAR_MEMORY = 1.05  # measured memory / reserved memory
# Guess: memory that stays with the process after a load and is not the adapter's. torch frees large
# blocks at once; the allocator's tables and the buffer of the last read file stay.
SLACK_BYTES = 4e6


class Decoder:
    """A loaded runner, and the adapters that it may load."""

    def __init__(self, directory: Path, adapters: Sequence[Path]) -> None:
        from engine.worker.text.runner import TorchRunner

        spec = RunnerSpec(
            str(directory),
            dtype="bfloat16",
            kv_bytes=1 << 26,
            max_model_len=512,
            max_num_seqs=BATCH,
            max_num_batched_tokens=BATCH * PROMPT,
            threads=2,
        )
        self.runner = TorchRunner(spec)
        self.runner.load(lambda _progress: None)
        self._directories = adapters
        self._digests: list[str] = []
        self._plans = 0

    def load(self) -> list[Any]:
        """Load every adapter, and return the runner's `AdapterInfo` of each."""
        infos = [self.runner.adapters.load(str(path)) for path in self._directories]
        self._digests = [info.digest for info in infos]
        return infos

    def unload(self) -> None:
        """Drop every adapter."""
        for digest in self._digests:
            self.runner.adapters.unload(digest)
        self._digests = []

    def tokens_per_s(self, *, is_loaded: bool, is_mixed: bool) -> float:
        """Return the rate of `STEPS` decoding steps, with adapters loaded or in use."""
        if is_loaded and not self._digests:
            self.load()
        if not is_loaded:
            self.unload()
        of = [self._digests[i % ADAPTERS] if is_mixed else "" for i in range(BATCH)]
        ids = [SequenceId(i) for i in range(BATCH)]
        sampling = Sampling(temperature=0.0)
        stops = Stops(max_tokens=STEPS + 2)
        prompt = tuple(range(1, PROMPT + 1))
        new = tuple(
            AdmittedSequence(one, prompt, sampling, stops, adapter=adapter)
            for one, adapter in zip(ids, of, strict=True)
        )
        each = -(-(PROMPT + STEPS + 1) // BLOCK)
        rows = tuple(
            PlannedRow(one, 0, PROMPT, BlockDelta(0, self._blocks(one, each)), Logits.LAST)
            for one in ids
        )
        self._execute(rows, admitted=new)
        start = 0.0
        for step in range(STEPS):
            if step == 1:  # the first decode warms up
                start = time.perf_counter()
            place = PROMPT + step
            self._execute(tuple(PlannedRow(one, place, 1, None, Logits.LAST) for one in ids))
        seconds = time.perf_counter() - start
        self._execute((), released=tuple(ids))
        return BATCH * (STEPS - 1) / seconds

    def _blocks(self, sequence: SequenceId, count: int) -> tuple[BlockId, ...]:
        return tuple(BlockId(sequence * count + i) for i in range(count))

    def _execute(self, rows: tuple[PlannedRow, ...], **given: Any) -> None:
        self._plans += 1
        self.runner.execute(StepPlan(PlanId(self._plans), rows, **given))


def memory(decoder: Decoder, directory: Path) -> list[Row]:
    """Return the rows of the memory that one adapter takes."""
    adapters = decoder.runner.adapters
    ends, peaks, shares, peak_shares = [], [], [], []
    for _ in range(5):
        reserved = adapters.measure(str(directory))
        before = anonymous_bytes()
        with Watch() as watch:
            info = adapters.load(str(directory))
        ends.append((anonymous_bytes() - before) / 1e6)
        peaks.append((watch.peak - before) / 1e6)
        shares.append(ends[-1] * 1e6 / (info.num_bytes + SLACK_BYTES))
        peak_shares.append(peaks[-1] * 1e6 / (reserved + SLACK_BYTES))
        adapters.unload(info.digest)
    name = f"{SHAPE} memory of an adapter of rank {RANK}"
    return [
        row_of(name, ends, "MB"),
        row_of(f"{name}, at most during its load", peaks, "MB"),
        row_of(f"{name}, against what is reserved", shares, "×", bar=BAR_MEMORY),
        row_of(f"{name}, at most, against what is reserved", peak_shares, "×", bar=BAR_MEMORY),
    ]


def run() -> list[Row]:
    """Return the bench's rows."""
    from tests.support.adapters import write_by_hand

    directory = checkpoint(SHAPE)
    with tempfile.TemporaryDirectory(prefix="triolet-adapters-") as scratch:
        written = [
            write_by_hand(Path(scratch) / str(seed), directory, seed=seed, rank=RANK, spread=0.01)
            for seed in range(ADAPTERS)
        ]
        decoder = Decoder(directory, written)
        rows = memory(decoder, written[0])
        ways = {
            "the base alone": partial(decoder.tokens_per_s, is_loaded=False, is_mixed=False),
            "the base, with adapters loaded": partial(
                decoder.tokens_per_s, is_loaded=True, is_mixed=False
            ),
            f"{ADAPTERS} adapters": partial(decoder.tokens_per_s, is_loaded=True, is_mixed=True),
        }
        samples = repeat_in_turn(list(ways.values()))
        decoder.runner.close()
    name = f"{SHAPE} decode, batch {BATCH}"
    for way, found in zip(ways, samples, strict=True):
        rows.append(row_of(f"{name}: {way}", found, "tokens/s", better="higher"))
    for (way, found), bar in zip(
        list(zip(ways, samples, strict=True))[1:], (BAR_LOADED, BAR_MIXED), strict=True
    ):
        ratios = [own / alone for own, alone in zip(found, samples[0], strict=True)]
        rows.append(row_of(f"{name}, against the base alone: {way}", ratios, "×", bar=bar,
                           better="higher"))  # fmt: skip
    return rows
