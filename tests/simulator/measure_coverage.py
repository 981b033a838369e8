"""Measures how much of core, loop and supervisor the simulation alone runs: `python -m
tests.simulator.measure_coverage`.

It prints branch coverage and missing lines by file. The exit code is 1 below `BAR`.
"""

import argparse
import io
import logging
import sys
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[2]
# The files of a request's life from its submit to its end, for all kinds of work.
SUPERVISOR = (
    *("supervisor", "stream", "text/stream", "encode/stream", "tasks"),
    *("tokenizing", "text/prepare", "encode/prepare"),
)
GROUPS = {
    "core": ["engine/core/**/*.py"],
    "loop": ["engine/replica/loop.py"],
    "supervisor": [f"engine/requests/{name}.py" for name in SUPERVISOR],
    "constraints": ["engine/requests/text/compiled_constraints.py"],
    "writer": ["grpc_service/services/call_writer.py", "grpc_service/access/unread_calls.py"],
}
BAR = 95.0  # per cent of lines and branches together, in each group of `BARRED`
BARRED = ("core", "loop", "supervisor", "writer")
EXCLUDED = (
    "if TYPE_CHECKING:",  # never runs
    r"\.\.\.$",  # a Protocol's methods have no body
    "def __repr__",  # only the messages of violations call it
    "if log.isEnabledFor",  # the simulation logs nothing
    r"raise (EngineBug|IllegalTransition|ValueError)\(",  # a bug, with which the run fails
)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=40, help="how many")
    parser.add_argument("--requests", type=int, default=200, help="requests in each world")
    return parser.parse_args(argv)


def files_of(group: str) -> list[str]:
    """Return the glob patterns of the files in a group of `GROUPS`."""
    return [str(ROOT / pattern) for pattern in GROUPS[group]]


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    args = parse(argv)
    logging.disable(logging.CRITICAL)
    watch = coverage.Coverage(
        branch=True,
        data_file=None,
        config_file=False,
        include=[path for group in GROUPS for path in files_of(group)],
    )
    for pattern in EXCLUDED:
        watch.exclude(pattern)
    watch.start()
    from tests.simulator.run import simulate  # now, so that the lines run by imports count

    for seed in range(args.seed, args.seed + args.seeds):
        simulate(seed, num_requests=args.requests)
    watch.stop()
    watch.report(show_missing=True, skip_empty=True)
    reached = {
        group: watch.report(include=files_of(group), skip_empty=True, file=io.StringIO())
        for group in GROUPS
    }
    for group, share in reached.items():
        bar = f"; the bar is {BAR:g} %" if group in BARRED else ""
        print(f"{group}: {share:.1f} % of lines and branches in {args.seeds} worlds{bar}")
    return 0 if all(reached[group] >= BAR for group in BARRED) else 1


if __name__ == "__main__":
    sys.exit(main())
