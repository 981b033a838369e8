"""Check that our greedy output is transformers' own, token for token.

The oracle is the stock model with eager attention, in float32, in the same process, run over each
whole sequence at once. Its input is the sampled tokens, so that after a skipped position both
models still have the same text. A position counts unless its two best logits, or the last expert
that a router took and the first that it did not, are closer than `MARGIN`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.mini_planner import Planned

MARGIN = 1e-3  # another summation order changes logits by at most 1e-5; D11
SKIPPED_SHARE_MAX = 0.02  # measured: 0.0 to 0.8 %


@dataclass(slots=True)
class Tally:
    """How many positions of one architecture were compared, skipped and wrong."""

    compared: int = 0
    skipped: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def skipped_share(self) -> float:
        """Return the share of positions that were skipped."""
        return self.skipped / max(1, self.compared + self.skipped)

    def check(self) -> None:
        """Check that no position is wrong, and that few were skipped."""
        assert not self.wrong, f"{len(self.wrong)} of {self.compared}: {'; '.join(self.wrong[:5])}"
        assert self.skipped_share < SKIPPED_SHARE_MAX
        assert self.compared


class Oracle:
    """The stock model of a checkpoint."""

    def __init__(self, directory: str, **options: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            directory,
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
            **options,
        )
        self._routers = [m for m in self.model.modules() if type(m).__name__.endswith("Router")]

    @torch.no_grad()
    def next_logits(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of the next token at every position, [num_tokens, vocab].

        The second result is the least margin by which a router chose its experts, [num_tokens].
        """
        margins = [torch.full((len(tokens),), torch.inf)]
        hooks = [router.register_forward_hook(_router_margin(margins)) for router in self._routers]
        try:
            logits = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        return logits, torch.stack(margins).amin(dim=0)

    def compare(self, sequences: Iterable[Planned], tally: Tally) -> None:
        """Compare every output token of ``sequences`` with the oracle's."""
        for one in sequences:
            assert one.failure is None, one.failure
            for position, got, want, margin in self._rows(one):
                if margin < MARGIN:
                    tally.skipped += 1
                    continue
                tally.compared += 1
                if got != want:
                    tally.wrong.append(
                        f"prompt {len(one.prompt)} position {position}: {got} for {want} "
                        f"by {margin:.4f}"
                    )

    def _rows(self, one: Planned) -> Iterator[tuple[int, int, int, float]]:
        logits, routed = self.next_logits(one.tokens[:-1])
        first = len(one.prompt) - 1
        best = logits[first:].topk(2, dim=-1)
        margins = torch.minimum(best.values[:, 0] - best.values[:, 1], routed[first:]).tolist()
        wanted = best.indices[:, 0].tolist()
        yield from zip(range(len(wanted)), one.output, wanted, margins, strict=True)


def _router_margin(margins: list[torch.Tensor]) -> Any:
    def hook(router: Any, _arguments: object, output: tuple[torch.Tensor, ...]) -> None:
        ranked = output[0].reshape(-1, output[0].shape[-1]).sort(dim=-1, descending=True).values
        margins.append(ranked[:, router.top_k - 1] - ranked[:, router.top_k])

    return hook
