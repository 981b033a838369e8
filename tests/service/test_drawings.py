"""GenerateImage over gRPC, with a fake model: what comes, what is refused, and how calls end early.

The phases are queued, load, tokenize, decode image, encode, denoise, decode, write and parked. A
call is ended by the client, its connection, its deadline, the operator, a pause or a drain. In
every case the end is counted once, the worker is idle after the step in flight, and the next call
works.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import zlib
from dataclasses import dataclass, field
from io import BytesIO
from struct import pack

import grpc
import pytest
from PIL import Image

from grpc_service.client import AsyncClient, Client, stubs
from grpc_service.client import messages as pb
from tests.support.draw_wire import ARTIST, Draw, draw, draw_request, pixels_of
from tests.support.encode_wire import wait_all_idle
from tests.support.proxy import proxy
from tests.support.server import fake
from tests.support.wire import (
    SERVING,
    SMALL_WINDOW,
    broken_fields,
    connect,
    details,
    ended,
    generate,
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
NAMES = (f"drawing-{number}" for number in itertools.count())


def white_png(width, height):
    """Return a PNG of white, small as a file."""

    def chunk(kind, data):
        return pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = zlib.compress((b"\0" + b"\xff" * (3 * width)) * height, 1)
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def models(**script):
    """Return the settings of a text model and an image model."""
    return [{"name": "fake"}, ARTIST | {"script": script}]


def artist_is_serving(server):
    wait_serving(server.channel)
    wait_until(lambda: health(server.channel, "model/artist") == SERVING)


@pytest.fixture(scope="module")
def server():
    """Yield a server with an image model that takes no time."""
    with fake(models=models()) as one:
        artist_is_serving(one)
        yield one


# ---- what comes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "width": 120, "height": 72},
        {"steps": 1, "guidance": 0.0, "scheduler": "pndm", "negative_prompt": "dogs"},
        {"width": 256, "height": 256, "n": 2},
        {"width": 8, "height": 8, "seed": 2**64 - 1},
    ],
    ids=str,
)
def test_a_drawing_has_its_progress_and_its_images(server, fields):
    """R124."""
    draw(server.channel, draw_request(**fields)).check()


def test_a_request_without_a_seed_gets_one_that_repeats_it(server):
    asked = pb.GenerateImageRequest(prompt="a dog")
    first = draw(server.channel, asked)
    first.check()
    [started] = first.of("started")
    again = draw(server.channel, draw_request("a dog", seed=started.seed))
    assert again.files() == first.files()
    assert draw(server.channel, asked).files() != first.files()
    assert started.seed < 2**32
    assert started.model == "artist"
    assert (started.width, started.height, started.scheduler) == (32, 24, "ddim")


@pytest.mark.parametrize("name", ["JPEG", "WEBP"])
def test_a_format_and_its_quality(server, name):
    number = pb.ImageFormat.Value(f"IMAGE_FORMAT_{name}")
    sizes = []
    for quality in (5, 95):
        heard = draw(server.channel, draw_request(format=number, quality=quality))
        heard.check()
        [file] = heard.files().values()
        assert Image.open(BytesIO(file)).format == name
        assert heard.of("part")[0].format == number
        sizes.append(len(file))
    assert sizes[0] < sizes[1]


def test_previews_come_with_the_steps_that_were_asked_for(server):
    heard = draw(server.channel, draw_request(steps=5, preview_every=2))
    heard.check()
    previews = [one.preview for one in heard.of("progress")]
    assert [bool(one) for one in previews] == [False, True, False, True, False]
    assert Image.open(BytesIO(previews[1])).size == (4, 3)
    assert previews[1] != previews[3]


def test_a_source_decides_size_and_steps(server):
    source = pb.ImageSource(image=white_png(200, 100))
    heard = draw(server.channel, draw_request(source=source, strength=0.5, steps=10))
    assert heard.error is None
    [started] = heard.of("started")
    assert started.steps == 5
    assert (started.width, started.height) == (40, 16)
    given = draw(server.channel, draw_request(source=source, width=64, height=64))
    assert given.of("started")[0].steps == 3  # 0.8 of the model's 4
    other = pb.ImageSource(image=white_png(100, 200))
    turned = draw(server.channel, draw_request(source=other, width=64, height=64))
    assert turned.files() == given.files(), "white stays white in every size"


def test_a_text_model_serves_beside_it(server):
    with Draw(server.channel, draw_request(n=8, width=256, height=256)) as call:
        assert generate(server.channel, prompt_ids=[5]).error is None
        call.finish().check()
    [model] = [one for one in list_models(server.channel) if one.name == "artist"]
    assert model.capability == pb.CAPABILITY_TEXT_TO_IMAGE


def test_the_python_clients_return_the_files(server):
    asked = draw_request(n=2, width=256, height=256)
    wanted = list(draw(server.channel, asked).files().values())

    async def in_asyncio():
        async with AsyncClient(server.address) as client:
            return await client.generate_image(asked, timeout=20).files()

    assert asyncio.run(in_asyncio()) == wanted
    with Client(server.address) as client:
        assert client.generate_image(asked, timeout=20).files() == wanted


# ---- what is refused ---------------------------------------------------------------------------

BROKEN = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": "x" * 4097}, "prompt"),
    ({"prompt": "x" * 78}, "prompt"),
    ({"negative_prompt": "x" * 78}, "negative_prompt"),
    ({"negative_prompt": "x" * 4097}, "negative_prompt"),
    ({"width": 0}, "width"),
    ({"width": 12}, "width"),
    ({"height": 4104}, "height"),
    ({"width": 1024, "height": 1024}, "n"),  # more than the fake's pixels
    ({"width": 2048, "height": 2048, "n": 8}, "n"),
    ({"steps": 0}, "steps"),
    ({"steps": 151}, "steps"),
    ({"guidance": -0.1}, "guidance"),
    ({"guidance": 30.1}, "guidance"),
    ({"guidance": float("nan")}, "guidance"),
    ({"guidance": float("inf")}, "guidance"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"strength": 0.5}, "strength"),
    ({"source": {"image": b""}}, "source.image"),
    ({"source": {"image": b"http://a/b.png"}}, "source.image"),
    ({"source": {"image": white_png(1, 400_000)}}, "source.image"),  # 17,528 pixels high, drawn
    ({"source": {"image": white_png(8, 8)}, "strength": 0.0}, "strength"),
    ({"source": {"image": white_png(8, 8)}, "strength": 1.1}, "strength"),
    ({"source": {"image": white_png(8, 8)}, "strength": float("nan")}, "strength"),
    ({"source": {"image": white_png(8, 8)}, "strength": 0.1}, "strength"),
    ({"scheduler": "nobody's"}, "scheduler"),
    ({"scheduler": "x" * 65}, "scheduler"),
    ({"format": 4}, "format"),
    ({"quality": 50}, "quality"),
    ({"format": pb.IMAGE_FORMAT_JPEG, "quality": 0}, "quality"),
    ({"preview_every": 151}, "preview_every"),
    ({"request_id": "\x1f"}, "request_id"),
]


@pytest.mark.parametrize(("fields", "field"), BROKEN, ids=lambda value: str(value)[:40])
def test_a_field_out_of_range_is_named(server, fields, field):
    heard = draw(server.channel, draw_request(**fields))
    assert heard.messages == []
    assert heard.error.code() is Code.INVALID_ARGUMENT
    assert broken_fields(heard.error) == [field]


def test_every_broken_field_is_named_at_once(server):
    heard = draw(server.channel, draw_request("", steps=0, n=9, strength=2.0, width=3))
    assert set(broken_fields(heard.error)) == {"prompt", "steps", "n", "strength", "width"}


def test_a_model_that_does_not_draw_is_refused(server):
    heard = draw(server.channel, draw_request(model="fake"))
    assert heard.error.code() is Code.INVALID_ARGUMENT
    assert broken_fields(heard.error) == ["model"]
    assert generate(server.channel, model="artist").error.code() is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("prompt", ["fails", "out of memory", "exits"])
def test_a_step_that_fails_ends_its_own_request_alone(prompt):
    may_log = "scripted secret|Traceback|step .* failed|STEP_FAILED"
    with fake(models=models(step_s=0.01), may_log=may_log) as server:
        artist_is_serving(server)
        with Draw(server.channel, draw_request(steps=30)) as other:
            assert other.read_until("progress") is not None
            heard = draw(server.channel, draw_request(prompt))
            assert (heard.error.code(), reason(heard.error)) == (Code.INTERNAL, "STEP_FAILED")
            assert "secret" not in str(heard.error)
            other.finish().check()
        draw(server.channel, draw_request()).check()


def test_a_deadline_that_cannot_be_met_is_refused_at_once_and_while_waiting():
    script = {"verb_s": {"denoise": 0.1}}
    with fake(models=models(**script), engine={"max_drawings": 1}) as server:
        artist_is_serving(server)
        draw(server.channel, draw_request(steps=2)).check()  # measures a step
        started = time.monotonic()
        heard = draw(server.channel, draw_request(steps=50), timeout=3)
        assert reason(heard.error) == "DEADLINE_INFEASIBLE"
        assert heard.error.code() is Code.DEADLINE_EXCEEDED
        assert time.monotonic() - started < AT_ONCE_S
        with Draw(server.channel, draw_request(steps=30)) as other:
            assert other.read_until("progress") is not None
            # It would take 2 s of its 3.5, and must wait for 3.
            waits = draw(server.channel, draw_request(steps=20), timeout=3.5)
            assert reason(waits.error) == "DEADLINE_INFEASIBLE"
            assert waits.of("started"), "it was in the queue"
            assert time.monotonic() - started < 3.4
            other.finish().check()


def test_two_requests_alternate():
    """Red if one request's steps are computed before the other's."""
    with fake(models=models(step_s=STEP_S)) as server, connect(server.address) as own:
        artist_is_serving(server)
        with Draw(server.channel, draw_request("one", steps=40)) as one:
            assert one.read_until("progress") is not None
            with Draw(own, draw_request("two", steps=10)) as two:
                assert two.read_until("progress") is not None
                before = len(one.of("progress"))
                two.finish().check()
                steps = stats(server.channel).step_count
                one.finish().check()
        # one began alone, shared its turns with the 10 steps of two, and ended alone
        assert 5 <= before + 10 <= steps / 2 + 12


# ---- how calls end early -----------------------------------------------------------------------


def explained(server, name):
    """Return what a live request waits for; None if it is not live."""
    asked = pb.ExplainRequest(request_id=name)
    try:
        return stubs.ControlStub(server.channel).Explain(asked, timeout=5)
    except grpc.RpcError:
        return None


def is_queued(server, asked):
    return stats(server.channel).waiting > 0


def is_loading(server, asked):
    """Return whether the request's model loads."""
    name = asked.call.request.model
    [model] = [one for one in list_models(server.channel) if one.name == name]
    return model.state == pb.MODEL_STATE_LOADING


