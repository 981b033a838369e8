"""The prefix cache by example; `tests/property/test_blocks.py` tests its general laws."""

import pytest

from engine.core.text.memory.blocks import BlockPool
from engine.core.text.memory.prefix import PrefixCache, extend_keys, root_key


def keys_of(tokens, *, size=4, salt=""):
    keys = []
    extend_keys(keys, root_key("model", salt), tokens, size)
    return keys


@pytest.fixture
def pool():
    return BlockPool(4)


def held(pool, count):
    """Return blocks that are in use."""
    reservation = pool.open()
    blocks = pool.take(reservation, count)
    pool.commit(reservation)
    return blocks


def test_keys_are_appended_as_tokens_come():
    tokens, keys = list(range(1, 17)), []
    root = root_key("model", "")
    for end in (3, 4, 9, 16):
        extend_keys(keys, root, tokens[4 * len(keys) : end], 4)
        assert len(keys) == end // 4
    assert keys == keys_of(tokens)
    assert len(set(keys)) == 4
    assert {len(key) for key in keys} == {16}


def test_the_longest_published_prefix_is_matched_and_a_gap_ends_it(pool):
    cache, keys = PrefixCache(pool), keys_of(range(1, 17))
    blocks = held(pool, 4)
    for index in (0, 1, 3):
        cache.publish(keys[index], blocks[index])
    assert cache.match(keys) == blocks[:2]
    assert cache.match(keys[:1]) == blocks[:1]
    assert cache.match(keys[1:2]) == blocks[1:2]  # a block's key covers all tokens before the block
    assert cache.match([]) == ()
    assert cache.match(keys_of(range(1, 17), salt="other")) == ()


def test_a_key_keeps_its_first_block_and_a_block_its_first_key(pool):
    cache, keys = PrefixCache(pool), keys_of(range(1, 9))
    blocks = held(pool, 2)
    cache.publish(keys[0], blocks[0])
    cache.publish(keys[0], blocks[1])
    cache.publish(keys[1], blocks[0])
    assert (len(cache), pool.num_cached) == (1, 1)
    assert cache.match(keys) == blocks[:1]
    cache.check()


def test_a_free_block_is_matched_until_it_is_reused(pool):
    cache, keys = PrefixCache(pool), keys_of(range(1, 9))
    blocks = held(pool, 2)
    for key, block in zip(keys, blocks, strict=True):
        cache.publish(key, block)
    pool.release(blocks)
    assert pool.num_free == 4
    reservation = pool.open()
    assert not set(pool.take(reservation, 2)) & set(blocks)  # cached blocks are taken last
    assert pool.drain_reused() == []
    assert cache.match(keys) == blocks
    assert pool.take(reservation, 1) == blocks[1:]  # a table's last block is reused first
    cache.forget(pool.drain_reused())
    assert cache.match(keys) == blocks[:1]
    cache.check()


def test_a_reset_forgets_all_and_takes_nothing(pool):
    cache, keys = PrefixCache(pool), keys_of(range(1, 9))
    blocks = held(pool, 2)
    for key, block in zip(keys, blocks, strict=True):
        cache.publish(key, block)
    pool.release(blocks[:1])
    cache.reset()
    assert (len(cache), pool.num_cached, cache.match(keys)) == (0, 0, ())
    cache.check()
    pool.check([blocks[1:]])
    reservation = pool.open()
    assert pool.take(reservation, 1) == blocks[:1]  # a released block without content
    pool.rollback(reservation)
