"""The device that a phase measures, and the file into which the phase writes its rows."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tools.lab.bench.frame import Row


@dataclass
class Target:
    """The device, a folder for checkpoints, a regular expression that selects measurements by
    name, and the file for the rows, which is written after each of them."""

    device: str
    folder: Path
    only: str
    out: Path
    rows: list[Row] = field(default_factory=list)

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU, on which phases use the shapes of real models."""
        return self.device.startswith("cuda")

    def wants(self, name: str) -> bool:
        """Return whether ``only`` selects the measurement with this name."""
        return re.search(self.only, name) is not None

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows, and write all rows so far to the file, which a killed phase leaves behind."""
        self.rows += rows
        partial = self.out.with_suffix(".partial")
        partial.write_text(json.dumps([asdict(row) for row in self.rows]))
        partial.rename(self.out)
