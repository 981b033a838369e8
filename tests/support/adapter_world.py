"""An engine of fake models with adapters. The fake's tokens follow from the prompt and from the
content of its adapter.
"""

from engine.api.engine import open_engine
from engine.config import AdapterConfig, EngineConfig, ModelConfig, WorkerConfig
from engine.core.text.types import Tokens
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.fakes.adapters import digest_of_adapter
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.simulator.oracle import expected_output

CONTENTS = {"/sql": "sql", "/tales": "tales"}


class World:
    """An engine of fake runners in threads; ``runners`` has all runners made so far, in order."""

    def __init__(self, replicas=1, *, adapters=(), contents=None, runner=None, **config):
        self.runners = []
        self._contents = contents or [CONTENTS] * replicas
        self._runner = runner or {}
        self._steps = config.pop("script", {})
        model = ModelConfig(
            "fake", workers=(WorkerConfig(count=replicas),), adapters=tuple(adapters)
        )
        self.config = EngineConfig(models=(model,), check_level=2, **config)

    def make(self, model, config):
        """Make the next replica's runner, with its own view of the directories."""
        number = len(self.runners)
        contents = self._contents[number % len(self._contents)]
        script = FakeScript(adapters=dict(contents), **self._steps)
        self.runners.append(FakeRunner(script=script, **self._runner))
        return self.runners[-1]

    def open(self):
        """Open the engine."""
        return open_engine(self.config, make_runner=self.make)

    @property
    def loaded(self):
        """For each runner: how often it has loaded an adapter, by the adapter's digest."""
        return [dict(runner.adapters.loaded) for runner in self.runners]


def sql(**fields):
    """Return the configuration of the adapter "sql"."""
    return AdapterConfig("sql", "/sql", **fields)


def asked(model="fake:sql", first=5, count=10, **fields):
    """Return a request whose tokens follow from ``first`` and its adapter's content."""
    sampling = SamplingParams(max_tokens=count, ignore_eos=True, seed=fields.pop("seed", None))
    return GenerateRequest(token_ids=(first, 3), model=model, sampling=sampling, **fields)


def wanted(request, content, choice=0):
    """Return the tokens of one choice, computed with an adapter of this content."""
    digest = digest_of_adapter(content) if content else ""
    return list(expected_output(request, choice, has_ends=False, adapter=digest).tokens)


async def tokens_of(engine, request):
    """Return the tokens of each choice."""
    found = [[] for _ in range(request.n or 1)]
    async with engine.generate(request) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                found[event.choice] += event.token_ids
    return found


def reserved(engine):
    """Return how many bytes of memory the engine has reserved."""
    return engine.statistics().totals.memory_reserved
