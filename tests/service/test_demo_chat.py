"""Chats with the demo model: what a second turn costs, the command by pipe, and Explain."""

import subprocess
import sys

import pytest

import engine
from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.server import real
from tests.support.wire import (
    broken_fields,
    connect,
    error_of,
    list_models,
    reason,
    wait_idle,
)

pytestmark = [pytest.mark.model, pytest.mark.slow]
STORY = "Once upon a time there was a small dog named Ada who lived by the sea. "
CONVERSATIONS = 40
WORDS = 20  # tokens of each answer


@pytest.fixture(scope="module")
def server():
    """Yield a server with the demo model."""
    with real(model="demo-stories") as one:
        yield one


def test_the_shipped_model_takes_little_memory_and_the_summary_says_what_it_holds(server):
    holds = "of which 128 MiB are its KV pool, for 32 sequences of full length (--kv-cache-memory)"
    assert holds in server.out
    assert list_models(server.channel)[0].memory_bytes < 200 * 2**20


@pytest.mark.alone
def test_a_second_turn_after_a_thousand_tokens_computes_only_its_own():
    """The second turn's cached tokens and its prefill time show this.

    The first answer's tokens are cached, too, as far as the template leaves its text alone. A host
    that takes a core away makes each step ten times as long for seconds, so the test tries several
    conversations.
    """
    times = []
    with engine.blocking.open_engine(engine.EngineConfig(step_timeout_s=300)) as eng:
        list(eng.generate(engine.GenerateRequest(text=STORY)))  # the first step does one-time work
        for number in range(CONVERSATIONS):
            sampling = engine.SamplingParams(max_tokens=WORDS, temperature=0)
            with eng.chat(system=f"Story {number}.", sampling=sampling) as chat:
                ends = []
                for question in (STORY * 55, "And then?"):
                    [end] = [e for e in chat.ask(question) if isinstance(e, engine.Finished)]
                    ends.append(end)
            first, second = ends
            assert first.usage.prompt_tokens >= 1000
            assert first.usage.cached_tokens <= 16
            known = first.usage.prompt_tokens + first.usage.completion_tokens
            assert second.usage.prompt_tokens > first.usage.prompt_tokens
            assert second.usage.cached_tokens >= first.usage.prompt_tokens // 16 * 16
            computed = second.usage.prompt_tokens - second.usage.cached_tokens
            assert computed <= second.usage.prompt_tokens - known + WORDS + 16
            times.append((first.timings.prefill_s, second.timings.prefill_s))
            if second.timings.prefill_s < first.timings.prefill_s / 2:
                return
    pytest.fail(f"no second turn took less than half of the first one's time: {times}")


def test_the_chat_command_talks_with_the_demo(server):
    argv = [sys.executable, "-m", "grpc_service", "chat", "--server", server.address]
    argv += ["--max-tokens", "30", "--seed", "1", "--timeout", "60"]
    done = subprocess.run(
        argv, input="Tell me of Ada.\n/reset\nAnd of Tom?\n", capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) >= 2
    assert "The conversation was forgotten." in done.stderr


def test_tools_are_refused_for_a_template_without_tools_and_not_dropped(server):
    chat = pb.Chat(messages=[{"role": "user", "content": "Tell me of Ada."}], tools=[{"name": "f"}])
    with connect(server.address) as channel:
        stub = stubs.InferenceStub(channel)
        request = pb.GenerateRequest(chat=chat, sampling={"max_tokens": 5})
        for call in (
            lambda: list(stub.Generate(request, timeout=60)),
            lambda: stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=60),
        ):
            error = error_of(call)
            assert broken_fields(error) == ["chat.tools"]
            assert "chat template has no tools" in error.details()
        request.chat.tool_choice = "none"
        assert list(stub.Generate(request, timeout=60))[-1].finished.usage.completion_tokens


def test_variables_that_a_template_may_not_get_are_named(server):
    chat = pb.Chat(messages=[{"role": "user", "content": "Tell me of Ada."}])
    chat.template_args.update({"self": 1, "messages": []})
    with connect(server.address) as channel:
        stub = stubs.InferenceStub(channel)
        for call in (
            lambda: list(stub.Generate(pb.GenerateRequest(chat=chat), timeout=60)),
            lambda: stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=60),
        ):
            error = error_of(call)
            assert broken_fields(error) == ["chat.template_args"]
            assert error.details() == "chat.template_args: cannot set messages, self"


def test_explain_of_a_live_request_and_of_one_that_has_ended(server):
    with connect(server.address) as channel:
        stub, control = (
            stubs.InferenceStub(channel),
            stubs.ControlStub(channel),
        )
        request = pb.GenerateRequest(text=STORY, request_id="long", sampling={"ignore_eos": True})
        call = stub.Generate(request, timeout=60)
        next(iter(call))
        said = control.Explain(pb.ExplainRequest(request_id="long"), timeout=10)
        assert said.state in ("WAITING", "RUNNING", "PARKED")
        call.cancel()
        wait_idle(channel)
        ask = pb.ExplainRequest(request_id="long")
        error = error_of(lambda: control.Explain(ask, timeout=10))
        assert reason(error) == "REQUEST_NOT_FOUND"
