"""What memory this process may use, and who has reserved it.

Rule 1: bytes are reserved before a load begins and released exactly once; what has no room is
never reserved (R119, R120). Rule 2: each device has a limit and books of its own (D16).

Source: R116 (0.80 of the memory, container limits respected), D16.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineBug

LIMIT_FRACTION = 0.80  # R116

CPU = "cpu"

_CGROUP_FILES = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def usable_bytes() -> int:
    """Bytes this process may use: the machine's memory, or its container's limit if lower."""
    limits = [_machine_bytes()]
    for path in _CGROUP_FILES:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max" means no limit
            limits.append(int(text))
    return min(limits)


def _machine_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise OSError("the machine does not say how much memory it has")


def default_limit() -> int:
    """The default of --memory-limit."""
    return int(usable_bytes() * LIMIT_FRACTION)


def plan_workers(reserved: int, each: int, limit: int, wanted: int) -> int:
    """How many of ``wanted`` replicas of ``each`` bytes fit beside what is reserved (R117)."""
    if each <= 0:
        return wanted
    return max(0, min(wanted, (limit - reserved) // each))


@dataclass(eq=False, slots=True)
class Reservation:
    """Bytes of one device that one owner has."""

    owner: str
    device: str
    num_bytes: int
    books: MemoryBooks
    is_released: bool = False

    def measured(self, num_bytes: int) -> None:
        """What was estimated turned out to be ``num_bytes``. These are in use already, so that
        this may pass the limit: the next load is refused then."""
        self._require_held()
        self.books.change(self.device, num_bytes - self.num_bytes)
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Give the bytes back. Twice is a bug."""
        self._require_held()
        self.is_released = True
        self.books.change(self.device, -self.num_bytes)

    def _require_held(self) -> None:
        if self.is_released:
            raise EngineBug(f"the reservation of {self.owner} was released before")


class MemoryBooks:
    """Every device's limit and what is reserved of it. Belongs to one thread."""

    def __init__(self, limit: int) -> None:
        self._limits = {CPU: limit}
        self._reserved = {CPU: 0}
        self._peaks = {CPU: 0}

    def know(self, device: str, limit: int | None) -> None:
        """A device other than the CPU, and what may be used of it."""
        if device not in self._limits:
            self._limits[device] = self._limits[CPU] if limit is None else limit
            self._reserved[device] = self._peaks[device] = 0

    def limit(self, device: str = CPU) -> int:
        return self._limits[device]

    def reserved(self, device: str = CPU) -> int:
        return self._reserved[device]

    def free(self, device: str = CPU) -> int:
        """Bytes that a load may reserve now."""
        return max(0, self._limits[device] - self._reserved[device])

    def peak(self, device: str = CPU) -> int:
        """The most that was ever reserved."""
        return self._peaks[device]

    @property
    def total_reserved(self) -> int:
        return sum(self._reserved.values())

    @property
    def total_limit(self) -> int:
        return sum(self._limits.values())

    def reserve(self, owner: str, device: str, num_bytes: int) -> Reservation:
        """Set bytes aside. The caller has seen, without waiting since, that there is room."""
        if num_bytes > self.free(device):
            raise EngineBug(f"{num_bytes} bytes reserved for {owner}, {self.free(device)} are free")
        self.change(device, num_bytes)
        return Reservation(owner, device, num_bytes, self)

    def change(self, device: str, num_bytes: int) -> None:
        """A reservation grew, shrank or ended. For `Reservation` alone."""
        self._reserved[device] += num_bytes
        self._peaks[device] = max(self._peaks[device], self._reserved[device])
        if self._reserved[device] < 0:
            raise EngineBug(f"the books of {device} have {self._reserved[device]} bytes")