def is_tokenising(server, asked):
    said = explained(server, asked.name)
    return said is not None and "tokens" in said.waiting_for


def is_decoding_source(server, asked):
    said = explained(server, asked.name)
    return said is not None and "images" in said.waiting_for


def is_encoding(server, asked):
    now = stats(server.channel)
    return now.running > 0 and now.step_count == asked.before.step_count + 1


def is_denoising(server, asked):
    return asked.call.read_until("progress") is not None


def is_decoding(server, asked):
    progress = asked.call.read_until("progress").progress
    return progress.step == progress.steps


def is_writing(server, asked):
    said = explained(server, asked.name)
    return said is not None and "has not taken" in said.waiting_for


def is_parked(server, asked):
    return stats(server.channel).parked > 0


@dataclass(frozen=True)
class Phase:
    """A way into a phase, for ``request`` on a server with these settings."""

    request: object
    is_there: object
    server: dict
    options: tuple = ()
    is_blocked: bool = False


ONE_SEAT = {"max_drawings": 1}
LARGE = {"n": 8, "width": 256, "height": 256, "steps": 1}
PHASES = {
    "queued": Phase(
        draw_request(), is_queued, {"models": models(step_s=STEP_S), "engine": ONE_SEAT}, (), True
    ),
    "load": Phase(
        draw_request(),
        is_loading,
        {
            "models": [
                *models(),
                *(
                    ARTIST | {"name": name, "lazy": True, "script": {"load_s": SLOW_S}}
                    for name in LATE
                ),
            ]
        },
    ),
    "tokenize": Phase(draw_request("x" * 4096), is_tokenising, {"models": models(encode_s=SLOW_S)}),
    "decode image": Phase(
        draw_request(source={"image": white_png(6000, 5500)}, width=256, height=256),
        is_decoding_source,
        {"models": models()},
    ),
    "encode": Phase(draw_request(), is_encoding, {"models": models(verb_s={"encode": SLOW_S})}),
    "denoise": Phase(
        draw_request(steps=100), is_denoising, {"models": models(verb_s={"denoise": STEP_S})}
    ),
    "decode": Phase(
        draw_request(steps=2, width=240, height=240, n=4),
        is_decoding,
        {"models": models(verb_s={"decode": STEP_S})},
    ),
    "write": Phase(draw_request(**LARGE), is_writing, {"models": models()}, SMALL_WINDOW),
    "parked": Phase(
        draw_request(**LARGE | {"n": 8, "steps": 100, "preview_every": 1}),
        is_parked,
        {"models": models(), "engine": {"stream_buffer": 4}},
        SMALL_WINDOW,
    ),
}


