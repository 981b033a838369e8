"""Every phase of a request of every kind and every way to end it early, at both doors.

Whoever ends a request learns of the end at once, even while a step, a load or the preparation of
the request is held. All that the request held is free after that step and at most one more; the end
is counted once, other requests get right answers, and the next request works (D1, D18).

Rule: no wait counts seconds. A test waits until the server has done something, and the server's
clock moves when the test says so (`tests.support.fake_server`). test_signals.py has other ends of
the server, test_faults.py its own faults.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import pytest

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.client import stopped_reading
from tests.support.counting_calls import COUNT
from tests.support.doors import failure_at
from tests.support.ending_kinds import (
    COST_S,
    DRAW,
    ENCODE,
    LARGE,
    LATE,
    NEVER_S,
    TEXT,
    Kind,
    Phase,
)
from tests.support.ending_kinds import KINDS as SERVED
from tests.support.http_kinds import HTTP_KINDS, STREAM
from tests.support.proxy import proxy
from tests.support.raw_http2 import GET_STATS, RawClient
from tests.support.server import ROOT, children_of, fake
from tests.support.wire import (
    SERVING,
    ended,
    generate,
    health,
    stats,
    wait_idle,
    wait_serving,
    wait_until,
)

KINDS = (*SERVED, COUNT, *HTTP_KINDS)
LIMIT_S = 60.0  # seconds, for a wait that would never end
TIMEOUT_S = 1000.0
NUM_STEPS = 4  # after so many steps, each request with a seat has a result
NUM_LOOKS = 12  # a request is parked when its figures were the same so often
Code = grpc.StatusCode
NAMES = (f"ending-{number}" for number in itertools.count())
pytestmark = pytest.mark.quick(6)


def wait(condition, what):
    """Wait until the server has done something."""
    return wait_until(condition, LIMIT_S, what)


def control(server):
    """Return the stub of the service Control."""
    return stubs.ControlStub(server.channel)


@dataclass
class Place:
    """A phase of a kind, and a server whose fakes wait in this phase."""

    kind: Kind
    name: str
    phase: Phase
    server: object
    cold: object  # names of models that are not loaded yet
    is_holding: bool = False
    looks: list = field(default_factory=list)  # (is a request parked, number of steps) by each look

    @property
    def is_held(self):
        return self.phase.script is not None or self.name == "load"

    @property
    def is_before_queue(self):
        return self.name in ("load", "tokenize", "decode image", "compile")

    @property
    def door(self):
        return self.kind.door

    def call(self, fields, **options):
        """Return a call by the client that the server's tests share."""
        return self.kind.call(self.door.client(self.server), fields, **options)

    def fields(self):
        """Return the fields of a new request."""
        fields = {"model": self.kind.model} | self.kind.renewed(self.phase.fields)
        if self.name == "load":
            fields["model"] = next(self.cold)
        return fields

    def hold(self):
        """Let the fakes, or the process that decodes images, wait from now on."""
        self.is_holding = True
        self.looks.clear()
        self.server.tell("hold")
        if self.phase.holds_decoder:
            [decoder] = children_of(self.server.process.pid)
            os.kill(decoder, signal.SIGSTOP)

    def let_go(self):
        """Let the fakes, or that process, go on if they wait."""
        if not self.is_holding:
            return
        self.is_holding = False
        with contextlib.suppress(BrokenPipeError):  # the server has ended
            self.server.tell("let_go")
        if self.phase.holds_decoder:
            for decoder in children_of(self.server.process.pid):
                os.kill(decoder, signal.SIGCONT)

    def is_there(self, before):
        """Return whether the server's figures show that a request has come into the phase."""
        now = stats(self.server.channel)
        if self.name == "queued":
            self.admit()
            return now.waiting >= before.waiting + self.kind.num_waiting
        if self.name == "parked":
            # The request is parked and unparked in turn until all buffers to its client are full.
            self.looks.append((now.parked >= self.kind.num_parked, now.step_count))
            return self.looks[-NUM_LOOKS:] == [(True, now.step_count)] * NUM_LOOKS
        if self.phase.holds_decoder:
            return self.server.ask("image_bytes") > 0
        return not self.is_held or self.server.ask("held") == 1

    def are_running(self, count):
        """Return whether ``count`` requests have seats."""
        self.admit()
        return stats(self.server.channel).running >= count

    def admit(self):
        """Let one held step end if a command waits for it, so that a request that has arrived joins
        the queue. More steps would start requests from the queue."""
        if self.server.ask("held") == 1 and self.server.ask("posted"):
            self.server.tell("let_one_go")

    def explained(self, name):
        """Return Explain's answer for a request; None if it has not arrived."""
        with contextlib.suppress(grpc.RpcError):
            return control(self.server).Explain(pb.ExplainRequest(request_id=name))

    def is_explained(self, name):
        """Return whether Explain names the phase of a request."""
        found = self.explained(name)
        return (
            found is not None
            and found.state == self.phase.state
            and self.phase.waits_for in found.waiting_for
        )


