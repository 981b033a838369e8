"""Servers as processes, for the service tests.

Rule 1: every wait is bounded; a process that does not end in time is killed, and its test fails.
Rule 2: a server that still runs at the end of its block gets SIGTERM, and must end with exit code
0. Rule 3: a server that logs an error or a traceback fails its test, unless ``may_log`` allows it.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import grpc

from tests.support import prestarted
from tests.support.programs import ROOT
from tests.support.wire import SERVING, connect, health, wait_until

# What `triolet serve` imports for text models, and for models of every kind.
TEXT_IMPORTS = (
    *("engine.public", "engine.worker.text.runner"),
    *("grpc_service.app.application", "grpc_service.cli.main"),
)
SERVING_IMPORTS = (
    *TEXT_IMPORTS,
    *("engine.worker.encode.runner", "transformers.modeling_utils"),
    "engine.worker.image_generation.loading",
)
DEMO = ROOT / "engine" / "demo" / "stories"
START_LIMIT_S = 30.0
MODEL_START_LIMIT_S = 120.0  # the server imports torch and transformers, perhaps from a cold disk
END_LIMIT_S = 20.0
OPENAI_PORT = re.compile(r"OpenAI's API is served on https?://\S+:(\d+)/v1")
READY = re.compile(r"Triolet is ready on (\S+) after")
TROUBLE = re.compile(
    r"^(?=.*(Traceback|\b(ERROR|CRITICAL)\b|Exception ignored|never awaited|Warning:)).*$",
    re.MULTILINE,
)

shown_if_failed = []  # servers of the running test and of its fixtures (tests/service/conftest.py)


class Server:
    """A process that serves at ``address``; ``channel`` is one connection to it."""

    def __init__(self, start, *, may_log=None):
        """Start the process by ``start(stdout, stderr)``, with the files that it writes to."""
        self.may_log = may_log
        self.is_over = False
        self._files = tempfile.TemporaryDirectory(prefix="triolet-test-")
        self._out, self._err = (Path(self._files.name, name) for name in ("out", "err"))
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = start(out, err)
        shown_if_failed.append(self)

    # ---- the server's output

    @property
    def out(self):
        """Return the standard output so far."""
        return self._out.read_text(errors="replace")

    @property
    def log(self):
        """Return the standard error so far."""
        return self._err.read_text(errors="replace")

    def wait_for_output(self, look, limit_s):
        """Poll until ``look`` finds something in the standard output, and return it."""

        def found():
            assert self.is_running or look(self.out), f"ended with {self.process.returncode}"
            return look(self.out)

        return wait_until(found, limit_s, "the server's word")

    def tell(self, command=""):
        """Send the fake server a command (`fake_server.Faults`), and wait until it has carried the
        command out or has ended."""
        before = self.out.count("\n")
        self.process.stdin.write(f"{command}\n".encode())
        self.process.stdin.flush()
        wait_until(lambda: self.out.count("\n") > before or not self.is_running, 10, "its answer")

    def ask(self, question=""):
        """Return the fake server's answer to ``question`` (`fake_server.Counter`)."""
        self.tell(question)
        return json.loads(self.out.splitlines()[-1])

    # ---- the server's end

    @property
    def is_running(self):
        """Return whether the process runs."""
        return self.process.poll() is None

    def signal(self, number=signal.SIGTERM):
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self, limit_s=END_LIMIT_S):
        """Return the exit code of a server that ends by itself."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not end within {limit_s} s") from None

    def stop(self, limit_s=END_LIMIT_S):
        """Send SIGTERM, and return the exit code."""
        self.signal()
        return self.wait(limit_s)

    def memory_bytes(self):
        """Return the resident memory, with that of the process that decodes images."""
        return sum(_memory_bytes(pid) for pid in [self.process.pid, *children_of(self.process.pid)])

    def num_files(self):
        """Return the number of open files and sockets."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def sentences(self):
        """Return the sentences on standard error that belong to neither log nor progress."""
        stamp = re.compile(r"\d{4}-\d\d-\d\d |\{")  # how a log line begins, as text or as JSON
        lines = self.log.splitlines()
        return [one for one in lines if not (stamp.match(one) or one.startswith("loading "))]

    def check_log(self):
        """Check that the log has only what the test expects."""
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
        """Remove the server from the servers whose output a failed test shows."""
        shown_if_failed.remove(self)
        self._files.cleanup()


