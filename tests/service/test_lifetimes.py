"""How requests end early, over both doors. test_endings.py has each way in each phase.

Clients cancel at random moments, stall or run out of time, a server drains, steps fail. The end
concerns only that request, and its blocks are free after at most one step.
"""

import contextlib
import random
import signal
import socket
import threading
import time
from collections import Counter

import grpc
import pytest

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from grpc_service.rpc.framing import MessageReader
from tests.support import http2
from tests.support.core_driver import expected_tokens
from tests.support.doors import DOORS, GRPC, failure_at
from tests.support.fake_server import POISONED_ROW, POISONED_STEP
from tests.support.server import ROOT, fake, fake_process
from tests.support.wire import (
    NOT_SERVING,
    SERVING,
    SMALL_WINDOW,
    Generation,
    connect,
    ended,
    generate,
    generate_request,
    health,
    is_idle,
    reason,
    stats,
    wait_idle,
    wait_serving,
    wait_until,
)

STEP_S = 0.1
LONG = 2000  # more tokens than any test waits for
DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED
PORTS = {"openai_port": 0}


@pytest.fixture(params=DOORS, ids=lambda door: door.name)
def door(request):
    """Return each of the doors that a test's clients use."""
    return request.param


def ask(door, server, **fields):
    """Make a text request at a door, read its answer to the end, and return what came."""
    with door.generate(door.client(server), **fields) as call:
        return call.finish()


# ---- clients that leave ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow():
    """Serve two sequences at once, 16 tokens a step, so that every phase can be observed."""
    with fake(
        script={"step_s": STEP_S},
        runner={"max_model_len": 4096},
        engine={"max_num_seqs": 2, "max_num_batched_tokens": 16},
        server=PORTS,
    ) as server:
        wait_serving(server.channel)
        yield server


@pytest.mark.quick(2)
def test_clients_that_cancel_at_random_moments_do_not_change_another_ones_output(door):
    """There are so few blocks that requests are preempted.

    At least a hundred calls are cancelled, and more until the server has counted 51 cancels: a very
    early cancel reaches the server before its request.
    """
    seed = 20
    made = []
    moments = random.Random(seed)
    with fake(
        script={"step_s": 0.002},
        runner={"num_blocks": 64, "max_model_len": 512},
        engine={"max_num_seqs": 8, "max_num_batched_tokens": 64},
        server=PORTS,
    ) as server:
        wait_serving(server.channel)
        ask(door, server, max_tokens=1)  # the first step opens an eventfd, which stays
        files = server.num_files()

        def cancel_some(number):
            draw = random.Random(number)
            with door.connect(door.address(server)) as own:
                while len(made) < 100 or ended(server.channel).get("cancelled", 0) <= 50:
                    made.append(number)
                    assert len(made) < 2000
                    fields = {"prompt_ids": [draw.randrange(1, 900)] * draw.randrange(1, 200)}
                    with door.generate(own, max_tokens=200, n=draw.choice((1, 3)), **fields):
                        time.sleep(draw.random() * 0.05)

        own = door.client(server)
        with door.generate(own, prompt_ids=[77], max_tokens=500) as control:
            threads = [
                threading.Thread(target=cancel_some, args=(moments.random(),)) for _ in range(5)
            ]
            for thread in threads:
                thread.start()
            heard = control.finish()
            for thread in threads:
                thread.join(30)
        assert heard.error is None, f"seed {seed}"
        assert heard.ids() == expected_tokens([77], count=500), f"seed {seed}"
        wait_idle(server.channel)
        ends = ended(server.channel)
        assert sum(ends.values()) <= len(made) + 2
        assert ends["cancelled"] > 50
        wait_until(lambda: server.num_files() <= files, 5, "the connections' files are closed")


# ---- deadlines -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deadline_server():
    """Serve as slowly as `slow`, with a deadline of the server before any client's."""
    models = [{"name": "fake"}, {"name": "late", "lazy": True, "script": {"load_s": 1.5}}]
    engine = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "default_deadline_s": 0.6}
    with fake(models=models, script={"step_s": STEP_S}, engine=engine, server=PORTS) as server:
        wait_serving(server.channel)
        yield server


