"""`triolet embed --file FILE --output OUT` against a server of fake models."""

import json
import signal
import subprocess
import sys
from array import array

import pytest

from engine.worker.fakes.encode import vector_of, weights_of
from grpc_service.cli.main import main
from tests.support.encode_wire import ENCODERS
from tests.support.server import fake
from tests.support.wire import SERVING, health, wait_until


@pytest.fixture(scope="module")
def server():
    """Yield a server whose steps take a while."""
    with fake(models=ENCODERS, script={"step_s": 0.01}) as one:
        wait_until(lambda: health(one.channel, "model/emb") == SERVING)
        yield one


def argv_of(server, *argv):
    return ["embed", "--server", server.address, "--model", "emb", *map(str, argv)]


def ids_of(text):
    return [byte + 1 for byte in text.encode()]


def in_float32(values):
    """Return numbers as they are in float32: nine digits of a line are enough for these."""
    return list(array("f", values))


def lines_of(path):
    """Return the lines of a file of results by index; each index comes once."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    found = {line["index"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_every_line_has_its_vector(server, tmp_path, capsys):
    texts = [f"text {number}" for number in range(3000)]
    (tmp_path / "in").write_text("\n".join(texts))
    argv = argv_of(server, "--file", tmp_path / "in", "--output", tmp_path / "out")
    assert main(argv) == 0
    found = lines_of(tmp_path / "out")
    assert set(found) == set(range(len(texts)))
    for index, text in enumerate(texts):
        assert in_float32(found[index]["values"]) == vector_of(ids_of(text))
        assert found[index]["tokens"] == len(text)
    assert "3000 lines, 3000 of them now" in capsys.readouterr().err
    assert main(argv) == 2  # the results are whole: nothing is overwritten
    assert "exists, and has no unfinished results" in capsys.readouterr().err


def test_a_command_that_was_killed_goes_on(server, tmp_path):
    texts = [f"line {number}" for number in range(20_000)]
    (tmp_path / "in").write_text("\n".join(texts) + "\n")
    out = tmp_path / "out"
    argv = argv_of(server, "--file", tmp_path / "in", "--output", out)
    kills = 0
    for most in (2000, 6000):
        process = subprocess.Popen([sys.executable, "-m", "grpc_service", *argv])
        try:
            wait_until(lambda most=most: out.exists() and out.read_bytes().count(b"\n") > most, 30)
        finally:
            kills += process.poll() is None
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert kills == 2
    before = out.read_bytes()
    assert before.count(b"\n") < len(texts)
    assert main(argv) == 0
    assert out.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    found = lines_of(out)
    assert set(found) == set(range(len(texts)))
    assert in_float32(found[12_345]["values"]) == vector_of(ids_of("line 12345"))
    assert not (tmp_path / "out.resume").exists()


def test_other_kinds_and_precisions_and_errors_of_lines(server, tmp_path, capsys):
    (tmp_path / "in").write_text("one\n\nthree\n")
    base = ["--file", tmp_path / "in", "--output"]
    assert main(argv_of(server, *base, tmp_path / "a", "--precision", "ubinary")) == 1
    found = lines_of(tmp_path / "a")
    assert found[1]["error"] == {"reason": "INVALID_REQUEST", "message": "has no tokens"}
    assert len(found[0]["packed"]) == 4
    assert "line 2 has no vector: has no tokens" in capsys.readouterr().err
    (tmp_path / "in").write_text("one\nthree\n")
    argv = argv_of(server, *base, tmp_path / "b", "--kind", "sparse", "--model", "sparse")
    assert main(argv) == 0
    one = lines_of(tmp_path / "b")[0]["sparse"]
    want = weights_of(ids_of("one"))
    assert dict(zip(one["indices"], in_float32(one["weights"]), strict=True)) == want
    argv = argv_of(server, *base, tmp_path / "c", "--kind", "multi-vector", "--model", "multi")
    assert main(argv) == 0
    line = lines_of(tmp_path / "c")[1]
    assert len(line["values"]) == 8 * line["rows"]


def test_wrong_uses_are_refused(server, tmp_path, capsys):
    (tmp_path / "in").write_bytes(b"good\n\xff\n")
    (tmp_path / "empty").write_text("")
    out = ["--output", tmp_path / "out"]
    for argv, text in (
        (out, "--output needs --file"),
        (["--file", "-", *out], "--output needs --file"),
        (["a text", "--file", tmp_path / "in", *out], "the lines of --file alone"),
        (["--file", tmp_path / "none", *out], "No such file"),
        (["--file", tmp_path / "empty", *out], "there are no texts"),
        (["--file", tmp_path / "in", *out], "line 2 of"),
    ):
        assert main(argv_of(server, *argv)) == 2, argv
        assert text in capsys.readouterr().err
