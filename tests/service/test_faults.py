"""What the server does when a part of itself breaks (D17).

A step hangs, a thread dies, the engine has a bug: nobody waits for ever, and the exit code names
the cause. test_endings.py ends requests while a step is held.
"""

import contextlib
import signal
import time

import grpc
import pytest

from grpc_service.client import messages as pb
from tests.support.core_driver import expected_tokens
from tests.support.doors import DOORS, failure_at
from tests.support.fake_server import BROKEN_STEP, EXITING_STEP, HUNG_STEP, OUT_OF_MEMORY_STEP
from tests.support.server import fake
from tests.support.wire import (
    NOT_SERVING,
    SERVING,
    Generation,
    connect,
    details,
    ended,
    generate,
    health,
    list_models,
    reason,
    stats,
    wait_idle,
    wait_serving,
    wait_until,
)

LIMIT_S = 0.4  # --step-timeout
LONG = 2000
SOON_S = 8.0  # seconds for an immediate effect, on a busy machine
HUNG_LOG = r"ERROR .*step \d+ of \w+ has been running"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
INTERNAL = grpc.StatusCode.INTERNAL

# ---- a step that hangs -----------------------------------------------------------------------


@contextlib.contextmanager
def hanging(*, step_timeout_s=LIMIT_S, engine=None, waits=True, **settings):
    """Yield a server and a request whose step hangs; with ``waits``, once that is reported."""
    engine = {"step_timeout_s": step_timeout_s} | (engine or {})
    with fake(engine=engine, may_log=HUNG_LOG, **settings) as server:
        wait_serving(server.channel)
        with Generation(server.channel, prompt_ids=[HUNG_STEP], max_tokens=3) as call:
            assert call.read().HasField("started")
            wait_until(lambda: stats(server.channel).step_count == 1, 5, "the step")
            if waits:
                wait_until(lambda: health(server.channel) == NOT_SERVING, SOON_S, "NOT_SERVING")
            yield server, call


def elapsed(start):
    """Return the seconds since ``start``."""
    return time.monotonic() - start


def test_a_hung_step_and_its_late_end_show_in_health_and_log():
    models = [{"name": "fake"}, {"name": "other"}]
    with hanging(models=models) as (server, call):
        channel = server.channel
        assert health(channel, "model/fake") == NOT_SERVING
        assert health(channel, "model/other") == SERVING
        other = generate(channel, model="other", prompt_ids=[5], max_tokens=4)
        assert other.ids() == expected_tokens([5], count=4)
        wait_until(lambda: "most recent call first" in server.log, SOON_S, "the stacks")
        assert "has been running for" in server.log
        server.ask()
        time.sleep(3 * LIMIT_S)
        assert server.log.count("has been running for") == 1
        server.tell("release")
        assert call.finish().ids() == expected_tokens([HUNG_STEP], count=3)
        wait_until(lambda: health(channel) == SERVING, SOON_S, "SERVING")
        assert health(channel, "model/fake") == SERVING
        wait_until(lambda: "has ended, after" in server.log, SOON_S)
        wait_idle(channel)


def test_the_queue_of_a_hung_model_has_its_bounds():
    with hanging(engine={"max_queued_requests": 2}) as (server, _):
        with contextlib.ExitStack() as stack:
            for number in range(2):
                stack.enter_context(Generation(server.channel, prompt_ids=[number]))
            refused = []

            def is_refused():
                heard = generate(server.channel, timeout=0.5)
                refused[:] = [reason(heard.error)]
                return refused == ["QUEUE_FULL"]

            wait_until(is_refused, SOON_S, f"{refused}")
        server.tell("release")
        wait_idle(server.channel)


def test_a_drain_does_not_wait_for_a_step_that_hangs():
    with hanging(engine={"drain_timeout_s": 0.5}) as (server, call):
        start = time.monotonic()
        server.signal()
        heard = call.finish()
        assert heard.error.code() is UNAVAILABLE
        assert reason(heard.error) == "SHUTTING_DOWN"
        assert details(heard.error)["RetryInfo"].retry_delay.seconds == 5
        assert server.wait() == 70
        assert 0.5 <= elapsed(start) < SOON_S
        assert "a step hangs: ending the process" in server.log


