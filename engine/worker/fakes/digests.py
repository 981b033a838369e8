"""What the fake text model computes: a digest of all tokens up to a position, and the next token.

A position's digest is what a slot of the fake KV pool holds. It depends on the adapter, the tokens
and the images that these are tokens of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.text.types import PromptImage

VOCAB_SIZE = 1000


def first_digest(adapter: str) -> int:
    """Return the digest of no tokens at all, computed with an adapter of this digest."""
    return crc32(adapter.encode())


def digest_after(digest: int, token_id: int, content: bytes = b"") -> int:
    """Return the digest of a prefix extended by one token. ``content`` is the digest of the image
    that it is a token of."""
    return crc32(token_id.to_bytes(4, "little") + content, digest)


def contents_of(images: Sequence[PromptImage]) -> dict[int, bytes]:
    """Return the digest of its image for each position that has one."""
    return {at: image.digest for image in images for at in range(image.start, image.end)}


def next_token(digest: int, seed: int | None, choice: int) -> int:
    """Return the token after a prefix of this digest: any id of the vocabulary but 0, which ends a
    sequence."""
    mixed = crc32(f"{digest}/{seed}/{choice}".encode())
    return 1 + mixed % (VOCAB_SIZE - 1)
