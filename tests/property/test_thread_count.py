"""The number of threads of a step, on simulated machines whose cores others take and leave."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.thread_count import PAUSE_MAX_S, ThreadCount

SETTLED_S = PAUSE_MAX_S + 4.0  # after which a constant load has found its count


@dataclass
class Machine:
    """Some cores, and programs that compute endlessly beside the steps. If there are more threads
    than cores, all have to wait, and a step with several waits for the slowest. ``noise`` is the
    share by which a step's time varies."""

    cores: int
    neighbours: int = 0
    noise: float = 0.0
    tells: bool = True

    def step(self, threads, work):
        """Return the mean seconds of a step, and for how long its threads wait together."""
        runnable = threads + self.neighbours
        share = min(1.0, self.cores / runnable)
        speed = threads**0.9 * share ** (1 if threads == 1 else 2.5)
        seconds = work / speed
        return seconds, threads * (1 - share) * seconds

    def best(self, limit):
        """Return the least mean seconds of a step, with any count, against its work."""
        return min(self.step(threads, 1.0)[0] for threads in range(1, limit + 1))


class Worker:
    """Runs steps on a machine, in virtual time."""

    def __init__(self, machine, limit, seed=0):
        self.machine, self.limit, self.now, self.draw = machine, limit, 0.0, Random(seed)
        self.threads = ThreadCount(limit)
        self.counts = []  # of each step: when it ended, and its count

    def run(self, seconds, works):
        """Run steps for a time, with drawn works. Return how long they took against the best
        count."""
        end, taken, best = self.now + seconds, 0.0, 0.0
        least = self.machine.best(self.limit)
        while self.now < end:
            work, count = self.draw.choice(works), self.threads.count
            assert 1 <= count <= self.limit
            mean, waited = self.machine.step(count, work)
            factor = 1 + self.machine.noise * self.draw.uniform(-1, 1)
            self.now += mean * factor
            taken, best = taken + mean, best + work * least
            told = waited * factor if self.machine.tells else None
            self.threads.note(work, mean * factor, told, self.now)
            self.counts.append((self.now, count))
        return taken / best

    def changes(self, since):
        """Return how often the count changed."""
        counts = [count for at, count in self.counts if at >= since]
        return sum(one != other for one, other in pairwise(counts))


WORKS = st.sampled_from([(0.012,), (0.02, 0.03), (0.03, 0.1), (0.1,)])


@settings(deadline=None, max_examples=20)
@given(
    cores=st.integers(1, 16),
    phases=st.lists(st.tuples(st.integers(0, 20), WORKS), min_size=1, max_size=3),
    tells=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_it_settles_near_the_best_count_whatever_the_neighbours_do(cores, phases, tells, seed):
    machine = Machine(cores, noise=0.05, tells=tells)
    worker = Worker(machine, cores, seed)
    for neighbours, works in phases:
        machine.neighbours = min(neighbours, 2 * cores)
        worker.run(SETTLED_S if tells else 3 * SETTLED_S, works)
        settled = worker.now
        assert worker.run(20.0, works) < 1.35
        assert worker.changes(settled) <= 2 * 20.0 / 0.25  # no more than trials and their ends


@pytest.mark.parametrize("cores", [1, 2, 8, 64])
def test_alone_all_threads_compute_all_the_time(cores):
    worker = Worker(Machine(cores, noise=0.3), cores)
    worker.run(20.0, (0.02, 0.3))
    assert {count for _, count in worker.counts} == {cores}


@pytest.mark.parametrize(("cores", "neighbours"), [(2, 1), (2, 2), (4, 1), (8, 3), (64, 20)])
def test_it_falls_within_a_second_and_rises_within_ten(cores, neighbours):
    machine = Machine(cores, noise=0.02)
    worker = Worker(machine, cores)
    worker.run(5.0, (0.02,))
    machine.neighbours = neighbours
    worker.run(1.0, (0.02,))
    assert worker.run(1.0, (0.02,)) < 1.2
    worker.run(30.0, (0.02,))
    machine.neighbours = 0
    worker.run(PAUSE_MAX_S + 2.0, (0.02,))
    assert worker.threads.count >= 0.9 * cores


def test_where_two_counts_are_alike_it_does_not_go_back_and_forth():
    """A machine on which a second thread gains 3 %."""

    class Flat(Machine):
        def step(self, threads, work):
            return work / (1 + 0.03 * (threads - 1)), 0.5 * work * threads

    worker = Worker(Flat(2), 2)
    worker.run(10.0, (0.02,))
    before = worker.now
    worker.run(60.0, (0.02,))
    assert worker.changes(before) <= 2 * 60 / PAUSE_MAX_S + 2


def test_trials_that_fail_cost_little():
    """Beside one spinning process, two threads take several times as long as one."""

    class Bad(Machine):
        def step(self, threads, work):
            return (work * 8, 8 * work) if threads == 2 else (work, 0.0)

    worker = Worker(Bad(2), 2)
    worker.run(10.0, (0.014,))
    assert worker.run(100.0, (0.014,)) < 1.03


def test_steps_of_kinds_that_were_not_seen_before_decide_nothing():
    worker = Worker(Machine(4, neighbours=2), 4)
    for number in range(400):
        worker.run(0.001, (0.01 + number / 1e5,))
    assert worker.threads.count == 4
