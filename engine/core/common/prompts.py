"""How far a request is before its first token: as the core knows it, and as its client is told."""

from __future__ import annotations

from typing import NamedTuple


class PromptState(NamedTuple):
    """How far the prompt of a request is whose first token has not come.

    ``computed`` of its tokens have their KV values in the pool, among them ``cached`` ones, which
    were found there. It has been computed for ``prefill_s`` seconds. ``first_token_s`` is the time
    until the first token; None if that is unknown.
    """

    computed: int
    cached: int
    prefill_s: float
    first_token_s: float | None


class PromptProgress(NamedTuple):
    """What a request with ``output.progress`` does before its first token.

    ``phase`` is a `engine.core.common.phases.Phase`. ``position`` is the place in the queue: 1
    starts next, 0 is in no queue. While the model is being loaded, ``loaded_bytes`` of
    ``total_bytes`` of its weights are (0: unknown). Of the prompt's ``prompt_tokens`` (0: not known
    yet), ``computed_tokens`` are done, among them ``cached_tokens`` that were in the prefix cache.
    The prompt has been computed for ``prefill_s`` seconds, and the first token comes in about
    ``first_token_s``; None if that is unknown. In one stream, no count of tokens or bytes falls.
    """

    phase: str
    position: int = 0
    loaded_bytes: int = 0
    total_bytes: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    prefill_s: float = 0.0
    first_token_s: float | None = None
