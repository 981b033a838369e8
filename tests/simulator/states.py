"""A text model with recurrent layers, whose state slots are few.

Generators apart from the world's draw its states, so that worlds without states stay the same.
"""

import random

FAULT = "states"
SHARE = 0.12  # of worlds


def is_drawn(seed: int) -> bool:
    """Return whether the text model of the world of this seed has states."""
    return random.Random(f"states {seed}").random() < SHARE


def num_slots(seed: int, max_num_seqs: int) -> int:
    """Return the text model's number of state slots: one per running sequence, and up to 4 more."""
    return max_num_seqs + random.Random(f"slots {seed}").choice([0, 0, 1, 4])
