"""The value that a request is prepared from, and the value that it is prepared to.

Rule: a preparer knows no stream. It reads an `Assignment` and returns a `Prepared`, with which
`engine.requests.stream.RequestStream.run` begins the stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Set
    from contextlib import AbstractAsyncContextManager, ExitStack

    import trio

    from engine.core.common.events import CoreRequest
    from engine.core.common.phases import Phase
    from engine.core.common.types import RequestId
    from engine.replica.replica import Replica

AskedT = TypeVar("AskedT")
ReplicaT = TypeVar("ReplicaT")
CoreRequestT_co = TypeVar("CoreRequestT_co", bound="CoreRequest", covariant=True)


@dataclass(frozen=True, slots=True)
class Assignment(Generic[AskedT, ReplicaT]):
    """A client's request, and the leased replica that it is prepared for.

    ``core_id`` is the core's name for the request, ``arrival`` the time at which it arrived, on
    Trio's clock, and ``scope`` the scope of its task, which has its deadline. ``party`` is
    `Origin.party`. ``seed`` is the seed of its draws; 0 for a kind of work that draws nothing.
    ``adapter`` is the digest of the adapter that it is computed with; "": none. Whatever is taken
    for the request is entered in ``held``, which gives it back when the request has ended.
    ``report`` is called with the request's phase when that changes. ``spare_images`` gives up
    one of the requests that hold images' memory, if its client is away, and returns which one.
    """

    request: AskedT
    replica: ReplicaT
    core_id: RequestId
    arrival: float
    scope: trio.CancelScope
    party: Hashable
    seed: int
    adapter: str
    held: ExitStack
    report: Callable[[Phase], None]
    spare_images: Callable[[Set[RequestId]], RequestId | None]

    @property
    def deadline(self) -> float | None:
        """When the request must have ended; None without a deadline. It becomes earlier if a client
        takes the stream up by a call with an earlier one."""
        deadline = self.scope.deadline
        return None if math.isinf(deadline) else deadline


@dataclass(frozen=True, slots=True)
class Prepared(Generic[CoreRequestT_co]):
    """A request that is ready to run at any replica of its model. A kind of work adds what its
    streams need.

    ``request`` is the core's request. ``hold`` returns a context manager that keeps ready what the
    worker of a replica needs for the request, from before its queue to the request's end; None: it
    needs nothing.
    """

    request: CoreRequestT_co
    hold: Callable[[Replica[Any, Any]], AbstractAsyncContextManager[None]] | None = None

    def with_adapter(self, digest: str) -> Self:
        """Return this request as it is computed with the adapter of this digest; "": with none. A
        request that moves to another replica gets the adapter's newest version there."""
        return self
