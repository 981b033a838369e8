"""`python -m tests.support.load_memory SMALL LARGE [FIELD=VALUE …]`: loads both models, and prints
what ``triolet inspect`` says that LARGE leaves in memory, and what it left, in bytes.

SMALL is of the same kind and brings what every load of that kind needs: modules, threads, kernels.
The KV pool is written at the load, and mapped weights are read. It is a program because memory that
something before it freed would hide what a load takes.
"""

import gc
import sys
from pathlib import Path

from engine.config import EngineConfig, ModelConfig
from engine.worker.encode.runner import EncoderRunner
from engine.worker.factory import make_runner
from engine.worker.inspection import inspect

SIZES = {"kv_cache_memory": 64 << 20, "max_num_seqs": 64, "prefault_kv_cache": True}


def resident() -> int:
    """Return the memory that this process has, mapped files included."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def main() -> None:
    """Load both models, and print both numbers."""
    small, large, *fields = sys.argv[1:]
    more = dict(field.split("=") for field in fields)
    models = [ModelConfig(path, **more) for path in (small, large)]
    configs = [EngineConfig(models=(model,), **SIZES) for model in models]
    first, second = map(make_runner, models, configs)
    report = inspect(models[1], configs[1])
    assert report.found is not None, report.refusal
    first.load(lambda progress: None)
    before = resident()
    second.load(lambda progress: None)
    if isinstance(second, EncoderRunner):  # whose library leaves float32 weights in their file
        for parameter in second._model.parameters():
            parameter.sum()
    print(report.found.load_bytes, resident() - before)


if __name__ == "__main__":
    main()
