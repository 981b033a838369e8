"""When Python looks for garbage that is in cycles: rarely, and not in mid-step."""

from __future__ import annotations

import gc

GC_THRESHOLDS = (50_000, 20, 100)
"""A step of 1,024 rows makes thousands of tuples that live until the next; at Python's 700 it was
looked through for cycles in mid-plan, and was a third slower (`python -m tools.bench schedule`)."""


def sweep_heap() -> None:
    """When a model was closed: what its libraries leave behind are cycles, 1.5 MB of them, and at
    `GC_THRESHOLDS` nobody else comes for them. After `settle_heap` it takes some 10 ms."""
    gc.collect()


def collect_rarely() -> None:
    """For a process that will serve, before its imports: looking for garbage among what torch and
    transformers make while they are imported is a tenth of a start's time."""
    gc.set_threshold(*GC_THRESHOLDS)


def settle_heap() -> None:
    """For a process that serves, when its models have loaded: what start-up made is never looked
    through for garbage again (a full look at torch's and transformers' objects stops every thread
    for a tenth of a second), and what steps make less often. Not for a library to do unasked."""
    gc.collect()
    gc.freeze()
    collect_rarely()
