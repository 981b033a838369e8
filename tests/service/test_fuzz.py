"""Clients that send what no client should: any message on every RPC, any bytes, files that are no
images, floods of frames.

Rule: whatever comes, the server answers with a status that is neither INTERNAL nor UNKNOWN, or ends
the connection. It logs no error, keeps nothing, and serves other clients meanwhile.
"""

import contextlib
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpc_service._generated.triolet.v1 import (
    classes_pb2,
    common_pb2,
    control_pb2,
    images_pb2,
    inference_pb2,
    models_pb2,
    vectors_pb2,
)
from tests.support import http2, http_floods
from tests.support.core_driver import expected_tokens
from tests.support.doors import DOORS
from tests.support.fuzz import messages, nearly_right
from tests.support.images import hostile, picture
from tests.support.raw_http2 import RawClient
from tests.support.server import children_of, fake
from tests.support.wire import (
    details,
    generate,
    wait_idle,
    wait_serving,
    wait_until,
)

METHODS = {
    f"{service.full_name}/{method.name}": method
    for file in (inference_pb2, models_pb2, control_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
DRAIN = "triolet.v1.Control/Drain"
FEW = 20
# Messages to draw for each RPC whose request has fields, so that the full run draws 20,000.
MANY = -(-20_000 // sum(bool(method.input_type.fields) for method in METHODS.values()))
# GenerateImage has a smaller number (issue 28).
MANY_OF = {"triolet.v1.Inference/GenerateImage": 2_000}
# Valid requests. Many drawn messages differ little from these (`nearly_right`): wholly random
# messages hardly ever get as far as the engine.
SERVED = {
    "Inference/Generate": inference_pb2.GenerateRequest(text="Once", sampling={"max_tokens": 9}),
    "Inference/Embed": vectors_pb2.EmbedRequest(inputs=[{"text": "Once"}, {"image": picture()}]),
    "Inference/Rerank": vectors_pb2.RerankRequest(query="Who?", documents=["Me"]),
    "Inference/Classify": classes_pb2.ClassifyRequest(
        inputs=[{"text": "Once"}, {"pair": {"text": "Who?", "text_pair": "Me"}}], model="moods"
    ),
    "Inference/GenerateImage": images_pb2.GenerateImageRequest(
        prompt="Once", steps=2, width=32, source={"image": picture()}, strength=0.9
    ),
    "Inference/Tokenize": inference_pb2.TokenizeRequest(text="Once"),
    "Inference/Detokenize": common_pb2.DetokenizeRequest(ids=[1, 2, 3]),
}
MODELS = (
    {"name": "fake"},
    {"name": "vectors", "capability": "image-embedding"},
    {"name": "ranks", "capability": "rerank"},
    {"name": "moods", "capability": "text-classification"},
    {"name": "names", "capability": "token-classification"},
    {"name": "sees", "capability": "vision"},
    {"name": "artist", "capability": "text-to-image"},
)
CALL_S = 2.0
READ_MAX = 200  # a drawing of 150 steps has fewer messages
SOON_S = 60.0
GROWTH_MAX = 48 * 2**20  # guess: allocators keep less; a leak of 5,000 streams takes far more
BAD = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
CLIENTS_OWN = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}


@contextlib.contextmanager
def small_server():
    """Yield a server whose requests end soon, whatever they ask for. One client sends it thousands
    of requests that are refused, so a connection's budget is large enough for all of them;
    `tests/unit/rpc` tests connections that exceed their budgets."""
    runner = {"max_model_len": 96, "num_blocks": 64}
    settings = {"connection_budget": 10**8, "openai_port": 0}
    with fake(runner=runner, models=MODELS, server=settings) as one:
        wait_serving(one.channel)
        yield one


@pytest.fixture(scope="module")
def server():
    """Yield the server that all messages go to."""
    with small_server() as one:
        yield one


@contextlib.contextmanager
def nothing_is_left(server):
    """Check that the block leaves no request, file or memory behind, and that others are served."""
    check_served(server)
    wait_idle(server.channel)
    files, memory = server.num_files(), server.memory_bytes()
    yield
    check_served(server)
    wait_idle(server.channel, SOON_S)
    wait_until(lambda: server.num_files() <= files + 3, SOON_S, "files given back")
    assert server.memory_bytes() - memory < GROWTH_MAX


def check_served(server):
    """Check that another client, on a new connection, is served soon at each door."""
    for door in DOORS:
        fields = {"prompt_ids": [5], "sampling": {"ignore_eos": True}, "max_tokens": 9}
        with (
            door.connect(door.address(server)) as own,
            door.generate(own, **fields) as one,
        ):
            heard = one.finish()
        assert heard.error is None, heard.error
        assert heard.ids() == expected_tokens([5], count=9)


def call(channel, name, request, serializer=None, limit_s=CALL_S):
    """Make one call with any bytes; return its status code. An endless answer is read in part."""
    error = _error_of(channel, name, request, serializer, limit_s)
    if error is None:
        return grpc.StatusCode.OK
    assert error.code() not in BAD, (name, error)
    if error.code() not in CLIENTS_OWN:
        assert "ErrorInfo" in details(error), (name, error)
    return error.code()


def _error_of(channel, name, request, serializer, limit_s):
    method = METHODS[name]
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    rpc = make(f"/{name}", request_serializer=serializer, response_deserializer=None)
    try:
        answer = rpc(request, timeout=limit_s)
        if method.server_streaming:
            for number, _ in enumerate(answer):
                if number >= READ_MAX or name.endswith("WatchStats"):
                    answer.cancel()
                    break
    except grpc.RpcError as error:
        return error
    return None


def fuzz_messages(server, name, num_examples):
    """Send ``num_examples`` messages of the RPC's own type."""
    descriptor = METHODS[name].input_type
    base = SERVED.get(name.removeprefix("triolet.v1."))
    drawn = messages(descriptor) if base is None else messages(descriptor) | nearly_right(base)
    num_sent = num_served = 0

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn)
    def send(message):
        nonlocal num_sent, num_served
        num_sent += 1
        code = call(server.channel, name, message, GetMessageClass(descriptor).SerializeToString)
        num_served += code is grpc.StatusCode.OK
        if name.endswith("/Pause"):
            resume(server)

    send()
    if base is not None and num_examples > FEW:
        assert num_served > num_examples / 50, "too few got as far as the engine"
    # Hypothesis sends the one value of a message without fields only once
    while num_sent < num_examples:
        num_sent += 1
        call(server.channel, name, b"")
    if name != DRAIN:  # after a drain there is nothing to resume
        resume(server)


def resume(server):
    """Resume all models."""
    assert call(server.channel, "triolet.v1.Control/Resume", b"") is grpc.StatusCode.OK


# ---- messages --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {DRAIN}))
def test_any_message_gets_a_status_of_its_own(server, name):
    with nothing_is_left(server):
        fuzz_messages(server, name, FEW)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(METHODS.keys() - {DRAIN}))
