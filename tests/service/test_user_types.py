"""A program that uses the client and the engine is checked by `mypy --strict`, as its author would,
from a folder of its own: every name has a type, and a wrong argument is an error."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.server import ROOT

# Lines with a wrong argument end with "# wrong". The types of the others are revealed.
SCRIPT = """
import engine
from engine import aio, blocking
from grpc_service.client import AsyncClient, CallError, Client, EmbedRequest, GenerateRequest
from grpc_service.client import messages


def ask(client: Client) -> None:
    request = GenerateRequest(text="Once", sampling={"max_tokens": 60, "seed": 7})
    try:
        with client.generate(request, timeout=30) as stream:
            for event in stream:
                reveal_type(event.delta.text)
                reveal_type(event.finished.usage.completion_tokens)
    except CallError as error:
        reveal_type(error.violations[0].field)
    reveal_type(client.chat("hello", max_tokens=3).text())
    reveal_type(client.complete("Once", max_tokens=3))
    for vector in client.embed(EmbedRequest(inputs=[{"text": "a"}])):
        reveal_type(vector.index)
    reveal_type(client.models.get_model("x").model.state == messages.MODEL_STATE_READY)
    client.embed("a text")  # wrong
    client.complete(3)  # wrong
    client.chat("hello", timeout="30")  # wrong
    GenerateRequest(text=3)  # wrong


async def ask_async() -> None:
    async with AsyncClient("127.0.0.1:50051") as client:
        async for event in client.generate("Once"):
            reveal_type(event.delta.text)
        reveal_type(await client.complete("Once", max_tokens=3))
        await client.control.resume(3)  # wrong


def embed_in_a_script() -> None:
    config = engine.EngineConfig(models=(engine.ModelConfig("demo-stories"),))
    with blocking.open_engine(config) as eng:
        reveal_type(eng.complete("Once upon a time", max_tokens=60))
        for event in eng.generate(engine.GenerateRequest(text="Once")):
            if isinstance(event, engine.Tokens):
                reveal_type(event.text)
        eng.generate(3)  # wrong


async def embed_in_trio() -> None:
    async with engine.open_engine("demo-stories") as eng:
        async with eng.generate("Once") as stream:
            reveal_type([event async for event in stream])
        reveal_type(eng.list_models()[0].state)
        eng.get_model(3)  # wrong


async def embed_in_asyncio() -> None:
    async with aio.open_engine("demo-stories") as eng:
        reveal_type(await eng.complete("Once", max_tokens=3))
"""


@pytest.mark.parametrize("package", ["engine", "grpc_service"])
def test_each_package_says_that_it_has_types(package):
    assert (ROOT / package / "py.typed").is_file()


@pytest.mark.slow
def test_a_strict_script_has_types_for_everything(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    argv = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "/dev/null", "script.py"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    lines = SCRIPT.splitlines()
    wrong = {at for at, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert {int(at) for at in re.findall(r"^script.py:(\d+): error", done.stdout, re.M)} == wrong
    told = re.findall(r'^script.py:(\d+): note: Revealed type is "(.*)"$', done.stdout, re.M)
    assert len(told) == SCRIPT.count("reveal_type(")
    assert [(lines[int(at) - 1].strip(), kind) for at, kind in told if "Any" in kind] == []
