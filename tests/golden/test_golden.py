"""The scheduler's decisions, in text files: every script of commands prints what it printed before.

`pytest tests/golden --rewrite` writes the new output. `tests.support.golden` describes it.
"""

from pathlib import Path

import pytest

from tests.support.golden import parse, run_script

SCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_prints_what_it_did(path, request):
    text = path.read_text()
    printed = run_script(text)
    if request.config.getoption("--rewrite", default=False):
        path.write_text(printed)
        return
    assert printed.splitlines() == text.splitlines()


def test_a_changed_line_is_noticed():
    text = SCRIPTS[0].read_text()
    assert run_script(text.replace("  admitted", "  dropped")) == text


def test_a_case_without_its_line_is_refused():
    with pytest.raises(ValueError, match="no ----"):
        parse("step\n\nstep\n----\nok\n")