def test_many_messages_get_a_status_of_their_own(server, name):
    with nothing_is_left(server):
        fuzz_messages(server, name, MANY_OF.get(name, MANY))


@pytest.mark.parametrize(
    "num_examples", [FEW, pytest.param(MANY, marks=[pytest.mark.full, pytest.mark.timeout(1800)])]
)
def test_any_drain_gets_a_status_and_the_server_still_ends_in_order(num_examples):
    """The drains come on a connection that was open before, as the first one closes the port."""
    with small_server() as one, RawClient(one.address) as client:

        @settings(max_examples=num_examples, deadline=None, database=None)
        @given(messages(METHODS[DRAIN].input_type))
        def send(message):
            call = client.call(f"/{DRAIN}", message.SerializeToString())
            assert client.wait_for(lambda: call.is_over, CALL_S)
            assert str(call) in ("grpc 0", "grpc 3")

        send()
        assert generate(one.channel).error.code() is grpc.StatusCode.UNAVAILABLE
        assert one.stop() == 0


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {DRAIN}))
def test_any_bytes_get_a_status_of_their_own(server, name):
    @settings(max_examples=FEW, deadline=None, database=None)
    @given(st.binary(max_size=300))
    def send(data):
        call(server.channel, name, data)

    with nothing_is_left(server):
        send()
        resume(server)


# ---- images ----------------------------------------------------------------------------------


