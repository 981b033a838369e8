"""GenerateImage over gRPC, with a fake model: events, images and refusals.

test_endings.py has how calls end early.
"""

import asyncio
import time
import zlib
from io import BytesIO
from struct import pack

import grpc
import pytest
from PIL import Image

from grpc_service.client import AsyncClient, Client
from grpc_service.client import messages as pb
from tests.support.image_generation_wire import ARTIST, Draw, draw, draw_request, pixels_of
from tests.support.server import fake
from tests.support.wire import (
    SERVING,
    SMALL_WINDOW,
    broken_fields,
    connect,
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


def white_png(width, height):
    """Return a white PNG, which is a small file whatever its size."""

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
    assert given.of("started")[0].steps == 3  # strength 0.8 of the model's 4 steps
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
    ({"width": 1024, "height": 1024}, "n"),  # more pixels than the fake draws
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
    ({"source": {"image": white_png(1, 400_000)}}, "source.image"),  # would be 17,528 pixels high
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
        draw(server.channel, draw_request(steps=2)).check()  # lets the server measure a step
        heard = draw(server.channel, draw_request(steps=50), timeout=3)
        assert reason(heard.error) == "DEADLINE_INFEASIBLE"
        assert heard.error.code() is Code.DEADLINE_EXCEEDED
        assert not heard.of("started")
        with Draw(server.channel, draw_request(steps=100)) as other:
            assert other.read_until("progress") is not None
            # This drawing needs 0.5 s or more, would wait for 10 s, and has a deadline after 3 s.
            waits = draw(server.channel, draw_request(steps=5), timeout=3)
            assert reason(waits.error) == "DEADLINE_INFEASIBLE"
            assert waits.of("started"), "it was in the queue"
            assert other.read() is not None


def test_two_requests_alternate():
    """Red if all steps of one request are computed before those of the other."""
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
        # "one" began alone, took turns with the 10 steps of "two", and ended alone
        assert 5 <= before + 10 <= steps / 2 + 12


# ---- slow readers ------------------------------------------------------------------------------

LARGE = {"n": 6, "width": 256, "height": 256, "steps": 1}


@pytest.mark.parametrize(
    ("engine", "seconds"),
    [({"stall_timeout_s": 3.0}, 0.4), ({"stream_buffer": 2, "stall_timeout_s": 20.0}, 0.2)],
)
def test_a_slow_reader_gets_everything(engine, seconds):
    """In the first case all images fit into the buffer, and reading them takes longer than the
    stall timeout."""
    with (
        fake(models=models(), engine=engine) as server,
        connect(server.address, *SMALL_WINDOW) as own,
    ):
        artist_is_serving(server)
        with Draw(own, draw_request(**LARGE)) as call:
            while call.read() is not None:
                time.sleep(seconds)
            call.check()


def test_pixels_are_what_a_client_reads_back(server):
    """The comparison of pixels can fail: another seed gives other pixels."""
    one, two = (draw(server.channel, draw_request(seed=seed)) for seed in (1, 2))
    assert pixels_of(one.files()[0]) != pixels_of(two.files()[0])
