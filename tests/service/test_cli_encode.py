"""`triolet embed`, `rerank` and `classify` against a scripted backend."""

import asyncio
import contextlib
import io
import itertools
import json
import math
import os
import pty
import signal
import subprocess
import sys
from array import array
from types import SimpleNamespace

import numpy as np
import pytest

from engine.core.common.events import Finished
from engine.core.common.types import EndReason, Timings, Usage
from engine.errors import FieldViolation, InvalidRequest, Overloaded
from engine.requests.encode.classify_values import Classification, ClassifyRequest
from engine.requests.encode.values import Embedding, EmbedRequest, Score
from engine.requests.text.values import Started
from grpc_service.cli import embed
from grpc_service.cli import texts as cli_texts
from grpc_service.cli.main import main
from tests.service.fake_backend import FakeBackend, run
from tests.service.test_cli_client import SILENT, process_of

STARTED = Started("r1", "emb", 4)
FINISHED = Finished("r1", 0, EndReason.STOP, Usage(4, 0, 0), Timings())


# Fields of a result without entities.
NOTHING = {"scores": array("f"), "ids": array("I"), "spans": array("I")}


def angle_of(text):
    """Return the angle of an input's vector in radians; an image's bytes are taken for its text."""
    text = text.decode() if isinstance(text, bytes) else text
    return math.radians(float(text) if text.replace(".", "").isdigit() else len(text))


class Encoder(FakeBackend):
    """A backend that gives vectors and scores.

    A vector has 2 numbers and the norm 2. The vector's angle in degrees is the number in the text,
    or else the text's length; a score is a hundredth of that angle. Results come in reverse order.
    """

    def __init__(self, error_in=None):
        super().__init__()
        self.error_in = error_in
        self.engine.script_of = self.script_of

    def script_of(self, request):
        batches = [[STARTED]]
        if isinstance(request, EmbedRequest):
            for index, text in reversed(list(enumerate(request.inputs))):
                at = angle_of(text)
                values = array("f", [2 * math.cos(at), 2 * math.sin(at)])
                batches.append([Embedding(index, values, len(text) + 2)])
        elif isinstance(request, ClassifyRequest):
            for index, text in reversed(list(enumerate(request.inputs))):
                length = len(text if isinstance(text, str) else "".join(text))
                names, scores = ("sad", "glad", "B-x"), array("f", [length / 100, 0.25])
                labels = array("I", [2] if request.aggregation else [1, 0])
                spans = array("I", [0, 2]) if request.aggregation else None
                found = Classification(index, scores[: len(labels)], labels, names, 3, spans)
                batches.append([found if text != "none" else found._replace(**NOTHING)])
        else:
            for index, text in reversed(list(enumerate(request.documents))):
                batches.append([Score(index, math.degrees(angle_of(text)) / 100)])
        is_broken = len(self.streams) == self.error_in
        error = InvalidRequest([FieldViolation("inputs[1].text", "has no tokens")])
        return {
            "batches": [*batches, [FINISHED]],
            "error": error if is_broken else None,
            "credited": (object,),
        }


@pytest.fixture
def stdin(monkeypatch):
    """Return a function that sets the standard input of the command."""

    def give(text, *, is_terminal=False):
        stream = io.StringIO(text)
        stream.isatty = lambda: is_terminal
        monkeypatch.setattr("sys.stdin", stream)

    return give


# ---- embed -----------------------------------------------------------------------------------


def test_embed_shows_how_alike_texts_and_images_are(ask, tmp_path):
    names = [str(tmp_path / name) for name in ("dog.png", "ship.jpg")]
    for name, angle in zip(names, (b"60", b"90"), strict=True):
        (tmp_path / name).write_bytes(angle)
    backend = Encoder()
    code, out, err = ask(backend, "embed", "0", "--image", *names, "--model", "clip")
    assert (code, err) == (0, "")
    assert backend.streams[0].request.inputs == ("0", b"60", b"90")
    lines = out.splitlines()
    assert [line.split()[-1] for line in lines[1:4]] == ["0", *names]
    assert lines[5:9] == [
        "cosine similarity",
        "   0      1      2",
        "0  1.000  0.500  0.000",
        "1  0.500  1.000  0.866",
    ]


