"""`triolet draw` against a fake server: the files that it writes, what it prints and refuses."""

import json
import os
import pty
import signal
import subprocess
import sys
from io import BytesIO

import pytest
from PIL import Image

from grpc_service.cli.main import main
from tests.support.image_generation_wire import ARTIST
from tests.support.server import fake
from tests.support.wire import SERVING, health, stats, wait_serving, wait_until


@pytest.fixture(scope="module")
def server():
    """Yield a server with an image model whose denoising steps take 50 ms."""
    with fake(models=[{"name": "fake"}, ARTIST | {"script": {"verb_s": {"denoise": 0.05}}}]) as one:
        wait_serving(one.channel)
        wait_until(lambda: health(one.channel, "model/artist") == SERVING)
        yield one


@pytest.fixture
def draw(server, capsys):
    """Return a function that runs the command and returns its exit code and what it printed."""

    def run(*argv):
        code = main(["draw", *map(str, argv), "--server", server.address])
        return code, *capsys.readouterr()

    return run


def opened(path):
    """Return the image in a file."""
    return Image.open(BytesIO(path.read_bytes()))


def test_an_image_is_written_to_its_file(draw, tmp_path):
    path = tmp_path / "cat.png"
    code, out, err = draw("a cat", "-o", path, "--size", "40x24", "--seed", 3, "--steps", 2)
    assert (code, err) == (0, "")
    assert out == f"{path}: 40 × 24, 3 KiB, seed 3\n"
    assert opened(path).size == (40, 24)


def test_several_images_are_numbered(draw, tmp_path):
    code, out, _ = draw("a cat", "-o", tmp_path / "cat.webp", "--n", 3, "--steps", 1)
    assert code == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["cat-1.webp", "cat-2.webp", "cat-3.webp"]
    assert len(out.splitlines()) == 3
    assert opened(tmp_path / "cat-2.webp").format == "WEBP"


def test_the_format_follows_the_name_or_the_flag(draw, tmp_path):
    draw("a cat", "-o", tmp_path / "a.jpg", "--steps", 1, "--quality", 30)
    draw("a cat", "-o", tmp_path / "b.data", "--steps", 1, "--format", "jpeg")
    draw("a cat", "-o", tmp_path / "c", "--steps", 1)
    formats = [opened(tmp_path / name).format for name in ("a.jpg", "b.data", "c")]
    assert formats == ["JPEG", "JPEG", "PNG"]


def test_every_flag_is_sent(draw, tmp_path):
    Image.new("RGB", (64, 32), "red").save(tmp_path / "red.png")
    given = ("--negative", "dogs", "--guidance", 3, "--scheduler", "euler", "--strength", 0.5)
    given += ("--image", tmp_path / "red.png", "--model", "artist", "--steps", 10, "--timeout", 20)
    code, out, _ = draw("a cat", "-o", tmp_path / "x.png", "--json", *given)
    assert code == 0
    started, image, finished = (json.loads(line) for line in out.splitlines())
    assert started["started"]["steps"] == 5
    assert started["started"]["scheduler"] == "euler"
    size = (tmp_path / "x.png").stat().st_size
    assert image == {"image": {"index": 0, "file": str(tmp_path / "x.png"), "bytes": size}}
    assert finished["finished"]["usage"]["steps"] == 5


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["-o", "no/such/folder/a.png"], "-o no/such/folder/a.png is no file in a folder"),
        (["-o", "-", "--n", "2"], "-o - takes one image"),
        (
            ["-o", "a.png", "--image", "nobody.png"],
            "--image nobody.png cannot be read: No such file or directory",
        ),
        (["-o", "a.png", "--size", "40"], "'40' is no size, such as 512x512"),
        (["-o", "a.png", "--steps", "0"], "steps: is 0, outside [1, 150]"),
        (["-o", "a.png", "--scheduler", "mine"], "scheduler: is not one of the model's"),
        (["-o", "a.png", "--model", "fake"], "model: "),
        ([], "the following arguments are required: -o"),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_what_is_wrong_is_said_and_nothing_is_written(server, tmp_path, given, error):
    command = [sys.executable, "-m", "grpc_service", "draw", "a cat", *given]
    done = subprocess.run(
        [*command, "--server", server.address],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode in (1, 2)
    assert error in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_image_goes_to_standard_output(server, tmp_path):
    command = [sys.executable, "-m", "grpc_service", "draw", "a cat", "-o", "-", "--steps", "1"]
    done = subprocess.run(
        [*command, "--server", server.address], capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith(b"\x89PNG")
    assert b"standard output: 32" in done.stderr


def test_a_terminal_shows_a_bar_and_ctrl_c_ends_the_drawing(server, tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "grpc_service", "draw", "a cat", "--steps", "150"]
    process = subprocess.Popen(
        [*command, "-o", str(tmp_path / "a.png"), "--server", server.address],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(theirs)
    seen = b""
    while b"/150" not in seen:
        seen += os.read(ours, 4096)
    assert b"drawing" in seen
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    os.close(ours)
    wait_until(lambda: not stats(server.channel).running, 5)
    assert list(tmp_path.iterdir()) == []
    process.stdout.close()
