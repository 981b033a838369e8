"""Runs other engines beside ours, each in an environment and a process of its own.

    python -m tools.bench.peers install llama.cpp
    python -m tools.bench.peers install vllm
    python -m tools.bench.peers list

Rule 1: all engines have the same checkpoint, dtype, number of threads and prompt ids, and the clock
runs around the same work (`tools.bench.peers.asked`). The top of an engine's file says what else is
on its clock. Rule 2: the files that run in another environment (`tools.bench.peers.llama_cpp`,
`tools.bench.peers.vllm`) import only `tools.bench.peers.asked` of this repository.
"""
