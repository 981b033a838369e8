"""Runs whole servers with their clients, for the benches that compare them.

Rule: servers are measured in turn, and all processes of a server that is not measured are suspended
(SIGSTOP), as engines are (`tools.lab.peers.process`).
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tools.lab.peers.environments import PEERS, Peer, PeerError
from tools.lab.peers.process import OURS, ROOT, memory_mb

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

START_LIMIT_S = 600.0  # guess: vLLM compiles at its first start
END_LIMIT_S = 15.0
POLL_S = 0.25
HTTP_CLIENTS = "tools.lab.peers.http_clients"
MAX_LEN = 8192
KV_GIB = 2  # of each server
LLAMA_SLOTS, LLAMA_SLOT_TOKENS = 32, 512
DTYPE = os.environ.get("BENCH_DTYPE", "bfloat16")
NO_PROXY = [("grpc.enable_http_proxy", 0)]


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def triolet_server(model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Return our server's command and environment. Its KV pool has the size of vLLM's and, like
    vLLM's, gets its memory before the server is ready; otherwise our server would wait for new
    memory while it is measured."""
    command = [
        *(sys.executable, "-m", "grpc_service", "serve", "--port", str(port)),
        *("--model", str(model), "--dtype", DTYPE),
        *("--kv-cache-memory", f"{KV_GIB}GiB", "--prefault-kv-cache"),
        *shlex.split(os.environ.get("BENCH_FLAGS", "")),
    ]
    return command, os.environ | {"TRIOLET_LOG": "ERROR"}


def vllm_server(model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment of vLLM's own gRPC server, on all cores."""
    peer = PEERS["vllm"]
    command = [
        *(str(peer.python), "-m", "vllm.entrypoints.launchers.grpc_server"),
        *("--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", DTYPE, "--max-model-len", str(MAX_LEN)),
    ]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return command, peer.environment() | settings


def triolet_http_server(model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Return our server's command and environment, with OpenAI's API on ``port``. ``model`` is a
    GGUF file. Its KV pool has about as many tokens of s135 as llama-server's slots."""
    command = [
        *(sys.executable, "-m", "grpc_service", "serve", "--port", str(free_port())),
        *("--model", str(model), "--openai-port", str(port)),
        *("--kv-cache-memory", "384MiB", "--prefault-kv-cache"),
        *shlex.split(os.environ.get("BENCH_FLAGS", "")),
    ]
    return command, os.environ | {"TRIOLET_LOG": "ERROR"}


def llama_server(model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment of llama.cpp's server, on all cores, with as many slots
    as there are clients at most. It keeps no prompts of earlier requests, which would cost it time
    and gain nothing here."""
    peer, cores = PEERS["llama-server"], str(len(os.sched_getaffinity(0)))
    command = [
        *(str(peer.program), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", cores, "--threads-batch", cores),
        *("--parallel", str(LLAMA_SLOTS), "--ctx-size", str(LLAMA_SLOTS * LLAMA_SLOT_TOKENS)),
        *("--cache-ram", "0", "--log-disable"),
    ]
    return command, peer.environment()


@dataclass(frozen=True)
class Kind:
    """A server to compare: its peer, how it is started, and the module of its clients."""

    peer: Peer
    command_of: Callable[[Path, int], tuple[list[str], dict[str, str]]]
    clients: str = "tools.lab.peers.clients"

    @property
    def is_http(self) -> bool:
        """Whether it is asked over HTTP, by clients in our environment."""
        return self.clients == HTTP_CLIENTS


SERVERS = {
    "triolet": Kind(OURS, triolet_server),
    "vllm": Kind(PEERS["vllm"], vllm_server),
    "triolet, HTTP": Kind(OURS, triolet_http_server, HTTP_CLIENTS),
    "llama-server": Kind(PEERS["llama-server"], llama_server, HTTP_CLIENTS),
}


def grpc_health(port: int) -> Callable[[], bool]:
    """Return what asks a server's gRPC port whether it serves."""
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=NO_PROXY)
    stub = health_pb2_grpc.HealthStub(channel)

    def is_serving() -> bool:
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=POLL_S)
        except grpc.RpcError:
            return False
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            return False
        channel.close()
        return True

    return is_serving


def http_health(port: int) -> Callable[[], bool]:
    """Return what asks a server's port for HTTP whether it serves."""

    def is_serving() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=POLL_S)
        with suppress(OSError, http.client.HTTPException), closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    return is_serving


class ServerWithClients:
    """A server that is ready, and the process of its clients. ``flags`` are more flags of the
    server.

    Raises:
        PeerError: The server or its clients ended. Their messages are on standard error.
    """

    def __init__(self, name: str, model: Path, vocab: int, flags: Sequence[str] = ()) -> None:
        kind = SERVERS[name]
        python = (OURS if kind.is_http else kind.peer).python
        self.name = " ".join((name, *flags))
        port = free_port()
        command, environment = kind.command_of(model, port)
        command += flags
        started = time.perf_counter()
        self._server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=sys.stderr, start_new_session=True
        )
        self._clients: subprocess.Popen[str] | None = None
        try:
            self._wait_ready(http_health(port) if kind.is_http else grpc_health(port))
            self.start_s = time.perf_counter() - started
            self._clients = subprocess.Popen(
                [str(python), "-m", kind.clients, name, f"127.0.0.1:{port}", str(vocab)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._read()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def memory_mb(self) -> float:
        """The memory of the server with all its processes, in MB."""
        return memory_mb(self._server.pid)

    def ask(self, **load: Any) -> dict[str, Any]:
        """Run a load and return the clients' measurements (`tools.lab.peers.clients`)."""
        assert self._clients is not None
        assert self._clients.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._clients.stdin.write(json.dumps(load) + "\n")
            self._clients.stdin.flush()
            return self._read()
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the clients and the server with all its processes."""
        self._signal(signal.SIGCONT)
        if self._clients is not None:
            self._clients.communicate()  # they end with their input
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._server.wait(END_LIMIT_S)
        self._signal(signal.SIGKILL)  # the server's child processes, too
        self._server.wait()

    def _wait_ready(self, is_serving: Callable[[], bool]) -> None:
        limit = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit:
            if self._server.poll() is not None:
                raise PeerError(f"{self.name}'s server ended with {self._server.returncode}")
            if is_serving():
                return
            time.sleep(POLL_S)
        raise PeerError(f"{self.name}'s server is not ready after {START_LIMIT_S:g} s")

    def _read(self) -> dict[str, Any]:
        assert self._clients is not None
        assert self._clients.stdout is not None
        line = self._clients.stdout.readline()
        if not line:
            raise PeerError(f"the clients of {self.name} ended with {self._clients.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._server.pid, number)


def start_server(
    name: str, model: Path, vocab: int, flags: Sequence[str] = ()
) -> ServerWithClients | None:
    """Start a server. If it is not installed or does not start, print why and return None."""
    if not SERVERS[name].peer.is_installed:
        print(f"{name} is not installed: python -m tools.lab.peers install {name}", file=sys.stderr)
        return None
    try:
        return ServerWithClients(name, model, vocab, flags)
    except PeerError as error:
        print(f"{error}; its messages are above", file=sys.stderr)
        return None
