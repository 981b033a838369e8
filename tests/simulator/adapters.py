"""Adapters in a simulated world: clients ask for them, while the operator loads, replaces and
unloads them.

Adapters are drawn by generators of their own, so that worlds without them stay the same.
"""

import random
from dataclasses import dataclass, field, replace

from engine.api.engine import Engine
from engine.config import AdapterConfig, EngineConfig
from engine.requests.text.values import GenerateRequest
from tests.simulator.clients import MODEL, Client

FAULT = "adapters"
SHARE = 0.3  # of worlds
ASK_SHARE = 0.4  # share of the requests that name no model, in worlds with adapters
NAMES = (f"{MODEL}:sql", f"{MODEL}:tales")
ALIAS = "database"  # the first adapter's alias
CONTENTS = ("a", "b", "c")  # the contents of directories, and their names
MAY_END = {"MODEL_NOT_FOUND", "ABORTED"}


@dataclass(frozen=True)
class Operation:
    """What the operator does at an instant: loads an adapter's name from a directory, or with ""
    unloads it, and gives its requests ``drain_s`` to finish."""

    at_s: float
    name: str
    directory: str
    drain_s: float


@dataclass
class Names:
    """Which adapter's content each name has stood for, and since when."""

    since: dict[str, list[tuple[float, str]]] = field(default_factory=dict)

    def note(self, engine: Engine, now: float) -> None:
        """Note which contents the names stand for now."""
        for status in engine.list_models():
            for name in (status.name, *status.aliases) if status.base else ():
                known = self.since.setdefault(name, [])
                digest = status.adapter_digest
                if digest and (not known or known[-1][1] != digest):
                    known.append((now, digest))

    def digests(self, name: str, begin: float, end: float) -> set[str]:
        """Return the digests that a name may have stood for between two instants."""
        known = self.since.get(name, [])
        before = [digest for at, digest in known if at < begin][-1:]
        return {*before, *(digest for at, digest in known if begin <= at <= end)}


def is_drawn(seed: int) -> bool:
    """Return whether the world of this seed has adapters."""
    return random.Random(f"adapters {seed}").random() < SHARE


def add(config: EngineConfig) -> EngineConfig:
    """Return the configuration with an adapter that is loaded with its base."""
    own = AdapterConfig(NAMES[0].partition(":")[2], CONTENTS[0], (ALIAS,))
    models = tuple(
        replace(model, adapters=(own,)) if model.name == MODEL else model for model in config.models
    )
    return replace(config, models=models)


def ask(seed: int, clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """Let some clients use adapters. Clients that continue streams use the base model: under an
    adapter's name, which may stand for another content by then, the tokens would differ."""
    rng = random.Random(f"adapted {seed}")
    found = []
    for client in clients:
        request, chosen = client.request, rng.choice([*NAMES, ALIAS])
        is_free = isinstance(request, GenerateRequest) and not request.model
        is_cut = client.cuts is not None or getattr(request, "continuation", None) is not None
        if is_free and not is_cut and not client.must_fail and rng.random() < ASK_SHARE:
            asked = replace(request, model=chosen, check=False)  # type: ignore[type-var]
            client = replace(client, request=asked, may_end=client.may_end | MAY_END)
        found.append(client)
    return tuple(found)


def operations(seed: int, duration: float) -> tuple[Operation, ...]:
    """Draw the operator's loads and unloads."""
    rng = random.Random(f"operated {seed}")
    return tuple(
        Operation(
            rng.uniform(0, duration),
            rng.choice(NAMES),
            rng.choice([*CONTENTS, *CONTENTS, "", "nowhere"]),
            rng.choice([0.0, 1.0, 100.0]),
        )
        for _ in range(rng.randint(3, 12))
    )


def scripted() -> dict[str, str]:
    """Return `FakeScript.adapters`: the content of each adapter's directory, by its name."""
    return {name: name for name in CONTENTS}
