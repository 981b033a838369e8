"""A bounded number of places, in which the owner of the most gives way to newcomers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator


class Places:
    """Places that owners hold. Beyond ``num_max`` of them, the owner with the most loses its oldest
    one: a newcomer always gets a place, and no owner keeps others out by holding many."""

    def __init__(self, num_max: int) -> None:
        self._num_max = num_max
        self._held: dict[Hashable, dict[trio.CancelScope, None]] = {}  # by owner, the oldest first

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    @contextmanager
    def hold(self, owner: Hashable) -> Iterator[None]:
        """Hold a place while the block runs. The block is cancelled, and left without an exception,
        if the place is lost."""
        scope = trio.CancelScope()
        self._held.setdefault(owner, {})[scope] = None
        try:
            if len(self) > self._num_max:
                self._end_oldest()
            with scope:
                yield
        finally:
            self._forget(owner, scope)

    def _end_oldest(self) -> None:
        owner = max(self._held, key=lambda owner: len(self._held[owner]))
        scope = next(iter(self._held[owner]))
        self._forget(owner, scope)
        scope.cancel(reason="others need the place")

    def _forget(self, owner: Hashable, scope: trio.CancelScope) -> None:
        held = self._held.get(owner, {})
        held.pop(scope, None)
        if not held:
            self._held.pop(owner, None)
