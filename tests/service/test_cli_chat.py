"""``triolet chat`` and similar commands: by pipe, on a terminal, and during their imports."""

import asyncio
import io
import json
import os
import pty
import re
import subprocess
import sys

import pytest

from engine.core.common.events import Finished
from engine.core.common.types import EndReason, Timings, Usage
from engine.core.text.types import Tokens
from engine.errors import InvalidRequest, Overloaded, RequestTooLarge
from engine.requests.text.values import AnswerTokens, Started, ToolCallDelta
from engine.requests.usage import UsageRecord
from engine.status import Counts, EngineStatistics, ModelState, ReplicaCounts
from grpc_service.cli.main import SHELLS, main
from tests.service import fake_backend
from tests.service.fake_backend import FakeBackend, run
from tests.support.programs import output_of

STARTED = Started("r1", "stories", 4)
LIMIT_S = 20


def tokens(text):
    """Return the event of a token with this text."""
    return Tokens("r1", 0, (1,), text)


def finished(reason=EndReason.STOP):
    """Return the end of an answer."""
    return Finished("r1", 0, reason, Usage(4, 0, 2), Timings())


ANSWER = ([STARTED], [tokens("Yes")], [tokens(", so.")], [finished()])


@pytest.fixture
def chat(capsys, monkeypatch):
    """Return a function that talks by pipe and returns exit code, output and error output."""

    def call(backend, typed, *argv):
        stdin = typed if isinstance(typed, Tty) else io.StringIO(typed)
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("grpc_service.cli.chat._enable_line_editing", lambda: None)

        async def command(channel):
            given = ["chat", *argv, "--server", channel.address]
            return await asyncio.to_thread(main, given)

        code = run(backend, command)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def said(call):
    """Return the messages of a call."""
    return [(m["role"], m["content"]) for m in call.request.chat.messages]


def test_earlier_turns_are_sent_again(chat):
    backend = FakeBackend(*ANSWER)
    code, out, err = chat(backend, "one\n\n  two \n", "--system", "Brief.", "--max-tokens", "7")
    assert (code, out, err) == (0, "Yes, so.\nYes, so.\n", "")
    first, second = backend.streams
    assert said(first) == [("system", "Brief."), ("user", "one")]
    assert said(second) == [*said(first), ("assistant", "Yes, so."), ("user", "two")]
    assert first.request.sampling.max_tokens == 7


def test_reset_and_system_begin_anew(chat):
    backend = FakeBackend(*ANSWER)
    typed = "one\n/reset\ntwo\n/system Loud.\nthree\n/system\nfour\n/what\n /five\n"
    code, _, err = chat(backend, typed, "--system", "Brief.")
    assert code == 0
    assert [said(call)[:2] for call in backend.streams[1:4]] == [
        [("system", "Brief."), ("user", "two")],
        [("system", "Loud."), ("user", "three")],
        [("user", "four")],
    ]
    assert said(backend.streams[4])[-1] == ("user", "/five")
    assert "There is no command /what." in err


def test_reasoning_and_notes_of_a_cut_are_not_sent_again(chat):
    hm = AnswerTokens.of(tokens(""), "hm")
    backend = FakeBackend([STARTED], [hm], [tokens("Yes")], [finished(EndReason.LENGTH)])
    code, out, err = chat(backend, "one\ntwo\n")
    assert (code, out) == (0, "Yes\nYes\n")
    assert err.startswith("hm\n(cut at --max-tokens")
    assert said(backend.streams[1])[1] == ("assistant", "Yes")


WEATHER = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def with_call(text, *arguments):
    """Return the events of an answer that calls a tool, with its arguments in parts."""
    named = [ToolCallDelta(0, "c1", "weather", arguments[0])]
    more = [ToolCallDelta(0, "", "", part) for part in arguments[1:]]
    parts = [[AnswerTokens.of(tokens(""), "", (call,))] for call in (*named, *more)]
    return [STARTED], [tokens(text)], *parts, [finished()]


