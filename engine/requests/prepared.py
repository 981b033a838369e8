"""The values that a preparer takes and returns: `Assignment` and `Prepared`.

Rule: a preparer uses no stream. `engine.requests.stream.RequestStream.run` takes its result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Set
    from contextlib import AbstractAsyncContextManager, ExitStack

    import trio

    from engine.core.common.events import CoreRequest
    from engine.core.common.phases import Phase
    from engine.core.common.types import RequestId
    from engine.replica.replica import Replica
    from engine.requests.quota import Origin

RequestT = TypeVar("RequestT")
ReplicaT = TypeVar("ReplicaT")
CoreRequestT_co = TypeVar("CoreRequestT_co", bound="CoreRequest", covariant=True)


@dataclass(frozen=True, slots=True)
class Assignment(Generic[RequestT, ReplicaT]):
    """A client's request, and the leased replica that it is prepared for.

    ``core_id`` is the core's name for the request, ``arrival`` the time at which it arrived, on
    Trio's clock, and ``scope`` the scope of its task, which has its deadline. ``origin`` is where
    it comes from. Only requests of the holder ``cache_owner`` share its cached prefixes; "": all.
    ``seed`` is the seed of its draws; 0 for a kind of work that draws nothing. ``adapter`` is the
    digest of the adapter that it is computed with; "": none. A preparer enters the resources that
    it takes in ``held``, which gives them back when the request has ended. ``report`` is called
    with the request's phase when that changes. ``spare_images`` cancels one of the given holders of
    images' memory whose client is away, and returns its id, or None.
    """

    request: RequestT
    replica: ReplicaT
    core_id: RequestId
    arrival: float
    scope: trio.CancelScope
    origin: Origin
    cache_owner: str
    seed: int
    adapter: str
    held: ExitStack
    report: Callable[[Phase], None]
    spare_images: Callable[[Set[RequestId]], RequestId | None]

    @property
    def deadline(self) -> float | None:
        """When the request must have ended; None without a deadline. It becomes earlier if a client
        takes the stream up by a call with an earlier deadline."""
        deadline = self.scope.deadline
        return None if math.isinf(deadline) else deadline


@dataclass(frozen=True, slots=True)
class Prepared(Generic[CoreRequestT_co]):
    """A request that is ready to run at any replica of its model. A kind of work adds the fields
    that its streams need.

    ``request`` is the core's request. ``hold`` returns a context manager that keeps the request's
    compiled constraint at a replica, from before its queue to its end; None without a constraint.
    """

    request: CoreRequestT_co
    hold: Callable[[Replica[Any, Any]], AbstractAsyncContextManager[None]] | None = None

    def with_adapter(self, digest: str) -> Self:
        """Return this request as it is computed with the adapter of this digest; "": with none. A
        request that moves to another replica gets the adapter's newest version there."""
        return self
