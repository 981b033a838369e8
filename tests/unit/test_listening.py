"""How many connections a server accepts, by the limit of file descriptors."""

import logging
import resource

import pytest

from grpc_service.app import application
from grpc_service.app.listening import OTHER_FILES, num_connections
from grpc_service.app.server_config import ServerConfig

INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "refuses", "found", "raised_to"),
    [
        (1024, 4096, False, 1000, 1000 + OTHER_FILES),
        (1024, INFINITY, False, 1000, 1000 + OTHER_FILES),
        (1024, 1024, False, 1024 - OTHER_FILES, None),
        (512, 1024, False, 1024 - OTHER_FILES, 1024),
        (1024, 4096, True, 1024 - OTHER_FILES, None),
        (100, 100, False, 1, None),
        (4096, 4096, False, 1000, None),
        (INFINITY, INFINITY, False, 1000, None),
    ],
)
def test_there_are_descriptors_for_all_connections(
    soft, hard, refuses, found, raised_to, monkeypatch, caplog
):
    """Without a free descriptor a server accepts nobody, and one address could take all of them."""
    raised = []

    def set_limit(_, limits):
        if refuses:
            raise ValueError("the system has a limit of its own")
        raised.append(limits)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    with caplog.at_level(logging.WARNING):
        assert num_connections(1000) == found
    assert raised == ([] if raised_to is None else [(raised_to, hard)])
    assert bool(caplog.text) == (found < 1000)


@pytest.mark.parametrize(("hard", "found"), [(INFINITY, 1000), (1536, 512 - OTHER_FILES)])
def test_ports_for_gateways_have_descriptors_too(hard, found, monkeypatch):
    """Red if the connections of one port can take the descriptors of all ports."""
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    config = ServerConfig(max_connections=1000, vllm_engine_ports=(("a", 1), ("b", 2)))
    limits = application._limits_of(config)
    assert limits.connections_max == found
    assert raised == [(3 * (found + OTHER_FILES), hard)]
