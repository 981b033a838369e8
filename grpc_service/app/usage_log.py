"""The usage log: a file with one line of JSON for each request that has ended.

Rule 1: a record is in the file `FLUSH_S` after the request's end, and a little later if the disk is
slow; a killed process loses no older one. Rule 2: lines are whole. What a full disk cuts is cut off
at once, and what a kill leaves is cut off by the next who writes. Rule 3: the file is written in a
thread, and no request waits for it. If it cannot be written, records wait, at most `WAITING_MAX`;
the log says how many were lost. Rule 4: nothing is deleted. A full file is renamed (`FILE.1`,
`FILE.2`, …), and one that somebody else has renamed is made anew. Rule 5: several servers may share
a file. Who writes, cuts or renames it holds its lock for that long, so that nobody cuts another's
line. On a file system without locks a file is for one server.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING

import trio

from engine.errors import ConfigError
from engine.replica.threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from engine.requests.usage import UsageRecord
    from grpc_service.app.server_config import ServerConfig

log = logging.getLogger(__name__)

FLUSH_S = 0.5
WAITING_MAX = 100_000  # records, of some hundred bytes each, that wait for a disk. Guess.
LOOK_BYTES = 2**16  # of the file's end, among which its last whole line ends
LOCK_S = 1.0  # the longest wait for the lock, which others hold for milliseconds. Guess.
BEGIN = b'{"ended_at":'  # every line begins so

_limiter = trio.CapacityLimiter(1)


class UsageLog:
    """Appends records to the file ``path``, which is renamed when it has ``max_bytes`` or more.

    Raises:
        ConfigError: the file cannot be opened for writing.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._waiting: list[UsageRecord] = []
        self._news = trio.Event()
        self._num_lost = 0
        self._is_failing = False
        try:
            self._file = self._open()
            with self._locked():
                self._cut_torn_line()
        except OSError as error:
            raise ConfigError(f"--usage-log {path} cannot be written: {error.strerror}") from None

    def add(self, record: UsageRecord) -> None:
        """Have a record written. Never waits. Belongs to the Trio thread, as does `run`."""
        if len(self._waiting) >= WAITING_MAX:
            self._num_lost += 1
            return
        self._waiting.append(record)
        self._news.set()

    async def run(self) -> None:
        """Write records as they come. Cancellation: safe; `finish` writes the rest."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            await trio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what waits. A failure is logged, and what was not written waits on.

        Cancellation: the thread's call ends first.
        """
        if not self._waiting:
            return
        records = list(self._waiting)
        num_written, error = await WorkerThreads().run(lambda: self._append(records), _limiter)
        del self._waiting[:num_written]  # only now, as the call may be cancelled before it begins
        if error is not None:
            self._news.set()
            if not self._is_failing:
                log.error("--usage-log %s cannot be written: %s", self._path, error.strerror)
            self._is_failing = True
        else:
            if self._is_failing:
                told = "--usage-log %s is written again; %d records were lost"
                log.warning(told, self._path, self._num_lost)
            self._is_failing, self._num_lost = False, 0

    async def finish(self) -> None:
        """Write what waits, and close the file."""
        with trio.CancelScope(shield=True):
            await self.flush()
        if self._waiting or self._num_lost:
            num_lost = len(self._waiting) + self._num_lost
            log.error("%d records of --usage-log %s are lost", num_lost, self._path)
        os.close(self._file)

    # ---- in the thread

    def _append(self, records: Sequence[UsageRecord]) -> tuple[int, OSError | None]:
        """Append a line for each record. Return how many are there, and why the others are not."""
        lines = "".join([f"{line_of(record)}\n" for record in records]).encode()
        try:
            while True:
                with self._locked():
                    size = self._cut_torn_line()
                    if not size or size + len(lines) <= self._max_bytes:
                        return self._write(lines, size)
                    self._rename()
        except OSError as error:
            return 0, error

    def _write(self, lines: bytes, size: int) -> tuple[int, OSError | None]:
        num_bytes = os.write(self._file, lines)
        if num_bytes == len(lines):
            return lines.count(b"\n"), None
        with suppress(OSError):  # else the next who writes does it
            os.ftruncate(self._file, size + lines.rfind(b"\n", 0, num_bytes) + 1)
        return lines.count(b"\n", 0, num_bytes), OSError(errno.ENOSPC, "no space is left")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the file while the block runs. A file that somebody has renamed is
        opened anew before. Raises OSError, also if others hold the lock for `LOCK_S`."""
        until = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise OSError(errno.EAGAIN, "another process holds its lock") from None
                time.sleep(LOCK_S / 100)
                continue
            except OSError:  # a file system without locks
                pass
            if not self._is_renamed():
                break
            former, self._file = self._file, self._open()
            os.close(former)  # and lets go of its lock
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _is_renamed(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return True

    def _rename(self) -> None:
        names = (f"{self._path}.{number}" for number in count(1))
        os.rename(self._path, next(name for name in names if not os.path.lexists(name)))

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._path, flags, 0o640)

    def _cut_torn_line(self) -> int:
        """Cut off a last line that is torn, and return the file's size. Raises OSError."""
        size = os.fstat(self._file).st_size
        at = max(0, size - LOOK_BYTES)
        end = os.pread(self._file, LOOK_BYTES, at)
        whole = end.rfind(b"\n") + 1
        if whole == len(end):
            return size
        torn = end[whole:].rstrip(b"\0")[: len(BEGIN)]
        if not BEGIN.startswith(torn):
            raise OSError(errno.EINVAL, "it is no usage log: its last line is not a record")
        os.ftruncate(self._file, at + whole)
        log.warning("--usage-log %s ended in a torn line, which was cut off", self._path)
        return at + whole


def line_of(record: UsageRecord) -> str:
    """Return a record's line: the fields of `UsageRecord`, with the time in UTC first."""
    fields = asdict(record)
    at = datetime.fromtimestamp(fields.pop("ended_at"), UTC)
    fields = {"ended_at": at.isoformat(timespec="milliseconds"), **fields}
    for name in ("queue_s", "step_s"):
        fields[name] = round(fields[name], 9)
    return json.dumps(fields, separators=(",", ":"))


@asynccontextmanager
async def keeping_usage_log(config: ServerConfig) -> AsyncIterator[UsageLog | None]:
    """Keep the configured log while the block runs; None without one.

    Raises:
        ConfigError: as `UsageLog`.
    """
    if not config.usage_log:
        yield None
        return
    usage_log = UsageLog(config.usage_log, config.usage_log_bytes)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(usage_log.run)
            yield usage_log
            nursery.cancel_scope.cancel(reason="the server has ended")
    finally:
        await usage_log.finish()