def file_of(tmp_path, content):
    path = tmp_path / "tools.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_call_is_shown_and_the_next_line_is_what_it_returns(chat, tmp_path):
    """Of the answers to a message only the first must call."""
    backend = FakeBackend()
    answers = [with_call("Let me look.", '{"city": ', '"Oslo"}'), ANSWER, ANSWER]
    backend.engine.script_of = lambda request: {
        "batches": list(answers[min(2, len(backend.streams))])
    }
    wrapped = [{"type": "function", "function": WEATHER | {"strict": True}}]
    flags = ("--tools", file_of(tmp_path, wrapped), "--tool-choice", "weather")
    code, out, err = chat(backend, "How is it?\n sunny \nand now?\n", *flags)
    assert (code, err) == (0, "")
    assert out == 'Let me look.\nweather({"city": "Oslo"})\nYes, so.\nYes, so.\n'
    first, second, third = (stream.request.chat for stream in backend.streams)
    assert [tool["function"]["name"] for tool in third.tools] == ["weather"]
    assert first.tools[0]["function"]["parameters"] == WEATHER["parameters"]
    choices = [chat.tool_choice for chat in (first, second, third)]
    assert choices == ["weather", "auto", "weather"]
    _, call, result = second.messages
    assert call["content"] == "Let me look."
    assert call["tool_calls"][0]["function"]["name"] == "weather"
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "sunny", "c1")
    assert [message["role"] for message in third.messages] == [
        *("user", "assistant", "tool", "assistant", "user")
    ]


@pytest.mark.parametrize("rest", ["", "/reset\n"])
def test_a_call_without_a_result_is_not_kept(chat, tmp_path, rest):
    backend = FakeBackend(*with_call("", "{}"))
    flags = ("--tools", file_of(tmp_path, [WEATHER]))
    code, out, err = chat(backend, f"How is it?\n{rest}", *flags)
    assert (code, out) == (0, "weather({})\n")
    assert "This message was not kept." in err
    assert ("The conversation was forgotten." in err) == bool(rest)
    assert len(backend.streams) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "it is not JSON"),
        ({"name": "f"}, "it is no list of functions"),
        ([3], r"\[0\]: it is no object"),
        ([WEATHER, {"nam": "f"}], r"\[1\]: .*nam"),
        (None, "No such file"),
    ],
)
def test_a_file_of_tools_that_cannot_be_read_is_refused(chat, tmp_path, content, reason):
    path = str(tmp_path / "none.json") if content is None else file_of(tmp_path, content)
    code, out, err = chat(FakeBackend(*ANSWER), "one\n", "--tools", path)
    assert (code, out) == (2, "")
    assert re.search(f"--tools {re.escape(path)} cannot be read: {reason}", err)


def test_turns_that_exceed_the_context_are_left_out_with_a_note(chat):
    backend = FakeBackend(*ANSWER)

    async def tokenize(model, *, chat, **_):
        from engine.worker.interface import TokenSpan

        count = sum(len(message["content"]) for message in chat.messages)
        return tuple(TokenSpan(1, "x", 0, 1) for _ in range(count)), 400

    backend.engine.tokenize = tokenize
    typed = "".join(f"{number}{'x' * 80}\n" for number in range(6))
    code, out, err = chat(backend, typed, "--system", "Brief.")
    assert code == 0
    assert out.count("Yes") == 6
    dropped = re.findall(r"The context is full: (\d+) earlier messages", err)
    assert dropped == ["4", "4"]  # by the fourth and the sixth question; the fifth had room
    questions = [text[0] for role, text in said(backend.streams[-1]) if role == "user"]
    assert questions == ["0", "5"]
    assert said(backend.streams[-1])[0] == ("system", "Brief.")


