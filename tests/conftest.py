"""Registers the Hypothesis profiles (tests/README.md), and chooses the cases that the quick run
has."""

import gc
import logging
import os
import signal
import sys
from collections import defaultdict

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before any test imports torch (D13)

import pytest
from hypothesis import HealthCheck, Phase, settings

from engine.gc_tuning import collect_seldom
from tests.support.workers import Workers

collect_seldom()  # as servers do; else garbage collections take a tenth of the tests' time

# Keep bytecode, as tools/test does: without it each server and worker process compiles torch,
# transformers and diffusers, which takes 12 s of CPU time, and tests start many of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell's background job ignores Ctrl-C, and so would the processes that tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}
settings.register_profile("quick", max_examples=15, **_COMMON)
settings.register_profile("dev", max_examples=50, **_COMMON)
settings.register_profile("ci", max_examples=1000, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile(  # for tools/mutate.py: the same examples every time, not shrunk
    "mutate", max_examples=50, derandomize=True, phases=[Phase.generate], **_COMMON
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# How many cases of one test the quick run has, by folder. Of all other folders it has every case.
QUICK_CASES = {"conformance": 1, "interop": 1, "service": 1, "simulation": 2}


def pytest_addoption(parser):
    parser.addoption("--workers", type=int, default=0, help="run the tests in N forked processes")
    parser.addoption("--write-seconds", type=float, help="write how long files took that took this")


def pytest_configure(config):
    if config.option.workers and not config.option.collectonly:
        config.pluginmanager.register(Workers(config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the cases of a test that --all leaves out (the mark `cases`) as `full`, and those that
    the quick run leaves out as `slow`."""
    tests = defaultdict(list)
    for item in items:
        if not any(item.get_closest_marker(mark) for mark in ("alone", "full")):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        mark = cases[0].get_closest_marker("cases")
        kept = leave_out(cases, *mark.args, "full") if mark else cases
        quick = [case for case in kept if not case.get_closest_marker("slow")]
        mark = cases[0].get_closest_marker("quick")
        most = QUICK_CASES.get(name.split("/")[1], len(quick))
        leave_out(quick, mark.args[0] if mark else most, "slow")


def leave_out(cases, most, mark):
    """Keep at most ``most`` cases of a test, spread evenly, and mark the others. Return the kept
    cases."""
    if len(cases) <= most:
        return cases
    kept = {number * (len(cases) - 1) // max(1, most - 1) for number in range(most)}
    for number, case in enumerate(cases):
        if number not in kept:
            case.add_marker(mark)
    return [cases[number] for number in sorted(kept)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Take away the log handlers that a command has set. They write to the test's standard error,
    which is closed afterwards, so that later tests would log errors."""
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        return (yield)
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


def pytest_collection_finish(session):
    """Freeze the imported objects, so that garbage collections do not walk them.

    Torch and transformers alone are a million objects, and many tests collect on purpose.
    """
    gc.collect()
    gc.freeze()
