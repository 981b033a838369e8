"""The client commands against a scripted backend: what they print, and how they end."""

import asyncio
import io
import json
import os
import signal
import sys

import pytest

from engine.core.common.events import Finished
from engine.core.common.types import EndReason, Timings, Usage
from engine.core.text.types import Tokens
from engine.errors import InvalidRequest, Overloaded
from engine.requests.text.values import OutputOptions, SamplingParams, Started
from engine.status import Counts, EngineStatistics, ModelState, ReplicaCounts
from grpc_service.cli.main import main
from tests.service import fake_backend
from tests.service.fake_backend import FakeBackend, run, runner

STARTED = Started("r1", "stories", 4)
SILENT = "127.0.0.1:1"  # nobody listens on port 1


def tokens(text, choice=0):
    """Return the event of a token with this text."""
    return Tokens("r1", choice, (1,), text)


def finished(choice=0):
    """Return the end of a choice."""
    return Finished("r1", choice, EndReason.STOP, Usage(4, 0, 2), Timings())


STORY = ([STARTED], [tokens("Once")], [tokens(" more")], [finished()])


def triolet(backend, *argv):
    """Run a command with a server of ``backend``, and return its exit code."""

    async def command(channel):
        return await asyncio.to_thread(main, [*argv, "--server", channel.address])

    return run(backend, command)


# ---- answers ---------------------------------------------------------------------------------


def test_generate_prints_the_text_and_one_newline(ask):
    backend = FakeBackend(*STORY)
    assert ask(backend, "generate", "Once") == (0, "Once more\n", "")
    assert ask(FakeBackend([STARTED], [tokens("a\n")], [finished()]), "generate", "a")[1] == "a\n"
    request = backend.last.request
    assert (request.text, request.n, request.timeout_s) == ("Once", None, None)
    assert request.sampling == SamplingParams()
    assert request.output == OutputOptions(token_ids=True)  # needed to continue a lost stream


def test_generate_asks_about_images_in_a_chat(ask, tmp_path):
    backend, paths = FakeBackend(*STORY), [tmp_path / "one.png", tmp_path / "two.png"]
    for path in paths:
        path.write_bytes(path.name.encode())
    images = [word for path in paths for word in ("--image", str(path))]
    assert ask(backend, "generate", "--chat", *images, "What?")[:2] == (0, "Once more\n")
    [message] = backend.last.request.chat.messages
    assert message["role"] == "user"
    assert message["content"] == [
        *({"type": "image", "image": path.name.encode()} for path in paths),
        {"type": "text", "text": "What?"},
    ]
    ask(backend, "generate", "--chat", "What?")
    assert backend.last.request.chat.messages[0]["content"] == "What?"
    code, out, err = ask(backend, "generate", *images, "What?")
    assert (code, out) == (2, "")
    assert err == "triolet: --image needs --chat: an image is part of a message\n"


def test_generate_names_the_file_of_a_refused_image(ask, tmp_path):
    path = tmp_path / "one.png"
    path.write_bytes(b"x")
    error = InvalidRequest.of("chat.messages[0].parts[0].image", "is in no format that is read")
    given = ("generate", "--chat", "--image", str(path), "What?")
    code, out, err = ask(FakeBackend(error=error), *given)
    assert (code, out, err) == (1, "", f"triolet: {path}: is in no format that is read\n")


def test_generate_sends_its_arguments(ask):
    backend = FakeBackend(*STORY)
    given = "--max-tokens 5 --temperature 0 --top-p 0.5 --top-k 0 --seed 7 --stop a --stop b"
    given += " --n 1 --timeout 20 --model stories --min-p 0.1 --typical-p 0.9"
    given += " --repetition-penalty 1.1 --presence-penalty -0.5 --frequency-penalty 0.25"
    given += " --bad-word c --bad-word d --json --logprobs 0 --prompt-logprobs 3"
    assert ask(backend, "generate", "x", *given.split())[0] == 0
    request, sampling = backend.last.request, backend.last.request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (5, 0.0, 0.5)
    assert (sampling.top_k, sampling.seed, sampling.stop) == (0, 7, ("a", "b"))
    assert (sampling.min_p, sampling.typical_p, sampling.repetition_penalty) == (0.1, 0.9, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-0.5, 0.25)
    assert sampling.bad_words == ("c", "d")
    assert (request.output.logprobs, request.output.prompt_logprobs) == (0, 3)
    assert (request.n, request.model) == (1, "stories")
    assert 15 < request.timeout_s < 21


