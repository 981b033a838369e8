"""The usage log: a file with one line of JSON for each request that has ended.

Rule 1: a record is in the file `FLUSH_S` after the request's end, and a little later if the disk is
slow; a killed process loses no older one. Rule 2: lines are whole. They are appended by one call
each time, what a failed call has written is cut off again, and a last line that was left torn is
dropped at the start. Rule 3: the file is written in a thread, and no request waits for it. If it
cannot be written, records wait, at most `WAITING_MAX`; the log says how many were lost. Rule 4:
nothing is deleted. A full file is renamed (`FILE.1`, `FILE.2`, …), and one that somebody else has
renamed is made anew. Several servers may share a file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING

import trio

from engine.errors import ConfigError
from engine.replica.threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from engine.requests.usage import UsageRecord
    from grpc_service.app.server_config import ServerConfig

log = logging.getLogger(__name__)

FLUSH_S = 0.5
WAITING_MAX = 100_000  # records, of some hundred bytes each, that wait for a disk. Guess.
LOOK_BYTES = 2**16  # of the file's end, among which its last whole line ends

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
        records, self._waiting = self._waiting, []
        if not records:
            return
        try:
            await WorkerThreads().run(lambda: self._append(records), _limiter)
        except OSError as error:
            self._waiting = records + self._waiting
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

    def _append(self, records: Sequence[UsageRecord]) -> None:
        """Append a line for each record, or none. Raises OSError."""
        lines = "".join([f"{line_of(record)}\n" for record in records]).encode()
        if self._is_renamed():
            self._reopen()
        before = os.fstat(self._file).st_size
        if before and before + len(lines) > self._max_bytes:
            self._rename()
            self._reopen()
            before = 0
        try:
            written = os.write(self._file, lines)
            if written < len(lines):
                raise OSError(28, "no space is left")
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, before)
            raise

    def _is_renamed(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return True

    def _rename(self) -> None:
        for number in count(1):
            try:
                os.link(self._path, f"{self._path}.{number}")  # overwrites nothing
            except FileExistsError:
                continue
            os.unlink(self._path)
            return

    def _reopen(self) -> None:
        former, self._file = self._file, self._open()
        os.close(former)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o640)
        with suppress(OSError):  # another server writes the file, and its last line is not torn
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._drop_torn_line(file)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return file

    def _drop_torn_line(self, file: int) -> None:
        size = os.fstat(file).st_size
        at = max(0, size - LOOK_BYTES)
        end = os.pread(file, LOOK_BYTES, at)
        if end and not end.endswith(b"\n"):
            os.ftruncate(file, at + end.rfind(b"\n") + 1)
            log.warning("--usage-log %s ended in a torn line, which was dropped", self._path)


def line_of(record: UsageRecord) -> str:
    """Return a record's line: the fields of `UsageRecord`, with the time in UTC first."""
    fields = asdict(record)
    at = datetime.fromtimestamp(fields.pop("ended_at"), UTC)
    fields = {"ended_at": at.isoformat(timespec="milliseconds"), **fields}
    for name in ("queue_s", "step_s"):
        fields[name] = round(fields[name], 9)
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


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