def test_embed_of_images_alone_reads_no_standard_input(ask, tmp_path, stdin):
    stdin("a line\n")
    (tmp_path / "a.png").write_bytes(b"60")
    backend = Encoder()
    assert ask(backend, "embed", "--image", str(tmp_path / "a.png"))[0] == 0
    assert backend.streams[0].request.inputs == (b"60",)


def test_embed_names_an_image_that_is_no_file(ask, tmp_path):
    code, _, err = ask(Encoder(), "embed", "--image", str(tmp_path / "none.png"))
    assert code == 2
    assert "none.png cannot be read: No such file or directory; texts come before --image" in err


def test_many_images_are_sent_in_several_calls_each_read_for_its_own(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(cli_texts, "IMAGES_MAX", 2)
    names = [str(tmp_path / f"{number}.png") for number in range(5)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(b"%d" % number)
    backend = Encoder()
    code, out, _ = ask(backend, "embed", "a", "--image", *names, "--json")
    assert code == 0
    assert [len(stream.request.inputs) for stream in backend.streams] == [3, 2, 1]
    assert [json.loads(line)["index"] for line in out.splitlines()] == list(range(6))
    monkeypatch.setattr(cli_texts, "IMAGE_BYTES_MAX", 1)
    backend = Encoder()
    ask(backend, "embed", "--image", *names)
    assert [len(stream.request.inputs) for stream in backend.streams] == [1] * 5


def test_embed_shows_the_vectors_and_their_similarities(ask):
    code, out, err = ask(Encoder(), "embed", "0", "60", "90")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "INDEX  TOKENS  LENGTH  FIRST NUMBERS  TEXT",
        "0      3       2.000   +2.000 +0.000  0",
        "1      4       2.000   +1.000 +1.732  60",
        "2      4       2.000   +0.000 +2.000  90",
        "",
        "cosine similarity",
        "   0      1      2",
        "0  1.000  0.500  0.000",
        "1  0.500  1.000  0.866",
        "2  0.000  0.866  1.000",
        "",
        "3 vectors of 2 numbers by emb",
    ]


def test_embed_of_many_texts_names_each_ones_nearest(ask):
    angles = [str(angle) for angle in (0, 3, 90, 92, 180, 185, 270, 271, 40, 47, 140)]
    _, out, _ = ask(Encoder(), "embed", *angles)
    head, *rows = out.splitlines()[:12]
    assert head.split() == ["INDEX", "TOKENS", "LENGTH", "FIRST", "NUMBERS", "NEAREST", "TEXT"]
    nearest = [row.split()[5] for row in rows]
    assert nearest == ["1", "0", "3", "2", "5", "4", "7", "6", "9", "8", "4"]
    assert rows[0].split()[6] == f"({math.cos(math.radians(3)):.3f})"
    assert "cosine similarity" not in out
    assert out.endswith("\n11 vectors of 2 numbers by emb\n")


def test_the_nearest_is_the_one_of_a_comparison_of_all_pairs(ask, stdin):
    angles = [f"{number * 137.5 % 360:.4f}" for number in range(120)]
    stdin("\n".join(angles))
    _, out, _ = ask(Encoder(), "embed")
    at = np.radians(np.array(angles, dtype=float))
    alike = np.cos(at[:, None] - at[None, :])
    np.fill_diagonal(alike, -2)
    nearest = [int(row.split()[5]) for row in out.splitlines()[1:121]]
    np.testing.assert_allclose(alike[np.arange(120), nearest], alike.max(axis=1), atol=1e-6)


def test_too_many_texts_to_compare_show_only_numbers(ask, stdin):
    stdin("\n".join(map(str, range(embed.NEAREST_MAX + 1))))
    _, out, _ = ask(Encoder(), "embed")
    assert "NEAREST" not in out
    assert out.splitlines()[-2:] == [
        "301 vectors of 2 numbers by emb",
        "Similarities are shown for at most 300 texts; --json prints the vectors.",
    ]


def test_a_zero_vector_is_similar_to_nothing(ask, monkeypatch):
    monkeypatch.setattr("tests.service.test_cli_encode.angle_of", lambda text: 0.0)
    monkeypatch.setattr(math, "cos", lambda at: 0.0)
    code, out, err = ask(Encoder(), "embed", "a", "b")
    assert (code, err) == (0, "")
    assert out.splitlines()[-3:-1] == ["1  0.000  0.000", ""]


def test_embed_sends_its_arguments(ask):
    backend = Encoder()
    given = "--dimensions 2 --prompt-name query --no-normalize --no-truncate --model emb"
    assert ask(backend, "embed", "a", "b", *given.split(), "--timeout", "20")[0] == 0
    request = backend.last.request
    assert (request.inputs, request.dimensions, request.prompt_name) == (("a", "b"), 2, "query")
    assert (request.normalize, request.truncate, request.model) == (False, False, "emb")
    assert 15 < request.timeout_s < 21
    ask(backend, "embed", "a", "--normalize")
    assert (backend.last.request.normalize, backend.last.request.truncate) == (True, None)
    ask(backend, "embed", "a")
    assert backend.last.request == EmbedRequest(inputs=("a",))


def test_embed_sends_a_precision_and_the_ranges_of_a_file(ask, tmp_path):
    backend, file = Encoder(), tmp_path / "ranges.json"
    file.write_text('{"low": [0, -1], "high": [1, 1.5]}')
    ask(backend, "embed", "a", "--precision", "int8", "--ranges", str(file))
    request = backend.last.request
    assert (request.precision, request.ranges) == ("int8", ((0, -1), (1, 1.5)))
    for text, reason in (("[]", "is not JSON of the form"), ("{", "is not JSON of the form")):
        file.write_text(text)
        code, _, err = ask(backend, "embed", "a", "--ranges", str(file))
        assert (code, reason in err) == (2, True), err
    code, _, err = ask(backend, "embed", "a", "--ranges", str(tmp_path / "none"))
    assert (code, "cannot be read: No such file" in err) == (2, True), err


def test_embed_shows_sparse_vectors_and_their_products(ask):
    backend = Encoder()
    found = [
        Embedding(0, array("f", [0.5, 2.0]), 3, indices=array("I", [3, 70])),
        Embedding(1, array("f", [1.5, 4.0]), 4, indices=array("I", [3, 9])),
    ]
    batches = [[STARTED], found, [FINISHED]]
    backend.engine.script_of = lambda _: {"batches": batches, "credited": (object,)}
    given = ["--kind", "sparse", "--top-k", "2", "--threshold", "0.25"]
    code, out, err = ask(backend, "embed", "a", "b", *given)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "INDEX  TOKENS  WEIGHTS  GREATEST          TEXT",
        "0      3       2        70:2.000 3:0.500  a",
        "1      4       2        9:4.000 3:1.500   b",
        "",
        "dot product",
        "   0      1",
        "0  4.250  0.750",
        "1  0.750  18.250",
        "",
        "2 vectors by emb",
    ]
    request = backend.last.request
    assert (request.kind, request.top_k, request.threshold) == ("sparse", 2, 0.25)


