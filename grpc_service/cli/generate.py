"""``triolet generate``: a completion, to the terminal as it is made.

Rule 1: leaving by any way ends the call, and with it the server's work.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from google.protobuf import json_format

from engine.errors import ConfigError
from grpc_service._generated.triolet.v1 import inference_pb2, inference_pb2_grpc
from grpc_service.cli.client import run_client

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    import grpc

    Responses = Iterable[inference_pb2.GenerateResponse]


def run(args: argparse.Namespace) -> int:
    """Returns the exit code.

    Raises:
        ConfigError: a flag asks for what is not shown as text.
    """
    for flag, given in (("logprobs", args.logprobs), ("prompt-logprobs", args.prompt_logprobs)):
        if given is not None and not args.json:
            raise ConfigError(f"--{flag} is shown by --json only; give both")
    request = request_of(args, _prompt(args.prompt))

    def job(channel: grpc.Channel) -> None:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=args.timeout)
        try:
            if args.json:
                print_json(call)
            elif request.n > 1:
                print_choices(call, request.n)
            else:
                print_text(call)
        finally:
            call.cancel()

    return run_client(args, job)


def _prompt(given: str) -> str:
    """``-`` is standard input, less the one newline that shells put at its end."""
    return sys.stdin.read().removesuffix("\n") if given == "-" else given


def request_of(args: argparse.Namespace, prompt: str) -> inference_pb2.GenerateRequest:
    """Flags that are not given stay unset, so that the model's own defaults hold."""
    output = inference_pb2.OutputOptions(
        logprobs=args.logprobs, prompt_logprobs=args.prompt_logprobs
    )
    return inference_pb2.GenerateRequest(
        model=args.model, text=prompt, sampling=sampling_of(args), n=args.n, output=output
    )


def sampling_of(args: argparse.Namespace) -> inference_pb2.SamplingParams:
    """What the flags of sampling say (`grpc_service.cli.main`)."""
    return inference_pb2.SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        typical_p=args.typical_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        max_tokens=args.max_tokens,
        seed=args.seed,
        stop=args.stop,
        bad_words=args.bad_word,
    )


def print_json(responses: Responses) -> None:
    """One line of JSON per event, in proto's own mapping."""
    for response in responses:
        print(json_line(response), flush=True)


def json_line(response: inference_pb2.GenerateResponse) -> str:
    """An event as one line of JSON."""
    event = json_format.MessageToDict(response, preserving_proto_field_name=True)
    return json.dumps(event, ensure_ascii=False)


def print_text(responses: Responses) -> None:
    """The text, part by part, ended by a newline."""
    last = ""
    try:
        for response in responses:
            last = response.delta.text or last
            print(response.delta.text, end="", flush=True)
    finally:
        if last and not last.endswith("\n"):
            print(flush=True)


def print_choices(responses: Responses, num_choices: int) -> None:
    """Each choice whole, under its number, once it and those before it have ended."""
    texts = [""] * num_choices
    ended: set[int] = set()
    num_printed = 0
    for response in responses:
        texts[response.delta.choice] += response.delta.text
        if response.HasField("finished"):
            ended.add(response.finished.choice)
        while num_printed in ended:
            print(f"--- {num_printed + 1} of {num_choices} ---")
            print(texts[num_printed].removesuffix("\n"), flush=True)
            num_printed += 1
