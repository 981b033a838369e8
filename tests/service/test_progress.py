"""Events before the first token, at both doors of a server, in process, and on a terminal."""

import json
import os
import pty
import subprocess
import sys
import time

import pytest

from engine.api import aio
from engine.api._generated import blocking
from engine.config import EngineConfig, ModelConfig
from engine.core.common.events import Finished
from engine.core.common.prompts import PromptProgress
from engine.core.text.types import Tokens
from engine.requests.progress import INTERVAL_S
from engine.requests.text.values import GenerateRequest, Started
from engine.worker.fakes.text import FakeRunner, FakeScript
from grpc_service.openai.text_codec import decode_chat, decode_completion
from grpc_service.openai.work import Context
from tests.support.facades import run_loop
from tests.support.openai_calls import CHAT, TEXT, ask
from tests.support.server import fake
from tests.support.wire import Generation, generate, wait_idle, wait_serving

PROMPT = [5 + n % 900 for n in range(1000)]
STEP = {
    "max_num_batched_tokens": 100,
    "step_time_target_s": 0.0,
    "prefix_cache": False,
    "max_num_seqs": 8,
}
SLOW = {"token_s": 0.002}  # the prompt takes two seconds


@pytest.fixture(scope="module")
def server():
    """Serve a model that takes two seconds for the prompt, on two replicas."""
    models = [{"name": "slow", "script": SLOW, "replicas": 2}]
    ports = {"openai_port": 0}
    with fake(models=models, runner={"max_model_len": 2048}, engine=STEP, server=ports) as one:
        wait_serving(one.channel)
        yield one
        wait_idle(one.channel)


def check(counts, estimates):
    """Check what was told of the prompt: the computed tokens, and the seconds left."""
    assert len(counts) >= 4
    assert counts == sorted(counts)
    assert max(counts) >= 800
    known = [one for one in estimates if one is not None]
    assert len(known) >= 3
    assert known[-1] < known[0]


def test_grpc_sends_it_before_the_first_delta(server):
    heard = generate(server.channel, prompt_ids=PROMPT, max_tokens=3, output={"progress": True})
    kinds = heard.kinds
    assert kinds[0] == "started"
    assert kinds.count("progress") == kinds.index("delta") - 1
    events = [one.progress for one in heard.messages if one.HasField("progress")]
    assert {(one.prompt_tokens, one.phase) for one in events} == {(len(PROMPT), "prefill")}
    left = [
        one.first_token.ToTimedelta().total_seconds() if one.HasField("first_token") else None
        for one in events
    ]
    check([one.computed_tokens for one in events], left)
    quiet = generate(server.channel, prompt_ids=PROMPT, max_tokens=3)
    assert "progress" not in quiet.kinds


def test_two_prompts_at_once_are_both_told(server):
    calls = [
        Generation(
            server.channel, prompt_ids=[n, *PROMPT], max_tokens=2, n=2, output={"progress": True}
        )
        for n in (1, 2)
    ]
    for call in calls:
        heard = call.finish()
        assert heard.error is None
        events = [one.progress for one in heard.messages if one.HasField("progress")]
        check([one.computed_tokens for one in events], [1.0, 0.5, 0.0])


def test_a_client_that_reads_late_gets_the_newest_ones_and_holds_nothing_up(server):
    late = Generation(server.channel, prompt_ids=PROMPT, max_tokens=3, output={"progress": True})
    begun = time.monotonic()
    assert generate(server.channel, prompt_ids=[5], max_tokens=3).error is None
    assert time.monotonic() - begun < 1.5
    wait_idle(server.channel)
    assert late.finish().kinds[-1] == "finished"


@pytest.mark.parametrize(
    ("path", "prompt"),
    [(CHAT, {"messages": [{"role": "user", "content": "x" * 900}]}), (TEXT, {"prompt": PROMPT})],
    ids=["chat", "text"],
)
def test_http_sends_chunks_without_choices_in_the_form_of_llama_cpp(server, path, prompt):
    body = {**prompt, "model": "slow", "max_tokens": 3, "stream": True, "return_progress": True}
    events = ask(server.openai_port, path, body).events
    assert events[-1] == "[DONE]"
    told = [one for one in events[:-1] if "prompt_progress" in one]
    first = next(i for i, one in enumerate(events) if one["choices"] and one["choices"][0].get(
        "text", one["choices"][0].get("delta", {}).get("content")))  # fmt: skip
    assert all(one["choices"] == [] for one in told)
    assert events.index(told[-1]) < first
    assert {one["object"] for one in told} == {events[first]["object"]}
    assert {one["model"] for one in told} == {"slow"}
    parts = [one["prompt_progress"] for one in told]
    assert all(0 <= one["cache"] <= one["processed"] <= one["total"] for one in parts)
    assert parts[0]["total"] > 900
    assert parts[-1]["time_ms"] > parts[0]["time_ms"]
    check([one["processed"] for one in parts], [one["first_token_ms"] for one in parts])