def test_embed_shows_how_many_vectors_a_text_has(ask):
    backend = Encoder()
    values = array("f", [0.5, -2.0, 1.0, 3.0])
    batches = [[STARTED], [Embedding(0, values, 3, rows=2)], [FINISHED]]
    backend.engine.script_of = lambda _: {"batches": batches, "credited": (object,)}
    code, out, err = ask(backend, "embed", "a", "--kind", "multi-vector")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "INDEX  TOKENS  VECTORS  FIRST NUMBERS                TEXT",
        "0      3       2        +0.500 -2.000 +1.000 +3.000  a",
        "",
        "2 vectors of 1 text by emb",
    ]
    assert backend.last.request.kind == "multi-vector"


@pytest.mark.parametrize(
    ("precision", "numbers", "shown"),
    [
        ("float16", array("H", [0x3800, 0xC000]), "+0.500 -2.000"),
        ("int8", array("b", [3, -128]), "+3.000 -128.000"),
        ("uint8", array("B", [3, 255]), "+3.000 +255.000"),
        ("ubinary", array("B", [0b10100000]), "+1.000 -1.000 +1.000 -1.000 …"),
        ("binary", array("b", [0b10100000 - 128]), "+1.000 -1.000 +1.000 -1.000 …"),
    ],
)
def test_embed_shows_the_numbers_of_each_precision(ask, precision, numbers, shown):
    backend = Encoder()
    batches = [[STARTED], [Embedding(0, numbers, 3, precision)], [FINISHED]]
    backend.engine.script_of = lambda _: {"batches": batches, "credited": (object,)}
    code, out, err = ask(backend, "embed", "a", "--precision", precision)
    assert (code, err) == (0, "")
    assert f" {shown} " in out


