"""The whole engine under drawn schedules and faults. A failure prints its seed.

`python -m tools.simulate --seeds 1000` is the long form of the first test.
"""

import hashlib
import os
from collections import Counter
from functools import cache

import pytest
import trio._core._run as trio_run

from engine.core.text.lifecycle import TRANSITIONS as LIFECYCLE
from tests.simulator import counting
from tests.simulator import image_generation_clients as drawings
from tests.simulator.run import simulate
from tests.simulator.workload import draw_world
from tests.support.programs import output_of
from tools.simulate import RARE, Table, listed_transitions, main

SEEDS_PER_CHUNK = 5
NUM_CHUNKS = 4
# Seeds of worlds with transitions that no world of `CHUNKS` has; `simulate --table` prints them.
BESIDE = (26, 29, 30, 33, 36, 41, 262, 1000)


pytestmark = pytest.mark.usefixtures("quiet")


HIT: set[str] = set()
CHUNKS = (
    0,
    *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, NUM_CHUNKS)),
    *(pytest.param(chunk, marks=pytest.mark.full) for chunk in range(NUM_CHUNKS, 40)),
)


@cache
def check_world(seed):
    """Check that a drawn world keeps every promise, and add its transitions to `HIT`."""
    try:
        HIT.update(simulate(seed, num_requests=200).transitions)
    except BaseException as error:
        error.add_note(f"replay: python -m tools.simulate --seed {seed} --requests 200")
        raise


@pytest.mark.parametrize("chunk", CHUNKS)
def test_drawn_worlds_keep_every_promise(chunk):
    for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK):
        check_world(seed)


@pytest.mark.parametrize(
    "seeds",
    [
        range(2),
        pytest.param(range(2, 20), marks=pytest.mark.slow),
        pytest.param(range(20, 200), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_drawn_worlds_keep_every_promise_over_http(seeds):
    """The clients over the wire come by the HTTP port."""
    for seed in seeds:
        try:
            simulate(seed, num_requests=100, over_http=True)
        except BaseException as error:
            error.add_note(f"replay: python -m tools.simulate --http --seed {seed} --requests 100")
            raise


def test_a_chat_whose_answer_happens_to_begin_with_reasoning_keeps_every_promise():
    """In this world the model samples the marker that opens reasoning."""
    simulate(305, num_requests=60, over_http=True)


@pytest.mark.parametrize(
    "seed", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 9))]
)
def test_a_kind_that_the_product_does_not_know_keeps_every_promise(seed):
    faults = draw_world(seed).faults - {drawings.FAULT} | {counting.FAULT}
    journal = simulate(seed, num_requests=100, faults=faults).journal
    assert any(" counted " in line for line in journal)


@pytest.mark.slow
def test_every_listed_transition_happens_and_no_other():
    """Red if a sequence can no longer take a listed transition, although every promise is kept,
    such as eviction while parked (`order_victims`)."""
    for seed in (*range(NUM_CHUNKS * SEEDS_PER_CHUNK), *BESIDE):
        check_world(seed)
    listed = listed_transitions()
    assert listed >= HIT, f"new: {sorted(HIT - listed)}"
    assert listed <= HIT, f"none of these worlds has {sorted(listed - HIT)}"


def test_the_table_fails_for_what_is_rare_or_not_listed(capsys):
    """Red if the exit code does not depend on the table of transitions (`tools.simulate.main`)."""
    assert main(["--seed", "3", "--requests", "20", "--table"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith("  RARE")]
    table, listed = Table(), listed_transitions()
    table.add(7, Counter(dict.fromkeys(listed, RARE - 1)))
    table.add(8, Counter(dict.fromkeys(listed, 1)))
    assert table.faults() == {}
    assert f"      {RARE} WAITING START by plan  first at seed 7" in table.lines()
    table.add(9, Counter(["WAITING START by magic"]))
    assert table.faults() == {"WAITING START by magic": "NOT LISTED"}


# D7 allows this transition, but a step builder parks a request only while no step has a row of it.
UNREACHED = {("PARKED", "END_IN_STEP")}


def test_every_edge_of_the_lifecycle_is_listed_and_no_other():
    """`python -m tools.simulate --seeds 1000 --table` counts how often each happens."""
    edges = {tuple(line.split()[:2]) for line in listed_transitions()}
    legal = {(s.name, e.name) for s, after in LIFECYCLE.items() for e in after}
    assert edges == legal - UNREACHED


def journal_digest(seed, hash_seed):
    """Return the digest of a seed's journal, from a process of its own."""
    code = (
        "import logging, hashlib; logging.disable(50)\n"
        "from tests.simulator.run import simulate\n"
        f"journal = simulate({seed}, num_requests=60).journal\n"
        "print(hashlib.sha256('\\n'.join(journal).encode()).hexdigest())"
    )
    return output_of(code, env=os.environ | {"PYTHONHASHSEED": str(hash_seed)})


@pytest.mark.parametrize(
    "seed", [12, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 33))]
)
def test_the_same_seed_gives_the_same_journal_in_any_process(seed):
    assert journal_digest(seed, 1) == journal_digest(seed, 2)


def test_another_seed_gives_another_journal():
    digests = {
        hashlib.sha256("\n".join(simulate(seed, num_requests=20).journal).encode()).digest()
        for seed in range(5)
    }
    assert len(digests) == 5


def test_trio_still_has_what_determinism_needs():
    # pytest-trio sets this flag of Trio if Hypothesis is installed. Trio must still have it.
    assert isinstance(trio_run._ALLOW_DETERMINISTIC_SCHEDULING, bool)
    assert hasattr(trio_run._r, "random")
