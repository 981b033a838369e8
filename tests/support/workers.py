"""Runs the tests in forked processes: ``pytest --workers N``.

The tests are imported and collected once; then N workers are forked. A worker takes one file after
another, one of three workers from the front of the list and two from its end: in front are tests
that compute, at the end tests that wait for servers, and the shortest files of both lie where the
two ends meet, so that all workers end at about the same time. `SECONDS` has how long the files
took; ``--write-seconds S`` writes it anew, with those that took S seconds or more. All workers fork
their servers from the same interpreters (`tests.support.prestarted`).
"""

import atexit
import os
import signal
import time
import traceback
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait

import pytest

from tests.support import prestarted

WAITING = ("service", "interop")  # the folders of tests that wait for servers
# A line has how many seconds a file took, how many tests it had, and its path.
SECONDS = "tests/file_seconds.txt"
INTERRUPTED_S = 5.0  # guess: longer than a test's servers take to end


class Files:
    """The numbers of the files that no worker has taken yet."""

    def __init__(self, count):
        context = get_context("fork")
        self._lock = context.Lock()
        self._front, self._end = context.RawValue("i", 0), context.RawValue("i", count)

    def take(self, at_front):
        """Return the number of the first or the last untaken file; None if there is none."""
        with self._lock:
            if self._front.value == self._end.value:
                return None
            if not at_front:
                self._end.value -= 1
                return self._end.value
            self._front.value += 1
            return self._front.value - 1


def in_order(files, seconds):
    """Return the lists of tests in the order in which workers take them, of which ``seconds`` has
    the mean seconds of a test by the file's path."""

    def place(items):
        length = len(items) * seconds.get(items[0].path, 0.0)
        waits = items[0].path.parent.name in WAITING
        return waits, length if waits else -length

    return sorted(files, key=place)


def read_seconds(root):
    """Return the mean seconds of a test in each file of `SECONDS`, by its path."""
    path = root / SECONDS
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {root / name: float(whole) / int(count) for whole, count, name in lines}


@dataclass(eq=False)
class Worker:
    """A worker as its parent sees it."""

    pid: int
    pipe: Connection
    file: int | None = None  # the number of the file that it runs
    reports: list = field(default_factory=list)  # reports of the tests of that file


class Workers:
    """Forks the workers, and reports what they send, a file at a time."""

    def __init__(self, config):
        self._config = config
        self._files = []  # the tests of each file
        self._seconds = {}  # seconds of reported files, by their numbers
        self._shown = set()  # numbers of the files that are reported

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if session.testsfailed:
            return None  # pytest's own loop reports the failed collection
        files = [list(items) for _, items in groupby(session.items, lambda one: one.path)]
        self._files = in_order(files, read_seconds(self._config.rootpath))
        self._config._tmp_path_factory.getbasetemp()  # makes the directory that all workers use
        prestarted.share()
        left = Files(len(self._files))
        workers = {}  # workers that have not ended, by their pipes
        try:
            while len(workers) < self._config.option.workers:
                worker = self._fork(left, at_front=len(workers) % 3 == 0)
                workers[worker.pipe] = worker
            while workers:
                for pipe in wait(workers):
                    if not self._receive(workers[pipe]):
                        del workers[pipe]
                if session.shouldfail:  # -x ends the run
                    raise session.Failed(session.shouldfail)
        except BaseException:
            self._end(workers)
            raise
        for number in set(range(len(self._files))) - self._shown:
            self._show(number, [], "the worker that had taken the file died before it")
        if self._config.option.write_seconds is not None:
            self._write_seconds(self._config.option.write_seconds)
        return True

    def _write_seconds(self, least):
        lines = [
            f"{seconds:.0f} {len(self._files[number])} "
            f"{self._files[number][0].path.relative_to(self._config.rootpath)}\n"
            for number, seconds in sorted(self._seconds.items(), key=lambda one: -one[1])
            if seconds >= least
        ]
        (self._config.rootpath / SECONDS).write_text("".join(lines))

    def _fork(self, left, at_front):
        receiver, sender = Pipe(duplex=False)
        capture = self._config.pluginmanager.getplugin("capturemanager")
        capture.suspend_global_capture()
        pid = os.fork()
        if pid == 0:
            capture.stop_global_capturing()
            capture.start_global_capturing()
            receiver.close()
            self._be_worker(left, at_front, sender)
        capture.resume_global_capture()
        sender.close()
        return Worker(pid, receiver)

    def _be_worker(self, left, at_front, sender):
        """Run files until none is left, and exit."""
        atexit._clear()  # the registered functions are the parent's
        code = 1
        try:
            plugins = self._config.pluginmanager
            plugins.unregister(plugins.getplugin("terminalreporter"))
            plugins.register(Sender(self._config, sender))
            number = left.take(at_front)
            while number is not None:
                sender.send(number)
                items = self._files[number]
                for item, following in pairwise(items):
                    self._run(item, following)
                # The next file decides which fixtures stay after the last test.
                number = left.take(at_front)
                self._run(items[-1], None if number is None else self._files[number][0])
            sender.send(None)
            code = 0
        except BaseException:  # the parent reports that the worker died
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            os._exit(code)

    def _run(self, item, following):
        self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _end(self, workers):
        """End the workers. A terminal's Ctrl-C has reached them, too, and they have `INTERRUPTED_S`
        to take down their fixtures."""
        limit = time.monotonic() + INTERRUPTED_S
        while workers and (left_s := limit - time.monotonic()) > 0:
            for pipe in wait(workers, left_s):
                if not os.read(pipe.fileno(), 1 << 16):
                    os.waitpid(workers.pop(pipe).pid, 0)
        for worker in workers.values():
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)

    def _receive(self, worker):
        """Act on a worker's message: the number of its next file, a report, or None at its end.
        Return whether more messages follow."""
        try:
            message = worker.pipe.recv()
        except EOFError:
            _, status = os.waitpid(worker.pid, 0)
            code = os.waitstatus_to_exitcode(status)
            if worker.file is not None:
                self._show(worker.file, worker.reports, f"its worker died with {code}")
            return False
        if isinstance(message, dict):
            report = self._config.hook.pytest_report_from_serializable(
                config=self._config, data=message
            )
            worker.reports.append(report)
            return True
        if worker.file is not None:
            self._show(worker.file, worker.reports)
        worker.file, worker.reports = message, []
        return True

    def _show(self, number, reports, error=""):
        """Report a file's tests. Tests without a report fail with ``error``."""
        hook = self._config.hook
        self._shown.add(number)
        self._seconds[number] = sum(report.duration for report in reports)
        of_item = {item.nodeid: [] for item in self._files[number]}
        for report in reports:
            of_item[report.nodeid].append(report)
        for item in self._files[number]:
            found = of_item[item.nodeid]
            if not found or found[-1].when != "teardown":
                found.append(
                    pytest.TestReport(item.nodeid, item.location, {}, "failed", error, "teardown")
                )
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            for report in found:
                hook.pytest_runtest_logreport(report=report)
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        self._config.get_terminal_writer().flush()  # the terminal's file may be a pipe


class Sender:
    """Sends a worker's reports to its parent."""

    def __init__(self, config, pipe):
        self._config, self._pipe = config, pipe

    def pytest_runtest_logreport(self, report):
        self._pipe.send(
            self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        )
