"""The call paths of a request and of a token through the files are short, and engine/README.md
shows the path of a token."""

import subprocess
import sys

import pytest

from tools.count_hops import SHOWN, Hop, Way, describe
from tools.rooms import ROOT

HOPS_MAX = 20
FILES_MAX = 11  # one is that of a stream, as an EmbedStream gives slots back in its own way
CHANGES_IN_MAX = 62  # two are for the role of a caller, which every call has
SUPERVISOR = "engine/requests/supervisor.py"
SUPERVISOR_MAX = 5


def output_of(tool):
    """Return a tool's output. It has a process of its own, as `sys.setprofile` slows it down."""
    command = [sys.executable, "-m", tool]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n")


@pytest.fixture(scope="module")
def shown():
    """Return the path of a token, as the page shows it."""
    return output_of("tools.count_hops")


def test_the_way_of_a_request_to_its_first_plan_is_short():
    way = output_of("tools.count_way_in")
    *files, totals = way.splitlines()
    assert 30 < int(totals.split()[0]) <= CHANGES_IN_MAX, way
    assert 0 < sum(SUPERVISOR in line for line in files) <= SUPERVISOR_MAX, way


def test_the_way_of_a_token_is_short(shown):
    [totals] = [line for line in shown.splitlines() if line.endswith(" files")]
    hops, _, files, _ = totals.replace(",", "").split()
    assert 5 < int(hops) <= HOPS_MAX, shown
    assert 5 < int(files) <= FILES_MAX, shown


def test_the_readme_shows_the_way_of_a_token(shown):
    page = SHOWN.page.read_text()
    assert SHOWN.embed(page, shown) == page, "run python -m tools.count_hops --write"


def test_hops_are_described():
    way = Way((Hop("a.py", "b.py", "f", 3), Hop("b.py", "c.py", "C.g", 4), Hop("", "b.py", "h", 1)))
    lines = describe(way).splitlines()
    assert lines[0] == "   a.py"
    assert lines[1:4] == [
        " 1     → b.py f",
        " 2       → c.py C.g",
        " 3 → (another task) b.py h",
    ]
    assert lines[4] == "3 hops, 3 files"
