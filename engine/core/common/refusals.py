"""Refusals that every kind of work shares: a duplicate id, a pause, a full queue.

Rule: pure functions of their arguments; each returns the error of the refusal, or None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.common.events import PauseMode
from engine.core.common.waiting_queue import BACKGROUND_FROM
from engine.errors import DuplicateRequest, Overloaded, Paused

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from engine.core.common.events import CoreRequest
    from engine.core.common.types import RequestId
    from engine.core.common.waiting_queue import Queued
    from engine.errors import TrioletError
    from engine.settings import QueueLimits

RETRY_AFTER_S = (1.0, 30.0)  # seconds: the least and the most that a refused client is to wait
EXCESS = 2  # a full queue takes up to its size again of other holders' requests; estimate


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
    waiting: Sequence[Queued] = (),
) -> Overloaded | None:
    """Refuse a request for which the queue, with its ``queued`` requests and tokens, has no room. A
    queue that holds no tokens has room for a request of any size. A queue that others have filled
    still has room for a holder's part, by its weight; ``waiting`` are the queue's items.
    ``token_word`` is what the refusal calls the tokens of this kind of work."""
    (num_queued, tokens_queued), num_tokens = queued, request.num_tokens
    most = limits.max_queued_requests
    is_full = num_queued >= most
    if not is_full and tokens_queued + num_tokens <= max(limits.max_queued_tokens, num_tokens):
        return None
    if _has_part_left(limits, queued, request, waiting):
        return None
    requests = f"{most} request{'s' * (most != 1)}"
    bound = requests if is_full else f"{limits.max_queued_tokens} {token_word}"
    wait = retry_after(tokens_queued, tokens_per_s)
    return Overloaded(f"the queue holds its {bound}", retry_after_s=wait)


def _has_part_left(
    limits: QueueLimits, queued: tuple[int, int], request: CoreRequest, waiting: Sequence[Queued]
) -> bool:
    """Return whether a full queue has less of a holder's requests and tokens than is its part."""
    (num_queued, tokens_queued), num_tokens = queued, request.num_tokens
    most, most_tokens = limits.max_queued_requests, limits.max_queued_tokens
    if num_queued >= EXCESS * most or tokens_queued + num_tokens > EXCESS * most_tokens:
        return False
    is_background = request.priority >= BACKGROUND_FROM  # which is counted apart
    waiting = [x for x in waiting if (x.request.priority >= BACKGROUND_FROM) == is_background]
    own = [item for item in waiting if item.request.holder == request.holder]
    if len(own) == len(waiting):
        return False
    weights = {item.request.holder: item.request.weight for item in waiting}
    weights[request.holder] = request.weight
    part = request.weight / sum(weights.values())
    own_tokens = sum(item.queued_tokens for item in own) + num_tokens
    return len(own) < part * most and own_tokens <= max(part * most_tokens, num_tokens)


def retry_after(queued_tokens: int, tokens_per_s: float) -> float:
    """Return in how many seconds the queue will likely have room, within `RETRY_AFTER_S`."""
    low, high = RETRY_AFTER_S
    if tokens_per_s <= 0:
        return low
    return min(high, max(low, queued_tokens / tokens_per_s))
