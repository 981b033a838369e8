"""How much of each device's memory is reserved, and for which model.

Rule 1: bytes are reserved before a load begins and released exactly once, and never more than are
free. Rule 2: each device has a limit of its own (D16).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import EngineBug
from engine.limits.memory import CPU

if TYPE_CHECKING:
    from collections.abc import Mapping


def plan_workers(reserved: int, each: int, limit: int, wanted: int) -> int:
    """Return how many of ``wanted`` replicas fit on a device. A replica takes ``each`` bytes, and
    ``reserved`` bytes of the device's ``limit`` are taken."""
    if each <= 0:
        return wanted
    return max(0, min(wanted, (limit - reserved) // each))


@dataclass(eq=False, slots=True)
class Reservation:
    """Bytes that are reserved for ``owner``, a model's name, by device: one device or, for a
    divided model, a device for each rank."""

    owner: str
    by_device: dict[str, int]
    ledger: MemoryLedger
    is_released: bool = False

    @property
    def num_bytes(self) -> int:
        """The bytes of all devices together."""
        return sum(self.by_device.values())

    def on(self, device: str) -> int:
        """Return how many bytes of a device this reservation has."""
        return self.by_device.get(device, 0)

    def measured(self, num_bytes: int) -> None:
        """Replace the estimate by ``num_bytes``, which a load turned out to need; several devices
        keep their shares. The bytes are in use already. They may pass the limit: then the next
        `reserve` fails."""
        self._require_held()
        estimate, left = self.num_bytes, num_bytes
        *others, last = self.by_device
        for device in others:
            share = num_bytes * self.by_device[device] // max(1, estimate)
            self._change(device, share)
            left -= share
        self._change(last, left)

    def change(self, num_bytes: int) -> None:
        """Add ``num_bytes``, which may be negative, for an adapter on the only device; without
        effect once the reservation is released. The caller has checked that the bytes are free."""
        if not self.is_released:
            [device] = self.by_device
            self._change(device, self.by_device[device] + num_bytes)

    def release(self) -> None:
        """Give the bytes back.

        Raises:
            EngineBug: the bytes were given back before.
        """
        self._require_held()
        self.is_released = True
        for device, num_bytes in self.by_device.items():
            self.ledger.change(device, -num_bytes)

    def _change(self, device: str, num_bytes: int) -> None:
        self.ledger.change(device, num_bytes - self.by_device[device])
        self.by_device[device] = num_bytes

    def _require_held(self) -> None:
        if self.is_released:
            raise EngineBug(f"the reservation of {self.owner} was released before")


class MemoryLedger:
    """Each device's limit and the bytes reserved of it. ``limit`` is that of the CPU's memory.
    Belongs to one thread."""

    def __init__(self, limit: int) -> None:
        self._limits = {CPU: limit}
        self._reserved = {CPU: 0}
        self._peaks = {CPU: 0}

    def add_device(self, device: str, limit: int | None) -> None:
        """Add a device, unless it is known. Without a ``limit``, it gets the CPU's."""
        if device not in self._limits:
            self._limits[device] = self._limits[CPU] if limit is None else limit
            self._reserved[device] = self._peaks[device] = 0

    def limit(self, device: str = CPU) -> int:
        """Return how many bytes of a device may be reserved."""
        return self._limits[device]

    def reserved(self, device: str = CPU) -> int:
        """Return how many bytes of a device are reserved."""
        return self._reserved[device]

    def free(self, device: str = CPU) -> int:
        """Return how many bytes of a device a load may still reserve."""
        return max(0, self._limits[device] - self._reserved[device])

    def peak(self, device: str = CPU) -> int:
        """Return the largest number of bytes of a device that was ever reserved at once."""
        return self._peaks[device]

    @property
    def total_reserved(self) -> int:
        """Bytes that are reserved on all devices together."""
        return sum(self._reserved.values())

    @property
    def total_limit(self) -> int:
        """Bytes that may be reserved on all devices together."""
        return sum(self._limits.values())

    def reserve(self, owner: str, needs: Mapping[str, int]) -> Reservation:
        """Reserve bytes of one or several devices. The caller has checked that they are free.

        Raises:
            EngineBug: the bytes are not free; nothing is reserved.
        """
        for device, num_bytes in needs.items():
            if num_bytes > self.free(device):
                free = self.free(device)
                raise EngineBug(f"{num_bytes} bytes reserved for {owner}, {free} are free")
        for device, num_bytes in needs.items():
            self.change(device, num_bytes)
        return Reservation(owner, dict(needs), self)

    def change(self, device: str, num_bytes: int) -> None:
        """Add ``num_bytes``, which may be negative, to what is reserved. Only `Reservation` and
        `reserve` call this."""
        self._reserved[device] += num_bytes
        self._peaks[device] = max(self._peaks[device], self._reserved[device])
        if self._reserved[device] < 0:
            raise EngineBug(f"{self._reserved[device]} bytes of {device} are reserved")
