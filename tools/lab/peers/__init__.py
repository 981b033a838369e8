"""Runs other engines beside ours, each in an environment and a process of its own.

    python -m tools.lab.peers install llama.cpp
    python -m tools.lab.peers install llama-server
    python -m tools.lab.peers install vllm
    python -m tools.lab.peers list

Rule 1: all engines have the same checkpoint, dtype, number of threads and prompt ids, and the clock
runs around the same work (`tools.lab.peers.asked`). The top of an engine's file says what else is
on its clock. Rule 2: the files that run in another environment import nothing of this repository
but each other, and `tools.lab.peers.asked`, which needs only the standard library.
"""
