"""Which tokens a constraint lets follow, as bits, and what that does to logits.

Rule 1: a mask comes last, after every edit and ban of the request. Rule 2: where it leaves a row
nothing but the end of the sequence, the end is taken even if the request bans it or asks to go on:
a form that is complete has no other way to go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]


class Mask:
    """The tokens that may follow one sequence. ``words`` are bits, token 0 the lowest of the first;
    they are 0 until the mask is filled. ``ends`` are the end-of-sequence tokens of the grammar.
    ``trouble`` says why it could not be filled, in a sentence for the client.
    """

    __slots__ = ("ends", "trouble", "words")

    def __init__(self, num_words: int, ends: tuple[int, ...]) -> None:
        self.words: NDArray[np.int32] = np.zeros(num_words, np.int32)
        self.ends = ends
        self.trouble = ""

    def bits(self, vocab: int) -> NDArray[np.uint8]:
        """[vocab] 1 for a token that may follow."""
        found = np.unpackbits(self.words.view(np.uint8), bitorder="little", count=vocab)
        return found

    def allows(self, token: int) -> bool:
        """Whether the token may follow."""
        return bool(self.words[token >> 5] >> (token & 31) & 1)

    def apply(self, scores: Floats) -> None:
        """In place on one row of logits [vocab]."""
        np.copyto(scores, -np.inf, where=self.bits(len(scores)) == 0)
        if scores.max() == -np.inf:
            scores[self.open_ends(len(scores))] = 0.0

    def open_ends(self, vocab: int) -> list[int]:
        """The ends that may follow now."""
        return [token for token in self.ends if token < vocab and self.allows(token)]


def apply_batch(scores: torch.Tensor, masks: Sequence[Mask | None]) -> None:
    """`Mask.apply` of each row that has a mask, in place on [rows, vocab] float32."""
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return
    given = [mask for mask in masks if mask is not None]
    device, vocab = scores.device, scores.shape[1]
    at = torch.tensor(rows, device=device)
    packed = np.stack([mask.words.view(np.uint8) for mask in given])  # [masked, bytes]
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    wide = torch.from_numpy(packed).to(device)[:, :, None] >> shifts  # [masked, bytes, 8]
    is_shut = (wide & 1).flatten(1)[:, :vocab] == 0
    own = scores[at].masked_fill_(is_shut, -torch.inf)
    is_empty = own.amax(1) == -torch.inf
    ends = [(index, end) for index, mask in enumerate(given) for end in mask.open_ends(vocab)]
    if ends:
        places, tokens = torch.tensor(ends, device=device).T
        own[places, tokens] = own[places, tokens].masked_fill_(is_empty[places], 0.0)
    scores[at] = own
