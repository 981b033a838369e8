"""The tokens that a constraint allows next, as bits, and their effect on logits.

Rule 1: a mask is applied last, after every edit and ban of the request. Rule 2: if no token
of a row remains and the mask allows the end of the sequence, the end is sampled, even if the
request bans it or asks for more tokens. A complete output could not end otherwise.
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
    """The tokens that may follow one sequence.

    ``words`` are bits; token 0 is the lowest bit of the first word. They are 0 until the mask is
    filled. ``ends`` are the end-of-sequence tokens of the grammar. ``field`` is the path of the
    proto field by which the client asked for the constraint. ``trouble`` is empty, or tells the
    client why the mask could not be filled, as the rest of a sentence that begins with "the
    constraint".
    """

    __slots__ = ("ends", "field", "trouble", "words")

    def __init__(self, num_words: int, ends: tuple[int, ...], field: str = "constraint") -> None:
        self.words: NDArray[np.int32] = np.zeros(num_words, np.int32)
        self.ends = ends
        self.field = field
        self.trouble = ""

    def bits(self, vocab: int) -> NDArray[np.uint8]:
        """Return 1 for each token that may follow and 0 for each other, [vocab]."""
        bits = np.unpackbits(self.words.view(np.uint8), bitorder="little", count=vocab)
        return bits

    def allows(self, token: int) -> bool:
        """Return whether the token may follow."""
        return bool(self.words[token >> 5] >> (token & 31) & 1)

    def apply(self, scores: Floats) -> None:
        """Apply the mask in place to one row of logits, [vocab] float32."""
        np.copyto(scores, -np.inf, where=self.bits(len(scores)) == 0)
        if scores.max() == -np.inf:
            scores[self.open_ends(len(scores))] = 0.0

    def open_ends(self, vocab: int) -> list[int]:
        """Return the end tokens that may follow now."""
        return [token for token in self.ends if token < vocab and self.allows(token)]


def apply_batch(scores: torch.Tensor, masks: Sequence[Mask | None]) -> None:
    """Apply each row's mask, as `Mask.apply` does, in place to [rows, vocab] float32."""
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return
    given = [mask for mask in masks if mask is not None]
    device, vocab = scores.device, scores.shape[1]
    at = torch.tensor(rows, device=device)
    packed = np.zeros((len(given), 4 * max(len(mask.words) for mask in given)), np.uint8)
    for index, mask in enumerate(given):  # each has at least the vocabulary's words
        packed[index, : mask.words.nbytes] = mask.words.view(np.uint8)
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
