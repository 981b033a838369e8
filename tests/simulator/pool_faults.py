"""Faults of a simulated world's models: replicas, little memory, loads, unloads, deaths.

Rule 1: the faults are drawn from a seed of their own, so that worlds without them stay the same.
Rule 2: a world with such faults lists which ends it may give a request.
"""

import random
from dataclasses import dataclass, replace

from engine.config import EngineConfig, ModelConfig, WorkerConfig
from tests.simulator.clients import MODEL, Client

FAULT = "model_pool"
SPARE = "spare"
SHARE = 0.3  # of worlds
HANG_SHARE = 0.3  # share of deaths in a step that begin as hangs
GROUP_SHARE = 0.4  # share of the worlds with these faults whose text models are divided
RANK_FAILURE_SHARE = 2.0  # steps in which single ranks fail, for each step in which a worker dies
SPARE_SHARE = 0.2  # share of the requests, which use the spare model
MAY_END = {
    "WORKER_LOST",
    "NO_WORKERS",
    "ABORTED",
    "MEMORY_EXHAUSTED",
    "SPAWN_TIMEOUT",
    "SPAWN_FAILED",
}


@dataclass(frozen=True)
class PoolFaults:
    """The faults of one world.

    ``operations`` are (when, verb, model, number): load with a number of replicas, unload with a
    time to drain, or kill the worker of a number. ``load_failures`` is how many of a model's loads
    fail, by name. ``death_share`` is the share of steps that their worker does not survive.
    ``num_ranks`` is how many processes each worker of a text model has.
    """

    operations: tuple[tuple[float, str, str, float], ...] = ()
    load_failures: tuple[tuple[str, int], ...] = ()
    death_share: float = 0.0
    num_ranks: int = 1


def is_drawn(seed: int) -> bool:
    """Return whether the world of this seed has a crowded pool."""
    return _rng(seed).random() < SHARE


def _rng(seed: int) -> random.Random:
    return random.Random(seed ^ 0x9001)


def crowd(
    seed: int, config: EngineConfig, duration: float, model_bytes: int
) -> tuple[EngineConfig, PoolFaults]:
    """Return the configuration with a spare model, replicas and little room, and the faults.

    ``model_bytes`` is what a replica of a text model needs.
    """
    rng = _rng(seed)
    rng.random()  # skip the number that `is_drawn` draws from this generator
    models = tuple(
        replace(model, workers=(WorkerConfig(count=rng.choice([1, 1, 2, 3])),))
        if model.name == MODEL
        else model
        for model in config.models
    )
    spare = ModelConfig(SPARE, lazy=rng.random() < 0.7)
    crowded = replace(
        config,
        models=(*models, spare),
        memory_limit=rng.choice([1, 2, 3, 20]) * model_bytes + rng.choice([0, 2000]),
        idle_ttl_s=rng.choice([None, None, duration / 50 + 1e-3, duration / 5 + 1e-3]),
    )
    operations = []
    for _ in range(rng.randint(0, 8)):
        name = rng.choice([MODEL, SPARE])
        verb = rng.choice(["load", "unload", "unload"])
        number = rng.randint(1, 4) if verb == "load" else rng.choice([0.0, duration / 20, 60.0])
        operations.append((rng.uniform(0, duration), verb, name, float(number)))
    for _ in range(rng.choice([0, 0, 1, 5])):
        worker = float(rng.randint(0, 9))
        operations.append((rng.uniform(0, duration), "kill", rng.choice([MODEL, SPARE]), worker))
    failures = tuple((name, rng.choice([0, 0, 1, 3])) for name in (MODEL, SPARE))
    death_share = rng.choice([0.0, 0.01, 0.05])
    crowded = replace(crowded, max_worker_deaths=rng.choice([5, 1000]))
    groups = random.Random(seed ^ 0x6A09)  # a generator of its own: other draws stay the same
    num_ranks = groups.choice([2, 3]) if groups.random() < GROUP_SHARE else 1
    return crowded, PoolFaults(tuple(sorted(operations)), failures, death_share, num_ranks)


def ask_the_spare(seed: int, clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """Let some clients use the spare model, among those of Generate that name no model."""
    rng = _rng(seed + 1)
    return tuple(
        replace(client, request=replace(client.request, model=SPARE, check=False))
        if rng.random() < SPARE_SHARE and not client.request.model and _is_text(client)
        else client
        for client in clients
    )


def _is_text(client: Client) -> bool:
    return hasattr(client.request, "sampling")