@pytest.mark.parametrize(
    ("decode", "prompt"),
    [
        (decode_chat, {"messages": [{"role": "user", "content": "x"}]}),
        (decode_completion, {"prompt": "x"}),
    ],
    ids=["chat", "text"],
)
def test_http_names_the_model_before_the_request_is_admitted(decode, prompt):
    body = {**prompt, "model": "m", "stream": True, "return_progress": True}
    work = decode(body, Context("r", None, 0, 0))
    [chunk] = work.encoder.encode(0, [PromptProgress("load")])
    assert json.loads(chunk.removeprefix(b"data: "))["model"] == "m"


def test_http_says_which_of_several_prompts_is_meant(server):
    body = {"prompt": [[1, *PROMPT], [2, *PROMPT]], "model": "slow", "max_tokens": 3}
    options = {"stream": True, "return_progress": True, "stream_options": {"include_usage": True}}
    events = ask(server.openai_port, TEXT, body | options).events
    told = [one for one in events[:-1] if "prompt_progress" in one]
    assert {one["prompt_progress"]["prompt"] for one in told} == {0, 1}
    assert all(one["usage"] is None for one in told)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"return_progress": True}, "needs stream to be true"),
        ({"return_progress": "yes", "stream": True}, "true or false"),
    ],
)
def test_http_refuses_it_by_name_where_it_can_mean_nothing(server, fields, what):
    answer = ask(server.openai_port, TEXT, {"prompt": [5], "max_tokens": 1} | fields)
    assert answer.status == 400
    assert answer.error["param"] == "return_progress"
    assert what in answer.error["message"]


def test_a_cancel_ends_a_request_that_has_only_progress(server):
    call = Generation(server.channel, prompt_ids=PROMPT, output={"progress": True})
    while call.read().WhichOneof("event") != "progress":
        pass
    begun = time.monotonic()
    call.cancel()
    wait_idle(server.channel)
    assert time.monotonic() - begun < 1.0


# ---- in process


def events_by_asyncio(config, make):
    """Return the events of a request by `engine.aio`, each with its time."""

    async def main():
        async with aio.open_engine(config, make_runner=make) as engine:
            return [(time.monotonic(), event) async for event in engine.generate(in_process())]

    return run_loop(main)


def events_in_threads(config, make):
    """Return the events of a request by `engine.blocking`, each with its time."""
    with blocking.open_engine(config, make_runner=make) as engine:
        return [(time.monotonic(), event) for event in engine.generate(in_process())]


def in_process():
    """Return a request of the long prompt."""
    return GenerateRequest(token_ids=PROMPT, sampling={"max_tokens": 3}, output={"progress": True})


@pytest.mark.parametrize("events_of", [events_by_asyncio, events_in_threads])
def test_programs_get_it_as_events(events_of):
    config = EngineConfig(models=(ModelConfig("fake"),), check_level=2, **STEP)
    heard = events_of(config, lambda *_: FakeRunner(max_model_len=2048, script=FakeScript(**SLOW)))
    kinds = [type(event) for _, event in heard]
    assert kinds[0] is Started
    assert kinds[-4:] == [Tokens, Tokens, Tokens, Finished]
    told = [(at, event) for at, event in heard if isinstance(event, PromptProgress)]
    assert kinds[1:-4] == [PromptProgress] * len(told)
    check([one.computed_tokens for _, one in told], [one.first_token_s for _, one in told])
    assert told[-1][0] - told[0][0] > (len(told) - 2) * INTERVAL_S


# ---- on a terminal


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_terminal_shows_a_bar_until_the_first_token(server, command):
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "grpc_service", command, "--max-tokens", "3"]
    argv += ["--server", server.address, *(["x" * 900] if command == "generate" else [])]
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as process:
        os.close(theirs)
        out, _ = process.communicate(b"x" * 900 + b"\n" if command == "chat" else b"", 60)
        seen = b""
        while part := read(ours):
            seen += part
        assert process.returncode == 0
    os.close(ours)
    assert b"reading the prompt" in seen
    assert b"left" in seen
    assert out.count(b"<") == 3, out
    assert b"reading" not in out


def read(fd):
    """Return what a terminal shows next; empty at its end."""
    try:
        return os.read(fd, 65536)
    except OSError:
        return b""


def test_a_pipe_gets_no_progress(server):
    argv = [sys.executable, "-m", "grpc_service", "generate", "x" * 900, "--max-tokens", "3"]
    done = subprocess.run(
        [*argv, "--server", server.address, "--json"], capture_output=True, timeout=60, check=True
    )
    assert b"progress" not in done.stdout + done.stderr
