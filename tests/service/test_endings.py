"""Every phase of a request and every way to end it from outside, over real gRPC.

Whoever ends it learns of the end at once, all choices end, the blocks are free after at most a
step, the end is counted once, and the next request works (D1, D18).

test_signals.py has what ends the server, test_faults.py what the server does to itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.simulator.encode_oracle import image_file
from tests.support.client import stopped_reading
from tests.support.core_driver import expected_tokens
from tests.support.proxy import proxy
from tests.support.raw_http2 import GET_STATS, RawClient
from tests.support.server import ROOT, fake
from tests.support.wire import (
    SMALL_WINDOW,
    Generation,
    connect,
    details,
    ended,
    generate,
    list_models,
    reason,
    stats,
    wait_idle,
    wait_serving,
    wait_until,
)

STEP_S = 0.1
SLOW_S = 3.0  # seconds of loading or encoding, in these phases
TIMEOUT_S = 1.0
AT_ONCE_S = 1.5  # generous for a busy machine, and half of what waiting for a thread would take
LONG = 2000
LATE = [f"late{i}" for i in range(9)]  # a model that is not loaded yet, for every way to end
LOADING = pb.MODEL_STATE_LOADING
Code = grpc.StatusCode


@dataclass
class Phase:
    """How a request gets into a phase, and how the server's totals show that it is there."""

    request: dict
    is_there: object
    server: dict = field(default_factory=dict)
    options: tuple = ()
    blocked: bool = False
    counted_as: str = ""  # the server's own name for the phase, if it is another one


def is_queued(server, before, request):
    """Return whether the request waits in the queue."""
    return stats(server.channel).waiting == 1


def is_loading(server, before, request):
    """Return whether the request's model loads."""
    states = {model.name: model.state for model in list_models(server.channel)}
    return states[request["model"]] == LOADING


def is_tokenising(server, before, request):
    """Return whether the request is tokenised, after a moment."""
    time.sleep(0.4)  # only the status at its deadline shows this phase, which a test below reads
    now = stats(server.channel)
    return not now.running + now.waiting


def is_prefilling(server, before, request):
    """Return whether the request's prompt is being computed."""
    now = stats(server.channel)
    return now.step_count - before.step_count >= 3 and now.running == 1


def is_decoding_images(server, before, request):
    """Return whether the request's images are decoded: only requests with a name can be asked."""
    if "request_id" not in request:
        time.sleep(0.4)
        now = stats(server.channel)
        return not now.running + now.waiting
    asked = pb.ExplainRequest(request_id=request["request_id"])
    try:
        return "images" in control(server.channel).Explain(asked, timeout=5).waiting_for
    except grpc.RpcError:  # it has not arrived
        return False


def is_decoding(server, before, request):
    """Return whether the request has tokens."""
    made = stats(server.channel).completion_tokens_total - before.completion_tokens_total
    return made >= 4


def is_parked(server, before, request):
    """Return whether all choices of the request are parked."""
    return stats(server.channel).parked == request.get("n", 1)


SLOW = {
    "script": {"step_s": STEP_S},
    "runner": {"max_model_len": 8192, "num_blocks": 2048},
    "engine": {"max_num_seqs": 2, "max_num_batched_tokens": 16},
}
SEES = [{"name": "fake", "capability": "vision"}]
NUM_IMAGES = 30


def new_images():
    """Return images that no server has seen: those that come again are not decoded again."""
    return [image_file(os.urandom(48)) for _ in range(NUM_IMAGES)]


def shown():
    """Return a chat with such images."""
    return {"messages": [{"role": "user", "parts": [{"image": one} for one in new_images()]}]}


PHASES = {
    "queued": Phase({"text": "x"}, is_queued, SLOW, blocked=True),
    "load": Phase(
        {"text": "x"},
        is_loading,
        {
            "models": [
                {"name": "fake"},
                *({"name": name, "lazy": True, "script": {"load_s": SLOW_S}} for name in LATE),
            ]
        },
    ),
    "tokenize": Phase(
        {"text": "x" * 5000}, is_tokenising, SLOW | {"script": {"encode_s": SLOW_S, "step_s": 0.01}}
    ),
    "prefill": Phase({"text": "x" * 1500}, is_prefilling, SLOW),
    "decode image": Phase(
        {"chat": shown()},
        is_decoding_images,
        SLOW | {"models": SEES, "script": {"decode_s": SLOW_S / NUM_IMAGES}},
    ),
    # Each image costs 2 to 14 tokens, so that a step has one or a few.
    "encode image": Phase(
        {"chat": shown()},
        is_prefilling,
        SLOW | {"models": SEES, "script": {"image_s": STEP_S / 10}},
        counted_as="prefill",
    ),
    "decode": Phase({"text": "x"}, is_decoding, SLOW),
    "parked": Phase({"text": "x"}, is_parked, {"engine": {"stream_buffer": 16}}, SMALL_WINDOW),
}


