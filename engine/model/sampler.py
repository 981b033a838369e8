"""From logits to token ids: processors, then truncation, then the draw.

Rule 1: a greedy or seeded row's token depends on its own logits and `SampleRow` only (D10);
unseeded rows share the caller's generator and depend on the batch.
Rule 2: which implementation runs depends on the device alone: `engine.model.draw_rows` on a CPU,
`engine.model.draw_batch` elsewhere. They give the same greedy and seeded tokens.

Order: the request's edits (`engine.model.edits`) and stop ids before min_tokens, its constraint's
mask (`engine.model.masks`), division by the temperature, top_k, top_p, min_p, typical_p, the draw.
This is transformers' order; vLLM's differs in that min_p comes before the other two, and has no
typical_p.

Truncation: top_k keeps every score that equals the k-th best. top_p keeps a token when the
tokens before it hold less than ``top_p`` of the mass that top_k left; of equal scores at that
boundary the lower ids stay, so that a small top_p is greedy (transformers keeps as many,
whichever its sort left). min_p keeps probabilities of at least ``min_p`` times the best one.
The best token always stays. typical_p comes last: of what is left, it keeps the tokens whose
information is nearest to the entropy until they hold ``typical_p`` of the mass, and all that are
as near as the last of them; the best token may go. A whole vocabulary is sorted only where a
prefix of the likeliest tokens cannot answer.

Draws. Greedy: the highest logit, of equal ones the lowest id. Unseeded: inverse CDF in two
levels, one pass of exp over the vocabulary. Seeded: Gumbel-max with noise from
`engine.model.noise`, over the candidates that can still win.

Median µs per row, 32 rows of normal logits at temperature 0.8, two busy cores of an EPYC
(`python -m tools.microbench_text`); in brackets the same by `draw_batch` on that CPU:

    vocabulary   greedy      unseeded     top_k 50     top_p 0.95     seeded
        49,152    7 (81)     81 (324)     71 (302)    165 (845)      333 (2,423)
       151,936   28 (218)   235 (670)    116 (429)  1,141 (4,645)  2,023 (21,307)

torch's own multinomial, which draws a number per token, takes 1,172 and 4,560 for the unseeded.
By 1,024 tokens the two meet; below that neither matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.model.draw_batch import margins, sample_batch
from engine.model.draw_rows import sample_rows
from engine.model.sample_row import NothingToSample, SampleRow

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NothingToSample", "SampleRow", "gumbel_margin", "sample"]


def sample(
    logits: torch.Tensor, rows: Sequence[SampleRow], generator: torch.Generator
) -> list[int]:
    """Sample one token for each row; ``logits`` [len(rows), vocab] float32 is left as it is.

    ``generator`` is of the logits' device.

    Raises:
        NothingToSample: a row has nothing that can be sampled (all banned or -inf) or is not
            finite (NaN, inf); it names the row. The generator may have advanced.
    """
    _check_shape(logits, rows)
    if not _is_by_rows(logits):
        return sample_batch(logits, rows, generator)
    unseeded = sum(row.sampling.seed is None and not row.sampling.is_greedy for row in rows)
    uniforms = torch.rand((unseeded, 2), dtype=torch.float64, generator=generator)
    return sample_rows(logits.detach().numpy(), rows, uniforms.numpy())


def gumbel_margin(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[float]:
    """By how much each row's token won: over the second best perturbed score for seeded rows,
    over the second best logit for greedy ones; inf where there was no second.

    D10 claims equality where this exceeds 1e-4. Raises ValueError for an unseeded row, and as
    `sample` does.
    """
    _check_shape(logits, rows)
    return margins(logits, rows)


def _is_by_rows(logits: torch.Tensor) -> bool:
    return logits.device.type == "cpu"


def _check_shape(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"{len(rows)} rows need as many rows of logits, not {logits.shape}")
