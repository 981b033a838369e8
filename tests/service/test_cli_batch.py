"""`triolet batch`: its results are those of an unbroken run however often it is killed, and a file
that is wrong is refused before anything is computed."""

import json
import signal
import subprocess
import sys
import time

import pytest

from engine.errors import ConfigError
from grpc_service.cli.batch_files import Requests, keep, open_journal, write_results
from tests.support.files import largest_file
from tests.support.server import openai_port_of, real

BATCH = "import sys; from grpc_service.cli.entry import main; sys.exit(main())"
WORDS = ("dragon", "boat", "tree", "king", "mouse")


@pytest.fixture(scope="module")
def server():
    """Serve the story model by both doors, in float32."""
    with real("--dtype", "float32", "--openai-port", "0") as one:
        one.openai_port = openai_port_of(one)
        yield one


def start(server, file, *more):
    argv = ["batch", str(file), "--server", server.address, "--parallel", "8", *more]
    return subprocess.Popen([sys.executable, "-c", BATCH, *argv], stderr=subprocess.PIPE, text=True)


def own_line(index):
    text = f"Once upon a time a {WORDS[index % 5]} number {index}"
    return {"text": text, "sampling": {"temperature": 0, "max_tokens": 4 + index % 20}}


def openai_line(index):
    body = {"model": "stories", "prompt": f"The {WORDS[index % 5]}", "temperature": 0}
    return {
        "custom_id": f"own {index}",
        "method": "POST",
        "url": "/v1/completions",
        "body": body | {"max_tokens": 5, **({"n": "x"} if index % 10 == 3 else {})},
    }


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(path):
    return [(one["index"], one["choices"][0]["text"], one["choices"][0]["reason"]) for one in path]


@pytest.mark.model
@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.full)])
def test_a_batch_that_is_killed_has_the_results_of_an_unbroken_one(server, tmp_path, count):
    whole = write(tmp_path / "whole", map(own_line, range(count)))
    broken = write(tmp_path / "broken", map(own_line, range(count)))
    process = start(server, whole)
    said = process.communicate(timeout=3000)[1]
    assert process.returncode == 0, said
    wanted = read(tmp_path / "whole.results.jsonl")
    assert [one["index"] for one in wanted] == list(range(count))
    journal, done = tmp_path / "broken.results.jsonl.journal", 0
    for part, sign in ((1, signal.SIGKILL), (2, signal.SIGKILL), (3, signal.SIGINT)):
        process = start(server, broken)
        while not journal.exists() or journal.read_bytes().count(b"\n") <= part * count // 4:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        process.send_signal(sign)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == (130 if sign is signal.SIGINT else -sign), said
        lines = journal.read_bytes().count(b"\n")
        assert lines > done
        done = lines
        if sign is signal.SIGINT:
            assert "the same command goes on" in said
        else:
            with journal.open("ab") as file:
                file.write(b'{"n": 0, "ok": tr')  # as a kill may tear a line
    process = start(server, broken)
    said = process.communicate(timeout=3000)[1]
    assert process.returncode == 0, said
    assert texts(read(tmp_path / "broken.results.jsonl")) == texts(wanted)
    assert not [*tmp_path.glob("*.journal*")]
    assert not (tmp_path / "broken.errors.jsonl").exists()


@pytest.mark.model
def test_requests_of_openais_form_have_its_results_and_errors_in_order(server, tmp_path):
    file = write(tmp_path / "in", map(openai_line, range(40)))
    process = start(server, file, "--url", f"http://127.0.0.1:{server.openai_port}")
    said = process.communicate(timeout=100)[1]
    assert process.returncode == 1, said
    assert "40 requests, 4 errors" in said
    good, bad = read(tmp_path / "in.results.jsonl"), read(tmp_path / "in.errors.jsonl")
    wrong = [f"own {index}" for index in range(3, 40, 10)]
    assert [one["custom_id"] for one in bad] == wrong
    ids = [f"own {index}" for index in range(40)]
    assert [one["custom_id"] for one in good] == [name for name in ids if name not in wrong]
    assert all(one["response"]["body"]["choices"][0]["text"] for one in good)
    assert {one["response"]["status_code"] for one in bad} == {400}
    assert all(one["response"]["body"]["error"]["param"] == "n" for one in bad)


GOOD = json.dumps(own_line(0))
OPENAI = json.dumps(openai_line(0))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no requests"),
        ("\n \n", "has no requests"),
        (f"{GOOD}\nnot json\n{GOOD}\n", "line 2 is no JSON"),
        (f"{GOOD}\n{GOOD[:20]}", "line 2 is no JSON; the file may be cut short"),
        ("[1]\n", "line 1 is not an object"),
        (f"{GOOD}\n{OPENAI}\n", "line 2 is not of the form that the first line has"),
        (f"{OPENAI}\n{OPENAI}\n", "line 2 has the custom_id of a line before it"),
        ('{"text": "a", "sampling": {"top": 1}}\n', "line 1 is no GenerateRequest"),
        ('{"request_id": "a", "text": "b"}\n' * 2, "line 2 has the request_id"),
        (OPENAI.replace("POST", "GET"), "line 1 has a method"),
        (OPENAI.replace("/v1/completions", "/v1/files"), "line 1 has a url"),
        (OPENAI.replace('"custom_id"', '"id"'), "line 1 has id"),
        (OPENAI.replace('"max_tokens"', '"stream": true, "max_tokens"'), "a body with stream"),
    ],
)
def test_a_wrong_file_is_refused_by_line(tmp_path, text, words):
    (tmp_path / "in").write_text(text)
    with pytest.raises(ConfigError, match=words):
        Requests(str(tmp_path / "in"))


def test_results_of_another_batch_are_in_the_way(tmp_path):
    one = Requests(str(write(tmp_path / "one", [own_line(0), own_line(2)])))
    other = Requests(str(write(tmp_path / "other", [own_line(1)])))
    out, errors = str(tmp_path / "out"), str(tmp_path / "errors")
    with open_journal(one, "m", out, errors) as journal:
        with pytest.raises(ConfigError, match="is being written by another process"):
            open_journal(one, "m", out, errors)
        keep(journal, 1, {"a": 1}, ok=True)
    for requests, model, names in ((other, "m", "input file"), (one, "n", "--model")):
        with pytest.raises(ConfigError, match=f"has results with another {names}; remove it"):
            open_journal(requests, model, out, errors)
    with open_journal(one, "m", out, errors) as journal:
        assert (0 in journal.done, 1 in journal.done) == (False, True)
        keep(journal, 0, {"b": 2}, ok=False)
        with largest_file(5), pytest.raises(ConfigError, match="out cannot be written"):
            write_results(journal, out, errors)
    assert not (tmp_path / "out").exists()
    with open_journal(one, "m", out, errors) as journal:
        assert write_results(journal, out, errors) == 1
    assert read(tmp_path / "out") == [{"a": 1}]
    assert read(tmp_path / "errors") == [{"b": 2}]
    with pytest.raises(ConfigError, match="is there already"):
        open_journal(other, "m", out, errors)
