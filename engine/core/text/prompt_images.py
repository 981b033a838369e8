"""How images change a prompt for the scheduler: the keys of its blocks, and its chunks.

Rule: pure functions of the images' `PromptImage`s; only the worker reads an image's content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.core.text.types import PromptImage


def contents_of_blocks(
    images: Sequence[PromptImage], block_size: int
) -> Callable[[int], bytes] | None:
    """Return a function from the position of a block's first token to the images' part of the
    block's key: the digest of each image that the block overlaps, and where in the image the block
    begins. None if there are no images."""
    if not images:
        return None

    def content_of(start: int) -> bytes:
        overlapping = [
            image for image in images if image.start < start + block_size and image.end > start
        ]
        return b"".join(
            image.digest + (start - image.start).to_bytes(8, "little", signed=True)
            for image in overlapping
        )

    return content_of


def cut_chunk(
    images: Sequence[PromptImage],
    start: int,
    count: int,
    room: int,
    *,
    begins: bool,
    is_first: bool,
) -> tuple[int, int]:
    """Return how many of the ``count`` tokens from ``start`` on a step computes, and what encoding
    their images costs the step, in tokens. The step has room for ``room`` tokens.

    An image's cost is charged to the chunk that first meets it. An image that the step has no room
    for is left to the next step, unless the chunk is the step's first (``is_first``): it takes all
    the room then, as it could wait for ever otherwise. ``begins``: the chunk is the sequence's
    first since it started, so that an image in its middle has not been charged. The chunk may begin
    inside an image that is whole, behind a cached prefix, which was computed with the image in
    view.
    """
    end, charged = start + min(count, room), 0
    for image in images:
        if image.end <= start:
            continue
        if image.start >= end:
            break
        before = max(0, image.start - start)
        own = image.end - max(image.start, start) if image.is_whole else 1
        cost = image.cost if begins or image.start >= start else 0
        has_no_room = before + own + charged + cost > room
        if has_no_room or (image.is_whole and end < image.end):
            if before or charged or not is_first:
                return before, charged
            cost = min(cost, max(0, room - own))
            if image.is_whole:
                return own, cost
        charged += cost
        end = min(end, start + room - charged)
        if image.is_whole and end < image.end:
            return before, charged - cost
    return end - start, charged