def test_a_drain_gives_a_step_its_time_before_it_hangs():
    """The drain's timeout is over long before the step's time limit."""
    limit_s = 3.0
    with hanging(step_timeout_s=limit_s, waits=False, engine={"drain_timeout_s": 0.1}) as (
        server,
        call,
    ):
        start = time.monotonic()
        server.signal()
        assert reason(call.finish().error) == "SHUTTING_DOWN"
        assert server.wait() == 70
        assert elapsed(start) < limit_s + SOON_S
        assert f"has been running for {limit_s:.0f}." in server.log


def test_a_step_that_ends_while_the_server_waits_for_it_is_no_internal_error():
    with hanging(engine={"drain_timeout_s": 0.2}, step_timeout_s=30.0, waits=False) as (
        server,
        call,
    ):
        server.signal()
        assert reason(call.finish().error) == "SHUTTING_DOWN"
        server.tell("release")
        assert server.wait() == 75


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("is_reported", [True, False])
def test_a_second_signal_ends_a_server_whose_step_hangs(number, is_reported):
    options = {} if is_reported else {"step_timeout_s": 60.0, "waits": False}
    with hanging(**options) as (server, call):
        server.signal()
        wait_until(lambda: "draining: 1" in server.log, SOON_S, "the drain")
        start = time.monotonic()
        server.signal(number)
        assert reason(call.finish().error) == "SHUTTING_DOWN"
        assert server.wait() == 128 + number
        assert elapsed(start) < SOON_S


def test_a_second_signal_counts_also_when_the_drain_is_over_and_a_step_is_waited_for():
    with hanging(engine={"drain_timeout_s": 0.1}, step_timeout_s=60.0, waits=False) as (
        server,
        call,
    ):
        server.signal()
        assert reason(call.finish().error) == "SHUTTING_DOWN"
        wait_until(lambda: not is_listening(server), SOON_S, "grpc's end")
        start = time.monotonic()
        server.signal()
        assert server.wait() == 128 + signal.SIGTERM
        assert elapsed(start) < SOON_S


def is_listening(server):
    """Return whether the server still accepts calls."""
    with contextlib.suppress(grpc.RpcError):
        health(server.channel, timeout=2)
        return True
    return False


def test_the_watchdog_sleeps_while_the_server_is_idle():
    with fake(engine={"step_timeout_s": 0.2}, may_log=HUNG_LOG) as server:
        wait_serving(server.channel)
        assert "triolet-watchdog" not in server.ask()["switches"]
        assert generate(server.channel, max_tokens=5).error is None

        def looks():
            return server.ask()["switches"]["triolet-watchdog"]

        def is_asleep():  # the watchdog checks once more, one limit after the last step
            before = looks()
            time.sleep(0.5)
            return looks() == before

        wait_until(is_asleep, SOON_S, "its sleep")
        before = looks()
        time.sleep(2.0)
        assert looks() == before
        assert generate(server.channel, max_tokens=5).error is None


# ---- steps that always fail ------------------------------------------------------------------


@pytest.mark.parametrize("first", [OUT_OF_MEMORY_STEP, EXITING_STEP])
def test_a_step_that_never_succeeds_ends_its_request_and_no_other(first):
    """A step out of memory blames its newest request. SystemExit counts like any error."""
    may_log = r"Traceback|STEP_FAILED|step \d+ of fake failed|SystemExit"
    with fake(script={"step_s": 0.01}, may_log=may_log) as server:
        channel = server.channel
        wait_serving(channel)
        with Generation(channel, prompt_ids=[1], max_tokens=60) as beside:
            beside.read_deltas(3)
            bad = generate(channel, prompt_ids=[first, 8, 9], max_tokens=5)
            assert bad.error.code() is INTERNAL
            assert reason(bad.error) == "STEP_FAILED"
            assert "secret" not in bad.error.details()
            assert beside.finish().ids() == expected_tokens([1], count=60)
        wait_idle(channel)
        assert ended(channel) == {"finished": 1, "failed": 1}
        assert health(channel) == SERVING


# ---- threads and tasks that die --------------------------------------------------------------

DEAD_LOG = r"ERROR|CRITICAL|Traceback|Exception|Warning"


@contextlib.contextmanager
def serving(**settings):
    """Yield `triolet serve` with fake models that log their death, and a stream under way."""
    settings = {"script": {"step_s": 0.02}, "is_command": True} | settings
    with fake(may_log=DEAD_LOG, **settings) as server:
        wait_serving(server.channel)
        with Generation(server.channel, prompt_ids=[7], max_tokens=LONG) as call:
            call.read_deltas(2)
            yield server, call