@pytest.mark.parametrize("flag", ["--logprobs", "--prompt-logprobs"])
def test_flags_that_only_json_shows_need_json(flag, capsys):
    assert main(["generate", "x", flag, "0", "--server", SILENT]) == 2
    assert capsys.readouterr().err == f"triolet: {flag} needs --json\n"


def test_generate_reads_its_prompt_from_standard_input(ask, monkeypatch):
    backend = FakeBackend(*STORY)
    monkeypatch.setattr("sys.stdin.read", lambda: "two\nlines\n\n")
    assert ask(backend, "generate", "-")[0] == 0
    assert backend.last.request.text == "two\nlines\n"


def echo():
    """Return a backend that answers with the prompt in capitals, and refuses "bad" ones."""
    backend = FakeBackend()

    def script_of(request):
        text = request.text
        error = InvalidRequest.of("text", "is bad") if text == "bad" else None
        return {"batches": [[STARTED], [tokens(text.upper())], [finished()]], "error": error}

    backend.engine.script_of = script_of
    return backend


def test_generate_answers_every_line_of_a_file_in_order(ask, tmp_path, monkeypatch):
    lines = [f"line {number}" for number in range(40)]
    (tmp_path / "prompts").write_text("\n".join(lines) + "\n")
    code, out, err = ask(echo(), "generate", "--file", str(tmp_path / "prompts"))
    wanted = [f"--- {n + 1} of 40 ---\n{line.upper()}\n" for n, line in enumerate(lines)]
    assert (code, out, err) == (0, "".join(wanted), "")
    monkeypatch.setattr("sys.stdin.read", lambda: "a\n\nb")
    code, out, _ = ask(echo(), "generate", "--file", "-", "--json")
    assert [json.loads(line) for line in out.splitlines()] == [
        {"index": n, "text": text, "reason": "FINISH_REASON_STOP", "completion_tokens": 2}
        for n, text in enumerate(("A", "", "B"))
    ]


def test_generate_names_the_line_whose_call_failed(ask, tmp_path):
    path = tmp_path / "prompts"
    path.write_text("a\nbad\nc")
    code, out, err = ask(echo(), "generate", "--file", str(path))
    assert (code, out) == (1, "--- 1 of 3 ---\nA\n")
    assert err == f"triolet: at line 2 of {path}:\ntriolet: text: is bad\n"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "there is no prompt; give one (- is standard input), or --file FILE"),
        (["x", "--file", "f"], "give prompts as arguments or by --file, not both"),
        (["--file", "/nowhere/f"], "--file /nowhere/f cannot be read: No such file or directory"),
        (["--file", "/dev/null"], "there are no prompts in /dev/null"),
        (["--file", "{}", "--n", "2"], "--n takes one prompt, and --file has many"),
        (["--file", "{}", "--image", "i"], "--image takes one prompt, and --file has many"),
    ],
)
def test_generate_takes_a_prompt_or_a_file(argv, told, capsys, tmp_path):
    (tmp_path / "f").write_text("a")
    given = [word.format(tmp_path / "f") for word in argv]
    assert main(["generate", *given, "--server", SILENT]) == 2
    assert capsys.readouterr().err == f"triolet: {told}\n"


def test_generate_prints_several_choices_one_after_the_other(ask):
    batch = [tokens("b", 1), finished(1), tokens("a", 0), finished(0)]
    code, out, _ = ask(FakeBackend([STARTED], batch), "generate", "x", "--n", "2")
    assert (code, out) == (0, "--- 1 of 2 ---\na\n--- 2 of 2 ---\nb\n")


