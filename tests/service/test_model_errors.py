"""A model that cannot be served, or an address that cannot be used.

`triolet serve` prints one clear sentence on standard error, with the exit code of a failure.
"""

import contextlib
import shutil
import socket

import pytest

from tests.conformance.test_load_errors import config, empty, truncate, unlink
from tests.support.server import DEMO, MODEL_START_LIMIT_S, real_process
from tests.support.wire import SERVING, health

pytestmark = pytest.mark.model


BROKEN = {
    "missing": shutil.rmtree,
    "empty": empty,
    "without a config": unlink("config.json"),
    "with truncated weights": truncate,
    "of an unsupported architecture": config(
        architectures=["MambaForCausalLM"], model_type="mamba"
    ),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Return the servers by name, all started at once."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, damage in BROKEN.items():
            directory = tmp_path_factory.mktemp("models") / "model"
            shutil.copytree(DEMO, directory)
            damage(directory)
            servers[name] = stack.enter_context(real_process("--model", directory, "--port", "0"))
        yield servers
        for server in servers.values():
            server.wait(MODEL_START_LIMIT_S)


def check_failed(server, code=1):
    """Check that the server failed with one sentence, and return it."""
    assert server.wait(MODEL_START_LIMIT_S) == code
    assert not server.out
    [told] = server.sentences()
    assert told.startswith("triolet: ")
    assert len(told) < 400
    assert "Error" not in told, "the sentence names a Python type"
    return told


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_model_that_cannot_be_served_is_one_sentence_and_a_failure(ended, name):
    told = check_failed(ended[name])
    assert told.startswith("triolet: model: ")
    reason = told.removeprefix("triolet: model: ").partition(" [")[0]
    assert "model:" not in reason, "the model is named once"
    assert ended[name].log.count(reason) == 1, "the log does not repeat the sentence"


@pytest.mark.slow
def test_the_log_has_the_details_that_the_sentence_leaves_out(ended):
    server = ended["with truncated weights"]
    server.wait(MODEL_START_LIMIT_S)
    assert "details of the failed load: SafetensorError" in server.log


def test_models_that_are_nowhere_fail_the_start_at_once():
    with real_process("--model", "/nope", "--model", "./neither", "--port", "0") as server:
        told = check_failed(server)
        assert "nope: there is no such directory or file [/nope]; neither: there is no" in told
        assert "loading" not in server.log
        assert "Worker" not in server.log


def test_a_port_in_use_is_one_sentence_and_a_failure_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with real_process("--model", DEMO, "--port", port) as server:
            assert f"127.0.0.1:{port}" in check_failed(server)
            assert "loading" not in server.log


@pytest.mark.slow
def test_the_unix_socket_of_a_running_server_is_not_taken_from_it(demo):
    path = demo.address.removeprefix("unix:")
    with real_process("--model", DEMO, "--uds", path) as server:
        assert demo.address in check_failed(server)
    assert health(demo.channel) == SERVING


@pytest.mark.slow
def test_serving_other_machines_without_a_key_is_refused_at_once():
    with real_process("--model", DEMO, "--host", "0.0.0.0", "--port", "0") as server:
        assert "--insecure" in check_failed(server, code=2)
