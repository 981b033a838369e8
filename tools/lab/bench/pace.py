"""Measures what `--inter-token-target` and `--step-time-target` gain and cost, with servers of
several settings in turn.

The loads are those of the bench `serve` with 8 and 32 clients, whose first prompts come all at
once. The figures are the time until half of the clients have their first token, the tokens per
second, and the longest waits between tokens.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from tools.lab.bench.checkpoints import MODELS, checkpoint
from tools.lab.bench.serve import MODEL, compare, loads
from tools.lab.peers.servers import start_server

if TYPE_CHECKING:
    from tools.lab.bench.frame import Row
    from tools.lab.peers.servers import ServerWithClients

MEASURES = ("engine/core", "engine/replica", "engine/requests", "engine/worker", "engine/kernels")

LOADS = ("8 clients", "32 clients")
SETTINGS = (
    ("--inter-token-target", "0", "--step-time-target", "0"),
    ("--inter-token-target", "0"),
    ("--inter-token-target", "0.05"),
    ("--inter-token-target", "0.02"),
)
FIGURES = ("output", "first token p50", "between tokens p99")


def run() -> list[Row]:
    """Return the bench's rows."""
    model, vocab = checkpoint(MODEL), MODELS[MODEL].shape.vocab
    servers: list[ServerWithClients] = []
    with ExitStack() as stack:
        for flags in SETTINGS:
            server = start_server("triolet", model, vocab, flags)
            if server is None:
                raise SystemExit("our own server did not start")
            stack.callback(server.close)
            servers.append(server)
        rows = [row for load in LOADS for row in compare(load, loads()[load], servers)]
    return [row for row in rows if row.value and any(f", {name}: " in row.name for name in FIGURES)]
