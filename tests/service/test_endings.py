"""Every phase of a request × every way it can be ended from outside, over real gRPC: who ended it
hears of it at once, all of its choices end, its blocks are free after at most a step, it is counted
once, and the next request works (R1-R23, R201-R211; D1, D18).

What ends the server is in test_signals.py, what the server does to itself in test_faults.py.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import time
from dataclasses import dataclass, field

import grpc
import pytest

from grpc_service._generated.triolet.v1 import common_pb2, control_pb2, control_pb2_grpc
from tests.support.core_driver import expected_tokens
from tests.support.proxy import proxy
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
SLOW_S = 3.0  # what loading and encoding take, where that is the phase
TIMEOUT_S = 1.0
AT_ONCE_S = 1.5  # generous for a busy machine, and half of what waiting for a thread would take
LONG = 2000
LATE = [f"late{i}" for i in range(9)]  # a cold model for every way
LOADING = common_pb2.MODEL_STATE_LOADING
Code = grpc.StatusCode


@dataclass
class Phase:
    """How a request gets into a phase, and how one sees that it is there."""

    request: dict
    is_there: object
    server: dict = field(default_factory=dict)
    options: tuple = ()
    blocked: bool = False


def is_queued(server, before, request):
    return stats(server.channel).waiting == 1


def is_loading(server, before, request):
    states = {model.name: model.state for model in list_models(server.channel)}
    return states[request["model"]] == LOADING


def is_tokenising(server, before, request):
    time.sleep(0.4)  # nothing shows it but its own deadline's status, which a test below reads
    now = stats(server.channel)
    return not now.running + now.waiting


def is_prefilling(server, before, request):
    now = stats(server.channel)
    return now.step_count - before.step_count >= 3 and now.running == 1


def is_decoding(server, before, request):
    made = stats(server.channel).completion_tokens_total - before.completion_tokens_total
    return made >= 4


def is_parked(server, before, request):
    return stats(server.channel).parked == request.get("n", 1)


SLOW = {
    "script": {"step_s": STEP_S},
    "runner": {"max_model_len": 8192, "num_blocks": 2048},
    "engine": {"max_num_seqs": 2, "max_num_batched_tokens": 16},
}
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
    "decode": Phase({"text": "x"}, is_decoding, SLOW),
    "parked": Phase({"text": "x"}, is_parked, {"engine": {"stream_buffer": 16}}, SMALL_WINDOW),
}


@pytest.fixture(scope="module", params=PHASES)
def place(request):
    """A phase, a server that gives time to look into it, and names of models still cold."""
    phase = PHASES[request.param]
    with fake(**phase.server) as server:
        wait_serving(server.channel)
        server.cold = iter(LATE)
        yield request.param, phase, server


@contextlib.contextmanager
def blockers(channel, are_wanted, *, are_spared=True):
    """Two generations that take both seats; what they get is right to the end, and unless that is
    everybody's they live on."""
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
    """A request that has come into the phase: the call, its channel, and the counts before."""
    name, phase, server = place
    fields = phase.request | {"n": 2, "max_tokens": LONG, "request_id": next(NAMES)} | more
    if name == "load":
        fields["model"] = next(server.cold)
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
    assert generate(channel, max_tokens=3).error is None


@dataclass
class Asked:
    call: Generation
    own: grpc.Channel
    between: object
    fields: dict
    ends: dict
    steps: int


def check_end(place, asked, how, *, within_s=AT_ONCE_S, is_now=True):
    """It is counted once, as ``how``, and gone after the step in flight and one that had begun, if
    the end was to come now."""
    name, phase, server = place
    wait_until(lambda: ended(server.channel) != asked.ends, within_s, "the end")
    assert ended(server.channel) == asked.ends | {how: asked.ends.get(how, 0) + 1}
    if not phase.blocked:
        after = wait_idle(server.channel, 2)
        assert after.step_count - asked.steps <= 2 or name == "parked" or not is_now


def control(channel):
    return control_pb2_grpc.ControlStub(channel)


@pytest.mark.parametrize("how", ["cancel", "close", "reset"])
def test_a_client_that_goes(place, how):
    with in_phase(place) as asked:
        {
            "cancel": asked.call.call.cancel,
            "close": asked.own.close,
            "reset": asked.between.reset,
        }[how]()
        check_end(place, asked, "cancelled")


