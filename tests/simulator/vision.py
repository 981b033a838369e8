"""Clients that show images to the text model in their chats.

They are drawn by a generator of their own, so that worlds without them stay the same.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.config import EngineConfig
from engine.requests.text.chat_values import Chat
from engine.requests.text.values import GenerateRequest
from engine.status import Capability
from tests.simulator.clients import MODEL, Client
from tests.simulator.encode_oracle import image_file
from tests.simulator.oracle import MAX_MODEL_LEN, prompt_of

FAULT = "sees"
SHARE = 0.3  # of worlds
ASK_SHARE = 0.5  # share of the clients with token ids, in worlds with images
NUM_IMAGES = 12  # images of a world: more than the fake keeps encoded
DAMAGED_SHARE = 0.15


def is_drawn(seed: int) -> bool:
    """Return whether the text model of the world of this seed reads images."""
    return random.Random(f"sees {seed}").random() < SHARE


def add(config: EngineConfig) -> EngineConfig:
    """Return the configuration with a text model that reads images."""
    models = tuple(
        replace(model, capability=Capability.VISION) if model.name == MODEL else model
        for model in config.models
    )
    return replace(config, models=models)


def show(seed: int, clients: Sequence[Client]) -> tuple[Client, ...]:
    """Let some clients send a chat with images instead of token ids."""
    rng = random.Random(f"shows {seed}")
    images = [image_file(rng.randbytes(48)) for _ in range(NUM_IMAGES)]
    return tuple(_shown(rng, client, images) for client in clients)


def _shown(rng: random.Random, client: Client, images: Sequence[bytes]) -> Client:
    request = client.request
    if not isinstance(request, GenerateRequest) or client.must_fail or request.model:
        return client
    if request.token_ids is None or request.prompt.truncate_to is not None:
        return client
    if rng.random() >= ASK_SHARE:
        return client
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": one} for one in rng.choices(images, k=rng.choice([1, 1, 2, 4]))
    ]
    ids = request.token_ids
    # Clients of a family often have the same text before an image, and so share a prefix.
    cut = rng.choice([0, len(ids) // 2, min(8, len(ids))])
    parts.insert(0, _text(ids[:cut]))
    parts.insert(rng.randint(1, len(parts)), _text(ids[cut:]))
    is_damaged = rng.random() < DAMAGED_SHARE
    if is_damaged:
        place = rng.choice([at for at, part in enumerate(parts) if "image" in part])
        parts[place] = {"type": "image", "image": parts[place]["image"][:-30]}
    chat = Chat(({"role": "user", "content": parts},))
    shown = replace(request, token_ids=None, chat=chat)
    if is_damaged:
        ends = frozenset({"INVALID_REQUEST"})
        return replace(client, request=shown, may_end=ends, must_fail=True)
    return client if len(prompt_of(shown)) >= MAX_MODEL_LEN else replace(client, request=shown)


def _text(ids: Sequence[int]) -> dict[str, Any]:
    return {"type": "text", "text": "".join(f"<{one}>" for one in ids)}