def embedding(image):
    """Return the RPC that embeds an image, and its request."""
    return "Embed", vectors_pb2.EmbedRequest(inputs=[{"image": image}])


def asking(image):
    """Return the RPC that asks about an image, and its request."""
    parts = [{"text": "What is this?"}, {"image": image}]
    chat = {"messages": [{"role": "user", "parts": parts}]}
    return "Generate", inference_pb2.GenerateRequest(chat=chat, sampling={"max_tokens": 2})


def counting(image):
    """Return the RPC that counts the tokens of a chat with the image, and its request."""
    return "Tokenize", inference_pb2.TokenizeRequest(chat=asking(image)[1].chat)


def fuzz_images(server, seed, num_files, ask=embedding):
    """Send drawn files, each by a request of its own. Return how many were images."""
    rng, codes = random.Random(seed), []
    for _ in range(num_files):
        name, request = ask(hostile(rng))
        name = f"triolet.v1.Inference/{name}"
        codes.append(call(server.channel, name, request.SerializeToString(), limit_s=60))
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    return codes.count(grpc.StatusCode.OK)


@pytest.mark.parametrize("ask", [embedding, asking, counting])
def test_any_image_is_read_or_refused(server, ask):
    with nothing_is_left(server):
        assert 6 < fuzz_images(server, 0, 60, ask) < 54


def test_a_decoder_that_is_killed_costs_no_request_and_it_ends_with_the_server():
    name, request = embedding(picture())
    name, request = f"triolet.v1.Inference/{name}", request.SerializeToString()
    with small_server() as one:
        for _ in range(3):
            assert call(one.channel, name, request, limit_s=60) is grpc.StatusCode.OK
            [pid] = children_of(one.process.pid)
            os.kill(pid, signal.SIGKILL)
        assert call(one.channel, name, request, limit_s=60) is grpc.StatusCode.OK
        [last] = children_of(one.process.pid)
        assert last != pid
    assert not Path(f"/proc/{last}").exists()


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_ten_thousand_images_are_read_or_refused_and_take_no_memory():
    asked = {embedding: 10_000, asking: 1000, counting: 200}
    with small_server() as one:
        for ask in asked:
            fuzz_images(one, 0, 500, ask)  # first, as allocators keep memory that they once had
        with nothing_is_left(one):
            before, num_good = one.memory_bytes(), 0
            for ask, number in asked.items():
                good = fuzz_images(one, 1, number, ask)
                assert number / 10 < good < 9 * number / 10
                num_good += good
            grown = one.memory_bytes() - before
        total = sum(asked.values())
        print(f"{num_good} of {total} files were images; memory grew by {grown / 2**20:.1f} MiB")


# ---- bytes on the port -----------------------------------------------------------------------

