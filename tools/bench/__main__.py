"""`python -m tools.bench NAME [--json FILE]`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

NOT_BENCHES = {
    *("__init__", "__main__", "attackers", "checkpoints", "frame", "plots", "served", "tables"),
    "wire",
}
OURS = {"engine", "grpc_service", "tests", "tools"}


def names() -> list[str]:
    """Return the names of all benches: the modules beside this file, with hyphens."""
    found = {path.stem for path in Path(__file__).parent.glob("*.py")} - NOT_BENCHES
    return sorted(name.replace("_", "-") for name in found)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench")
    parser.add_argument("name", choices=names())
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    try:
        bench = importlib.import_module(f"tools.bench.{args.name.replace('-', '_')}")
        rows = bench.run()
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in OURS:
            raise
        sys.exit(
            f"the bench {args.name} needs the Python module {error.name}; install the development "
            "tools: pip install -e '.[dev,measure]' -c constraints.txt"
        )
    from tools.bench.frame import report

    return report(args.name, rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
