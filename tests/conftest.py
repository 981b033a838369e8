"""Hypothesis profiles: `dev` for a person, `ci` derandomised and longer, `mutate` for
`tools/mutate.py` (HYPOTHESIS_PROFILE)."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before any test imports torch (D13)

from hypothesis import HealthCheck, Phase, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=50, **_COMMON)
settings.register_profile("ci", max_examples=1000, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile(  # for tools/mutate.py: the same every time, and no shrinking
    "mutate", max_examples=50, derandomize=True, phases=[Phase.generate], **_COMMON
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
