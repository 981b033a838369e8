"""Starts `triolet serve` as a process of its own, for benches that need real models."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tools.lab.bench.wire import END_LIMIT_S, NO_PROXY, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

READY = re.compile(r"Triolet is ready on (\S+) after")
START_LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is ready."""

    address: str
    pid: int


@contextmanager
def served(models: Sequence[tuple[str, str]], *flags: str) -> Iterator[str]:
    """Run a server and yield its address once all models are ready. A model is a pair of its
    directory or id and its name."""
    with serving(models, *flags) as server:
        yield server.address


@contextmanager
def serving(models: Sequence[tuple[str, str]], *flags: str, root: Path = ROOT) -> Iterator[Served]:
    """Like `served`, but run the server of the checkout ``root`` while the block runs."""
    argv = [sys.executable, "-m", "grpc_service", "serve", "--port", "0", *flags]
    for model, name in models:
        argv += ["--model", model, "--served-model-name", name]
    process = subprocess.Popen(
        argv, cwd=root, stdout=subprocess.PIPE, text=True, env=os.environ | {"TRIOLET_LOG": "ERROR"}
    )
    killer = threading.Timer(START_LIMIT_S, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        address = next((m[1] for line in process.stdout if (m := READY.search(line))), None)
        if address is None:
            raise RuntimeError(f"the server ended with {process.wait()}")
        _wait_serving(address, [name for _, name in models])
        killer.cancel()
        yield Served(address, process.pid)
    finally:
        killer.cancel()
        process.terminate()
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_serving(address: str, names: Sequence[str]) -> None:
    """Wait until the health service says SERVING for each of these models."""
    with grpc.insecure_channel(address, options=NO_PROXY) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in names:
            request = health_pb2.HealthCheckRequest(service=f"model/{name}")
            for answer in stub.Watch(request, timeout=START_LIMIT_S):
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