@pytest.fixture(scope="module", params=PHASES)
def place(request):
    """Return a phase, a server slow enough to observe it, and names of models not loaded yet."""
    phase = PHASES[request.param]
    with fake(**phase.server) as server:
        artist_is_serving(server)
        server.cold = iter(LATE)
        yield request.param, phase, server


@dataclass
class Asked:
    """A request in its phase: its call and channel, and the counts before it."""

    call: Draw
    own: grpc.Channel
    between: object
    name: str
    before: object
    ends: dict = field(default_factory=dict)
    steps: int = 0


@contextlib.contextmanager
def blocker(channel, is_wanted, spares_others):
    """Send a drawing that has the only seat, and check that it gets the right images."""
    if not is_wanted:
        yield
        return
    with Draw(channel, draw_request("blocker", steps=60)) as call:
        assert call.read_until("progress") is not None
        yield
        call.finish()
        if spares_others:
            call.check()


@contextlib.contextmanager
def in_phase(place, *, server_timeout=None, spares_others=True):
    """Yield a request that has come into the phase."""
    name, phase, server = place
    request = pb.GenerateImageRequest()
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
            Draw(own, request, server_timeout=server_timeout) as call,
        ):
            if phase.options:
                call.read()
            asked = Asked(call, own, between, request.request_id, before, ends)
            wait_until(lambda: phase.is_there(server, asked), 15, name)
            asked.steps = stats(channel).step_count
            yield asked
    wait_all_idle(channel, 20)
    draw(channel, draw_request("after", model="artist")).check()


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


