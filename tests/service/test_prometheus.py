"""A real Prometheus reads the metrics, fires and clears each alert once, and fills the dashboard.

tests/unit/test_deploy.py checks the files of deploy/ alone, tests/service/test_metrics.py the
formats for other scrapers. The rules' durations are seconds here (`prometheus.WINDOWS`).
"""

import contextlib
import itertools
import json
import subprocess
import threading
import time

import grpc
import pytest
import yaml

from tests.service.test_metrics import (
    LONG,
    WHERE,
    Scrape,
    a_missed_deadline,
    a_reader_that_never_reads,
    a_waiting_request,
    metered,
)
from tests.support.fake_server import BROKEN_STEP, HUNG_STEP, POISONED_ROW
from tests.support.prometheus import in_seconds, prometheus
from tests.support.server import ROOT
from tests.support.toolchains import need_programs
from tests.support.wire import Generation, generate, wait_idle, wait_until

pytestmark = pytest.mark.full

ALERTS_FILE = ROOT / "deploy" / "alerts.yaml"
FIRES_S = 90.0
KEY = "a-key-of-sixteen-characters"
# Thresholds that take a gigabyte or a hundred clients to exceed, and what replaces them here.
SMALLER = {"> 1e9": "> 1e6", "unread_calls > 100": "unread_calls > 1"}


def our_rules():
    """Return the rules of deploy/ with smaller thresholds, and durations in seconds."""
    text = ALERTS_FILE.read_text()
    for large, small in SMALLER.items():
        assert large in text
        text = text.replace(large, small)
    return in_seconds(yaml.safe_load(text))


NAMES = [rule["alert"] for rule in our_rules()["groups"][0]["rules"]]


@contextlib.contextmanager
def beside(server, folder):
    """Yield a Prometheus that scrapes the server."""
    target = WHERE.search(server.log)[1].removeprefix("http://").removesuffix("/metrics")
    with prometheus(folder, target, our_rules()) as running:
        yield running


# ---- causes: each yields a function that is called until the alert fires, or None


@contextlib.contextmanager
def failing_requests(server):
    yield lambda: generate(server.channel, prompt_ids=[POISONED_ROW], max_tokens=9)


@contextlib.contextmanager
def a_lost_model(server):
    assert generate(server.channel, max_tokens=2).error is not None
    yield None
    wait_until(lambda: generate(server.channel, max_tokens=2).error is None, 60, "another load")


@contextlib.contextmanager
def a_dead_worker(server):
    assert generate(server.channel, prompt_ids=[BROKEN_STEP], max_tokens=9).error is not None
    yield None


@contextlib.contextmanager
def slow_first_tokens(server):
    """Yield a request with a slow first token, after 640 fast first tokens."""
    for _ in range(40):
        assert generate(server.channel, prompt_ids=[1], max_tokens=1, n=16).error is None
    first = itertools.count(2)  # so that no prompt has a cached prefix

    def slow():
        prompt = [next(first)] + [1] * 3000
        assert generate(server.channel, prompt_ids=prompt, max_tokens=1).error is None

    yield slow


@contextlib.contextmanager
def a_step_that_hangs(server):
    with Generation(server.channel, prompt_ids=[HUNG_STEP], max_tokens=3) as call:
        yield None
        server.tell("release")
        assert call.finish().error is None


@contextlib.contextmanager
def refused_calls(server):
    with a_waiting_request(server):

        def refused():
            error = generate(server.channel, max_tokens=2).error
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        yield refused


@contextlib.contextmanager
def missed_deadlines(server):
    yield lambda: generate(server.channel, prompt_ids=[3], max_tokens=LONG, server_timeout=0.1)


@contextlib.contextmanager
def more_than_the_blocks_hold(server):
    ends = threading.Event()

    def ask(number):
        while not ends.is_set():
            generate(server.channel, prompt_ids=[number + 5], max_tokens=40, n=16)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield None
    finally:
        ends.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def unread_answers(server):
    with a_reader_that_never_reads(server), a_reader_that_never_reads(server):
        yield None


@contextlib.contextmanager
def more_memory(server):
    """Take more memory a day (of 30 s) after the first scrape."""
    time.sleep(35)
    server.tell("grow")
    yield None
    server.tell("shrink")


@contextlib.contextmanager
def cancels_in_slow_steps(server):
    def cancel():
        with Generation(server.channel, prompt_ids=[3], max_tokens=LONG):
            time.sleep(0.2)

    yield cancel


