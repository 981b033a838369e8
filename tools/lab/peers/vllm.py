"""vLLM's CPU build: ``LLMEngine.step`` in this process, with torch.compile as by default.

On the clock: its scheduler, forward, sampling, detokenising and reading the outputs, as for our
engine. This file runs in vLLM's own environment.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from tools.lab.peers.asked import answer

TOKENS_AT_ONCE = 2048
ROOM = 256  # how many tokens some sequences may decode while others' prompts are computed


class VllmEngine:
    """A `tools.lab.peers.asked.Engine`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, settings["kv_bytes"] >> 30))
        cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM

        self._engine: Any = LLM(
            model=settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_len"],
            max_num_seqs=settings["seqs"],
            max_num_batched_tokens=TOKENS_AT_ONCE,
        ).llm_engine
        self._names = itertools.count()

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Measure a decode, as `tools.lab.peers.asked.Engine` says."""
        names = self._submit(prompts, steps + ROOM)
        had: dict[str, list[int]] = {name: [] for name in names}
        while not all(had.values()):
            self._step(had)
        target = {name: len(tokens) + steps for name, tokens in had.items()}
        start = time.perf_counter()
        while any(len(had[name]) < target[name] for name in names):
            self._step(had)
        seconds = time.perf_counter() - start
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {
            "seconds": seconds,
            "first": [had[name][0] for name in names],
            "last": [had[name][target[name] - 1] for name in names],
        }

    def prefill(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Measure a prefill, as `tools.lab.peers.asked.Engine` says."""
        names = self._submit(prompts, 1)
        had: dict[str, list[int]] = {name: [] for name in names}
        start = time.perf_counter()
        while not all(had.values()):
            self._step(had)
        seconds = time.perf_counter() - start
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {"seconds": seconds, "first": [had[name][0] for name in names]}

    def _submit(self, prompts: list[list[int]], max_tokens: int) -> list[str]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        names = [f"r{next(self._names)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return names

    def _step(self, had: dict[str, list[int]]) -> None:
        for output in self._engine.step():
            had[output.request_id] += output.outputs[0].token_ids


if __name__ == "__main__":
    answer(VllmEngine)
