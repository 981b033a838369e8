"""Serving with `--runner pinned`: every call to a model's runner comes from one named thread."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest
import trio

from engine.status import Capability
from engine.worker import factory
from engine.worker.fakes.encoder import FakeEncoder
from engine.worker.fakes.text import FakeRunner
from grpc_service.app.application import serve
from grpc_service.cli import flags
from grpc_service.cli.main import build_parser
from grpc_service.client import Client, EmbedInput, EmbedRequest, GenerateRequest, SamplingParams

NUM_CLIENTS, NUM_TOKENS = 4, 5
NAMES = {"stories": "inference-worker-demo-stories_0", "embed": "inference-worker-demo-embed_0"}


def traced(runner, calls):
    """Return a runner that records the thread of each call to a method that computes."""

    def trace(name, call):
        def note(*args):
            calls[name].append((threading.current_thread().name, threading.get_ident()))
            return call(*args)

        return note

    for name in ("estimate", "load", "execute", "close"):
        setattr(runner, name, trace(name, getattr(runner, name)))
    return runner


@pytest.fixture
def calls(monkeypatch):
    """Return the threads of each model's calls, by method; fakes compute in place of torch."""
    found = {"stories": defaultdict(list), "embed": defaultdict(list)}

    def text(spec, kind):
        assert kind is Capability.TEXT_TO_TEXT
        return traced(FakeRunner(), found["stories"])

    def encode(spec, kind):
        assert kind is Capability.TEXT_EMBEDDING
        return traced(FakeEncoder(), found["embed"])

    monkeypatch.setattr(factory, "_text_runner", text)
    monkeypatch.setattr(factory, "_encode_runner", encode)
    return found


def ask(address):
    """Make every kind of call at once; return how many tokens and vectors came."""
    counts = defaultdict(int)

    def generate():
        prompt = GenerateRequest(
            model="demo-stories", text="<7><8>", sampling=SamplingParams(max_tokens=NUM_TOKENS)
        )
        for event in client.generate(prompt, timeout=30):
            counts["tokens"] += event.finished.usage.completion_tokens

    with Client(address) as client:
        threads = [threading.Thread(target=generate) for _ in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        inputs = [EmbedInput(text="<1><2>"), EmbedInput(text="<3>")]
        request = EmbedRequest(model="demo-embed", inputs=inputs)
        counts["vectors"] += sum(1 for _ in client.embed(request, timeout=30))
        for thread in threads:
            thread.join(30)
    return counts


async def test_all_steps_of_a_pinned_model_come_from_one_named_thread(calls):
    """R57."""
    argv = ["serve", "--runner", "pinned", "--port", "0", "--host", "127.0.0.1", "--insecure"]
    argv += ["--model", "demo-stories", "--model", "demo-embed"]
    config, server = flags.configs_of(build_parser().parse_args(argv), {})
    async with trio.open_nursery() as nursery:
        running = await nursery.start(
            lambda task_status: serve(config, server, task_status=task_status)
        )
        await running.engine.wait_ready()
        counts = await trio.to_thread.run_sync(ask, f"127.0.0.1:{running.port}")
        nursery.cancel_scope.cancel()
    assert counts == {"tokens": NUM_CLIENTS * NUM_TOKENS, "vectors": 2}
    idents = set()
    for model, name in NAMES.items():
        assert {*calls[model]} == {"estimate", "load", "execute", "close"}
        threads = {one for calls_of in calls[model].values() for one in calls_of}
        assert {name for name, _ in threads} == {name}
        assert len(threads) == 1
        idents |= {ident for _, ident in threads}
    assert len(calls["stories"]["execute"]) >= NUM_TOKENS
    assert len(idents) == 2, "each model has a thread of its own"
    assert not {*NAMES.values()} & {thread.name for thread in threading.enumerate()}
