"""Stock transformers: the model's forward with a DynamicCache and SDPA, for sequences of one
length.

On the clock: the forward and the argmax of the last positions. There is no scheduler and no text.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tools.lab.peers.asked import answer


class StockEngine:
    """A `tools.lab.peers.asked.Engine`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"]), attn_implementation="sdpa"
        ).eval()
        self._kept: tuple[list[list[int]], Any] | None = None  # prompts and their cache

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Measure a decode, as `tools.lab.peers.asked.Engine` says."""
        if self._kept is None or self._kept[0] != prompts:
            self._kept = (prompts, self._filled([prompt[:-1] for prompt in prompts]))
        # A copy, because the states of a recurrent model cannot be taken back to an earlier token.
        cache = copy.deepcopy(self._kept[1])
        last = torch.tensor([prompt[-1:] for prompt in prompts])
        first = token = self._next(last, cache)
        start = time.perf_counter()
        for _ in range(steps):
            token = self._next(token, cache)
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "first": first[:, 0].tolist(),
            "last": token[:, 0].tolist(),
        }

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Measure a prefill, as `tools.lab.peers.asked.Engine` says."""
        start = time.perf_counter()
        first = self._next(torch.tensor(prompts), DynamicCache(config=self._model.config))
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "first": first[:, 0].tolist()}

    def _filled(self, prompts: list[list[int]]) -> Any:
        """Return a cache that holds the prompts, computed 2,048 tokens at a time."""
        cache = DynamicCache(config=self._model.config)
        ids = torch.tensor(prompts)
        width = max(1, 2048 // len(prompts))
        for start in range(0, ids.shape[1], width):
            self._next(ids[:, start : start + width], cache)
        return cache

    def _next(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Return the tokens after ``ids`` [batch, tokens] as [batch, 1]."""
        output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].argmax(-1, keepdim=True)


if __name__ == "__main__":
    answer(StockEngine)
