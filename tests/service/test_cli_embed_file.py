"""`triolet embed --file FILE --output OUT` against a server of fake models."""

import json
import signal
import subprocess
import sys
import time
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


def run_apart(argv, *before):
    """Start the command in a process of its own, which begins as ``before`` if there is one."""
    command = [*before, sys.executable, "-m", "grpc_service", *argv]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_at_any_moment_says_how_to_go_on(server, tmp_path):
    texts = [f"line {number}" for number in range(20_000)]
    (tmp_path / "in").write_text("\n".join(texts))
    out = tmp_path / "out"
    argv = argv_of(server, "--file", tmp_path / "in", "--output", out)
    for wait_s in (0.1, 0.4, 0.7, 0.9, 1.2):
        process = run_apart(argv)
        time.sleep(wait_s)
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=20)[1]
        if process.returncode == 0:
            break
        assert process.returncode == 130, told
        assert "Traceback" not in told
        if out.exists() and out.stat().st_size:
            assert "lines have results; the same command goes on" in told
    if process.returncode:
        assert main(argv) == 0
    assert set(lines_of(out)) == set(range(len(texts)))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in", "out"]


# A process whose files have at most 300,000 bytes. It sets the limit itself: a function between
# fork and exec would have gRPC's thread of this process end the child (grpc/grpc#43055).
LIMITED = (
    sys.executable,
    "-c",
    "import os, resource, sys\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
    "os.execv(sys.argv[1], sys.argv[1:])",
)


def test_a_full_disk_is_told_and_the_command_goes_on_when_there_is_room(server, tmp_path):
    texts = [f"line {number}" for number in range(5000)]
    (tmp_path / "in").write_text("\n".join(texts))
    out = tmp_path / "out"
    argv = argv_of(server, "--file", tmp_path / "in", "--output", out)
    for _ in range(2):
        process = run_apart(argv, *LIMITED)
        told = process.communicate(timeout=30)[1]
        assert process.returncode == 2, told
        assert f"triolet: {out} cannot be written: File too large" in told
        assert "Traceback" not in told
        assert 200_000 < out.stat().st_size <= 300_000
    assert main(argv) == 0
    assert set(lines_of(out)) == set(range(len(texts)))


def test_one_command_at_a_time_writes_an_output_and_none_by_other_options(server, tmp_path, capsys):
    (tmp_path / "in").write_text("\n".join(f"line {number}" for number in range(20_000)))
    (tmp_path / "other").write_text("a line\n")
    out = tmp_path / "out"
    argv = argv_of(server, "--file", tmp_path / "in", "--output", out)
    first = run_apart(argv)
    wait_until(lambda: out.exists() and out.stat().st_size > 0, 30)
    assert main(argv) == 2
    assert "is being written by another process" in capsys.readouterr().err
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = out.read_bytes()
    for more in (["--precision", "ubinary"], ["--model", "sparse"], ["--file", tmp_path / "other"]):
        assert main([*argv, *map(str, more)]) == 2
        assert "remove it and out.resume to begin anew" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert main(argv) == 0
    assert set(lines_of(out)) == set(range(20_000))


def test_other_kinds_and_precisions_and_errors_of_lines(server, tmp_path, capsys):
    (tmp_path / "in").write_text("one\n\nthree\n")
    base = ["--file", tmp_path / "in", "--output"]
    assert main(argv_of(server, *base, tmp_path / "a", "--precision", "ubinary")) == 1
    found = lines_of(tmp_path / "a")
    assert found[1]["error"] == {"reason": "INVALID_REQUEST", "message": "text: has no tokens"}
    assert len(found[0]["packed"]) == 4
    assert "line 2 has no vector: text: has no tokens" in capsys.readouterr().err
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


def test_a_line_that_no_message_has_room_for_has_an_error_of_its_own(server, tmp_path, capsys):
    """The old fault: the command failed without a word on the line, and failed alike when it was to
    go on."""
    lines = [f"line {number}" for number in range(3000)]
    for place in (0, 1500, 1501, 2999):
        lines[place] = "x" * (5 * 2**20 + place)
    (tmp_path / "in").write_text("\n".join(lines))
    began = time.monotonic()
    assert main(argv_of(server, "--file", tmp_path / "in", "--output", tmp_path / "out")) == 1
    assert time.monotonic() - began < 30
    found = lines_of(tmp_path / "out")
    assert set(found) == set(range(3000))
    wrong = {place: line["error"]["reason"] for place, line in found.items() if "error" in line}
    assert wrong == dict.fromkeys((0, 1500, 1501, 2999), "REQUEST_TOO_LARGE")
    assert "line 1501 has no vector: " in capsys.readouterr().err


def test_a_file_that_is_not_utf_8_is_refused_before_anything_is_computed(server, tmp_path, capsys):
    """The old fault: it was found after all the lines before it, and the repaired file began
    anew."""
    for end in (b"\xff", b"\xc3"):
        (tmp_path / "in").write_bytes("é\n".encode() * 700_000 + end)
        argv = argv_of(server, "--file", tmp_path / "in", "--output", tmp_path / "out")
        assert main(argv) == 2
        assert "line 700001 of" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_wrong_uses_are_refused(server, tmp_path, capsys):
    (tmp_path / "in").write_bytes(b"good\n\xff\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "right").write_text("good\n")
    out = ["--output", tmp_path / "out"]
    for argv, text in (
        (out, "--output needs --file"),
        (["--file", "-", *out], "--output needs --file"),
        (["a text", "--file", tmp_path / "in", *out], "the lines of --file alone"),
        (["--file", tmp_path / "none", *out], "No such file"),
        (["--file", tmp_path / "empty", *out], "there are no texts"),
        (["--file", tmp_path / "in", *out], "line 2 of"),
        (["--file", tmp_path / "right", "--output", "/dev/null"], "is no regular file"),
        (["--file", tmp_path / "right", "--output", tmp_path], "is no regular file"),
    ):
        assert main(argv_of(server, *argv)) == 2, argv
        assert text in capsys.readouterr().err
