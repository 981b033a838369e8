"""Connecting beside clients that connect over and over, or that hold all connections."""

import contextlib
import socket
import subprocess
import sys
import time

import grpc
import pytest

from tests.support import raw_http2
from tests.support.server import fake
from tests.support.wire import (
    SERVING,
    connect,
    generate,
    health,
    wait_idle,
    wait_serving,
    wait_until,
)

# Connects, sends the beginning of HTTP/2, and hangs up, as fast as a process can, with 20 open.
CHURN = """
import socket, sys
host, port, source, said = *sys.argv[1:4], bytes.fromhex(sys.argv[4])
print("ready", flush=True)
held = []
while True:
    try:
        held.append(socket.create_connection((host, int(port)), 5, (source, 0)))
        held[-1].sendall(said)
    except OSError:
        pass
    if len(held) > 20:
        held.pop(0).close()
"""
SAID = raw_http2.PREFACE + raw_http2.frame(raw_http2.SETTINGS, 0, 0)
HEALTH_BAR_S, TOKEN_BAR_S = 0.5, 1.0
SETTLE_S, WATCH_S = 0.5, 2.5


@contextlib.contextmanager
def churning(address, source):
    """Connect to the server over and over from one address until the block ends."""
    host, port = address.split(":")
    argv = [sys.executable, "-c", CHURN, host, port, source, SAID.hex()]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            yield
        finally:
            process.kill()


def timed(ask):
    """Return how many seconds a call takes on a connection of its own."""
    began = time.monotonic()
    ask()
    return time.monotonic() - began


@pytest.mark.alone
def test_an_address_that_connects_over_and_over_delays_no_other():
    """Measured are a health check and a first token, each on a connection of its own. Red if each
    turn of the loop accepts one connection."""
    with fake(script={"step_s": 0.002}) as server:
        wait_serving(server.channel)
        probes, tokens = [], []

        def probe():
            with connect(server.address) as channel:
                assert health(channel, timeout=20) == SERVING

        def begin():
            with connect(server.address) as channel:
                assert generate(channel, prompt_ids=[5], max_tokens=1, timeout=20).error is None

        with churning(server.address, "127.0.0.2"):
            time.sleep(SETTLE_S)
            ends_at = time.monotonic() + WATCH_S
            while time.monotonic() < ends_at:
                probes.append(timed(probe))
                tokens.append(timed(begin))
        # a shared machine may pause the server once
        assert sorted(probes)[-2] < HEALTH_BAR_S, probes
        assert sorted(tokens)[-2] < TOKEN_BAR_S, tokens
        wait_idle(server.channel)
        assert generate(server.channel, prompt_ids=[5], max_tokens=1).error is None


def test_a_full_server_answers_health_and_serves_again_when_there_is_room():
    """Four addresses hold all connections. Red if a full server closes every new connection."""
    limits = {"max_connections": 9, "max_connections_per_address": 2}
    with fake(server=limits) as server, contextlib.ExitStack() as held:
        wait_serving(server.channel)
        host, port = server.address.split(":")
        for number in range(8):
            source = (f"127.0.0.{2 + number % 4}", 0)
            one = socket.create_connection((host, int(port)), 5, source)
            held.enter_context(one).sendall(SAID)
            assert one.recv(1), "it was not taken"
        waits = []
        for _ in range(5):
            with connect(server.address) as channel:
                waits.append(timed(lambda: health(channel)))
                error = generate(channel, prompt_ids=[5], max_tokens=1).error
                assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert min(waits) < HEALTH_BAR_S  # other checks may have waited for the machine
        assert generate(server.channel, prompt_ids=[5], max_tokens=1).error is None
        with connect(server.address) as channel:
            assert health(channel) == SERVING
            held.close()
            wait_until(
                lambda: generate(channel, prompt_ids=[5], max_tokens=1).error is None,
                what="a client that came while the server was full is served",
            )