def test_a_deadline_during_decode_says_how_many_tokens_were_made(deadline_server, door):
    """On a busy machine the deadline may pass before the first token; then the test asks again."""
    num_tokens = 0
    while not num_tokens:
        ends = ended(deadline_server.channel)
        with door.generate(door.client(deadline_server), prompt_ids=[3]) as call:
            found = failure_at(door, call)
        assert found.has(DEADLINE, "DEADLINE_EXCEEDED")
        heard, num_tokens = call.heard, found.num_done
        wait_idle(deadline_server.channel)
        assert ended(deadline_server.channel)["deadline"] == ends.get("deadline", 0) + 1
    assert found.phase == "decode"
    assert heard.ids() == expected_tokens([3], count=num_tokens)
    assert num_tokens <= 6


def test_a_clients_own_deadline_comes_before_the_servers(deadline_server, door):
    heard = ask(door, deadline_server, prompt_ids=[3], max_tokens=9, timeout=10)
    assert heard.ids() == expected_tokens([3], count=9)


def test_many_deadlines_at_nearly_the_same_time_are_all_counted(door):
    """Red if an end by the engine's timer counts as a cancel (`Supervisor._count`).

    tests/simulation/test_deadlines.py shows, at exact instants, that every client gets the details
    before its own timer ends the call.
    """
    with fake(script={"step_s": 0.1}, server=PORTS) as server, contextlib.ExitStack() as stack:
        wait_serving(server.channel)
        fields, own = {"prompt_ids": [7], "max_tokens": LONG}, door.client(server)
        calls = [
            stack.enter_context(door.generate(own, server_timeout=0.4 + 0.02 * number, **fields))
            for number in range(30)
        ]
        errors = [call.finish().error for call in calls]
        if door is GRPC:
            assert [error.code() for error in errors] == [DEADLINE] * 30
        else:
            assert [error.reason for error in errors] == ["DEADLINE_EXCEEDED"] * 30
        wait_idle(server.channel)
        assert ended(server.channel) == {"deadline": 30}


def test_a_prompt_that_cannot_be_computed_in_time_is_refused_at_once(door):
    engine = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    with fake(script={"step_s": 0.3}, engine=engine, server=PORTS) as server:
        wait_serving(server.channel)
        assert ask(door, server, prompt_ids=[8] * 32, max_tokens=1).error is None
        start, own = time.monotonic(), door.client(server)
        with door.generate(own, prompt_ids=[9] * 1000, timeout=15) as call:  # takes 62 steps
            found = failure_at(door, call)
        assert time.monotonic() - start < 5
        assert found.has(DEADLINE, "DEADLINE_INFEASIBLE")
        assert found.phase == "queued"
        assert not call.heard.messages
        assert stats(server.channel).step_count == 2
        # the cached tokens need not be computed, so there is time enough
        again = ask(door, server, prompt_ids=[8] * 40, max_tokens=1, timeout=15)
        assert again.error is None


def test_a_deadline_that_passes_at_once_leaves_nothing(slow, door):
    """The client's transport rounds the deadline up to a millisecond, in which a step may start.

    tests/simulation/test_deadlines.py shows that a request whose deadline passed on arrival starts
    no step.
    """
    before = wait_idle(slow.channel)
    error = ask(door, slow, timeout=1e-6).error
    if door is GRPC:  # its own timer ends the call
        assert error.code() is DEADLINE
    else:
        assert error.has(DEADLINE, "DEADLINE_EXCEEDED")
    assert wait_idle(slow.channel).step_count - before.step_count <= 1


# ---- readers that do not read ----------------------------------------------------------------

BUFFER = 16
PARKED_TOKENS = 1500
WINDOW_BYTES = 4000  # more than 200 messages of one token
MESSAGE_BYTES_MAX = 20  # of one token
NUM_LOOKS, LOOK_S = 12, 0.02  # a stream is parked for good when its figures stay the same so often


