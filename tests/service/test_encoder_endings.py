"""How an Embed or Rerank call ends early, in each phase of its life.

The phases are queued, load, tokenize, decode image, encode (of texts and of images) and parked. A
call is ended by the client, its connection, its deadline, the operator, or a pause. In every case
the end is counted once, everything is given back after the step in flight, and the next call works.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import dataclass

import grpc
import pytest

from engine.worker.fakes.encoder import SEPARATOR, score_of, vector_of
from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.simulator.encode_oracle import image_file, pixels_in
from tests.support.encode_wire import (
    Encode,
    embed,
    embed_request,
    rerank_request,
    wait_all_idle,
)
from tests.support.proxy import proxy
from tests.support.server import fake
from tests.support.wire import (
    SERVING,
    SMALL_WINDOW,
    connect,
    details,
    ended,
    health,
    list_models,
    reason,
    stats,
    wait_serving,
    wait_until,
)

Code = grpc.StatusCode
STEP_S = 0.05
SLOW_S = 0.6  # seconds of a load, and of tokenising one long text
AT_ONCE_S = 2.0  # for what should be immediate, on a busy machine
TIMEOUT_S = 1.0
LATE = [f"late{number}" for number in range(20)]
NAMES = (f"ending-{number}" for number in itertools.count())


def models(**script):
    """Return the settings of a text model and two encoders."""
    return [
        {"name": "fake"},
        {"name": "emb", "capability": "image-embedding", "script": script},
        {"name": "rank", "capability": "rerank", "script": script},
    ]


COLD = [
    {"name": name, "capability": "text-embedding", "lazy": True, "script": {"load_s": SLOW_S}}
    for name in LATE
]


def is_queued(server, before, request):
    """Return whether the request waits in the queue."""
    return stats(server.channel).waiting - before.waiting > 30


def is_loading(server, before, request):
    """Return whether the request's model loads."""
    [model] = [one for one in list_models(server.channel) if one.name == request.model]
    return model.state == pb.MODEL_STATE_LOADING


def is_tokenising(server, before, request):
    """Return whether the request is tokenised, after a moment."""
    time.sleep(0.2)  # only the status at its deadline shows this phase
    now = stats(server.channel)
    return not now.running + now.waiting


def is_decoding(server, before, request):
    """Return whether the request's images are decoded."""
    asked = pb.ExplainRequest(request_id=request.request_id)
    try:
        explained = stubs.ControlStub(server.channel).Explain(asked, timeout=5)
    except grpc.RpcError:  # it has not arrived
        return False
    return "images" in explained.waiting_for


def is_encoding(server, before, request):
    """Return whether a step has inputs of the request."""
    now = stats(server.channel)
    return now.step_count - before.step_count >= 3 and now.running > 0


def is_parked(server, before, request):
    """Return whether the request is parked."""
    return stats(server.channel).parked > 0


@dataclass(frozen=True)
class Phase:
    """A way into a phase, for ``request`` on a server with these settings."""

    request: object
    is_there: object
    server: dict
    options: tuple = ()
    is_blocked: bool = False


MANY = [[i + 1, 1] for i in range(300)]
IMAGES = [image_file(bytes([i, 1] * 24)) for i in range(80)]
PAIRS = ("q", [f"<{i + 1}>" for i in range(300)])
SLOW = {"models": models(step_s=STEP_S), "engine": {"max_num_seqs": 2}}
FAST = {"models": models(), "engine": {"stream_buffer": 8}}
SLOW_IMAGES = {"models": models(decode_s=SLOW_S / 4)}
LONG_TEXT = {"models": models(encode_s=SLOW_S)}
PHASES = {
    "queued": Phase(embed_request([[5]] * 50, priority=1), is_queued, SLOW, is_blocked=True),
    "load": Phase(embed_request(["x"]), is_loading, {"models": [*models(), *COLD]}),
    "tokenize": Phase(embed_request(["x" * 5000]), is_tokenising, LONG_TEXT),
    "decode image": Phase(embed_request([{"image": IMAGES[0]}] * 12), is_decoding, SLOW_IMAGES),
    "encode": Phase(embed_request(MANY), is_encoding, SLOW),
    "encode, images": Phase(embed_request([{"image": one} for one in IMAGES]), is_encoding, SLOW),
    "encode, rerank": Phase(rerank_request(*PAIRS), is_encoding, SLOW),
    "encode, best only": Phase(rerank_request(*PAIRS, top_n=3), is_encoding, SLOW),
    "parked": Phase(embed_request(MANY * 6), is_parked, FAST, SMALL_WINDOW),
}


