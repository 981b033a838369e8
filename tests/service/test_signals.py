"""SIGTERM, once and twice, while a request is in each of its phases (D17).

The tests check what the client receives, the exit code, and the time.
"""

from __future__ import annotations

import contextlib
import signal
import time

import grpc
import pytest

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.core_driver import expected_tokens
from tests.support.server import fake
from tests.support.wire import (
    SMALL_WINDOW,
    Generation,
    connect,
    list_models,
    reason,
    stats,
    wait_serving,
    wait_until,
)

STEP_S = 0.05
DRAIN_S = 0.3
LOAD_S = 1.0
SOON_S = 8.0  # for what should be immediate, on a busy machine
BUFFER = 16
LONG = 2000
FEW = 12
PARKED_TOKENS = 1500
PHASES = ("queued", "loading", "prefill", "decode", "parked")
PROMPTS = {"prefill": [9] * 640}  # a step takes 16 of these
SLOW = {"script": {"step_s": STEP_S}}
SETTINGS = {
    "queued": SLOW | {"engine": {"max_num_seqs": 1}},
    "loading": {"script": {"step_s": STEP_S, "load_s": LOAD_S}},
    "prefill": SLOW | {"engine": {"max_num_seqs": 2, "max_num_batched_tokens": 16}},
    "decode": SLOW,
    "parked": {"engine": {"stream_buffer": BUFFER}},
}


def is_there(channel, phase):
    """Return whether the request has come to its phase."""
    if phase == "loading":
        return list_models(channel)[0].state == pb.MODEL_STATE_LOADING
    totals = stats(channel)
    if phase == "queued":
        return totals.waiting == 1
    if phase == "parked":
        return totals.parked == 1
    if phase == "prefill":
        return totals.running == 1 and totals.step_count >= 2 and not totals.completion_tokens_total
    return totals.running == 1 and totals.completion_tokens_total >= 2


@contextlib.contextmanager
def waiting_for_load(server, prompt, max_tokens):
    """Yield a request that waits for its model.

    The channel is connected first, so that an answer to a later call means that the server has
    received the request.
    """
    stats(server.channel)
    with Generation(server.channel, prompt_ids=prompt, max_tokens=max_tokens) as call:
        stats(server.channel)
        yield call


@contextlib.contextmanager
def in_phase(phase, max_tokens, **engine):
    """Yield a server with a request in a phase.

    The block gets the server, and its calls with their prompts; the last is in that phase.
    """
    settings = {key: dict(value) for key, value in SETTINGS[phase].items()}
    settings["engine"] = settings.get("engine", {}) | engine
    prompt = PROMPTS.get(phase, [7])
    with fake(**settings) as server, contextlib.ExitStack() as stack:
        channel = server.channel
        calls = []
        if phase == "parked":
            channel = stack.enter_context(connect(server.address, *SMALL_WINDOW))
            max_tokens = PARKED_TOKENS
        if phase == "loading":
            last = stack.enter_context(waiting_for_load(server, prompt, max_tokens))
        else:
            wait_serving(server.channel)
        if phase == "queued":
            first = Generation(channel, prompt_ids=[3], max_tokens=max_tokens)
            calls.append((stack.enter_context(first).read_deltas(1), [3]))
        if phase != "loading":
            last = Generation(channel, prompt_ids=prompt, max_tokens=max_tokens)
            stack.enter_context(last)
        calls.append((last, prompt))
        if phase == "parked":
            last.read_deltas(1)
        wait_until(lambda: is_there(server.channel, phase), SOON_S, phase)
        yield server, calls


def check_cut(call, prompt):
    """Check that the client got a status, and that the tokens before it are right."""
    heard = call.finish()
    assert heard.error.code() is grpc.StatusCode.UNAVAILABLE, heard.error
    assert reason(heard.error) == "SHUTTING_DOWN"
    assert heard.ids() == expected_tokens(prompt, count=len(heard.ids()))


