"""The watcher of bills: compares the records of a world's requests with what readers have received,
and with what the loops and the counters say."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from engine.core.text.scheduler import Scheduler
from engine.replica.loop import EngineLoop
from engine.requests.text.values import GenerateRequest
from tests.simulator.watch import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.api.engine import Engine
    from engine.requests.stream import RequestStream
    from engine.requests.usage import UsageRecord
    from tests.simulator.readers import Reader

SHARE = 0.001  # of the loops' busy time, by which the records' seconds may differ
ENDS = {"finished": "OK", "stalled": "READER_STALLED"}  # by the counter, the one end it counts


class BillWatch:
    """Watches one engine: exactly one record for each request, with what it had."""

    def __init__(self) -> None:
        self.records: list[UsageRecord] = []
        self._loops: list[EngineLoop[Any, Any, Any]] = []
        # how many results readers have received, at least and at most
        self._heard: dict[RequestStream[Any], tuple[int, int]] = {}
        self._stayed: set[RequestStream[Any]] = set()  # whose clients have read to the end

    @contextmanager
    def watch_loops(self) -> Iterator[None]:
        """Note every loop that runs, while the block runs."""
        original, loops = EngineLoop.run, self._loops

        async def run(loop: EngineLoop[Any, Any, Any]) -> None:
            loops.append(loop)
            await original(loop)

        EngineLoop.run = run  # type: ignore[method-assign]
        try:
            yield
        finally:
            EngineLoop.run = original  # type: ignore[method-assign]

    def follow(self, engine: Engine) -> None:
        """Note every record of an engine."""
        engine.usage.listeners.append(self.records.append)

    def heard(self, stream: RequestStream[Any], reader: Reader) -> None:
        """Note what a client has of a stream which it has read to its end, or left."""
        self._heard[stream] = (reader.num_results - reader.num_amid, reader.num_results)
        if not reader.has_left:
            self._stayed.add(stream)

    def check(self, engine: Engine, streams: list[RequestStream[Any]]) -> None:
        """Check the records of ``streams``, all of which have ended."""
        names = Counter((x.origin.holder, x.request_id) for x in streams)
        billed = Counter((x.holder, x.request_id) for x in self.records)
        if names != billed:
            raise Violation(f"records lack {names - billed}, and are too many: {billed - names}")
        self.check_sums(engine)
        by_name = {(x.holder, x.request_id): x for x in self.records}
        for stream in streams:
            name = (stream.origin.holder, stream.request_id)
            if names[name] == 1:
                self._check_one(stream, by_name[name])

    def check_sums(self, engine: Engine) -> None:
        """Check that the records add up to what the loops and the counters say."""
        self._check_seconds()
        self._check_counters(engine)
        summed = [sums for _, sums in engine.usage]
        if sum(x.requests for x in summed) != len(self.records) or not math.isclose(
            sum(x.step_s for x in summed), sum(x.step_s for x in self.records)
        ):
            raise Violation(f"the sums are not those of the records: {summed}")

    def check_all_have(self, streams: list[RequestStream[Any]]) -> None:
        """Check that each of ``streams`` has a record, even if the engine was cut."""
        names = Counter((x.origin.holder, x.request_id) for x in streams)
        if lost := names - Counter((x.holder, x.request_id) for x in self.records):
            raise Violation(f"without a record: {lost}")

    def _check_seconds(self) -> None:
        busy_s = sum(loop.busy_s for loop in self._loops)
        billed_s = sum(record.step_s for record in self.records)
        if abs(busy_s - billed_s) > SHARE * busy_s:
            raise Violation(f"{billed_s} s of steps are billed, of {busy_s}")

    def _check_counters(self, engine: Engine) -> None:
        cores = [loop.core for loop in self._loops if isinstance(loop.core, Scheduler)]
        made = sum(core.statistics().completion_tokens_total for core in cores)
        billed = sum(record.completion_tokens for record in self.records)
        if made != billed:
            raise Violation(f"{billed} tokens are billed of {made}")
        ends = Counter(record.end for record in self.records)
        total = engine.statistics().totals.requests_total
        for name, reason in ENDS.items():
            if getattr(total, name) != ends[reason]:
                raise Violation(f"{total}, but {ends[reason]} are billed as {reason}")

    def _check_one(self, stream: RequestStream[Any], record: UsageRecord) -> None:
        made = record.completion_tokens + record.results
        if min(made, record.undelivered, record.step_s, record.queue_s) < 0 or (
            record.undelivered > made
        ):
            raise Violation(f"{record} cannot be")
        if (record.end == "OK") != (stream.error is None):
            raise Violation(f"{record} of {stream}, which ended by {stream.error!r}")
        if made and not record.step_s:
            raise Violation(f"{record} has results of no step")
        heard, delivered = self._heard.get(stream), made - record.undelivered
        if heard is None:
            return
        is_exact = stream in self._stayed
        least, most = heard
        if least > delivered or (is_exact and delivered > most):
            raise Violation(f"{record}: its reader has received {heard}")
        is_whole = isinstance(stream.request, GenerateRequest) and record.end == "OK"
        if is_whole and is_exact and record.undelivered:
            raise Violation(f"{record}: a whole answer has undelivered tokens")


__all__ = ["BillWatch"]
