"""Interpreters that have imported what a server imports, and fork a server at each request.

Most of a test server's start is Python importing its modules: about a second for a server of fake
models, several with torch. `start` has a prestarted interpreter fork one instead. Whatever a server
does from its command line on is the same: the forked process has its own arguments, environment and
standard streams, runs the module as ``python -m`` would, and ends like any interpreter.

``python -m tests.support.prestarted SOCKET MODULE…`` imports the modules and then serves requests
on the Unix socket until its standard input ends. A request is one message of JSON with three
descriptors for the standard streams. Its answers are the process id and, when the process has
ended, the exit code as `subprocess` counts it. One connection belongs to one process.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

ANSWER = struct.Struct("<q")
START_LIMIT_S = 120.0
REQUEST_BYTES_MAX = 1 << 20


class ForkedProcess:
    """A forked server, as much like a `subprocess.Popen` as the tests need."""

    def __init__(self, connection, stdin):
        self._connection = connection
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self.pid = self._answer()
        self.returncode = None

    def poll(self):
        """Return the exit code, or None while the process runs."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if selector.select(0):
                    self._take_end()
        return self.returncode

    def wait(self, timeout=None):
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs after ``timeout`` seconds.
        """
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self._take_end()
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
        return self.returncode

    def send_signal(self, number):
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def _take_end(self):
        self.returncode = self._answer()
        self._connection.close()

    def _answer(self):
        answer = self._connection.recv(ANSWER.size)
        if not answer:
            raise RuntimeError("the prestarted interpreter has ended")
        return ANSWER.unpack(answer)[0]


def start(module, args, stdout, stderr, *, imports, options=(), cwd=None, env=None):
    """Fork a process that runs ``module`` in ``cwd``, as ``python *options -m module *args`` would.

    An interpreter that has imported ``imports`` forks it; the first such call starts that
    interpreter. ``stdout`` and ``stderr`` are files that the process writes to. Without ``cwd`` it
    runs where the tests run, and without ``env`` in their environment.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(share().path_of(tuple(options), frozenset(imports))))
    cwd = str(cwd or os.getcwd())
    request = {"module": module, "args": args, "cwd": cwd, "env": env or dict(os.environ)}
    message = json.dumps(request).encode()
    assert len(message) < REQUEST_BYTES_MAX
    read_end, write_end = os.pipe()
    try:
        socket.send_fds(connection, [message], [read_end, stdout.fileno(), stderr.fileno()])
    finally:
        os.close(read_end)
    return ForkedProcess(connection, write_end)


class Shared:
    """The interpreters of this process and of those that it forks, until all of them have ended."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="triolet-prestarted-"))
        # The interpreters end when no process has the pipe's other end open any more.
        self._stdin, self._life = os.pipe()
        self._processes = []
        atexit.register(self._end)

    def path_of(self, options, imports):
        """Return the socket of an interpreter with these options and at least these imports. Start
        one if there is none."""
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for one in self.folder.glob("*.json"):
                others, imported = json.loads(one.read_text())
                if tuple(others) == options and imports <= set(imported):
                    return one.with_suffix("")
            path = self.folder / str(len(list(self.folder.iterdir())))
            self._start(path, options, imports)
            path.with_suffix(".json").write_text(json.dumps([options, sorted(imports)]))
            return path

    def _start(self, path, options, imports):
        argv = [sys.executable, *options, "-m", __name__, str(path), *sorted(imports)]
        # Numpy's OpenBLAS starts threads when it is imported, and threads do not survive a fork.
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(argv, stdin=self._stdin, env=env)
        self._processes.append(process)
        limit = time.monotonic() + START_LIMIT_S
        while not path.exists():
            assert process.poll() is None, "the prestarted interpreter has ended"
            assert time.monotonic() < limit
            time.sleep(0.01)

    def _end(self):
        os.close(self._life)
        for process in self._processes:
            process.wait()
        shutil.rmtree(self.folder)


@cache
def share():
    """Return the interpreters. A process that is forked after the first call uses the same ones."""
    return Shared()


# ---- the prestarted interpreter's side


def _serve(path):
    """Fork a process for each request; return its request in that process, and None at the end."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)  # so that the socket listens once a client sees its path
    owned = {}  # a process's pidfd: its id and connection
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    return None
                if key.fd in owned:
                    selector.unregister(key.fd)
                    pid, connection = owned.pop(key.fd)
                    os.close(key.fd)
                    _, status = os.waitpid(pid, 0)
                    with connection:
                        _send(connection, os.waitstatus_to_exitcode(status))
                    continue
                connection, _ = listener.accept()
                message, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, 3)
                pid = os.fork()
                if pid == 0:
                    for inherited in (selector, listener, connection):
                        inherited.close()
                    for pidfd, (_, other) in owned.items():
                        os.close(pidfd)
                        other.close()
                    _take_streams(descriptors)
                    return json.loads(message)
                for descriptor in descriptors:
                    os.close(descriptor)
                pidfd = os.pidfd_open(pid)
                owned[pidfd] = (pid, connection)
                selector.register(pidfd, selectors.EVENT_READ)
                _send(connection, pid)


def _send(connection, number):
    with contextlib.suppress(OSError):  # the test's process may no longer wait for it
        connection.send(ANSWER.pack(number))


def _take_streams(descriptors):
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.FileIO(number, "wb", closefd=False)
        stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))


def main():
    """Import the modules, serve, and be the server in each process that is forked."""
    path, *modules = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the tests
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each garbage collection of a server would walk, and so copy, all modules
    gc.enable()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"cannot fork beside {len(threads) - 1} other threads"
    request = _serve(path)
    if request is None:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    threading.current_thread()._set_native_id()  # Python 3.11 keeps the parent's id
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = [request["module"], *request["args"]]
    sys.modules.pop(request["module"], None)  # the module is loaded again, as ``__main__``
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
