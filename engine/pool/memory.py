"""Who has reserved how much of each device's memory.

Rule 1: bytes are reserved before a load begins and released exactly once, and never more than are
free (R119, R120). Rule 2: each device has a limit of its own (D16).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import EngineBug
from engine.memory_limit import CPU


def plan_workers(reserved: int, each: int, limit: int, wanted: int) -> int:
    """Return how many of ``wanted`` replicas fit (R117). A replica takes ``each`` bytes of a device
    of which ``reserved`` of ``limit`` bytes are taken."""
    if each <= 0:
        return wanted
    return max(0, min(wanted, (limit - reserved) // each))


@dataclass(eq=False, slots=True)
class Reservation:
    """Bytes of one device that are reserved for ``owner``, a model's name."""

    owner: str
    device: str
    num_bytes: int
    ledger: MemoryLedger
    is_released: bool = False

    def measured(self, num_bytes: int) -> None:
        """Replace the estimate by ``num_bytes``, which a load turned out to need. They are in use
        already and may pass the limit; the next reservation is then refused."""
        self._require_held()
        self.ledger.change(self.device, num_bytes - self.num_bytes)
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Give the bytes back.

        Raises:
            EngineBug: they were given back before.
        """
        self._require_held()
        self.is_released = True
        self.ledger.change(self.device, -self.num_bytes)

    def _require_held(self) -> None:
        if self.is_released:
            raise EngineBug(f"the reservation of {self.owner} was released before")


class MemoryLedger:
    """Each device's limit and the bytes reserved of it. ``limit`` is the CPU's. Belongs to one
    thread."""

    def __init__(self, limit: int) -> None:
        self._limits = {CPU: limit}
        self._reserved = {CPU: 0}
        self._peaks = {CPU: 0}

    def add_device(self, device: str, limit: int | None) -> None:
        """Add a device, unless it is known. Without a ``limit``, it has the CPU's limit."""
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

    def reserve(self, owner: str, device: str, num_bytes: int) -> Reservation:
        """Reserve bytes of a device. The caller has checked that they are free.

        Raises:
            EngineBug: they are not free.
        """
        if num_bytes > self.free(device):
            raise EngineBug(f"{num_bytes} bytes reserved for {owner}, {self.free(device)} are free")
        self.change(device, num_bytes)
        return Reservation(owner, device, num_bytes, self)

    def change(self, device: str, num_bytes: int) -> None:
        """Add ``num_bytes``, which may be negative, to what is reserved. Only `Reservation` and
        `reserve` call this."""
        self._reserved[device] += num_bytes
        self._peaks[device] = max(self._peaks[device], self._reserved[device])
        if self._reserved[device] < 0:
            raise EngineBug(f"{self._reserved[device]} bytes of {device} are reserved")
