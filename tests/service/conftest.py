"""A failed test shows what its servers logged; the demo model is loaded once for all tests."""

import pytest

from tests.support import server

TAIL_CHARS = 6000


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """Serve the story model by `triolet serve` on a Unix socket."""
    uds = tmp_path_factory.mktemp("demo") / "socket"
    with server.real("--served-model-name", "stories", uds=uds) as one:
        yield one


@pytest.fixture
def ask(capsys):
    """Return a function that runs a command and returns its exit code, output and errors."""
    from tests.service.test_cli_client import triolet

    def call(backend, *argv):
        code = triolet(backend, *argv)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        for number, one in enumerate(server.shown_if_failed):
            text = f"{one.out[-TAIL_CHARS:]}\n----\n{one.log[-TAIL_CHARS:]}"
            report.sections.append((f"server {number}, {one.process.returncode}", text))
    return report


def pytest_runtest_logfinish(nodeid, location):
    for one in list(server.shown_if_failed):
        if one.is_over:
            one.forget()
