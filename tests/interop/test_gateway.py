"""OpenAI's API through the gateway smg, before servers of ours: what the `openai` client gets.

An answer is the same as by triolet.v1 with the same seed, whichever server gave it.
"""

import json
import re
import signal
import subprocess
import time
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpc_service.client import messages, stubs
from tests.support.gateway import PACKAGES, free_ports, gateway, need_gateway, worker
from tests.support.server import real
from tests.support.tool_model import TOOL
from tests.support.wire import generate, wait_until

pytestmark = [pytest.mark.interop, pytest.mark.full, pytest.mark.model]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
TURNS = [{"role": "user", "content": "Tell me a story."}]
SEEDED = {"model": "stories", "seed": 7, "temperature": 0.8, "max_tokens": 24}
SAMPLING = {"seed": 7, "temperature": 0.8, "max_tokens": 24, "top_p": 1.0, "top_k": 0}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Yield a gateway before two servers of one model, and the servers."""
    log = tmp_path_factory.mktemp("gateway") / "log"
    with (
        worker(model="demo-stories", name="stories") as first,
        worker(model="demo-stories", name="stories") as second,
        gateway([first, second], "--policy", "cache_aware", log=log) as one,
    ):
        yield one, [first, second]


def chat(**args):
    """Return a call of chat.completions."""
    return {"path": "chat.completions", "args": SEEDED | {"messages": TURNS} | args}


def ours(server, n=1, **fields):
    """Return triolet.v1's answer to the same chat."""
    chat_ = {"messages": TURNS}
    return generate(server.channel, chat=chat_, sampling=SAMPLING, n=n, **fields)


# ---- what an answer is


def test_a_chat_is_that_of_triolet_v1_streamed_or_not(fleet):
    one, servers = fleet
    expected = ours(servers[0])
    whole, parts = one.call([chat(), chat(stream=True, stream_options={"include_usage": True})])
    [choice] = whole["choices"]
    assert choice["message"]["content"] == expected.text()
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 24
    assert whole["usage"]["prompt_tokens"] == expected.started.prompt_tokens
    text = [c["delta"].get("content") or "" for part in parts for c in part["choices"]]
    assert "".join(text) == expected.text()
    assert parts[-1]["usage"]["completion_tokens"] == 24


