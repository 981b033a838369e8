"""The gateway smg before servers of ours, and the `openai` client before the gateway.

Both are installed into a virtual environment in the user's cache, so that the project's own needs
neither. A gateway that cannot be installed fails the test.
"""

import contextlib
import json
import re
import socket
import subprocess
import urllib.request
from pathlib import Path

from tests.support.environments import virtual_environment
from tests.support.server import real
from tests.support.wire import wait_until

PACKAGES = ("smg==1.13.0", "openai==3.54.0")
CLIENT = Path(__file__).resolve().parents[1] / "interop" / "clients" / "openai_calls.py"
INSTALL_TIMEOUT_S = 240
READY_LIMIT_S = 60
GATEWAY_PORT = re.compile(r"is served to gateways on grpc://127\.0\.0\.1:(\d+)")


def need_gateway():
    """Return the environment with the gateway and the client; make it unless it is there."""
    name = "-".join(package.replace("==", "-") for package in PACKAGES)
    return virtual_environment(name, PACKAGES, timeout_s=INSTALL_TIMEOUT_S)


def port_of(server):
    """Return the port on which a server with one model serves gateways."""
    return int(server.wait_for_output(lambda _: GATEWAY_PORT.search(server.log), 60)[1])


@contextlib.contextmanager
def worker(*args, model, port=0, name=None):
    """Yield a server of a real model, ready, with a port for gateways."""
    name = ["--served-model-name", name] if name else []
    with real("--vllm-engine-port", port, *name, *args, model=model) as server:
        server.gateway_port = port_of(server)
        yield server


class Gateway:
    """A running gateway at ``base_url``."""

    def __init__(self, venv, process, port, log):
        self.base_url = f"http://127.0.0.1:{port}"
        self._venv, self._process, self._log = venv, process, log

    @property
    def log(self):
        """Return what the gateway has logged."""
        return self._log.read_text(errors="replace")

    def get(self, path):
        """Return the JSON at a path, or None if there is no answer yet."""
        try:
            with urllib.request.urlopen(f"{self.base_url}{path}", timeout=5) as answer:
                return json.loads(answer.read() or "null") or {}
        except (OSError, ValueError):
            return None

    def send(self, method, path, body):
        """Send JSON, and return the status."""
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(
            f"{self.base_url}{path}", data=data, headers=headers, method=method
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status

    def wait_ready(self, num_workers):
        """Wait until so many workers are healthy."""

        def is_ready():
            assert self._process.poll() is None, self.log[-3000:]
            found = self.get("/workers") or {}
            healthy = [one for one in found.get("workers", ()) if one.get("is_healthy")]
            return len(healthy) >= num_workers and self.get("/readiness") is not None

        wait_until(is_ready, READY_LIMIT_S, "a gateway with its workers")

    def start(self, calls, threads=1):
        """Begin calls by the `openai` client; return its process."""
        asked = {"base_url": f"{self.base_url}/v1", "calls": calls, "threads": threads}
        client = subprocess.Popen(
            [self._venv / "bin" / "python", CLIENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        client.stdin.write(json.dumps(asked))
        client.stdin.close()
        client.stdin = None
        return client

    def call(self, calls, threads=1):
        """Make calls by the `openai` client, and return the answers."""
        out, _ = self.start(calls, threads).communicate(timeout=240)
        return json.loads(out)


def free_ports(count):
    """Return ports that no program uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def gateway(workers, *args, log):
    """Yield a gateway before these servers, once it is ready. Its log goes to the path ``log``."""
    venv, (port, metrics_port) = need_gateway(), free_ports(2)
    urls = [f"grpc://127.0.0.1:{one.gateway_port}" for one in workers]
    argv = [venv / "bin" / "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--worker-urls", *urls, "--worker-startup-check-interval", "1"]
    argv += ["--health-check-interval-secs", "1", "--worker-wedge-secs", "60"]
    argv += ["--disable-worker-overload-protection", "--prometheus-port", str(metrics_port), *args]
    with log.open("wb") as out:
        process = subprocess.Popen([str(one) for one in argv], stdout=out, stderr=out)
        try:
            one = Gateway(venv, process, port, log)
            one.wait_ready(len(workers))
            yield one
        finally:
            process.terminate()
            process.wait(20)
