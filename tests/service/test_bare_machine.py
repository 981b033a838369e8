"""A server, and the commands, where a container has next to nothing: no home directory, a
read-only file system, no compiler, a small /dev/shm."""

import json
import os

import pytest

from tests.support import bare_machine
from tests.support.server import MODEL_START_LIMIT_S, READY, process
from tests.support.wire import connect, generate, wait_idle

pytestmark = pytest.mark.model

COMPILERS = os.environ["PATH"]
AGAIN = "the kernels are compiled at every start: this user has no home directory"


@pytest.fixture
def root(tmp_path):
    """Return an empty folder for the new root."""
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def served(root, *args, **settings):
    """Start a server in such a container, generate when it is ready, and return its log."""
    argv = bare_machine.triolet("serve", "--port", "0", "--model", "demo-stories", *args)
    with process(bare_machine.command(root, *argv, **settings)) as server:
        address = server.wait_for_output(READY.search, MODEL_START_LIMIT_S)[1]
        with connect(address) as channel:
            heard = generate(channel, text="Once upon a time", max_tokens=4)
            assert heard.error is None
            assert heard.text()
            wait_idle(channel)
        assert server.stop() == 0
        return server.log


@pytest.mark.slow
def test_a_server_needs_no_home_no_writable_root_and_no_compiler(root):
    log = served(root, CXX="/bin/false")  # a compiler that fails, run after the cache was looked at
    assert "reference attention: /bin/false could not compile them" in log


@pytest.mark.full
def test_kernels_that_cannot_be_kept_are_compiled_with_a_warning(root):
    log = served(root, path=COMPILERS)
    assert log.count(AGAIN) == 1
    assert "runs compiled" in log


@pytest.mark.full
def test_a_worker_process_needs_no_more_than_the_server(root):
    served(root, "--runner", "process")


@pytest.mark.slow
def test_ranks_need_no_shared_memory(root):
    served(root, "--tensor-parallel-size", "2")


@pytest.mark.slow
def test_without_a_temporary_folder_the_start_says_what_is_missing(root):
    argv = bare_machine.triolet("serve", "--port", "0", "--model", "demo-stories")
    done = bare_machine.run(root, *argv, writable=())
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("triolet: ")
    assert "needs a temporary folder, and none can be written; name one in TMPDIR" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("writable", [("/tmp",), ()], ids=["with /tmp", "without /tmp"])
def test_doctor_names_what_is_missing(root, writable):
    argv = bare_machine.triolet("doctor", "--port", "0", "--json")
    done = bare_machine.run(root, *argv, writable=writable)
    found = {one["name"]: one for one in json.loads(done.stdout)}
    assert found["temporary files"]["is_fit"] == bool(writable)
    assert done.returncode == (not writable)
    if writable:
        assert found["devices"]["value"] == "cpu"
        assert "there is no C++ compiler" in found["attention"]["advice"]
        assert found["downloads"]["advice"].endswith("name a folder in HF_HOME")
    else:
        assert "TMPDIR" in found["temporary files"]["advice"]
