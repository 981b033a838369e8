"""By how much sampled tokens won: where a margin is small, a token may differ with the batch."""

import torch

from engine.worker.sampling import draw_batch


def gumbel_margin(logits, rows):
    """Return by how much each row's token won: for seeded rows over the second best perturbed
    score, for greedy ones over the second best logit; inf if there is no second.

    Where the margin exceeds 1e-4, the token does not depend on the batch (D10). A row without a
    seed is a ValueError, as its draw cannot be repeated.
    """
    found = {}
    for kind, members, scores in draw_batch._groups(logits, rows):
        draw_batch._check(members, draw_batch._states(scores).tolist())
        if not (kind.is_greedy or kind.is_seeded):
            raise ValueError(f"row {members[0]} has no seed: its draw has no margin")
        parts = [] if kind.is_greedy else draw_batch._candidates(kind, members, scores, rows)
        drawn = [(part.rows, draw_batch._perturbed(part, rows)) for part in parts]
        for own, values in drawn or [(members, scores.to(torch.float64))]:
            best = torch.nn.functional.pad(values, (0, 1), value=-torch.inf).topk(2, dim=1).values
            found |= zip(own, (best[:, 0] - best[:, 1]).tolist(), strict=True)
    return [found[index] for index in range(len(rows))]
