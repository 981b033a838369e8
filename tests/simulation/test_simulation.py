"""The whole engine under drawn schedules and faults. A failure prints its seed.

`python -m tools.simulate --seeds 1000` is the long form of the first test.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import trio._core._run as trio_run

from engine.core.text.lifecycle import TRANSITIONS as LIFECYCLE
from tools.simulator.run import simulate

ROOT = Path(__file__).parents[2]
SEEDS_PER_CHUNK = 10
TRANSITIONS = ROOT / "tests" / "simulation" / "transitions.txt"


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


HIT: Counter[str] = Counter()


CHUNKS = (*range(2), *(pytest.param(chunk, marks=pytest.mark.full) for chunk in range(2, 20)))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_drawn_worlds_keep_every_promise(chunk):
    """R136, R155, R169, R195."""
    for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK):
        try:
            outcome = simulate(seed, num_requests=200)
        except BaseException as error:
            error.add_note(f"replay: python -m tools.simulate --seed {seed} --requests 200")
            raise
        HIT.update(outcome.transitions)


def listed_transitions():
    """Return the listed transitions."""
    lines = TRANSITIONS.read_text().splitlines()
    return {line for line in lines if not line.startswith("#")}


def test_no_transition_happens_for_a_cause_that_is_not_listed():
    if sum(HIT.values()) == 0:
        HIT.update(simulate(3, num_requests=200).transitions)
    listed = listed_transitions()
    assert set(HIT) <= listed, f"new: {sorted(set(HIT) - listed)}"


# D7 allows it, and a step builder parks a request only while no step has a row of it.
UNREACHED = {("PARKED", "END_IN_STEP")}


def test_every_edge_of_the_lifecycle_is_listed_and_no_other():
    """`python -m tools.simulate --seeds 1000 --table` counts how often each is hit."""
    edges = {tuple(line.split()[:2]) for line in listed_transitions()}
    legal = {(s.name, e.name) for s, after in LIFECYCLE.items() for e in after}
    assert edges == legal - UNREACHED


def journal_digest(seed, hash_seed):
    """Return the digest of a seed's journal, from a process of its own."""
    code = (
        "import logging, hashlib; logging.disable(50)\n"
        "from tools.simulator.run import simulate\n"
        f"journal = simulate({seed}, num_requests=60).journal\n"
        "print(hashlib.sha256('\\n'.join(journal).encode()).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("seed", [1, 12, 33])
def test_the_same_seed_gives_the_same_journal_in_any_process(seed):
    assert journal_digest(seed, 1) == journal_digest(seed, 2)


def test_another_seed_gives_another_journal():
    digests = {
        hashlib.sha256("\n".join(simulate(seed, num_requests=20).journal).encode()).digest()
        for seed in range(5)
    }
    assert len(digests) == 5


def test_trio_still_has_what_determinism_needs():
    # pytest-trio sets the flag if Hypothesis is installed. Without the name, it would do nothing.
    assert isinstance(trio_run._ALLOW_DETERMINISTIC_SCHEDULING, bool)
    assert hasattr(trio_run._r, "random")
