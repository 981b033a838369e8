"""Plant bugs in production code, one at a time, to check that the simulator finds them.

`python -m tests.simulator.mutants [TITLE…]` prints for each bug the first world that shows it. A
mutant is a function's own source with one piece replaced. A piece that is no longer in the source
is an error, so that no mutant becomes void unnoticed.
"""

import inspect
import logging
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

from engine.core.common import core, credit, live_requests, meter, one_choice, shares, turns
from engine.core.encode import batch, live_request, waiting_inputs
from engine.core.encode import scheduler as encode_scheduler
from engine.core.image_generation import deadlines, least_times
from engine.core.image_generation import live_request as live_drawing
from engine.core.image_generation import scheduler as image_scheduler
from engine.core.text import (
    admission,
    commit,
    endings,
    guests,
    ledger,
    planned_step,
    prices,
    prompt_images,
    scheduler,
    sequence,
    shared_steps,
    step_builder,
    step_times,
    thought,
)
from engine.core.text.drafting import drafts
from engine.core.text.memory import blocks, sequence_keys, snapshots, states
from engine.pool import adapter_version, loads
from engine.replica import loop
from engine.requests import (
    bill,
    detached,
    image_memory,
    progress,
    readers,
    stream,
    supervisor,
    tokenizing,
)
from engine.requests.encode import prepare as prepare_inputs
from engine.requests.encode import stream as encode_stream
from engine.requests.image_generation import stream as image_generation_stream
from engine.requests.text import kept_events, prepare_chat
from engine.requests.text import stream as text_stream
from engine.worker.process import answers, group
from grpc_service.access import interceptor
from grpc_service.openai import call
from grpc_service.rpc import connection, http2, server
from grpc_service.services import call_writer
from tests.simulator import rolling
from tests.simulator.run import simulate

NUM_REQUESTS = 60
NUM_WORLDS = 200


def run_small(seed: int) -> None:
    """Run a small drawn world."""
    simulate(seed, num_requests=NUM_REQUESTS)


def run_over_http(seed: int) -> None:
    """Run a small drawn world whose clients come by the HTTP port."""
    simulate(seed, num_requests=NUM_REQUESTS, over_http=True)


@dataclass(frozen=True)
class Mutant:
    """A bug: ``old`` becomes ``new`` in the source of ``function``.

    ``seed`` is the first world that showed the bug, and is tried first. After a change of how
    worlds are drawn, another world may show it. ``run`` runs the world of a seed. ``owner`` is the
    class or the module that gets the changed function, by default the one that defines it.
    """

    title: str
    function: Callable[..., object]
    old: str
    new: str
    seed: int = 0
    run: Callable[[int], object] = run_small
    owner: Any = None

    def get_owner(self) -> Any:
        """Return the class or the module that gets the changed function."""
        if self.owner is not None:
            return self.owner
        classes = self.function.__qualname__.split(".")[:-1]
        return reduce(getattr, classes, sys.modules[self.function.__module__])


