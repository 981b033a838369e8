"""Servers as processes: what the service tests talk to.

Rule 1: every wait is bounded; what does not end in time is killed, and its test fails. Rule 2: a
server left running at the end of its block is told to end by SIGTERM and must do so with exit
code 0. Rule 3: a server that logs an error or a traceback fails its test, unless the test said so
by ``may_log``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc

from tests.support.wire import SERVING, connect, health, wait_until

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "engine" / "demo" / "stories"
START_LIMIT_S = 30.0
MODEL_START_LIMIT_S = 120.0  # torch and transformers are imported, from a cold disk perhaps
END_LIMIT_S = 20.0
READY = re.compile(r"Triolet is ready on (\S+) after")
TROUBLE = re.compile(
    r"^(?=.*(Traceback|\b(ERROR|CRITICAL)\b|Exception ignored|never awaited|Warning:)).*$",
    re.MULTILINE,
)

shown_if_failed = []  # servers of the running test and of its fixtures (tests/service/conftest.py)


class Server:
    """A process that serves; ``address`` is where. ``channel`` is one connection to it."""

    def __init__(self, argv, *, env=None, cwd=ROOT, may_log=None):
        self.may_log = may_log
        self.is_over = False
        self._files = tempfile.TemporaryDirectory(prefix="triolet-test-")
        self._out, self._err = (Path(self._files.name, name) for name in ("out", "err"))
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd=cwd,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {}),
            )
        shown_if_failed.append(self)

    # ---- what it says

    @property
    def out(self):
        return self._out.read_text(errors="replace")

    @property
    def log(self):
        return self._err.read_text(errors="replace")

    def wait_for_output(self, look, limit_s):
        """Poll until ``look`` finds something in the standard output, and return it."""

        def found():
            assert self.is_running or look(self.out), f"ended with {self.process.returncode}"
            return look(self.out)

        return wait_until(found, limit_s, "the server's word")

    def tell(self, command):
        """Have the fake server do what `fake_server.Faults` can; it may not live to answer."""
        self.process.stdin.write(f"{command}\n".encode())
        self.process.stdin.flush()

    def ask(self, question=""):
        """The fake server's account of itself (`fake_server.Counter`)."""
        before = self.out.count("\n")
        self.tell(question)
        self.wait_for_output(lambda out: out.count("\n") > before, 10)
        return json.loads(self.out.splitlines()[-1])

    # ---- how it ends

    @property
    def is_running(self):
        return self.process.poll() is None

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self, limit_s=END_LIMIT_S):
        """The exit code of a server that ends by itself."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not end within {limit_s} s") from None

    def stop(self, limit_s=END_LIMIT_S):
        """SIGTERM; the exit code."""
        self.signal()
        return self.wait(limit_s)

    def memory_bytes(self):
        """Resident memory now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024

    def num_files(self):
        """Open files and sockets."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def sentences(self):
        """What it told a person on standard error: neither log nor progress."""
        stamp = re.compile(r"\d{4}-\d\d-\d\d |\{")  # for a person, or for a machine
        lines = self.log.splitlines()
        return [one for one in lines if not (stamp.match(one) or one.startswith("loading "))]

    def check_log(self):
        """Nothing in the log but what the test expects."""
        lines = [match[0] for match in TROUBLE.finditer(self.log)]
        if self.may_log is not None:
            lines = [line for line in lines if not re.search(self.may_log, line)]
        assert not lines, f"the server logged: {lines}"

    def remove(self):
        """Kill what still runs."""
        if self.is_running:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.is_over = True

    def forget(self):
        shown_if_failed.remove(self)
        self._files.cleanup()


@contextlib.contextmanager
def process(argv, **options):
    """A server process from its start to its end; no waiting for it to be bound."""
    server = Server([str(arg) for arg in argv], **options)
    try:
        yield server
        if server.is_running:
            code = server.stop()
            assert code == 0, f"SIGTERM made exit code {code}"
        server.check_log()
    finally:
        server.remove()


def fake_argv(**settings):
    """The command line of a server of fake models (`fake_server.start`)."""
    return [sys.executable, "-W", "error", "-m", "tests.support.fake_server", json.dumps(settings)]


@contextlib.contextmanager
def fake(*, may_log=None, **settings):
    """A server of fake models, bound, with an open channel."""
    with process(fake_argv(**settings), may_log=may_log) as server:
        if settings.get("is_command"):
            server.address = server.wait_for_output(READY.search, START_LIMIT_S)[1]
        else:
            line = server.wait_for_output(lambda out: "\n" in out and out, START_LIMIT_S)
            server.address = f"127.0.0.1:{json.loads(line)['port']}"
        with connect(server.address) as server.channel:
            yield server


def serve_argv(*args):
    """The command line of `triolet serve`."""
    return [sys.executable, "-m", "grpc_service", "serve", *args]


@contextlib.contextmanager
def real(*args, model=DEMO, uds=None, **options):
    """`triolet serve` with a real model (None: those it serves by itself), ready, with an open
    channel: on any free port, or on a Unix socket. Of the latter `heard` is what health said from
    the bind until it was ready."""
    where = ["--port", "0"] if uds is None else ["--uds", uds]
    models = [] if model is None else ["--model", model]
    with process(serve_argv(*models, *where, *args), **options) as server:
        if uds is not None:
            server.address = f"unix:{uds}"
            server.heard = listen_until_ready(server)
        found = server.wait_for_output(READY.search, MODEL_START_LIMIT_S)
        server.address = found[1]
        with connect(server.address) as server.channel:
            yield server


def listen_until_ready(server):
    """What health says, every few milliseconds, from the first answer to SERVING; None while
    nobody answers."""
    heard = []

    def ask():
        with contextlib.suppress(grpc.RpcError):
            heard.append(health(channel, timeout=2))
        assert server.is_running, f"ended with {server.process.returncode}"
        return heard and heard[-1] == SERVING

    with connect(server.address, ("grpc.initial_reconnect_backoff_ms", 100)) as channel:
        wait_until(ask, MODEL_START_LIMIT_S, "SERVING")
    return heard
