"""The process that decodes images: whatever happens to it, each image gets its own answer."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.images import decoder as decoder_module
from engine.images.decoder import DecoderProcess
from engine.images.decoder_main import NICENESS
from engine.images.errors import BadImage
from engine.images.fit import ImageFit, read_as
from tests.support import image_generation_tasks as image_tasks
from tests.support.image_generation_tasks import (
    LONG_S,
    about_the_process,
    end_by,
    fail,
    slowly_reversed,
)
from tests.support.images import picture

FIT = ImageFit(1, 10_000, size=(8, 8))


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def decoder():
    with closing(DecoderProcess()) as one:
        yield one


def test_an_image_is_read_in_another_process_of_lower_priority_as_here(decoder):
    assert decoder.pid == 0
    for read in (FIT.read, partial(read_as, size=(4, 2), max_pixels=10_000)):
        assert decoder(read, picture()) == read(picture())
    pid, nice, data = decoder(about_the_process, b"x")
    assert (pid, nice, data) == (decoder.pid, min(19, os.nice(0) + NICENESS), b"x")
    assert pid != os.getpid()


def test_large_files_and_empty_ones_arrive_whole(decoder):
    for data in (b"", os.urandom(16 * 2**20)):
        assert decoder(about_the_process, data)[2] == data


def test_a_file_that_is_no_image_is_refused_as_here_and_the_next_is_read(decoder):
    for data in (b"", b"GIF89a", picture()[:40]):
        with pytest.raises(BadImage) as here:
            FIT.read(data)
        with pytest.raises(BadImage) as there:
            decoder(FIT.read, data)
        assert str(there.value) == str(here.value)
    assert decoder(FIT.read, picture()) == FIT.read(picture())


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_an_image_that_ends_the_process_is_refused_and_the_next_is_read(decoder, number, caplog):
    with pytest.raises(BadImage, match=f"ended the process .* signal {int(number)} "):
        decoder(partial(end_by, number), b"x")
    assert len(caplog.records) == decoder_module.TRIES
    assert decoder(FIT.read, picture()) == FIT.read(picture())


def test_an_image_that_met_a_dying_process_is_read_by_the_next(decoder, tmp_path):
    once = tmp_path / "once"
    once.touch()
    assert decoder(partial(end_by, signal.SIGKILL), os.fsencode(once)) == os.fsencode(once)
    os.kill(decoder.pid, signal.SIGKILL)  # the process waits for the next image
    assert decoder(FIT.read, picture()) == FIT.read(picture())


def test_an_error_of_the_decoder_is_raised_with_its_stack(decoder):
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a bug"):
        decoder(fail, b"x")
    assert decoder(FIT.read, picture()) == FIT.read(picture())


def test_what_cannot_be_sent_is_raised_and_the_next_image_is_read(decoder):
    decoder(FIT.read, picture())
    with pytest.raises(Exception, match=r"Can't (pickle|get) local object"):
        decoder(lambda data: data, b"x")
    assert decoder(FIT.read, picture()) == FIT.read(picture())


def test_what_the_process_cannot_find_is_raised_and_the_next_image_is_read(decoder, monkeypatch):
    def only_here(data):
        return data

    only_here.__qualname__, only_here.__module__ = "only_here", image_tasks.__name__
    monkeypatch.setattr(image_tasks, "only_here", only_here, raising=False)
    with pytest.raises(RuntimeError, match="only_here"):
        decoder(only_here, bytes(2**20))
    assert decoder(FIT.read, picture()) == FIT.read(picture())


def test_images_of_several_threads_are_read_one_after_another(decoder):
    files, answers = [bytes([number]) * number for number in range(1, 9)], []
    threads = [
        threading.Thread(target=lambda data=data: answers.append(decoder(about_the_process, data)))
        for data in files
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(LONG_S)
    assert sorted(answer[2] for answer in answers) == files
    assert len({answer[0] for answer in answers}) == 1


@pytest.mark.slow
@settings(max_examples=12, deadline=None, database=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["read", "refuse", "fail", "close"]),
            st.binary(max_size=100_000),
            st.none() | st.floats(0, 0.15),
        ),
        max_size=7,
    )
)
def test_each_image_gets_its_own_answer_whenever_the_process_is_killed(steps):
    """A process takes about 0.1 s to start, so that it is killed while it starts, before an image,
    while it decodes one, or after that."""
    decoder = DecoderProcess()
    for action, data, kill_after_s in steps:
        killer = threading.Timer(kill_after_s or 0, kill_of, [decoder])
        if kill_after_s is not None:
            killer.start()
        if action == "read":
            assert decoder(slowly_reversed, data) == data[::-1]
        elif action == "refuse":
            with pytest.raises(BadImage, match="in no format"):
                decoder(FIT.read, b"no image" + data)
        elif action == "fail":
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                decoder(fail, data)
        else:
            decoder.close()
        killer.cancel()
        if kill_after_s is not None:
            killer.join()
    decoder.close()


def test_a_process_that_died_idle_is_no_try_of_the_next_image(decoder, tmp_path):
    decoder(FIT.read, picture())
    kill_of(decoder)
    once = tmp_path / "once"
    once.touch()
    assert decoder(partial(end_by, signal.SIGKILL), os.fsencode(once)) == os.fsencode(once)


def kill_of(decoder: DecoderProcess) -> None:
    """Kill the process, if there is one, and wait until it is dead: each image meets one kill at
    most."""
    pid = decoder.pid
    if pid:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_closing_ends_the_process_and_a_further_image_starts_another(decoder):
    first, _, _ = decoder(about_the_process, b"x")
    decoder.close()
    decoder.close()
    assert is_gone(first)
    assert decoder.pid == 0
    assert decoder(about_the_process, b"x")[0] != first


def test_without_a_process_images_are_decoded_here(decoder, monkeypatch, caplog):
    def none_left(*_args, **_fields):
        raise BlockingIOError("no process is left")

    monkeypatch.setattr(decoder_module, "start_child", none_left)
    before = len(os.listdir("/proc/self/fd"))
    assert decoder(about_the_process, b"x")[0] == os.getpid()
    assert "no process is left" in caplog.text
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.undo()
    assert decoder(about_the_process, b"x")[0] == decoder.pid


@pytest.mark.slow
def test_no_descriptor_is_left_behind(decoder):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(BadImage):
            decoder(partial(end_by, signal.SIGKILL), b"x")
        decoder(FIT.read, picture())
        decoder.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_process_ends_with_its_server_even_while_it_decodes():
    program = (
        "import sys, threading, time\n"
        "from engine.images.decoder import DecoderProcess\n"
        "from tests.support.image_generation_tasks import about_the_process, slow\n"
        "one = DecoderProcess()\n"
        "print(one(about_the_process, b'x')[0], flush=True)\n"
        "threading.Thread(target=one, args=(slow, b'x'), daemon=True).start()\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as server:
        pid = int(server.stdout.readline())
        assert not is_gone(pid)
        server.kill()
    limit = time.monotonic() + LONG_S / 2
    while not is_gone(pid):
        assert time.monotonic() < limit
        time.sleep(0.01)
