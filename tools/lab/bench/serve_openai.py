"""Measures a whole server over OpenAI's API, beside llama.cpp's `llama-server`: output tokens/s and
the time to the first token, with the same file of 4 bits and the same clients over HTTP.

The model is s135 in Q4_0, by llama.cpp's quantiser. The load is the closed loop of the bench
`serve`: 1, 8 or 32 clients, prompts of 128 ids that no cache has, outputs of 64 tokens, greedy. The
clients are a process of their own on the same cores, and keep their connections
(`tools.lab.peers.http_clients`). The servers take turns; all processes of a server that waits for
its turn are suspended. Both servers make text. `llama-server` runs with its own defaults, but for
its number of slots and threads, and without its store of earlier prompts. "Between tokens" is
between events with text.

`BENCH_ONLY` is a regular expression that selects loads by name. `BENCH_PEERS=` leaves llama-server
out. `BENCH_FLAGS` are more flags for our server.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack

from tools.lab.bench.checkpoints import MODELS, gguf
from tools.lab.bench.frame import Row, row_of
from tools.lab.bench.serve import MODEL, WAVES, compare, loads
from tools.lab.peers.servers import start_server

MEASURES = (
    "engine/core",
    "engine/replica",
    "engine/requests",
    "engine/worker",
    "engine/kernels",
    "grpc_service/openai",
    "grpc_service/rpc",
    "grpc_service/services",
)

PEER = "llama-server"
BARS = {"output": 1.2, "first token p50": 0.75}  # our figures divided by the peer's


def run() -> list[Row]:
    """Return the bench's rows."""
    wanted = re.compile(os.environ.get("BENCH_ONLY", ""))
    file, vocab = gguf(MODEL, "Q4_0"), MODELS[MODEL].shape.vocab
    if file is None:
        raise SystemExit(
            "the file is made by llama.cpp: python -m tools.lab.peers install llama.cpp"
        )
    names = ["triolet, HTTP", *([PEER] if PEER in os.environ.get("BENCH_PEERS", PEER) else [])]
    with ExitStack() as stack:
        servers = []
        for name in names:
            server = start_server(name, file, vocab)
            if server is not None:
                stack.callback(server.close)
                server.name = server.name.partition(",")[0]
                servers.append(server)
        if not servers or servers[0].name != "triolet":
            raise SystemExit("our own server did not start")
        rows = [row_of(f"start to ready: {one.name}", [one.start_s], "s") for one in servers]
        for name, load in loads().items():
            if "clients" in load and wanted.search(name):
                rows += compare(name, load, servers, PEER, BARS, tuple(WAVES))
        rows += [row_of(f"memory: {one.name}", [one.memory_mb], "MB") for one in servers]
    return rows
