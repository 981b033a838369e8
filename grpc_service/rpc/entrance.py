"""Decides which connections are taken, as they are accepted, before anything is done for them.

Rule 1: one address cannot keep others out: few of its connections may be opening at once, fewer
while it owes time (`grpc_service.rpc.accounts`). Rule 2: connections beyond
`Limits.connections_max` come into a reserve, which serves `Limits.lasting_methods` alone, so that a
probe tells a full server from a hanging one. New connections push out old ones (`Places`).
"""

from __future__ import annotations

import enum
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from grpc_service.rpc.places import Places

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grpc_service.rpc.limits import Limits


class Pass(enum.Enum):
    """What a connection may do: nothing, everything, or only call `Limits.lasting_methods`."""

    REFUSED = enum.auto()
    FULL = enum.auto()
    RESERVED = enum.auto()


class Entrance:
    """Counts the connections of a server by address. ``num_refused`` counts those refused.

    Life of a connection: `admit`, then the block of `staying`, in it `note_opened`.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: Counter[str] = Counter()  # connections by address, without those of the reserve
        self._num_open = 0  # the sum of `_open`, which may have thousands of addresses
        self._opening: Counter[str] = Counter()  # connections by address that are being opened
        self._paying: Counter[str] = Counter()  # connections that wait until their debt is paid
        self._reserve = Places(limits.reserved_max)
        self.num_refused = 0

    def admit(self, address: str) -> Pass:
        """Decide about a connection that was accepted. Unless it is refused, it counts as
        opening until `note_opened`, and as open until the block of `staying` ends."""
        given = self._judge(address)
        if given is Pass.REFUSED:
            self.num_refused += 1
            return given
        self._opening[address] += 1
        if given is Pass.FULL:
            self._open[address] += 1
            self._num_open += 1
        return given

    def _judge(self, address: str) -> Pass:
        limits = self._limits
        owes = self.is_paying(address)
        most = limits.openings_in_debt_max if owes else limits.openings_per_address_max
        if self._opening[address] >= most:
            return Pass.REFUSED
        is_full = self._num_open >= limits.connections_max
        if is_full or self._open[address] >= limits.connections_per_address_max:
            return Pass.RESERVED
        return Pass.FULL

    @contextmanager
    def staying(self, address: str, given: Pass) -> Iterator[None]:
        """Count a connection that was admitted with ``given`` until the block ends. The block is
        cancelled, and left without an exception, if others need its place in the reserve."""
        if given is Pass.RESERVED:
            with self._reserve.hold(address):
                yield
            return
        try:
            yield
        finally:
            self._num_open -= 1
            _decrement(self._open, address)

    def note_opened(self, address: str) -> None:
        """Take note that a connection's opening has ended, well or not."""
        _decrement(self._opening, address)

    def is_paying(self, address: str) -> bool:
        """Return whether a connection waits until the debt of its address is paid."""
        return address in self._paying

    @contextmanager
    def paying(self, address: str) -> Iterator[None]:
        """Count a connection that waits until the debt of its address is paid."""
        self._paying[address] += 1
        try:
            yield
        finally:
            _decrement(self._paying, address)


def _decrement(counts: Counter[str], address: str) -> None:
    counts[address] -= 1
    if not counts[address]:
        del counts[address]
