"""The protos by buf's standard, and the generated code by its generator."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT

SERVICE_RESPONSE_IGNORE = "  // buf:lint:ignore RPC_RESPONSE_STANDARD_NAME\n"


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command and return its result with its output."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture
def copy(tmp_path):
    """Return a copy of everything that the generator reads and writes."""
    for folder in ("proto", "grpc_service/_generated"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/regen_proto.py", tmp_path / "tools")
    return tmp_path


@pytest.mark.interop
def test_buf_lint_is_clean(buf):
    done = run(buf, "lint", cwd=ROOT / "proto")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.interop
def test_buf_lint_does_look_at_our_protos_and_only_at_them(buf, copy):
    control = copy / "proto/triolet/v1/control.proto"
    control.write_text(control.read_text().replace(SERVICE_RESPONSE_IGNORE, ""))
    done = run(buf, "lint", cwd=copy / "proto")
    assert done.returncode != 0
    assert "RPC response type" in done.stdout
    assert {line.split(":")[0] for line in done.stdout.splitlines()} == {"triolet/v1/control.proto"}


@pytest.mark.interop
def test_protos_are_formatted_as_buf_formats_them(buf):
    done = run(buf, "format", "--diff", "--exit-code", cwd=ROOT / "proto")
    assert done.returncode == 0, done.stdout


def test_generated_code_is_current():
    done = run(sys.executable, "tools/regen_proto.py", "--check", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_check_names_every_kind_of_drift_and_repairs_nothing(copy):
    generated = copy / "grpc_service/_generated"
    stub = generated / "triolet/v1/inference_pb2.pyi"
    stub.write_text(stub.read_text() + "# edited\n")
    (generated / "triolet/v1/models_pb2.py").unlink()
    (generated / "triolet/v1/forgotten_pb2.py").touch()

    done = run(sys.executable, "tools/regen_proto.py", "--check", cwd=copy)

    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "superfluous: grpc_service/_generated/triolet/v1/forgotten_pb2.py",
        "differs: grpc_service/_generated/triolet/v1/inference_pb2.pyi",
        "missing: grpc_service/_generated/triolet/v1/models_pb2.py",
    ]
    assert (generated / "triolet/v1/forgotten_pb2.py").exists()


def test_a_changed_proto_is_drift_until_it_is_generated(copy):
    proto = copy / "proto/triolet/v1/common.proto"
    proto.write_text(proto.read_text() + "\n// Planted.\nmessage Planted {}\n")
    check = (sys.executable, "tools/regen_proto.py", "--check")

    assert run(*check, cwd=copy).returncode == 1
    assert run(sys.executable, "tools/regen_proto.py", cwd=copy).returncode == 0
    assert run(*check, cwd=copy).returncode == 0


def test_a_proto_that_does_not_parse_leaves_the_generated_code_alone(copy):
    (copy / "proto/triolet/v1/common.proto").write_text("syntax = 'proto3'; message {")
    before = sorted(copy.rglob("*_pb2*"))

    done = run(sys.executable, "tools/regen_proto.py", cwd=copy)

    assert done.returncode != 0
    assert "triolet/v1/common.proto" in done.stderr
    assert sorted(copy.rglob("*_pb2*")) == before
