"""What a key may use in a minute, in virtual time. Of tokenizers: drawn texts of several holders,
some of which leave, against sums that are made from when each text began and how long it took."""

import contextlib
import random
from functools import partial

import pytest
import trio

from engine.config import ModelConfig
from engine.core.common.types import EndReason
from engine.errors import Overloaded
from engine.requests import quota, tokenizing
from engine.requests.encode.values import (
    Embedding,
    EmbedRequest,
    EmbedStreamRequest,
    IndexedInput,
)
from engine.requests.quota import RETRY_AFTER_S, Origin, Quota, UseLimits
from engine.requests.tasks import RequestTasks
from engine.requests.text.values import GenerateRequest
from engine.requests.tokenizing import INLINE_TOKENIZE_CHARS, LONG_TEXT_CHARS, Tokenizing
from engine.status import Capability
from engine.worker.fakes.encode import FakeEncoder
from engine.worker.fakes.text import FakeScript
from tests.simulator.determinism import VirtualThreads, run_deterministically
from tests.simulator.mutants import Mutant, planted
from tests.support.virtual_engine import fake_engine, read_all

NUM_WORLDS = 60
SLACK = 1e-6  # seconds that rounding may take or give
MUTANTS = (
    Mutant(
        "the time in which others have their turns is counted",
        tokenizing._Jobs.run,
        "async with turns.turn(party):\n                with _counted_to(party):",
        "with _counted_to(party):\n                async with turns.turn(party):",
    ),
    Mutant(
        "a gateway's holders count apart",
        tokenizing._count,
        "party.counted.",
        "party.",
        owner=tokenizing,
    ),
    Mutant("nothing is forgotten", quota.MinuteUse._left, "limit / 60.0", "0.0"),
    Mutant("all is forgotten in a second", quota.MinuteUse._left, "limit / 60.0", "limit"),
    Mutant(
        "the last use replaces those before it",
        quota.MinuteUse.add,
        "self._left(limit, now) + amount",
        "amount",
    ),
    Mutant(
        "a request of a spent key begins", quota.Quota.begin, "self.check_tokenizer(now)", "pass"
    ),
    Mutant(
        "one may try again too early",
        quota.MinuteUse.check,
        "60.0 * excess / limit",
        "excess / limit",
    ),
)