@contextlib.contextmanager
def serving(kind, name, **engine):
    """Yield a place."""
    phase = kind.phases[name]
    models = kind.models({} if phase.script is None else phase.script | {"passes": phase.passes})
    [own] = [model for model in models if model["name"] == kind.model]
    script = {"load_s": COST_S, "passes": 0}
    late = [own | {"name": name, "lazy": True, "script": script} for name in LATE]
    limits = dict.fromkeys(("stall_timeout_s", "spawn_timeout_s", "step_timeout_s"), NEVER_S)
    with fake(
        models=models + late * (name == "load"),
        runner=kind.runner,
        engine=limits | phase.engine | engine,
        **kind.server,
    ) as server:
        wait_serving(server.channel)
        for model in models:
            wait(partial(is_served, server, model["name"]), "the models' loads")
        place = Place(kind, name, phase, server, iter(LATE))
        # This request starts the process that decodes images, if the phase needs it.
        ask_another(place, place.fields() if phase.holds_decoder else kind.after)
        yield place


def is_served(server, model):
    """Return whether a model serves."""
    return health(server.channel, f"model/{model}") == SERVING


def ask_another(place, fields):
    """Check that another request gets the right answer."""
    fields = {"model": place.kind.model} | fields
    with place.call(fields) as call:
        call.finish()
        place.kind.check(call, fields)


# Answers that are sent whole are prepared as streams are: only --full has all of their phases.
CASES = [
    pytest.param((kind, name), marks=[pytest.mark.full] * (name in kind.rare))
    for kind in KINDS
    for name in kind.phases
]


def named(case):
    """Return the name of a case for pytest."""
    return f"{case[0].name}-{case[1]}"


@pytest.fixture(scope="module", params=CASES, ids=named)
def place(request):
    """Yield a place in each phase of each kind of work."""
    with serving(*request.param) as one:
        yield one


@dataclass
class Asked:
    """A request in its phase: its call, and its client ``own`` through the proxy ``between``.
    ``ends`` are the server's counts of ends before it, ``steps`` those of steps once it came."""

    call: object
    own: object
    between: object
    fields: dict
    ends: dict
    steps: int


@contextlib.contextmanager
def holding(place, *, spares_others=True):
    """Let the server hold requests in the place's phase until the end of the block. In the phase
    "queued", other requests have all seats. They get right answers to the end, unless the test ends
    every request (``spares_others`` False)."""
    kind = place.kind.blocking
    own = {"model": kind.model}
    others = [own | fields for fields in kind.blockers]
    with contextlib.ExitStack() as stack:
        stack.callback(place.let_go)
        place.hold()
        calls = []
        if place.name == "queued":
            own = kind.door.client(place.server)
            asked = (kind.call(own, fields) for fields in others)
            calls += map(stack.enter_context, asked)
            wait(partial(place.are_running, len(calls)), "the others")
            for _ in range(NUM_STEPS):
                place.server.tell("let_one_go")
            for call in calls:
                kind.read_result(call)
            wait(lambda: place.server.ask("held") == 1, "the last of these steps")
        yield
        place.let_go()
        for call, fields in zip(calls, others, strict=False):
            call.finish()
            if spares_others:
                kind.check(call, fields)
            else:
                assert call.heard.error is not None


@contextlib.contextmanager
def arriving(place, **options):
    """Yield a new request once it is in the place's phase."""
    server, fields = place.server, place.fields() | {"request_id": next(NAMES)}
    before, ends = stats(server.channel), ended(server.channel)
    door, is_small = place.door, place.phase.is_unread
    with (
        proxy(door.address(server), door.proxy(is_small)) as between,
        door.connect(between.address, is_small=is_small) as own,
        place.kind.call(own, fields, **options) as call,
    ):
        if is_small:
            assert call.read() is not None
        wait(lambda: place.is_there(before), place.name)
        wait(lambda: place.is_explained(fields["request_id"]), "Explain")
        yield Asked(call, own, between, fields, ends, stats(server.channel).step_count)


