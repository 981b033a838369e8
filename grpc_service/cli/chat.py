"""``triolet chat``: a conversation with a model, line by line.

Rule 1: answers go to standard output; notes and reasoning go to standard error, and so does the
prompt, unless input and output are terminals. Rule 2: Ctrl-C ends one answer, never the program;
Ctrl-D, the end of the input, ends the program. Rule 3: the client keeps the conversation, and the
server does not. All turns are sent again each time, and their prefix comes from the server's cache.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.requests.text.truncation import choose_dropped, truncation_limits, without_messages
from grpc_service.cli.bars import until_first_token
from grpc_service.cli.client import break_note, explain, message_from, run_client
from grpc_service.cli.generate import json_line, sampling_of, waiting_output
from grpc_service.cli.images import message_of, naming_files, read_images, user_turn
from grpc_service.cli.tools import Calls, read_tools, result_turn, shown
from grpc_service.client import CallError, InvalidArgument, messages

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator, Sequence

    from grpc_service.cli.images import SentImage, Turn
    from grpc_service.client import Client

PROMPT = "> "
HELP = """\
/reset         forget the conversation, but keep the system prompt
/system TEXT   forget the conversation, and begin a new one with this system prompt
/image FILE    add an image to the next message, for a model that reads images
/help          show this text
Ctrl-C ends an answer, and Ctrl-D ends the chat. To send a line that begins with /, put a space
before it."""
COMMANDS = frozenset({"/reset", "/system", "/image", "/help"})
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
TERMINAL_LINE_BYTES = 4096  # Linux's N_TTY passes on no more of a line, unless readline edits it
TOO_MANY = 2**31  # stands for the number of tokens when the server refuses to count them


def run(args: argparse.Namespace) -> int:
    """Hold a conversation until the input ends. Return the exit code."""
    return run_client(args, lambda client: Conversation(args, client).run())


class Conversation:
    """The turns so far, the images of the next one, and the loop of questions and answers."""

    def __init__(self, args: argparse.Namespace, client: Client) -> None:
        self._args = args
        self._client = client
        self._is_terminal = sys.stdin.isatty()
        self._sampling = sampling_of(args)
        self._tools = read_tools(args.tools)
        self._turns: list[Turn] = []
        self._images: list[SentImage] = []
        self._begin(args.system)
        self._images += read_images(args.images)

    def run(self) -> None:
        """Read and answer lines until the input ends.

        Raises:
            CallError: a call failed, and input is no terminal.
            ConfigError: an image cannot be read, and input is no terminal.
        """
        if self._is_terminal:
            _enable_line_editing()
            _note("Ctrl-D ends the chat, and /help shows more.")
        while (line := self._read()) is not None:
            if line.startswith("/"):
                self._command(line)
            elif line.strip():
                self._ask(line.strip())

    def _read(self, prompt: str = PROMPT) -> str | None:
        """Return the next line, None at the end of the input."""
        while True:
            try:
                if self._is_terminal and sys.stdout.isatty():
                    return input(prompt)
                if self._is_terminal:
                    print(prompt, end="", file=sys.stderr, flush=True)
                line = sys.stdin.readline()
                if self._is_terminal and len(line.encode(errors="replace")) >= TERMINAL_LINE_BYTES:
                    kept = TERMINAL_LINE_BYTES - 1
                    _note(f"The terminal passed on only the first {kept} bytes of this line.")
                return line.removesuffix("\n") if line else None
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                print(file=sys.stderr)
                _note("Ctrl-D ends the chat.")

    # ---- commands

    def _begin(self, system: str) -> None:
        self._turns = [{"role": "system", "content": system}] if system else []
        self._images.clear()

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            system = (m["content"] for m in self._turns if m["role"] == "system")
            self._begin(str(next(system, "")))
            _note("The conversation was forgotten.")
        elif name == "/system":
            self._begin(rest.strip())
            _note(
                "A new conversation begins" + (" with this system prompt." if rest.strip() else ".")
            )
        elif name == "/image":
            self._add_image(rest.strip())
        else:
            _note(HELP if name == "/help" else f"There is no command {name}.\n{HELP}")

    def _add_image(self, path: str) -> None:
        if not path:
            _note("/image needs a file's name.")
            return
        try:
            self._images += read_images([path], "/image ")
        except ConfigError as error:
            if not self._is_terminal:
                raise
            _note(f"triolet: {error}")
            return
        _note(f"{path} goes with the next message.")

    # ---- one turn

    def _ask(self, question: str) -> None:
        """Ask one question and print the answer. As long as the answer calls tools, the next lines
        are what these return, and the model answers again. If no answer comes, the question is
        forgotten with its images."""
        conversation = [*self._turns, user_turn(question, self._images)]
        self._images.clear()
        choice = self._args.tool_choice
        try:
            while True:
                turns = self._truncated(conversation)
                num_dropped, choice_now, choice = len(conversation) - len(turns), choice, ""
                answer, calls = self._answer(turns, num_dropped, choice_now)
                if not answer and not calls:
                    return
                said: Turn = {"role": "assistant", "content": answer, "tool_calls": tuple(calls)}
                conversation = [*turns, said]
                if not calls:
                    break
                results = self._results(calls)
                if results is None:
                    self._note_kept()
                    return
                conversation += results
        except CallError as error:
            if not self._is_terminal:
                raise
            _note(f"triolet: {explain(error, self._args.server, self._args.timeout)}")
            self._note_kept()
            return
        except KeyboardInterrupt:  # while the turns were counted
            return
        self._turns = conversation

    def _results(self, calls: Calls) -> list[Turn] | None:
        """Read a line for each call: what the tool returns. Return None at the end of the input, or
        after a command, which is carried out. Another line that begins with / is a result, such as
        a path."""
        turns = []
        for call in calls:
            if self._is_terminal:
                _note(f"(What does {call.name} return?)")
            line = self._read(f"{call.name}{PROMPT}")
            if line is not None and line.partition(" ")[0] in COMMANDS:
                self._command(line)
                line = None
            if line is None:
                return None
            turns.append(result_turn(call, line.strip()))
        return turns

    def _truncated(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the turns without those that are left out to make room for the answer."""
        count, max_model_len = self._count(turns)
        search = choose_dropped(turns, *truncation_limits(max_model_len, self._args.max_tokens))
        return list(without_messages(turns, self._search(search, count)))

    def _note_kept(self) -> None:
        """Print how many messages the conversation still has, as the last one got no answer."""
        count = sum(turn["role"] != "system" for turn in self._turns)
        before = f"; the conversation before it was, with {count} messages" if count else ""
        _note(f"This message was not kept{before}.")

    def _search(
        self, search: Generator[Sequence[Turn], int, tuple[int, ...]], count: int
    ) -> tuple[int, ...]:
        next(search)
        try:
            while True:
                shorter = search.send(count)
                count, _ = self._count(shorter)
        except StopIteration as done:
            dropped: tuple[int, ...] = done.value
            return dropped

    def _count(self, turns: Sequence[Turn]) -> tuple[int, int]:
        """Return the number of tokens of these turns, and the context's length."""
        chat = messages.Chat(messages=map(message_of, turns), tools=self._tools)
        request = messages.TokenizeRequest(model=self._args.model, chat=chat)
        try:
            with naming_files(turns):
                answer = self._client.tokenize(request, timeout=self._args.timeout)
            return len(answer.tokens), answer.max_model_len
        except InvalidArgument:
            if len(turns) == 1:
                raise
            return TOO_MANY, self._count(turns[-1:])[1]

    def _answer(self, turns: Sequence[Turn], num_dropped: int, choice: str) -> tuple[str, Calls]:
        """Print the answer as it comes, after a note if messages were left out to make room for it.
        ``choice`` says whether the model calls tools. Return the text and the calls that have come,
        also when Ctrl-C ended the answer."""
        request = messages.GenerateRequest(
            model=self._args.model,
            chat=messages.Chat(
                messages=map(message_of, turns), tools=self._tools, tool_choice=choice
            ),
            sampling=self._sampling,
            reasoning=message_from(messages.Reasoning, self._args),
            output=waiting_output(self._args),
        )
        on_break = break_note(self._args)
        stream = self._client.generate(request, timeout=self._args.timeout, on_break=on_break)
        printer = _Printer(is_json=self._args.json)
        try:
            with naming_files(turns):
                for event in until_first_token(stream):
                    if num_dropped and event.HasField("started"):
                        _note(
                            f"(The context is full: {num_dropped} earlier messages were left out.)"
                        )
                    printer.show(event)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            printer.show_calls()
            printer.note("(stopped)")
        finally:
            stream.cancel()
            printer.end_line()
        return "".join(printer.text), printer.calls


