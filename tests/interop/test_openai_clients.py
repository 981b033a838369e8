"""OpenAI's clients for Python and Node.js, LangChain, LiteLLM and `llm` use the HTTP port.

They are installed into an environment of their own. What they get is what triolet.v1 gives.
"""

import base64
import json
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support import toolchains
from tests.support.environments import virtual_environment
from tests.support.server import fake, openai_port_of, real
from tests.support.tool_model import TOOL, make_tool_model
from tests.support.wire import generate, list_models, wait_idle, wait_until
from tools.lab.demo.drawings import held_out_drawing, png_of

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.model]

CLIENTS = Path(__file__).resolve().parent / "clients"
PACKAGES = ("openai==3.57.0", "litellm==1.110.2", "langchain-openai==1.7.4", "llm==0.36")
INSTALL_TIMEOUT_S = 280
LIMIT_S = 200
KEY = "a-key-that-is-long-enough"
TURNS = [{"role": "user", "content": "Tell me a story."}]
TEXTS = ["The dog sleeps by the fire.", "A ship left at dawn."]
NUM_MODELS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Serve the story model with tools, and the models of vectors, rankings and images."""
    made = make_tool_model(tmp_path_factory.mktemp("model"))
    others = [arg for name in ("embed", "rerank", "see") for arg in ("--model", f"demo-{name}")]
    with real(*others, "--served-model-name", "stories", "--openai-port", "0", model=made) as one:
        wait_until(
            lambda: (
                sum(m.state == pb.MODEL_STATE_READY for m in list_models(one.channel)) == NUM_MODELS
            ),
            120,
        )
        one.url = f"http://127.0.0.1:{openai_port_of(one)}/v1"
        yield one


@pytest.fixture(scope="module")
def found(server, tmp_path_factory):
    """Return what the cases of Python's programs found, by their names."""
    venv = virtual_environment("openai-clients", PACKAGES, timeout_s=INSTALL_TIMEOUT_S)
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"ours {KEY} max_requests=1\n")
    folder = tmp_path_factory.mktemp("llm")
    settings = {"openai_port": 0, "api_key_file": str(keys)}
    with fake(script={"step_s": 0.02}, server=settings) as keyed:
        asked = {
            "base_url": server.url,
            "keyed_url": f"http://127.0.0.1:{keyed.openai_port}/v1",
            "key": KEY,
            "tool": TOOL,
            "image": base64.b64encode(png_of(held_out_drawing(0, 0))).decode(),
        }
        made = subprocess.run(
            [venv / "bin" / "python", CLIENTS / "openai_cases.py"],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": str(folder),
                "LLM_USER_PATH": str(folder),
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
        )
    assert made.returncode == 0, made.stderr[-3000:]
    return json.loads(made.stdout.splitlines()[-1])  # LiteLLM prints, too


@pytest.fixture(scope="module")
def story(server):
    """Return triolet.v1's answer to the cases' chat."""
    return generate(
        server.channel, model="stories", chat={"messages": TURNS}, seed=7, max_tokens=12
    )


@pytest.fixture(scope="module")
def vectors(server):
    """Return triolet.v1's vectors of the cases' texts, in hexadecimal."""
    asked = pb.EmbedRequest(model="demo-embed", inputs=[{"text": text} for text in TEXTS])
    answers = {one.index: one.values for one in stubs.InferenceStub(server.channel).Embed(asked)}
    return [struct.pack(f"<{len(answers[at])}f", *answers[at]).hex() for at in sorted(answers)]


def test_every_program_gets_the_answer_of_triolet_v1(found, story):
    text = story.text()
    usage = [story.started.prompt_tokens, 12]
    assert found["whole"] == [text, "length", usage]
    assert found["streamed"] == [text, "length"]
    for name in ("stream_helper", "langchain_chat", "langchain_stream"):
        assert found[name] == text, name
    for name in ("litellm_chat", "litellm_stream"):
        assert found[name] == text, name
    for name in ("llm_stream", "llm_whole"):
        assert found[name] == text.rstrip("\n"), name
    assert found["streamed_usage"] == [[], 12, True]
    assert found["two_choices"][0] == text
    assert len(set(found["two_choices"])) == 2
    assert "".join([token for token, _, _ in found["logprobs"]]) == text
    assert {count for _, _, count in found["logprobs"]} == {2}


def test_every_program_gets_the_vectors_of_triolet_v1_bit_for_bit(found, vectors):
    for name in ("vectors", "langchain_vectors", "litellm_vectors"):
        assert found[name] == vectors, name
    assert found["vector_of_floats"] == vectors[0]
    assert found["short_vector"] == 8
    assert found["rerank"] == 0


EXPECTED = {
    "models": ["stories", "demo-embed", "demo-rerank", "demo-see"],
    "model": "triolet",
    "same_seed": True,
    "limit": 2,
    "schema": True,
    "parsed": True,
    "developer": True,
    "extra_fields": True,
    "tools": ["tool_calls", "look_up", ["word"]],
    "tools_in_two_turns": True,
    "streamed_tools": ["look_up", ["word"]],
    "several_prompts": [0, 1, 2, 3],
    "echo": [True, None],
    "request_id": ["of-a-case", "chatcmpl-of-a-case"],
    "no_model": ["NotFoundError", 404, "model_not_found", None, "not_found_error"],
    "wrong_value": [
        *("BadRequestError", 400, "invalid_request", "temperature"),
        "invalid_request_error",
    ],
    "unknown_field": [
        *("BadRequestError", 400, "invalid_request", "colour"),
        "invalid_request_error",
    ],
    "no_responses": ["NotFoundError", 404, "not_found", None, "not_found_error"],
    "wrong_key": ["AuthenticationError", 401, "unauthenticated", None, "authentication_error"],
    "over_the_limit": ["RateLimitError", 429, "queue_full", None, "rate_limit_error"],
    "client_timeout": ["APITimeoutError", True],
    "server_deadline": ["InternalServerError", 504, "deadline_exceeded", True],
    "deadline_in_a_stream": ["APIError"],
    "closed_early": True,
    "many_at_once": 1,
    "cancelled_task": [True, True],
    "langchain_tools": ["look_up", ["word"]],
    "langchain_form": True,
    "litellm_error": ["NotFoundError", 404],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_case_finds_what_it_should(found, name):
    assert found[name] == EXPECTED[name]


def test_the_other_cases_answer(found, server):
    assert found["stop"] == [found["whole"][0].partition("dragon")[0], "stop"]
    assert found["bias"] == " a a a"
    assert found["completion"] == found["streamed_completion"]
    ours = generate(server.channel, model="stories", text="Once upon a time", seed=7, max_tokens=12)
    assert found["completion"] == ours.text()
    assert found["image"]
    failed = {name: one for name, one in found.items() if isinstance(one, dict)}
    assert failed == {}
    assert len(found) > 40
    wait_idle(server.channel)


def test_openais_client_for_node_gets_the_same(server, story, vectors):
    toolchains.need_npm()
    made = subprocess.run(
        [shutil.which("node"), CLIENTS / "openai_cases.mjs"],
        input=json.dumps({"base_url": server.url}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    answers = json.loads(made.stdout)
    assert answers["whole"] == answers["streamed"] == answers["helper"] == story.text()
    assert answers["vectors"] == vectors
    assert answers["error"] == [True, 404, "model_not_found"]
    assert answers["abort"] is True
    wait_idle(server.channel)
