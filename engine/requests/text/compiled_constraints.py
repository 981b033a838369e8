"""The compiled constraints of a replica: which requests wait for them, and which are kept (D15).

Rule 1: a constraint is compiled once for all requests that wait for it, in a thread with a limiter
of its own: neither a step nor another request waits for it, and a request may stop waiting. Rule 2:
a constraint that a live request holds is kept; others are dropped, least recently used first, when
the bounds are reached. Rule 3: failures are kept too, so that asking again costs nothing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio

from engine.errors import (
    EngineBug,
    InvalidRequest,
    Overloaded,
    ShuttingDown,
    TrioletError,
    Unsupported,
)
from engine.requests.tokenizing import guarded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from engine.core.text.types import Constraint
    from engine.replica.threads import Threads
    from engine.requests.tasks import RequestTasks
    from engine.worker.text.interface import TextRunner

log = logging.getLogger(__name__)

# The most constraints that a replica keeps, and their bytes. Guesses: a service has tens, of some
# 100 KB each; a constraint of 64 KiB of text takes up to 100 MB.
ENTRIES_MAX = 256
BYTES_MAX = 256 << 20
COMPILERS = 2  # compilations at once, so that a cheap one does not wait for a costly one
WAITING_MAX = 512  # compilations that wait; each compilation takes 2 s at most


class _Entry:
    """One constraint. ``num_bytes`` is None until it is compiled; ``error`` says why it was not."""

    def __init__(self) -> None:
        self.holders = 0
        self.has_begun = False
        self.num_bytes: int | None = None
        self.error: TrioletError | None = None
        self.scope = trio.CancelScope()
        self.done = trio.Event()


class CompiledConstraints:
    """The compiled constraints of one replica."""

    def __init__(self, compiler: TextRunner, threads: Threads) -> None:
        self._compiler = compiler
        self._threads = threads
        self._limiter = trio.CapacityLimiter(COMPILERS)
        self._entries: OrderedDict[Constraint, _Entry] = OrderedDict()  # least recently used first

    @asynccontextmanager
    async def held(self, constraint: Constraint, tasks: RequestTasks) -> AsyncIterator[None]:
        """Keep a constraint compiled while the block runs. If no other request has it, it is
        compiled first, in one of ``tasks``.

        Raises:
            InvalidRequest: the constraint does not compile; the violation names the field.
            Unsupported: the model can follow no constraint.
            Overloaded: too many compilations wait, or every constraint that is kept is in use.
            ShuttingDown: the engine is closed.
        Cancellation: takes effect at once. A compilation that has begun goes on, for the next
            request that asks.
        """
        entry = self._entries.get(constraint) or self._begin(constraint, tasks)
        self._entries.move_to_end(constraint)
        entry.holders += 1
        try:
            await entry.done.wait()
            if entry.error is not None:
                raise _again(entry.error)
            yield
        finally:
            entry.holders -= 1
            if not (entry.holders or entry.has_begun):
                entry.scope.cancel(reason="nobody waits for it any more")
                if self._entries.get(constraint) is entry:
                    del self._entries[constraint]

    @property
    def num_bytes(self) -> int:
        """About how many bytes the compiled constraints take."""
        return sum(entry.num_bytes or 0 for entry in self._entries.values())

    def __len__(self) -> int:
        """Return how many constraints are kept, with those that wait and those that failed."""
        return len(self._entries)

    def _begin(self, constraint: Constraint, tasks: RequestTasks) -> _Entry:
        waiting = sum(not entry.has_begun for entry in self._entries.values())
        if waiting >= WAITING_MAX:
            raise Overloaded("too many constraints wait to be compiled", retry_after_s=1.0)
        self._make_room()
        entry = _Entry()
        tasks.start(self._compile, constraint, entry)
        self._entries[constraint] = entry
        return entry

    async def _compile(self, constraint: Constraint, entry: _Entry) -> None:
        def job() -> int:
            entry.has_begun = True
            return guarded(partial(self._compiler.compile, constraint))()

        try:
            with entry.scope:
                entry.num_bytes = await self._threads.run(job, self._limiter)
        except TrioletError as error:
            entry.error = error
        except Exception as error:
            log.exception("a constraint's compiler failed")
            entry.error = EngineBug(repr(error))
        finally:
            if entry.num_bytes is None and entry.error is None:
                entry.error = ShuttingDown("the engine is closed")
            is_lasting = isinstance(entry.error, InvalidRequest | Unsupported | None)
            if not is_lasting and self._entries.get(constraint) is entry:
                del self._entries[constraint]
            if constraint not in self._entries:
                # No request waited any more when this compilation began, or when an earlier one of
                # the same constraint began: the runner may still have the result.
                self._compiler.forget(constraint)
            entry.done.set()

    def _make_room(self) -> None:
        """Drop constraints that no request holds until one more fits."""
        idle = [key for key, entry in self._entries.items() if not entry.holders]
        num_bytes = self.num_bytes
        for constraint in idle:
            if len(self._entries) < ENTRIES_MAX and num_bytes < BYTES_MAX:
                return
            entry = self._entries[constraint]
            if entry.done.is_set():
                num_bytes -= entry.num_bytes or 0
                del self._entries[constraint]
                if entry.error is None:
                    self._compiler.forget(constraint)
        if len(self._entries) >= ENTRIES_MAX or num_bytes >= BYTES_MAX:
            raise Overloaded("the constraints in use fill their memory", retry_after_s=1.0)


def _again(error: TrioletError) -> TrioletError:
    """Return a copy of an error, so that every request that waits raises its own."""
    if isinstance(error, InvalidRequest):
        return InvalidRequest(error.violations)
    if isinstance(error, Unsupported):
        return Unsupported(str(error), field=error.field)
    return error
