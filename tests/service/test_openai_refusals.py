"""What the OpenAI port refuses before it has read a request's body: the client gets the answer,
however much it still sends, and nothing of it stays in the server."""

import contextlib
import time

import pytest

from tests.support.early_answers import BEARER, BODY, EARLY, KEY, LIMITS, early
from tests.support.openai_calls import TEXT, Connection, ask, request
from tests.support.server import fake
from tests.support.wire import wait_serving, wait_until

COUNT = 12  # of connections, each of which would stay
SIZES = {"small": 40, "two parts": 100_000}


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """Serve with a key and a small limit of bodies."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"ours {KEY}\n")
    with fake(server=LIMITS | {"openai_port": 0, "api_key_file": str(keys)}) as server:
        wait_serving(server.channel)
        assert ask(server.openai_port, TEXT, BODY, headers=BEARER).status == 200
        yield server


def wait_as_before(server, before, files):
    """Wait until the server has no more tasks and descriptors than before."""
    wait_until(lambda: server.ask("tasks")["trio_tasks"] <= before, 10, "tasks")
    wait_until(lambda: server.num_files() <= files, 10, "descriptors")


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", EARLY)
def test_an_early_answer_to_a_request_with_a_body_leaves_nothing(strict, name, size):
    before, files = strict.ask("tasks")["trio_tasks"], strict.num_files()
    for _ in range(COUNT):
        with Connection(strict.openai_port) as client:
            client.send(early(name, size))
            answer = client.read()
            assert answer.status == EARLY[name][3], answer.body
            assert not answer.is_cut
    wait_as_before(strict, before, files)
    assert ask(strict.openai_port, TEXT, BODY, headers=BEARER).status == 200


@pytest.mark.parametrize("name", EARLY)
def test_a_connection_whose_early_answer_keeps_it_serves_the_next_request(strict, name):
    with Connection(strict.openai_port) as client:
        client.send(early(name, 40))
        answer = client.read()
        if answer.headers.get("connection") == "close":
            assert client.read_until(b"never") == b""
        else:
            assert client.ask(TEXT, BODY, headers=BEARER).status == 200


@pytest.mark.parametrize("name", EARLY)
def test_a_client_that_would_wait_before_its_body_is_answered_at_once(strict, name):
    """Nothing tells it to send a body that nobody will read."""
    sent = early(name, 40).replace(b"\r\n", b"\r\nExpect: 100-continue\r\n", 1)
    with Connection(strict.openai_port) as client:
        client.send(sent[: sent.index(b"\r\n\r\n") + 4])
        answer = client.read()
        assert answer.status == EARLY[name][3]
        assert not answer.is_cut


def test_what_was_sent_in_vain_eats_no_tail_of_an_answer():
    """A server that drains closes behind each answer, whatever requests its client has sent behind
    it. Red if these are an error, or are left unread in a socket that is closed: that resets the
    connection."""
    with fake(
        script={"step_s": 0.02},
        engine={"drain_timeout_s": 30.0},
        server={"openai_port": 0},
    ) as server:
        wait_serving(server.channel)
        with Connection(server.openai_port) as running:
            running.send(request(TEXT, BODY | {"max_tokens": 300, "stream": True}))
            running.read_head()
            server.signal()
            wait_until(lambda: "draining" in server.log, 5)
            for count in (0, 1, 1, 20, 500):
                with Connection(server.openai_port, window=1) as client:
                    client.send(request("/", verb="GET") + request("/health", verb="GET") * count)
                    time.sleep(0.2)
                    answer = client.read()
                    assert answer.status == 200
                    assert not answer.is_cut
        assert server.wait() == 0


@pytest.mark.parametrize("name", ["a type", "a key", "a size", "health"])
def test_an_early_answer_ends_its_connection_though_the_body_never_ends(strict, name):
    before, files = strict.ask("tasks")["trio_tasks"], strict.num_files()
    sent = early(name, 40)
    clients = [Connection(strict.openai_port) for _ in range(COUNT)]
    for client in clients:
        client.send(sent[:-3])
        assert client.read().status == EARLY[name][3]
    wait_as_before(strict, before, files)
    for client in clients:
        client.close()


def test_an_early_answer_reaches_a_client_that_sends_all_before_it_reads(strict):
    for _ in range(3):
        with Connection(strict.openai_port) as client:
            client.send(request(TEXT, b" " * 8_000_000, headers=BEARER))
            answer = client.read()
            assert answer.status == 413
            assert answer.error["code"] == "request_too_large"
            assert client.read_until(b"never") == b""


def test_a_body_without_end_is_not_read_for_ever(strict):
    before, files = strict.ask("tasks")["trio_tasks"], strict.num_files()
    head = request(TEXT, b"", headers=BEARER | {"Content-Length": None})
    head = head.replace(b"Host", b"Transfer-Encoding: chunked\r\nHost", 1)
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    with Connection(strict.openai_port) as client:
        client.send(head)
        client.socket.settimeout(10)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_often(client, chunk)
    wait_as_before(strict, before, files)


def send_often(client, data):
    """Send more than any server should read."""
    for _ in range(10_000):
        client.socket.sendall(data)


def test_early_answers_delay_no_stop():
    with fake(server={"openai_port": 0}) as server:
        wait_serving(server.channel)
        with contextlib.ExitStack() as clients:
            for number in range(COUNT):
                client = clients.enter_context(Connection(server.openai_port))
                sent = early("a type", 40)
                client.send(sent if number % 2 else sent[:-3])
                assert client.read().status == 415
            began = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - began < 2
