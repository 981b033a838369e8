"""Log-probabilities of tokens, and of the likeliest ones beside them.

Rule 1: they are the model's own: log-softmax of its logits before any edit, temperature or
truncation (vLLM's default too), so that they do not depend on how a request samples.
Rule 2: on a CPU one row at a time in numpy, as `engine.model.draw_rows` and for its reasons; on a
device all rows at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.core.types import Alternative, TokenLogprob
from engine.model.draw_rows import likeliest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]


class Wanted(NamedTuple):
    """A token to score: by which row of the logits, and beside how many alternatives."""

    row: int
    token: int
    alternatives: int


def score(
    logits: torch.Tensor, wanted: Sequence[Wanted], text_of: Callable[[int], str]
) -> list[TokenLogprob]:
    """One entry for each of ``wanted``; ``logits`` [rows, vocab] float32 is left as it is.
    ``text_of`` gives a token's text."""
    if not wanted:
        return []
    if logits.device.type == "cpu":
        array = logits.detach().numpy()
        scored = [_score_row(array[one.row], one) for one in wanted]
    else:
        scored = _score_batch(logits, wanted)
    return [
        TokenLogprob(
            one.token,
            text_of(one.token),
            logprob,
            tuple(Alternative(i, text_of(i), p, rank) for rank, (i, p) in enumerate(likely)),
        )
        for one, (logprob, likely) in zip(wanted, scored, strict=True)
    ]


_Scored = tuple[float, list[tuple[int, float]]]  # of the token; ids of alternatives and theirs


def _score_row(row: Floats, one: Wanted) -> _Scored:
    """By a row of logits [vocab]."""
    best = row.max()
    total = float(best) + math.log(np.exp(row - best).sum(dtype=np.float64))
    likely = []
    if one.alternatives:
        ids = likeliest(row, one.alternatives)[: one.alternatives]
        likely = [(i, float(row[i]) - total) for i in ids.tolist()]
    return float(row[one.token]) - total, likely


def _score_batch(logits: torch.Tensor, wanted: Sequence[Wanted]) -> list[_Scored]:
    """The same with torch."""
    device = logits.device
    rows = logits[torch.tensor([one.row for one in wanted], device=device)].log_softmax(1)
    tokens = torch.tensor([[one.token] for one in wanted], device=device)
    own = rows.gather(1, tokens)
    width = min(max(one.alternatives for one in wanted), logits.shape[1])
    values, ids = rows.topk(width, dim=1)
    told = torch.cat((own, values, ids), 1).tolist()  # one copy; float32 holds ids below 2**24
    scored: list[_Scored] = []
    for one, (logprob, *rest) in zip(wanted, told, strict=True):
        likely = zip(map(int, rest[width:]), rest[:width], strict=True)
        scored.append((logprob, list(likely)[: one.alternatives]))
    return scored
