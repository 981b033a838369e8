"""Hypothesis profiles: `dev` for a person, `ci` derandomised and longer, `mutate` for
`tools/mutate.py` (HYPOTHESIS_PROFILE)."""

import gc
import os
import signal

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before any test imports torch (D13)

from hypothesis import HealthCheck, Phase, settings

# A shell's background job ignores Ctrl-C, and so would the processes that tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=50, **_COMMON)
settings.register_profile("ci", max_examples=1000, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile(  # for tools/mutate.py: the same every time, and no shrinking
    "mutate", max_examples=50, derandomize=True, phases=[Phase.generate], **_COMMON
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_collection_finish(session):
    """Take what the imports made out of the garbage collector's sight.

    Every full collection would walk it: torch and transformers alone are a million objects, and
    many tests collect on purpose.
    """
    gc.collect()
    gc.freeze()
