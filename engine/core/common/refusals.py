"""Refusals that every kind of work shares: a duplicate id, a pause, a full queue.

Rule: pure functions of their arguments; each returns the error of the refusal, or None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.common.events import PauseMode
from engine.errors import DuplicateRequest, Overloaded, Paused

if TYPE_CHECKING:
    from collections.abc import Container

    from engine.core.common.events import CoreRequest
    from engine.core.common.types import RequestId
    from engine.errors import TrioletError
    from engine.settings import QueueLimits

RETRY_AFTER_S = (1.0, 30.0)  # seconds: the least and the most that a refused client is to wait


def duplicate_or_paused(
    request_id: RequestId, live: Container[RequestId], pause: PauseMode | None
) -> TrioletError | None:
    """Refuse an id that is in use, and every request while a pause admits no new ones."""
    if request_id in live:
        return DuplicateRequest(f"request_id {request_id!r} is in use")
    if pause in (PauseMode.ABORT, PauseMode.WAIT):
        return Paused("the engine is paused and takes no new requests", retry_after_s=5.0)
    return None


def queue_full(
    limits: QueueLimits,
    queued: tuple[int, int],
    request: CoreRequest,
    tokens_per_s: float,
    token_word: str,
) -> Overloaded | None:
    """Refuse a request for which the queue, with its ``queued`` requests and tokens, has no room. A
    queue that holds no tokens has room for a request of any size. ``token_word`` is what the
    refusal calls the tokens of this kind of work."""
    (num_queued, tokens_queued), num_tokens = queued, request.num_tokens
    most = limits.max_queued_requests
    is_full = num_queued >= most
    if not is_full and tokens_queued + num_tokens <= max(limits.max_queued_tokens, num_tokens):
        return None
    requests = f"{most} request{'s' * (most != 1)}"
    bound = requests if is_full else f"{limits.max_queued_tokens} {token_word}"
    wait = retry_after(tokens_queued, tokens_per_s)
    return Overloaded(f"the queue holds its {bound}", retry_after_s=wait)


def retry_after(queued_tokens: int, tokens_per_s: float) -> float:
    """Return in how many seconds the queue will likely have room, within `RETRY_AFTER_S`."""
    low, high = RETRY_AFTER_S
    if tokens_per_s <= 0:
        return low
    return min(high, max(low, queued_tokens / tokens_per_s))