@contextlib.contextmanager
def stalling(server, door=GRPC, **fields):
    """Yield a request whose client has stopped reading, once the server has parked it."""
    fields = {"prompt_ids": [42], "max_tokens": PARKED_TOKENS} | fields
    with (
        door.connect(door.address(server), is_small=True) as own,
        door.generate(own, **fields) as call,
    ):
        call.read_deltas(1)
        wait_until(lambda: is_parked_for_good(server.channel), 20, "parked")
        yield call


def is_parked_for_good(channel):
    """Return whether the stream stays parked.

    A stream is parked and unparked in turn until all buffers to its client are full.
    """
    before = stats(channel)
    for _ in range(NUM_LOOKS):
        time.sleep(LOOK_S)
        after = stats(channel)  # by the time of this answer, the server's writers have run
        figures = (after.parked, after.completion_tokens_total)
        if not after.parked or figures != (before.parked, before.completion_tokens_total):
            return False
    return True


@pytest.fixture(scope="module")
def buffered():
    """Yield a server with small buffers."""
    with fake(engine={"stream_buffer": BUFFER}, server=PORTS) as server:
        wait_serving(server.channel)
        yield server


@pytest.mark.quick(2)
def test_a_reader_that_stops_parks_itself_alone_and_then_gets_every_token(buffered, door):
    channel = buffered.channel
    with stalling(buffered, door) as call:
        parked = stats(channel)
        memory = buffered.memory_bytes()
        for number in range(20):
            other = ask(door, buffered, prompt_ids=[number], max_tokens=50)
            assert other.ids() == expected_tokens([number], count=50)
        now = stats(channel)
        assert now.parked == 1
        assert now.completion_tokens_total - parked.completion_tokens_total == 20 * 50
        assert buffered.memory_bytes() - memory < 4 * 2**20
        heard = call.finish()
    assert heard.error is None
    assert heard.ids() == expected_tokens([42], count=PARKED_TOKENS)
    if door is GRPC:
        assert heard.finished().timings.parked.ToTimedelta().total_seconds() > 0
    wait_idle(channel)


def test_a_reader_that_stops_is_ahead_by_its_buffer_and_window_only(buffered):
    """The server makes as many tokens as fit into the client's window and the stream's buffer, and
    not one more.

    Red if a slot is given back before its message has left (`CallWriter._write_events`).
    """
    channel = buffered.channel
    before = wait_idle(channel)
    fields = {"prompt_ids": [42], "max_tokens": PARKED_TOKENS, "output": {"token_ids": True}}
    with http2.connect(buffered.address) as client:
        client.send(http2.SETTINGS, http2.setting(http2.INITIAL_WINDOW, WINDOW_BYTES))
        request = generate_request(**fields).SerializeToString()
        client.open("/triolet.v1.Inference/Generate", request)
        wait_until(lambda: is_parked_for_good(channel), 20, "parked")
        after = stats(channel)
        client.send(http2.PING, bytes(8))  # its answer comes after everything that was sent before
        body = b""
        while (got := client.receive()) != (http2.PING, http2.ACK, bytes(8)):
            body += got[2] if got[0] == http2.DATA else b""
    assert WINDOW_BYTES - MESSAGE_BYTES_MAX < len(body) <= WINDOW_BYTES
    made = after.completion_tokens_total - before.completion_tokens_total
    reader = MessageReader(2**20)
    reader.feed(body)
    messages = [pb.GenerateResponse.FromString(data) for data, _ in reader.messages]
    assert made == sum(len(one.delta.token_ids) for one in messages) + BUFFER
    wait_idle(channel)


def test_several_choices_of_a_stopped_reader_park_together_and_all_arrive(buffered, door):
    with stalling(buffered, door, n=3, max_tokens=900) as call:
        heard = call.finish()
    assert heard.error is None
    for choice in range(3):
        assert heard.ids(choice) == expected_tokens([42], count=900, choice=choice)
    wait_idle(buffered.channel)


