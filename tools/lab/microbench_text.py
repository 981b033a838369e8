"""Measures what the text side of a step costs: `TextState.push` per token, and `sample` and
`logprobs.score` per row. Penalties are measured over a prompt of 500 distinct tokens.

    python -m tools.lab.microbench_text [--rows 1,32,256] [--vocab 49152,151936] [--seconds 0.5]
        [--without-kernels]

Each figure is the median of the repetitions that fit into ``--seconds``, followed by the fastest
one, which other work on the machine disturbs less. Logits are normally distributed with a standard
deviation of 3, and one is much higher: as in real rows, top_p 0.95 leaves some hundred candidates.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import engine.worker  # noqa: F401  first: sets how long torch's threads spin (D13)

import torch  # isort: skip

from engine.core.text.types import Sampling, Stops
from engine.worker.forward import native
from engine.worker.sampling.edits import make_edits
from engine.worker.sampling.logprobs import Wanted, score
from engine.worker.sampling.sampler import SampleRow, sample
from engine.worker.tokenizing.detokenizer import TextState
from engine.worker.tokenizing.tokenizer import HfTokenizer
from tests.support import toy_tokenizers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TEXT = "Once upon a time there was a small dog, and a café 🌶 by the sea. " * 20
STOPS = {
    "no stop strings": (),
    "4 stop strings, never near": ("<|stop|>", "###", "User:", "QQQ"),
    "16 stop strings, often near": tuple(f"the sea. On{i} " for i in range(16)),
}
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "unseeded": Sampling(temperature=0.8),
    "unseeded top_p 0.95": Sampling(temperature=0.8, top_p=0.95),
    "unseeded top_k 50": Sampling(temperature=0.8, top_k=50),
    "unseeded min_p 0.05": Sampling(temperature=0.8, min_p=0.05),
    "seeded": Sampling(temperature=0.8, seed=1),
    "seeded top_p 0.95": Sampling(temperature=0.8, top_p=0.95, seed=1),
    "greedy, a stop id banned": Sampling(temperature=0.0),
    "greedy, repetition penalty": Sampling(temperature=0.0, repetition_penalty=1.1),
    "greedy, all penalties": Sampling(
        temperature=0.0, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1
    ),
    "greedy, 1,000 ids allowed": Sampling(temperature=0.0, allowed_token_ids=tuple(range(1000))),
    "unseeded typical_p 0.95": Sampling(temperature=0.8, typical_p=0.95),
}


def measured(work: Callable[[], object], seconds: float, per: int) -> str:
    """Return the median and the fastest run as text, in µs per unit."""
    work()
    runs, end = [], time.perf_counter() + seconds
    while len(runs) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        runs.append((time.perf_counter() - start) / per * 1e6)
    return f"{statistics.median(runs):10.2f} µs   (fastest {min(runs):.2f}, n={len(runs)})"


def push_all(
    tokenizer: HfTokenizer, stops: Stops, prompt: Sequence[int], ids: Sequence[int]
) -> None:
    """Push every token id into a new state."""
    state = TextState(tokenizer, stops, prompt)
    for token_id in ids:
        state.push(token_id)


def bench_push(seconds: float) -> None:
    """Print the cost of detokenising."""
    for name, build in toy_tokenizers.ALL.items():
        tokenizer = HfTokenizer(build())
        prompt, ids = tokenizer.encode("Once upon a time"), tokenizer.encode(TEXT)
        for what, strings in STOPS.items():
            stops = Stops(max_tokens=len(ids), strings=strings)
            work = partial(push_all, tokenizer, stops, prompt, ids)
            print(f"push    {name:12} {what:28}", measured(work, seconds, len(ids)), flush=True)


def bench_sample(num_rows: int, vocab: int, seconds: float) -> None:
    """Print the cost of sampling and scoring."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab, generator=generator).mul_(3.0)
    logits[:, 7] = 16.0
    for what, sampling in SAMPLINGS.items():
        banned = frozenset({0}) if "banned" in what else frozenset()
        edits = [make_edits(sampling, range(1000, 1500)) for _ in range(num_rows)]
        rows = [SampleRow(sampling, i, banned, edits[i]) for i in range(num_rows)]
        work = partial(sample, logits, rows, generator)
        label = f"sample  {vocab:6} x {num_rows:3} rows {what:26}"
        print(label, measured(work, seconds, num_rows), flush=True)
    for count in (0, 5, 20):
        wanted = [Wanted(i, 7, count) for i in range(num_rows)]
        work = partial(score, logits, wanted, str)
        label = f"score   {vocab:6} x {num_rows:3} rows {f'{count} alternatives':26}"
        print(label, measured(work, seconds, num_rows), flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--vocab", default="49152,151936")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--without-kernels", action="store_true", help="draw with numpy alone")
    args = parser.parse_args()
    if not args.without_kernels:
        native.load()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    bench_push(args.seconds)
    with torch.inference_mode():
        for vocab in args.vocab.split(","):
            for num_rows in args.rows.split(","):
                bench_sample(int(num_rows), int(vocab), args.seconds)


if __name__ == "__main__":
    main()
