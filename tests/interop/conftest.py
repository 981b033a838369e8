"""The interop tests' tools of other projects: buf, Node.js and Ruby."""

import os
import shutil
from pathlib import Path

import pytest

from tests.interop.caller import Caller
from tests.support import toolchains

CLIENTS = Path(__file__).resolve().parent / "clients"


@pytest.fixture(scope="session")
def buf() -> Path:
    """Return the path of the buf command."""
    toolchains.need_npm()
    return toolchains.BUF


@pytest.fixture(scope="session")
def node() -> Caller:
    """Return a client of @grpc/grpc-js, which reads the .proto files."""
    toolchains.need_npm()
    return Caller([shutil.which("node") or "node", CLIENTS / "client.js"])


@pytest.fixture(scope="session")
def ruby(tmp_path_factory: pytest.TempPathFactory) -> Caller:
    """Return a client of Ruby's gRPC, with the code that protoc makes of the protos."""
    stubs = toolchains.make_ruby_stubs(tmp_path_factory.mktemp("ruby"))
    return Caller(["ruby", "-I", stubs, CLIENTS / "client.rb"], os.environ | {"RUBYOPT": ""})


@pytest.fixture(scope="session", params=["node", "ruby"])
def caller(request: pytest.FixtureRequest) -> Caller:
    """Return each of the clients in turn."""
    return request.getfixturevalue(request.param)
