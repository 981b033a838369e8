"""What keeps an engine from being opened: models that are nowhere, in all three façades."""

import asyncio
import sys

import pytest
import trio

import engine
from engine import EngineConfig, ModelConfig, aio, blocking
from engine.errors import ConfigError
from engine.worker.load import resolve
from tests.support.unreadable import as_nobody, open_folder


async def open_by_trio(config):
    try:
        async with engine.open_engine(config):
            pass
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def open_by_asyncio(config):
    async with aio.open_engine(config):
        pass


def open_blocking(config):
    with blocking.open_engine(config):
        pass


FACADES = {
    "trio": lambda config: trio.run(open_by_trio, config),
    "asyncio": lambda config: asyncio.run(open_by_asyncio(config)),
    "blocking": open_blocking,
}
NOWHERE = ("/nope", "./nope", "~/nope.gguf", "a/b/nope", "no spaces")


@pytest.mark.parametrize("name", NOWHERE)
@pytest.mark.parametrize("facade", FACADES)
def test_an_engine_of_a_model_that_is_nowhere_is_not_opened(facade, name):
    had_torch = "torch" in sys.modules
    with pytest.raises(ConfigError) as caught:
        FACADES[facade](name)
    assert f"{ModelConfig(name).name}: there is no such directory or file [" in str(caught.value)
    assert ("torch" in sys.modules) == had_torch


def test_a_model_that_may_not_be_read_is_not_said_to_be_nowhere():
    with open_folder() as folder:
        (folder / "closed").mkdir(mode=0o700)
        path = folder / "closed" / "model"
        assert resolve.absence(str(path))
        with as_nobody():
            assert not resolve.absence(str(path))


@pytest.mark.parametrize("lazy", [(True, True), (True, False)])
def test_a_model_that_is_loaded_later_may_still_come(lazy):
    models = [ModelConfig(f"/nope{number}", lazy=one) for number, one in enumerate(lazy)]
    FACADES["blocking"](EngineConfig(models=tuple(models)))