def test_embed_json_is_a_line_per_text_in_their_order(ask):
    _, out, _ = ask(Encoder(), "embed", "0", "90", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(one["index"], one["tokens"], one["model"]) for one in lines] == [
        (0, 3, "emb"),
        (1, 4, "emb"),
    ]
    assert lines[0]["values"] == [2.0, 0.0]


# ---- sources of texts ------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["-"], ["--file", "-"]])
def test_every_line_of_standard_input_is_a_text(ask, stdin, argv):
    backend = Encoder()
    stdin("one\n\n two \u2028 \x0c\n")
    assert ask(backend, "embed", *argv)[0] == 0
    assert backend.last.request.inputs == ("one", "", " two \u2028 \x0c")


def test_lines_of_a_file_are_texts(ask, tmp_path):
    path = tmp_path / "texts"
    path.write_bytes("one\r\nzwei Flüsse".encode())
    backend = Encoder()
    assert ask(backend, "rerank", "which?", "--file", str(path))[0] == 0
    assert (backend.last.request.query, backend.last.request.documents) == (
        "which?",
        ("one", "zwei Flüsse"),
    )


@pytest.mark.parametrize("command", [["embed"], ["rerank", "q"]])
def test_no_texts_are_one_clear_sentence(ask, stdin, tmp_path, command):
    what = {"embed": "texts", "rerank": "documents"}[command[0]]
    stdin("", is_terminal=True)
    said = f"triolet: there are no {what}; give some as arguments, "
    said += "or --file FILE (- is standard input)\n"
    assert ask(Encoder(), *command) == (2, "", said)
    stdin("")
    said = f"triolet: there are no {what} in standard input\n"
    assert ask(Encoder(), *command) == (2, "", said)
    empty = tmp_path / "empty"
    empty.touch()
    said = f"triolet: there are no {what} in {empty}\n"
    assert ask(Encoder(), *command, "--file", str(empty)) == (2, "", said)
    said = f"triolet: give {what} as arguments or by --file, not both\n"
    assert ask(Encoder(), *command, "a", "--file", str(empty)) == (2, "", said)


def test_a_file_that_cannot_be_read_is_named(ask, tmp_path):
    missing, latin = tmp_path / "missing", tmp_path / "latin"
    latin.write_bytes(b"Fl\xfcsse\n")
    said = f"triolet: --file {missing} cannot be read: No such file or directory\n"
    assert ask(Encoder(), "embed", "--file", str(missing)) == (2, "", said)
    said = f"triolet: --file {latin} is not UTF-8\n"
    assert ask(Encoder(), "embed", "--file", str(latin)) == (2, "", said)


# ---- more texts than a call takes ------------------------------------------------------------


def test_more_texts_than_a_call_takes_go_in_several_and_are_numbered_through(ask, stdin):
    backend = Encoder()
    texts = [str(number) for number in range(2 * cli_texts.MAX_INPUTS + 3)]
    stdin("\n".join(texts) + "\n")
    code, out, _ = ask(backend, "embed", "--json")
    assert code == 0
    assert [len(call.request.inputs) for call in backend.streams] == [2048, 2048, 3]
    assert [text for call in backend.streams for text in call.request.inputs] == texts
    assert [json.loads(line)["index"] for line in out.splitlines()] == list(range(len(texts)))
    assert all(json.loads(line)["model"] == "emb" for line in out.splitlines())


