"""Runs one phase: `python -m tools.lab.gpu.phases NAME DEVICE FOLDER ONLY OUT`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from tools.lab.gpu.target import Target

# The phases, each with its share of the time.
PHASES = {"kernel": 0.1, "parity": 0.35, "step": 0.45, "gap": 0.1}


def main() -> None:
    """Run the command line."""
    name, device, folder, only, out = sys.argv[1:]
    importlib.import_module(f"tools.lab.gpu.{name}").run(
        Target(device, Path(folder), only, Path(out))
    )


if __name__ == "__main__":
    main()