def test_generate_json_is_one_event_per_line(ask):
    _, out, _ = ask(FakeBackend(*STORY), "generate", "x", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert [next(iter(event)) for event in events] == ["started", "delta", "delta", "finished"]
    assert events[3]["finished"]["reason"] == "FINISH_REASON_STOP"


def test_tokenize_and_detokenize(ask):
    code, out, _ = ask(FakeBackend(), "tokenize", "hi")
    assert code == 0
    assert out.splitlines() == [
        "ID   PLACE  TEXT",
        '104  0–1    "h"',
        '105  1–2    "i"',
        "2 of at most 2048 tokens",
    ]
    assert ask(FakeBackend(), "tokenize", "--detokenize", "104", "105")[1] == "hi\n"
    _, out, _ = ask(FakeBackend(), "tokenize", "h", "--json")
    assert json.loads(out)["tokens"] == [{"id": 104, "text": "h", "start": 0, "end": 1}]


def test_tokenize_can_leave_special_tokens_out(ask):
    backend = FakeBackend()
    ask(backend, "tokenize", "hi", "--no-special-tokens")
    ask(backend, "tokenize", "hi")
    assert [asked[3] for asked in backend.engine.asked] == [False, None]


def test_models(ask):
    code, out, _ = ask(FakeBackend(), "models")
    assert code == 0
    head, first, second, error = out.splitlines()
    assert head.split()[:3] == ["NAME", "STATE", "CAPABILITY"]
    assert first.split()[:4] == ["stories,", "s", "READY", "text-to-text"]
    assert second.split()[:2] == ["broken", "FAILED"]
    assert error == "broken: no such file"
    listed = json.loads(ask(FakeBackend(), "models", "--json")[1])["models"]
    assert [model["name"] for model in listed] == ["stories", "broken"]


def test_stats(ask):
    code, out, _ = ask(FakeBackend(), "stats")
    assert code == 0
    assert "sequences 3 running, 0 waiting, 0 parked, 0 ending, 0 unread_calls" in out
    assert "requests  7 finished, 0 cancelled" in out
    assert "0 of 0 blocks" not in out
    totals = json.loads(ask(FakeBackend(), "stats", "--json")[1])["totals"]
    assert (totals["running"], totals["waiting"]) == (3, 0)


def test_stats_shows_blocks_only_of_models_that_have_a_kv_pool(ask, monkeypatch):
    text = ReplicaCounts("stories", 0, ModelState.READY, Counts(free_blocks=7, total_blocks=9))
    encoder = ReplicaCounts("embed", 0, ModelState.READY, Counts(running=2))
    both = EngineStatistics(Counts(free_blocks=7, total_blocks=9), (text, encoder))
    monkeypatch.setattr(fake_backend, "STATISTICS", both)
    _, out, _ = ask(FakeBackend(), "stats")
    assert "blocks    7 of 9 free, 0 cached" in out
    assert "prefixes  0 of 0 tokens found (0%)" in out
    assert out.splitlines()[-2:] == [
        "stories/0 READY: 0 running, 0 waiting, 7 of 9 blocks free",
        "embed/0 READY: 2 running, 0 waiting",
    ]
    monkeypatch.setattr(fake_backend, "STATISTICS", EngineStatistics(Counts(), (encoder,)))
    _, out, _ = ask(FakeBackend(), "stats")
    assert "blocks" not in out
    assert "prefixes" not in out


def test_stats_shows_the_state_slots_of_models_with_recurrent_layers(ask, monkeypatch):
    counts = Counts(free_blocks=7, total_blocks=9, free_states=1, total_states=4, cached_states=2)
    hybrid = EngineStatistics(counts, (ReplicaCounts("hybrid", 0, ModelState.READY, counts),))
    monkeypatch.setattr(fake_backend, "STATISTICS", hybrid)
    _, out, _ = ask(FakeBackend(), "stats")
    assert "states    1 of 4 slots free, 2 snapshots" in out
    assert out.splitlines()[-1].endswith("7 of 9 blocks free, 1 of 4 state slots free")


# ---- failures --------------------------------------------------------------------------------


def test_a_servers_error_is_one_line_with_its_hint(ask):
    backend = FakeBackend([STARTED], [tokens("On")], error=Overloaded("full\nup", retry_after_s=2))
    code, out, err = ask(backend, "generate", "x")
    assert (code, out) == (1, "On\n")
    assert err == "triolet: full up; try again in 2 s\n"


def test_every_broken_field_is_named_once(ask):
    code, _, err = ask(FakeBackend(), "generate", "x", "--top-p", "2", "--n", "17")
    assert code == 1
    assert err == "triolet: n: is 17, outside [1, 16]; sampling.top_p: is 2, outside (0, 1]\n"


def test_a_passed_deadline_is_named(ask):
    code, _, err = ask(FakeBackend([STARTED], hangs=True), "generate", "x", "--timeout", "0.2")
    assert (code, err) == (1, "triolet: the server did not finish within 0.2 s (--timeout)\n")


@pytest.mark.parametrize("command", [["models"], ["stats"], ["generate", "x"], ["tokenize", "x"]])
def test_a_missing_server_is_one_clear_sentence(command, capsys):
    assert main([*command, "--server", SILENT]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err == f"triolet: no server answers at {SILENT}; `triolet serve` starts one\n"


def test_a_proxy_in_the_environment_is_not_used_for_loopback(ask, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://{SILENT}")
    monkeypatch.setenv("grpc_proxy", f"http://{SILENT}")
    assert ask(FakeBackend(*STORY), "generate", "x")[0] == 0


def test_an_argument_that_is_not_utf_8_is_one_clear_sentence(ask):
    code, out, err = ask(FakeBackend(*STORY), "generate", "a\udcff")
    assert (code, out) == (2, "")
    assert err == "triolet: an argument is not UTF-8\n"


def test_standard_input_that_is_not_utf_8_is_one_clear_sentence(ask, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\udcff"))
    code, out, err = ask(FakeBackend(*STORY), "generate", "-")
    assert (code, out) == (2, "")
    assert err == "triolet: standard input is not UTF-8\n"


# ---- as a process ----------------------------------------------------------------------------


async def process_of(address, *argv):
    """Start a command in a process of its own."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "grpc_service", *argv, "--server", address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


def test_ctrl_c_ends_the_command_and_the_call_without_a_traceback():
    backend = FakeBackend([STARTED], [tokens("Once")], hangs=True)

    async def command(channel):
        process = await process_of(channel.address, "generate", "x")
        assert await process.stdout.read(4) == b"Once"
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        await backend.last.left.wait()
        return process.returncode, out, err

    assert run(backend, command) == (130, b"\n", b"")


def test_a_reader_of_the_output_that_goes_ends_the_command_and_the_call():
    backend = FakeBackend([STARTED], *[[tokens("x" * 1000)] for _ in range(300)], hangs=True)

    async def command(channel):
        process = await process_of(channel.address, "generate", "x")
        assert await process.stdout.read(4) == b"xxxx"
        process.stdout._transport.close()
        err = await process.stderr.read()
        await process.wait()
        await backend.last.left.wait()
        return process.returncode, err

    assert run(backend, command) == (141, b"")


def test_a_server_that_stops_is_one_line():
    backend = FakeBackend([STARTED], [tokens("Once")], hangs=True)
    address = []

    async def command(channel):
        address.append(channel.address)
        process = await process_of(channel.address, "generate", "x")
        assert await process.stdout.read(4) == b"Once"
        return process

    async def end(process):
        out, err = await process.communicate()
        return process.returncode, out, err.decode()

    line = "triolet: the connection to the server at {} was lost\n"
    ended = runner().run(end(run(backend, command)))
    assert ended == (1, b"\n", line.format(*address))


def test_a_client_command_starts_without_the_heavy_packages():
    """What is imported decides how long a command takes to start."""

    async def command(channel):
        code = (
            "import sys; from grpc_service.cli.main import main; code = main(sys.argv[1:]);"
            "heavy = {'torch', 'transformers', 'numpy', 'rich'} & sys.modules.keys();"
            "print(sorted(heavy), file=sys.stderr); sys.exit(code)"
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, "generate", "x", "--server", channel.address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        return process.returncode, out, err

    assert run(FakeBackend(*STORY), command) == (0, b"Once more\n", b"[]\n")