def pixels(name, tmp_path):
    """Write a file, and return its path as text and the bytes."""
    path = tmp_path / name
    path.write_bytes(name.encode())
    return str(path), name.encode()


def image_part(data):
    """Return a part as the engine gets it."""
    return {"type": "image", "image": data}


def test_images_go_before_the_message_that_follows_them(chat, tmp_path):
    backend = FakeBackend(*ANSWER)
    (one, first), (two, second) = pixels("one.png", tmp_path), pixels("two.png", tmp_path)
    code, out, err = chat(backend, f"a\n/image {two}\n/image {one}\nb\nc\n", "--image", one)
    assert (code, out.count("Yes")) == (0, 3)
    assert f"{two} goes with the next message." in err
    a, b = [image_part(first)], [image_part(second), image_part(first)]
    asked = [content for role, content in said(backend.streams[-1]) if role == "user"]
    assert asked == [[*a, text_part("a")], [*b, text_part("b")], "c"]
    counted = [chat.messages[-1]["content"] for _, _, chat, _ in backend.engine.asked]
    assert counted == asked


def text_part(text):
    """Return a part as the engine gets it."""
    return {"type": "text", "text": text}


def test_a_reset_forgets_images_that_wait(chat, tmp_path):
    backend = FakeBackend(*ANSWER)
    path, _ = pixels("one.png", tmp_path)
    chat(backend, f"/reset\na\n/image {path}\n/system Loud.\nb\n", "--image", path)
    assert [said(call)[-1][1] for call in backend.streams] == ["a", "b"]