@contextlib.contextmanager
def in_phase(place, *, spares_others=True, **options):
    """Yield a new request in the place's phase; check that nothing is left of it afterwards."""
    server = place.server
    wait_idle(server.channel)
    with holding(place, spares_others=spares_others), arriving(place, **options) as asked:
        yield asked
    wait_idle(server.channel, LIMIT_S)
    wait(lambda: server.ask("image_bytes") == 0, "the memory of images")
    if place.name != "load":  # an engine has no counts of replicas that have ended
        wait(lambda: not unbilled(server), "the records")
    ask_another(place, place.kind.after)
    if place.name == "load":  # the load was not cancelled
        model = asked.fields["model"]
        ask_another(place, place.kind.after | {"model": model})
        assert server.log.count(f"model {model} is ready") == 1


def check_end(place, asked, how):
    """Check that the end is counted once, as ``how``."""
    channel = place.server.channel
    wait(lambda: ended(channel) != asked.ends, "the end")
    assert ended(channel) == asked.ends | {how: asked.ends.get(how, 0) + 1}


def unbilled(server):
    """Return in what the records of all requests so far differ from the counters; "" if they agree.
    A record comes a moment after its request's end."""
    used = control(server).GetUsage(pb.GetUsageRequest()).sums
    totals = control(server).GetStats(pb.GetStatsRequest()).totals
    counts = totals.requests_total
    ends = sum(getattr(counts, field.name) for field in counts.DESCRIPTOR.fields)
    models = stubs.ModelsStub(server.channel).ListModels(pb.ListModelsRequest()).models
    busy_s = sum(replica.busy.ToNanoseconds() for model in models for replica in model.replicas)
    found = {
        "requests": (sum(one.requests for one in used), ends),
        "succeeded": (sum(one.succeeded for one in used), counts.finished),
    }
    for name in ("prompt_tokens", "completion_tokens"):
        billed = sum(getattr(one.usage, name) for one in used)
        found[name] = (billed, getattr(totals, f"{name}_total"))
    billed_s = sum(one.usage.step.ToNanoseconds() for one in used)
    if abs(billed_s - busy_s) > 0.001 * busy_s:
        return f"{billed_s} ns of steps are billed, of {busy_s}"
    wrong = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
    return str(wrong or "")


def check_free(place, asked):
    """Check that all is free after the step in flight and at most one more."""
    place.let_go()
    if place.name != "queued":
        after = wait_idle(place.server.channel, LIMIT_S)
        # A stopped reader's choices go on until all buffers to its client are full.
        assert after.step_count - asked.steps <= 2 or place.name == "parked"


def failure(place, asked):
    """Read a request's answer to its end; check what has come, and return the `Failure`."""
    found = failure_at(place.door, asked.call)
    place.kind.check_begun(asked.call, asked.fields)
    return found


@pytest.mark.parametrize("how", ["cancel", "close", "reset"])
def test_a_client_that_leaves(place, how):
    with in_phase(place) as asked:
        {
            "cancel": asked.call.cancel,
            "close": asked.own.close,
            "reset": asked.between.reset,
        }[how]()
        check_end(place, asked, "cancelled")
        check_free(place, asked)


def test_an_operators_abort(place):
    with in_phase(place) as asked:
        request = pb.AbortRequest(request_ids=[asked.fields["request_id"]])
        [result] = control(place.server).Abort(request).results
        assert result.outcome == pb.ABORT_OUTCOME_ABORTED
        check_end(place, asked, "aborted")
        assert failure(place, asked).has(Code.ABORTED, "ABORTED")
        check_free(place, asked)


def test_a_pause_that_aborts(place):
    """A request that has not reached the scheduler yet is refused when it does. A request in the
    phase "write" ends whole, as the scheduler is done with it."""
    with in_phase(place, spares_others=False) as asked:
        control(place.server).Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_ABORT))
        place.let_go()  # the scheduler gets the pause between two steps
        try:
            if place.is_before_queue:
                check_end(place, asked, "refused")
                expected = (Code.UNAVAILABLE, "PAUSED")
            elif place.name != "write":
                wait(lambda: ended(place.server.channel) != asked.ends, "the end")
                now = ended(place.server.channel)
                assert now | {"aborted": 0} == asked.ends | {"aborted": 0}
                expected = (Code.ABORTED, "ABORTED")
            if place.name == "write":
                asked.call.finish()
                place.kind.check(asked.call, asked.fields)
            else:
                assert failure(place, asked).has(*expected)
        finally:
            control(place.server).Resume(pb.ResumeRequest())