class _Printer:
    """Prints one answer. ``text`` and ``calls`` have the parts that have come."""

    def __init__(self, *, is_json: bool) -> None:
        self.text: list[str] = []
        self.calls = Calls()
        self._is_json = is_json
        self._is_line_open = False
        self._is_reasoning = False

    def show(self, event: messages.GenerateResponse) -> None:
        """Print one event."""
        text, reasoning = event.delta.text, event.delta.reasoning
        self.text.append(text)
        self.calls.add(event.delta.tool_calls)
        if self._is_json:
            print(json_line(event), flush=True)
            return
        if reasoning:
            dim, plain = (DIM, PLAIN) if sys.stderr.isatty() else ("", "")
            print(f"{dim}{reasoning}{plain}", end="", file=sys.stderr, flush=True)
            self._is_reasoning = True
        if text:
            self._end_reasoning()
            print(text, end="", flush=True)
            self._is_line_open = not text.endswith("\n")
        if event.HasField("finished"):
            self.show_calls()
        if event.finished.reason == messages.FINISH_REASON_LENGTH:
            self.note("(cut at --max-tokens, or at the end of the context)")

    def show_calls(self) -> None:
        """Print the calls that have come, once the answer has ended."""
        if self._is_json:
            return
        self.end_line()
        for call in self.calls:
            print(shown(call), flush=True)

    def note(self, text: str) -> None:
        """Print a note about the answer on a line of its own."""
        self.end_line()
        _note(text)

    def end_line(self) -> None:
        """End the line that was begun, if there is one."""
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
    """Enable arrow keys and the history of lines, if Python has readline."""
    try:
        import readline  # noqa: F401 importing it is its effect
    except ImportError:
        return
