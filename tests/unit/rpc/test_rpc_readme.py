"""The example in the RPC library's README runs as it is printed there."""

import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue, UInt32Value

from tests.support.programs import imported_by

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "grpc_service" / "rpc" / "README.md").read_text()
SERVER = re.search(r"<!-- run by \S+ -->\n```python\n(.*?)```", README, re.DOTALL)[1]


@pytest.fixture
def address():
    """Run the example as a program, and yield its address."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            port = re.fullmatch(r"listening on port (\d+)\n", process.stdout.readline())[1]
            yield f"localhost:{port}"
        finally:
            process.kill()


def test_the_example_serves_clients_of_grpcio(address):
    with grpc.insecure_channel(address) as channel:
        greet = channel.unary_unary(
            "/demo.Greeter/Greet", StringValue.SerializeToString, StringValue.FromString
        )
        assert greet(StringValue(value="Ada"), timeout=20).value == "Hello, Ada!"
        with pytest.raises(grpc.RpcError) as caught:
            greet(StringValue(), timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "a name is needed"
        count = channel.unary_stream(
            "/demo.Greeter/Count", UInt32Value.SerializeToString, UInt32Value.FromString
        )
        assert [one.value for one in count(UInt32Value(value=5), timeout=20)] == [0, 1, 2, 3, 4]


def test_the_library_loads_neither_grpcio_nor_anything_of_triolet():
    imported = imported_by("import grpc_service.rpc.methods, grpc_service.rpc.server")
    ours = {one for one in imported if one.startswith(("engine", "grpc_service."))}
    assert all(one.startswith("grpc_service.rpc") for one in ours)
    assert "grpc" not in imported


def test_the_example_is_about_thirty_lines():
    assert len([line for line in SERVER.splitlines() if line]) <= 35
