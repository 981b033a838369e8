"""A server with nothing to do does nothing: no task step in Trio, no turn of asyncio's loop (R183).

Both thread's waits are counted by the kernel too, on the loop that is used in earnest.
"""

from __future__ import annotations

import time

from tests.support.server import fake
from tests.support.wire import Generation, connect, generate, wait_idle, wait_serving

IDLE_S = 10.0
OURS = ("MainThread", "triolet-grpc")  # Trio's and asyncio's


def serve_a_few(server):
    """What a served request could leave behind: an end, a cancel, a deadline, a client gone."""
    channel = server.channel
    wait_serving(channel)
    assert generate(channel, prompt_ids=[1, 2, 3], max_tokens=5, n=2).error is None
    assert generate(channel, prompt_ids=[1], max_tokens=5, timeout=30).error is None
    with connect(server.address) as other, Generation(other, prompt_ids=[2]) as call:
        call.read_deltas(1)
    assert generate(channel, prompt_ids=[1], timeout=0.05).error is not None
    wait_idle(channel)


def settled(server):
    """The counts once they stand still for half a second: grpc closes connections at leisure."""
    counts = server.ask()
    for _ in range(20):
        time.sleep(0.5)
        before, counts = counts, server.ask()
        if all(counts[name] == before[name] for name in ("task_steps", "loop_turns")) and all(
            counts["switches"][name] == before["switches"][name] for name in OURS
        ):
            return counts
    raise AssertionError(f"never still: {before}, {counts}")


def test_an_idle_server_makes_no_wake_ups():
    script = {"step_s": 0.001}
    with (
        fake(script=script, counts=True) as counted,
        fake(script=script) as plain,
    ):
        before = []
        for server in (counted, plain):
            serve_a_few(server)
            before.append(settled(server))
        assert before[0]["task_steps"] > 20, "nothing is counted"
        assert before[0]["loop_turns"] > 20, "nothing is counted"
        time.sleep(IDLE_S)  # the claim is about real seconds
        after = [counted.ask(), plain.ask()]
        for name in ("task_steps", "loop_turns"):
            assert after[0][name] == before[0][name], name
        for one, other in zip(before, after, strict=True):
            for name in OURS:
                assert other["switches"][name] == one["switches"][name], name
        for server in (counted, plain):
            assert generate(server.channel, max_tokens=1).error is None