def test_an_image_that_is_no_file_ends_a_pipe_and_is_a_note_on_a_terminal(chat, tmp_path):
    empty = tmp_path / "empty.png"
    empty.touch()
    for path, what in (
        ("none.png", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (empty, "is an empty file"),
    ):
        assert chat(FakeBackend(), "a\n", "--image", str(path))[0] == 2
        code, out, err = chat(FakeBackend(), f"/image {path}\na\n")
        assert (code, out, err) == (2, "", f"triolet: /image {path} {what}\n")
        code, out, err = chat(FakeBackend(*ANSWER), Tty(f"/image {path}\n/image\na\n"))
        assert (code, out) == (0, "Yes, so.\n")
        assert f"triolet: /image {path} {what}\n" in err
        assert "/image needs a file's name.\n" in err


def test_a_refused_image_is_named_by_its_file_and_forgotten(chat, tmp_path):
    backend = FakeBackend(*ANSWER)
    good, _ = pixels("good.png", tmp_path)
    bad, data = pixels("bad.png", tmp_path)
    count = backend.engine.tokenize

    async def tokenize(model, *, chat, **fields):
        broken = [path for path, one in chat.images if one == data]
        if broken:
            raise InvalidRequest.of(broken[0], "is a PNG file that is damaged or cut short")
        return await count(model, chat=chat, **fields)

    backend.engine.tokenize = tokenize
    typed = f"a\n/image {good}\n/image {bad}\nb\nc\n"
    code, out, err = chat(backend, Tty(typed))
    assert (code, out.count("Yes")) == (0, 2)
    assert f"triolet: {bad}: is a PNG file that is damaged or cut short\n" in err
    assert "This message was not kept" in err
    assert [text for _, text in said(backend.streams[-1])] == ["a", "Yes, so.", "c"]
    code, out, err = chat(backend, typed)
    assert (code, err.splitlines()[-1]) == (1, f"triolet: {bad}: is a PNG file that is damaged or "
                                               "cut short")  # fmt: skip


class Tty(io.StringIO):
    """Standard input that is a terminal, with lines typed before."""

    def isatty(self):
        return True


def test_a_message_that_is_too_long_says_what_was_kept(chat):
    backend = FakeBackend(*ANSWER)

    async def tokenize(model, *, chat, **_):
        from engine.worker.interface import TokenSpan

        count = sum(len(message["content"]) for message in chat.messages)
        return (TokenSpan(1, "x", 0, 1),) * count, 400

    def script(request):
        if len(request.chat.messages[-1]["content"]) > 400:
            return {"batches": [], "error": RequestTooLarge.of("input", "has 999 tokens")}
        return {"batches": list(ANSWER)}

    backend.engine.tokenize, backend.engine.script_of = tokenize, script
    typed = f"{'x' * 999}\none\n{'y' * 999}\ntwo\n"
    code, out, err = chat(backend, Tty(typed), "--system", "Brief.")
    assert (code, out) == (0, "Yes, so.\nYes, so.\n")
    assert "triolet: input: has 999 tokens\nThis message was not kept.\n" in err
    assert (
        "triolet: input: has 999 tokens\n"
        "This message was not kept; the conversation before it was, with 2 messages.\n" in err
    )
    assert "The context is full" not in err  # no message was left out
    assert [text for _, text in said(backend.streams[-1])] == ["Brief.", "one", "Yes, so.", "two"]


def test_a_line_that_the_terminal_cut_is_told(chat):
    """Without line editing, a terminal passes on 4095 bytes of a line and drops the rest."""
    backend = FakeBackend(*ANSWER)
    code, _, err = chat(backend, Tty(f"{'x' * 4095}\n{'x' * 4094}\n"))
    assert code == 0
    assert err.count("The terminal passed on only the first 4095 bytes of this line.") == 1
    assert "4095 bytes" not in chat(backend, f"{'x' * 4095}\n")[2]  # a pipe cuts nothing


def test_a_call_that_fails_ends_a_pipe(chat):
    backend = FakeBackend(error=Overloaded("full", retry_after_s=2))
    code, out, err = chat(backend, "one\ntwo\n")
    assert (code, out, err) == (1, "", "triolet: full; try again in 2 s\n")
    assert len(backend.streams) == 1


def test_json_is_one_event_per_line(chat):
    _, out, _ = chat(FakeBackend(*ANSWER), "one\n", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert [next(iter(event)) for event in events] == ["started", "delta", "delta", "finished"]


# ---- on a terminal


# Sets the terminal in the new process, because code between fork and exec could wait for a lock of
# another thread; and the effect of SIGINT, which children of a background shell ignore.
ON_ITS_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "grpc_service", *sys.argv[1:]])
"""


class Terminal:
    """A chat on a terminal of its own."""

    def __init__(self, address, *flags):
        self._fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_ITS_TERMINAL, "chat", "--server", address, *flags],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=os.environ | {"TERM": "dumb", "PYTHONUNBUFFERED": "1"},
        )
        os.close(theirs)
        self.seen = ""

    async def expect(self, text):
        """Read until ``text`` was shown, and drop everything up to it."""
        async with asyncio.timeout(LIMIT_S):
            while text not in self.seen:
                data = await asyncio.to_thread(os.read, self._fd, 4096)
                self.seen += data.decode()
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text):
        """Write keys to the terminal."""
        os.write(self._fd, text.encode())

    async def press(self, key, shown):
        """Press ``key`` once a second until ``shown`` was shown, as a person would.

        Python's line editor looks for a signal only when the signal interrupts its wait: a Ctrl-C
        between the prompt and that wait shows with the next key.
        """
        presses = asyncio.create_task(self._press_on(key))
        try:
            return await self.expect(shown)
        finally:
            presses.cancel()

    async def _press_on(self, key):
        while True:
            self.type(key)
            await asyncio.sleep(1)

    async def end(self):
        """Wait until the process ends, and return its exit code."""
        return await asyncio.to_thread(self.process.wait, LIMIT_S)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


def test_a_call_that_came_before_ctrl_c_is_shown(tmp_path):
    """Red if the chat asks what a call returns that nobody has seen."""
    started, _, call, _ = with_call("", '{"city": "Oslo"}')
    backend = FakeBackend(started, call, [tokens("Once")], hangs=True)
    flags = ("--tools", file_of(tmp_path, [WEATHER]))

    async def command(channel):
        with Terminal(channel.address, *flags) as terminal:
            await terminal.expect("> ")
            terminal.type("one\n")
            await terminal.expect("Once")
            terminal.type("\x03")
            assert 'weather({"city": "Oslo"})' in await terminal.expect("(stopped)")
            await terminal.expect("weather> ")
            terminal.type("\x04")
            await terminal.expect("not kept")
            await terminal.expect("> ")
            terminal.type("\x04")
            return await terminal.end()

    assert run(backend, command) == 0


@pytest.mark.parametrize("result", ["/usr/share/x", "/", "/resets"])
def test_a_result_may_begin_with_a_slash(chat, tmp_path, result):
    backend = FakeBackend()
    answers = [with_call("", "{}"), ANSWER]
    backend.engine.script_of = lambda request: {
        "batches": list(answers[min(1, len(backend.streams))])
    }
    code, out, _ = chat(backend, f"Where?\n{result}\n", "--tools", file_of(tmp_path, [WEATHER]))
    assert (code, out) == (0, "weather({})\nYes, so.\n")
    assert said(backend.streams[1])[-1] == ("tool", result)


def test_ctrl_c_ends_an_answer_and_ctrl_d_the_chat():
    backend = FakeBackend([STARTED], [tokens("Once")], hangs=True)

    async def command(channel):
        with Terminal(channel.address) as terminal:
            await terminal.expect("> ")
            terminal.type("one\n")
            await terminal.expect("Once")
            terminal.type("\x03")
            await terminal.expect("(stopped)")
            await terminal.expect("> ")
            await terminal.press("\x03", "Ctrl-D ends the chat.")  # while no answer is under way
            await terminal.expect("> ")
            terminal.type("two\n")
            await terminal.expect("Once")
            terminal.type("\x03")
            await terminal.expect("(stopped)")
            await terminal.expect("> ")
            terminal.type("\x04")
            return await terminal.end()

    assert run(backend, command) == 0
    first, second = backend.streams
    assert said(second) == [("user", "one"), ("assistant", "Once"), ("user", "two")]
    assert first.num_leaves
    assert second.num_leaves


def test_a_call_that_fails_on_a_terminal_is_reported_and_the_chat_goes_on():
    backend = FakeBackend(error=Overloaded("full"))

    async def command(channel):
        with Terminal(channel.address) as terminal:
            for _ in range(2):
                await terminal.expect("> ")
                terminal.type("one\n")
                await terminal.expect("triolet: full")
            await terminal.expect("> ")
            terminal.type("\x04")
            return await terminal.end()

    assert run(backend, command) == 0


# ---- during the imports


INTERRUPT = """
import os, signal, sys
from importlib.abc import MetaPathFinder