NOISE = st.lists(
    st.one_of(
        st.binary(max_size=200),
        st.just(http2.PREFACE),
        st.just(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        st.just(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40)),  # the start of TLS
        st.builds(
            http2.frame,
            st.integers(0, 255),
            st.binary(max_size=60),
            st.integers(0, 255),
            st.integers(0, 9),
        ),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.quick(2)
@pytest.mark.parametrize("num_examples", [60, pytest.param(3000, marks=pytest.mark.full)])
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_any_bytes_on_the_port_end_their_own_connection_only(server, num_examples, door):
    host, _, port = door.address(server).rpartition(":")

    @settings(max_examples=num_examples, deadline=None, database=None)
    @given(NOISE, st.booleans())
    def send(pieces, has_preface):
        with (
            contextlib.suppress(ConnectionError, TimeoutError),
            socket.create_connection((host, int(port)), timeout=2) as sock,
        ):
            if has_preface:
                sock.sendall(http2.PREFACE + http2.frame(http2.SETTINGS))
            for piece in pieces:
                sock.sendall(piece)
            sock.settimeout(0.02)
            sock.recv(4096)

    with nothing_is_left(server):
        send()


# ---- floods ----------------------------------------------------------------------------------

FLOOD = 5_000
GENERATE = "/triolet.v1.Inference/Generate"
REQUEST = inference_pb2.GenerateRequest(
    token_ids={"ids": [1, 2, 3]}, sampling={"max_tokens": 80, "ignore_eos": True}
).SerializeToString()


def pings(connection):
    """Send PING frames."""
    for number in range(4 * FLOOD):
        connection.send(http2.PING, number.to_bytes(8, "big"))


def settings_frames(connection):
    """Send SETTINGS frames."""
    for number in range(4 * FLOOD):
        connection.send(http2.SETTINGS, http2.setting(http2.INITIAL_WINDOW, 1000 + number % 7))


def rapid_resets(connection):
    """Open calls and reset them at once."""
    for number in range(FLOOD // 5):
        stream = connection.open(GENERATE, REQUEST)
        connection.send(http2.RST_STREAM, (8).to_bytes(4, "big"), stream=stream)
        if not number % 100:
            connection.drain()


def tiny_windows(connection):
    """Open a hundred streams that are read byte by byte."""
    connection.send(http2.SETTINGS, http2.setting(http2.INITIAL_WINDOW, 1))
    streams = [connection.open(GENERATE, REQUEST) for _ in range(100)]
    for _ in range(20):
        for stream in streams:
            connection.send(http2.WINDOW_UPDATE, (1).to_bytes(4, "big"), stream=stream)
        connection.drain()


def headers_that_never_end(connection):
    """Send CONTINUATION frames without an end."""
    connection.send(http2.HEADERS, http2.headers(GENERATE), stream=1)
    for _ in range(FLOOD):
        connection.send(http2.CONTINUATION, http2.field("x", "y" * 100), stream=1)


def requests_that_never_come(connection):
    """Open calls without ever sending their requests."""
    for _ in range(500):
        connection.open(GENERATE)
    connection.drain()


def empty_data(connection):
    """Send empty DATA frames."""
    stream = connection.open(GENERATE)
    for _ in range(4 * FLOOD):
        connection.send(http2.DATA, stream=stream)


def window_updates(connection):
    """Send WINDOW_UPDATE frames."""
    for _ in range(4 * FLOOD):
        connection.send(http2.WINDOW_UPDATE, (1).to_bytes(4, "big"))


FLOODS = [pings, settings_frames, rapid_resets, tiny_windows, headers_that_never_end]
FLOODS += [requests_that_never_come, empty_data, window_updates]


def flood_by_http2(flood, server):
    """Flood the gRPC port."""
    with http2.connect(server.address) as connection:
        connection.answers_settings = False
        flood(connection)


@pytest.mark.quick(2)
@pytest.mark.parametrize("flood", [*FLOODS, *http_floods.FLOODS], ids=lambda flood: flood.__name__)
def test_a_flood_costs_others_nothing_but_time(flood):
    with small_server() as server, nothing_is_left(server):
        done = threading.Event()

        def run():
            # the server may close the connection, or stop reading from it
            with contextlib.suppress(ConnectionError, TimeoutError):
                if flood in FLOODS:
                    flood_by_http2(flood, server)
                else:
                    flood(server.openai_port)
            done.set()

        thread = threading.Thread(target=run)
        thread.start()
        started = time.monotonic()
        while not done.is_set() or time.monotonic() - started < 0.5:
            check_served(server)
        thread.join()


@pytest.mark.slow
def test_remains_of_floods_do_not_add_up():
    """The most expensive flood, again and again on one server."""
    with small_server() as server:
        for _ in range(2):  # what is allocated only once comes before the measurement
            reset(server)
        memory = server.memory_bytes()
        with nothing_is_left(server):
            for _ in range(8):
                reset(server)
        assert server.memory_bytes() - memory < GROWTH_MAX / 2
        wait_idle(server.channel)


def reset(server):
    """Flood a server with calls that are reset."""
    with (
        contextlib.suppress(ConnectionError, TimeoutError),
        http2.connect(server.address) as connection,
    ):
        rapid_resets(connection)


def test_random_bytes_of_every_length_are_no_message(server):
    """Hypothesis draws only short messages; the parser takes longer for long ones."""
    source = random.Random(7)
    with nothing_is_left(server):
        for size in (1_000, 10_000, 100_000, 1_000_000):
            data = source.randbytes(size)
            assert call(server.channel, GENERATE[1:], data) is grpc.StatusCode.INVALID_ARGUMENT
            assert call(server.channel, GENERATE[1:], os.urandom(size)) is not grpc.StatusCode.OK