def test_a_client_process_that_is_killed(place):
    name, phase, server = place
    if name == "parked":
        return  # test_peers.py kills one that has stopped reading; this command always reads
    wait_idle(server.channel)
    with blockers(server.channel, phase.blocked):
        before, ends = stats(server.channel), ended(server.channel)
        fields = dict(phase.request)
        more = []
        if name == "load":
            fields["model"] = next(server.cold)
            more = ["--model", fields["model"]]
        command = ("generate", fields["text"], "--server", server.address, *more)
        with subprocess.Popen(
            [sys.executable, "-m", "grpc_service", *command, "--max-tokens", str(LONG)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        ) as client:
            try:
                if name == "tokenize":
                    time.sleep(1.0)  # it has to start first
                wait_until(lambda: phase.is_there(server, before, fields), 20, name)
            finally:
                client.kill()
        asked = Asked(None, None, None, fields, ends, stats(server.channel).step_count)
        check_end(place, asked, "cancelled")
    wait_idle(server.channel)


def test_an_operators_abort(place):
    with in_phase(place) as asked:
        start = time.monotonic()
        results = (
            control(place[2].channel)
            .Abort(control_pb2.AbortRequest(request_ids=[asked.fields["request_id"]]), timeout=5)
            .results
        )
        assert [one.outcome for one in results] == [control_pb2.ABORT_OUTCOME_ABORTED]
        check_end(place, asked, "aborted")
        heard = asked.call.finish()
        assert time.monotonic() - start < AT_ONCE_S
        assert heard.error.code() is Code.ABORTED
        assert reason(heard.error) == "ABORTED"
        for choice in range(2):
            ids = heard.ids(choice)
            prompt = [b + 1 for b in place[1].request["text"].encode()]
            assert ids == expected_tokens(prompt, count=len(ids), choice=choice)


def test_a_pause_that_aborts(place):
    """What has not come to the scheduler yet is not refused before it does."""
    name, _, server = place
    with in_phase(place, spares_others=False) as asked:
        control(server.channel).Pause(
            control_pb2.PauseRequest(mode=control_pb2.PAUSE_MODE_ABORT), timeout=5
        )
        try:
            if name in ("load", "tokenize"):
                # another test's text may be in the one thread that encodes
                check_end(place, asked, "refused", within_s=2 * SLOW_S + AT_ONCE_S)
                expected = (Code.UNAVAILABLE, "PAUSED")
            else:
                wait_until(lambda: ended(server.channel).get("aborted"), AT_ONCE_S)
                expected = (Code.ABORTED, "ABORTED")
            error = asked.call.finish().error
            assert (error.code(), reason(error)) == expected
        finally:
            control(server.channel).Resume(control_pb2.ResumeRequest(), timeout=5)


def test_a_deadline(place):
    name, phase, server = place
    with contextlib.ExitStack() as stack:
        if name == "prefill":  # one that has measured no step yet, else it is refused at once
            server = stack.enter_context(fake(**phase.server))
            wait_serving(server.channel)
        check_deadline((name, phase, server))


def check_deadline(place):
    """On a busy machine a request may be on its way for longer than the server's margin: its client
    then gives it up before the server does."""
    name, _, server = place
    with in_phase(place, timeout=TIMEOUT_S) as asked:
        start = time.monotonic()
        limit = TIMEOUT_S + AT_ONCE_S
        ends = wait_until(lambda: (now := ended(server.channel)) != asked.ends and now, limit)
        how = "deadline" if ends.get("deadline") != asked.ends.get("deadline") else "cancelled"
        check_end(place, asked, how, is_now=False)
        heard = asked.call.finish()
        assert time.monotonic() - start < TIMEOUT_S + AT_ONCE_S
        assert heard.error.code() is Code.DEADLINE_EXCEEDED
        if heard.error.details().startswith("the deadline passed"):
            # mostly; a busy machine, or a reader that does not read, may hear its own timer first
            info = details(heard.error)["ErrorInfo"]
            assert info.metadata["phase"] == name
            assert int(info.metadata["tokens_done"]) == sum(map(len, map(heard.ids, range(2))))


@pytest.mark.parametrize("how", ["cancel", "close", "reset", "abort", "pause", "deadline"])
def test_nothing_happens_to_what_is_over(how):
    with fake() as server, proxy(server.address) as between, connect(between.address) as own:
        wait_serving(server.channel)
        timeout = 0.8 if how == "deadline" else None
        with Generation(own, prompt_ids=[5], max_tokens=4, request_id="x", timeout=timeout) as call:
            heard = call.finish()
            assert heard.error is None
            if how == "abort":
                request = control_pb2.AbortRequest(request_ids=["x"])
                [one] = control(server.channel).Abort(request, timeout=5).results
                assert one.outcome == control_pb2.ABORT_OUTCOME_ALREADY_ENDED
            elif how == "pause":
                request = control_pb2.PauseRequest(mode=control_pb2.PAUSE_MODE_ABORT)
                control(server.channel).Pause(request, timeout=5)
                control(server.channel).Resume(control_pb2.ResumeRequest(), timeout=5)
            elif how == "deadline":
                time.sleep(1.0)
            else:
                {"cancel": call.call.cancel, "close": own.close, "reset": between.reset}[how]()
        assert generate(server.channel, prompt_ids=[6], max_tokens=2).error is None
        assert ended(server.channel) == {"finished": 2}
        wait_idle(server.channel)