@pytest.mark.parametrize("how", ["cancel", pytest.param("close", marks=pytest.mark.full), "reset"])
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


def test_a_pause_that_aborts(place):
    name, _, server = place
    stub = stubs.ControlStub(server.channel)
    with in_phase(place, spares_others=False) as asked:
        stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_ABORT), timeout=5)
        try:
            heard = asked.call.finish()
            if name in ("load", "decode image"):  # the pause refuses it at the scheduler
                assert (heard.error.code(), reason(heard.error)) == (Code.UNAVAILABLE, "PAUSED")
            elif name == "tokenize":
                assert broken_fields(heard.error) == ["prompt"]  # it is too long in any case
            elif name == "write":  # the scheduler is done with it
                heard.check()
            else:
                assert (heard.error.code(), reason(heard.error)) == (Code.ABORTED, "ABORTED")
        finally:
            stub.Resume(pb.ResumeRequest(), timeout=5)


@contextlib.contextmanager
def unmeasured(place):
    """Yield the phase with a server on which no step was measured: otherwise the deadline would be
    refused, because steps are known to take longer."""
    name, phase, _ = place
    if name not in ("encode", "denoise", "decode"):
        yield place
        return
    with fake(**phase.server) as fresh:
        artist_is_serving(fresh)
        yield name, phase, fresh


