"""Measures a whole server under load, beside vLLM's gRPC server: requests/s, output tokens/s, the
time to the first token, and the time between tokens.

The model is s135 in bfloat16, or in the dtype that the environment variable BENCH_DTYPE names: on a
processor without bfloat16, vLLM takes seconds for a prompt in bfloat16. Prompts have 128 ids that
no cache has, and the output is 64 tokens, greedy. The clients are a process of their own on the
same cores. Closed loop: each of 1, 8 or 32 clients sends `WAVES` requests, the next one as soon as
the last is answered; the clock runs until the last answer. Open loop: requests at random instants
(Poisson), `RATE` per second. The servers take turns; all processes of a server that waits for its
turn are suspended. Our server also makes the text of its tokens. vLLM's gRPC server sends only
ids; its gateway makes the text. The memory is read after the loads (`peers.process.memory_mb`) and
includes a KV cache, whose size is the same for both servers.

`BENCH_ONLY` is a regular expression that selects loads by name. `BENCH_PEERS=` leaves vLLM out.
`BENCH_FLAGS` are more flags for our server.

What explains the figures: clients begin together. vLLM computes the first prompts in one step,
after which all decode and none waits for another's prompt. Triolet computes prompts beside decodes,
in steps of `--inter-token-target` or as long as the decodes take: answers begin and end sooner, the
last first tokens come later, and the longest waits between tokens are steps with prompts. The
figures of Zen 3 are of float32 and of an earlier pace of prompts; a step of 32 decodes takes longer
than `--inter-token-target` there.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from tools.lab.bench.checkpoints import MODELS, checkpoint
from tools.lab.bench.frame import Row, percentile, repeat_in_turn, row_of
from tools.lab.peers.servers import ServerWithClients, start_server

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MEASURES = (
    "engine/core",
    "engine/replica",
    "engine/requests",
    "engine/worker",
    "engine/kernels",
    "grpc_service/rpc",
    "grpc_service/services",
)

MODEL = "s135"
PROMPT, OUTPUT = 128, 64
WAVES = {1: 4, 8: 2, 32: 2}  # requests of each client, by the number of clients
COMPARED = (8, 32)
# Bars of our figures divided by the peer's, with `COMPARED` clients.
BARS = {"output": 1.2, "first token p50": 0.75, "between tokens p99": 1.0}
RATE, OPEN_REQUESTS = 1.5, 24
PEER = "vllm"

Answer = dict[str, Any]
FIGURES: dict[str, tuple[str, str, Callable[[Answer], float]]] = {
    "output": ("tokens/s", "higher", lambda seen: seen["tokens"] / seen["seconds"]),
    "requests": ("1/s", "higher", lambda seen: seen["requests"] / seen["seconds"]),
    "first token p50": ("ms", "lower", lambda seen: 1e3 * percentile(seen["first"], 0.5)),
    "first token p99": ("ms", "lower", lambda seen: 1e3 * percentile(seen["first"], 0.99)),
    "between tokens p50": ("ms", "lower", lambda seen: 1e3 * percentile(seen["gaps"], 0.5)),
    "between tokens p99": ("ms", "lower", lambda seen: 1e3 * percentile(seen["gaps"], 0.99)),
}


def loads() -> dict[str, dict[str, Any]]:
    """Return the loads by name."""
    size = {"prompt": PROMPT, "output": OUTPUT}
    found: dict[str, dict[str, Any]] = {
        f"{clients} client{'s' * (clients > 1)}": {"clients": clients, "requests": waves, **size}
        for clients, waves in WAVES.items()
    }
    found[f"open loop, {RATE:g} a second"] = {
        "rate": RATE,
        "requests": OPEN_REQUESTS,
        "seed": 1,
        **size,
    }
    return found


def measure(server: ServerWithClients, load: dict[str, Any], answers: list[Answer]) -> float:
    """Run a load, append its measurements to ``answers`` and return its seconds."""
    answers.append(server.ask(**load))
    return float(answers[-1]["seconds"])


def compare(
    name: str,
    load: dict[str, Any],
    servers: Sequence[ServerWithClients],
    peer: str = PEER,
    bars: Mapping[str, float] = BARS,
    compared: Sequence[int] = COMPARED,
) -> list[Row]:
    """Return the rows of one load. The first of ``servers`` is ours; ``peer`` is the one that it is
    compared with by ``bars``, with so many clients."""
    answers: list[list[Answer]] = [[] for _ in servers]
    repeat_in_turn(
        [
            partial(measure, server, load, kept)
            for server, kept in zip(servers, answers, strict=True)
        ]
    )
    found = {
        server.name: {
            figure: [of(answer) for answer in kept[1:]] for figure, (_, _, of) in FIGURES.items()
        }
        for server, kept in zip(servers, answers, strict=True)
    }
    rows = [
        row_of(f"{name}, {figure}: {server}", samples[figure], unit, better=better)
        for figure, (unit, better, _) in FIGURES.items()
        for server, samples in found.items()
    ]
    if peer not in found:
        return [*rows, Row(f"{name}, output: {peer}", None, "tokens/s")]
    has_bar = load.get("clients") in compared
    for figure, limit in bars.items():
        ratios = [a / b for a, b in zip(*(one[figure] for one in found.values()), strict=True)]
        bar, better = limit if has_bar else None, FIGURES[figure][1]
        rows.append(row_of(f"{name}, {figure} against {peer}", ratios, "×", bar=bar, better=better))
    return rows


def run() -> list[Row]:
    """Return the bench's rows."""
    wanted = re.compile(os.environ.get("BENCH_ONLY", ""))
    names = ["triolet", *([PEER] if PEER in os.environ.get("BENCH_PEERS", PEER) else [])]
    model, vocab = checkpoint(MODEL), MODELS[MODEL].shape.vocab
    with ExitStack() as stack:
        servers = []
        for name in names:
            server = start_server(name, model, vocab)
            if server is not None:
                stack.callback(server.close)
                servers.append(server)
        if not servers or servers[0].name != names[0]:
            raise SystemExit("our own server did not start")
        rows = [row_of(f"start to ready: {one.name}", [one.start_s], "s") for one in servers]
        for name, load in loads().items():
            if wanted.search(name):
                rows += compare(name, load, servers)
        rows += [row_of(f"memory: {one.name}", [one.memory_mb], "MB") for one in servers]
    return rows
