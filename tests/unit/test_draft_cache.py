"""A draft model's cache: which tokens of which sequences it holds (D27)."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.text.draft_cache import RESIDENTS_MAX, DraftCache, num_common
from tests.support.examples import examples


def read(cache, sequence, tokens):
    """Let the cache hold all tokens of a sequence but the last. Return the sequence's place in the
    cache, the copies of blocks, and how many tokens the cache held of it before."""
    place, copies = cache.open(sequence, tokens)
    held = len(place.tokens)
    assert cache.try_grow(place, len(tokens))
    place.tokens += tokens[held:-1]
    return place, copies, held


def test_what_was_read_is_held_until_it_is_rejected():
    cache = DraftCache(8, 4)
    place, _, held = read(cache, 1, [*range(10)])
    assert held == 0
    place.tokens += [9, 70, 71]  # the last token, and two drafts behind it
    place, copies = cache.open(1, [*range(10), 70, 5])
    assert place.tokens == [*range(10), 70]
    assert copies == []


def test_a_sequence_that_begins_like_another_copies_its_whole_blocks():
    cache = DraftCache(8, 4)
    first, _, _ = read(cache, 1, [*range(11)])
    second, copies, held = read(cache, 2, [*range(9), 50, 51])
    assert held == 8
    assert copies == list(zip(first.blocks[:2], second.blocks[:2], strict=True))
    assert not {*first.blocks} & {*second.blocks}


def test_the_last_token_is_always_left_to_read():
    cache = DraftCache(8, 4)
    read(cache, 1, [*range(9)])
    place, copies = cache.open(2, [*range(8)])
    assert len(place.tokens) == 4
    assert len(copies) == 1


def test_sequences_that_have_ended_give_their_blocks_first_and_those_in_use_never():
    cache = DraftCache(6, 4)
    for sequence in (1, 2, 3):
        cache.begin()
        read(cache, sequence, [sequence * 100 + i for i in range(8)])
    cache.release([2])
    cache.begin()
    place, _ = cache.open(4, [*range(8)])
    assert cache.try_grow(place, 8)
    assert len(cache.open(1, [100 + i for i in range(8)])[0].tokens) == 7
    assert len(cache.open(2, [200 + i for i in range(8)])[0].tokens) == 0
    kept, _ = cache.open(3, [300 + i for i in range(8)])
    assert len(kept.tokens) == 7
    assert not cache.try_grow(kept, 24)  # all blocks are in use in this step
    assert len(kept.blocks) == 2


def test_the_number_of_sequences_is_bounded():
    cache = DraftCache(1000, 4)
    for sequence in range(3 * RESIDENTS_MAX):
        cache.begin()
        read(cache, sequence, [sequence * 10 + i for i in range(6)])
    assert len(cache._residents) == RESIDENTS_MAX
    assert cache.num_free == 1000 - 2 * RESIDENTS_MAX


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_what_is_held_is_always_the_sequences_own_and_no_block_has_two_owners(data):
    """The drawn sequences grow, reject drafts, end, and are evicted. A naive model notes for each
    slot which tokens were computed there."""
    cache, size = DraftCache(data.draw(st.integers(4, 12)), 2), 2
    num_blocks, written = cache.num_free, {}
    sequences, ends = {}, 0  # an id that has ended is never used again
    for _ in range(data.draw(st.integers(1, 25))):
        cache.begin()
        name = data.draw(st.integers(0, 4)) + 5 * ends
        tokens = sequences.setdefault(
            name, data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
        )
        tokens += data.draw(st.lists(st.integers(0, 1), max_size=3))
        drafts = data.draw(st.lists(st.integers(0, 1), max_size=3))
        place, copies = cache.open(name, tokens)
        for source, target in copies:
            for offset in range(size):
                written[target * size + offset] = written[source * size + offset]
        assert place.tokens == tokens[: len(place.tokens)]
        assert len(place.tokens) < len(tokens)
        if cache.try_grow(place, len(tokens) + len(drafts)):
            whole = [*tokens, *drafts]
            for position in range(len(place.tokens), len(whole)):
                slot = place.blocks[position // size] * size + position % size
                written[slot] = tuple(whole[: position + 1])
            place.tokens = whole
        for position in range(len(place.tokens)):
            slot = place.blocks[position // size] * size + position % size
            assert written[slot] == tuple(place.tokens[: position + 1])
        if data.draw(st.booleans()):
            cache.release([name])
            if data.draw(st.booleans()):
                ends += 1
        owned = [block for one in cache._residents.values() for block in one.blocks]
        assert len(owned) + cache.num_free == num_blocks
        assert len({*owned}) == len(owned)


def test_equal_first_tokens_are_counted():
    one = [*range(1000)]
    for end in (0, 1, 255, 256, 257, 700):
        assert num_common(one, [*one[:end], -1, 5]) == end
        assert num_common(one, one[:end], min(end, 3)) == end