def test_a_deadline(place):
    """Red if the end is counted as a cancel, or for another phase (`Supervisor._count`)."""
    name = place[0]
    timeout = {"load": 0.4, "tokenize": 0.4, "encode": 0.4, "decode image": 0.15}.get(name, 1.0)
    with unmeasured(place) as own:
        server = own[2]
        before = server.ask("deadlines")
        with in_phase(own, server_timeout=timeout) as asked:
            check_end(own, asked, "deadline", within_s=TIMEOUT_S + AT_ONCE_S, is_now=False)
            assert server.ask("deadlines") == before | {name: before.get(name, 0) + 1}
            heard = asked.call.finish()
            assert heard.error.code() is Code.DEADLINE_EXCEEDED
            if heard.error.details() != "the deadline passed":  # as in test_endings.py
                assert details(heard.error)["ErrorInfo"].metadata["phase"] == name


@pytest.mark.parametrize("name", ["denoise", "decode", "write"])
def test_a_reader_that_stalls_is_ended(name):
    """In the phases denoise and decode the slots are used up; in the last one the images wait."""
    request, buffer = {
        "denoise": (draw_request(steps=100, preview_every=1, width=256, height=256), 4),
        "decode": (draw_request(**LARGE), 2),
        "write": (draw_request(**LARGE), 256),
    }[name]
    engine = {"stream_buffer": buffer, "stall_timeout_s": 0.5}
    with (
        fake(models=models(), engine=engine) as server,
        connect(server.address, *SMALL_WINDOW) as own,
    ):
        artist_is_serving(server)
        with Draw(own, request) as call:
            assert call.read() is not None
            wait_until(lambda: ended(server.channel).get("stalled"), 10, "stalled")
            wait_all_idle(server.channel)
            heard = call.finish()
            assert (heard.error.code(), reason(heard.error)) == (Code.ABORTED, "READER_STALLED")
        draw(server.channel, draw_request()).check()


def test_a_reader_of_one_part_at_a_time_does_not_stall():
    """All images wait together, and reading them takes longer than the stall timeout."""
    with (
        fake(models=models(), engine={"stall_timeout_s": 1.0}) as server,
        connect(server.address, *SMALL_WINDOW) as own,
    ):
        artist_is_serving(server)
        with Draw(own, draw_request(**LARGE | {"n": 6})) as call:
            while call.read() is not None:
                time.sleep(0.3)
            call.check()


def test_a_slow_reader_gets_everything():
    with (
        fake(models=models(), engine={"stream_buffer": 2, "stall_timeout_s": 2.0}) as server,
        connect(server.address, *SMALL_WINDOW) as own,
    ):
        artist_is_serving(server)
        with Draw(own, draw_request(**LARGE | {"n": 6})) as call:
            while call.read() is not None:
                time.sleep(0.2)
            call.check()


@pytest.mark.parametrize("name", ["queued", "encode", "denoise", "decode", "write", "parked"])
def test_a_drain_lets_a_drawing_finish_and_a_second_signal_cuts_it(name):
    phase = PHASES[name]
    for is_cut in (False, True) if name in ("encode", "decode") else (True,):
        with fake(**phase.server) as server:
            artist_is_serving(server)
            with (
                blocker(server.channel, phase.is_blocked, spares_others=False),
                connect(server.address, *phase.options) as own,
            ):
                before, request = stats(server.channel), pb.GenerateImageRequest()
                request.CopyFrom(phase.request)
                request.request_id = "drained"
                with Draw(own, request) as call:
                    if phase.options:
                        call.read()
                    asked = Asked(call, own, None, "drained", before)
                    wait_until(lambda: phase.is_there(server, asked), 15, name)  # noqa: B023
                    server.signal()
                    wait_until(lambda: "draining" in server.log, 10, "the drain")
                    if is_cut:
                        server.signal()  # a second signal cuts
                        code = call.finish().error.code()
                        assert code in (Code.UNAVAILABLE, Code.CANCELLED)
                    else:
                        call.finish().check()
            assert server.wait() == (128 + 15 if is_cut else 0)


def test_pixels_are_what_a_client_reads_back(server):
    """The wire's check itself: another seed gives other pixels."""
    one, two = (draw(server.channel, draw_request(seed=seed)) for seed in (1, 2))
    assert pixels_of(one.files()[0]) != pixels_of(two.files()[0])