@pytest.fixture(scope="module", params=PHASES)
def place(request):
    """Return a phase, a server slow enough to observe it, and names of models not loaded yet."""
    phase = PHASES[request.param]
    with fake(**phase.server) as server:
        wait_serving(server.channel)
        server.cold = iter(LATE)
        yield request.param, phase, server


@contextlib.contextmanager
def blockers(channel, are_wanted, *, are_spared=True):
    """Run two generations that take both seats.

    What they get is right to the end. They live on unless the test ends every request.
    """
    if not are_wanted:
        yield 0
        return
    with contextlib.ExitStack() as stack:
        calls = [
            stack.enter_context(Generation(channel, prompt_ids=[i], max_tokens=LONG))
            for i in (1, 2)
        ]
        for call in calls:
            call.read_deltas(1)
        yield 2
        for number, call in enumerate(calls, 1):
            if are_spared:
                call.read_deltas(len(call.heard.deltas) + 2)
            else:
                assert call.finish().error is not None
            ids = call.heard.ids()
            assert ids == expected_tokens([number], count=len(ids))


NAMES = (f"ending-{number}" for number in itertools.count())


@contextlib.contextmanager
def in_phase(place, *, spares_others=True, **more):
    """Yield a request that has come into the phase: call, channel, and the counts before."""
    name, phase, server = place
    fields = phase.request | {"n": 2, "max_tokens": LONG, "request_id": next(NAMES)} | more
    if name == "load":
        fields["model"] = next(server.cold)
    if "chat" in fields:
        fields["chat"] = shown()
    channel = server.channel
    wait_idle(channel)
    with blockers(channel, phase.blocked, are_spared=spares_others) as num_others:
        before, ends = stats(channel), ended(channel)
        with (
            proxy(server.address) as between,
            connect(between.address, *phase.options) as own,
            Generation(own, **fields) as call,
        ):
            if name == "parked":
                call.read_deltas(1)
            wait_until(lambda: phase.is_there(server, before, fields), 15, name)
            yield Asked(call, own, between, fields, ends, stats(channel).step_count)
        if num_others and spares_others:
            now = wait_until(lambda: (s := stats(channel)).waiting == 0 and s, 2)
            assert (now.running, now.parked) == (num_others, 0)
    wait_idle(channel)
    wait_until(lambda: server.ask("image_bytes") == 0, 5, "the memory of images")
    assert generate(channel, max_tokens=3).error is None


@dataclass
class Asked:
    """A request in its phase: its call and channel, and the counts before it."""

    call: Generation
    own: grpc.Channel
    between: object
    fields: dict
    ends: dict
    steps: int


def check_end(place, asked, how, *, within_s=AT_ONCE_S, is_now=True):
    """Check that the end is counted once, as ``how``, and frees everything.

    If the end is due now, the request is gone after the step in flight and one that had begun.
    """
    name, phase, server = place
    wait_until(lambda: ended(server.channel) != asked.ends, within_s, "the end")
    assert ended(server.channel) == asked.ends | {how: asked.ends.get(how, 0) + 1}
    if not phase.blocked:
        after = wait_idle(server.channel, 2)
        assert after.step_count - asked.steps <= 2 or name == "parked" or not is_now


def control(channel):
    """Return the stub of the service Control."""
    return stubs.ControlStub(channel)


@pytest.mark.parametrize("how", ["cancel", "close", "reset"])
def test_a_client_that_leaves(place, how):
    """R9, R13, R152, R166, R179, R207, R208."""
    with in_phase(place) as asked:
        {
            "cancel": asked.call.call.cancel,
            "close": asked.own.close,
            "reset": asked.between.reset,
        }[how]()
        check_end(place, asked, "cancelled")


