"""A text model's logits do not depend on the number of threads of its kernels."""

from itertools import cycle

import pytest
import torch

from engine.worker.interface import RunnerSpec
from engine.worker.text.runner import TorchRunner
from tests.support.mini_planner import MiniPlanner
from tests.support.model_zoo import seeded_prompt


def outputs(runner, info, monkeypatch, counts):
    """Return the logits of all steps of some sequences, as bytes. Each step's kernels use the next
    number of threads in ``counts``; torch's operations keep theirs."""
    found, forward, turn, asked = [], runner._forward, cycle(counts), set()

    def keep(batch):
        count = next(turn)
        monkeypatch.setattr(torch, "get_num_threads", lambda: asked.add(count) or count)
        found.append((logits := forward(batch)).numpy().tobytes())
        return logits

    runner._forward = keep
    planner = MiniPlanner(runner, info, seed=3, chunks=40)
    for length in (70, 9, 33):
        planner.add(seeded_prompt(length), 6)
    planner.run()
    runner._forward = forward
    monkeypatch.undo()
    assert asked == set(counts), "the kernels do not ask for their number of threads"
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "lfm2"])
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_a_count_that_changes_between_steps_changes_no_bit(zoo, monkeypatch, name, quantization):
    spec = RunnerSpec(str(zoo.directory(name)), kv_bytes=1 << 24, threads=4,
                      quantization=quantization, speculation="off")  # fmt: skip
    runner = TorchRunner(spec)
    info = runner.load(lambda _progress: None)
    alone = outputs(runner, info, monkeypatch, [1])
    assert outputs(runner, info, monkeypatch, [1, 3, 4, 2, 7]) == alone
    runner.close()