class World:
    """Texts of three keys, one of them a gateway's with two holders."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        gate = Quota("gate")
        gate.may_delegate = True
        self._holders = [Quota("ann"), gate, gate.delegated("one"), gate.delegated("two")]
        for holder in self._holders[:2]:
            most = self._random.choice([0.4, 2.0, 9.0])
            holder.limits = UseLimits(max_tokenizer_seconds_per_minute=most)
        self._holders.append(Quota("ben"))
        self._threads, self._tasks = VirtualThreads(), RequestTasks()
        self._tokenizing = Tokenizing(self._threads, self._tasks)
        self._uses = {holder.counted: [] for holder in self._holders}
        self.num_refused = self.num_left = 0

    async def run(self):
        async with self._tasks.running(), trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(self._ask)

    async def _ask(self):
        draw = self._random
        at, holder = draw.uniform(0.0, draw.choice([20, 200])), draw.choice(self._holders)
        cost = draw.choice([0.01, 0.3, 2.0]) * draw.random()
        patience = draw.choice([100.0, 0.5 * draw.random()])
        chars = draw.choice([INLINE_TOKENIZE_CHARS, LONG_TEXT_CHARS])
        begin = draw.choice([partial(holder.counted.begin, 1), holder.counted.check_tokenizer])
        await trio.sleep(at)
        if self._is_refused(holder.counted, begin):
            self.num_refused += 1
            return
        with trio.move_on_after(patience) as scope:
            await self._tokenizing.run(chars, partial(self._work, holder.counted, cost), holder)
        self.num_left += scope.cancelled_caught

    def _work(self, counted, cost):
        self._uses[counted].append((trio.current_time() + cost, cost))
        self._threads.note_sleep(cost)

    def _is_refused(self, counted, begin):
        """Begin a request, and compare what comes of it with the uses so far."""
        now, limit = trio.current_time(), counted.limits.max_tokenizer_seconds_per_minute
        used, then = 0.0, 0.0
        for end, cost in sorted(self._uses[counted]):
            if limit is not None and end <= now + SLACK:
                used, then = max(0.0, used - (end - then) * limit / 60) + cost, end
        if limit is not None:
            used = max(0.0, used - (now - then) * limit / 60)
        refusal = None
        try:
            begin(now)
        except Overloaded as error:
            refusal = error
        if refusal is None:
            assert limit is None or used <= limit + SLACK
            return False
        assert used >= limit - SLACK
        assert str(refusal) == f"this key has used its {limit:g} seconds of tokenizers a minute"
        wait_s = max(RETRY_AFTER_S, 60 * (used - limit) / limit)
        assert refusal.retry_after_s == pytest.approx(wait_s, abs=1e-3)
        return True


@contextlib.contextmanager
def collapsing():
    """Raise the assertion that failed in a task as it is."""
    try:
        yield
    except BaseExceptionGroup as errors:
        failed = errors.subgroup(AssertionError)
        while isinstance(failed, BaseExceptionGroup):
            failed = failed.exceptions[0]
        raise (failed or errors) from None


def run_world(seed):
    world = World(seed)
    run_deterministically(world.run, seed)
    return world


@pytest.mark.parametrize("seed", range(NUM_WORLDS))
def test_a_key_has_its_seconds_of_tokenizers(seed):
    run_world(seed)


def test_the_worlds_have_refusals_and_clients_that_leave():
    worlds = [run_world(seed) for seed in range(10)]
    assert sum(world.num_refused for world in worlds) > 20
    assert sum(world.num_left for world in worlds) > 20


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.title)
def test_a_bug_in_the_limit_is_found(mutant):
    with planted(mutant):
        for seed in range(NUM_WORLDS):
            with contextlib.suppress(AssertionError):
                with collapsing():
                    run_world(seed)
                continue
            return
    pytest.fail("no world shows the bug")


# ---- tokens a minute -----------------------------------------------------------------------------


def holder_of(most):
    made = Quota("ann")
    made.limits = UseLimits(max_tokens_per_minute=most)
    return made


def test_a_request_that_leaves_the_queue_before_a_step_has_used_no_tokens():
    holder = holder_of(500)

    async def main():
        async with fake_engine(FakeScript(step_s=1.0), max_num_seqs=1) as engine:

            def submit(name, num_tokens):
                request = GenerateRequest(token_ids=(5,) * num_tokens, request_id=name)
                return engine.submit(request, buffer=99, origin=Origin("", holder))

            first, second = submit("first", 3), submit("second", 1000)
            await trio.sleep(3.5)
            second.cancel(EndReason.CANCELLED)
            await second.wait_closed()
            third = submit("third", 600)
            await trio.sleep(1.0)
            assert third.error is None
            first.cancel(EndReason.CANCELLED)
            await trio.sleep(3.5)
            third.cancel(EndReason.CANCELLED)
            await third.wait_closed()
            await trio.sleep(1.5)
            assert "has used its 500 tokens a minute" in str(submit("fourth", 3).error)

    run_deterministically(main, 0)


def test_a_stream_of_inputs_goes_on_as_fast_as_its_key_may():
    """Red if its tokens count only at its end."""
    num_inputs = 20_000
    parts = (range(begin, begin + 500) for begin in range(0, num_inputs, 500))

    async def source():
        part = next(parts, None)
        return None if part is None else [IndexedInput(index, (5,) * 5) for index in part]

    async def main():
        models = (ModelConfig("emb", capability=Capability.TEXT_EMBEDDING),)
        script = FakeScript(step_s=0.01)
        make = partial(FakeEncoder, Capability.TEXT_EMBEDDING)
        async with fake_engine(script, make, models=models) as engine:
            request = EmbedStreamRequest(EmbedRequest(check=False), source)
            origin = Origin("", holder_of(20_000))
            events = await read_all(engine.submit(request, buffer=4, origin=origin))
            assert sum(isinstance(event, Embedding) for event in events) == num_inputs
            [(_, sums)] = engine.usage.sums()[1].items()
            assert (sums.requests, sums.prompt_tokens) == (1, 100_000)
            return trio.current_time()

    assert 200.0 < run_deterministically(main, 0) < 400.0
