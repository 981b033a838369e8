"""EmbedStream over real gRPC, with fake encoders: messages, errors of inputs, windows and ends."""

import queue
import signal
import threading
import time
from itertools import chain

import grpc
import pytest

from engine.requests.encode import feed
from engine.worker.fakes.encode import rows_of, vector_of, weights_of
from grpc_service.client import Client, stubs
from grpc_service.client import messages as pb
from tests.support.encode_wire import ENCODERS, embed, wait_all_idle
from tests.support.fake_server import POISONED_STEP
from tests.support.server import fake
from tests.support.wire import (
    SERVING,
    SMALL_WINDOW,
    StreamingCall,
    broken_fields,
    connect,
    health,
    reason,
    wait_serving,
    wait_until,
)

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def server():
    """Yield a server with encoders."""
    with fake(models=ENCODERS, may_log=r"STEP_FAILED|Traceback|step \d+ of emb failed") as one:
        wait_serving(one.channel)
        wait_until(lambda: health(one.channel, "model/emb") == SERVING)
        yield one


def part(*inputs, first=0, **parameters):
    """Return a message with these inputs, which are lists of ids, texts, or None for an input that
    is not set; ``parameters`` make it the first one."""
    made = []
    for place, one in enumerate(inputs, first):
        item = pb.EmbedStreamInput(index=place)
        if isinstance(one, str):
            item.input.text = one
        elif one is not None:
            item.input.token_ids.ids.extend(one)
        made.append(item)
    fields = {"parameters": pb.EmbedRequest(**parameters)} if parameters else {}
    return pb.EmbedStreamRequest(inputs=made, **fields)


class Sent:
    """The requests of a call, sent as the test says. ``num_taken`` of them were taken by grpc."""

    def __init__(self, *first):
        self._queue = queue.SimpleQueue()
        self.num_taken = 0
        for one in first:
            self.send(one)

    def send(self, message):
        self._queue.put(message)

    def close(self):
        self._queue.put(None)

    def __iter__(self):
        while (message := self._queue.get()) is not None:
            self.num_taken += 1
            yield message


class Streamed(StreamingCall):
    """An EmbedStream call."""

    def __init__(self, channel, requests, **options):
        super().__init__(stubs.InferenceStub(channel).EmbedStream, iter(requests), **options)

    def vectors(self):
        """Return the vectors by index; each index comes once."""
        found = [vector for message in self.messages for vector in message.vectors]
        made = {vector.index: list(vector.values) for vector in found}
        assert len(made) == len(found)
        return made

    def errors(self):
        """Return the reasons of errors by index."""
        return {one.index: one.reason for message in self.messages for one in message.errors}


def stream(channel, *requests, **options):
    """Make a call, read it to the end, and return it."""
    with Streamed(channel, requests, **options) as call:
        return call.finish()


# ---- messages


def test_each_input_has_a_vector_by_its_own_index(server):
    parts = [part(model="emb")] + [
        part(*[[number + 1, 2]] * 3, first=3 * number) for number in range(200)
    ]
    heard = stream(server.channel, *parts)
    assert heard.error is None
    want = {3 * number + at: vector_of([number + 1, 2]) for number in range(200) for at in range(3)}
    assert heard.vectors() == want
    named = [vector.model for message in heard.messages for vector in message.vectors]
    assert named[0] == "emb"
    assert not any(named[1:])
    assert not heard.errors()


def test_the_first_message_may_have_inputs_and_parameters_are_followed(server):
    heard = stream(server.channel, part([1, 2], dimensions=3), part([3], first=7))
    assert heard.vectors() == {0: vector_of([1, 2], 3), 7: vector_of([3], 3)}
    heard = stream(server.channel, part([1, 2], kind="VECTOR_KIND_SPARSE"))
    [vector] = heard.messages[0].vectors
    want = weights_of([1, 2])
    assert dict(zip(vector.sparse.indices, vector.sparse.weights, strict=True)) == want
    heard = stream(server.channel, part([1, 2, 5], kind="VECTOR_KIND_MULTI_VECTOR"))
    [vector] = heard.messages[0].vectors
    assert vector.rows == 2
    assert list(vector.values) == [*chain(*rows_of([1, 2, 5]))]


