"""Our engine without a server: the core's scheduler and a server's runner.

On the clock: plan, execute (packing, forward, sampling, detokenising), commit, and reading the
events. Not on the clock: Trio, the worker's thread and gRPC, which the benches `front-real` and
`serve` measure.
"""

from __future__ import annotations

import itertools
import resource
import time
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from engine.core.common.credit import Credit
from engine.core.common.events import Cancel, StepDone, Submit
from engine.core.common.steps import RowFailure
from engine.core.common.types import EndReason, RequestId
from engine.core.text.scheduler import Scheduler
from engine.core.text.types import Request, Sampling, Stops, Tokens
from engine.gc_tuning import freeze_after_load
from engine.worker.factory import make_runner
from tools.lab.peers.asked import answer

if TYPE_CHECKING:
    from engine.core.common.steps import StepTimings
    from engine.core.text.plan import StepResult

TOKENS_AT_ONCE = 2048
STREAM = 100_000
ROOM = 256  # how many tokens some sequences may decode while others' prompts are computed


class TrioletEngine:
    """A `tools.lab.peers.asked.Engine`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        model = ModelConfig(
            settings["model"],
            device=settings.get("device", "cpu"),
            dtype=settings["dtype"],
            threads=settings["threads"],
            quantization=settings.get("quantization", "none"),
            kv_cache_dtype=settings.get("kv_cache_dtype", "auto"),
            tp=settings.get("tp", 1),
            runner=settings.get("runner", "thread"),
            speculation="off",  # a step is one token of each sequence, as in the other engines
        )
        config = EngineConfig(
            models=(model,),
            kv_cache_memory=settings["kv_bytes"],
            max_num_seqs=settings["seqs"],
            max_num_batched_tokens=TOKENS_AT_ONCE,
        )
        self._runner: Any = make_runner(model, config)
        self._is_cuda = model.device.startswith("cuda")
        before = self._used_bytes()
        info = self._runner.load(lambda progress: None)
        self._memory_bytes = info.memory_bytes
        self._bytes_before = before
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=info.num_blocks,
                block_size=info.block_size,
                max_model_len=info.max_model_len,
                max_num_seqs=settings["seqs"],
                max_num_batched_tokens=TOKENS_AT_ONCE,
                num_states=info.num_states,
                step_time_target_s=0.0,
                inter_token_target_s=0.0,
            )
        )
        self._names = itertools.count()
        self._timings: list[StepTimings] = []
        freeze_after_load()

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Measure a decode, as `tools.lab.peers.asked.Engine` says."""
        names = self._submit(prompts, steps + ROOM)
        firsts: dict[RequestId, int] = {}
        while len(firsts) < len(names):
            for name, token in self._step():
                firsts.setdefault(name, token)
        self._timings.clear()
        times = [time.perf_counter()]
        lasts: dict[RequestId, int] = {}
        for _ in range(steps):
            lasts = dict(self._step())
            times.append(time.perf_counter())
            assert len(lasts) == len(names)
        self._end(names)
        return {
            "seconds": times[-1] - times[0],
            "step_s": [after - before for before, after in itertools.pairwise(times)],
            "first": [firsts[name] for name in names],
            "last": [lasts[name] for name in names],
            "forward_s": sum(one.forward_s for one in self._timings),
            "outside_s": sum(t.prepare_s + t.sample_s + t.text_s for t in self._timings),
            "memory_bytes": self._memory_bytes,
            "weights_bytes": self._weights_bytes,
            "peak_bytes": self._used_bytes() - self._bytes_before,
        }

    def _used_bytes(self) -> int:
        """Return the peak memory so far, in bytes: on a GPU of tensors, else of this process."""
        if self._is_cuda:
            import torch  # after the engine, which sets how its threads wait (D13)

            return torch.cuda.max_memory_allocated()
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @property
    def _weights_bytes(self) -> int:
        """The bytes of the tensors that the loaded model holds; 0 of a model in other processes."""
        model = getattr(self._runner, "_model", None)
        return 0 if model is None else int(model.num_bytes)

    @property
    def worker_bytes(self) -> int:
        """The resident memory of the worker's processes."""
        found: int = self._runner.rss_bytes()
        return found

    def close(self) -> None:
        """End the worker."""
        self._runner.close()

    def prefill(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Measure a prefill, as `tools.lab.peers.asked.Engine` says."""
        names = self._submit(prompts, 2)
        firsts: dict[RequestId, int] = {}
        start = time.perf_counter()
        while len(firsts) < len(names):
            for name, token in self._step():
                firsts.setdefault(name, token)
        seconds = time.perf_counter() - start
        self._end(names)
        return {"seconds": seconds, "first": [firsts[name] for name in names]}

    def _submit(self, prompts: list[list[int]], max_tokens: int) -> list[RequestId]:
        names = [RequestId(f"r{next(self._names)}") for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            request = Request(
                name, tuple(prompt), Sampling(temperature=0.0), Stops(max_tokens), 0.0
            )
            self._scheduler.apply(Submit(request, Credit(STREAM)), time.monotonic())
        return names

    def _step(self) -> list[tuple[RequestId, int]]:
        """Run a step and return the token of each request."""
        plan, _ = self._scheduler.plan(time.monotonic())
        assert plan is not None
        result: StepResult = self._runner.execute(plan)
        self._timings.append(result.timings)
        for row in result.rows:
            assert not isinstance(row, RowFailure), row
        events = self._scheduler.apply(StepDone(result), time.monotonic())
        return [(one.request_id, one.token_ids[0]) for one in events if isinstance(one, Tokens)]

    def _end(self, names: list[RequestId]) -> None:
        """Cancel the requests that still run."""
        for name in names:
            self._scheduler.apply(Cancel(name, EndReason.CANCELLED), time.monotonic())


if __name__ == "__main__":
    answer(TrioletEngine)
