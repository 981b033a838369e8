"""What `--step-time-target` brings, and what it costs: our server with several, in turn.

The load is `serve`'s with 32 clients, whose prompts come all at once: how soon half of them have
their first token, how many tokens a second come out, and how long the longest waits between tokens
are. Beside it a smaller step budget instead, by `--max-num-batched-tokens`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from tools.bench.checkpoints import MODELS, checkpoint
from tools.bench.peers.servers import start_server
from tools.bench.serve import MODEL, compare, loads

if TYPE_CHECKING:
    from tools.bench.frame import Row
    from tools.bench.peers.servers import ServerWithClients

LOAD = "32 clients"
SETTINGS = (
    ("--step-time-target", "0"),
    ("--step-time-target", "0.3"),
    ("--step-time-target", "0.15"),
    ("--step-time-target", "0.08"),
    ("--step-time-target", "0", "--max-num-batched-tokens", "512"),
)
FIGURES = ("output", "first token p50", "between tokens p99")


def run() -> list[Row]:
    model, vocab = checkpoint(MODEL), MODELS[MODEL].shape.vocab
    servers: list[ServerWithClients] = []
    with ExitStack() as stack:
        for flags in SETTINGS:
            server = start_server("triolet", model, vocab, flags)
            if server is None:
                raise SystemExit("our own server did not start")
            stack.callback(server.close)
            servers.append(server)
        rows = compare(LOAD, loads()[LOAD], servers)
    return [row for row in rows if row.value and any(f", {name}: " in row.name for name in FIGURES)]