def test_fifty_rounds_of_four_cancelled_streams_leave_memory_files_and_health_as_they_were(
    buffered,
    door,
):
    """Each client leaves after its first tokens."""
    channel, own = buffered.channel, door.client(buffered)

    def run(num_rounds):
        for _ in range(num_rounds):
            with contextlib.ExitStack() as stack:
                for number in range(4):
                    call = door.generate(own, prompt_ids=[number], max_tokens=LONG)
                    stack.enter_context(call).read_deltas(1)
        wait_idle(channel)

    run(60)  # new connections over HTTP grow the server by some MiB until then, and not beyond
    memory, files, ends = buffered.memory_bytes(), buffered.num_files(), ended(channel)
    run(50)
    assert ended(channel)["cancelled"] - ends["cancelled"] == 200
    assert buffered.memory_bytes() - memory < 4 * 2**20
    assert buffered.num_files() <= files
    assert health(channel) == SERVING


def test_stopped_readers_give_their_blocks_to_those_who_read(door):
    """The parked request's blocks go to the others, and are computed again later."""
    with fake(
        engine={"stream_buffer": BUFFER, "prefix_cache": False},
        runner={"num_blocks": 128, "max_model_len": 2048},
        server=PORTS,
    ) as server:
        wait_serving(server.channel)
        with stalling(server, door) as call:
            parked = stats(server.channel)
            assert parked.free_blocks < 2000 // 16, "there is room for both"
            for number in range(2):
                prompt = [number + 1] * 1900
                heard = ask(door, server, prompt_ids=prompt, max_tokens=100)
                assert heard.ids() == expected_tokens(prompt, count=100)
            heard = call.finish()
        assert heard.ids() == expected_tokens([42], count=PARKED_TOKENS)
        wait_idle(server.channel)


def test_a_reader_that_stops_for_too_long_is_ended_and_gets_the_status_if_it_reads_again():
    engine = {"stream_buffer": BUFFER, "stall_timeout_s": 3.0}
    with fake(engine=engine) as server:
        channel = server.channel
        wait_serving(channel)
        with stalling(server) as call, stalling(server, prompt_ids=[43]) as silent:
            wait_idle(channel, 10)
            assert ended(channel) == {"stalled": 2}
            heard = call.finish()
            assert heard.error.code() is grpc.StatusCode.ABORTED
            assert reason(heard.error) == "READER_STALLED"
            assert heard.ids() == expected_tokens([42], count=len(heard.ids()))
            assert generate(channel, max_tokens=5).error is None
            # a client that never reads does not delay the server's end
            start = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - start < 5
            silent.cancel()


UNREAD_TOKENS = 400  # more than a client's window takes, with LARGE_MESSAGES
LARGE_MESSAGES = {"output": {"logprobs": 3, "token_ids": True}}


def silent_calls(own, stack, count):
    """Start requests on a connection whose client does not read; return the calls."""
    fields = {"prompt_ids": [42], "max_tokens": UNREAD_TOKENS} | LARGE_MESSAGES
    return [stack.enter_context(Generation(own, **fields)) for _ in range(count)]


@pytest.mark.slow
def test_calls_whose_readers_never_read_are_counted_and_bounded():
    """Unread calls hold no blocks, others are served, and a connection may have 64 of them."""
    engine = {"stream_buffer": UNREAD_TOKENS}
    with fake(engine=engine) as server, contextlib.ExitStack() as stack:
        channel = server.channel
        wait_serving(channel)
        own = stack.enter_context(connect(server.address, *SMALL_WINDOW))
        silent = silent_calls(own, stack, 1)
        wait_until(lambda: ended(channel) == {"finished": 1}, 20, "the oldest one's end")
        silent += silent_calls(own, stack, 63)
        # the server makes 25,200 large messages for this, in ten seconds on an idle machine
        wait_until(lambda: stats(channel).unread_calls == 64, 60, "unread_calls")
        assert is_idle(stats(channel))
        assert ended(channel) == {"finished": 64}
        assert health(channel) == SERVING
        assert generate(channel, max_tokens=1).error is None
        # one more unread call costs its connection the oldest one
        silent_calls(own, stack, 1)
        wait_until(
            lambda: stats(channel).unread_calls == 64 and silent[0].call.done(), 60, "its end"
        )
        assert silent[0].finish().error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert generate(channel, max_tokens=1).error is None
        # a client that reads after all gets its tokens
        heard = silent[1].finish()
        assert heard.error is None
        assert heard.ids() == expected_tokens([42], count=UNREAD_TOKENS)
        start = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - start < 5


