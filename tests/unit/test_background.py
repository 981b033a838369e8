"""Background work runs only where nothing else could, by schedules of a pure scheduler.

`tests.simulator.background` judges every plan: a step with background work is wrong if another
request could have been in it.
"""

import pytest

from engine.core.common.waiting_queue import BACKGROUND
from engine.core.text import ledger, scheduler, shared_steps, step_builder
from tests.simulator.mutants import Mutant, planted
from tests.support.core_driver import Driver, make_request

SEATS = 2  # of the small schedulers


def background(driver, name="background", **fields):
    """Submit a background request whose prompt begins with a token of its own."""
    ask(driver, name, priority=BACKGROUND, **fields)


def ask(driver, name, *, prompt=8, first=None, buffer=1000, **fields):
    """Submit a request whose prompt begins with ``first`` or with a token of its own."""
    first = 1000 + len(driver.requests) if first is None else first
    fields = {"max_tokens": 60, "arrival": driver.now} | fields
    driver.submit(make_request(name, [first, *range(1, prompt)], **fields), buffer=buffer)
    assert not driver.refused


def names_of(driver):
    """Return the requests that the step in flight computes."""
    planned = {row.sequence for row in driver.in_flight.rows}
    lives = driver.scheduler._ledger.requests.values()
    return {x.request.request_id for x in lives for y in x.sequences if y.sequence_id in planned}


def holds_all_seats():
    """Return a driver in whose step in flight background work has all seats."""
    driver = Driver(max_num_seqs=SEATS)
    for number in range(SEATS):
        background(driver, f"background {number}", max_tokens=200)
    driver.step()
    driver.begin_step()
    return driver


def next_step(driver, seconds=0.01):
    """End the step in flight, and return the requests that the next one computes."""
    driver.now += seconds
    driver.end_step()
    driver.begin_step()
    return names_of(driver)


def one_step_only():
    """A request that comes beside background work is in the next step."""
    driver = holds_all_seats()
    ask(driver, "chat")
    assert next_step(driver) == {"chat"}


def behind_a_late_one():
    """A request whose deadline has passed, and which is not ended yet, holds up nobody."""
    driver = holds_all_seats()
    ask(driver, "late", deadline=driver.now + 0.009)
    ask(driver, "chat")
    assert next_step(driver) == {"chat"}


def behind_a_late_one_of_another_holder():
    """A late request of the holder that is behind does not hold up another holder's."""
    driver = Driver(max_num_seqs=SEATS, prepared_plans=False)
    for number in range(SEATS):
        background(driver, f"background {number}", max_tokens=200)
    driver.step()
    ask(driver, "before", holder="ahead", prompt=100, max_tokens=1)
    driver.step()
    driver.begin_step()
    assert all(name.startswith("background") for name in names_of(driver))
    ask(driver, "late", holder="behind", deadline=driver.now + 0.009)
    ask(driver, "chat", holder="ahead")
    assert next_step(driver) == {"chat"}


def beside_a_late_one():
    """Background work does not give way to a request whose deadline has passed."""
    driver = holds_all_seats()
    ask(driver, "late", deadline=driver.now + 0.009)
    assert next_step(driver) == {"background 0", "background 1"}


def one_that_is_drained():
    """A request whose reader has taken something goes on before background work."""
    driver = Driver()
    background(driver, max_tokens=200)
    ask(driver, "chat", buffer=2)
    driver.begin_step()
    while next_step(driver) != {"background"}:
        assert driver.in_flight is not None
    driver.read("chat")
    assert next_step(driver) == {"chat"}


def behind_one_that_is_parked():
    """A request whose two choices are parked while the step is planned holds up nobody."""
    driver = Driver(num_blocks=6, max_model_len=80, prepared_plans=False)
    ask(driver, "two", prompt=17, buffer=4, n=2)
    running = driver.scheduler._ledger.running
    while len(running) != 1:  # until one choice has lost its blocks to the other
        assert driver.step()
    while driver.credits["two"].free:
        assert driver.step(read=False)
    ask(driver, "chat", prompt=70)
    assert driver.begin_step() is not None
    assert names_of(driver) == {"chat"}


def prefixes():
    """A prefix that background work has computed and another request has used is evicted after
    one that only background work has used."""
    driver = Driver(num_blocks=12, max_model_len=192)
    background(driver, "first", prompt=33, first=1, max_tokens=1)
    driver.run()
    ask(driver, "chat", prompt=33, first=1, max_tokens=1)
    driver.run()
    background(driver, "second", prompt=33, first=2, max_tokens=1)
    driver.run()
    ask(driver, "long", prompt=160, first=3, max_tokens=1)
    driver.run()
    for first, number in ((1, 32), (2, 0)):
        request = make_request("look", [first, *range(1, 33)])
        lookup = driver.scheduler.prefixes
        assert lookup.cached_tokens(lookup.keys_of(request)) == number


SCHEDULES = (
    one_step_only,
    one_that_is_drained,
    behind_a_late_one,
    behind_a_late_one_of_another_holder,
    beside_a_late_one,
    behind_one_that_is_parked,
    prefixes,
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_background_work_delays_nobody_by_more_than_a_step(schedule):
    schedule()


BUGS = (
    (
        one_that_is_drained,
        Mutant(
            "a prepared step does not give way",
            scheduler.Scheduler._use_prepared,
            "and self._ledger.background_gives_way()",
            "and False",
        ),
    ),
    (
        one_step_only,
        Mutant(
            "who waits is not looked at",
            ledger.Ledger.background_gives_way,
            "or (waiting and not waiting[0].is_background)",
            "or False",
        ),
    ),
    (
        beside_a_late_one,
        Mutant(
            "room is made for one whose deadline has passed",
            step_builder.StepBuilder._first_waiting,
            "if not seq.is_late(self._now)",
            "",
        ),
    ),
    (
        behind_a_late_one_of_another_holder,
        Mutant(
            "no room is made for the other holders",
            shared_steps.SharedStepBuilder._plan_by_holders,
            "if may_start and self._but_background and self._lacks_room_for_first():",
            "if False:",
        ),
    ),
    (
        behind_one_that_is_parked,
        Mutant(
            "nobody looks again",
            scheduler.Scheduler._build,
            "num_parked < len(self._parked)",
            "False",
        ),
    ),
    (
        prefixes,
        Mutant(
            "a match does not keep a prefix longer",
            step_builder.StepBuilder._start,
            "ledger.pool.keep_longer(matched)",
            "pass",
        ),
    ),
    (
        prefixes,
        Mutant(
            "background work's prefixes are kept as long",
            ledger.Ledger.publish_computed,
            "bool(self.num_background) and seq.is_background",
            "False",
        ),
    ),
)


@pytest.mark.parametrize(("schedule", "bug"), BUGS)
def test_planted_bugs_are_found(schedule, bug):
    with planted(bug), pytest.raises(AssertionError):
        schedule()
