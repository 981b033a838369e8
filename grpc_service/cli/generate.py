"""``triolet generate``: prints a completion while it is generated, or one for each line of a file.

Rule 1: however the command ends, its calls end with it, and so does the server's work. Rule 2:
threads send the prompts of a file, each one call at a time; the main thread prints the answers in
the order of their prompts.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from google.protobuf import json_format

from engine.errors import ConfigError
from grpc_service.cli.bars import until_first_token
from grpc_service.cli.client import break_note, message_from, run_client
from grpc_service.cli.images import message_of, naming_files, read_images, user_turn
from grpc_service.cli.texts import progress, texts_of
from grpc_service.client import CallError, messages

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from grpc_service.cli.images import Turn
    from grpc_service.client import Client

    Events = Iterable[messages.GenerateResponse]

PARALLEL = 16  # calls for a file's prompts. Guess: they fill a step, and leave room in the queue


def run(args: argparse.Namespace) -> int:
    """Generate and print a completion. Return the exit code.

    Raises:
        ConfigError: there is no prompt, or flags do not fit together; or a file cannot be read.
    """
    if args.file is not None:
        return _run_file(args)
    if args.prompt is None:
        raise ConfigError("there is no prompt; give one (- is standard input), or --file FILE")
    for flag, given in (("logprobs", args.logprobs), ("prompt-logprobs", args.prompt_logprobs)):
        if given is not None and not args.json:
            raise ConfigError(f"--{flag} needs --json")
    if args.images and not args.chat:
        raise ConfigError("--image needs --chat: an image is part of a message")
    turn = user_turn(_prompt(args.prompt), read_images(args.images))
    request = request_of(args, turn)
    request.output.MergeFrom(waiting_output(args))

    def job(client: Client) -> None:
        on_break = break_note(args)
        stream = client.generate(request, timeout=args.timeout, on_break=on_break)
        with naming_files([turn]), stream:
            if args.json:
                for event in stream:
                    print(json_line(event), flush=True)
            elif request.n > 1:
                print_choices(until_first_token(stream), request.n)
            else:
                print_text(until_first_token(stream))

    return run_client(args, job)


def _run_file(args: argparse.Namespace) -> int:
    """Generate a completion for each line of a file. Return the exit code."""
    given = [] if args.prompt is None else [args.prompt]
    prompts = texts_of(given, args.file, "prompts")
    for flag, is_given in (
        ("image", args.images),
        ("n", args.n is not None),
        ("logprobs", args.logprobs is not None),
        ("prompt-logprobs", args.prompt_logprobs is not None),
    ):
        if is_given:
            raise ConfigError(f"--{flag} takes one prompt, and --file has many")

    def job(client: Client) -> None:
        with progress("generating", len(prompts), is_quiet=sys.stdout.isatty()) as advance:
            for place, (text, finished) in enumerate(_answers(client, args, prompts)):
                advance()
                if args.json:
                    print(_answer_line(place, text, finished), flush=True)
                else:
                    print(f"--- {place + 1} of {len(prompts)} ---")
                    print(text.removesuffix("\n"), flush=True)

    return run_client(args, job)


def _answers(
    client: Client, args: argparse.Namespace, prompts: Sequence[str]
) -> Iterator[tuple[str, messages.Finished]]:
    """Yield the answer to each prompt, in their order, and how it ended.

    Raises:
        CallError: a call failed; the line number of its prompt is printed.
    """

    def answer(place: int) -> tuple[str, messages.Finished]:
        text, finished = [], messages.Finished()
        request = request_of(args, user_turn(prompts[place], []))
        try:
            with client.generate(request, timeout=args.timeout) as stream:
                for event in stream:
                    text.append(event.delta.text)
                    finished.MergeFrom(event.finished)
        except CallError as error:
            error.add_note(f"triolet: at line {place + 1} of {args.file}:")
            raise
        return "".join(text), finished

    pool = ThreadPoolExecutor(PARALLEL)
    try:
        yield from pool.map(answer, range(len(prompts)))
    except BaseException as error:
        client.close()  # ends the calls of the other threads
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _answer_line(place: int, text: str, finished: messages.Finished) -> str:
    """Return an answer as one line of JSON; ``index`` counts the prompts from 0."""
    fields = {
        "index": place,
        "text": text,
        "reason": messages.FinishReason.Name(finished.reason),
        "completion_tokens": finished.usage.completion_tokens,
    }
    return json.dumps(fields, ensure_ascii=False)


def _prompt(given: str) -> str:
    """Return the prompt. ``-`` stands for standard input, without the one newline that shells put
    at its end."""
    return sys.stdin.read().removesuffix("\n") if given == "-" else given


def request_of(args: argparse.Namespace, turn: Turn) -> messages.GenerateRequest:
    """Return the request: the turn's text, or with --chat a chat of the turn alone. Flags that are
    not given stay unset, so that the model's own defaults apply."""
    output = messages.OutputOptions(logprobs=args.logprobs, prompt_logprobs=args.prompt_logprobs)
    request = messages.GenerateRequest(
        model=args.model, sampling=sampling_of(args), n=args.n, output=output
    )
    if args.chat:
        request.chat.messages.append(message_of(turn))
    else:
        request.text = str(turn["content"])
    return request


def waiting_output(args: argparse.Namespace) -> messages.OutputOptions:
    """Return the output options that ask for the events of `until_first_token`, if a terminal shows
    them."""
    is_shown = sys.stderr.isatty() and not args.json
    return messages.OutputOptions(progress=True if is_shown else None)


def sampling_of(args: argparse.Namespace) -> messages.SamplingParams:
    """Return the sampling parameters that the flags give (`grpc_service.cli.main`)."""
    return message_from(messages.SamplingParams, args)


def json_line(event: messages.GenerateResponse) -> str:
    """Return an event as one line of JSON."""
    fields = json_format.MessageToDict(event, preserving_proto_field_name=True)
    return json.dumps(fields, ensure_ascii=False)


def print_text(events: Events) -> None:
    """Print the text part by part, and a newline at its end."""
    last = ""
    try:
        for event in events:
            last = event.delta.text or last
            print(event.delta.text, end="", flush=True)
    finally:
        if last and not last.endswith("\n"):
            print(flush=True)


def print_choices(events: Events, num_choices: int) -> None:
    """Print each choice under its number, once it and all choices before it have ended."""
    texts = [""] * num_choices
    ended: set[int] = set()
    num_printed = 0
    for event in events:
        texts[event.delta.choice] += event.delta.text
        if event.HasField("finished"):
            ended.add(event.finished.choice)
        while num_printed in ended:
            print(f"--- {num_printed + 1} of {num_choices} ---")
            print(texts[num_printed].removesuffix("\n"), flush=True)
            num_printed += 1
