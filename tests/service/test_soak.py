"""A server keeps no memory of any kind of client, and answers others as before.

`python -m tools.lab.soak` runs the same for any time.
"""

import pytest

from tools.lab.soak import soak
from tools.lab.soak_clients import KINDS

WARM_UP_MIB = 12.0


@pytest.mark.slow
def test_clients_of_every_kind_leave_nothing_behind():
    """One client's output stays the same, byte for byte, beside all others.

    A server's memory grows by 7 MiB over its first thousand requests. Longer runs check the memory
    after that; this one notices if each request leaves 64 KiB behind.
    """
    report = soak(seconds=6, every_s=1, seed=1)
    assert not report.wrong
    assert not report.left_over
    assert report.grown_mib < WARM_UP_MIB
    assert report.num_controls > 0
    assert report.done.keys() == KINDS.keys()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_thousand_cancels_at_random_instants_leave_nothing_behind():
    report = soak(cancels=10_000, every_s=1, seed=2)
    assert not report.failures
    assert report.done == {"cancel": 10_000}
    assert report.num_controls > 0