PROVOCATIONS = {
    "break_supervisor": lambda server: generate(server.channel, max_tokens=1),
    "break_accepting": lambda server: connect_to(server),
    "break_trio": lambda server: None,
}


def connect_to(server):
    """Open one more connection, which may fail."""
    with connect(server.address) as channel, contextlib.suppress(grpc.RpcError):
        list_models(channel)


@pytest.mark.parametrize("fault", PROVOCATIONS)
def test_a_bug_in_a_part_that_all_calls_need_ends_the_process(fault):
    with serving() as (server, call):
        start = time.monotonic()
        server.tell(fault)
        PROVOCATIONS[fault](server)
        heard = call.finish()
        assert heard.error is not None
        assert heard.error.code() in (UNAVAILABLE, grpc.StatusCode.CANCELLED), heard.error
        assert heard.ids() == expected_tokens([7], count=len(heard.ids()))
        assert server.wait() == 70
        assert elapsed(start) < 2 * SOON_S
        assert "planted" in server.log


@pytest.mark.parametrize("fault", ["break_accepting", "break_trio"])
def test_such_a_bug_ends_the_process_also_while_a_step_hangs(fault):
    with (
        serving(engine={"step_timeout_s": LIMIT_S}) as (server, call),
        Generation(server.channel, prompt_ids=[HUNG_STEP], max_tokens=3) as hung,
    ):
        wait_until(lambda: health(server.channel) == NOT_SERVING, SOON_S, "NOT_SERVING")
        start = time.monotonic()
        server.tell(fault)
        PROVOCATIONS[fault](server)
        assert call.finish().error is not None
        assert hung.finish().error is not None
        assert server.wait() == 70
        assert elapsed(start) < 2 * SOON_S


@pytest.mark.quick(2)
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_a_bug_in_one_calls_task_ends_that_call_alone(door):
    with serving(is_command=False, server={"openai_port": 0}) as (server, call):
        server.tell("break_call")
        with door.generate(door.client(server), prompt_ids=[3], max_tokens=3) as broken:
            assert failure_at(door, broken).has(INTERNAL, "ENGINE_BUG")
        assert generate(server.channel, prompt_ids=[3], max_tokens=3).error is None
        ids = call.read_deltas(5)
        assert call.heard.ids() == expected_tokens([7], count=len(call.heard.ids())), ids
        wait_until(lambda: "planted" in server.log, SOON_S)


def test_a_bug_in_one_models_loop_ends_its_requests_and_leaves_the_others_alone():
    """The model's worker is replaced; requests that come meanwhile wait."""
    models = [{"name": "fake"}, {"name": "other"}]
    with serving(models=models, is_command=False) as (server, call):
        channel = server.channel
        with Generation(channel, model="other", prompt_ids=[8], max_tokens=100) as beside:
            beside.read_deltas(2)
            bad = generate(channel, prompt_ids=[BROKEN_STEP, 1], max_tokens=5)
            for error in (bad.error, call.finish().error):
                assert error.code() is INTERNAL
                assert reason(error) == "ENGINE_BUG"
                assert error.details() == "the engine had an internal error, which was logged"
            ids = call.heard.ids()
            assert ids == expected_tokens([7], count=len(ids))
            assert health(channel, "model/fake") == health(channel) == NOT_SERVING
            assert health(channel, "model/other") == SERVING
            assert generate(channel, prompt_ids=[9], max_tokens=5).ids() == expected_tokens(
                [9], count=5
            )
            assert health(channel, "model/fake") == health(channel) == SERVING
            assert beside.finish().ids() == expected_tokens([8], count=100)
        [fake] = [model for model in list_models(channel) if model.name == "fake"]
        assert (fake.state, fake.replicas[0].restarts) == (pb.MODEL_STATE_READY, 1)
        assert "is not in flight" in server.log
        assert ended(channel)["failed"] >= 2
        assert generate(channel, model="other", max_tokens=2).error is None
        assert server.stop() == 0


def test_a_server_whose_only_model_has_a_bug_shows_it_and_ends_in_order():
    with serving(is_command=False) as (server, call):
        assert reason(generate(server.channel, prompt_ids=[BROKEN_STEP]).error) == "ENGINE_BUG"
        assert reason(call.finish().error) == "ENGINE_BUG"
        assert health(server.channel) == NOT_SERVING
        assert server.stop() == 0
