"""Checks and measures on a GPU the code for CUDA, which the tests run with a stand-in only.

    python -m tools.lab.gpu --wheels DIR --json FILE

Each phase runs in a process of its own, so that a crash or a hang costs no other phase its result:
the attention's kernel against the reference (`kernel`), every architecture against transformers
(`parity`), decoding beside transformers' continuous batching, with the memory that it takes
(`step`), and the time between two steps, with prepared plans and without (`gap`). All phases
together take less than `--minutes`; the result names those cut short. No network is needed.

With `--device cpu` the same phases run on small shapes, as a test of the tool itself.
"""