@pytest.mark.parametrize("messages", [[part(model="emb")], [part(model="emb"), part(), part()]])
def test_a_stream_without_inputs_succeeds(server, messages):
    heard = stream(server.channel, *messages)
    assert (heard.error, heard.messages) == (None, [])


def test_wrong_inputs_have_errors_beside_the_vectors_of_others(server):
    inputs = ["good", None, "", [1, 100_000], [POISONED_STEP, 1], [7]]
    heard = stream(server.channel, part(model="emb"), part(*inputs), part([8], first=6))
    assert heard.error is None
    assert set(heard.vectors()) == {0, 5, 6}
    bad = dict.fromkeys((1, 2, 3), "INVALID_REQUEST") | {4: "STEP_FAILED"}
    assert heard.errors() == bad
    long = stream(server.channel, part("a" * 9000, "b", model="emb", truncate=False))
    assert long.errors() == {0: "REQUEST_TOO_LARGE"}
    assert set(long.vectors()) == {1}


@pytest.mark.parametrize(
    ("messages", "code", "fields"),
    [
        ([], Code.UNIMPLEMENTED, []),
        ([part([1])], Code.INVALID_ARGUMENT, ["parameters"]),
        ([part([1], model="emb"), part([1], model="emb")], Code.INVALID_ARGUMENT, ["parameters"]),
        ([part(kind=77)], Code.INVALID_ARGUMENT, ["parameters.kind"]),
        ([part([1], model="emb", dimensions=99)], Code.INVALID_ARGUMENT, ["parameters.dimensions"]),
        ([part([1], model="fake")], Code.INVALID_ARGUMENT, ["parameters.model"]),
        ([part([1], model="none")], Code.NOT_FOUND, []),
        ([part(model="emb"), part(*[[1]] * 2049)], Code.INVALID_ARGUMENT, ["inputs"]),
        (
            [part(inputs=[pb.EmbedInput(text="a")], model="emb")],
            Code.INVALID_ARGUMENT,
            ["parameters.inputs"],
        ),
    ],
)
def test_other_errors_end_the_call(server, messages, code, fields):
    heard = stream(server.channel, *messages)
    assert heard.error.code() is code
    if fields:
        assert broken_fields(heard.error) == fields
    wait_all_idle(server.channel)


def test_bytes_that_are_no_message_end_the_call(server):
    call = server.channel.stream_stream("/triolet.v1.Inference/EmbedStream")
    good = part([1], model="emb").SerializeToString()
    with pytest.raises(grpc.RpcError) as caught:
        list(call(iter([good, b"\xff\xff"])))
    assert caught.value.code() is Code.INVALID_ARGUMENT
    wait_all_idle(server.channel)


def test_the_client_module_streams(server):
    with Client(server.address) as client:
        requests = [part(model="emb"), part([1], [2])]
        with client.embed_stream(requests, timeout=20) as answers:
            vectors = {one.index: list(one.values) for each in answers for one in each.vectors}
    assert vectors == {0: vector_of([1]), 1: vector_of([2])}


# ---- windows


def test_a_client_that_does_not_read_is_not_read_from_either():
    """And its stream goes on whole when it reads again."""
    number, size = 1000, 100
    with fake(models=ENCODERS) as server, connect(server.address, *SMALL_WINDOW) as own:
        wait_until(lambda: health(server.channel, "model/emb") == SERVING)
        sent = Sent(part(model="emb"))
        for count in range(number):
            sent.send(part(*[[1, 2, 3]] * size, first=size * count))
        sent.close()
        with Streamed(own, sent) as call:
            assert call.read() is not None

            def is_still():
                before = sent.num_taken
                time.sleep(0.5)
                return sent.num_taken == before

            wait_until(is_still)
            stands = (64 << 10) // 400 + 40  # messages in windows and buffers of the connection
            assert sent.num_taken * size < feed.WINDOW_INPUTS + 2048 + stands * size + 30_000
            assert sent.num_taken < number / 2
            assert embed(server.channel, ["others"]).error is None
            heard = call.finish()
    assert heard.error is None
    assert set(heard.vectors()) == set(range(number * size))


