"""The three positions of each token for M-RoPE, the rotary embeddings of the Qwen-VL models.

The three positions are time, row and column. For a token of a text, all three are equal. The tokens
of an image share the position of its first token as their time, and their rows and columns count
from there. After an image, the text's positions continue from its longer side, and not from the
number of its tokens.

Source: Qwen2-VL (arXiv 2409.12191); transformers 5.23, modeling_qwen2_vl.py, get_rope_index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.text.types import PromptImage

    Ints = np.ndarray[Any, np.dtype[np.int64]]


def positions_of(images: Sequence[PromptImage], start: int, count: int) -> Ints:
    """Return the time, row and column of the ``count`` tokens from ``start`` on, [3, count] int64.
    ``images`` are the sequence's, in the order of their positions."""
    tokens = np.arange(start, start + count, dtype=np.int64)
    positions, shift = np.tile(tokens, (3, 1)), 0
    for image in images:
        if image.start >= start + count:
            break
        content: Any = image.content
        rows, columns = content.grid
        own = slice(max(0, image.start - start), max(0, image.end - start))
        place = tokens[own] - image.start
        positions[:, own] = image.start + shift
        positions[1, own] += place // columns
        positions[2, own] += place % columns
        shift += max(rows, columns) - image.count
        positions[:, own.stop :] = tokens[own.stop :] + shift
    return positions
