"""OpenVINO GenAI's ``LLMPipeline`` with a GGUF file, which its own reader converts.

On the clock: its scheduler, forward and sampling, by the times that it notes of each token; there
is no text. OpenVINO chooses the dtype of its products by the processor. This file runs in
OpenVINO's own environment.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
import openvino
import openvino_genai

from tools.lab.peers.asked import answer


class OpenVinoEngine:
    """A `tools.lab.peers.asked.Engine`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._pipeline: Any = openvino_genai.LLMPipeline(
            settings["gguf"], "CPU", INFERENCE_NUM_THREADS=settings["threads"]
        )

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Measure a decode, as `tools.lab.peers.asked.Engine` says."""
        found = self._generate(prompts, steps + 1)
        times = [1e-3 * at for at in found.perf_metrics.raw_metrics.m_new_token_times]
        assert len(times) == steps + 1
        return {
            "seconds": times[-1] - times[0],
            "step_s": [after - before for before, after in pairwise(times)],
            "first": [int(row[0]) for row in found.tokens],
            "last": [int(row[-1]) for row in found.tokens],
        }

    def prefill(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Measure a prefill, as `tools.lab.peers.asked.Engine` says."""
        start = time.perf_counter()
        found = self._generate(prompts, 1)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "first": [int(row[0]) for row in found.tokens]}

    def _generate(self, prompts: list[list[int]], count: int) -> Any:
        """Return the results of ``count`` greedy tokens for each prompt."""
        ids = np.array(prompts, np.int64)
        config = self._pipeline.get_generation_config()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos, config.do_sample = True, False
        both = (openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return self._pipeline.generate(openvino_genai.TokenizedInputs(*both), config)


if __name__ == "__main__":
    answer(OpenVinoEngine)
