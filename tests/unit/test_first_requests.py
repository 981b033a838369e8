"""The commands that a server suggests when it starts fit its models and its address."""

import shlex
from types import SimpleNamespace

import pytest

from engine.status import Capability, ModelState, ModelStatus
from grpc_service.app.server_config import ServerConfig
from grpc_service.app.startup import first_requests
from grpc_service.cli.main import build_parser

# How a suggested command may begin, by the capability that the command needs.
FITTING = {
    Capability.TEXT_TO_TEXT: ("triolet generate", "grpcurl"),
    Capability.VISION: ("triolet generate --chat --image FILE",),
    Capability.TEXT_EMBEDDING: ("triolet embed",),
    Capability.IMAGE_EMBEDDING: ('triolet embed "a dog" "a ship" --image FILE',),
    Capability.SPARSE_EMBEDDING: ("triolet embed --kind sparse",),
    Capability.MULTI_VECTOR_EMBEDDING: ("triolet embed --kind multi-vector",),
    Capability.RERANK: ("triolet rerank",),
    Capability.TEXT_CLASSIFICATION: ('triolet classify "I',),
    Capability.TOKEN_CLASSIFICATION: ("triolet classify --aggregation",),
    Capability.TEXT_TO_IMAGE: ("triolet draw",),
}


def suggested(*capabilities, state=ModelState.READY, port=50051, **settings):
    """Return the commands of a server of models with these capabilities."""
    models = tuple(ModelStatus("m", state, one) for one in capabilities)
    engine = SimpleNamespace(list_models=lambda: models)
    return [line.strip() for line in first_requests(engine, ServerConfig(**settings), port)]


@pytest.mark.parametrize("capability", Capability)
def test_a_server_of_one_kind_suggests_only_what_that_kind_does(capability):
    found = suggested(capability)
    assert found
    assert [line for line in found if not line.startswith(FITTING[capability])] == []
    assert ("Once upon a time" in str(found)) == (capability is Capability.TEXT_TO_TEXT)


def test_each_kind_has_its_command():
    found = suggested(*Capability)
    starts = [start for starts in FITTING.values() for start in starts]
    assert [start for start in starts if not any(line.startswith(start) for line in found)] == []
    assert suggested(*Capability, state=ModelState.FAILED) == []


@pytest.mark.parametrize(
    ("settings", "server"),
    [
        ({}, ""),
        ({"port": 50052}, "127.0.0.1:50052"),
        ({"host": "0.0.0.0", "insecure": True}, ""),
        ({"host": "0.0.0.0", "insecure": True, "port": 50052}, "127.0.0.1:50052"),
        ({"host": "::", "insecure": True}, "[::1]:50051"),
        ({"host": "::1"}, "[::1]:50051"),
        ({"host": "10.1.2.3", "insecure": True}, "10.1.2.3:50051"),
        ({"uds": "/run/t.sock"}, "unix:/run/t.sock"),
    ],
)
def test_the_commands_have_an_address_that_a_client_can_use(settings, server):
    for line in suggested(*Capability, **settings):
        if line.startswith("triolet"):
            assert line.endswith(f" --server {server}" if server else line.split()[-1])
            assert ("--server" in line) == bool(server)
        else:
            assert f" {server or '127.0.0.1:50051'} triolet.v1" in line


def test_the_commands_are_ones_that_the_program_takes():
    for line in suggested(*Capability, port=50052):
        if line.startswith("triolet"):
            build_parser().parse_args(shlex.split(line)[1:])
