"""Prints the parity suite's table of skipped positions when the run ends, if the suite ran, and has
the fixtures of several suites."""

import sys

import pytest


def pytest_terminal_summary(terminalreporter):
    parity = sys.modules.get("tests.support.parity")
    if parity is not None and parity.TALLIES:
        terminalreporter.section("parity with transformers: positions skipped as near-ties")
        for line in parity.skipped_table():
            terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Yield the tiny models."""
    from tests.support.model_zoo import Zoo

    zoo = Zoo(tmp_path_factory.mktemp("zoo"))
    yield zoo
    zoo.close()


@pytest.fixture
def scales_in_halves(monkeypatch):
    """Have small weights expanded with scales and offsets in half precision, as kernels take
    them."""
    from engine.worker.small_weights import SmallWeight

    expand = SmallWeight.expand
    monkeypatch.setattr(SmallWeight, "expand", lambda self: expand(self.in_halves()))