MUTANTS = (
    Mutant(
        "an ended sequence keeps its blocks",
        ledger.Ledger.finish,
        "self._give_back_blocks(seq)",
        "pass",
        seed=2,
    ),
    Mutant(
        "no running sequence gives way to an older one",
        admission.order_victims,
        "if seq.rank > rank",
        "if False",
        seed=27,
    ),
    Mutant("a command wakes nobody", loop.EngineLoop.post, "self._wake.set()", "pass"),
    Mutant(
        "an end is emitted twice",
        endings.Endings.end,
        "self._ledger.end(seq, now)",
        "self._ledger.end(seq, now); self._events += self._events[-1:]",
    ),
    Mutant(
        "a late result keeps its slot",
        commit.Committer._take_result,
        "seq.credit.cancel()\n        self._counters",
        "pass\n        self._counters",
        seed=5,
    ),
    Mutant("a message takes no slot", commit.Committer._take_tokens, "seq.credit.fill()", "pass"),
    Mutant(
        "a decode is planned without a slot",
        step_builder.StepBuilder._plan_all_running,
        "credit.free -= 1",
        "pass",
    ),
    Mutant(
        "a decode's slot stays promised",
        commit.Committer.commit,
        "seq.credit.reserved -= 1",
        "pass",
    ),
    Mutant(
        "a late result is delivered",
        commit.Committer._take_result,
        "if seq.state is not State.RUNNING:",
        "if seq.state is State.FINISHED:",
        seed=5,
    ),
    Mutant(
        "a prefix is published before its step is over",
        step_builder.StepBuilder._add_row,
        "seq.count_ahead(end,",
        "self._ledger.publish_computed(seq, start, end); seq.count_ahead(end,",
        seed=2,
    ),
    Mutant(
        "what a failed step started stays started",
        planned_step.PlannedStep.undo,
        "seq in self.started:",
        "seq not in self.sequences:",
        seed=2,
    ),
    Mutant(
        "a preempted sequence comes back with its old block table",
        step_builder.StepBuilder._start,
        "BlockDelta(0, tuple(seq.blocks))",
        "step.rows[-1].blocks",
        seed=2,
    ),
    Mutant(
        "a fork's partial block is not copied",
        step_builder.StepBuilder._fork,
        "self._step.copies.append((parent.blocks[len(full)], copies[index]))",
        "pass",
    ),
    Mutant(
        "a drained sequence runs on without a seat",
        ledger.Ledger.unpark,
        "self.seats_over(seq) > 0",
        "False",
        seed=26,
    ),
    Mutant(
        "a start takes a seat that nobody left",
        step_builder.StepBuilder._start_waiting,
        "if not admission.has_seats(ledger, seq):",
        "if False:",
        seed=2,
    ),
    Mutant(
        "aging is not compared, and two preempt each other for ever",
        admission.victims_for_first,
        "if seq.rank > first.rank and ledger.waiting.key_of(seq, now) > key",
        "if seq.rank > first.rank",
        seed=13,
    ),
    Mutant(
        "a step's prompts take as long as they take",
        step_times.StepTimes.tokens_in_step,
        "if not (target_s and any(large)):",
        "if True:",
        seed=58,
    ),
    Mutant(
        "nobody looks at the stall timeout",
        scheduler.Scheduler.next_wakeup,
        "super().next_wakeup(now) if self._parked else None",
        "None",
        seed=39,
    ),
    Mutant(
        "a deadline is ignored",
        stream.server_deadline,
        "return now + timeout_s - min(",
        "return math.inf - min(",
    ),
    Mutant(
        "a starved reader's release wakes nobody",
        credit.Credit.release,
        "return True",
        "return False",
        seed=15,
    ),
    Mutant(
        "a prepared plan keeps the rows that ended",
        planned_step.PlannedStep.reconcile,
        "is_ending = State.ENDING",
        "is_ending = State.FINISHED",
        seed=5,
    ),
    Mutant(
        "a step runs while the engine is paused",
        core.Core.apply,
        "self._pause = event.mode",
        "self._pause = event.mode if event.mode is not PauseMode.KEEP else None",
        owner=scheduler.Scheduler,
    ),
    Mutant(
        "events are delivered in the wrong order",
        loop.EngineLoop._deliver,
        "for event in events:\n            stream",
        "for event in reversed(events):\n            stream",
    ),
    Mutant(
        "a drain cuts nobody",
        supervisor.Supervisor.drain,
        "stream.cancel(EndReason.SHUTDOWN)",
        "pass",
        seed=4,
    ),
    Mutant(
        "a cancel does not reach the core",
        stream.RequestStream.run,
        "replica.loop.cancel(self.core_id, reason, self.phase, since)",
        "pass",
        seed=1,
    ),
    Mutant(
        "a failed load wakes nobody", loads.Loads._run_load, "load.settled.set()", "pass", seed=13
    ),
    Mutant(
        "a reused block stays matchable",
        blocks.BlockPool.take,
        "self._reused.append(block)",
        "pass",
        seed=13,
    ),
    Mutant("an event wakes no handler", call_writer.CallWriter.push, "waiter.set()", "pass"),
    Mutant(
        "what the task wrote gives no credit back",
        call_writer.CallWriter._write_events,
        "self._give_back(num_credited)",
        "pass",
        seed=6,
    ),
    Mutant(
        "what was written in a delivery gives no credit back",
        call_writer.CallWriter.push,
        "self._give_back(1)",
        "pass",
    ),
    Mutant(
        "what could not be written in a delivery is lost",
        call_writer.CallWriter.push,
        "not data or self._call.try_write(data)",
        "not data or self._call.try_write(data) is not None",
    ),
    Mutant(
        "an event overtakes one that waits for the task",
        call_writer.CallWriter.push,
        "waiter is not None and not waiter.is_set()",
        "waiter is not None",
        seed=43,
    ),
    Mutant(
        "a starved stream's drained reader is not reported",
        stream.RequestStream.release,
        "self.report_drained()",
        "pass",
        seed=6,
    ),
    Mutant("the end wakes no handler", call_writer.CallWriter.end, "self._waiter.set()", "pass"),
    Mutant(
        "a failed call waits until its client reads",
        call_writer.CallWriter.end,
        "self._writing.deadline = trio.current_time() + FAILURE_PATIENCE_S",
        "pass",
        seed=1,
    ),
    Mutant(
        "what came while its handler wrote is overlooked",
        call_writer.CallWriter._receive,
        "while True:",
        "self._waiter = trio.Event(); await self._waiter.wait()\n    while True:",
        seed=13,
    ),
    Mutant(
        "an end comes before the last tokens",
        call_writer.CallWriter._receive,
        "if self._pending:",
        "if self._pending and not self._has_ended:",
    ),
    Mutant(
        "a client's leaving is not reported to the engine",
        call_writer.CallWriter._cancel,
        "self._stream.leave(self, trio.current_time(), gone)",
        "pass",
        seed=2,
    ),
    Mutant(
        "a call that is left goes on",
        call_writer.CallWriter._leave,
        "self._cancel()",
        "pass",
        seed=2,
    ),
    Mutant(
        "a call that is left stays an unread call",
        call_writer.CallWriter._leave,
        "self._unread_calls.gone(self)",
        "pass",
        seed=1,
    ),
    Mutant(
        "an unread call beyond the bound is not reset",
        call_writer.CallWriter.evict,
        "self._call.evict()",
        "pass",
        seed=15,
    ),
    Mutant(
        "an ended call is no unread call",
        call_writer.CallWriter._count_unread,
        "self._unread_calls.ended(self, self._call.connection)",
        "pass",
        seed=15,
    ),
    Mutant(
        "a stream's end does not reach its reader",
        stream.RequestStream.close,
        "reader.end(self.error)",
        "pass",
        seed=13,
    ),
    Mutant(
        "an abort before its request is forgotten at once",
        supervisor.Supervisor.abort,
        "self._aborts_to_come.add(request_id, only_of)",
        "pass",
        seed=8,
    ),
    Mutant(
        "an input of a failed step is lost",
        live_request.LiveEncode.put_back,
        "self.left.setdefault(self.request.inputs[index].kind, deque()).appendleft(index)",
        "pass",
        seed=8,
    ),
    Mutant("an input is encoded twice", live_request.LiveEncode.take, "same.popleft()", "pass"),
    Mutant(
        "results go to the inputs in the order of their steps",
        encode_scheduler.EncodeScheduler._take_result,
        "Encoded(name, part,",
        "Encoded(name, live.num_done - 1,",
    ),
    Mutant(
        "a failed step of an encoder keeps its slots",
        one_choice.OneChoiceCore._step_failed,
        "self._give_up_slot(live, part)",
        "pass",
        seed=8,
    ),
    Mutant(
        "the row of a request that has ended takes those behind it along",
        one_choice.OneChoiceCore._commit,
        "self._counters.late_results += 1",
        "break",
        seed=36,
    ),
    Mutant(
        "the row of an encode request that has ended keeps its slot",
        one_choice.OneChoiceCore._give_up_slot,
        "live.credit.cancel()",
        "live.is_ended or live.credit.cancel()",
        seed=36,
        owner=encode_scheduler.EncodeScheduler,
    ),
    Mutant(
        "a cancelled encode request stays in the queue",
        encode_scheduler.EncodeScheduler._leave,
        "self._inputs.remove(live)",
        "pass",
    ),
    Mutant(
        "others wait for an encode request whose reader has no room",
        batch.BatchBuilder._take,
        "return True\n        self._longest",
        "return False\n        self._longest",
        seed=8,
    ),
    Mutant(
        "an input longer than a step never goes first",
        batch.BatchBuilder._fits,
        "return True",
        "return length <= self._budget",
    ),
    Mutant(
        "an encoder's step takes more than its budget",
        batch.BatchBuilder._fits,
        "padded = count *",
        "padded = (count - 1) *",
    ),
    Mutant(
        "an encoder's queue knows no aging",
        one_choice.OneChoice.key_in_queue,
        "aged_priority(self.request, now, aging_s)",
        "self.request.priority",
        owner=live_request.LiveEncode,
    ),
    Mutant(
        "an encoder that ran out of memory is asked for as much again",
        encode_scheduler.EncodeScheduler._step_failed,
        "self._budget.halve(step.plan.num_tokens)",
        "pass",
        seed=18,
    ),
    Mutant(
        "the rows of an encoder's failed step are not run alone",
        encode_scheduler.EncodeScheduler._step_failed,
        "self._suspects += [row for row in step.rows if not row[0].is_ended]",
        "pass",
        seed=26,
    ),
    Mutant(
        "an encode request that has not begun begins in a pause",
        batch.BatchBuilder._may_go_on,
        "(live.started_at is not None or not self._only_begun)",
        "True",
        seed=38,
    ),
    Mutant(
        "nobody looks at an encoder's stall timeout",
        live_requests.LiveRequests.next_wakeup,
        "return None if first == math.inf else max(now, first)",
        "return None",
        seed=26,
        owner=encode_scheduler.EncodeScheduler,
    ),
    Mutant(
        "scores that are kept for the end keep their slots",
        encode_stream.EncodeStream.push,
        "self.release(1)",
        "pass",
        seed=26,
    ),
    Mutant(
        "the best scores come in the order of their steps",
        encode_stream.EncodeStream._finish,
        "sorted(self._scores, key=lambda score: (-score.score, score.index))",
        "self._scores",
        seed=2,
    ),
    Mutant(
        "texts beside ids get each other's tokens",
        prepare_inputs.InputPreparer._tokenize_inputs,
        "encode_texts([*texts.values()], prompt_name)",
        "encode_texts([*texts.values()][::-1], prompt_name)",
    ),
    Mutant(
        "labels go to other inputs of their request",
        encode_stream.EncodeStream.push,
        "Classification(event.index,",
        "Classification(self.num_inputs - 1 - event.index,",
    ),
    Mutant(
        "a pair is read the wrong way round",
        prepare_inputs.InputPreparer._tokenize_inputs,
        "encode_pairs(first, [second])",
        "encode_pairs(second, [first])",
    ),
    Mutant(
        "pairs get each other's labels",
        prepare_inputs.InputPreparer._tokenize_inputs,
        "for place, (first, second) in pairs.items()",
        "for place, (first, second) in zip(pairs, [*pairs.values()][::-1])",
        seed=1,
    ),
    Mutant(
        "labels come by the model's own activation",
        prepare_inputs._options_of,
        "else request.activation",
        'else ""',
    ),
    Mutant(
        "all labels come, however few were asked for",
        prepare_inputs._options_of,
        "top_k=request.top_k,\n            activation",
        "top_k=None,\n            activation",
    ),
    Mutant(
        "entities have the labels of their tokens, whatever the aggregation",
        encode_stream.EncodeStream._take,
        "if options.aggregation in GROUPED:",
        "if False:",
    ),
    Mutant(
        "a user sees the parts of streams",
        supervisor.Supervisor.list_live,
        "(stream.is_closed or stream.is_part)",
        "stream.is_closed",
        seed=22,
    ),
    Mutant(
        "a sparse vector has all its weights",
        prepare_inputs._options_of,
        "top_k=request.top_k,\n        threshold",
        "top_k=None,\n        threshold",
    ),
    Mutant(
        "vectors come in another precision",
        prepare_inputs._options_of,
        'precision=request.precision or "float32"',
        'precision="float32"',
    ),
    Mutant(
        "the images of a request get each other's vectors",
        prepare_inputs._in_order,
        "iter(images)",
        "iter(images[::-1])",
        seed=8,
    ),
    Mutant(
        "a damaged image gets the vector of another",
        tokenizing.Tokenizing.read_images,
        "violations.append(",
        "made.append(made[0]) if made else violations.append(",
        seed=81,
    ),
    Mutant(
        "a step has texts and images",
        batch.BatchBuilder.build,
        "if self.chosen:\n            break",
        "pass",
        seed=8,
    ),
    Mutant(
        "texts wait until no images are left, or images until no texts are",
        batch.BatchBuilder._kinds,
        "kind is self._after",
        "kind is not self._after",
        seed=8,
    ),
    Mutant(
        "the queue forgets of which kind an input in a step was",
        waiting_inputs.WaitingInputs._count,
        "self.by_kind[live.request.inputs[index].kind] += sign",
        "pass",
        seed=2,
    ),
    Mutant(
        "a request keeps the memory of its images",
        image_memory.ImageMemory.take,
        "held.callback(self._give_back, num_bytes, request_id)",
        "pass",
        seed=8,
    ),
    Mutant(
        "an image's digest is not in the keys of its blocks",
        prompt_images.contents_of_blocks,
        "image.digest + ",
        "",
        seed=63,
        owner=sequence_keys,
    ),
    Mutant(
        "the images of a prompt get each other's places",
        prepare_chat.VisionInput._read_each,
        "iter(",
        "reversed(",
        seed=5,
    ),
    Mutant(
        "encoding an image costs a step nothing",
        prompt_images.cut_chunk,
        "cost = image.cost if begins or image.start >= start else 0",
        "cost = 0",
        seed=5,
        owner=step_builder,
    ),
    Mutant(
        "a chat with a damaged image is answered without it",
        tokenizing.Tokenizing.read_images,
        "violations.append(FieldViolation(path, str(error)))",
        "(made.append(made[0]) if made else violations.append(FieldViolation(path, str(error))))",
        seed=81,
    ),
    Mutant(
        "a chat keeps the memory of its images",
        prepare_chat.VisionInput.read,
        "assignment.held, assignment.core_id",
        "type(assignment.held)(), assignment.core_id",
        seed=5,
    ),
    Mutant(
        "the files of an ended request are counted on",
        supervisor.Supervisor._supervise,
        "self.image_files.remove(image_bytes)",
        "pass",
        seed=1,
    ),
    Mutant(
        "a continued choice draws as the first one",
        planned_step._admission,
        "if seq.choice:",
        "if False:",
        seed=15,
    ),
    Mutant(
        "the worker does not hear of what a continued choice has",
        planned_step._admission,
        "tuple(seq.output)",
        "()",
        seed=15,
    ),
    Mutant(
        "a choice that had ended keeps a slot",
        commit.Committer._take_result,
        "        if has_slot:\n            seq.credit.cancel()\n        self._endings",
        "        self._endings",
        seed=15,
    ),
    Mutant(
        "a stream waits for choices whose ends its client has",
        text_stream.TextStream.__init__,
        "self._num_choices - sum([choice.finished for choice in continued])",
        "self._num_choices",
        seed=26,
    ),
    Mutant(
        "the echo comes again",
        text_stream.TextStream.__init__,
        "if choice.token_ids or choice.finished",
        "if choice.finished",
        seed=53,
    ),
    Mutant(
        "a lost connection ends its request",
        text_stream.TextStream.leave,
        "if gone.is_lost and self._on_loss(self):",
        "if False:",
        seed=26,
    ),
    Mutant(
        "a stream that waits stalls like any other",
        live_requests.LiveRequest.stalls_at,
        "max(self.parked_since, self.credit.waits_until)",
        "self.parked_since",
        seed=151,
    ),
    Mutant(
        "parked guests keep their blocks",
        guests.Guests._evict,
        "if live.num_blocks <= left:",
        "if True:",
        seed=26,
    ),
    Mutant(
        "guests are computed beside others",
        guests.Guests.must_settle,
        "or self._others_are_there()",
        "or False",
        seed=15,
    ),
    Mutant(
        "a client that leaves before the core knows its request is no guest",
        text_stream.TextStream._admit,
        "self.report_client(is_there=False)",
        "pass",
        seed=57,
    ),
    Mutant(
        "a client that is back stays a guest",
        detached.DetachedStreams.attach,
        "stream.report_client(is_there=True)",
        "pass",
        seed=15,
    ),
    Mutant(
        "a window never ends",
        detached.DetachedStreams._expire,
        "await trio.sleep_until(wait.until)",
        "await trio.sleep_forever()",
        seed=26,
    ),
    Mutant(
        "what a client has is sent again",
        kept_events.KeptEvents.attach,
        "if counts[tokens.choice] > has.tokens:",
        "if counts[tokens.choice] >= has.tokens:",
        seed=15,
    ),
    Mutant(
        "events that are sent again give back slots that they do not have",
        credit.Credit.send_again,
        "self.again = max(0, count - delivered)",
        "self.again = 0",
        seed=113,
    ),
    Mutant(
        "a stream whose window has ended stays counted",
        detached.DetachedStreams._give_up,
        "wait.stream.counted.release()",
        "pass",
        seed=15,
    ),
    Mutant(
        "a call that attached stays counted",
        detached.DetachedStreams.uncount,
        "stream.counted.release()",
        "pass",
        seed=15,
    ),
    Mutant(
        "anybody with the token gets a stream",
        detached.DetachedStreams.attachable,
        "or stream.holder is not holder",
        "",
        seed=15,
    ),
    Mutant(
        "what is continued is billed as new",
        sequence.Sequence.usage,
        "self.num_resumed",
        "0",
        seed=15,
    ),
    Mutant(
        "an adapter finds the prefixes of its base",
        sequence_keys.SequenceKeys.root_of,
        ", request.adapter",
        "",
        seed=5,
    ),
    Mutant(
        "a reload drops the adapter of running requests",
        adapter_version.AdapterVersion.wait_free,
        "while self._holders:",
        "while False:",
        seed=66,
    ),
    Mutant(
        "a request is computed without its adapter",
        planned_step._admission,
        "request.adapter",
        "''",
        seed=5,
    ),
    Mutant(
        "ranks that failed and ranks that did not go on together",
        answers.Answers.in_order,
        "if failed and len(failed) < self._size:",
        "if False:",
        seed=10,
    ),
    Mutant(
        "ranks that failed at different places go on together",
        answers.Answers.in_order,
        "if len({_begun(answers[rank]) for rank in failed}) > 1:",
        "if False:",
        seed=10,
    ),
    Mutant(
        "the ranks of a dead one live on",
        group.WorkerGroup.kill,
        "for rank in self.ranks:",
        "for rank in self.ranks[:1]:",
        seed=10,
    ),
    Mutant(
        "one drafted token too many counts as computed",
        commit.Committer._take_drafts,
        "seq.num_computed = start + accepted",
        "seq.num_computed = start + min(drafts, accepted + 1)",
    ),
    Mutant(
        "one drafted token too many is published",
        commit.Committer._take_drafts,
        "self._ledger.publish_computed(seq, start, start + accepted)",
        "self._ledger.publish_computed(seq, start, start + drafts)",
        seed=2,
    ),
    Mutant(
        "drafts are published before they are verified",
        commit.Committer._commit_row,
        "row.count - row.drafts",
        "row.count",
        seed=2,
    ),
    Mutant(
        "a row with drafts has no block for them",
        drafts.Drafts._widened,
        "count = min(count, len(seq.blocks) * size - end)",
        "pass",
        seed=50,
    ),
    Mutant(
        "the blocks of wrong drafts are kept",
        commit.Committer._take_drafts,
        "self._ledger.give_back_behind(seq)",
        "pass",
        seed=2,
    ),
    Mutant(
        "drafts go beyond the step's budget",
        drafts.Drafts.widen,
        "min(DRAFTING_STEP_MAX, self._ledger.config.max_num_batched_tokens) - used",
        "DRAFTING_STEP_MAX - used",
    ),
    Mutant(
        "the step behind a draft is planned ahead",
        scheduler.Scheduler.prepare,
        " and not self._step.num_drafts",
        "",
        seed=5,
    ),
    Mutant(
        "a drawing takes all its steps before another gets one",
        turns.Seats._first_able,
        "live.rank > last",
        "True",
        seed=10,
    ),
    Mutant(
        "others wait for a drawing whose reader has no room",
        turns.Seats._first_able,
        "self._park(live, now)",
        "self._park(live, now)\n        return None",
        seed=15,
    ),
    Mutant(
        "a drawing that is parked is never told that there is room",
        one_choice.OneChoiceCore._park,
        "live.credit.mark_starved()",
        "pass",
        seed=15,
    ),
    Mutant(
        "a drawing that has not begun begins in a pause",
        turns.TurnsCore._choose,
        "is_paused = self._pause is not None",
        "is_paused = False",
        seed=45,
        owner=image_scheduler.ImageGenerationScheduler,
    ),
    Mutant(
        "parked drawings hold up those that wait for seats",
        turns.Seats._next_to_seat,
        "x.parked_since is None and not x.is_late(now)",
        "True",
        seed=15,
    ),
    Mutant(
        "any number of drawings have seats",
        turns.Seats._next_to_seat,
        "len(runnable) < self._max_seats",
        "True",
        seed=15,
    ),
    Mutant(
        "the worker is not told that a drawing has ended",
        image_scheduler.ImageGenerationScheduler._leave,
        "self._ended.append(live.sequence)",
        "pass",
        seed=1,
    ),
    Mutant(
        "drawings of the holder that is ahead go first",
        turns.Seats.next_in_turn,
        "self._shares.in_order()",
        "reversed(self._shares.in_order())",
        seed=10,
    ),
    Mutant(
        "drawings cost their holder nothing",
        turns.TurnsCore._choose,
        "self.shares.charge(prices)",
        "pass",
        seed=15,
    ),
    Mutant(
        "a holder without a drawing that goes on gets no seat beside those of others",
        turns.Seats._next_to_seat,
        "if has_room or seats[first] < part",
        "if has_room",
        seed=14,
    ),
    Mutant(
        "a cancelled drawing keeps its seat",
        turns.TurnsCore._leave,
        "self._seats.remove(live)",
        "pass",
        seed=10,
    ),
    Mutant(
        "a cancelled drawing stays in the queue",
        turns.TurnsCore._leave,
        "self._waiting.remove(live)",
        "pass",
        seed=17,
    ),
    Mutant(
        "a failed step of a drawing keeps its slot",
        one_choice.OneChoiceCore._step_failed,
        "self._give_up_slot(live, part)",
        "pass",
        seed=14,
        owner=image_scheduler.ImageGenerationScheduler,
    ),
    Mutant(
        "a failed step of a drawing runs again",
        one_choice.OneChoiceCore._step_failed,
        "if len(step.rows) == 1 and not first.is_ended:",
        "if False:",
        seed=1,
        owner=image_scheduler.ImageGenerationScheduler,
    ),
    Mutant(
        "images have the numbers of their tiles",
        image_scheduler.ImageGenerationScheduler._take_result,
        "part.index // request.num_tiles",
        "part.index",
        seed=15,
    ),
    Mutant(
        "a drawing ends before its last tile",
        one_choice.OneChoiceCore._commit,
        "live.num_done == live.num_parts",
        "live.num_done >= live.num_parts - 1",
        seed=1,
        owner=image_scheduler.ImageGenerationScheduler,
    ),
    Mutant(
        "a denoising step is left out",
        one_choice.OneChoiceCore._commit,
        "live.num_done += 1",
        "live.num_done += 1 + (live.num_done == 1)",
        seed=1,
        owner=image_scheduler.ImageGenerationScheduler,
    ),
    Mutant(
        "no preview is made",
        image_scheduler.ImageGenerationScheduler._plan_of,
        "preview=live.wants_preview",
        "preview=False",
        seed=10,
    ),
    Mutant(
        "a queue of drawings knows no aging",
        one_choice.OneChoice.key_in_queue,
        "aged_priority(self.request, now, aging_s)",
        "self.request.priority",
        seed=31,
        owner=live_drawing.LiveDrawing,
    ),
    Mutant(
        "nobody looks at the stall timeout of drawings",
        image_scheduler.ImageGenerationScheduler.next_wakeup,
        "super().next_wakeup(now)",
        "None",
        seed=58,
    ),
    Mutant(
        "a deadline is refused by the times of larger drawings",
        least_times.LeastTimes._estimate,
        "if shape.covers(other)",
        "if shape.verb is other.verb",
        seed=31,
    ),
    Mutant(
        "a deadline is refused by twice the time that a drawing takes",
        deadlines.Deadlines._latest_start,
        "deadline - self._times.seconds_for(request)",
        "deadline - 2 * self._times.seconds_for(request)",
        seed=31,
    ),
    Mutant(
        "progress overtakes a preview that becomes a file",
        image_generation_stream.ImageGenerationStream.push,
        "and not self._waiting",
        "",
        seed=15,
    ),
    Mutant(
        "a drawing succeeds before its images are taken",
        image_generation_stream.ImageGenerationStream.wait_turn,
        "elif self.credit.filled:",
        "elif False:",
        seed=41,
    ),
    Mutant(
        "a reader that takes no image is waited for without end",
        image_generation_stream.ImageGenerationStream._wait_for_reader,
        "patience.cancelled_caught and not self.is_closed",
        "False",
        seed=130,
    ),
    Mutant(
        "images that wait for their files are lost at the end",
        image_generation_stream.ImageGenerationStream._finish,
        "self.phase = Phase.WRITE",
        "self._waiting.clear()",
        seed=15,
    ),
    Mutant(
        "an ended sequence keeps its state slot",
        ledger.Ledger._give_back_blocks,
        "self.states.release(seq)",
        "pass",
        seed=13,
    ),
    Mutant(
        "a sequence begins from an empty state behind its cached prefix",
        states.StepStates.begin,
        "return snapshot",
        "return None",
        seed=13,
    ),
    Mutant(
        "a snapshot is kept under the key of another border",
        snapshots.publish,
        "// ledger.config.block_size - 1",
        "// ledger.config.block_size - 2",
        seed=13,
    ),
    Mutant(
        "a row that is dropped keeps its snapshot's slot",
        states.StepStates.drop,
        "slots.append(delta.snapshot)",
        "pass",
        seed=814,
    ),
    Mutant(
        "a step that failed keeps its state slots",
        states.StepStates.undo,
        "self._states.pool.rollback",
        "self._states.pool.commit",
        seed=13,
    ),
    Mutant(
        "choices that fork share the state of their parent",
        step_builder.StepBuilder._fork,
        "self._step.states.give(child)",
        "parent.state_slot",
        seed=13,
    ),
    Mutant(
        "a server that leaves names its last call at once",
        http2.Http2Connection.drain,
        "self.output.append(self.h2.goaway(_STREAM_MAX))",
        "self.send_goaway()",
        run=rolling.simulate,
    ),
    Mutant(
        "an engine that drains refuses requests whose calls are on their way",
        supervisor.Supervisor.drain,
        "await self._take_leave()",
        "pass",
        run=rolling.simulate,
    ),
    Mutant(
        "nobody counts the calls that are on their way",
        connection.Connection._on_stream,
        "self.arrivals.add(call)",
        "pass",
        run=rolling.simulate,
    ),
    Mutant(
        "a call has arrived before its request has",
        interceptor.Interceptor.serve,
        "if not call.method.startswith(SUBMITTING):",
        "if True:",
        run=rolling.simulate,
    ),
    Mutant(
        "a server that leaves goes on accepting",
        server.RpcServer.leave,
        "self._reception.close()",
        "pass",
        run=rolling.simulate,
    ),
    Mutant(
        "a server that has left takes the calls of clients that stay",
        http2.Http2Connection._begin,
        "lasts_only and not self._is_lasting(headers)",
        "False",
        run=rolling.simulate,
    ),
    Mutant(
        "a server that has left refuses its operator",
        http2.Http2Connection._begin,
        "lasts_only and not self._is_lasting(headers)",
        "lasts_only",
        run=rolling.simulate,
    ),
    Mutant(
        "nobody notices that an HTTP client has left",
        call.HttpCall.watch,
        'self.scope.cancel(reason="the client has left")',
        "pass",
        run=run_over_http,
    ),
    Mutant(
        "an answer over HTTP does not wait for its reader",
        call.HttpCall._put_part,
        "if stream.is_clear and not stream.is_broken:",
        "if True:",
        run=run_over_http,
    ),
    Mutant(
        "a failure over HTTP is not told",
        call.HttpCall.fail,
        "if self.status is None:",
        "if True:\n            return\n        if self.status is None:",
        run=run_over_http,
    ),
    Mutant(
        "a cancelled request is not billed",
        stream.RequestStream.run,
        "forget(Rest(self, forget) if self.bill.is_open else None)",
        "forget()",
    ),
    Mutant(
        "an aborted request is billed twice",
        supervisor.Supervisor._note_bill,
        "self.usage.add(record)",
        "for _ in range(1 + (record.end == 'ABORTED')): self.usage.add(record)",
    ),
    Mutant(
        "a step's time is not divided",
        meter.EqualSteps.settle,
        "self._seconds / self._num_rows",
        "self._seconds",
    ),
    Mutant(
        "a step is divided after its rows have ended",
        loop.EngineLoop._step,
        "self.core.charge(ended - started)",
        "pass",
    ),
    Mutant(
        "what a reader has not read is billed as delivered",
        bill.Bill.pass_on,
        "- num_unread",
        "",
    ),
    Mutant(
        "a stream that waits for its client is never billed",
        detached.DetachedStreams._give_up,
        "wait.stream.bill.give_up(wait.stream)",
        "pass",
    ),
    Mutant(
        "tokens that come after a cancel are not billed",
        bill.Bill.take_late,
        "self._num_late += count(stream, [event])",
        "pass",
        seed=2,
    ),
    Mutant(
        "prompts cost their holder nothing",
        prices.price_alone,
        "prices[payer] += times.price_of_prompts(count)",
        "pass",
        seed=55,
    ),
    Mutant(
        "cached tokens cost as much as computed ones",
        prices.counts_of,
        "count = row.count + cost",
        "count = row.start + row.count + cost",
        seed=151,
    ),
    Mutant(
        "a holder's weight is ignored",
        shares.Shares.charge,
        "price / share.weight",
        "price",
        seed=85,
    ),
    Mutant(
        "a holder that returns has a share saved up",
        shares.Shares.activate,
        "share.counter = max(share.counter, min(others, default=self._floor))",
        "pass",
        seed=260,
    ),
    Mutant(
        "a holder that returns does not go first",
        shares.Shares._place_of,
        "share.counter - ahead, not share.is_back",
        "share.counter + ahead, share.is_back",
        seed=2,
    ),
    Mutant(
        "decodes cost their holder nothing",
        prices.price_alone,
        "prices[payer] += times.price_of_decodes(count, drafts[payer])",
        "pass",
        seed=99,
    ),
    Mutant(
        "nobody skips a step",
        shared_steps.SharedStepBuilder._behind,
        "if share.counter <= most",
        "if True",
        seed=83,
    ),
    Mutant(
        "background work starts first",
        step_builder.StepBuilder._queue,
        "order[: len(order) - waiting.num_background]",
        "order[len(order) - waiting.num_background :] or order",
        seed=4,
    ),
    Mutant(
        "background work runs beside others",
        scheduler.Scheduler._builder,
        "and gives_way and self._ledger.background_gives_way()",
        "and False",
        seed=5,
    ),
    Mutant(
        "a prepared step of background work does not give way",
        scheduler.Scheduler._use_prepared,
        "and self._ledger.background_gives_way()",
        "and False",
        seed=15,
    ),
    Mutant(
        "background work gives way when no other runs, though one waits",
        ledger.Ledger.background_gives_way,
        "or (waiting and not waiting[0].is_background)",
        "or False",
        seed=5,
    ),
    Mutant(
        "prefixes of background work are evicted like others",
        ledger.Ledger.publish_computed,
        "bool(self.num_background) and seq.is_background",
        "False",
        seed=5,
    ),
    Mutant(
        "an encoder's step has background work before others",
        batch.BatchBuilder.build,
        "(others, background)",
        "(background, others)",
        seed=4,
    ),
    Mutant(
        "reasoning ends with its budget's margin or not at all",
        thought.Thought._decide,
        "self.num_tokens >= self._rules.tokens_max",
        "False",
        seed=3,
    ),
    Mutant(
        "a sentence's end does not end reasoning whose budget is spent",
        thought.Thought._decide,
        "or is_end",
        "or False",
        seed=26,
    ),
    Mutant(
        "the marker that ends the reasoning counts as reasoning",
        thought.Thought._leaves,
        "self.num_tokens -= was_counted",
        "pass",
        seed=26,
    ),
    Mutant(
        "the end of a choice loses the count of its reasoning",
        commit.Committer._take_result,
        "seq.num_reasoning = result.num_reasoning",
        "pass",
        seed=3,
    ),
    Mutant(
        "a worker learns of no reasoning",
        planned_step._admission,
        "request.reasoning,",
        "None,",
        seed=3,
        owner=planned_step,
    ),
    Mutant(
        "progress queues up behind progress that was not read",
        readers.Latest.put,
        "if not self._is_queued:",
        "if True:",
        seed=3,
    ),
    Mutant(
        "progress gives back a message slot",
        stream.RequestStream.receive,
        "event = event.take()",
        "event = event.take(); self.release(1)",
        seed=1,
    ),
    Mutant(
        "progress takes the place of another event",
        text_stream.TextStream.__init__,
        "self._num_choices + 1 + self.wants_progress",
        "self._num_choices + 1",
        seed=13,
    ),
    Mutant(
        "progress goes back when a prompt is preempted",
        progress.ProgressReports._look,
        "max(before.computed_tokens, prompt.computed)",
        "prompt.computed",
        seed=3,
    ),
    Mutant(
        "progress goes on after the first token",
        progress.ProgressReports._report,
        "if stream.tokens_done or stream.is_closed:",
        "if stream.is_closed:",
        seed=3,
    ),
    Mutant(
        "a client that reads hears nothing while nothing changes",
        progress.ProgressReports._report,
        "now >= shown_at + UNCHANGED_S",
        "False",
        seed=3,
    ),
)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Plant the bug for the time of the block.

    Raises:
        LookupError: The owner calls another function by this name, or the source lacks the piece.
    """
    original, owner = mutant.function, mutant.get_owner()
    if getattr(owner, original.__name__) is not original:
        raise LookupError(f"{mutant.title}: {owner} has another {original.__name__}")
    source = textwrap.dedent(inspect.getsource(original))
    if source.count(mutant.old) != 1:
        raise LookupError(f"{mutant.title}: {source.count(mutant.old)} × {mutant.old!r}")
    space: dict[str, Any] = {}
    changed = "from __future__ import annotations\n" + source.replace(mutant.old, mutant.new)
    # A function compiled outside its class has no `__class__` for a bare super().
    changed = changed.replace("super()", f"super({owner.__name__}, self)")
    exec(compile(changed, f"<{mutant.title}>", "exec"), original.__globals__, space)
    is_own = original.__name__ in vars(owner)
    setattr(owner, original.__name__, space[original.__name__])
    try:
        yield
    finally:
        if is_own:
            setattr(owner, original.__name__, original)
        else:
            delattr(owner, original.__name__)


def any_fails(checks: Iterable[Callable[[], object]]) -> bool:
    """Return whether one of the checks raises an AssertionError. Those after it are not called."""
    for check in checks:
        try:
            check()
        except AssertionError:
            return True
    return False


def shows(mutant: Mutant, seed: int) -> BaseException | None:
    """Return the watchers' error in a world with the bug, or None if they find nothing."""
    with planted(mutant):
        try:
            mutant.run(seed)
        except Exception as error:
            return error
    return None


def find(mutant: Mutant) -> tuple[int, BaseException] | None:
    """Return the first world that shows the bug, with its error, or None if there is none."""
    for seed in range(NUM_WORLDS):
        if (error := shows(mutant, seed)) is not None:
            return seed, error
    return None


def main(argv: list[str]) -> int:
    """Run the command line and return its exit status."""
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