def test_a_deadline(place):
    """The client itself has no timer; the server counts the missed deadline once, by phase.

    Red if the end is counted as a cancel, or for another phase (`Supervisor._count`).
    """
    server, name = place.server, place.phase.counted_as or place.name
    before = server.ask("deadlines")
    with in_phase(place, server_timeout=TIMEOUT_S) as asked:
        server.tell("skip")
        check_end(place, asked, "deadline")
        assert server.ask("deadlines") == before | {name: before.get(name, 0) + 1}
        found = failure(place, asked)
        assert found.has(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        num_done = place.kind.check_begun(asked.call, asked.fields)
        assert found.phase == name
        assert num_done in (None, found.num_done)
        check_free(place, asked)


# ---- clients as processes ----------------------------------------------------------------------


@contextlib.contextmanager
def client_process(place, fields):
    """Yield a client in a process of its own: `triolet generate`, which always reads, or one that
    stops reading, so that the server parks its request."""
    if place.name == "parked":
        with stopped_reading(place.server.address, **fields) as client:
            yield client
        return
    command = ["generate", fields.get("text", "x"), "--server", place.server.address]
    command += ["--max-tokens", str(fields["max_tokens"]), "--model", fields["model"]]
    command += ["--n", str(fields["n"])]
    with tempfile.TemporaryDirectory() as folder:
        if "chat" in fields:
            command.append("--chat")
            for number, part in enumerate(fields["chat"]["messages"][0]["parts"]):
                path = Path(folder, f"{number}.png")
                path.write_bytes(part["image"])
                command += ["--image", str(path)]
        argv = [sys.executable, "-m", "grpc_service", *command]
        with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL) as client:
            try:
                yield client
            finally:
                client.kill()


@pytest.mark.parametrize("name", TEXT.phases.keys() - {"compile"})  # no flag has a constraint
def test_a_client_process_that_is_killed(name):
    """Red in the phase "parked" if a call that still has events to write leaves its request running
    (`CallWriter._cancel`)."""
    with serving(TEXT, name) as place, holding(place):
        server, fields = place.server, place.fields()
        before, ends, calls = stats(server.channel), ended(server.channel), server.ask("calls")
        with client_process(place, fields) as client:
            wait(lambda: server.ask("calls") == calls + 1, "the call")
            wait(lambda: place.is_there(before), name)
            steps = stats(server.channel).step_count
            client.kill()
            asked = Asked(None, None, None, fields, ends, steps)
            check_end(place, asked, "cancelled")
        check_free(place, asked)


# ---- readers that stop -------------------------------------------------------------------------

STALLS = {  # the kind, the request's fields, and the stream's message slots
    "text": (TEXT, TEXT.phases["parked"].fields, 16),
    "http text": (STREAM, STREAM.phases["parked"].fields, 16),
    "encode": (ENCODE, ENCODE.phases["parked"].fields, 8),
    "denoise": (DRAW, LARGE | {"steps": 100, "preview_every": 1, "n": 1}, 4),
    "decode": (DRAW, LARGE | {"steps": 1}, 2),
    "write": (DRAW, LARGE | {"steps": 1}, 256),
    "count": (COUNT, COUNT.phases["parked"].fields, 8),
}


@pytest.mark.parametrize("name", STALLS)
def test_a_reader_that_stalls_is_ended(name):
    """In the case "write" there are enough slots, and the images wait for the reader."""
    kind, fields, buffer = STALLS[name]
    fields = {"model": kind.model} | fields
    engine = {"stream_buffer": buffer, "stall_timeout_s": 0.5}
    with (
        serving(kind, "parked", **engine) as place,
        kind.door.connect(kind.door.address(place.server), is_small=True) as own,
        kind.call(own, fields) as call,
    ):
        channel = place.server.channel
        assert call.read() is not None
        wait(lambda: ended(channel).get("stalled"), "the end")
        wait_idle(channel, LIMIT_S)
        found = failure_at(kind.door, call)
        # Over HTTP the client may read on too late (`FAILURE_PATIENCE_S`).
        assert found.has(Code.ABORTED, "READER_STALLED") or (found.is_cut and kind is STREAM)
        kind.check_begun(call, fields)
        ask_another(place, kind.after)


