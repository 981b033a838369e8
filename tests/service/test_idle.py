"""An idle server does nothing: Trio runs no task, and the main thread does not wake up."""

import time

from tests.support.doors import DOORS
from tests.support.openai_calls import Connection
from tests.support.server import fake
from tests.support.wire import generate, wait_idle, wait_serving

IDLE_S = 10.0
PORTS = {"openai_port": 0}


def serve_a_few(server):
    """Serve requests that could leave something behind: ended, cancelled, late, and lost ones."""
    wait_serving(server.channel)
    for door in DOORS:
        own = door.client(server)
        whole = {"prompt_ids": [1, 2, 3], "max_tokens": 5, "n": 2}
        for fields in (whole, whole | {"timeout": 30}):
            with door.generate(own, **fields) as call:
                assert call.finish().error is None
        with door.connect(door.address(server)) as other:
            door.generate(other, prompt_ids=[2]).read_deltas(1)
        with door.generate(own, prompt_ids=[1], timeout=0.05) as call:
            assert call.finish().error is not None
    wait_idle(server.channel)


def waits(counts):
    """Return how often the main thread has waited."""
    return counts["switches"]["MainThread"]


def settled(server):
    """Return the counts once they stay the same for half a second: grpc closes late."""
    counts = server.ask()
    for _ in range(20):
        time.sleep(0.5)
        before, counts = counts, server.ask()
        if counts["task_steps"] == before["task_steps"] and waits(counts) == waits(before):
            return counts
    raise AssertionError(f"never constant: {before}, {counts}")


def test_an_idle_server_makes_no_wake_ups():
    script = {"step_s": 0.001}
    with (
        fake(script=script, counts=True, server=PORTS) as counted,
        fake(script=script, server=PORTS) as plain,
        Connection(counted.openai_port) as idle,
    ):
        before = []
        assert idle.ask("/health", verb="GET").status == 200
        for server in (counted, plain):
            serve_a_few(server)
            before.append(settled(server))
        assert before[0]["task_steps"] > 20, "nothing is counted"
        time.sleep(IDLE_S)  # real seconds, as the server's clock is real
        after = [counted.ask(), plain.ask()]
        assert after[0]["task_steps"] == before[0]["task_steps"]
        assert list(map(waits, after)) == list(map(waits, before))
        for server in (counted, plain):
            assert generate(server.channel, max_tokens=1).error is None