@pytest.fixture(scope="module", params=PHASES)
def place(request):
    """Return a phase, a server slow enough to observe it, and names of models not loaded yet."""
    phase = PHASES[request.param]
    with fake(**phase.server) as server:
        wait_serving(server.channel)
        for name in ("emb", "rank"):
            wait_until(lambda name=name: health(server.channel, f"model/{name}") == SERVING)
        server.cold = iter(LATE)
        yield request.param, phase, server


@dataclass
class Asked:
    """A request in its phase: its call and channel, and the counts before it."""

    call: Encode
    own: grpc.Channel
    between: object
    name: str
    ends: dict
    steps: int


@contextlib.contextmanager
def blocker(channel, is_wanted, spares_others):
    """Send a request that takes every step, and check that it gets the right values to its end."""
    if not is_wanted:
        yield
        return
    with Encode(channel, embed_request(MANY[:120])) as call:
        call.read()
        yield
        call.finish()
        if spares_others:
            assert call.error is None
            for message, ids in zip(call.by_index(), MANY[:120], strict=True):
                assert list(message.values) == vector_of(ids)


@contextlib.contextmanager
def in_phase(place, *, server_timeout=None, spares_others=True):
    """Yield a request that has come into the phase."""
    name, phase, server = place
    request = type(phase.request)()
    request.CopyFrom(phase.request)
    request.request_id = next(NAMES)
    if name == "load":
        request.model = next(server.cold)
    channel = server.channel
    wait_all_idle(channel)
    with blocker(channel, phase.is_blocked, spares_others):
        before, ends = stats(channel), ended(channel)
        with (
            proxy(server.address) as between,
            connect(between.address, *phase.options) as own,
            Encode(own, request, server_timeout=server_timeout) as call,
        ):
            if name == "parked":
                call.read()
            wait_until(lambda: phase.is_there(server, before, request), 15, name)
            yield Asked(call, own, between, request.request_id, ends, stats(channel).step_count)
    wait_all_idle(channel, 20)
    assert embed(channel, ["after"], model="emb").error is None


def check_end(place, asked, how, *, within_s=AT_ONCE_S, is_now=True):
    """Check that the end is counted once, as ``how``, and frees everything.

    If the end is due now, the request is gone after the step in flight and one that had begun.
    """
    _, phase, server = place
    wait_until(lambda: ended(server.channel) != asked.ends, within_s, "the end")
    assert ended(server.channel) == asked.ends | {how: asked.ends.get(how, 0) + 1}
    if not phase.is_blocked:
        after = wait_all_idle(server.channel, 2)
        assert after.step_count - asked.steps <= 2 or not is_now


def check_values(place, call):
    """Check that the values that came before the end are each input's own."""
    name = place[0]
    for message in call.messages:
        if "rerank" in name:
            ids = [ord("q") + 1, SEPARATOR, message.index + 1]
            assert message.score == score_of(ids)
        elif name == "encode, images":
            assert list(message.values) == vector_of(pixels_in(IMAGES[message.index]))
        elif name in ("encode", "parked"):
            assert list(message.values) == vector_of((MANY * 6)[message.index])
        else:
            assert name != "encode, best only", "the best come at the end"


@pytest.mark.parametrize("how", ["cancel", "close", "reset"])
def test_a_client_that_leaves(place, how):
    with in_phase(place) as asked:
        {
            "cancel": asked.call.call.cancel,
            "close": asked.own.close,
            "reset": asked.between.reset,
        }[how]()
        check_end(place, asked, "cancelled")