# ---- drains ------------------------------------------------------------------------------------


@contextlib.contextmanager
def in_drain(case, code, number=signal.SIGTERM, **options):
    """Yield a place, whose server has got a signal to end while a request is in its phase, and the
    request; check the server's exit code."""
    with serving(*case) as place:
        with holding(place, **options), arriving(place) as asked:
            place.server.signal(number)
            wait(lambda: "draining" in place.server.log, "the drain")
            yield place, asked
        assert place.server.wait() == code


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize(("how", "code"), [("timeout", 75), ("signal", 128 + signal.SIGINT)])
def test_a_drain_cuts_a_request_whatever_its_phase(how, code, case):
    """The drain's timeout or a second signal cuts it at once, with a status, and the exit code
    names the cause. The server ends once the step in flight is over."""
    first = signal.SIGINT if how == "timeout" else signal.SIGTERM
    with in_drain(case, code, first, spares_others=False) as (place, asked):
        if how == "timeout":
            place.server.tell("skip")
        else:
            place.server.signal(signal.SIGINT)
        found = failure(place, asked)
        if not place.phase.is_unread:  # no status reaches a client whose window is closed (D1)
            assert found.has(Code.UNAVAILABLE, "SHUTTING_DOWN")


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_drain_lets_a_request_end_whole_whatever_its_phase(case):
    """New requests are refused during the drain."""
    with in_drain(case, 0) as (place, asked):
        kind = place.kind
        fields = {"model": kind.model} | kind.after

        def is_refused():
            with place.call(fields) as call:
                if call.finish().error is None:
                    return False
                found = failure_at(place.door, call)
            assert found.is_cut or found.has(Code.UNAVAILABLE, "SHUTTING_DOWN")
            return True

        if not place.is_held:  # else a call that comes before the drain waits for a held step
            wait(is_refused, "the refusal")
        place.let_go()
        asked.call.finish()
        kind.check(asked.call, asked.fields)


@pytest.mark.parametrize("kind", [TEXT, STREAM], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["decode image", "encode_image"])
def test_a_drained_request_with_images_leaves_nothing(name, kind):
    with serving(kind, name) as place, RawClient(place.server.address) as connected:
        server = place.server
        connected.ask(GET_STATS)
        living = server.ask("tasks")
        with holding(place), arriving(place) as asked:
            assert server.ask("image_bytes")
            drain = control(server).Drain.future(pb.DrainRequest())
            if not place.is_held:  # else a call that comes before the drain waits for a held step
                wait(lambda: generate(server.channel, max_tokens=1).error, "the drain")
            place.let_go()
            asked.call.finish()
            kind.check(asked.call, asked.fields)
            drain.result()
        after = pb.GetStatsResponse.FromString(connected.ask(GET_STATS)).totals
        assert not after.running + after.waiting + after.parked
        assert after.free_blocks == after.total_blocks
        assert [field.name for field, _ in after.requests_total.ListFields()] == ["finished"]
        wait(lambda: server.ask("image_bytes") == 0, "the memory of images")
        wait(lambda: server.ask("tasks")["trio_tasks"] <= living["trio_tasks"], "the tasks")


# ---- requests that are over --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("how", ["cancel", "close", "reset", "abort", "pause", "deadline"])
def test_ending_a_request_that_is_over_does_nothing(kind, how):
    fields = {"model": kind.model, "request_id": "x"} | kind.after
    with (
        serving(kind, "queued") as place,
        proxy(kind.door.address(place.server)) as between,
        kind.door.connect(between.address) as own,
        kind.call(own, fields, server_timeout=TIMEOUT_S) as call,
    ):
        server = place.server
        call.finish()
        kind.check(call, fields)
        if how == "abort":
            request = pb.AbortRequest(request_ids=["x"])
            [one] = control(server).Abort(request).results
            assert one.outcome == pb.ABORT_OUTCOME_ALREADY_ENDED
        elif how == "pause":
            control(server).Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_ABORT))
            control(server).Resume(pb.ResumeRequest())
        elif how == "deadline":
            server.tell("skip")
        else:
            {"cancel": call.cancel, "close": own.close, "reset": between.reset}[how]()
        ask_another(place, kind.after)
        assert ended(server.channel) == {"finished": 3}
        wait_idle(server.channel)
