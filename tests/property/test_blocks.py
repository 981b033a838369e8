"""BlockPool and PrefixCache against naive models of both (D5)."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.config import SchedulerConfig
from engine.core.common.credit import Credit
from engine.core.text.memory.blocks import BlockPool
from engine.core.text.memory.prefix import PrefixCache, extend_keys, root_key
from engine.core.text.scheduler import Scheduler
from engine.errors import EngineBug
from tests.support.core_driver import make_request


class PoolMachine(RuleBasedStateMachine):
    """A pool with its cache, and a plain model of which tables hold which blocks, and in which
    order blocks were freed.

    ``free`` is the model's order of reuse: uncached blocks first (latest freed first), then cached
    ones, least recently used first: those in ``background``, which only background work has used,
    before others.
    """

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool)
        self.free = list(range(num_blocks))
        self.references = [0] * num_blocks
        self.key_of = {}
        self.tables = []
        self.reservation = None
        self.reserved = []
        self.next_key = 0
        self.background = set()

    @precondition(lambda self: self.reservation is None)
    @rule()
    def open(self):
        self.reservation, self.reserved = self.pool.open(), []

    @precondition(lambda self: self.reservation is not None)
    @rule(count=st.integers(0, 5))
    def take(self, count):
        taken = self.pool.take(self.reservation, count)
        self.cache.forget(self.pool.drain_reused())
        if count > len(self.free):
            assert taken is None
            return
        assert list(taken) == self.free[:count]
        del self.free[:count]
        for block in taken:
            self.key_of.pop(block, None)
            self.background.discard(block)
            self.references[block] = 1
        self.reserved += taken

    @precondition(lambda self: self.reservation is not None and self.key_of)
    @rule(data=st.data(), is_background=st.booleans())
    def share_a_match(self, data, is_background):
        block = data.draw(st.sampled_from(sorted(self.key_of)))
        matched = self.cache.match([self.key_of[block], b"unknown"])
        assert matched == (block,)
        self.pool.share(self.reservation, matched)
        if not is_background:
            self.pool.keep_longer(matched)
            self.background.discard(block)
        if self.references[block] == 0:
            self.free.remove(block)
        self.references[block] += 1
        self.reserved.append(block)

    @precondition(lambda self: self.reserved)
    @rule(count=st.integers(1, 3))
    def give_back(self, count):
        self.reserved, dropped = self.reserved[:-count], self.reserved[-count:]
        self.pool.give_back(self.reservation, dropped)
        self._model_release(dropped)

    @precondition(lambda self: self.reservation is not None)
    @rule()
    def commit(self):
        self.pool.commit(self.reservation)
        self.tables.append(self.reserved)
        self.reserved = []
        self.reservation, stale = None, self.reservation
        for use in (
            lambda: self.pool.commit(stale),
            lambda: self.pool.rollback(stale),
            lambda: self.pool.take(stale, 0),
            lambda: self.pool.share(stale, ()),
            lambda: self.pool.give_back(stale, ()),
        ):
            with pytest.raises(EngineBug) as caught:
                use()
            assert "after its end" in caught.value.log_detail

    @precondition(lambda self: self.reservation is not None)
    @rule()
    def roll_back(self):
        self.pool.rollback(self.reservation)
        self.reservation = None
        self._model_release(self.reserved)
        self.reserved = []

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        self._model_release(table)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), is_background=st.booleans())
    def publish(self, data, is_background):
        held = sorted({block for table in self.tables for block in table})
        block = data.draw(st.sampled_from(held))
        self.next_key += 1
        key = str(self.next_key).encode()
        if self.cache.publish(key, block, is_background=is_background) and is_background:
            self.background.add(block)
        self.key_of.setdefault(block, key)

    @precondition(lambda self: any(self.tables) and self.key_of)
    @rule(data=st.data())
    def compute_again_what_is_published(self, data):
        """Another request that is not background work has computed a block of a known key."""
        block = data.draw(st.sampled_from(sorted(self.key_of)))
        copy = data.draw(st.sampled_from(sorted({x for table in self.tables for x in table})))
        assert not self.cache.publish(self.key_of[block], copy)
        if block in self.background:
            self.background.discard(block)
            if not self.references[block]:
                self.free.remove(block)
                self.free.append(block)

    @rule()
    def release_of_a_free_block_is_a_bug(self):
        free = [block for block, count in enumerate(self.references) if count == 0]
        if free:
            with pytest.raises(EngineBug) as caught:
                self.pool.release([free[0]])
            assert "twice" in caught.value.log_detail

    @rule()
    def reset_the_cache(self):
        self.cache.reset()
        for block in self.key_of:
            if self.references[block] == 0:
                self.free.remove(block)
                self.free.insert(0, block)
        self.key_of.clear()
        self.background.clear()

    def _model_release(self, blocks):
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self.background:
                    others = [x for x in self.free if x in self.key_of and x not in self.background]
                    self.free.insert(len(self.free) - len(others), block)
                elif block in self.key_of:
                    self.free.append(block)
                else:
                    self.free.insert(0, block)

    @invariant()
    def model_agrees(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check([*self.tables, self.reserved])
        assert self.pool.num_open == (self.reservation is not None)
        self.cache.check()
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_cached == len(self.cache) == len(self.key_of)
        for block, count in enumerate(self.references):
            assert self.pool.references(block) == count


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_keys_are_equal_exactly_for_equal_prefixes_of_full_blocks():
    def keys(tokens, salt="", size=4):
        found = []
        extend_keys(found, root_key("model", salt), tokens, size)
        return found

    tokens = list(range(20, 31))
    assert len(keys(tokens)) == 2  # the third block is not full
    assert keys(tokens)[:1] == keys(tokens[:4])
    assert keys(tokens) == keys(tokens[:9])
    changed = [*tokens[:3], 99, *tokens[4:]]
    assert not set(keys(changed)) & set(keys(tokens))
    assert not set(keys(tokens, salt="other")) & set(keys(tokens))
    assert root_key("ab", "c") != root_key("a", "bc")


@given(
    prompt=st.lists(st.integers(0, 99), min_size=1, max_size=20),
    output=st.lists(st.integers(0, 99), max_size=20),
    size=st.sampled_from([1, 2, 4, 16]),
    steps=st.lists(st.integers(0, 40), max_size=6),
)
def test_a_sequences_keys_are_those_of_its_tokens_however_it_grew(prompt, output, size, steps):
    config = SchedulerConfig(num_blocks=64, block_size=size, max_model_len=64)
    ledger = Scheduler(config)._ledger
    seq = ledger.admit(make_request("r", prompt), Credit(1), 0.0).parent
    seq.output.extend(output)
    seq.num_tokens += len(output)
    whole = [*prompt, *output]
    for end in (min(step, len(whole)) for step in steps):
        ledger.keys.extend(seq, end)
        for start in range(end + 1):
            assert seq.tokens(start, end) == whole[start:end]
    expected = []
    extend_keys(expected, seq.live.root, whole, size)
    assert seq.keys == expected[: len(seq.keys)]
    assert ledger.keys.extend(seq, len(whole)) == expected


def test_a_pool_of_100000_blocks_takes_and_releases_in_constant_time_each():
    import time

    def seconds_for(num_blocks):
        pool = BlockPool(num_blocks)
        started = time.perf_counter()
        for _ in range(2000):
            reservation = pool.open()
            taken = pool.take(reservation, 8)
            pool.commit(reservation)
            pool.release(taken)
        return time.perf_counter() - started

    small = min(seconds_for(100) for _ in range(3))
    large = min(seconds_for(100_000) for _ in range(3))
    # Times differ by caches and other load only; a linear search would take 1000 × as long.
    assert large < 50 * small
