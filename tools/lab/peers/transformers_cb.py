"""transformers' continuous batching, as in its ``generate_batch``: its manager's thread, its paged
cache and SDPA.

On the clock: its scheduler, forward and sampling, by the times that it records for each token.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from tools.lab.peers.asked import answer

BLOCK = 64
# transformers' attention masks have a step's tokens times the cache's tokens, so both are kept
# small. With a cache of 2 GiB, a step of one sequence took 2 s.
TOKENS_IN_CACHE = 16_384
TOKENS_AT_ONCE = 1_024
SLACK = 16  # how many tokens some sequences may decode while others' prompts are computed


class ContinuousEngine:
    """A `tools.lab.peers.asked.Engine`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        model: Any = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"]), attn_implementation="sdpa"
        ).eval()
        model.to(settings.get("device", "cpu"))
        self._manager: Any = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1),
            ContinuousBatchingConfig(
                page_size=BLOCK,
                num_blocks=settings.get("cache_tokens", TOKENS_IN_CACHE) // BLOCK,
                max_batch_tokens=settings.get("tokens_at_once", TOKENS_AT_ONCE),
            ),
        )
        self._manager.start()

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Measure a decode, as `tools.lab.peers.asked.Engine` says."""
        outputs = self._run(prompts, steps + SLACK)
        start = max(one.timestamps[0] for one in outputs)
        had = [sum(at <= start for at in one.timestamps) for one in outputs]
        assert max(had) <= SLACK, "the prompts were computed in too many steps"
        ends = [one.timestamps[n + steps - 1] for one, n in zip(outputs, had, strict=True)]
        return {
            "seconds": max(ends) - start,
            "first": [one.generated_tokens[0] for one in outputs],
            "last": [
                one.generated_tokens[n + steps - 1] for one, n in zip(outputs, had, strict=True)
            ],
        }

    def prefill(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Measure a prefill, as `tools.lab.peers.asked.Engine` says."""
        outputs = self._run(prompts, 1)
        start = min(one.created_time for one in outputs)
        return {
            "seconds": max(one.timestamps[0] for one in outputs) - start,
            "first": [one.generated_tokens[0] for one in outputs],
        }

    def _run(self, prompts: list[list[int]], max_tokens: int) -> list[Any]:
        """Run the prompts and return the finished requests in their order."""
        names = self._manager.add_requests(
            prompts, max_new_tokens=max_tokens, record_timestamps=True
        )
        found: dict[str, Any] = {}
        while len(found) < len(names):
            output = self._manager.get_result(timeout=1.0)
            if output is not None and output.is_finished():
                assert not output.error, output.error
                found[output.request_id] = output
        return [found[name] for name in names]


if __name__ == "__main__":
    answer(ContinuousEngine)
