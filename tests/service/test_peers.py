"""Clients that stop, die or ping: what the connection shows, and which pings are allowed."""

import signal
import time
from concurrent import futures

import grpc
import pytest

from tests.support import http2
from tests.support.client import read_on, stopped_reading
from tests.support.core_driver import expected_tokens
from tests.support.server import fake
from tests.support.wire import (
    Generation,
    connect,
    ended,
    generate,
    health,
    stats,
    wait_idle,
    wait_serving,
    wait_until,
)

BUFFER = 16
LONG = 2000
SOON_S = 15.0


def parking(server, **fields):
    """Yield a client process that has stopped reading (`tests.support.client`)."""
    fields = {"prompt_ids": [42], "max_tokens": LONG} | fields
    return stopped_reading(server.address, **fields)


def wait_parked(server):
    """Wait until the server has parked the request."""
    wait_until(lambda: stats(server.channel).parked == 1, SOON_S, "parked")


# ---- clients that are stopped or killed ------------------------------------------------------


def test_a_stopped_process_is_parked_then_ended_and_gets_the_status_when_it_goes_on():
    engine = {"stream_buffer": BUFFER, "stall_timeout_s": 0.7}
    with fake(engine=engine) as server:
        wait_serving(server.channel)
        with parking(server) as client:
            client.send_signal(signal.SIGSTOP)
            wait_parked(server)
            other = generate(server.channel, prompt_ids=[5], max_tokens=50)
            assert other.ids() == expected_tokens([5], count=50)
            wait_idle(server.channel)  # the client's blocks are free
            assert ended(server.channel)["stalled"] == 1
            client.send_signal(signal.SIGCONT)
            heard = read_on(client)
        assert (heard["code"], heard["reason"]) == ("ABORTED", "READER_STALLED")
        assert BUFFER < heard["tokens"] < LONG


def test_a_stopped_process_that_goes_on_in_time_gets_every_token():
    with fake(engine={"stream_buffer": BUFFER}) as server:
        wait_serving(server.channel)
        with parking(server) as client:
            client.send_signal(signal.SIGSTOP)
            wait_parked(server)
            client.send_signal(signal.SIGCONT)
            assert read_on(client) == {"tokens": LONG, "code": "OK", "reason": ""}
        wait_idle(server.channel)


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [LONG, 10**6])
def test_a_client_that_is_half_dead_is_found_by_keepalive(max_tokens):
    """A stopped process is a half-dead client: its kernel takes bytes, and no ping is answered."""
    script, engine = {}, {"stream_buffer": BUFFER}
    if max_tokens > LONG:
        script, engine = {"step_s": 0.1}, {}
    server_config = {"keepalive_time_s": 1.0, "keepalive_timeout_s": 2.0}
    with fake(script=script, engine=engine, server=server_config) as server:
        wait_serving(server.channel)
        with parking(server, max_tokens=max_tokens) as client:
            client.send_signal(signal.SIGSTOP)
            wait_until(lambda: ended(server.channel) == {"cancelled": 1}, SOON_S, "its end")
            wait_idle(server.channel)
        assert generate(server.channel, max_tokens=2).error is None


# ---- pings -----------------------------------------------------------------------------------

PINGS = 50


def test_a_client_that_pings_is_not_punished():
    """Fifty pings at once are far more than the one in ten seconds of usual clients."""
    with fake() as server, http2.connect(server.address) as connection:
        assert all(connection.ping(number) for number in range(PINGS))


def test_the_test_before_would_notice_a_punishment():
    """With grpc's own defaults, the server sends GOAWAY (too_many_pings)."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with http2.connect(f"127.0.0.1:{port}") as connection:
            assert not all(connection.ping(number) for number in range(PINGS))
    finally:
        server.stop(0).wait(SOON_S)


def test_a_connection_that_answers_no_ping_is_closed():
    server_config = {"keepalive_time_s": 0.3, "keepalive_timeout_s": 0.3}
    with fake(server=server_config) as server, http2.connect(server.address) as connection:
        connection.wait_closed()


@pytest.mark.full
def test_a_grpc_client_that_pings_every_ten_seconds_keeps_its_connection():
    """The test lasts for three pings, idle and streaming: grpc's own servers would close."""
    options = (
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    with fake(script={"step_s": 0.1}) as server:
        wait_serving(server.channel)
        with (
            connect(server.address, *options) as idle,
            connect(server.address, *options) as busy,
            Generation(busy, prompt_ids=[3], max_tokens=LONG) as call,
        ):
            states = []
            health(idle)
            idle.subscribe(states.append)
            time.sleep(35)
            assert call.read_deltas(300).heard.ids() == expected_tokens([3], count=300)
            assert health(idle) is not None
            assert set(states) <= {grpc.ChannelConnectivity.READY}
