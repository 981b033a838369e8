"""Computes log-probabilities: of given tokens, and of the likeliest tokens beside them.

Rule 1: log-probabilities are the log-softmax of the model's logits before any edit, temperature or
truncation, as by default in vLLM. So they do not depend on how a request samples.
Rule 2: on a CPU, numpy computes one row at a time, because a row fits a core's cache
(`engine.worker.sampling.draw_rows`); on another device, torch computes all rows at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.core.text.types import Alternative, TokenLogprob
from engine.worker.sampling.draw_rows import likeliest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]


class Wanted(NamedTuple):
    """A token to score by a row of the logits, and how many of the likeliest tokens to return."""

    row: int
    token: int
    alternatives: int


def score(
    logits: torch.Tensor, wanted: Sequence[Wanted], text_of: Callable[[int], str]
) -> list[TokenLogprob]:
    """Return the log-probability of each token in ``wanted``, in order. ``logits`` [rows, vocab]
    float32 are not changed. ``text_of`` returns a token's text."""
    if not wanted:
        return []
    if logits.device.type == "cpu":
        array = logits.detach().numpy()
        scored = [_score_row(array[item.row], item) for item in wanted]
    else:
        scored = _score_batch(logits, wanted)
    return [
        TokenLogprob(
            item.token,
            text_of(item.token),
            logprob,
            tuple(Alternative(i, text_of(i), p, rank) for rank, (i, p) in enumerate(likely)),
        )
        for item, (logprob, likely) in zip(wanted, scored, strict=True)
    ]


# A token's log-probability, and the ids and log-probabilities of the likeliest tokens.
_Scored = tuple[float, list[tuple[int, float]]]


def _score_row(row: Floats, item: Wanted) -> _Scored:
    """Score one token by its row of logits, [vocab]."""
    best = row.max()
    total = float(best) + math.log(np.exp(row - best).sum(dtype=np.float64))
    likely = []
    if item.alternatives:
        ids = likeliest(row, item.alternatives)[: item.alternatives]
        likely = [(i, float(row[i]) - total) for i in ids.tolist()]
    return float(row[item.token]) - total, likely


def _score_batch(logits: torch.Tensor, wanted: Sequence[Wanted]) -> list[_Scored]:
    """Score all tokens with torch."""
    device = logits.device
    rows = logits[torch.tensor([item.row for item in wanted], device=device)].log_softmax(1)
    tokens = torch.tensor([[item.token] for item in wanted], device=device)
    own = rows.gather(1, tokens)
    width = min(max(item.alternatives for item in wanted), logits.shape[1])
    values, ids = rows.topk(width, dim=1)
    scores = torch.cat((own, values, ids), 1).tolist()  # one copy, with exact ids below 2**24
    scored: list[_Scored] = []
    for item, (logprob, *rest) in zip(wanted, scores, strict=True):
        likely = zip(map(int, rest[width:]), rest[:width], strict=True)
        scored.append((logprob, list(likely)[: item.alternatives]))
    return scored