wanted = sys.argv[1]

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from grpc_service.cli.entry import main
sys.argv[1:2] = []
sys.exit(main())
"""


@pytest.mark.parametrize(
    "module",
    ["grpc_service.cli.main", "engine.config", "grpc", "grpc_service.cli.generate"],
)
def test_ctrl_c_during_the_imports_is_a_sentence_and_no_traceback(module):
    argv = [sys.executable, "-c", INTERRUPT, module, "generate", "x", "--server", "127.0.0.1:1"]
    done = subprocess.run(argv, capture_output=True, timeout=LIMIT_S, check=False)
    told = (130, b"", b"triolet: interrupted\n")
    assert (done.returncode, done.stdout, done.stderr) == told


def test_a_signal_that_was_ignored_stays_ignored():
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "import sys; sys.argv = ['triolet', '--version'];"
        "from grpc_service.cli.entry import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    assert output_of(code).splitlines()[-1] == "True"


# ---- explain, abort, completion


def test_explain(ask):
    code, out, _ = ask(FakeBackend(), "explain", "r1")
    assert code == 0
    assert out.splitlines() == [
        "state     waiting",
        "waits for seats: 1 of 1 sequences run",
        "in queue  place 2, starts in about 1.25 s",
        "computed  0 tokens, in 0 blocks",
        "parked    0.5 s so far",
        "drafts    by lookup: 7 of 9 tokens were right",
    ]
    code, out, err = ask(FakeBackend(), "explain", "r2")
    assert (code, out, err) == (1, "", "triolet: no live request has the id 'r2'\n")
    code, out, err = ask(FakeBackend(), "explain", "")
    assert (code, err) == (1, "triolet: request_id: is empty\n")


def test_usage(ask):
    backend = FakeBackend()
    code, out, _ = ask(backend, "usage", "--holder", "")
    assert (code, len(out.splitlines())) == (0, 2)
    used = UsageRecord("r1", "ann", "m", "", "chat", "OK", 1e9, 5, 4, 3, undelivered=2, step_s=0.25)
    backend.engine.usage.add(used)
    code, out, _ = ask(backend, "usage")
    assert code == 0
    since, head, line = out.splitlines()
    assert since == "since 1970-01-01T00:00:00Z"
    assert head.split() == [
        *("holder", "model", "requests", "prompt", "cached", "completion", "undelivered"),
        *("step", "s"),
    ]
    assert line.split() == ["ann", "m", "1", "5", "4", "3", "2", "0.250"]
    for options, num_lines in (
        (("--holder", "ben"), 0),
        (("--model", "n"), 0),
        (("--since", "2001-09-09T03:46:59.5+02:00"), 1),  # within the record's minute
        (("--since", "2001-09-09 01:47:00z"), 0),
        (("--since", "1h30m"), 0),
        (("--since", "36500d"), 1),
    ):
        code, out, _ = ask(backend, "usage", *options)
        assert (code, len(out.splitlines())) == (0, 2 + num_lines), options
    _, out, _ = ask(backend, "usage", "--since", "2001-09-09T01:47:30.25Z", "--json")
    assert json.loads(out)["since"] == "2001-09-09T01:47:00Z"


def test_an_abort_of_an_unknown_request_explains_its_effect(ask):
    _, out, _ = ask(FakeBackend(), "abort", "r9")
    assert out == "r9: not known; if it arrives within 60 s, it will be aborted\n"


def test_models_and_stats_show_a_pause(ask, monkeypatch):
    paused = ReplicaCounts("stories", 0, ModelState.READY, Counts(), "wait")
    monkeypatch.setattr(fake_backend, "STATISTICS", EngineStatistics(Counts(), (paused,)))
    _, out, _ = ask(FakeBackend(), "stats")
    assert out.splitlines()[-1].startswith("stories/0 READY, paused (wait): 0 running")
    _, out, _ = ask(FakeBackend(), "models")
    assert "READY, paused (wait)" in out
    assert "FAILED " in out


def test_a_model_directory_that_is_missing_is_named_with_its_path(tmp_path):
    pytest.importorskip("torch")
    argv = [sys.executable, "-m", "grpc_service", "serve", "--port", "0", "--model"]
    done = subprocess.run(
        [*argv, str(tmp_path / "nope")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert f"there is no such directory or file [{tmp_path / 'nope'}]" in done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_command_and_its_flags(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("chat", "explain", "reset-prefix-cache", "max-num-batched-tokens", "system"):
        assert word in script


def test_bash_completes_with_it(capsys):
    main(["completion", "bash"])
    script = capsys.readouterr().out
    asks = (
        "COMP_WORDS=(triolet ch); COMP_CWORD=1; _shtab_triolet; echo ${COMPREPLY[@]};"
        "COMP_WORDS=(triolet chat --sys); COMP_CWORD=2; _shtab_triolet; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{asks}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["chat", "--system"]
