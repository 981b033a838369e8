"""A server under everything that clients do holds nothing of it afterwards, and tells others only
what it told them before. For as long as one likes: `python -m tools.soak`."""

from __future__ import annotations

import pytest

from tools.soak import soak
from tools.soak_clients import KINDS


def test_clients_of_every_kind_leave_nothing_behind():
    """Its memory is looked at in the longer ones: a server's first thousand requests warm it up."""
    report = soak(seconds=6, every_s=1, seed=1)
    assert not report.wrong
    assert not report.left_over
    assert report.num_controls > 0
    assert report.done.keys() == KINDS.keys()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_thousand_cancels_at_random_instants_leave_nothing_behind():
    report = soak(cancels=10_000, every_s=1, seed=2)
    assert not report.failures
    assert report.done == {"cancel": 10_000}
    assert report.num_controls > 0