def children_of(pid):
    """Return the numbers of a process's children."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, task.read_text().split())
    return found


def _memory_bytes(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


def process(argv, *, env=None, cwd=ROOT, **options):
    """Yield a server process from its start to its end, without waiting for its port."""

    def start(out, err):
        return subprocess.Popen(
            [str(arg) for arg in argv],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            cwd=cwd,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {}),
        )

    return _running(start, **options)


def fake_process(*, may_log=None, **settings):
    """Yield a server of fake models, as `process` does. ``settings`` are `fake_server.start`'s.

    The server is forked from an interpreter that has imported all that it needs.
    """
    module, args = "tests.support.fake_server", [json.dumps(settings)]
    start = partial(prestarted.start, module, args, imports=(module,), options=("-W", "error"))
    return _running(start, may_log=may_log)


@contextlib.contextmanager
def _running(start, **options):
    server = Server(start, **options)
    try:
        yield server
        if server.is_running:
            code = server.stop()
            assert code == 0, f"SIGTERM made exit code {code}"
        server.check_log()
    finally:
        server.remove()


@contextlib.contextmanager
def fake(*, may_log=None, **settings):
    """Yield a server of fake models, once it is bound, with an open channel."""
    with fake_process(**settings, may_log=may_log) as server:
        if settings.get("is_command"):
            server.address = server.wait_for_output(READY.search, START_LIMIT_S)[1]
        else:
            line = server.wait_for_output(lambda out: "\n" in out and out, START_LIMIT_S)
            bound = json.loads(line)
            server.address = f"127.0.0.1:{bound['port']}"
            server.openai_port = bound["openai_port"]
            server.vllm_engine_ports = bound["vllm_engine_ports"]
        with connect(server.address) as server.channel:
            yield server


@contextlib.contextmanager
def counted(directory, **settings):
    """Yield a server of one real model, "llama", once it is ready, with an open channel. It answers
    "computed" (`fake_server.Counter`)."""
    module, model = "tests.support.fake_server", {"name": "llama", "model": str(directory)}
    args = [json.dumps({"models": [model], "is_command": True, **settings})]
    imports = (module, *TEXT_IMPORTS)
    with _running(partial(prestarted.start, module, args, imports=imports)) as server:
        server.address = server.wait_for_output(READY.search, MODEL_START_LIMIT_S)[1]
        with connect(server.address) as server.channel:
            yield server


def serve_argv(*args):
    """Return the command line of `triolet serve`."""
    return [sys.executable, "-m", "grpc_service", "serve", *args]


def real_process(*args, imports=SERVING_IMPORTS):
    """Yield `triolet serve` with these arguments, as `process` does.

    It is forked from an interpreter that has imported ``imports``.
    """
    command = ["serve", *(str(arg) for arg in args)]
    return _running(partial(prestarted.start, "grpc_service", command, imports=imports))


def gated_packing(gate, *args):
    """Yield ``triolet`` with these arguments, in which packing waits for a file, as
    `tests.support.gated_packing` says."""
    module = "tests.support.gated_packing"
    command = [str(arg) for arg in (gate, *args)]
    return _running(partial(prestarted.start, module, command, imports=(module, *TEXT_IMPORTS)))


@contextlib.contextmanager
def real(*args, model=DEMO, uds=None):
    """Yield `triolet serve` with a real model, once it is ready, with an open channel.

    ``model`` None serves the shipped models. It listens on any free port, or on a Unix socket
    ``uds``. It is started by `real_process`.
    """
    where = ["--port", "0"] if uds is None else ["--uds", uds]
    models = [] if model is None else ["--model", model]
    imports = SERVING_IMPORTS if model is None or "--model" in args else TEXT_IMPORTS
    with real_process(*models, *where, *args, imports=imports) as server:
        if uds is not None:
            server.address = f"unix:{uds}"
            listen_until_ready(server)
        found = server.wait_for_output(READY.search, MODEL_START_LIMIT_S)
        server.address = found[1]
        with connect(server.address) as server.channel:
            yield server


def openai_port_of(server):
    """Return the port on which `triolet serve` answers OpenAI's API."""
    return int(server.wait_for_output(lambda _: OPENAI_PORT.search(server.log), 20)[1])


def listen_until_ready(server):
    """Return what health answers every few milliseconds, until it is SERVING.

    None stands for no answer at all.
    """
    heard = []

    def ask():
        with contextlib.suppress(grpc.RpcError):
            heard.append(health(channel, timeout=2))
        assert server.is_running, f"ended with {server.process.returncode}"
        return heard and heard[-1] == SERVING

    with connect(server.address, ("grpc.initial_reconnect_backoff_ms", 100)) as channel:
        wait_until(ask, MODEL_START_LIMIT_S, "SERVING")
    return heard
