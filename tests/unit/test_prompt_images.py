"""What a prompt's images change for the core: the keys of blocks, and where chunks end."""

import pytest

from engine.core.text.memory.prefix import extend_keys
from engine.core.text.prompt_images import contents_of_blocks, cut_chunk
from engine.core.text.types import PromptImage
from engine.images.preprocessor import TiledPreprocessor, digest_of
from engine.requests.text.image_prompts import ImageText, ReadImage, place
from tests.support.images import picture

SIZE = 4
TOKENS = [7] * 20


def image(start=6, count=5, digest=b"a", cost=10, *, is_whole=False):
    return PromptImage(start, count, cost, digest, is_whole)


def keys_of(*images, tokens=TOKENS):
    """Return the keys of a prompt's blocks, extended twice, as chunks do."""
    keys = []
    contents = contents_of_blocks(images, SIZE)
    extend_keys(keys, b"root", tokens[:8], SIZE, contents)
    extend_keys(keys, b"root", tokens[8:], SIZE, contents)
    return keys


def same(first, second):
    """Return how many keys two prompts share."""
    return sum(a == b for a, b in zip(first, second, strict=True))


def test_prompts_share_the_blocks_before_an_image_and_all_with_the_same_one():
    assert keys_of(image()) == keys_of(image())
    assert same(keys_of(image()), keys_of(image(digest=b"b"))) == 1
    assert same(keys_of(image()), keys_of()) == 1
    assert same(keys_of(image()), keys_of(image(start=7))) == 1
    assert keys_of() == keys_of()


def test_two_images_in_one_block_are_told_apart_by_their_order():
    one = image(0, 2, b"a"), image(2, 2, b"b")
    other = image(0, 2, b"b"), image(2, 2, b"a")
    assert same(keys_of(*one), keys_of(*other)) == 0


def cut(*images, start=0, count=20, room=100, begins=True, is_first=True):
    """Return how many tokens a chunk has when it is cut, and what its images cost."""
    return cut_chunk(images, start, count, room, begins=begins, is_first=is_first)


@pytest.mark.parametrize(
    ("wanted", "fields"),
    [
        ((20, 10), {}),  # the whole prompt
        ((20, 0), {"start": 11}),  # starts behind the image
        ((8, 10), {"start": 8, "count": 8}),  # starts inside the image, behind a cached prefix
        ((8, 0), {"start": 8, "count": 8, "begins": False}),  # the image's cost was paid before
        ((6, 0), {"room": 16}),  # the image's cost does not fit
        ((7, 10), {"room": 17}),  # the image's cost and its first token fit
        ((0, 0), {"start": 6, "room": 8, "is_first": False}),  # the next step computes the image
        ((1, 7), {"start": 6, "room": 8}),  # the first chunk of a step may exceed the room
    ],
)
def test_a_chunk_is_charged_for_an_image_where_it_first_meets_it(wanted, fields):
    assert cut(image(), **{"count": 20} | fields) == wanted


@pytest.mark.parametrize(
    ("wanted", "fields"),
    [
        ((20, 10), {}),
        ((6, 0), {"count": 8}),  # a whole image is never cut: the chunk ends before it
        ((11, 10), {"count": 11}),  # the chunk ends behind the image
        ((6, 0), {"room": 20}),
        ((11, 10), {"room": 21}),
        ((0, 0), {"start": 6, "room": 8, "is_first": False}),
        ((5, 0), {"start": 6, "room": 3}),  # may exceed the room if it is first
        ((3, 0), {"start": 8, "room": 2}),  # the rest of a whole image behind a cached prefix
        ((12, 10), {"start": 8, "count": 12}),
    ],
)
def test_a_whole_image_is_never_cut(wanted, fields):
    assert cut(image(is_whole=True), **{"count": 20} | fields) == wanted


def test_a_step_takes_two_images_only_with_room_for_both():
    two = image(2, 3, b"a"), image(8, 3, b"b")
    assert cut(*two, room=50) == (20, 20)
    assert cut(*two, room=22) == (8, 10)


# ---- images of several tiles

TOKEN = 9
TILES, TILE_TOKENS, TILE_COST = 5, 4, 16  # for an image of 64 × 48 pixels
PREPROCESSOR = TiledPreprocessor(
    max_pixels=2**20,
    longest_edge=64,
    side=32,
    tile_tokens=TILE_TOKENS,
    tile_cost=TILE_COST,
    splits=True,
    resample=3,
    token="<image>",
    token_id=TOKEN,
)


def tiles_of(*files):
    """Return where the tiles of images are, in a prompt with two words before each tile."""
    images = [ReadImage(PREPROCESSOR.read(data), digest_of(data)) for data in files]
    ids, owners = [], []
    for number in range(len(images)):
        ids += ([1, 2] + [TOKEN] * TILE_TOKENS) * TILES
        owners += [number] * TILE_TOKENS * TILES
    _, found = place(ids, ImageText("", tuple(owners)), images, PREPROCESSOR, lambda text: ())
    return found


def test_a_tile_that_is_encoded_alone_is_a_piece_of_its_own():
    first, second = picture(64, 48, seed=1), picture(64, 48, seed=2)
    tiles = tiles_of(first, second, first)
    assert [one.start for one in tiles] == [2 + 6 * number for number in range(3 * TILES)]
    assert {(one.count, one.cost) for one in tiles} == {(TILE_TOKENS, TILE_COST)}
    digests = [one.digest for one in tiles]
    assert len(set(digests)) == 2 * TILES
    assert digests[:TILES] == digests[2 * TILES :]
    assert [one.content.num_tokens for one in tiles] == [TILE_TOKENS] * 3 * TILES


def test_a_step_encodes_as_many_tiles_of_an_image_as_it_has_room_for():
    """Red if a step encodes all tiles of an image, or none."""
    images, end = tiles_of(picture(64, 48)), TILES * (2 + TILE_TOKENS)
    for room, most in ((18, 1), (45, 2), (1000, TILES)):
        start, costs = 0, []
        while start < end:
            count, cost = cut_chunk(
                images, start, end - start, room, begins=not start, is_first=True
            )
            start += count
            costs.append(cost)
        assert max(costs) == most * TILE_COST, room
        assert sum(costs) == TILES * TILE_COST, room
