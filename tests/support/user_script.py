"""A program that uses the client and the engine, as its author would write it.

`mypy --strict` checks it with the sources (`modules` in pyproject.toml). Each name has the type
that `assert_type` gives. Each wrong argument is an error, since mypy reports an `ignore` without
one. Nothing runs this file.
"""

from typing import assert_type

import engine
from engine import aio, blocking
from engine.status import ModelState
from grpc_service.client import (
    AsyncClient,
    CallError,
    Client,
    EmbedRequest,
    GenerateRequest,
    messages,
)


def ask(client: Client) -> None:
    request = GenerateRequest(text="Once", sampling={"max_tokens": 60, "seed": 7})
    try:
        with client.generate(request, timeout=30) as stream:
            for event in stream:
                assert_type(event.delta.text, str)
                assert_type(event.finished.usage.completion_tokens, int)
    except CallError as error:
        assert_type(error.violations[0].field, str)
    assert_type(client.chat("hello", max_tokens=3).text(), str)
    assert_type(client.complete("Once", max_tokens=3), str)
    for vector in client.embed(EmbedRequest(inputs=[{"text": "a"}])):
        assert_type(vector.index, int)
    assert_type(client.models.get_model("x").model.state == messages.MODEL_STATE_READY, bool)
    client.embed("a text")  # type: ignore[arg-type]
    client.complete(3)  # type: ignore[arg-type]
    client.chat("hello", timeout="30")  # type: ignore[arg-type]
    GenerateRequest(text=3)  # type: ignore[arg-type]


async def ask_async() -> None:
    async with AsyncClient("127.0.0.1:50051") as client:
        async for event in client.generate("Once"):
            assert_type(event.delta.text, str)
        assert_type(await client.complete("Once", max_tokens=3), str)
        await client.control.resume(3)  # type: ignore[arg-type]


def embed_in_a_script() -> None:
    config = engine.EngineConfig(models=(engine.ModelConfig("demo-stories"),))
    with blocking.open_engine(config) as eng:
        assert_type(eng.complete("Once upon a time", max_tokens=60), str)
        for event in eng.generate(engine.GenerateRequest(text="Once")):
            if isinstance(event, engine.Tokens):
                assert_type(event.text, str)
        eng.generate(3)  # type: ignore[arg-type]


async def embed_in_trio() -> None:
    async with engine.open_engine("demo-stories") as eng:
        async with eng.generate("Once") as stream:
            async for event in stream:
                assert_type(
                    event, engine.Started | engine.PromptProgress | engine.Tokens | engine.Finished
                )
        assert_type(eng.list_models()[0].state, ModelState)
        eng.get_model(3)  # type: ignore[arg-type]


async def embed_in_asyncio() -> None:
    async with aio.open_engine("demo-stories") as eng:
        assert_type(await eng.complete("Once", max_tokens=3), str)
