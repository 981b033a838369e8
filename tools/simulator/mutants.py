"""Bugs planted in production code, one at a time, to see that the simulator finds them.

`python -m tools.simulator.mutants [TITLE…]` prints for each the first world that shows it. A mutant
is a function's own source with one piece replaced; a piece that is not there any more is an error,
so that a mutant cannot rot unseen.
"""

from __future__ import annotations

import inspect
import logging
import sys
import textwrap
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine import encode_inputs, encoding, loop, pool, supervisor
from engine.core import (
    blocks,
    credit,
    encode_line,
    encode_scheduler,
    ledger,
    planner,
    rate,
    scheduler,
)
from grpc_service import bridge
from tools.simulator.run import simulate

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_REQUESTS = 60
NUM_WORLDS = 100


@dataclass(frozen=True)
class Mutant:
    """``old`` becomes ``new`` in the source of ``owner``'s function ``name``. ``seed`` is the first
    world that showed it, looked at first; when worlds are drawn differently it may be another."""

    title: str
    owner: Any
    name: str
    old: str
    new: str
    seed: int = 0


MUTANTS = (
    Mutant(
        "an ended sequence keeps its blocks",
        ledger.Ledger,
        "finish",
        "self._give_back_blocks(seq)",
        "pass",
        seed=2,
    ),
    Mutant(
        "no running sequence gives way to an older one",
        planner,
        "order_victims",
        "if seq.rank > rank",
        "if False",
        seed=27,
    ),
    Mutant("a command wakes nobody", loop.EngineLoop, "post", "self._wake.set()", "pass"),
    Mutant(
        "an end is told twice",
        scheduler.Scheduler,
        "_end",
        "self._ledger.end(seq, now)",
        "self._ledger.end(seq, now); self._events += self._events[-1:]",
    ),
    Mutant(
        "a late result keeps its slot",
        scheduler.Scheduler,
        "_take_result",
        "        if has_slot:\n            seq.credit.cancel()\n        self._late += 1",
        "        self._late += 1",
        seed=5,
    ),
    Mutant(
        "a message takes no slot",
        scheduler.Scheduler,
        "_take_tokens",
        "seq.credit.fill()",
        "pass",
    ),
    Mutant(
        "a decode is planned without a slot",
        planner.Planner,
        "_plan_all_running",
        "credit.free -= 1",
        "pass",
    ),
    Mutant(
        "a decode's slot stays promised",
        scheduler.Scheduler,
        "_commit_rows",
        "seq.credit.reserved -= 1",
        "pass",
    ),
    Mutant(
        "a late result is delivered",
        scheduler.Scheduler,
        "_take_result",
        "if seq.state is not State.RUNNING:",
        "if seq.state is State.FINISHED:",
        seed=5,
    ),
    Mutant(
        "a prefix is published before its step is over",
        planner.Planner,
        "_add_row",
        "_run_ahead(seq, end,",
        "self._ledger.publish_computed(seq, start, end); _run_ahead(seq, end,",
    ),
    Mutant(
        "what a failed step started stays started",
        planner.Planner,
        "_settle",
        "elif is_started:",
        "elif is_started and is_fork:",
        seed=2,
    ),
    Mutant(
        "a preempted sequence comes back with its old block table",
        planner.Planner,
        "_start",
        "BlockDelta(0, tuple(seq.blocks))",
        "row.blocks",
    ),
    Mutant(
        "a fork's partial block is not copied",
        planner.Planner,
        "_fork",
        "self._step.copies.append((parent.blocks[len(full)], copies[index]))",
        "pass",
    ),
    Mutant(
        "a drained sequence runs on without a seat",
        ledger.Ledger,
        "unpark",
        "> self.config.max_num_seqs",
        "> 10**9",
        seed=2,
    ),
    Mutant(
        "a row run alone takes a seat there is not",
        planner.Planner,
        "_has_seats_for",
        "seats <= self._config.max_num_seqs",
        "True",
    ),
    Mutant(
        "aging is not compared, and two preempt each other for ever",
        planner.Planner,
        "_victims_for_first",
        "if seq.rank > first.rank and ledger.waiting_key_of(seq, self._now) > key",
        "if seq.rank > first.rank",
    ),
    Mutant(
        "room is made as if nobody had a next token",
        planner.Planner,
        "_promised",
        "with_next=seq.rank < first.rank",
        "with_next=bool(seq.num_pending) and seq.rank < first.rank",
        seed=83,
    ),
    Mutant(
        "a step's prompts take as long as they take",
        rate.BestRate,
        "_prompt_budget",
        "if not best or not self._target_s:",
        "if True:",
        seed=26,
    ),
    Mutant(
        "nobody looks at the stall timeout",
        scheduler.Scheduler,
        "next_wakeup",
        "return None if first is None else max(now, first + self.config.stall_timeout_s)",
        "return None",
        seed=26,
    ),
    Mutant(
        "a deadline is ignored",
        supervisor,
        "server_deadline",
        "return now + timeout_s - min(",
        "return math.inf - min(",
    ),
    Mutant(
        "a starved reader's release is not told",
        credit.Credit,
        "release",
        "return was_starved and count > 0",
        "return False",
        seed=2,
    ),
    Mutant(
        "a prepared plan keeps the rows that ended",
        planner.Planner,
        "reconcile",
        "if seq.state is State.ENDING",
        "if seq.state is State.FINISHED",
        seed=3,
    ),
    Mutant(
        "a step runs while the engine is paused",
        scheduler.Scheduler,
        "_pause_with",
        "self._pause = mode",
        "self._pause = mode if mode is not PauseMode.KEEP else None",
    ),
    Mutant(
        "events are delivered in the wrong order",
        loop.EngineLoop,
        "_deliver",
        "for event in events:",
        "for event in reversed(events):",
    ),
    Mutant(
        "a drain cuts nobody",
        supervisor.Supervisor,
        "drain",
        "generation.cancel(EndReason.SHUTDOWN)",
        "pass",
        seed=4,
    ),
    Mutant(
        "a cancel does not reach the core",
        supervisor.Supervisor,
        "_run",
        "replica.loop.cancel(request.request_id, reason, generation.phase, since)",
        "pass",
        seed=1,
    ),
    Mutant(
        "a failed load wakes nobody",
        pool.Pool,
        "_run_load",
        "load.settled.set()",
        "pass",
        seed=5,
    ),
    Mutant(
        "a reused block stays matchable",
        blocks.BlockPool,
        "take",
        "self._reused.append(block)",
        "pass",
        seed=3,
    ),
    Mutant("news wake no handler", bridge.BridgeCall, "advance", "self._waiter.set()", "pass"),
    Mutant(
        "what a client was written gives no credit back",
        bridge.BridgeCall,
        "written",
        "self.generation.release(num_events)",
        "pass",
    ),
    Mutant(
        "what was written straight gives no credit back",
        bridge.BridgeCall,
        "_is_served",
        "self.written(1)",
        "pass",
    ),
    Mutant(
        "what could not be written straight is lost",
        bridge.BridgeCall,
        "_is_served",
        "or not self._straight(self._events[0])",
        "or self._straight(self._events[0]) is None",
    ),
    Mutant(
        "of several events one is written straight",
        bridge.BridgeCall,
        "_is_served",
        "len(self._events) != 1 or",
        "not self._events or",
    ),
    Mutant(
        "an event that is written straight hides the end",
        bridge.BridgeCall,
        "_is_served",
        "self._straight is None or generation.is_closed",
        "self._straight is None",
        seed=2,
    ),
    Mutant(
        "the end wakes no handler",
        bridge.BridgeCall,
        "_is_served",
        "waiter is None or waiter.is_set()",
        "waiter is None or generation.is_closed",
    ),
    Mutant(
        "what came while its handler wrote is overlooked",
        bridge.BridgeCall,
        "receive",
        "while True:",
        "self._waiter = trio.Event(); await self._waiter.wait()\n    while True:",
    ),
    Mutant(
        "an end comes before the last tokens",
        bridge.BridgeCall,
        "receive",
        "if events := self._take():",
        "if not generation.is_closed and (events := self._take()):",
    ),
    Mutant(
        "of the calls with news in a step one is forgotten",
        bridge.Bridge,
        "_release",
        "for call in ready:",
        "for call in list(ready)[1:]:",
    ),
    Mutant(
        "a client that goes is not told to the engine",
        bridge.BridgeCall,
        "cancel",
        "self.generation.close_reader(trio.current_time())",
        "pass",
        seed=2,
    ),
    Mutant(
        "a call that is left goes on", bridge.BridgeCall, "leave", "self.cancel()", "pass", seed=2
    ),
    Mutant(
        "a call that is left stays a zombie",
        bridge.BridgeCall,
        "leave",
        "self._bridge.zombies.gone(self)",
        "pass",
    ),
    Mutant(
        "an ended call is no zombie",
        bridge.BridgeCall,
        "_is_served",
        "self._bridge.zombies.ended(self, self._address)",
        "pass",
        seed=4,
    ),
    Mutant(
        "an abort before its request is forgotten at once",
        supervisor.Supervisor,
        "abort",
        "self._aborts_to_come.add(request_id)",
        "pass",
        seed=8,
    ),
    Mutant(
        "an input of a failed step is lost",
        encode_line.LiveEncode,
        "put_back",
        "self.left.appendleft(index)",
        "pass",
        seed=8,
    ),
    Mutant(
        "an input is encoded twice",
        encode_line.LiveEncode,
        "take",
        "self.left.popleft()",
        "pass",
    ),
    Mutant(
        "results go to the inputs in the order of their steps",
        encode_scheduler.EncodeScheduler,
        "_commit",
        "Encoded(live.request.request_id, index,",
        "Encoded(live.request.request_id, live.num_done - 1,",
    ),
    Mutant(
        "a failed step of an encoder keeps its slots",
        encode_scheduler.EncodeScheduler,
        "_step_failed",
        "live.credit.cancel()",
        "pass",
        seed=8,
    ),
    Mutant(
        "the row of a request that has ended takes those behind it along",
        encode_scheduler.EncodeScheduler,
        "_commit",
        "            continue",
        "            break",
        seed=11,
    ),
    Mutant(
        "the row of an encode request that has ended keeps its slot",
        encode_scheduler.EncodeScheduler,
        "_commit",
        "            live.credit.cancel()",
        "            live.is_ended or live.credit.cancel()",
        seed=11,
    ),
    Mutant(
        "a cancelled encode request stays in the line",
        encode_scheduler.EncodeScheduler,
        "_end",
        "self._leave_line(live)",
        "pass",
    ),
    Mutant(
        "others wait for an encode request whose reader has no room",
        encode_scheduler.EncodeScheduler,
        "_choose",
        "        else:\n            if live.left:\n                break",
        "        if live.left:\n            break",
        seed=8,
    ),
    Mutant(
        "an input longer than a step never goes first",
        encode_scheduler.EncodeScheduler,
        "_fits",
        "return True",
        "return longest <= self._budget",
    ),
    Mutant(
        "an encoder's step takes more than its budget",
        encode_scheduler.EncodeScheduler,
        "_fits",
        "count * longest <= self._budget",
        "(count - 1) * longest <= self._budget",
    ),
    Mutant(
        "an encoder's line knows no aging",
        encode_line.Line,
        "in_order",
        "live.request.priority - floor(waited / self._aging_s)",
        "live.request.priority",
    ),
    Mutant(
        "an encoder that ran out of memory is asked for as much again",
        encode_scheduler.EncodeScheduler,
        "_step_failed",
        "self._budget = max(1, min(self._budget, step.plan.num_tokens) // 2)",
        "pass",
        seed=18,
    ),
    Mutant(
        "the rows of an encoder's failed step are not run alone",
        encode_scheduler.EncodeScheduler,
        "_step_failed",
        "self._suspects.extend(live_rows)",
        "pass",
        seed=8,
    ),
    Mutant(
        "an encode request that has not begun begins in a pause",
        encode_scheduler.EncodeScheduler,
        "_may_go_on",
        "self._pause is None or live.started_at is not None",
        "True",
        seed=38,
    ),
    Mutant(
        "nobody looks at an encoder's stall timeout",
        encode_scheduler.EncodeScheduler,
        "next_wakeup",
        "return None if first is None else max(now, first + self.config.stall_timeout_s)",
        "return None",
        seed=26,
    ),
    Mutant(
        "scores that are kept for the end keep their slots",
        encoding.Encoding,
        "on_encoded",
        "self.release(1)",
        "pass",
        seed=18,
    ),
    Mutant(
        "the best scores come in the order of their steps",
        encoding.Encoding,
        "on_finished",
        "sorted(self._scores, key=lambda one: (-one.score, one.index))",
        "self._scores",
    ),
    Mutant(
        "texts beside ids get each other's tokens",
        encode_inputs.EncodeInputs,
        "_tokenize_inputs",
        "tokenizer.encode_texts(texts, asked.prompt_name)",
        "tokenizer.encode_texts(texts[::-1], asked.prompt_name)",
    ),
)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The bug is there for the time of the block."""
    original = getattr(mutant.owner, mutant.name)
    source = textwrap.dedent(inspect.getsource(original))
    if source.count(mutant.old) != 1:
        raise LookupError(f"{mutant.title}: {source.count(mutant.old)} × {mutant.old!r}")
    space: dict[str, Any] = {}
    changed = "from __future__ import annotations\n" + source.replace(mutant.old, mutant.new)
    exec(compile(changed, f"<{mutant.title}>", "exec"), original.__globals__, space)
    setattr(mutant.owner, mutant.name, space[mutant.name])
    try:
        yield
    finally:
        setattr(mutant.owner, mutant.name, original)


def shows(mutant: Mutant, seed: int) -> BaseException | None:
    """What the watchers say of a world with the bug; None: they see nothing."""
    with planted(mutant):
        try:
            simulate(seed, num_requests=NUM_REQUESTS)
        except Exception as error:
            return error
    return None


def find(mutant: Mutant) -> tuple[int, BaseException] | None:
    """The first world that shows the bug, and what is seen. None: there is none."""
    for seed in range(NUM_WORLDS):
        if (error := shows(mutant, seed)) is not None:
            return seed, error
    return None


def main(argv: list[str]) -> int:
    logging.disable(logging.CRITICAL)
    missed = 0
    for mutant in MUTANTS:
        if argv and mutant.title not in argv:
            continue
        started = time.monotonic()
        found = find(mutant)
        seconds = time.monotonic() - started
        missed += found is None
        seed, error = found or (NUM_WORLDS, None)
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        seen = "NOT FOUND" if error is None else f"{type(error).__name__}: {error}"
        print(f"seed {seed:3d} {seconds:5.1f} s  {mutant.title}: {seen[:110]}", flush=True)
    print(f"{len(MUTANTS)} mutants, {missed} not found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
