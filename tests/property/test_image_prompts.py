"""Prompts with images, on drawn layouts, budgets and pools.

An image that is marked as whole is never cut, a step computes no more than its budget, and only
prompts with the same image at the same place share its blocks. The fake runner checks which tokens
and images each row reads, and that no row ends inside a whole image.
"""

import hypothesis.strategies as st
from hypothesis import given, settings

from engine.core.text.prompt_images import cut_chunk
from engine.core.text.types import PromptImage
from tests.support.core_driver import Driver, make_request
from tests.support.examples import examples

WORDS = tuple(range(1, 90))
IMAGE = 99
# Of each image: the tokens before it, its span, its cost, its digest.
LAYOUTS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 7]),
        st.sampled_from([1, 3, 9]),
        st.sampled_from([0, 5, 50]),
        st.sampled_from([b"a", b"b"]),
    ),
    min_size=1,
    max_size=4,
)


def images_of(layout, *, is_whole, most=9):
    """Return the layout's images, of at most ``most`` tokens each. Images of one digest have
    equally many tokens."""
    found, start = [], 0
    for before, count, cost, name in layout:
        start, count = start + before, min(count, most)
        digest = name + bytes([count])
        found.append(PromptImage(start, count, cost, digest, is_whole))
        start = found[-1].end
    return tuple(found)


def prompt_of(images, behind):
    """Return a prompt with the images' tokens in their places and words around them."""
    prompt = list(WORDS[: images[-1].end + behind])
    for image in images:
        prompt[image.start : image.end] = [IMAGE] * image.count
    return prompt


@given(
    layout=LAYOUTS,
    is_whole=st.booleans(),
    cached=st.sampled_from([0, 0, 1, 4, 10]),
    rooms=st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1),
)
def test_chunks_take_every_image_once_and_cut_none_that_is_whole(layout, is_whole, cached, rooms):
    images, start, charged = images_of(layout, is_whole=is_whole), cached, 0
    end, steps = images[-1].end + 5, iter(rooms)
    while start < end:
        room, is_first = next(steps, (9, True))
        count, cost = cut_chunk(
            images, start, end - start, room, begins=start == cached, is_first=is_first
        )
        assert count > 0 or not is_first
        if count + cost > room:  # only a single image may exceed the room
            assert is_first
            assert (start, start + count) in [(max(one.start, cached), one.end) for one in images]
            assert cost == 0
        start, charged = start + count, charged + cost
        assert not count or not is_whole or not any(one.is_inside(start) for one in images)
    assert charged <= sum(one.cost for one in images)


@settings(max_examples=examples(300), deadline=None)
@given(
    data=st.data(),
    block_size=st.sampled_from([1, 2, 4, 16]),
    extra=st.integers(0, 30),
    budget=st.integers(1, 40),
    is_whole=st.booleans(),
    layouts=st.lists(LAYOUTS, min_size=1, max_size=3),
)
def test_requests_share_the_blocks_of_the_same_images_and_no_others(
    data, block_size, extra, budget, is_whole, layouts
):
    blocks = -(-96 // block_size) + extra
    driver = Driver(
        block_size=block_size,
        max_model_len=96,
        num_blocks=blocks,
        max_num_seqs=4,
        max_num_batched_tokens=4 + budget,
        max_queued_requests=8,
    )
    driver.runner.script.eos_at = lambda digest: digest % 7 == 0
    for number in range(data.draw(st.integers(2, 6))):
        images = images_of(
            data.draw(st.sampled_from(layouts)), is_whole=is_whole, most=budget if is_whole else 9
        )
        prompt = prompt_of(images, data.draw(st.integers(1, 9)))
        request = make_request(
            f"r{number}", prompt, arrival=driver.now, images=images,
            n=data.draw(st.integers(1, 3)), max_tokens=data.draw(st.integers(1, 20)),
        )  # fmt: skip
        driver.submit(request)
        for _ in range(data.draw(st.integers(0, 6))):
            driver.step()
    driver.run()
    driver.check_tokens()
    driver.check_idle()
