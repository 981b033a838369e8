"""Puts other projects' tools at the disposal of the interop tests: buf, Node.js and Ruby."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.interop.caller import Caller
from tests.support import toolchains

CLIENTS = Path(__file__).resolve().parent / "clients"


@pytest.fixture(scope="session")
def buf() -> Path:
    """Path of the buf command."""
    toolchains.need_npm()
    return toolchains.BUF


@pytest.fixture(scope="session")
def node() -> Caller:
    """A client of @grpc/grpc-js, which reads the protos as they are."""
    toolchains.need_npm()
    return Caller([shutil.which("node") or "node", CLIENTS / "client.js"])


@pytest.fixture(scope="session")
def ruby(tmp_path_factory: pytest.TempPathFactory) -> Caller:
    """A client of Ruby's gRPC, with the code that protoc makes of the protos."""
    stubs = toolchains.make_ruby_stubs(tmp_path_factory.mktemp("ruby"))
    return Caller(["ruby", "-I", stubs, CLIENTS / "client.rb"], os.environ | {"RUBYOPT": ""})


@pytest.fixture(scope="session", params=["node", "ruby"])
def caller(request: pytest.FixtureRequest) -> Caller:
    """Each of the clients in turn."""
    return request.getfixturevalue(request.param)
