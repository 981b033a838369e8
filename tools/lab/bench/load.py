"""Measures a server under many clients for a minute: its throughput, and percentiles of first
tokens and of whole requests.

Each of `CLIENTS` clients has a connection of its own, and sends the next request as soon as the
last is answered. The clients are one process on the server's cores. The server's runner computes
nothing: its steps sleep `STEP_S`, so that the figures are those of everything around a model.

`BENCH_WINDOW_S` is the length of a run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tools.lab.bench.frame import ROOT, Row, percentile, repeat, row_of
from tools.lab.bench.wire import peer

if TYPE_CHECKING:
    from collections.abc import Sequence

MEASURES = (
    "engine/core",
    "engine/replica",
    "engine/requests",
    "grpc_service/rpc",
    "grpc_service/services",
)

CLIENTS = 100
WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "60"))
STEP_S = 0.02
PROMPT, OUTPUT = 16, 32
VOCAB = 512  # prompts are drawn from these ids, which every fake model has
RUNNER = {"step_s": STEP_S, "num_blocks": 4096, "max_model_len": 1024}
LIMIT_S = 60.0  # for the clients to start, and to end the requests that they have begun
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

Answer = dict[str, Any]


def measure(address: str, clients: int, seconds: float) -> Answer:
    """Run clients of a server for a time, and return what they measured
    (`tools.lab.peers.clients`)."""
    load = {"clients": clients, "connections": clients, "seconds": seconds}
    asked = json.dumps({**load, "prompt": PROMPT, "output": OUTPUT})
    command = [sys.executable, "-m", "tools.lab.peers.clients"]
    done = subprocess.run(
        [*command, "triolet", address, str(VOCAB)],
        cwd=ROOT,
        input=f"{asked}\n",
        stdout=subprocess.PIPE,
        text=True,
        timeout=seconds + LIMIT_S,
        check=True,
    )
    _ready, answer = done.stdout.splitlines()
    found: Answer = json.loads(answer)
    return found


def rows_of(name: str, answers: Sequence[Answer]) -> list[Row]:
    """Return the rows of one load's runs."""
    rows = [
        row_of(
            f"{name}, {figure}",
            [answer[figure] / answer["seconds"] for answer in answers],
            f"{figure}/s",
            better="higher",
        )
        for figure in ("requests", "tokens")
    ]
    for figure, times in (("first token", "first"), ("whole request", "whole")):
        rows += [
            row_of(
                f"{name}, {figure} {shown}",
                [1e3 * percentile(answer[times], share) for answer in answers],
                "ms",
            )
            for shown, share in SHARES.items()
        ]
    return rows


def run() -> list[Row]:
    """Return the bench's rows."""
    answers: list[Answer] = []

    def once() -> float:
        answers.append(measure(server.address, CLIENTS, WINDOW_S))
        return float(answers[-1]["seconds"])

    with peer("triolet", runner=RUNNER) as server:
        repeat(once)
    return rows_of(f"{CLIENTS} clients for {WINDOW_S:g} s", answers[1:])
