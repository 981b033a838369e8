"""Simulates the engine in virtual time: `python -m tools.simulate --seed 7`.

It prints a line per seed. For a violation it prints the seed and the command that replays it, and
the exit code is 1. `--journal` prints every event. `--table` prints how often each transition was
hit, and by which seed first; the exit code is 1 if a transition is rare, or is not listed.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import time
from collections import Counter
from pathlib import Path

from tests.simulator.run import Outcome, simulate
from tests.simulator.workload import FAULTS

TRANSITIONS = Path(__file__).parents[1] / "tests" / "simulation" / "transitions.txt"
RARE = 10  # guess: a transition that is hit less often in all worlds is hardly tested


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--requests", type=int, default=200, help="requests in each world")
    parser.add_argument("--hours", type=float, help="run seeds until this much time has passed")
    parser.add_argument(
        "--faults", help=f"comma-separated, or none; default: drawn. All: {','.join(FAULTS)}"
    )
    parser.add_argument("--http", action="store_true", help="clients come by the HTTP port")
    parser.add_argument("-x", action="store_true", dest="stop", help="stop at the first failure")
    parser.add_argument("--journal", action="store_true", help="print every event")
    parser.add_argument(
        "--table", action="store_true", help="print transitions by cause; a rare one is a failure"
    )
    return parser.parse_args(argv)


def faults_of(text: str | None) -> frozenset[str] | None:
    """Return the faults that --faults names, or None if they are to be drawn."""
    if text is None:
        return None
    names = frozenset(name for name in text.split(",") if name and name != "none")
    unknown = names - set(FAULTS)
    if unknown:
        sys.exit(f"unknown faults: {', '.join(sorted(unknown))}")
    return names


def replay_command(args: argparse.Namespace, seed: int) -> str:
    """Return the command that runs this seed again."""
    faults = f" --faults {args.faults}" if args.faults is not None else ""
    door = " --http" if args.http else ""
    return f"python -m tools.simulate --seed {seed} --requests {args.requests}{faults}{door}"


def report(outcome: Outcome, seconds: float) -> str:
    """Return one line: the seed, its journal's digest, and how requests ended."""
    digest = hashlib.blake2b("\n".join(outcome.journal).encode(), digest_size=6).hexdigest()
    ends = " ".join(f"{name}={count}" for name, count in sorted(outcome.ends.items()))
    return f"seed {outcome.seed} {digest} {len(outcome.journal)} events {seconds:.2f} s: {ends}"


class Table:
    """How often each transition by cause was hit, and the first seed that did."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first_seeds: dict[str, int] = {}

    def add(self, seed: int, transitions: Counter[str]) -> None:
        """Add what one world hit."""
        self._counts += transitions
        self._first_seeds = dict.fromkeys(transitions, seed) | self._first_seeds

    def faults(self) -> dict[str, str]:
        """Return a line for each transition that `TRANSITIONS` does not list, and for each listed
        one that is rare."""
        listed = listed_transitions()
        return dict.fromkeys(self._counts.keys() - listed, "NOT LISTED") | {
            name: "RARE" for name in listed if self._counts[name] < RARE
        }

    def lines(self) -> list[str]:
        """Return a line for each transition, and a line with the totals."""
        names, faults = sorted(self._counts.keys() | listed_transitions()), self.faults()
        lines = []
        for name in names:
            seed = f"  first at seed {self._first_seeds[name]}" if name in self._counts else ""
            fault = f"  {faults[name]}" if name in faults else ""
            lines.append(f"{self._counts[name]:8d} {name}{seed}{fault}")
        counts = Counter(faults.values())
        unlisted, rare = counts["NOT LISTED"], counts["RARE"]
        end = f"{unlisted} of them not listed, {rare} hit less than {RARE} times"
        return [*lines, f"{len(names)} transitions by cause, {end}"]


def listed_transitions() -> frozenset[str]:
    """Return the transitions by cause that `TRANSITIONS` lists."""
    return frozenset(TRANSITIONS.read_text().splitlines())


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    args = parse(argv)
    logging.disable(logging.CRITICAL)  # the drawn faults log tracebacks, which nobody needs
    faults = faults_of(args.faults)
    table = Table()
    started = time.monotonic()
    seed, failed = args.seed, 0
    while True:
        began = time.monotonic()
        try:
            outcome = simulate(seed, num_requests=args.requests, faults=faults, over_http=args.http)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed += 1
            print(f"seed {seed} FAILED: {_first(error)!r}\n  replay: {replay_command(args, seed)}")
            if args.seeds == 1 and args.hours is None:
                raise
        else:
            table.add(seed, outcome.transitions)
            if args.journal:
                print("\n".join(outcome.journal))
            print(report(outcome, time.monotonic() - began), flush=True)
        seed += 1
        past = time.monotonic() - started
        if past > args.hours * 3600 if args.hours is not None else seed >= args.seed + args.seeds:
            break
        if failed and args.stop:
            break
    has_faults = False
    if args.table:
        print("\n".join(table.lines()))
        has_faults = bool(table.faults())
    print(f"{seed - args.seed} seeds, {failed} failed")
    return 1 if failed or has_faults else 0


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