def test_a_client_that_stays_away_is_ended():
    settings = {"stall_timeout_s": 1.0}
    with (
        fake(models=ENCODERS, engine=settings) as server,
        connect(server.address, *SMALL_WINDOW) as own,
    ):
        wait_until(lambda: health(server.channel, "model/emb") == SERVING)
        requests = [part(model="emb"), *[part(*[[1]] * 1000, first=1000 * n) for n in range(20)]]
        with Streamed(own, requests) as call:
            assert call.read() is not None
            wait_all_idle(server.channel, 20)
            time.sleep(1.5)
            call.finish()
    assert reason(call.error) == "READER_STALLED"


# ---- ends


def begin(server, *messages, read=0, **options):
    """Return a call whose client keeps its side open, once ``read`` messages were read."""
    sent = Sent(*messages)
    call = Streamed(server.channel, sent, **options)
    for _ in range(read):
        assert call.read() is not None
    return call, sent


PHASES = {
    "before the first message": ([], 0),
    "with parameters alone": ([part(model="emb")], 0),
    "between messages": ([part(model="emb"), part([1], [2])], 1),
    "while it computes": ([part(model="emb"), *[part(*[[1, 2]] * 2000)] * 30], 1),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_cancel_ends_a_stream(server, phase):
    call, sent = begin(server, *PHASES[phase][0], read=PHASES[phase][1])
    call.cancel()
    sent.close()
    wait_all_idle(server.channel)
    assert embed(server.channel, ["after"]).error is None


@pytest.mark.parametrize("phase", PHASES)
def test_a_deadline_ends_a_stream(server, phase):
    call, sent = begin(server, *PHASES[phase][0], server_timeout=1.0)
    with call:
        call.finish()
        sent.close()
    assert call.error.code() is Code.DEADLINE_EXCEEDED
    wait_all_idle(server.channel)


@pytest.mark.parametrize("phase", [*PHASES][1:])
def test_a_half_closed_stream_ends_when_its_inputs_are_done(server, phase):
    messages, read = PHASES[phase]
    call, sent = begin(server, *messages, read=read)
    sent.close()
    with call:
        call.finish()
    assert call.error is None
    num_inputs = sum(len(message.inputs) for message in messages)
    assert sum(len(message.vectors) for message in call.messages) == num_inputs


def test_an_operators_abort_ends_a_stream(server):
    call, sent = begin(server, part([1], model="emb", request_id="mine"), read=1)
    with call, Client(server.address) as client:
        client.control.abort("mine")
        call.finish()
        sent.close()
    assert call.error.code() is Code.ABORTED


def test_a_drain_lets_what_runs_end_and_then_ends_the_stream():
    with fake(models=ENCODERS) as server:
        wait_until(lambda: health(server.channel, "model/emb") == SERVING)
        call, sent = begin(server, part([1], model="emb"), read=1)
        stop = threading.Event()

        def send():
            first = 1
            while not stop.is_set():
                sent.send(part(*[[2]] * 50, first=first))
                first += 50
                time.sleep(0.01)

        sender = threading.Thread(target=send)
        sender.start()
        server.signal(signal.SIGTERM)
        with call:
            call.finish()
        stop.set()
        sender.join()
        sent.close()
        assert call.error.code() is Code.UNAVAILABLE
        assert reason(call.error) == "SHUTTING_DOWN"
        vectors = call.vectors()
        assert set(vectors) >= {0}
        server.wait()