@contextlib.contextmanager
def calls_without_a_key(server):
    def call():
        for _ in range(5):
            error = generate(server.channel, max_tokens=1).error
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED

    yield call


SLOW = {"script": {"step_s": 0.02}, "runner": {"max_model_len": 4096}}
# By the name of an alert: its cause, the settings of its server, and alerts that may fire as well.
CAUSES = {
    "TrioletErrors": (failing_requests, {"may_log": "."}, set()),
    "TrioletModelDown": (
        a_lost_model,
        {"models": [{"name": "fake", "lazy": True, "fails": 1}], "may_log": "."},
        {"TrioletErrors"},
    ),
    "TrioletWorkersDie": (a_dead_worker, {"may_log": "."}, {"TrioletErrors", "TrioletModelDown"}),
    "TrioletSlow": (
        slow_first_tokens,
        SLOW | {"engine": {"max_num_seqs": 16, "max_num_batched_tokens": 64}},
        set(),
    ),
    "TrioletStepsStopped": (a_step_that_hangs, {}, set()),
    "TrioletRefuses": (refused_calls, {"engine": {"max_queued_requests": 1}}, set()),
    "TrioletDeadlines": (missed_deadlines, SLOW, set()),
    "TrioletPreempts": (
        more_than_the_blocks_hold,
        {
            "script": {"step_s": 0.005},
            "runner": {"num_blocks": 101, "max_model_len": 128},
        },
        set(),
    ),
    "TrioletUnreadCalls": (unread_answers, {"engine": {"stream_buffer": 400}}, set()),
    "TrioletMemoryGrows": (more_memory, {}, set()),
    "TrioletSlowRelease": (
        cancels_in_slow_steps,
        {"script": {"step_s": 2.0}},
        {"TrioletStepsStopped", "TrioletSlow"},
    ),
    "TrioletIntruders": (calls_without_a_key, {}, set()),
}


def test_every_alert_has_a_cause():
    assert list(CAUSES) == NAMES


@pytest.mark.parametrize("name", CAUSES)
def test_each_alert_fires_and_clears_once(name, tmp_path):
    cause, settings, others = CAUSES[name]
    if cause is calls_without_a_key:
        (tmp_path / "keys").write_text(f"alice {KEY}\n")
        settings = settings | {"server": {"api_key_file": str(tmp_path / "keys")}}
    with metered(**settings) as server, beside(server, tmp_path) as running:
        assert running.firing() == set()
        with cause(server) as again:

            def fires():
                if again is not None:
                    again()
                return name in running.firing()

            wait_until(fires, FIRES_S, name)
            assert running.firing() <= {name} | others
        wait_until(lambda: running.firing() == set(), FIRES_S, f"the end of {name}")
        assert running.num_fired(name) == 1


def test_prometheus_and_the_clients_parser_read_the_same_names_and_values(tmp_path):
    with metered() as server, beside(server, tmp_path) as running:
        assert generate(server.channel, max_tokens=20).error is None
        wait_idle(server.channel)
        wanted = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in Scrape(server).families.values()
            for sample in family.samples
        }

        def read():
            found = {}
            for series in running.query('{__name__=~"triolet.*"}'):
                labels = {k: v for k, v in series["metric"].items() if k not in ("instance", "job")}
                key = labels.pop("__name__"), tuple(sorted(labels.items()))
                found[key] = float(series["value"][1])
            return found

        wait_until(lambda: read() == wanted, 15, "a scrape after the request")


def test_promtool_takes_the_rules():
    need_programs("prometheus")
    subprocess.run(["promtool", "check", "rules", ALERTS_FILE], check=True)


def test_every_panel_of_the_dashboard_shows_something(tmp_path):
    """The panel of worker processes is left out, as this server has none."""
    board = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    shown = [
        one.replace("$__rate_interval", "20s").replace("$instance", ".*")
        for one in expressions
        if "worker_resident_bytes" not in one
    ]
    with metered(**SLOW) as server, beside(server, tmp_path) as running:

        def are_shown():
            with a_missed_deadline(server):
                assert generate(server.channel, max_tokens=20).error is None
            with Generation(server.channel, prompt_ids=[3], max_tokens=LONG) as call:
                call.read_deltas(2)
            return all(running.query(one) for one in shown)

        wait_until(are_shown, FIRES_S, "every panel")
