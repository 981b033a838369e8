"""Makes Python's garbage collector collect cycles seldom, so that it rarely delays a step.

A library must not change the collector of its program, so only this project's programs call these
functions; `collect_after_close` and `return_freed_memory` change no setting.
"""

from __future__ import annotations

import ctypes
import gc

# A step of 1,024 rows makes thousands of tuples that live until the next step. With Python's own
# threshold of 700, collections begin while the scheduler plans, and planning takes a third longer
# (`python -m tools.lab.bench schedule`).
GC_THRESHOLDS = (50_000, 20, 100)
# While a server starts. Importing torch and our modules leaves 300,000 objects, of which nearly
# none is garbage, and with the thresholds above collections took 3 % of the start.
STARTING_THRESHOLD = 1_000_000


def collect_hardly() -> None:
    """Raise the collector's threshold until `freeze_after_load`. A server calls this before its
    imports."""
    gc.set_threshold(STARTING_THRESHOLD)


def collect_seldom() -> None:
    """Raise the collector's thresholds. Programs that import torch or transformers call this
    first: otherwise collections take a tenth of the time of the imports."""
    gc.set_threshold(*GC_THRESHOLDS)


def freeze_after_load() -> None:
    """Exempt all live objects from later collections, and collect seldom. A server or a worker
    calls this when its models have loaded: a full collection of the objects of torch and
    transformers would stop every thread for a tenth of a second. So this function does not collect
    either; the garbage of the imports, about a megabyte, stays."""
    gc.freeze()
    collect_seldom()


def return_freed_memory() -> None:
    """Return the C allocator's free pages to the operating system, where it has a function for
    that (glibc). After the loads of files of 0.4 and 2.5 GB it returned 25 and 43 MB in 3 and
    15 ms."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def collect_after_close() -> None:
    """Collect once, after a model was closed. Its libraries leave 1.5 MB in cycles, which at
    `GC_THRESHOLDS` would stay for long. After `freeze_after_load` this takes about 10 ms."""
    gc.collect()
