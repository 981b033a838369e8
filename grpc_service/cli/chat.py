"""``triolet chat``: a conversation with a model, line by line.

Rule 1: the answers go to standard output, all else (prompt, notes, reasoning) to standard error or
the terminal's prompt. Rule 2: Ctrl-C ends one answer, never the program; Ctrl-D, the end of the
input, ends the program. Rule 3: the conversation is the client's, and the server keeps none: what
was said is sent again each turn, and its prefix comes from the server's cache.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import grpc

from engine.shift import fit, limits, without
from grpc_service._generated.triolet.v1 import inference_pb2, inference_pb2_grpc
from grpc_service.cli.client import explain, run_client, target_of
from grpc_service.cli.generate import json_line, sampling_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator

PROMPT = "> "
HELP = """\
/reset         forget the conversation, keep the system prompt
/system TEXT   forget the conversation and begin with this system prompt
/help          show this
Ctrl-C ends an answer, Ctrl-D leaves. A line that begins with a space is sent as it is."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
TOO_MANY = 2**31  # tokens of what is too large to be counted


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""

    def job(channel: grpc.Channel) -> None:
        Conversation(args, inference_pb2_grpc.InferenceStub(channel)).run()

    return run_client(args, job)


class Conversation:
    """What was said so far, and the loop of questions and answers."""

    def __init__(self, args: argparse.Namespace, stub: inference_pb2_grpc.InferenceStub) -> None:
        self._args = args
        self._stub = stub
        self._is_terminal = sys.stdin.isatty()
        self._sampling = sampling_of(args)
        self._messages: list[dict[str, str]] = []
        self._begin(args.system)

    def run(self) -> None:
        """Until the input ends. A call that fails ends it too, where nobody is there to go on."""
        if self._is_terminal:
            _enable_line_editing()
            _note("Ctrl-D leaves, /help tells more.")
        while (line := self._read()) is not None:
            if line.startswith("/"):
                self._command(line)
            elif line.strip():
                self._ask(line.strip())

    def _read(self) -> str | None:
        """The next line; None: there is none."""
        while True:
            try:
                if self._is_terminal and sys.stdout.isatty():
                    return input(PROMPT)
                if self._is_terminal:
                    print(PROMPT, end="", file=sys.stderr, flush=True)
                line = sys.stdin.readline()
                return line.removesuffix("\n") if line else None
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                print(file=sys.stderr)
                _note("Ctrl-D leaves.")

    # ---- commands

    def _begin(self, system: str) -> None:
        self._messages = [{"role": "system", "content": system}] if system else []

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self._begin(next((m["content"] for m in self._messages if m["role"] == "system"), ""))
            _note("The conversation is forgotten.")
        elif name == "/system":
            self._begin(rest.strip())
            _note("The conversation begins anew" + (", with this." if rest.strip() else "."))
        else:
            _note(HELP if name == "/help" else f"There is no {name}.\n{HELP}")

    # ---- one turn

    def _ask(self, question: str) -> None:
        """One question and its answer; if it fails before any of it came, nothing was asked."""
        messages = [*self._messages, {"role": "user", "content": question}]
        try:
            messages = self._shifted(messages)
            answer = self._answer(messages)
        except grpc.RpcError as error:
            if not self._is_terminal:
                raise
            target = target_of(self._args.server)
            _note(f"triolet: {explain(error, target, self._args.timeout)}")
            return
        except KeyboardInterrupt:  # while it was counted
            return
        if answer:
            self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _shifted(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """The messages, less the turns that must go for an answer to have room."""
        count, max_model_len = self._count(messages)
        search = fit(messages, *limits(max_model_len, self._args.max_tokens))
        dropped = self._search(search, count)
        if dropped:
            _note(f"(The context is full: {len(dropped)} messages after the first were left out.)")
        return [dict(message) for message in without(messages, dropped)]

    def _search(
        self, search: Generator[tuple[object, ...], int, tuple[int, ...]], count: int
    ) -> tuple[int, ...]:
        next(search)
        try:
            while True:
                shorter = search.send(count)
                count, _ = self._count(shorter)  # type: ignore[arg-type]
        except StopIteration as done:
            dropped: tuple[int, ...] = done.value
            return dropped

    def _count(self, messages: list[dict[str, str]]) -> tuple[int, int]:
        """Tokens of these messages, and the context's length."""
        request = inference_pb2.TokenizeRequest(
            model=self._args.model, chat=inference_pb2.Chat(messages=list(messages))
        )
        try:
            answer = self._stub.Tokenize(request, timeout=self._args.timeout)
            return len(answer.tokens), answer.max_model_len
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT or len(messages) == 1:
                raise
            return TOO_MANY, self._count(messages[-1:])[1]

    def _answer(self, messages: list[dict[str, str]]) -> str:
        """Print the answer as it comes; what came of it, also when Ctrl-C ended it."""
        request = inference_pb2.GenerateRequest(
            model=self._args.model,
            chat=inference_pb2.Chat(messages=messages),
            sampling=self._sampling,
        )
        call = self._stub.Generate(request, timeout=self._args.timeout)
        printer = _Printer(is_json=self._args.json)
        try:
            for response in call:
                printer.show(response)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            printer.note("(stopped)")
        finally:
            call.cancel()
            printer.end_line()
        return "".join(printer.text)


class _Printer:
    """Prints one answer. ``text`` is what came of it."""

    def __init__(self, *, is_json: bool) -> None:
        self.text: list[str] = []
        self._is_json = is_json
        self._is_line_open = False
        self._is_reasoning = False

    def show(self, response: inference_pb2.GenerateResponse) -> None:
        """One event, as it came."""
        text, reasoning = response.delta.text, response.delta.reasoning
        self.text.append(text)
        if self._is_json:
            print(json_line(response), flush=True)
            return
        if reasoning:
            dim, plain = (DIM, PLAIN) if sys.stderr.isatty() else ("", "")
            print(f"{dim}{reasoning}{plain}", end="", file=sys.stderr, flush=True)
            self._is_reasoning = True
        if text:
            self._end_reasoning()
            print(text, end="", flush=True)
            self._is_line_open = not text.endswith("\n")
        if response.finished.reason == inference_pb2.FINISH_REASON_LENGTH:
            self.note("(cut by --max-tokens or by the end of the context)")

    def note(self, text: str) -> None:
        """Something about the answer, on a line of its own."""
        self.end_line()
        _note(text)

    def end_line(self) -> None:
        """End the line that was begun, if any."""
        self._end_reasoning()
        if self._is_line_open:
            print(flush=True)
        self._is_line_open = False

    def _end_reasoning(self) -> None:
        if self._is_reasoning:
            print(file=sys.stderr, flush=True)
        self._is_reasoning = False


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _enable_line_editing() -> None:
    """Arrow keys and the lines typed before, where the terminal can."""
    try:
        import readline  # noqa: F401 importing it is its effect
    except ImportError:
        return
