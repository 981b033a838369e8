"""Tells clients that ask for it what their request does before its first token.

Rule 1: a task beside the request's own looks at the request now and then. Nothing on the way of a
token knows of it, and a request that does not ask has no such task. Rule 2: a look waits for
nothing: neither for a step nor for a reader, whose queue has one place for progress
(`engine.requests.readers.Latest`).
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import trio

from engine.core.common.phases import Phase
from engine.core.common.prompts import PromptProgress
from engine.errors import TrioletError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.pool.pool import Pool
    from engine.requests.stream import RequestStream
    from engine.requests.tasks import RequestTasks
    from engine.worker.interface import LoadProgress

log = logging.getLogger(__name__)

INTERVAL_S = 0.25  # between two looks at one request
UNCHANGED_S = 1.0  # after which an event is sent although nothing has changed, as a sign of life
# Looks at all requests together. A look takes about 20 µs beside a short queue, 100 µs beside one
# of 1,000 requests: so they take at most 2 % of the engine's thread.
LOOKS_PER_S = 200


class ProgressReports:
    """Reports to requests of one engine. Belongs to the Trio thread."""

    def __init__(self, tasks: RequestTasks, pool: Pool) -> None:
        self._tasks = tasks
        self._pool = pool
        self._num_watched = 0

    @contextmanager
    def reporting_to(self, stream: RequestStream[Any]) -> Iterator[None]:
        """While the block runs, and until the request has its first token, report to its reader.

        Raises:
            ShuttingDown: the engine takes no more tasks.
        """
        scope = trio.CancelScope()
        self._tasks.start(self._watch, stream, scope, name=f"progress {stream.request_id}")
        try:
            yield
        finally:
            scope.cancel(reason="the request has ended")

    async def _watch(self, stream: RequestStream[Any], scope: trio.CancelScope) -> None:
        self._num_watched += 1
        try:
            with scope:
                await self._report(stream)
        except Exception:  # a bug here must not end the engine
            log.exception("the progress of a request could not be told")
        finally:
            self._num_watched -= 1

    async def _report(self, stream: RequestStream[Any]) -> None:
        """Report until the request has a token. Cancellation: at once."""
        shown, loads = PromptProgress(""), _Loads()
        shown_at = trio.current_time()
        while True:
            await trio.sleep(max(INTERVAL_S, self._num_watched / LOOKS_PER_S))
            if stream.tokens_done or stream.is_closed:
                return
            progress, now = self._look(stream, shown, loads), trio.current_time()
            if now >= shown_at + UNCHANGED_S or _without_times(progress) != _without_times(shown):
                stream.show(progress)
                shown, shown_at = progress, now

    def _look(
        self, stream: RequestStream[Any], before: PromptProgress, loads: _Loads
    ) -> PromptProgress:
        """Return what the request does now; ``before`` is what it did when it was last told."""
        explained, loop = None, None if stream.replica is None else stream.replica.loop
        if loop is not None:
            explained = loop.explain(stream.core_id)
        phase = (loop and loop.phase_of(stream.core_id)) or stream.phase
        progress = before._replace(phase=phase.value, position=0, first_token_s=None)
        if phase is Phase.LOAD and (load := self._load_of(stream)) is not None:
            loads.see(load)
            progress = progress._replace(loaded_bytes=loads.done, total_bytes=loads.total)
        if stream.prepared is not None:
            progress = progress._replace(prompt_tokens=stream.prepared.request.prompt_tokens)
        if explained is None or (prompt := explained.prompt) is None:
            return progress
        # A preempted prompt is computed again, and what was told must not be taken back.
        return progress._replace(
            position=explained.position,
            computed_tokens=max(before.computed_tokens, prompt.computed),
            cached_tokens=max(before.cached_tokens, prompt.cached),
            prefill_s=prompt.prefill_s,
            first_token_s=prompt.first_token_s,
        )

    def _load_of(self, stream: RequestStream[Any]) -> LoadProgress | None:
        """Return the progress of the load that a request waits for; None if it waits for none."""
        request = stream.request
        try:
            entry = self._pool.registry.find_base(request.model, request.capability)
        except TrioletError:
            return None  # its task is about to end with the error
        return entry.progress if entry.load is not None else None


class _Loads:
    """The bytes of the loads that a request waits for one after the other: of its model, of a draft
    model, and of a load that begins anew. ``done`` of ``total`` bytes; neither falls."""

    def __init__(self) -> None:
        self.total = 0
        self._before = 0  # bytes of the loads before this one
        self._own = self._own_total = 0  # of this one

    def see(self, load: LoadProgress) -> None:
        """Take note of how far the load is. One without a total has not read anything yet."""
        if not load.bytes_total:
            return
        if load.bytes_done < self._own or load.bytes_total < self._own_total:
            self._before += self._own
        self._own, self._own_total = load.bytes_done, load.bytes_total
        self.total = max(self.total, self._before + self._own_total)

    @property
    def done(self) -> int:
        """The bytes that are loaded."""
        return self._before + self._own


def _without_times(progress: PromptProgress) -> PromptProgress:
    return progress._replace(prefill_s=0.0, first_token_s=None)