def test_an_operators_abort(place):
    with in_phase(place) as asked:
        stub = stubs.ControlStub(place[2].channel)
        request = pb.AbortRequest(request_ids=[asked.name])
        [result] = stub.Abort(request, timeout=5).results
        assert result.outcome == pb.ABORT_OUTCOME_ABORTED
        check_end(place, asked, "aborted")
        heard = asked.call.finish()
        assert (heard.error.code(), reason(heard.error)) == (Code.ABORTED, "ABORTED")
        check_values(place, heard)


def test_a_pause_that_aborts(place):
    name, _, server = place
    stub = stubs.ControlStub(server.channel)
    with in_phase(place, spares_others=False) as asked:
        stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_ABORT), timeout=5)
        try:
            error = asked.call.finish().error
            if name in (
                "load",
                "tokenize",
                "decode image",
            ):  # the pause refuses it when it reaches the scheduler
                assert (error.code(), reason(error)) == (Code.UNAVAILABLE, "PAUSED")
            else:
                assert (error.code(), reason(error)) == (Code.ABORTED, "ABORTED")
        finally:
            stub.Resume(pb.ResumeRequest(), timeout=5)


def test_a_deadline(place):
    """Red if the end is counted as a cancel, or for another phase (`Supervisor._count`)."""
    name, _, server = place
    phase, before = name.split(",")[0], server.ask("deadlines")
    timeout = SLOW_S * 0.7 if name in ("load", "tokenize") else TIMEOUT_S
    with in_phase(place, server_timeout=timeout) as asked:
        limit = TIMEOUT_S + AT_ONCE_S
        check_end(place, asked, "deadline", within_s=limit, is_now=False)
        assert server.ask("deadlines") == before | {phase: before.get(phase, 0) + 1}
        heard = asked.call.finish()
        assert heard.error.code() is Code.DEADLINE_EXCEEDED
        if heard.error.details() != "the deadline passed":  # as in test_endings.py
            assert details(heard.error)["ErrorInfo"].metadata["phase"] == phase
        check_values(place, heard)


def test_a_reader_that_stalls_is_ended():
    engine = {"stream_buffer": 8, "stall_timeout_s": 0.5}
    with (
        fake(models=models(), engine=engine) as server,
        connect(server.address, *SMALL_WINDOW) as own,
    ):
        wait_serving(server.channel)
        with Encode(own, embed_request(MANY * 6, model="emb")) as call:
            assert call.read() is not None
            wait_until(lambda: ended(server.channel).get("stalled"), 10, "stalled")
            wait_all_idle(server.channel)
            heard = call.finish()
            assert (heard.error.code(), reason(heard.error)) == (Code.ABORTED, "READER_STALLED")
            for message in heard.messages:
                assert list(message.values) == vector_of((MANY * 6)[message.index])


def test_a_drain_lets_running_requests_finish_and_cuts_the_rest():
    with fake(models=models(step_s=STEP_S), engine={"max_num_seqs": 2}) as server:
        wait_serving(server.channel)
        with Encode(server.channel, embed_request(MANY[:20])) as short:
            assert short.read() is not None  # it runs, so the long one waits behind it
            with Encode(server.channel, embed_request(MANY)) as long:
                wait_until(lambda: stats(server.channel).waiting, 10, "the long one")
                server.signal()
                assert short.finish().error is None
                assert len(short.messages) == 20
                assert long.read() is not None
                server.signal()  # a second signal cuts
                heard = long.finish()
                assert heard.error.code() in (Code.UNAVAILABLE, Code.CANCELLED)
        assert server.wait() == 128 + 15


@pytest.mark.parametrize("name", ["decode image", "encode, images"])
def test_a_drain_cuts_a_request_whose_images_are_not_done(name):
    phase = PHASES[name]
    with fake(**phase.server) as server:
        wait_serving(server.channel)
        wait_until(lambda: health(server.channel, "model/emb") == SERVING)
        before, request = stats(server.channel), embed_request([], request_id="slow")
        request.inputs.extend(list(phase.request.inputs) * 5)
        with Encode(server.channel, request) as call:
            wait_until(lambda: phase.is_there(server, before, request), 30, name)
            server.signal()
            wait_until(lambda: "draining" in server.log, 10, "the drain")
            server.signal()  # a second signal cuts
            assert call.finish().error.code() in (Code.UNAVAILABLE, Code.CANCELLED)
        assert server.wait() == 128 + 15
