"""SIGTERM, once and twice, during a load that takes long (D17).

test_endings.py has signals in all phases of a request.
"""

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
    Generation,
    reason,
    stats,
    wait_until,
)

DRAIN_S = 0.3
SOON_S = 8.0  # seconds for an immediate effect, on a busy machine
FEW = 12


@contextlib.contextmanager
def waiting_for_load(server, prompt, max_tokens):
    """Yield a request that waits for its model.

    The channel is connected first, so that the answer to a later call shows that the server has the
    request.
    """
    stats(server.channel)
    with Generation(server.channel, prompt_ids=prompt, max_tokens=max_tokens) as call:
        stats(server.channel)
        yield call


def check_cut(call, prompt):
    """Check that the client got a status, and that the tokens before it are right."""
    heard = call.finish()
    assert heard.error.code() is grpc.StatusCode.UNAVAILABLE, heard.error
    assert reason(heard.error) == "SHUTTING_DOWN"
    assert heard.ids() == expected_tokens(prompt, count=len(heard.ids()))


def wait_for_weights(channel):
    """Wait until the load has begun in its thread, some time after the server's first answers."""
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
        # without a waiter: less than the 3 s for which a server that was ready waits for a load
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
