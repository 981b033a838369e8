"""Other engines beside ours, each in an environment and a process of its own.

    python -m tools.bench.peers install llama.cpp
    python -m tools.bench.peers install vllm
    python -m tools.bench.peers list

Rule 1: same checkpoint, same dtype, same threads, same prompt ids, the same clock around the same
work (`asked`); what an engine does beside that work is said at the top of its file.
Rule 2: the files that run in another environment (`asked`, `llama_cpp`, `vllm`) import nothing of
ours but `asked`.
"""
