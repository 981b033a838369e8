"""Measures what each way to a server costs a request and a token: triolet.v1, VllmEngine, OpenAI's
HTTP API through the gateway smg, and triolet.v1 through Ray Serve.

One client makes one call after the other to one server of the story model, or to one replica of it
behind Ray Serve, which has as many threads. The prompt is the same each time, so that it is cached.
A request's cost is the time of a call of one token. A token's cost is the rest of the time of a
call of 65 tokens, divided by 64; most of it is the model's step, which is the same each way. The
HTTP client is `http.client`, which reads a stream and parses nothing.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from tests.support.gateway import gateway, worker
from tests.support.ray_fleet import fleet
from tests.support.wire import connect, generate, tokenize
from tools.lab.bench.frame import Row, repeat_in_turn, row_of

if TYPE_CHECKING:
    from collections.abc import Callable

MEASURES = ("grpc_service", "tests/support/gateway.py", "tests/support/ray_fleet.py")

PROMPT = "Once upon a time there was a small dog who wanted to see the world beyond the hill."
CALLS = 20  # whose median is a figure
MANY = 65
MODELS = [{"model": "demo-stories", "name": "stories"}]
SAMPLING = {"temperature": 0.0, "ignore_eos": True}


def _by_triolet(channel: object, max_tokens: int) -> None:
    heard = generate(channel, text=PROMPT, sampling=SAMPLING | {"max_tokens": max_tokens})
    assert heard.finished().usage.completion_tokens == max_tokens


def _by_vllm_engine(stub: object, ids: list[int], max_tokens: int) -> None:
    params = vllm_engine_pb2.SamplingParams(max_tokens=max_tokens, **SAMPLING)
    tokens = vllm_engine_pb2.TokenizedInput(input_ids=ids)
    request = vllm_engine_pb2.GenerateRequest(tokenized=tokens, sampling_params=params, stream=True)
    [*_, last] = stub.Generate(request, timeout=60)  # type: ignore[attr-defined]
    assert last.complete.completion_tokens == max_tokens


def _by_gateway(connection: http.client.HTTPConnection, max_tokens: int) -> None:
    body = {"model": "stories", "prompt": PROMPT, "stream": True, "max_tokens": max_tokens}
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body | SAMPLING), headers)
    answer = connection.getresponse().read()
    assert answer.count(b"data:") >= min(max_tokens, 2), answer


def _ms(call: Callable[[int], None], max_tokens: int) -> float:
    """Return the median time of a call, in ms."""
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        call(max_tokens)
        times.append(1e3 * (time.perf_counter() - started))
    return sorted(times)[CALLS // 2]


def run() -> list[Row]:
    """Return the bench's rows."""
    with (
        tempfile.TemporaryDirectory() as folder,
        worker(model="demo-stories", name="stories") as server,
        gateway([server], log=Path(folder, "log")) as one,
        connect(f"127.0.0.1:{server.gateway_port}") as channel,
        fleet(args={"models": MODELS}, num_replicas=1) as served,
    ):
        ids = tokenize(server.channel, PROMPT)
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        connection = http.client.HTTPConnection(one.base_url.removeprefix("http://"))
        ways: dict[str, Callable[[int], None]] = {
            "triolet.v1": partial(_by_triolet, server.channel),
            "VllmEngine": partial(_by_vllm_engine, stub, ids),
            "HTTP through smg": partial(_by_gateway, connection),
            "triolet.v1 through Ray Serve": partial(_by_triolet, served.channel),
        }
        short = repeat_in_turn([partial(_ms, way, 1) for way in ways.values()])
        long = repeat_in_turn([partial(_ms, way, MANY) for way in ways.values()])
        connection.close()
    rows = []
    for name, ones, manys in zip(ways, short, long, strict=True):
        each = [(many - first) / (MANY - 1) for first, many in zip(ones, manys, strict=True)]
        rows += [row_of(f"{name}, a request", ones, "ms"), row_of(f"{name}, a token", each, "ms")]
    return rows