def test_several_choices_stops_and_completions_are_those_of_triolet_v1(fleet):
    one, servers = fleet
    two, words = ours(servers[0], n=2), ours(servers[0]).text().split()
    stop = words[len(words) // 2]
    prompt = "Once upon a time"
    several, stopped, completed = one.call(
        [
            chat(n=2),
            chat(stop=[stop]),
            {"path": "completions", "args": SEEDED | {"prompt": prompt}},
        ]
    )
    found = {choice["index"]: choice["message"]["content"] for choice in several["choices"]}
    assert found == {0: two.text(0), 1: two.text(1)}
    [choice] = stopped["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == ours(servers[0]).text().partition(stop)[0]
    plain = {"add_special_tokens": False}  # smg adds no special tokens to a completion's prompt
    expected = generate(servers[0].channel, text=prompt, sampling=SAMPLING, prompt=plain)
    assert completed["choices"][0]["text"] == expected.text()


def test_log_probabilities_are_those_of_triolet_v1(fleet):
    one, servers = fleet
    [answer] = one.call([chat(logprobs=True, top_logprobs=2, max_tokens=6)])
    expected = generate(
        servers[0].channel,
        chat={"messages": TURNS},
        sampling=SAMPLING | {"max_tokens": 6},
        output={"logprobs": 2},
    )
    entries = answer["choices"][0]["logprobs"]["content"]
    numbers = [entry.logprob for delta in expected.deltas for entry in delta.logprobs]
    assert [entry["logprob"] for entry in entries] == pytest.approx(numbers, abs=1e-4)
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}


def test_an_answer_keeps_to_a_schema_and_to_a_tool(fleet):
    one, servers = fleet
    schema = TOOL["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "word", "schema": schema}}
    named = {"type": "function", "function": {"name": "look_up"}}
    shaped, called = one.call(
        [
            chat(response_format=form, max_tokens=80),
            chat(tools=[TOOL], tool_choice=named, max_tokens=80),
        ]
    )
    expected = generate(
        servers[0].channel,
        chat={"messages": TURNS},
        sampling=SAMPLING | {"max_tokens": 80},
        constraint={"json_schema": json.dumps(schema)},
    )
    assert shaped["choices"][0]["message"]["content"] == expected.text()
    assert set(json.loads(expected.text())) == {"word"}
    [choice] = called["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look_up"
    assert set(json.loads(call["function"]["arguments"])) == {"word"}


def test_a_clients_mistake_is_told_as_one_and_not_tried_again(fleet):
    one, servers = fleet
    method = "vllm.grpc.engine.VllmEngine/Generate INVALID_ARGUMENT"
    [answer] = one.call([chat(extra_body={"stop_token_ids": [999999]})])
    assert answer["status"] == 400
    assert "sampling.stop_token_ids[0]: is 999999" in answer["message"]
    assert sum(server.log.count(method) for server in servers) == 1


def test_an_embedding_is_that_of_triolet_v1_and_several_inputs_become_one(tmp_path):
    """smg joins the inputs of a call with spaces, as docs/fleets.md says."""
    texts = ["The dog sleeps.", "A hound naps."]
    with (
        worker(model="demo-embed", name="words") as server,
        gateway([server], log=tmp_path / "log") as one,
    ):
        calls = [texts[0], texts]
        answers = one.call(
            [{"path": "embeddings", "args": {"model": "words", "input": text}} for text in calls]
        )
        stub = stubs.InferenceStub(server.channel)
        inputs = [{"text": texts[0]}, {"text": " ".join(texts)}]
        found = stub.Embed(messages.EmbedRequest(inputs=inputs), timeout=60)
        expected = {one.index: list(one.values) for one in found}
    for index, answer in enumerate(answers):
        [vector] = answer["data"]
        assert vector["embedding"] == pytest.approx(expected[index], abs=1e-5)


def test_a_gateway_has_each_model_of_a_server_as_one_of_its_own(tmp_path):
    """smg gets the flags of docs/fleets.md; with --enable-igw it would ignore --worker-urls."""
    ports = free_ports(2)
    names = {"stories": "demo-stories", "words": "demo-embed"}
    args = [
        word
        for (name, model), port in zip(names.items(), ports, strict=True)
        for word in (
            *("--model", model, "--served-model-name", name),
            *("--vllm-engine-port", f"{name}={port}"),
        )
    ]
    with (
        real(*args, model=None) as server,
        gateway(
            [SimpleNamespace(gateway_port=port) for port in ports],
            *("--policy", "cache_aware"),
            log=tmp_path / "log",
        ) as one,
    ):
        listed = one.get("/v1/models")["data"]
        assert sorted(model["id"] for model in listed) == sorted(names)
        told, vector = one.call(
            [chat(), {"path": "embeddings", "args": {"model": "words", "input": "The dog."}}]
        )
        assert told["choices"][0]["message"]["content"]
        assert len(vector["data"]) == 1
        assert server.is_running


# ---- the files in deploy/


def test_the_deployed_gateways_have_flags_that_this_gateway_takes():
    smg = need_gateway() / "bin" / "smg"
    said = subprocess.run([smg, "launch", "--help"], capture_output=True, text=True, timeout=60)
    known = set(re.findall(r"--[a-z][a-z0-9-]+", said.stdout))
    for name in ("gateway.service", "kubernetes-gateway.yaml"):
        lines = (DEPLOY / name).read_text().splitlines()
        text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
        flags = set(re.findall(r"--[a-z][a-z0-9-]+", text))
        ours = set(re.findall(r"--[a-z][a-z0-9-]+", text.partition("- serve")[2]))
        assert len(flags - ours) > 5
        assert flags - ours <= known, name
    packages = (DEPLOY / "Dockerfile.gateway").read_text()
    assert PACKAGES[0] in packages


# ---- the fleet


def test_requests_go_to_the_server_that_has_their_prefix(fleet):
    """The prompts were sent to the servers directly, so the gateway knows their prefixes only from
    the servers; a random choice would find only every second prefix."""
    one, servers = fleet
    prompts = [f"{word} {number} " * 20 for word in ("cats", "dogs") for number in range(10, 25)]
    turns = [[{"role": "system", "content": text}, *TURNS] for text in prompts]
    for number, turn in enumerate(turns):
        server = servers[number % 2]
        sampling = SAMPLING | {"max_tokens": 1}
        assert generate(server.channel, chat={"messages": turn}, sampling=sampling).finished()
    time.sleep(1.0)  # until the gateway has got the prefixes
    told = one.call([chat(messages=turn, max_tokens=1) for turn in turns * 2])
    usages = [answer["usage"] for answer in told]
    reached = [
        usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] // 2
        for usage in usages
    ]
    print(f"{sum(reached)} of {len(reached)} requests reached the server with their prefix")
    assert sum(reached) >= 0.95 * len(reached), usages


@pytest.mark.timeout(900)
def test_a_server_killed_and_brought_back_spoils_no_answer(tmp_path):
    """1,000 requests from 50 clients, while one of two servers is killed and comes back. The
    gateway retries a request if its client has got nothing yet."""
    [port] = free_ports(1)
    log = tmp_path / "log"
    with worker(model="demo-stories", name="stories") as steady:
        expected = {seed: _story(steady, seed) for seed in range(10)}
        with (
            worker(model="demo-stories", name="stories", port=port) as mortal,
            gateway([steady, mortal], "--policy", "round_robin", log=log) as one,
        ):
            seeds = [seed for _, seed in zip(range(1000), cycle(expected), strict=False)]
            calls = [chat(seed=seed, stream=index % 2 == 0) for index, seed in enumerate(seeds)]
            client = one.start(calls, threads=50)
            time.sleep(3.0)
            mortal.signal(signal.SIGKILL)
            mortal.process.wait(10)
            with worker(model="demo-stories", name="stories", port=port):
                out, _ = client.communicate(timeout=600)
                one.wait_ready(2)
    answers, cut = json.loads(out), 0
    for seed, answer, call in zip(seeds, answers, calls, strict=True):
        if isinstance(answer, list) or "status" not in answer:
            assert _text(answer) == expected[seed]
        else:
            assert "error reading a body from connection" in answer["message"]
            assert call["args"]["stream"]
            assert expected[seed].startswith(_text(answer["parts"]))
            cut += 1
    print(f"{cut} of {len(answers)} requests were cut")
    assert cut <= 50  # the requests that the killed server was serving


@pytest.mark.timeout(600)
def test_a_server_added_and_one_drained_under_load_cut_no_answer(tmp_path):
    """400 requests from 20 clients, while a second server joins and then the first one drains. The
    first ends by itself, with all its requests finished."""
    with (
        worker(model="demo-stories", name="stories") as first,
        worker(model="demo-stories", name="stories") as second,
        gateway([first], "--policy", "round_robin", log=tmp_path / "log") as one,
    ):
        expected = {seed: _story(second, seed) for seed in range(10)}
        seeds = [seed for _, seed in zip(range(400), cycle(expected), strict=False)]
        calls = [chat(seed=seed, stream=index % 2 == 0) for index, seed in enumerate(seeds)]
        client = one.start(calls, threads=20)
        wait_until(lambda: _served(first) >= 10, 60, "the first server's answers")
        added = {"url": f"grpc://127.0.0.1:{second.gateway_port}"}
        assert one.send("POST", "/workers", added) == 202
        wait_until(lambda: _served(second) >= 10, 60, "answers of the server that was added")
        assert client.poll() is None, "the load ended before the drain"
        first.signal(signal.SIGTERM)
        assert first.wait(60) == 0
        served = _served(second)
        out, _ = client.communicate(timeout=300)
        answers = json.loads(out)
        assert _served(second) > served
    for seed, answer in zip(seeds, answers, strict=True):
        assert isinstance(answer, list) or "status" not in answer, answer
        assert _text(answer) == expected[seed]


def _served(server):
    """Return how many Generate calls of the gateway a server has answered."""
    return server.log.count("vllm.grpc.engine.VllmEngine/Generate OK")


def _story(server, seed):
    sampling = SAMPLING | {"seed": seed}
    return generate(server.channel, chat={"messages": TURNS}, sampling=sampling).text()


def _text(answer):
    if isinstance(answer, dict):
        return answer["choices"][0]["message"]["content"]
    deltas = [choice["delta"] for part in answer for choice in part["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)
