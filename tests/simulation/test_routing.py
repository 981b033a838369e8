"""Requests over the replicas of a model, by each way of routing, in virtual time."""

from collections import Counter
from dataclasses import replace

import pytest
import trio

from engine.config import ModelConfig, WorkerConfig
from engine.core.common.types import EndReason, SequenceId
from engine.requests.quota import Origin, Quota
from engine.requests.readers import Leaving
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.fakes.text import FakeScript
from tests.simulator.determinism import run_deterministically
from tests.support.virtual_engine import SilentReader, fake_engine

REPLICAS = 3
FAMILIES = 4  # one more than replicas, as otherwise round-robin would find every prefix, too
STEP_S = 0.1


def request(family, own, max_tokens=3):
    """Return a request whose first 64 tokens are those of its family."""
    prompt = (family,) * 64 + (own % 900 + 1,)
    return GenerateRequest(token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens))


def on_replicas(count, **config):
    models = (ModelConfig("fake", workers=(WorkerConfig(count=count),)),)
    return fake_engine(FakeScript(step_s=STEP_S), waits=False, models=models, **config)


def served(routing, asks, *, gap_s, seed=0, **config):
    """Submit one of ``asks`` every ``gap_s`` seconds.

    Return how many requests each replica served, and how many prompt tokens were cached.
    """

    async def main():
        async with on_replicas(REPLICAS, routing=routing, **config) as engine:
            await engine.load_model("fake")
            generations = []
            for ask in asks:
                generations.append(engine.submit(ask, buffer=5000))
                await trio.sleep(gap_s)
            for generation in generations:
                await generation.wait_closed()
                assert generation.error is None
            found = [replica.processed for replica in engine.list_models()[0].replicas]
            assert all(r.work == (0, 0) for r in engine._pool.registry.entries["fake"].replicas)
            return found, engine.statistics().totals.prefix_hits

    return run_deterministically(main, seed)


@pytest.mark.parametrize("routing", ["least-tokens", "round-robin", "prefix"])
def test_equal_requests_are_spread_evenly(routing):
    asks = [request(own + 1, own) for own in range(30)]
    counts, _ = served(routing, asks, gap_s=0.01)
    assert sum(counts) == 30
    assert max(counts) - min(counts) <= 2


def test_a_replica_with_a_long_request_gets_fewer():
    asks = [request(900, 0, max_tokens=900), *[request(i + 1, i, max_tokens=5) for i in range(40)]]
    counts, _ = served("least-tokens", asks, gap_s=0.3)
    assert min(counts) == 1
    counts, _ = served("round-robin", asks, gap_s=0.3)
    assert min(counts) >= 13


def test_requests_of_a_family_go_where_their_prefix_is_cached():
    asks = [request(1 + own % FAMILIES, own) for own in range(60)]
    by_routing = {
        routing: served(routing, asks, gap_s=1.0)
        for routing in ("least-tokens", "round-robin", "prefix")
    }
    hits = Counter({routing: found for routing, (_, found) in by_routing.items()})
    assert hits["prefix"] == 64 * (60 - FAMILIES)  # all but each family's first
    assert hits["prefix"] > hits["least-tokens"]


def test_many_requests_of_one_family_are_spread():
    asks = [request(1, own, max_tokens=50) for own in range(30)]
    counts, _ = served("prefix", asks, gap_s=0.01)
    assert min(counts) >= 5


@pytest.mark.parametrize("leaves_after_s", [0.0, 2 * STEP_S])
def test_a_request_whose_client_is_away_is_no_work_of_its_replica(leaves_after_s):
    """Red if it counts as work until its resume window ends: its replica would get too little."""

    async def main():
        async with on_replicas(2, routing="least-tokens") as engine:
            await engine.load_model("fake")
            replicas = engine._pool.registry.entries["fake"].replicas

            def tokens():
                return sorted(replica.work.tokens for replica in replicas)

            ask = replace(request(9, 9, max_tokens=900), resume_window_s=60.0)
            lost = engine.submit(ask, buffer=4, reader=(reader := SilentReader()))
            await trio.sleep(leaves_after_s)
            lost.leave(reader, trio.current_time(), Leaving(is_lost=True))
            await trio.sleep(1.0)
            assert tokens() == [0, 0]
            asks = [request(own + 1, own) for own in range(6)]
            await trio.sleep(1.0)
            streams = [engine.submit(one, buffer=9) for one in asks]
            for stream in streams:
                await stream.wait_closed()
            assert [replica.processed for replica in replicas] == [3, 3]
            engine.detached.attach(lost, again := SilentReader(), [])
            assert tokens() == [0, 65 + 900]
            lost.leave(again, trio.current_time(), Leaving(is_lost=True))
            assert tokens() == [0, 0]
            await lost.wait_closed()  # ends with its resume window
            assert lost.closed_at > 60.0
            lost.report_client(is_there=True)  # the request has ended
            assert tokens() == [0, 0]

    run_deterministically(main, 0)


def test_a_replica_counts_what_it_served_what_failed_what_was_cancelled_and_its_time_in_steps():
    faults = {SequenceId(2): (1, "decode")}  # the second request fails after its first token

    async def main():
        async with fake_engine(FakeScript(step_s=STEP_S, row_faults=faults)) as engine:
            await engine.submit(request(1, 1), buffer=9).wait_closed()
            await engine.submit(request(2, 2), buffer=9).wait_closed()
            left = engine.submit(request(3, 3, max_tokens=100), buffer=200)
            await trio.sleep(2.5 * STEP_S)
            left.close_reader()
            await engine.wait_idle()
            [replica] = engine.list_models()[0].replicas
            counts = (replica.processed, replica.failed, replica.cancelled)
            return counts, replica.busy_s, engine.statistics().totals.step_count

    counts, busy_s, num_steps = run_deterministically(main, 0)
    assert counts == (1, 1, 1)
    assert busy_s == pytest.approx(num_steps * STEP_S)


def test_what_one_replica_computes_for_a_holder_counts_at_the_other():
    """Each of two holders has a stream at one replica, and one of them another stream there. Red
    if replicas do not know one another, or keep those that have ended."""

    async def main():
        async with on_replicas(2, routing="round-robin", max_model_len=4096) as engine:
            await engine.load_model("fake")
            entry = engine._pool.registry.entries["fake"]
            assert len(entry.shares) == 2
            streams = []
            for name in ("both", "one", "other", "both"):
                ask = request(1, len(streams), max_tokens=3000)
                streams.append(engine.submit(ask, buffer=5000, origin=Origin(quota=Quota(name))))
                await trio.sleep(2 * STEP_S)
            streams[2].cancel(EndReason.CANCELLED)
            await trio.sleep(20.0)
            before = [stream.tokens_done for stream in streams]
            await trio.sleep(60.0)
            alone, one, _, both = (
                stream.tokens_done - had for stream, had in zip(streams, before, strict=True)
            )
            assert alone == pytest.approx(60.0 / STEP_S, rel=0.1)
            assert one == pytest.approx(60.0 / STEP_S, rel=0.1)
            assert one / 12 < both < one / 5
            for stream in streams:
                stream.cancel(EndReason.CANCELLED)
            await engine.unload_model("fake")
            assert not entry.shares

    run_deterministically(main, 0)