def test_a_failed_call_gets_its_status_though_its_client_does_not_read():
    """The call is over on the server, and the status waits at the client (D1)."""
    engine = {"stream_buffer": BUFFER, "stall_timeout_s": 0.3}
    with fake(engine=engine) as server, contextlib.ExitStack() as stack:
        channel = server.channel
        wait_serving(channel)
        own = stack.enter_context(connect(server.address, *SMALL_WINDOW))
        silent = silent_calls(own, stack, 8)
        wait_until(lambda: ended(channel) == {"stalled": 8}, 20, "ended")
        wait_until(lambda: server.log.count("Inference/Generate ABORTED") == 8, 5, "their ends")
        heard = silent[0].finish()
        assert reason(heard.error) == "READER_STALLED"
        assert heard.ids() == expected_tokens([42], count=len(heard.ids()))
        assert generate(channel, max_tokens=1).error is None


# ---- the server's own end --------------------------------------------------------------------


def test_waiting_requests_finish_too_when_the_server_drains(door):
    engine = {"max_num_seqs": 1}
    with fake(script={"step_s": 0.02}, engine=engine, server=PORTS) as server:
        wait_serving(server.channel)
        own = door.client(server)
        calls = [
            door.generate(own, prompt_ids=[i], max_tokens=6, request_id=f"{i}") for i in range(3)
        ]
        for number in range(3):
            wait_until(lambda number=number: has_come(server, f"{number}"), 10, "the requests")
        server.signal()
        for number, call in enumerate(calls):
            assert call.finish().ids() == expected_tokens([number], count=6)
        assert server.wait() == 0


def has_come(server, request_id):
    """Return whether the server has a request, or had it."""
    request = pb.ExplainRequest(request_id=request_id)
    with contextlib.suppress(grpc.RpcError):
        return bool(stubs.ControlStub(server.channel).Explain(request).state)
    return False


def test_a_drain_does_not_wait_for_a_reader_that_never_reads(door):
    engine = {"stream_buffer": BUFFER, "drain_timeout_s": 0.5}
    with fake(engine=engine, server=PORTS) as server:
        wait_serving(server.channel)
        with stalling(server, door):
            start = time.monotonic()
            assert server.stop() == 75
            assert time.monotonic() - start < 5


def test_sigusr1_logs_statistics_and_sigterm_ends_an_idle_server_that_has_clients():
    with fake() as server, connect(server.address) as other:
        wait_serving(other)
        server.signal(signal.SIGUSR1)
        wait_until(lambda: "\n  sequences 0 running, 0 waiting" in server.log)
        assert generate(other, max_tokens=2).error is None
        start = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - start < 3


@pytest.mark.quick(2)
def test_a_drain_that_is_over_tells_each_of_many_clients(door):
    """They are told within `STOP_GRACE_S`, which is too short to wait as refusals do (D21)."""
    count = 300
    engine = {"max_num_seqs": 8, "drain_timeout_s": 0.2}
    with (
        fake(script={"step_s": 0.05}, engine=engine, server=PORTS) as server,
        contextlib.ExitStack() as stack,
    ):
        wait_serving(server.channel)
        own = door.client(server)
        calls = [
            stack.enter_context(door.generate(own, prompt_ids=[index + 1], max_tokens=LONG))
            for index in range(count)
        ]
        wait_until(lambda: num_live(server) == count, 30, "all of them")
        server.signal()
        reasons = Counter(failure_at(door, call).reason for call in calls)
        assert reasons == {"SHUTTING_DOWN": count}
        assert server.wait() == 75


def num_live(server):
    """Return the number of requests that run or wait."""
    now = stats(server.channel)
    return now.running + now.waiting


def test_a_signal_during_a_load_lets_waiting_requests_finish(door):
    with fake(script={"load_s": 1.0}, server=PORTS) as server:
        assert health(server.channel) == NOT_SERVING  # this connects the channel
        fields = {"prompt_ids": [9], "max_tokens": 5, "request_id": "x"}
        with door.generate(door.client(server), **fields) as call:
            wait_until(lambda: has_come(server, "x"), 10, "the request")
            server.signal()
            assert call.finish().ids() == expected_tokens([9], count=5)
        assert server.wait() == 0


