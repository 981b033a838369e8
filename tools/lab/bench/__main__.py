"""`python -m tools.lab.bench NAME [--json FILE]` runs a bench.

`python -m tools.lab.bench list` says what each one measures.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from tools.lab.bench.catalog import measured_paths, names, purpose

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

OURS = {"engine", "grpc_service", "tests", "tools"}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.lab.bench",
        description="Run a bench. 'list' says what each measures.",
    )
    parser.add_argument("name", choices=[*names(), "list"])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.name == "list":
        print("\n".join(f"{name}: {purpose(name)}" for name in names()))
        return 0
    try:
        bench = importlib.import_module(f"tools.lab.bench.{args.name.replace('-', '_')}")
        rows = bench.run()
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in OURS:
            raise
        sys.exit(
            f"the bench {args.name} needs the Python module {error.name}; install the development "
            "tools: pip install -e '.[dev,measure]' -c constraints.txt"
        )
    from tools.lab.bench.frame import report

    return report(args.name, rows, args.json, measured_paths(args.name))


if __name__ == "__main__":
    sys.exit(main())
