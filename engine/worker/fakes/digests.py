"""The functions of the fake text model: the digest of all tokens up to a position, the next token,
its log-probability, and the number of a text's characters that cannot be sent yet.

A slot of the fake KV pool holds its position's digest. The digest depends on the adapter, the
tokens and the images to which the tokens belong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from engine.core.text.types import Alternative, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.text.types import PromptImage

VOCAB_SIZE = 1000


def first_digest(adapter: str) -> int:
    """Return the digest of an empty prefix. ``adapter`` is the digest of the sequence's adapter."""
    return crc32(adapter.encode())


def digest_after(digest: int, token_id: int, content: bytes = b"") -> int:
    """Return the digest of a prefix extended by one token. ``content`` is the digest of the image
    to which the token belongs."""
    return crc32(token_id.to_bytes(4, "little") + content, digest)


def contents_of(images: Sequence[PromptImage]) -> dict[int, bytes]:
    """Return the digest of the image for each position of a prompt that belongs to an image."""
    return {at: image.digest for image in images for at in range(image.start, image.end)}


def next_token(digest: int, seed: int | None, choice: int) -> int:
    """Return the token after a prefix with this digest: any id but 0, which ends a sequence."""
    mixed = crc32(f"{digest}/{seed}/{choice}".encode())
    return 1 + mixed % (VOCAB_SIZE - 1)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` may still become one of the stop
    strings."""
    longest = 0
    for stop in stops:
        for size in range(1, min(len(stop), len(text) + 1)):
            if text.endswith(stop[:size]):
                longest = max(longest, size)
    return longest


def fake_logprob(token_id: int, alternatives: int) -> TokenLogprob:
    """Return a token's log-probability, which depends on its id alone. The likeliest tokens are
    always the ids 1, 2, …"""
    likely = [Alternative(i + 1, f"<{i + 1}>", -(i + 1) / 8, i) for i in range(alternatives)]
    return TokenLogprob(token_id, f"<{token_id}>", -(1 + token_id % 8) / 4, tuple(likely))
