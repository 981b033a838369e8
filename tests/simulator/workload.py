"""What a simulated world does, drawn from a seed.

As in swarm testing, most faults are off in half of the worlds, so that every combination of a few
comes up.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from engine.config import EngineConfig, ModelConfig
from engine.status import Capability
from tests.simulator import (
    adapters,
    background,
    counting,
    embed_feeds,
    pool_faults,
    progress,
    resumption,
    states,
    thinking,
    vision,
)
from tests.simulator import image_generation_clients as drawings
from tests.simulator.clients import FRAGILE, MODEL, SLEEPY, Client, draw_beside, draw_client
from tests.simulator.encode_clients import (
    EMBEDDER,
    RERANKER,
    ask_encoder,
    label_inputs,
    shape_vectors,
    show_images,
)
from tests.simulator.encode_oracle import APART, LABELLERS
from tests.simulator.oracle import MAX_MODEL_LEN

FAULTS = (
    "slow_readers",
    "stalled_readers",
    "leavers",
    "cancels",
    "aborts",
    "deadlines",
    "row_failures",
    "step_failures",
    "out_of_memory",
    "memory_pressure",
    "bursts",
    "stalled_loop",
    "pauses",
    "cache_resets",
    "drain",
    "odd_requests",
    "bad_requests",
    "model_trouble",
    "engine_cancelled",
    "broken_runner",
    "encoders",
    pool_faults.FAULT,
    resumption.FAULT,
    adapters.FAULT,
    vision.FAULT,
    drawings.FAULT,
    states.FAULT,
    thinking.FAULT,
    progress.FAULT,
    background.FAULT,
    counting.FAULT,
)
SHARES = {  # share of worlds with each of these faults, which end a world early or hide others
    "drain": 0.3,
    "model_trouble": 0.3,
    "encoders": 0.4,
    "engine_cancelled": 0.1,
    "broken_runner": 0.1,
}
# The faults that the world's own generator draws. The others are drawn separately, except the last,
# counting, which a world has only if ``faults`` names it.
DRAWN = FAULTS[:-10]
LOAD_ERRORS = ("refused", "raised", "exited")


@dataclass(frozen=True)
class World:
    """Everything drawn for one run."""

    seed: int
    faults: frozenset[str]
    config: EngineConfig
    num_blocks: int
    block_size: int
    step_s: float
    token_s: float
    clients: tuple[Client, ...]
    has_ends: bool  # the text model samples ends of sequences
    load_error: str
    row_fault_share: float = 0.0
    step_fault_share: float = 0.0
    oom_share: float = 0.0
    hiccup_share: float = 0.0
    operations: tuple[tuple[float, str], ...] = ()
    drain_at_s: float | None = None
    drain_timeout_s: float = 5.0
    drain_is_left: bool = False  # the drain's caller stops waiting, and the drain goes on
    latency_s: float = 0.0  # seconds on the wire, for a request and for a cancel
    closed_share: float = 0.0  # share of writes in a delivery that find the client's window closed
    bug_share: float = 0.0  # share of writes in a delivery that fail by a planted bug
    cancelled_at_s: float | None = None
    broken_at_step: int | None = None
    quota_tokens: int | None = None  # limit on tokens of waiting prompts, for clients in process
    has_images: bool = False  # the embedding model reads images, too
    pool: pool_faults.PoolFaults = field(default_factory=pool_faults.PoolFaults)
    adapters: tuple[adapters.Operation, ...] = ()
    num_states: int = 0  # state slots of the text model


def draw_world(
    seed: int, *, num_requests: int = 200, faults: frozenset[str] | None = None
) -> World:
    """Draw a world of ``num_requests`` requests to text models.

    Worlds with encoders have 30 % more requests, to these; worlds with drawings, or with counting
    in their place, 20 % more.
    ``faults`` None draws a part of `FAULTS`.
    """
    rng = random.Random(seed)
    drawn = frozenset(name for name in DRAWN if rng.random() < SHARES.get(name, 0.5))
    if pool_faults.is_drawn(seed):
        drawn |= {pool_faults.FAULT}
    if resumption.is_drawn(seed):
        drawn |= {resumption.FAULT}
    if adapters.is_drawn(seed):
        drawn |= {adapters.FAULT}
    if vision.is_drawn(seed):
        drawn |= {vision.FAULT}
    if drawings.is_drawn(seed):
        drawn |= {drawings.FAULT}
    if states.is_drawn(seed):
        drawn |= {states.FAULT}
    if thinking.is_drawn(seed):
        drawn |= {thinking.FAULT}
    if progress.is_drawn(seed):
        drawn |= {progress.FAULT}
    if background.is_drawn(seed):
        drawn |= {background.FAULT}
    active = drawn if faults is None else faults
    block_size = rng.choice([1, 4, 16])
    least = -(-MAX_MODEL_LEN // block_size)
    few = least + rng.randint(0, 6)
    num_blocks = few if "memory_pressure" in active else 12 * least
    step_s = rng.choice([0.001, 0.02, 1.0, 1.0, 1.0])  # mostly 1.0, so that requests age
    duration = num_requests * step_s * rng.choice([0.5, 3.0])
    families = tuple(
        tuple(rng.randint(1, 900) for _ in range(rng.randint(1, 90))) for _ in range(4)
    )
    config = _draw_config(rng, seed, active, block_size, step_s)
    num_encodes = 3 * num_requests // 10 if "encoders" in active else 0
    clients = tuple(
        draw_client(rng, index, active, duration, families, step_s, config.stream_buffer)
        for index in range(num_requests + num_encodes)
    )
    is_named = any(one.name == EMBEDDER and one.capability is None for one in config.models)
    clients = clients[:num_requests] + tuple(
        ask_encoder(rng, client, index, active, step_s, is_named=is_named)
        for index, client in enumerate(clients[num_requests:])
    )
    images = random.Random(f"images {seed}")  # a generator of its own: other worlds stay the same
    has_images = num_encodes > 0 and images.random() < 0.5
    if has_images:
        clients = tuple(show_images(images, client) for client in clients)
        config = replace(config, models=tuple(map(_reading_images, config.models)))
    shapes = random.Random(f"vectors {seed}")
    others = list(APART) if num_encodes and shapes.random() < 0.4 else []
    clients = tuple(shape_vectors(shapes, client, others) for client in clients)
    labels = random.Random(f"labels {seed}")
    kinds = {one: APART[one] for one in others}
    if num_encodes and labels.random() < 0.4:
        clients = tuple(label_inputs(labels, client) for client in clients)
        kinds |= LABELLERS
    models = tuple(ModelConfig(one, capability=kinds[one]) for one in kinds)
    config = replace(config, models=config.models + models)
    pool = pool_faults.PoolFaults()
    if pool_faults.FAULT in active:
        config, pool = pool_faults.crowd(seed, config, duration, num_blocks * block_size)
        clients = pool_faults.ask_the_spare(seed, clients)
    if resumption.FAULT in active:
        clients = resumption.cut(seed, clients)
    if adapters.FAULT in active:
        config, clients = adapters.add(config), adapters.ask(seed, clients)
    if vision.FAULT in active:
        config, clients = vision.add(config), vision.show(seed, clients)
    if thinking.FAULT in active:
        clients = thinking.bound(seed, clients)
    if progress.FAULT in active:
        clients = progress.ask(seed, clients)
    if background.FAULT in active:
        clients = background.ask(seed, clients)
    if num_encodes:
        clients = embed_feeds.feed_inputs(seed, clients, active, step_s)
    beside: Any = counting if counting.FAULT in active else drawings
    if beside.FAULT in active:
        config = drawings.add(seed, config, beside.MODEL)
        few, front = max(1, num_requests // 5), config.stream_buffer
        clients += draw_beside(seed, few, active, duration, step_s, front, beside.ask, beside.BAD)
    return World(
        seed=seed,
        pool=pool,
        faults=active,
        config=config,
        num_blocks=num_blocks,
        block_size=block_size,
        step_s=step_s,
        token_s=step_s / 50,
        clients=clients,
        has_ends=rng.random() < 0.4,
        load_error=rng.choice(LOAD_ERRORS),
        row_fault_share=0.05 if "row_failures" in active else 0.0,
        step_fault_share=0.03 if "step_failures" in active else 0.0,
        oom_share=rng.choice([0.03, 0.03, 0.4]) if "out_of_memory" in active else 0.0,
        hiccup_share=0.02 if "stalled_loop" in active else 0.0,
        operations=_draw_operations(rng, active, duration),
        drain_at_s=rng.uniform(0, 1.5 * duration) if "drain" in active else None,
        drain_timeout_s=rng.choice([0.0, 0.5, 60.0]),
        drain_is_left=rng.random() < 0.5,
        # with latencies above the stall timeout, every reader would stall
        latency_s=min(rng.choice([0.0, 0.0, 0.3, 3.0]) * step_s, config.stall_timeout_s / 4),
        closed_share=random.Random(f"windows {seed}").choice([0.0, 0.3, 1.0]),
        bug_share=random.Random(f"bugs {seed}").choice([0.0, 0.0, 0.02]),
        cancelled_at_s=rng.uniform(0, duration) if "engine_cancelled" in active else None,
        broken_at_step=rng.randint(0, num_requests) if "broken_runner" in active else None,
        quota_tokens=rng.choice([None, 2000]) if "bursts" in active else None,
        has_images=has_images,
        adapters=adapters.operations(seed, duration) if adapters.FAULT in active else (),
        num_states=states.num_slots(seed, config.max_num_seqs) if states.FAULT in active else 0,
    )


def _draw_config(
    rng: random.Random, seed: int, active: frozenset[str], block_size: int, step_s: float
) -> EngineConfig:
    max_num_seqs = rng.choice([2, 8, 64])
    models = [ModelConfig(MODEL, lazy=rng.random() < 0.2)]
    if "model_trouble" in active:
        models += [ModelConfig(FRAGILE, lazy=rng.random() < 0.5), ModelConfig(SLEEPY, lazy=True)]
    if "encoders" in active:
        models += _draw_encoders(rng)
    return EngineConfig(
        models=tuple(models),
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([1, 16, 256]),
        max_queued_requests=rng.choice([5, 20, 1000]) if "bursts" in active else 1000,
        stall_timeout_s=rng.choice([2.0, 30.0]),
        stream_buffer=rng.choice([2, 5, 256]),
        prefix_cache=rng.random() < 0.7,
        prepared_plans=seed % 4 != 0,
        max_queued_tokens=rng.choice([2000, 1_000_000]) if "bursts" in active else 1_000_000,
        check_level=rng.choice([1, 2, 2, 2, 2, 2]),
        # drawn by generators of their own, so that worlds without targets stay the same
        step_time_target_s=step_s * random.Random(f"pace {seed}").choice([0.0, 0.0, 1.5, 6.0]),
        inter_token_target_s=step_s * random.Random(f"beside {seed}").choice([0.0, 0.0, 0.5, 2.0]),
    )


def _draw_encoders(rng: random.Random) -> list[ModelConfig]:
    """Return one encoder of each kind. Some worlds' configurations lack the capabilities."""
    is_told, is_lazy = rng.random() < 0.7, rng.random() < 0.3
    kinds = ((EMBEDDER, Capability.TEXT_EMBEDDING), (RERANKER, Capability.RERANK))
    return [
        ModelConfig(name, lazy=is_lazy, capability=kind if is_told else None)
        for name, kind in kinds
    ]


def _reading_images(model: ModelConfig) -> ModelConfig:
    is_embedder = model.capability is Capability.TEXT_EMBEDDING
    return replace(model, capability=Capability.IMAGE_EMBEDDING) if is_embedder else model


def _draw_operations(
    rng: random.Random, active: frozenset[str], duration: float
) -> tuple[tuple[float, str], ...]:
    """Return the operator's commands at their times; every pause is followed by a resume."""
    operations: list[tuple[float, str]] = [(rng.uniform(0, duration), "look")]
    if "pauses" in active:
        for _ in range(3):
            at = rng.uniform(0, duration)
            operations.append((at, f"pause {rng.choice(['keep', 'wait', 'abort'])}"))
            operations.append((at + rng.uniform(0, duration / 4), "resume"))
    if "cache_resets" in active:
        operations += [(rng.uniform(0, duration), "reset") for _ in range(3)]
    return tuple(sorted(operations))


__all__ = ["FAULTS", "MODEL", "Client", "World", "draw_world"]