# ---- steps that fail -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failing():
    """Yield a server whose steps can fail."""
    may_log = r"Traceback|STEP_FAILED|step \d+ of fake failed"
    with fake(script={"step_s": 0.01}, may_log=may_log, server=PORTS) as server:
        wait_serving(server.channel)
        yield server


@pytest.mark.parametrize(("first", "num_tokens"), [(POISONED_STEP, 0), (POISONED_ROW, 2)])
def test_a_step_that_fails_ends_the_request_to_blame_and_no_other(failing, first, num_tokens, door):
    channel, own = failing.channel, door.client(failing)
    ends = ended(channel)
    with (
        door.generate(own, prompt_ids=[1], max_tokens=60) as before,
        door.generate(own, prompt_ids=[2], max_tokens=60) as beside,
    ):
        before.read_deltas(3)
        with door.generate(own, prompt_ids=[first, 8, 9], max_tokens=50) as call:
            found, bad = failure_at(door, call), call.heard
        assert found.has(grpc.StatusCode.INTERNAL, "STEP_FAILED")
        assert "secret" not in found.told
        assert "Error" not in found.told
        assert bad.ids() == expected_tokens([first, 8, 9], count=num_tokens)
        assert before.finish().ids() == expected_tokens([1], count=60)
        assert beside.finish().ids() == expected_tokens([2], count=60)
    wait_idle(channel)
    assert ended(channel)["failed"] == ends.get("failed", 0) + 1
    assert ended(channel)["finished"] == ends.get("finished", 0) + 2
    assert health(channel) == SERVING


def test_a_choice_that_fails_ends_its_request_with_one_status(failing, door):
    fields = {"prompt_ids": [POISONED_ROW], "max_tokens": 20, "n": 4}
    with door.generate(door.client(failing), **fields) as call:
        assert failure_at(door, call).reason == "STEP_FAILED"
    wait_idle(failing.channel)


def test_the_log_has_the_cause_that_no_client_sees(failing):
    generate(failing.channel, prompt_ids=[POISONED_STEP])
    assert "a scripted secret" in failing.log


def test_a_step_out_of_memory_is_tried_again_and_nobody_notices():
    script = {"out_of_memory_steps": [3, 4, 8], "step_s": 0.01}
    with fake(script=script) as server:
        wait_serving(server.channel)
        with Generation(server.channel, prompt_ids=[1] * 30, max_tokens=20) as one:
            one.read_deltas(2)
            other = generate(server.channel, prompt_ids=[2] * 40, max_tokens=10)
            assert other.ids() == expected_tokens([2] * 40, count=10)
            assert one.finish().ids() == expected_tokens([1] * 30, count=20)
        assert is_idle(wait_idle(server.channel))


# ---- the listening address --------------------------------------------------------------------


def test_a_port_in_use_is_one_sentence_and_a_failure():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with fake_process(is_command=True, server={"port": port}) as server:
            assert server.wait() == 1
            assert server.sentences() == [
                f"triolet: cannot listen on 127.0.0.1:{port}: Address already in use; choose "
                "another with --port"
            ]
            assert not server.out


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ({"host": "192.0.2.1"}, "192.0.2.1:0: Cannot assign requested address; choose another "),
        ({"host": "nobody.invalid"}, "nobody.invalid:0: "),
        ({"uds": "nowhere/socket"}, "unix:nowhere/socket: No such file or directory; choose "),
        ({"uds": "README.md"}, "unix:README.md: the path exists and is no socket; choose"),
    ],
)
def test_an_unusable_address_is_one_sentence(where, sentence):
    with fake_process(is_command=True, server={"insecure": True} | where) as server:
        assert server.wait() == 1
        [told] = server.sentences()
        assert told.startswith(f"triolet: cannot listen on {sentence}")
        assert told.endswith(f" with --{next(iter(where))}")
    assert (ROOT / "README.md").is_file()
