"""Print the parity suite's table of skipped positions when the run ends, if the suite ran."""

import sys


def pytest_terminal_summary(terminalreporter):
    parity = sys.modules.get("tests.support.parity")
    if parity is not None and parity.TALLIES:
        terminalreporter.section("parity with transformers: positions skipped as near-ties")
        for line in parity.skipped_table():
            terminalreporter.write_line(line)
