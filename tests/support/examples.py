"""How many examples Hypothesis draws."""

import os

IS_QUICK = os.environ.get("HYPOTHESIS_PROFILE") == "quick"


def examples(count):
    """Return ``count``; in the quick run a sixth of it."""
    return count // 6 if IS_QUICK else count