@contextlib.contextmanager
def image_arguments(are_wanted):
    """Yield arguments that send `new_images` from files, none unless they are wanted."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.png") for number in range(NUM_IMAGES * are_wanted)]
        for path, data in zip(paths, new_images(), strict=False):
            path.write_bytes(data)
        named = [word for path in paths for word in ("--image", str(path))]
        yield ["--chat", *named] if are_wanted else []


@contextlib.contextmanager
def client_process(place, fields):
    """Yield a client in a process of its own: `triolet generate`, which always reads, or a client
    that stops reading, so that the server parks its request."""
    name, _, server = place
    if name == "parked":
        with stopped_reading(server.address, max_tokens=LONG, **fields) as client:
            yield client
        return
    text = fields.get("text", "x")
    command = ["generate", text, "--server", server.address, "--max-tokens", str(LONG)]
    if name == "load":
        command += ["--model", fields["model"]]
    with (
        image_arguments("chat" in fields) as images,
        subprocess.Popen(
            [sys.executable, "-m", "grpc_service", *command, *images],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        ) as client,
    ):
        try:
            yield client
        finally:
            client.kill()


def test_a_client_process_that_is_killed(place):
    """R166. Red in the phase "parked" if a writer that still has events leaves its request running
    (`CallWriter._cancel`)."""
    name, phase, server = place
    wait_idle(server.channel)
    with blockers(server.channel, phase.blocked) as num_others:
        before, ends = stats(server.channel), ended(server.channel)
        wait_until(lambda: server.ask("calls") == num_others, 20, "the end of earlier calls")
        fields = dict(phase.request)
        if name == "load":
            fields["model"] = next(server.cold)
        with client_process(place, fields) as client:
            wait_until(lambda: server.ask("calls") == num_others + 1, 20, "the call")
            wait_until(lambda: phase.is_there(server, before, fields), 20, name)
            client.kill()
        asked = Asked(None, None, None, fields, ends, stats(server.channel).step_count)
        check_end(place, asked, "cancelled")
    wait_idle(server.channel)


def test_an_operators_abort(place):
    """R6."""
    with in_phase(place) as asked:
        start = time.monotonic()
        results = (
            control(place[2].channel)
            .Abort(pb.AbortRequest(request_ids=[asked.fields["request_id"]]), timeout=5)
            .results
        )
        assert [one.outcome for one in results] == [pb.ABORT_OUTCOME_ABORTED]
        check_end(place, asked, "aborted")
        heard = asked.call.finish()
        assert time.monotonic() - start < AT_ONCE_S
        assert heard.error.code() is Code.ABORTED
        assert reason(heard.error) == "ABORTED"
        for choice in range(2):
            ids = heard.ids(choice)
            # of images no token is made before the end
            prompt = [b + 1 for b in place[1].request.get("text", "").encode()]
            assert ids == expected_tokens(prompt, count=len(ids), choice=choice)


def test_a_pause_that_aborts(place):
    """A request that has not reached the scheduler yet is refused when it does."""
    name, _, server = place
    with in_phase(place, spares_others=False) as asked:
        control(server.channel).Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_ABORT), timeout=5)
        try:
            if name in ("load", "tokenize", "decode image"):
                # another test's text may be in the one thread that encodes
                check_end(place, asked, "refused", within_s=2 * SLOW_S + AT_ONCE_S)
                expected = (Code.UNAVAILABLE, "PAUSED")
            else:
                wait_until(lambda: ended(server.channel).get("aborted"), AT_ONCE_S)
                expected = (Code.ABORTED, "ABORTED")
            error = asked.call.finish().error
            assert (error.code(), reason(error)) == expected
        finally:
            control(server.channel).Resume(pb.ResumeRequest(), timeout=5)


def test_a_deadline(place):
    """R206."""
    name, phase, server = place
    with contextlib.ExitStack() as stack:
        if "prefill" in (
            name,
            phase.counted_as,
        ):  # a server without a measured step; else it refuses
            server = stack.enter_context(fake(**phase.server))
            wait_serving(server.channel)
            if "chat" in phase.request:  # the first image starts the process that decodes
                request = pb.TokenizeRequest(chat=shown())
                stubs.InferenceStub(server.channel).Tokenize(request, timeout=60)
        check_deadline((name, phase, server))


def check_deadline(place):
    """Check a deadline that the client leaves to the server, which counts it once, by its phase.

    Red if the end is counted as a cancel, or for another phase (`Supervisor._count`).
    """
    name, phase, server = place
    name = phase.counted_as or name
    before = server.ask("deadlines")
    with in_phase(place, server_timeout=TIMEOUT_S) as asked:
        start = time.monotonic()
        limit = TIMEOUT_S + AT_ONCE_S
        check_end(place, asked, "deadline", within_s=limit, is_now=False)
        assert server.ask("deadlines") == before | {name: before.get(name, 0) + 1}
        heard = asked.call.finish()
        assert time.monotonic() - start < limit
        assert heard.error.code() is Code.DEADLINE_EXCEEDED
        # The RPC library ends a call 20 ms after the engine. On a busy machine, and where events
        # wait for the reader, its status may be the first. It knows no phase; the engine's does.
        if heard.error.details() != "the deadline passed":
            info = details(heard.error)["ErrorInfo"]
            assert info.metadata["phase"] == name
            assert int(info.metadata["tokens_done"]) == sum(map(len, map(heard.ids, range(2))))


@pytest.mark.parametrize("name", ["decode image", "encode image"])
def test_a_drain_lets_a_request_with_images_end_whole_and_refuses_new_ones(name):
    """R167."""
    phase, fields = PHASES[name], {"chat": shown(), "n": 2, "max_tokens": 5, "request_id": "x"}
    with fake(models=SEES) as other:
        wait_serving(other.channel)
        wanted = generate(other.channel, **fields)
    with fake(**phase.server) as server:
        channel = server.channel
        wait_serving(channel)
        wait_idle(channel)
        before, connected = stats(channel), RawClient(server.address)
        connected.ask(GET_STATS)
        living = server.ask("tasks")
        with connected, Generation(channel, **fields) as call:
            wait_until(lambda: phase.is_there(server, before, fields), 15, name)
            assert server.ask("image_bytes")
            drain = control(channel).Drain.future(pb.DrainRequest(), timeout=30)
            refused = wait_until(lambda: generate(channel, max_tokens=1).error, 10, "the drain")
            assert refused.code() is Code.UNAVAILABLE
            heard = call.finish()
            assert heard.error is None
            assert [heard.ids(choice) for choice in range(2)] == [
                wanted.ids(choice) for choice in range(2)
            ]
            drain.result()
            after = pb.GetStatsResponse.FromString(connected.ask(GET_STATS)).totals
            assert not after.running + after.waiting + after.parked
            assert after.free_blocks == after.total_blocks
            assert [field.name for field, _ in after.requests_total.ListFields()] == ["finished"]
        wait_until(lambda: server.ask("image_bytes") == 0, 5, "the memory of images")
        wait_until(lambda: server.ask("tasks")["trio_tasks"] <= living["trio_tasks"], 5, "tasks")
        assert server.stop() == 0


@pytest.mark.parametrize("how", ["cancel", "close", "reset", "abort", "pause", "deadline"])
def test_ending_a_request_that_is_over_does_nothing(how):
    with fake() as server, proxy(server.address) as between, connect(between.address) as own:
        wait_serving(server.channel)
        timeout = 0.8 if how == "deadline" else None
        with Generation(own, prompt_ids=[5], max_tokens=4, request_id="x", timeout=timeout) as call:
            heard = call.finish()
            assert heard.error is None
            if how == "abort":
                request = pb.AbortRequest(request_ids=["x"])
                [one] = control(server.channel).Abort(request, timeout=5).results
                assert one.outcome == pb.ABORT_OUTCOME_ALREADY_ENDED
            elif how == "pause":
                request = pb.PauseRequest(mode=pb.PAUSE_MODE_ABORT)
                control(server.channel).Pause(request, timeout=5)
                control(server.channel).Resume(pb.ResumeRequest(), timeout=5)
            elif how == "deadline":
                time.sleep(1.0)
            else:
                {"cancel": call.call.cancel, "close": own.close, "reset": between.reset}[how]()
        assert generate(server.channel, prompt_ids=[6], max_tokens=2).error is None
        assert ended(server.channel) == {"finished": 2}
        wait_idle(server.channel)
