"""How requests over HTTP end early: whatever a client does, nothing of it stays in the server.

Clients with drawn plans leave at drawn bytes, some by a reset; some do not read. The others' tokens
are those of the fake model, and afterwards the server has no request, task, block or descriptor
more than before. test_lifetimes.py and test_endings.py have what holds at both doors.
"""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpc_service.services.call_writer import FAILURE_PATIENCE_S
from tests.support.core_driver import expected_tokens
from tests.support.openai_calls import CHAT, TEXT, Connection, ask, ids_of, request
from tests.support.server import fake
from tests.support.wire import is_idle, stats, wait_idle, wait_serving, wait_until

STEP_S = 0.02
LONG = 400  # more tokens than any test waits for
WINDOW = 4096  # bytes of a small receive buffer
PLANS = (
    *("whole", "stream", "stream", "several"),  # read to the end
    *("connect", "half head", "half body", "sent", "tokens", "whole gone", "stalled", "pipelined"),
    *("garbage", "unknown field", "no model"),
)


def prompt_of(number):
    """Return a prompt that no other client has."""
    return [number % 800 + 1, number // 800 + 1, 7]


def text_request(number, *, tokens, **fields):
    """Return the body of a text completion."""
    return {
        "model": "fake",
        "prompt": prompt_of(number),
        "max_tokens": tokens,
        "seed": 1,
        "return_token_ids": True,
        **fields,
    }


class Crowd:
    """Clients with drawn plans. ``wrong`` has what they found that must not be."""

    def __init__(self, port, seed):
        self.port = port
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.wrong = []
        self.num_whole = 0

    def plan(self, number):
        """Return what the client ``number`` does: a plan, and three drawn numbers."""
        draw = self.random
        return number, draw.choice(PLANS), draw.random(), draw.randrange(1, 12), draw.random()

    def play(self, plan):
        """Play a client."""
        number, name, share, count, reset = plan
        try:
            self.play_one(number, name, share, count, reset)
        except Exception as error:
            self.wrong.append((plan, repr(error)))

    def play_one(self, number, name, share, count, reset):
        window = WINDOW if name == "stalled" else None
        with Connection(self.port, window=window) as client:
            if name in ("whole", "stream", "several"):
                self.read_all(client, number, name, count)
                return
            if name in ("garbage", "unknown field", "no model"):
                self.be_refused(client, number, name)
                return
            is_stream = name != "whole gone"
            tokens = LONG if name != "pipelined" else count
            sent = request(TEXT, text_request(number, tokens=tokens, stream=is_stream))
            head = sent.index(b"\r\n\r\n") + 4
            cuts = {
                "connect": 0,
                "half head": int(share * head),
                "half body": head + int(share * (len(sent) - head)),
            }
            client.send(sent[: cuts.get(name, len(sent))])
            if name == "pipelined":
                client.send(sent)
            elif name == "tokens":
                client.read_head()
                for _ in range(count):
                    client.read_chunk()
            elif name not in cuts:
                time.sleep(share * STEP_S * 4)
            if reset < 0.3:
                client.reset()

    def read_all(self, client, number, name, count):
        body = text_request(number, tokens=count, stream=name == "stream")
        if name == "several":
            body |= {"prompt": [prompt_of(number), prompt_of(number + 1)], "n": 2}
        answer = client.ask(TEXT, body)
        assert answer.status == 200, answer.body
        assert not answer.is_cut
        for choice in range(4 if name == "several" else 1):
            prompt = prompt_of(number + choice // 2)
            wanted = expected_tokens(prompt, count=count, seed=1, choice=choice % 2)
            assert ids_of(answer, choice) == wanted, answer.body
        with self.lock:
            self.num_whole += 1

    def be_refused(self, client, number, name):
        bodies = {
            "garbage": b'{"model": "fake", "prompt": [',
            "unknown field": text_request(number, tokens=1, colour="red"),
            "no model": text_request(number, tokens=1) | {"model": "other"},
        }
        answer = client.ask(TEXT, bodies[name])
        assert answer.status == (404 if name == "no model" else 400), answer.body
        assert answer.error["message"]
        assert client.ask(TEXT, text_request(number, tokens=1)).status == 200  # the next one works


@pytest.fixture(scope="module")
def crowded():
    """Serve so few blocks that requests are preempted, and streams of few messages."""
    with fake(
        script={"step_s": 0.002},
        runner={"num_blocks": 64, "max_model_len": 512},
        engine={"max_num_seqs": 8, "max_num_batched_tokens": 64, "stream_buffer": 8},
        server={"openai_port": 0},
    ) as server:
        wait_serving(server.channel)
        ask(server.openai_port, TEXT, text_request(0, tokens=1))
        yield server


@pytest.mark.parametrize(
    "count",
    [
        120,
        pytest.param(1000, marks=pytest.mark.slow),
        pytest.param(10_000, marks=pytest.mark.full),
    ],
)
def test_clients_with_drawn_plans_leave_nothing_in_the_server(crowded, count):
    server, seed = crowded, count
    wait_idle(server.channel)
    before, files = settled(server), server.num_files()
    free = stats(server.channel).free_blocks
    crowd = Crowd(server.openai_port, seed)
    with ThreadPoolExecutor(24) as clients:
        list(clients.map(crowd.play, map(crowd.plan, range(count))))
    assert not crowd.wrong, (seed, crowd.wrong[:3])
    assert crowd.num_whole > count / 10
    wait_idle(server.channel)
    wait_until(lambda: server.ask("tasks") == before, 20, f"tasks of {before}, seed {seed}")
    wait_until(lambda: server.num_files() <= files, 20, "descriptors")
    assert stats(server.channel).free_blocks == free


def settled(server):
    """Return the numbers of tasks and threads, once they do not change any more."""
    seen = [server.ask("tasks")]

    def same():
        time.sleep(0.2)
        seen.append(server.ask("tasks"))
        return seen[-1] == seen[-2]

    wait_until(same, 20, "tasks to settle")
    return seen[-1]


@pytest.fixture(scope="module")
def slow():
    """Serve two sequences at once, 16 tokens a step, so that every phase can be observed."""
    with fake(
        script={"step_s": STEP_S},
        runner={"max_model_len": 4096},
        engine={"max_num_seqs": 2, "max_num_batched_tokens": 16, "stream_buffer": 4},
        server={"openai_port": 0},
    ) as server:
        wait_serving(server.channel)
        yield server


def test_a_reader_that_stays_stalled_loses_its_connection_and_no_other_notices():
    with fake(
        script={"step_s": 0.002},
        runner={"max_model_len": 4096},
        engine={"stream_buffer": 4, "stall_timeout_s": 0.5},
        server={"openai_port": 0},
    ) as server:
        wait_serving(server.channel)
        with Connection(server.openai_port, window=WINDOW) as stalled:
            stalled.send(request(TEXT, text_request(3, tokens=3000, stream=True)))
            wait_until(lambda: stats(server.channel).requests_total.stalled == 1, 30)
            wait_until(lambda: is_idle(stats(server.channel)), 5)
            time.sleep(2 * FAILURE_PATIENCE_S)  # in which it could still take what came before
            assert stalled.read().is_cut
        assert ask(server.openai_port, TEXT, text_request(4, tokens=2)).status == 200


def test_a_deadline_ends_a_request_with_its_phase(slow):
    wait_idle(slow.channel)
    body = text_request(1, tokens=LONG)
    answer = ask(slow.openai_port, TEXT, body, headers={"X-Request-Timeout": "0.3"})
    assert answer.status == 504
    assert answer.headers["x-should-retry"] == "false"
    assert answer.error["code"] == "deadline_exceeded"
    assert answer.error["phase"] == "decode"
    assert 0 < answer.error["tokens_done"] < LONG


@pytest.mark.parametrize("given", ["soon", "-1", "0", "nan", "inf"])
def test_a_deadline_that_is_none_is_refused(slow, given):
    answer = ask(
        slow.openai_port, TEXT, text_request(1, tokens=1), headers={"X-Request-Timeout": given}
    )
    assert answer.status == 400
    assert answer.error["param"] == "X-Request-Timeout"


def test_a_drain_ends_streams_with_their_finish_and_refuses_new_requests():
    with fake(
        script={"step_s": STEP_S},
        engine={"drain_timeout_s": 30.0},
        server={"openai_port": 0},
    ) as server:
        wait_serving(server.channel)
        with Connection(server.openai_port) as running, Connection(server.openai_port) as idle:
            assert idle.ask(CHAT, verb="OPTIONS").status == 403
            running.send(request(TEXT, text_request(2, tokens=40, stream=True)))
            running.read_head()
            server.signal()
            wait_until(lambda: "draining" in server.log, 5)
            late = ask(server.openai_port, TEXT, text_request(3, tokens=1))
            assert late.status == 503
            assert int(late.headers["retry-after"]) >= 1
            assert late.headers["connection"] == "close"
            assert late.error["code"] == "shutting_down"
            assert ask(server.openai_port, "/health", verb="GET").status == 503
            parts = []
            while part := running.read_chunk():
                parts.append(part)
            assert part == b""
            assert b"".join(parts).endswith(b"data: [DONE]\n\n")
        assert server.wait() == 0