def check_cut_silently(call, prompt):
    """Check a client that read nothing. No status reaches a client whose window is closed (D1)."""
    heard = call.finish()
    assert heard.error is not None
    assert heard.ids() == expected_tokens(prompt, count=len(heard.ids()))


CHECKS = dict.fromkeys(PHASES, check_cut) | {"parked": check_cut_silently}


@pytest.mark.parametrize("phase", PHASES)
def test_one_signal_lets_every_phase_come_to_its_end(phase):
    """R167."""
    with in_phase(phase, FEW) as (server, calls):
        server.signal()
        wait_until(lambda: "draining: " in server.log, SOON_S, "the drain")
        for call, prompt in calls:
            heard = call.finish()
            assert heard.error is None
            count = PARKED_TOKENS if phase == "parked" else FEW
            assert heard.ids() == expected_tokens(prompt, count=count)
        assert server.wait() == 0


@pytest.mark.parametrize("phase", PHASES)
def test_the_drain_timeout_cuts_every_phase_with_a_status(phase):
    with in_phase(phase, LONG, drain_timeout_s=DRAIN_S) as (server, calls):
        start = time.monotonic()
        server.signal()
        if phase == "parked":
            assert server.wait() == 75
        for call, prompt in calls:
            CHECKS[phase](call, prompt)
        assert server.wait() == 75
        took = time.monotonic() - start
        assert DRAIN_S <= took < DRAIN_S + (LOAD_S if phase == "loading" else STEP_S) + SOON_S


@pytest.mark.parametrize("phase", PHASES)
def test_a_second_signal_cuts_every_phase_at_once_with_a_status(phase):
    with in_phase(phase, LONG) as (server, calls):
        server.signal()
        wait_until(lambda: "draining: " in server.log, SOON_S, "the drain")
        start = time.monotonic()
        server.signal(signal.SIGINT)
        if phase == "parked":
            assert server.wait() == 128 + signal.SIGINT
        for call, prompt in calls:
            CHECKS[phase](call, prompt)
        assert server.wait() == 128 + signal.SIGINT
        assert time.monotonic() - start < SOON_S


# ---- a load that takes long ------------------------------------------------------------------


def wait_for_weights(channel):
    """Wait until the load is in its thread, which is after the server's first answers."""
    call = stubs.ModelsStub(channel).LoadModel(pb.LoadModelRequest(model="fake"), timeout=SOON_S)
    assert any(stage.phase == "weights" for stage in call)
    call.cancel()


@pytest.mark.parametrize("has_waiter", [True, False])
def test_a_drain_does_not_wait_for_a_load_that_nobody_needs(has_waiter):
    script, engine = {"load_s": 60.0}, {"drain_timeout_s": DRAIN_S}
    with fake(script=script, engine=engine) as server, contextlib.ExitStack() as stack:
        if has_waiter:
            call = stack.enter_context(waiting_for_load(server, [1], FEW))
        else:
            wait_for_weights(server.channel)
        start = time.monotonic()
        server.signal()
        if has_waiter:
            check_cut(call, [1])
            assert time.monotonic() - start < DRAIN_S + 2
        assert server.wait() == (75 if has_waiter else 0)
        # without a client, less than the three seconds of a server that was ready
        assert time.monotonic() - start < (DRAIN_S + SOON_S if has_waiter else 2.9)
        assert "a worker thread is still busy: ending the process" in server.log


def test_a_second_signal_does_not_wait_for_a_load():
    with (
        fake(script={"load_s": 60.0}) as server,
        waiting_for_load(server, [1], FEW) as call,
    ):
        server.signal()
        wait_until(lambda: "draining: 1" in server.log, SOON_S, "the drain")
        start = time.monotonic()
        server.signal()
        check_cut(call, [1])
        assert server.wait() == 128 + signal.SIGTERM
        assert time.monotonic() - start < SOON_S
