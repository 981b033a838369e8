"""How many tasks the limiters let through in one turn of Trio's loop."""

from collections import Counter

import pytest
import trio
import trio.testing

from grpc_service.rpc.fairness import FairLock, FairShareLimiter, StartLimiter

STARTS_PER_TURN = 6


class Turns(trio.abc.Instrument):
    """Counts the turns of Trio's loop; pytest-trio adds this instrument to the test's loop."""

    def __init__(self):
        self.count = 0

    def before_io_wait(self, timeout):
        self.count += 1


async def pass_all(start_limiter, count, turns, *, cancelled=(), owner_of=lambda number: "a"):
    """Return the turn in which each task passed the limiter, in the order of their arrival."""
    scopes = [trio.CancelScope() for _ in range(count)]
    came, passed = [], {}

    async def go(number):
        came.append(number)
        with scopes[number]:
            await start_limiter.enter(owner_of(number))
            passed[number] = turns.count

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(go, number)
        await trio.lowlevel.checkpoint()
        for number in cancelled:
            scopes[number].cancel()
    return [passed.get(number) for number in came]


@pytest.fixture
def turns():
    return Turns()


async def test_a_turn_lets_so_many_through_first_come_first_served(turns):
    start_limiter = StartLimiter(STARTS_PER_TURN)
    for count in (1, STARTS_PER_TURN, STARTS_PER_TURN + 1, 10 * STARTS_PER_TURN + 3, 2):
        passed = await pass_all(start_limiter, count, turns)
        assert passed == sorted(passed)
        assert max(Counter(passed).values()) <= STARTS_PER_TURN
        assert passed[-1] - passed[0] <= count // STARTS_PER_TURN + 2
        await trio.testing.wait_all_tasks_blocked()
        assert start_limiter._num_passed == 0


async def test_a_task_that_leaves_the_queue_holds_up_nobody(turns):
    start_limiter = StartLimiter(STARTS_PER_TURN)
    passed = await pass_all(start_limiter, 200, turns, cancelled=range(0, 200, 2))
    others = [one for one in passed if one is not None]
    assert 100 <= len(others) < 200
    assert max(Counter(others).values()) <= STARTS_PER_TURN
    await trio.testing.wait_all_tasks_blocked()
    assert start_limiter._num_passed == len(start_limiter._waiting) == 0


async def test_an_owner_with_many_tasks_delays_another_owner_by_few(turns):
    start_limiter, passed = StartLimiter(STARTS_PER_TURN), []

    async def go(owner):
        await start_limiter.enter(owner)
        passed.append(owner)

    async with trio.open_nursery() as nursery:
        for _ in range(200):
            nursery.start_soon(go, "many")
        await trio.lowlevel.checkpoint()
        for _ in range(3):
            nursery.start_soon(go, "few")
    last = max(number for number, owner in enumerate(passed) if owner == "few")
    assert last < 6 * STARTS_PER_TURN


async def test_a_lock_is_held_by_one_and_its_owners_take_turns():
    lock, holding, passed = FairLock(), 0, []

    async def go(owner):
        nonlocal holding
        async with lock.hold(owner):
            holding += 1
            await trio.lowlevel.checkpoint()
            assert holding == 1
            holding -= 1
            passed.append(owner)

    async with trio.open_nursery() as nursery, lock.hold("first"):
        for _ in range(10):
            nursery.start_soon(go, "many")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(go, "few")
        with trio.move_on_after(0.01):  # gives up its place in the queue
            await go("gone")
    assert passed.index("few") <= 2
    assert len(passed) == 11
    async with lock.hold("last"):
        assert not len(lock._waiting)


async def test_a_limiter_that_is_idle_wakes_nobody(turns):
    start_limiter = StartLimiter(STARTS_PER_TURN)
    await pass_all(start_limiter, 50, turns)
    await trio.testing.wait_all_tasks_blocked()
    before = turns.count
    await trio.sleep(0.05)
    assert turns.count <= before + 3


# ---- FairShareLimiter


async def test_a_share_that_is_spent_lets_nobody_through_until_the_next_turn(turns):
    share = FairShareLimiter(0.004, 16)
    await share.enter("a")
    share.spend(0.003)
    await share.enter("a")  # 1 ms of the share is left
    share.spend(0.002)
    before = turns.count
    await share.enter("a")
    assert turns.count > before
    assert not share._spent_s


async def test_a_turn_lets_so_many_clients_on_and_the_others_in_order_later(turns):
    share = FairShareLimiter(0.004, 3)
    share.spend(1.0)
    passed = []

    async def go(number):
        await share.enter("a")
        passed.append((turns.count, number))
        share.spend(1.0)

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(go, number)
    assert max(Counter(turn for turn, _ in passed).values()) <= 3
    await trio.testing.wait_all_tasks_blocked()
    assert not share._spent_s


async def test_clients_that_leave_hold_up_nobody(turns):
    share = FairShareLimiter(0.004, 3)
    share.spend(1.0)
    passed = []

    async def go(number):
        with trio.CancelScope() as scope:
            if number < 8:
                scope.cancel()
            await share.enter("a")
            passed.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(go, number)
    assert {8, 9} <= set(passed)
