"""Five hundred streams at once, of which some vanish and some stall: the others do not notice."""

from __future__ import annotations

import time

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.core_driver import expected_tokens
from tests.support.crowd import crowd
from tests.support.server import fake
from tests.support.wire import ended, generate, stats, wait_serving, wait_until

FINISH, VANISH, STALL = 350, 100, 50
TOKENS = 40
LONG = 900  # more tokens than a small window and a small buffer hold
DRAIN_S = 1.0


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
                heard = finishing.heard()
            expected = {n: expected_tokens([n], count=TOKENS, seed=1) for n in range(201, 551)}
            assert heard == expected
            wait_until(lambda: live(stats(channel)) == STALL, 20, "only those that stall")
            assert ended(channel) == {"finished": FINISH, "cancelled": VANISH}
            wait_until(lambda: stats(channel).parked == STALL, 20, "parked")
            assert generate(channel, prompt_ids=[7], max_tokens=5).error is None
            start = time.monotonic()
            server.signal()
            assert server.wait() == 75
            assert time.monotonic() - start < DRAIN_S + 10  # not for as long as they stall


def live(totals):
    """Return the number of live requests."""
    return totals.running + totals.waiting + totals.parked + totals.ending
