"""`Ledger.check` notices every kind of damage to the invariants, done by hand."""

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
    return driver.scheduler._ledger


def sequence(driver, name):
    """Return the first sequence of a request."""
    return ledger(driver).requests[name].sequences[0]


DAMAGES = {  # code: names are the ledger, its pool and cache, and a sequence in each state
    "drop from the queue": "ledger.waiting.items.clear()",
    "drop from running": "ledger.running.clear()",
    "unpark by hand": "ledger.parked.unread.clear()",
    "lose a block": "running.blocks.pop()",
    "invent a block": "running.blocks.append(pool.num_blocks - 1)",
    "share a block silently": "running.blocks[0] = parked.blocks[0]",
    "hold while waiting": """
pair.blocks, running.blocks = running.blocks, []
running.num_computed = 0""",
    "compute more than there is": "running.num_computed = running.num_tokens + 1",
    "compute beyond the blocks": "pool.release([running.blocks.pop()])",
    "miscount tokens": "running.num_tokens += 1",
    "miscount seats": "ledger.num_seats += 1",
    "miscount the queue": "ledger.waiting.num_tokens -= 1",
    "too many seats": "object.__setattr__(ledger.config, 'max_num_seqs', 0)",
    "jump the queue": """
driver.submit(make_request("last", range(50, 55), arrival=1.0))
ledger.waiting.items.reverse()""",
    "keep a step": "running.num_chunks = 1",
    "keep a token": "running.num_pending, running.num_tokens = 1, running.num_tokens + 1",
    "keep a slot": "driver.credits['running'].try_reserve()",
    "keep a reservation": "pool.open()",
    "forget a cached block": "pool._cached.pop()",
    "cross two keys": """
one, other = list(cache._block_of)[:2]
cache._block_of[one], cache._block_of[other] = cache._block_of[other], cache._block_of[one]""",
    "misfile a free block": "pool._free[running.blocks[0]] = None",
    "lose a free block": "pool._free.popitem()",
}


@pytest.mark.parametrize("harm", DAMAGES)
def test_damage_is_noticed(driver, harm):
    names = {name: sequence(driver, name) for name in ("parked", "running", "pair")}
    names |= {"driver": driver, "make_request": make_request, "ledger": ledger(driver)}
    exec(DAMAGES[harm], names | {"pool": ledger(driver).pool, "cache": ledger(driver).cache})
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