def test_texts_that_are_long_together_go_in_several_calls(ask, stdin):
    backend = Encoder()
    long = "ü" * (cli_texts.BYTES_MAX // 5)
    stdin("\n".join([long] * 5))
    assert ask(backend, "rerank", "q", "--json")[0] == 0
    assert [len(call.request.documents) for call in backend.streams] == [2, 2, 1]


def test_an_error_of_a_later_call_says_which_texts_it_counts(ask, monkeypatch):
    monkeypatch.setattr(cli_texts, "MAX_INPUTS", 2)
    backend = Encoder(error_in=1)
    code, _, err = ask(backend, "embed", "a", "b", "c", "d", "e", "--json")
    assert code == 1
    assert len(backend.streams) == 2
    assert err.splitlines() == [
        "triolet: in texts 2 to 3, whose own numbers begin at 0:",
        "triolet: inputs[1].text: has no tokens",
    ]


def test_one_timeout_holds_for_all_calls(ask, monkeypatch):
    monkeypatch.setattr(cli_texts, "MAX_INPUTS", 1)
    clock = itertools.count(100, 5)
    monkeypatch.setattr(cli_texts, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    backend = Encoder()
    ask(backend, "embed", "a", "b", "c", "--timeout", "20")
    assert [call.request.timeout_s for call in backend.streams] == pytest.approx([15, 10, 5], abs=1)


# ---- rerank ----------------------------------------------------------------------------------


def test_rerank_shows_the_best_first(ask):
    code, out, err = ask(Encoder(), "rerank", "q", "30", "90", "5\n0")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "SCORE   INDEX  DOCUMENT",
        "0.9000  1      90",
        "0.3000  0      30",
        "0.0300  2      5 0",
    ]


def test_rerank_sends_its_arguments(ask):
    backend = Encoder()
    given = ("--top-n", "1", "--raw-scores", "--no-truncate", "--model", "rank")
    _, out, _ = ask(backend, "rerank", "q", "30", "90", *given)
    request = backend.last.request
    assert (request.top_n, request.raw_scores, request.truncate) == (1, True, False)
    assert request.model == "rank"
    assert out.splitlines()[1:] == ["0.9000  1      90"]
    ask(backend, "rerank", "q", "30")
    assert (backend.last.request.top_n, backend.last.request.raw_scores) == (None, None)


def test_rerank_json_is_a_line_per_document_best_first(ask):
    _, out, _ = ask(Encoder(), "rerank", "q", "30", "90", "60", "--json", "--top-n", "2")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [one["index"] for one in lines] == [1, 2]
    assert lines[0]["score"] == pytest.approx(0.9)


def test_rerank_sorts_what_several_calls_scored(ask, monkeypatch):
    monkeypatch.setattr(cli_texts, "MAX_INPUTS", 2)
    backend = Encoder()
    _, out, _ = ask(backend, "rerank", "q", "30", "20", "90", "10", "60", "--json", "--top-n", "3")
    assert len(backend.streams) == 3
    assert [json.loads(line)["index"] for line in out.splitlines()] == [2, 4, 0]


# ---- classify --------------------------------------------------------------------------------


def test_classify_shows_the_best_labels(ask):
    code, out, err = ask(Encoder(), "classify", "x" * 80, "a\nb " * 10)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "INDEX  LABELS                   TEXT",
        f"0      glad 0.8000, sad 0.2500  {'x' * 80}",
        f"1      glad 0.4000, sad 0.2500  {' '.join(['a b'] * 10)}",
    ]


def test_classify_shows_entities_with_their_characters(ask):
    code, out, err = ask(Encoder(), "classify", "--aggregation", "none", "Ann", "none")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "INDEX  LABEL  SCORE   CHARACTERS  TEXT",
        "0      B-x    0.0300  0-2         An",
        "1      -      -       -           none",
    ]


def test_classify_sends_its_arguments(ask):
    backend = Encoder()
    given = ("--pair", "b", "--activation", "none", "--top-k", "2", "--no-truncate")
    ask(backend, "classify", "a", "c", *given, "--model", "moods")
    request = backend.last.request
    assert request.inputs == (("a", "b"), ("c", "b"))
    assert (request.activation, request.top_k, request.truncate) == ("none", 2, False)
    assert (request.model, request.aggregation) == ("moods", "")
    ask(backend, "classify", "a")
    assert (backend.last.request.inputs, backend.last.request.activation) == (("a",), "")


