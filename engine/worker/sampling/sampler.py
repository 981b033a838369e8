"""Samples token ids from logits: edits, then truncation, then the draw.

Rule 1: the token of a greedy or seeded row depends on its own logits and `SampleRow` only (D10).
So does the token of an unseeded row that has a drawn seed, up to the rounding of its logits.
Unseeded rows without a drawn seed share the caller's generator, so their tokens depend on the
batch.
Rule 2: the device alone decides which implementation runs: `engine.worker.sampling.draw_rows` on a
CPU, `engine.worker.sampling.draw_batch` elsewhere. Both give the same greedy and seeded tokens.

Order: the request's edits (`engine.worker.sampling.edits`) and the ban of stop ids before
min_tokens, its constraint's mask (`engine.worker.sampling.masks`), division by the temperature,
top_k, top_p, min_p, typical_p, the draw. This is the order of transformers. vLLM applies min_p
before top_k and top_p, and has no typical_p.

Truncation:
- top_k keeps every score that equals the k-th best.
- top_p keeps a token if the tokens before it hold less than ``top_p`` of the mass that top_k left.
  Of equal scores at that boundary, the lower ids stay, so that a small top_p is greedy.
  (transformers keeps as many of them, but its sort decides which.)
- min_p keeps probabilities of at least ``min_p`` times the highest. The best token always stays.
- typical_p comes last. It keeps the remaining tokens whose information is nearest to the entropy,
  until they hold ``typical_p`` of the mass, and all that are as near as the last of these. The best
  token may be removed.
The whole vocabulary is sorted only if a prefix of the likeliest tokens is not enough.

Draws: a greedy draw takes the highest logit; of equal logits, that of the lowest id. An unseeded
draw inverts the CDF in two levels, with one pass of exp over the vocabulary. A seeded draw is a
Gumbel-max with noise from `engine.worker.sampling.noise`, over the candidates that can still win.

The table shows the median µs per row for 32 rows of normal logits at temperature 0.8, on Zen 3
(`python -m tools.lab.microbench_text`); in brackets are the times without the compiled kernels:

    vocabulary   greedy     unseeded     top_k 50     top_p 0.95     seeded
        49,152    7 (7)     87 (142)      83 (85)      155 (201)     172 (393)
       151,936   41 (45)   192 (558)    186 (206)      581 (779)   577 (1,770)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.worker.sampling.draw_batch import sample_batch
from engine.worker.sampling.draw_rows import sample_rows
from engine.worker.sampling.sample_row import NothingToSample, SampleRow, uniforms_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

NO_UNIFORMS = np.empty((0, 2))

__all__ = ["NothingToSample", "SampleRow", "sample"]


def sample(
    logits: torch.Tensor, rows: Sequence[SampleRow], generator: torch.Generator
) -> list[int]:
    """Sample one token for each row. ``logits`` [len(rows), vocab] float32 are not changed.

    ``generator`` must be on the device of the logits.

    Raises:
        NothingToSample: A row has no token that can be sampled (all are banned or -inf), or is not
            finite (NaN, inf). The error names the row. The generator may have advanced.
    """
    _check_shape(logits, rows)
    if not _is_by_rows(logits):
        return sample_batch(logits, rows, generator)
    unseeded = [row for row in rows if row.sampling.seed is None and not row.sampling.is_greedy]
    uniforms = uniforms_of(unseeded, generator).numpy() if unseeded else NO_UNIFORMS
    return sample_rows(logits.detach().numpy(), rows, uniforms)


def _is_by_rows(logits: torch.Tensor) -> bool:
    return logits.device.type == "cpu"


def _check_shape(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"{len(rows)} rows need as many rows of logits, not {logits.shape}")
