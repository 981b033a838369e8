"""Checks and measures on a machine with a GPU what elsewhere was only tried with a stand-in.

    python -m tools.lab.gpu --wheels DIR --json FILE

It runs in phases, each in a process of its own, so that one that crashes or hangs costs no other
its result: the attention's kernel against the reference (`kernel`), every architecture against
transformers (`parity`), decoding beside transformers' continuous batching, with the memory that it
takes (`step`), and the time between two steps, with prepared plans and without (`gap`). All of it
takes less than `--minutes`; what does not fit is named in the result. The machine needs no network.

With `--device cpu` the same runs on small shapes, as a test of the tool itself.
"""
