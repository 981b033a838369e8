"""`Ledger.check` notices every kind of damage to the invariants, done by hand."""

from __future__ import annotations

import pytest

from engine.core.text.lifecycle import State
from tests.support.core_driver import Driver, make_request


@pytest.fixture
def driver():
    """Return a driver with one running, one waiting and one parked request, between steps."""
    driver = Driver(
        num_blocks=20,
        block_size=4,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=40,
        prepared_plans=False,
    )
    driver.submit(make_request("parked", range(1, 10), max_tokens=8), buffer=1)
    driver.submit(make_request("running", range(20, 30), max_tokens=8), buffer=9)
    for _ in range(2):
        driver.begin_step()
        driver.end_step()
    driver.submit(make_request("pair", range(40, 45), max_tokens=8, n=2))
    driver.scheduler.check()
    return driver


def ledger(driver):
    """Return the scheduler's ledger."""
    return driver.scheduler._ledger


def sequence(driver, name):
    """Return the first sequence of a request."""
    return ledger(driver).requests[name].sequences[0]


DAMAGES = []


def damage(function):
    """Add a function to the damages that the test tries."""
    DAMAGES.append(function)
    return function


@damage
def drop_from_queue(driver):
    ledger(driver).waiting.items.clear()


@damage
def drop_from_running(driver):
    ledger(driver).running.clear()


@damage
def unpark_by_hand(driver):
    ledger(driver).parked.unread.clear()


@damage
def lose_a_block(driver):
    sequence(driver, "running").blocks.pop()


@damage
def invent_a_block(driver):
    sequence(driver, "running").blocks.append(ledger(driver).pool.num_blocks - 1)


@damage
def share_a_block_silently(driver):
    sequence(driver, "running").blocks[0] = sequence(driver, "parked").blocks[0]


@damage
def hold_while_waiting(driver):
    waiting, running = sequence(driver, "pair"), sequence(driver, "running")
    waiting.blocks, running.blocks = running.blocks, []
    running.num_computed = 0


@damage
def compute_more_than_there_is(driver):
    sequence(driver, "running").num_computed = sequence(driver, "running").num_tokens + 1


@damage
def compute_beyond_the_blocks(driver):
    seq = sequence(driver, "running")
    ledger(driver).pool.release([seq.blocks.pop()])


@damage
def miscount_tokens(driver):
    sequence(driver, "running").num_tokens += 1


@damage
def miscount_seats(driver):
    ledger(driver).num_seats += 1


@damage
def miscount_the_queue(driver):
    ledger(driver).waiting.num_tokens -= 1


@damage
def too_many_seats(driver):
    object.__setattr__(ledger(driver).config, "max_num_seqs", 0)


@damage
def jump_the_queue(driver):
    driver.submit(make_request("last", range(50, 55), arrival=1.0))
    ledger(driver).waiting.items.reverse()


@damage
def keep_a_step(driver):
    sequence(driver, "running").num_chunks = 1


@damage
def keep_a_token(driver):
    seq = sequence(driver, "running")
    seq.num_pending, seq.num_tokens = 1, seq.num_tokens + 1


@damage
def keep_a_slot(driver):
    driver.credits["running"].try_reserve()


@damage
def keep_a_reservation(driver):
    ledger(driver).pool.open()


@damage
def forget_a_cached_block(driver):
    ledger(driver).pool._cached.pop()


@damage
def cross_two_keys(driver):
    cache = ledger(driver).cache
    one, other = list(cache._block_of)[:2]
    cache._block_of[one], cache._block_of[other] = cache._block_of[other], cache._block_of[one]


@damage
def misfile_a_free_block(driver):
    pool = ledger(driver).pool
    pool._free[sequence(driver, "running").blocks[0]] = None


@damage
def lose_a_free_block(driver):
    ledger(driver).pool._free.popitem()


@pytest.mark.parametrize("harm", DAMAGES, ids=lambda harm: harm.__name__)
def test_damage_is_noticed(driver, harm):
    harm(driver)
    with pytest.raises(AssertionError):
        driver.scheduler.check()


def test_a_running_list_out_of_order_is_noticed():
    driver = Driver(num_blocks=20, block_size=4, max_model_len=64, prepared_plans=False)
    for name in ("a", "b"):
        driver.submit(make_request(name, range(ord(name), ord(name) + 5), max_tokens=8))
    driver.step()
    ledger(driver).running.reverse()
    with pytest.raises(AssertionError):
        driver.scheduler.check()


def test_the_fixture_has_one_of_each(driver):
    states = {name: sequence(driver, name).state for name in ("parked", "running", "pair")}
    assert states == {"parked": State.PARKED, "running": State.RUNNING, "pair": State.WAITING}


def test_the_block_whose_holdings_differ_is_named(driver):
    block = sequence(driver, "running").blocks[1]
    ledger(driver).pool._references[block] += 1
    with pytest.raises(AssertionError, match=f"block {block} has 2 references, 1 holders"):
        driver.scheduler.check()
