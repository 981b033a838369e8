"""Requests with images get memory in their order, and give it back however they end."""

from contextlib import ExitStack

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from engine.requests.image_memory import FILE_BYTES_MAX, ImageFiles, ImageMemory


class Asker:
    """A request that asks for memory, in a task of its own."""

    def __init__(self, memory, num_bytes):
        self.memory, self.num_bytes = memory, num_bytes
        self.held, self.scope = ExitStack(), trio.CancelScope()
        self.has_it = False

    async def run(self):
        with self.scope:
            await self.memory.take(self.num_bytes, self.held, id(self))
            self.has_it = True


@pytest.fixture
async def ask(nursery):
    memory = ImageMemory(100)

    async def asking(num_bytes):
        asker = Asker(memory, num_bytes)
        nursery.start_soon(asker.run)
        await wait_all_tasks_blocked()
        return asker

    return asking


async def test_a_request_may_have_a_quarter():
    assert ImageMemory(100).request_bytes_max == 25


async def test_requests_get_memory_in_the_order_in_which_they_ask(ask):
    first, second, third = await ask(60), await ask(50), await ask(10)
    assert [one.has_it for one in (first, second, third)] == [True, False, False]
    first.held.close()
    await wait_all_tasks_blocked()
    assert second.has_it
    assert third.has_it
    assert first.memory.num_bytes == 60


async def test_one_that_leaves_the_queue_lets_the_next_one_in_and_holds_nothing(ask):
    first, second, third = await ask(60), await ask(50), await ask(40)
    second.scope.cancel()
    await wait_all_tasks_blocked()
    assert third.has_it
    assert not second.has_it
    for one in (first, second, third):
        one.held.close()
    assert first.memory.num_bytes == 0


async def test_one_that_is_cancelled_as_it_gets_memory_gives_it_back(ask):
    first, second = await ask(60), await ask(50)
    second.scope.cancel()
    first.held.close()  # grants the second's request; the second task has not run yet
    await wait_all_tasks_blocked()
    assert not second.has_it
    assert second.memory.num_bytes == 0


async def test_the_first_that_waits_asks_others_for_theirs_until_it_has_enough():
    """Red if requests whose clients are away keep their memory until their resume windows end."""
    memory, hoards, own = ImageMemory(100), {name: ExitStack() for name in "abc"}, ExitStack()
    for name, held in hoards.items():
        await memory.take(30, held, name)
    left, asked = list(hoards), []
    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:

            def spare(holders):
                asked.append(set(holders))
                nursery.start_soon(give_back, hoards[left[0]])
                return left.pop(0)

            async def give_back(held):
                held.close()

            await memory.take(50, own, "own", spare)
            await wait_all_tasks_blocked()
    assert (memory.num_bytes, left) == (80, ["c"])
    assert asked == [{"a", "b", "c"}, {"b", "c"}], "who waits itself holds nothing"
    own.close()
    hoards["c"].close()
    assert (memory.num_bytes, set(memory.holders)) == (0, set())


async def test_nobody_else_is_given_up_while_the_memory_of_one_is_not_back():
    """Red if a second request gives up its memory before the first one's is free."""
    memory, hoards, asked = ImageMemory(100), {name: ExitStack() for name in "abc"}, []
    for name, held in hoards.items():
        await memory.take(30, held, name)
    async with trio.open_nursery() as nursery:
        for name in ("first", "second"):

            def spare(holders):
                asked.append(min(holders))
                return asked[-1]

            nursery.start_soon(memory.take, 40, ExitStack(), name, spare)
            await wait_all_tasks_blocked()
        assert asked == ["a"]
        hoards["a"].close()
        await wait_all_tasks_blocked()
        assert asked == ["a", "b"], "the second lacks memory, too"
        nursery.cancel_scope.cancel()


def test_files_of_requests_whose_clients_are_away_take_no_room_from_others():
    """Red if the files count until the resume windows end: nobody else could send an image."""
    of_guests = FILE_BYTES_MAX
    files = ImageFiles(lambda: of_guests)
    files.add(FILE_BYTES_MAX)
    assert files.refusal(1) is None
    files.add(FILE_BYTES_MAX)
    assert files.refusal(1) is not None
    of_guests = 0
    files.remove(FILE_BYTES_MAX)
    assert files.refusal(1) is not None
    files.remove(1)
    assert files.refusal(1) is None
