"""Hundreds of streams at once: they share workers fairly, and some vanish and stall alone."""

import json
import statistics
import time

import pytest

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.core_driver import expected_tokens
from tests.support.crowd import crowd
from tests.support.server import fake
from tests.support.wire import (
    ended,
    generate,
    list_models,
    replica_states,
    stats,
    wait_serving,
    wait_until,
)
from tools.lab.bench import load
from tools.lab.bench.frame import report

FINISH, VANISH, STALL = 350, 100, 50
TOKENS = 40
LONG = 900  # more tokens than a small window and a small buffer hold
DRAIN_S = 1.0


@pytest.mark.slow
def test_of_500_streams_100_vanish_and_50_stall_and_the_other_350_finish_unchanged():
    """The server's end does not wait for the streams that stall."""
    total = FINISH + VANISH + STALL
    engine = {
        "max_num_seqs": total,
        "stream_buffer": 8,
        "drain_timeout_s": DRAIN_S,
        "check_level": 1,
    }
    with fake(
        script={"step_s": 0.02},
        runner={"num_blocks": 8192, "max_model_len": 1024},
        engine=engine,
    ) as server:
        channel = server.channel
        wait_serving(channel)
        address = server.address
        with (
            crowd(address, streams=STALL, first=1, tokens=LONG, reads=2) as stalled,
            crowd(address, streams=VANISH, first=101, tokens=LONG, reads=2) as vanishing,
        ):
            stalled.heard()
            vanishing.heard()
            control = stubs.ControlStub(channel)
            control.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_KEEP))
            with crowd(address, streams=FINISH, first=201, tokens=TOKENS) as finishing:
                wait_until(lambda: live(stats(channel)) == total, 30, "all at once")
                control.Resume(pb.ResumeRequest())
                vanishing.kill()
                heard, _ = finishing.heard()
            expected = {n: expected_tokens([n], count=TOKENS, seed=1) for n in range(201, 551)}
            assert heard == expected
            wait_until(lambda: live(stats(channel)) == STALL, 20, "only those that stall")
            assert ended(channel) == {"finished": FINISH, "cancelled": VANISH}
            wait_until(lambda: stats(channel).parked == STALL, 20, "parked")
            assert generate(channel, prompt_ids=[7], max_tokens=5).error is None
            start = time.monotonic()
            server.signal()
            assert server.wait() == 75
            assert time.monotonic() - start < DRAIN_S + 10  # no wait for clients that stall


def live(totals):
    """Return the number of live requests."""
    return totals.running + totals.waiting + totals.parked + totals.ending


def test_a_hundred_requests_on_four_workers_are_shared_fairly_and_end_within_ten_seconds():
    """Equal requests at once take about as long as each other, whichever worker serves
    them."""
    with fake(models=[{"name": "fake", "replicas": 4}], script={"step_s": 0.02}) as server:
        wait_until(lambda: replica_states(server.channel) == [pb.REPLICA_STATE_READY] * 4)
        with crowd(server.address, streams=100, tokens=20) as clients:
            heard, seconds = clients.heard()
        [model] = list_models(server.channel)
    assert heard == {n: expected_tokens([n], count=20, seed=1) for n in range(1, 101)}
    served = [replica.processed for replica in model.replicas]
    assert sum(served) == 100
    assert min(served) >= 15
    assert max(seconds.values()) < 10
    assert max(seconds.values()) < 3 * statistics.median(seconds.values())


@pytest.mark.slow
def test_a_hundred_clients_for_a_while_give_throughput_and_percentiles_as_json(tmp_path, capsys):
    """The bench `load` does the same for a minute."""
    with fake(script={"step_s": 0.01}, engine={"check_level": 1}) as server:
        wait_serving(server.channel)
        answer = load.measure(server.address, clients=100, seconds=1.5)
        assert ended(server.channel) == {"finished": answer["requests"]}
    assert answer["requests"] >= 100
    assert answer["tokens"] == answer["requests"] * load.OUTPUT
    assert report("load", load.rows_of("all", [answer]), str(tmp_path / "load.json")) == 0
    rows = json.loads((tmp_path / "load.json").read_text())["rows"]
    found = {row["name"]: row["value"] for row in rows}
    assert found["all, requests"] == answer["requests"] / answer["seconds"]
    for figure, times in (("first token", answer["first"]), ("whole request", answer["whole"])):
        assert len(times) == answer["requests"]
        p50, p90, p99 = (found[f"all, {figure} {share}"] / 1e3 for share in ("p50", "p90", "p99"))
        assert 0 < p50 == sorted(times)[len(times) // 2] <= p90 <= p99 <= max(times)
