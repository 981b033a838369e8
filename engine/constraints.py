"""Compiled constraints, as the Trio thread sees them: who waits for which, and what is kept (D15).

Rule 1: a constraint is compiled once for all who wait for it, in a thread with a limiter of its
own: neither a step nor another request waits for it, and whoever waits may leave. Rule 2: what a
live request holds is kept; what nobody holds goes, least recently used first, when the bounds are
reached. Rule 3: what cannot be compiled is remembered too, so that asking again costs nothing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import trio

from engine.errors import (
    EngineBug,
    InvalidRequest,
    Overloaded,
    ShuttingDown,
    TrioletError,
    Unsupported,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from engine.core.types import Constraint
    from engine.threads import Threads

log = logging.getLogger(__name__)

# Guesses: a service has tens of forms, of some 100 KB. One of 64 KiB of text takes up to 100 MB.
ENTRIES_MAX = 256
BYTES_MAX = 256 << 20
COMPILERS = 2  # so that a cheap one does not wait for a costly one
WAITING_MAX = 512  # compilations that have not begun; they wait at most 2 s for each before them


class Compiler(Protocol):
    """What compiles: a `Runner`."""

    def compile(self, constraint: Constraint) -> int: ...
    def forget(self, constraint: Constraint) -> None: ...


class _Entry:
    """One constraint. ``num_bytes`` is None until it is compiled, ``error`` says why it is not."""

    def __init__(self) -> None:
        self.holders = 0
        self.has_begun = False
        self.num_bytes: int | None = None
        self.error: TrioletError | None = None
        self.scope = trio.CancelScope()
        self.done = trio.Event()


class Constraints:
    """The compiled constraints of one replica."""

    def __init__(self, compiler: Compiler, threads: Threads) -> None:
        self._compiler = compiler
        self._threads = threads
        self._limiter = trio.CapacityLimiter(COMPILERS)
        self._entries: OrderedDict[Constraint, _Entry] = OrderedDict()  # least recently used first

    @asynccontextmanager
    async def held(
        self, constraint: Constraint, nursery: trio.Nursery | None
    ) -> AsyncIterator[None]:
        """Hold a constraint compiled while the block runs; compile it in ``nursery`` if nobody has.

        Raises:
            InvalidRequest: it cannot be compiled; the field is named.
            Unsupported: the model can follow none. Overloaded: too many wait, or all that is kept
                is in use. ShuttingDown: the engine is closed.
        Cancellation: at once; a compilation that has begun goes on, for whoever asks next.
        """
        entry = self._entries.get(constraint) or self._begin(constraint, nursery)
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
        """What is kept, about."""
        return sum(entry.num_bytes or 0 for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def _begin(self, constraint: Constraint, nursery: trio.Nursery | None) -> _Entry:
        if nursery is None:
            raise ShuttingDown("the engine is closed")
        waiting = sum(not entry.has_begun for entry in self._entries.values())
        if waiting >= WAITING_MAX:
            raise Overloaded("too many constraints wait to be compiled", retry_after_s=1.0)
        self._make_room()
        entry = self._entries[constraint] = _Entry()
        nursery.start_soon(self._compile, constraint, entry)
        return entry

    async def _compile(self, constraint: Constraint, entry: _Entry) -> None:
        def job() -> int:
            entry.has_begun = True
            try:
                return self._compiler.compile(constraint)
            except (Exception, KeyboardInterrupt):
                raise
            except BaseException as error:  # a panic of a library in Rust is no Exception
                raise EngineBug(repr(error)) from error

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
                # its waiters left as it began, or as one before it did that had been left too
                self._compiler.forget(constraint)
            entry.done.set()

    def _make_room(self) -> None:
        """Forget what nobody holds until one more fits."""
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
    """An error of each waiter's own."""
    if isinstance(error, InvalidRequest):
        return InvalidRequest(error.violations)
    if isinstance(error, Unsupported):
        return Unsupported(str(error), field=error.field)
    return error