def test_classify_json_is_a_line_per_text_in_their_order(ask, monkeypatch):
    monkeypatch.setattr(cli_texts, "MAX_INPUTS", 2)
    backend = Encoder()
    _, out, _ = ask(backend, "classify", "a", "bb", "ccc", "--json")
    assert len(backend.streams) == 2
    lines = [json.loads(line) for line in out.splitlines()]
    assert [one["index"] for one in lines] == [0, 1, 2]
    assert [one["labels"][0]["label"] for one in lines] == ["glad"] * 3


# ---- failures, pipes and terminals -----------------------------------------------------------


@pytest.mark.parametrize("command", [["embed", "x"], ["rerank", "q", "x"], ["classify", "x"]])
def test_failures_are_one_line(command, ask, capsys):
    assert main([*command, "--server", SILENT]) == 1
    said = f"triolet: no server answers at {SILENT}; `triolet serve` starts one\n"
    assert capsys.readouterr() == ("", said)
    backend = FakeBackend(error=Overloaded("full", retry_after_s=2))
    assert ask(backend, *command) == (1, "", "triolet: full; try again in 2 s\n")


@pytest.mark.parametrize("command", ["embed", "rerank", "classify"])
def test_help_says_where_texts_come_from(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "the lines of standard input" in out
    assert "--file FILE" in out


async def on_a_terminal(address, *argv, is_piped=False):
    """Run a command on a terminal of 60 columns.

    Return the exit code, the terminal's text, and what went to a pipe if the standard output
    ``is_piped``.
    """
    master, slave = pty.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "grpc_service", *argv, "--server", address),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_piped else slave,
            stderr=slave,
            env=os.environ | {"COLUMNS": "60", "TERM": "xterm"},
        )
    finally:
        os.close(slave)
    shown = asyncio.create_task(asyncio.to_thread(_read_terminal, master))
    out = await process.stdout.read() if is_piped else b""
    return await process.wait(), await shown, out.decode()


def _read_terminal(master):
    """Return all that was written until the other side has closed."""
    parts = []
    with open(master, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
        while part := terminal.read(4096):
            parts.append(part)
    return b"".join(parts).decode()


def test_on_a_terminal_a_text_has_one_line():
    async def command(channel):
        return await on_a_terminal(channel.address, "rerank", "q", "a\nb " * 100)

    code, shown, _ = run(Encoder(), command)
    assert code == 0
    [line] = shown.splitlines()[1:]
    assert line.startswith("4.0000  0      a b a b")
    assert line.endswith("…")
    assert len(line) == 60


def test_many_texts_have_a_bar_that_leaves_the_output_alone(tmp_path):
    texts = tmp_path / "texts"
    texts.write_text("\n".join(map(str, range(300))))

    async def command(channel):
        argv = ("embed", "--file", str(texts), "--json")
        return await on_a_terminal(channel.address, *argv, is_piped=True)

    code, shown, out = run(Encoder(), command)
    assert code == 0
    assert "embedding" in shown
    assert "/300" in shown
    assert [json.loads(line)["index"] for line in out.splitlines()] == list(range(300))


def test_there_is_no_bar_where_lines_go_to_the_terminal(tmp_path):
    texts = tmp_path / "texts"
    texts.write_text("\n".join(map(str, range(120))))

    async def command(channel):
        return await on_a_terminal(channel.address, "embed", "--file", str(texts), "--json")

    code, shown, _ = run(Encoder(), command)
    assert code == 0
    assert [json.loads(line)["index"] for line in shown.splitlines()] == list(range(120))


def test_ctrl_c_ends_the_command_and_the_call():
    backend = FakeBackend([STARTED], [Embedding(0, array("f", [1.0]), 3)], hangs=True)

    async def command(channel):
        process = await process_of(channel.address, "embed", "a", "b", "--json")
        assert json.loads(await process.stdout.readline())["index"] == 0
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        await backend.last.left.wait()
        return process.returncode, out, err

    assert run(backend, command) == (130, b"", b"")
