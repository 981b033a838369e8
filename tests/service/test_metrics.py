"""Every metric changes with what it measures, parses as Prometheus does, and is in the docs."""

import contextlib
import re
import signal
import time
import urllib.request
from pathlib import Path

import grpc
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from engine.core.text.drafting.draft_counts import DRAFTERS
from grpc_service.app.metrics import METRICS, PREFIX
from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.fake_server import BROKEN_STEP, HUNG_STEP
from tests.support.proxy import proxy
from tests.support.server import ROOT, fake, fake_process
from tests.support.wire import (
    SMALL_WINDOW,
    Generation,
    connect,
    generate,
    reason,
    stats,
    wait_idle,
    wait_serving,
    wait_until,
)

SOON_S = 15.0
LONG = 2000
WHERE = re.compile(r"metrics are served on (http://\S+)")
NAMES = {metric.name for metric in METRICS}
# Accept headers of Prometheus, by its version and its settings of protocols and metric names.
# Source: prometheus, scrape/scrape.go (acceptHeader) and config/config.go.
PROTOBUF = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
)
OPEN = "application/openmetrics-text;version="
ACCEPTED = {
    "none": None,
    "anything": "*/*",
    "2.5": f"{OPEN}0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "2.34": f"{OPEN}1.0.0,{OPEN}0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "2.49": f"{OPEN}1.0.0;q=0.5,{OPEN}0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "2.49, native histograms": (
        f"{PROTOBUF};q=0.5,{OPEN}1.0.0;q=0.4,{OPEN}0.0.1;q=0.3,text/plain;version=0.0.4;q=0.2,"
        "*/*;q=0.1"
    ),
}
for escaping in ("allow-utf-8", "underscores", "dots", "values"):
    text = f"text/plain;version=1.0.0;escaping={escaping};q=0.3,text/plain;version=0.0.4;q=0.2"
    ACCEPTED |= {
        f"3, {escaping}": (
            f"{OPEN}1.0.0;escaping={escaping};q=0.5,{OPEN}0.0.1;q=0.4,{text},*/*;q=0.1"
        ),
        f"3, {escaping}, text alone": f"{text},*/*;q=0.1",
    }


class Scrape:
    """One answer to a scraper: the samples of each family, by its name without prefix. The answer
    is parsed in the format that its Content-Type names."""

    def __init__(self, server, accept=None):
        url = WHERE.search(server.log)[1]
        headers = {} if accept is None else {"Accept": accept}
        asked = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(asked, timeout=SOON_S) as answer:
            self.text = answer.read().decode()
            is_open = "openmetrics" in answer.headers["Content-Type"]
        parse = (
            openmetrics.text_string_to_metric_families
            if is_open
            else text_string_to_metric_families
        )
        self.families = {
            family.name.removeprefix(PREFIX): family
            for family in parse(self.text)
            if family.name.startswith(PREFIX)
        }

    def series(self):
        """Return the samples of each family, by its name and its kind."""
        return {
            (name, family.type): sorted(
                (one.name, tuple(sorted(one.labels.items())), one.value) for one in family.samples
            )
            for name, family in self.families.items()
        }

    def total(self, name, **labels):
        """Return the sum of the samples; for a histogram, the number of observations."""
        family = self.families[name.removesuffix("_total")]
        wanted = f"{PREFIX}{name}" + ("_count" if family.type == "histogram" else "")
        return sum(
            sample.value
            for sample in family.samples
            if sample.name == wanted and labels.items() <= sample.labels.items()
        )


@contextlib.contextmanager
def metered(**settings):
    """Yield a server of fake models with metrics on any free port."""
    settings["server"] = {"metrics_port": 0} | settings.get("server", {})
    with fake(**settings) as server:
        wait_until(lambda: WHERE.search(server.log), SOON_S)
        wait_serving(server.channel)
        yield server


def control_of(server):
    """Return the stub of the service Control."""
    return stubs.ControlStub(server.channel)


# ---- causes: each changes metrics of a server, until its block ends --------------------------


@contextlib.contextmanager
def a_finished_request(server):
    assert generate(server.channel, prompt_ids=range(1, 40), max_tokens=5).error is None
    wait_idle(server.channel)
    yield


@contextlib.contextmanager
def a_running_request(server):
    with Generation(server.channel, prompt_ids=range(1, 40), max_tokens=LONG) as call:
        call.read_deltas(2)
        yield


@contextlib.contextmanager
def a_running_request_of_an_adapter(server):
    with Generation(
        server.channel, model="fake:sql", prompt_ids=range(1, 40), max_tokens=LONG
    ) as call:
        call.read_deltas(2)
        yield


@contextlib.contextmanager
def a_finished_request_of_an_adapter(server):
    heard = generate(server.channel, model="fake:sql", prompt_ids=[1, 2], max_tokens=3)
    assert heard.error is None
    yield


@contextlib.contextmanager
def a_waiting_request(server):
    control_of(server).Pause(pb.PauseRequest(mode="PAUSE_MODE_KEEP"), timeout=SOON_S)
    with Generation(server.channel, max_tokens=2):
        wait_until(lambda: stats(server.channel).waiting == 1, SOON_S)
        yield


@contextlib.contextmanager
def a_reader_that_stops(server):
    with (
        connect(server.address, *SMALL_WINDOW) as channel,
        Generation(channel, prompt_ids=[42], max_tokens=LONG) as call,
    ):
        call.read_deltas(1)
        wait_until(lambda: stats(server.channel).parked == 1, SOON_S, "parked")
        yield


@contextlib.contextmanager
def a_reader_that_stops_and_goes_on(server):
    with a_reader_that_stops_then_reads(server):
        yield


@contextlib.contextmanager
def a_reader_that_stops_then_reads(server):
    with (
        connect(server.address, *SMALL_WINDOW) as channel,
        Generation(channel, prompt_ids=[42], max_tokens=LONG) as call,
    ):
        call.read_deltas(1)
        wait_until(lambda: stats(server.channel).parked == 1, SOON_S, "parked")
        assert call.finish().error is None
    wait_idle(server.channel)
    yield


@contextlib.contextmanager
def a_reader_that_never_reads(server):
    with (
        connect(server.address, *SMALL_WINDOW) as channel,
        Generation(channel, prompt_ids=[42], max_tokens=400, output={"logprobs": 3}),
    ):
        wait_until(lambda: stats(server.channel).unread_calls == 1, SOON_S, "an unread call")
        yield


@contextlib.contextmanager
def a_connection_that_is_lost(server):
    with (
        proxy(server.address) as line,
        connect(line.address) as channel,
        Generation(channel, prompt_ids=[1], max_tokens=LONG, resume_window={"seconds": 60}) as cut,
    ):
        cut.read_deltas(1)
        line.cut()
        wait_until(lambda: stats(server.channel).detached == 1, SOON_S, "the loss")
        yield


@contextlib.contextmanager
def the_same_prompt_again(server):
    for _ in range(2):
        assert generate(server.channel, prompt_ids=range(1, 100), max_tokens=2).error is None
    yield


@contextlib.contextmanager
def right_drafts(server):
    asked = {"prompt_ids": range(1, 40), "max_tokens": 60}
    usage = generate(server.channel, **asked).finished().usage
    assert usage.drafted_tokens == usage.accepted_tokens > 20
    without = generate(server.channel, **asked, sampling={"speculation": False}).finished().usage
    assert (without.completion_tokens, without.drafted_tokens) == (60, 0)
    yield


@contextlib.contextmanager
def more_than_the_blocks_hold(server):
    with contextlib.ExitStack() as stack:
        calls = [
            stack.enter_context(Generation(server.channel, prompt_ids=[n], max_tokens=100))
            for n in (1, 2, 3)
        ]
        for call in calls:
            assert call.finish().error is None
    yield


@contextlib.contextmanager
def an_urgent_arrival(server):
    def is_discarded():
        assert generate(server.channel, max_tokens=2, priority=0).error is None
        return Scrape(server).total("plan_discarded_total")

    with Generation(server.channel, prompt_ids=[3], max_tokens=LONG, priority=9) as call:
        call.read_deltas(2)
        wait_until(is_discarded, SOON_S, "a plan discarded")
        yield


@contextlib.contextmanager
def a_cancel(server):
    with Generation(server.channel, prompt_ids=[3], max_tokens=LONG) as call:
        call.read_deltas(2)
    wait_idle(server.channel)
    yield


@contextlib.contextmanager
def a_missed_deadline(server):
    error = generate(server.channel, prompt_ids=[3], max_tokens=LONG, server_timeout=0.5).error
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    yield


@contextlib.contextmanager
def a_drain(server):
    with Generation(server.channel, prompt_ids=[3], max_tokens=LONG) as call:
        call.read_deltas(2)
        drained = control_of(server).Drain.future(pb.DrainRequest())
        wait_until(lambda: Scrape(server).total("drain_remaining_requests"), SOON_S)
        yield
    drained.result(timeout=SOON_S)


@contextlib.contextmanager
def the_first_use_of_a_lazy_model(server):
    assert generate(server.channel, max_tokens=2).error is None
    yield


@contextlib.contextmanager
def the_first_use_of_a_model_with_a_process(server):
    with the_first_use_of_a_lazy_model(server):
        assert Scrape(server).total("worker_resident_bytes") > 10_000_000
        yield


@contextlib.contextmanager
def the_failure_of_a_lazy_model(server):
    assert reason(generate(server.channel, max_tokens=2).error) == "SPAWN_FAILED"
    yield


@contextlib.contextmanager
def a_worker_that_dies(server):
    assert reason(generate(server.channel, prompt_ids=[BROKEN_STEP], max_tokens=9).error)
    yield


@contextlib.contextmanager
def a_step_that_hangs(server):
    with Generation(server.channel, prompt_ids=[HUNG_STEP], max_tokens=3) as call:
        wait_until(lambda: Scrape(server).total("replicas_degraded"), SOON_S, "it counts as hung")
        yield
        server.tell("release")
        assert call.finish().error is None


SLOW = {"script": {"step_s": 0.02}, "runner": {"max_model_len": 4096}}
WITH_STATES = {"num_states": 64}
WITH_ADAPTER = {
    "models": [{"name": "fake", "adapters": [{"name": "sql", "directory": "/sql"}]}],
    "script": {"step_s": 0.02, "adapters": {"/sql": "sql"}},
    "runner": {"max_model_len": 4096},
}
# The name of a cause: the metrics that it changes, and the server that it needs.
CAUSES = {
    a_finished_request: (
        {
            *("prefix_cache_queries_total", "prompt_tokens_total", "generation_tokens_total"),
            *("steps_total", "time_to_first_token_seconds", "inter_token_latency_seconds"),
            *("e2e_request_latency_seconds", "request_queue_time_seconds"),
            *("request_prefill_time_seconds", "request_decode_time_seconds"),
            *("request_prompt_tokens", "request_generation_tokens", "step_seconds", "step_rows"),
            *("step_gap_seconds", "loop_seconds_total"),
            *("request_success_total", "requests_total", "rpcs_total"),
            *("holder_requests_total", "holder_tokens_total", "holder_step_seconds_total"),
        },
        {},
    ),
    a_running_request: (
        {"num_requests_running", "kv_cache_usage_perc", "kv_blocks_free", "state_slots_free"},
        SLOW | {"runner": SLOW["runner"] | WITH_STATES},
    ),
    a_running_request_of_an_adapter: ({"adapter_requests_running"}, WITH_ADAPTER),
    a_finished_request_of_an_adapter: (
        {"adapter_requests_total", "adapter_generation_tokens_total"},
        WITH_ADAPTER,
    ),
    a_waiting_request: ({"num_requests_waiting", "num_requests_waiting_peak"}, {}),
    a_reader_that_stops: ({"num_requests_parked"}, {"engine": {"stream_buffer": 16}}),
    a_reader_that_stops_and_goes_on: ({"parked_seconds"}, {"engine": {"stream_buffer": 16}}),
    a_connection_that_is_lost: ({"detached"}, {"script": {"step_s": 0.01}}),
    a_reader_that_never_reads: ({"unread_calls"}, {"engine": {"stream_buffer": 400}}),
    the_same_prompt_again: ({"prefix_cache_hits_total"}, {}),
    right_drafts: (
        {
            *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
            *("spec_decode_num_accepted_tokens_total",),
            *("spec_decode_num_accepted_tokens_per_pos_total",),
        },
        {"script": {"acceptance": 1.0}},
    ),
    more_than_the_blocks_hold: (
        {"num_preemptions_total"},
        {"runner": {"num_blocks": 9, "max_model_len": 128}},
    ),
    an_urgent_arrival: ({"plan_discarded_total"}, SLOW),
    a_cancel: ({"cancel_to_free_seconds"}, SLOW),
    a_missed_deadline: ({"deadline_missed_total"}, SLOW),
    a_drain: ({"drain_remaining_requests"}, SLOW),
    the_first_use_of_a_lazy_model: (
        {"kv_blocks", "state_slots", "memory_reserved_bytes"},
        {"models": [{"name": "fake", "lazy": True}], "runner": WITH_STATES},
    ),
    the_first_use_of_a_model_with_a_process: (
        {"worker_resident_bytes"},
        {"models": [{"name": "fake", "lazy": True, "runner": "process"}]},
    ),
    a_worker_that_dies: ({"replicas_degraded", "worker_deaths_total"}, {"may_log": "."}),
    a_step_that_hangs: (
        {"replicas_degraded"},
        {"engine": {"step_timeout_s": 0.3}, "may_log": "has been running"},
    ),
    the_failure_of_a_lazy_model: (
        {"model_ready"},
        {"models": [{"name": "fake", "lazy": True, "fails": 1}], "may_log": "fake|Traceback"},
    ),
}
FIXED = {"memory_limit_bytes"}  # only the configuration changes it
# Metrics without samples until an adapter, a worker process, a cancel or a missed deadline.
OF_OTHER_CAUSES = {
    *("adapter_requests_running", "adapter_requests_total", "adapter_generation_tokens_total"),
    *("worker_resident_bytes", "cancel_to_free_seconds", "deadline_missed_total"),
}


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
def test_each_metric_changes_with_its_cause(cause):
    names, settings = CAUSES[cause]
    with metered(**settings) as server:
        before = Scrape(server)
        with cause(server):
            after = Scrape(server)
            assert {name for name in names if before.total(name) == after.total(name)} == set()


def test_every_metric_has_a_cause():
    caused = set().union(*(names for names, _ in CAUSES.values()))
    assert caused | FIXED == NAMES


def test_the_memory_limit_is_the_configurations():
    with metered(engine={"memory_limit": 123_456_789}) as server:
        assert Scrape(server).total("memory_limit_bytes") == 123_456_789


def test_the_figures_are_right():
    """For two requests of known shape, every count and every label is right."""
    with metered(script={"step_s": 0.01}, runner={"max_model_len": 4096}) as server:
        assert generate(server.channel, prompt_ids=range(1, 11), max_tokens=5).error is None
        assert generate(server.channel, prompt_ids=[7] * 20, max_tokens=3, n=2).error is None
        with Generation(server.channel, prompt_ids=[3], max_tokens=LONG) as call:
            call.read_deltas(2)
        wait_idle(server.channel)
        found = Scrape(server)
    of_fake = {"model_name": "fake", "replica": "0"}
    assert found.total("prompt_tokens_total", **of_fake) == 10 + 20 + 1
    assert found.total("time_to_first_token_seconds", **of_fake) == 1 + 2 + 1
    assert found.total("request_success_total", finished_reason="length", **of_fake) == 2
    assert found.total("request_success_total", finished_reason="cancelled") == 1
    assert found.total("requests_total", end="finished") == 2
    assert found.total("requests_total", end="cancelled") == 1
    assert found.total("e2e_request_latency_seconds") == 3
    assert found.total("request_generation_tokens") == 4  # one observation for each choice
    tokens = found.total("generation_tokens_total")
    assert found.total("inter_token_latency_seconds") == tokens - 4
    assert found.total("cancel_to_free_seconds", phase="decode") == 1
    assert found.total("rpcs_total", method="triolet.v1.Inference/Generate", code="OK") == 2
    assert found.total("rpcs_total", method="triolet.v1.Inference/Generate", code="CANCELLED") == 1
    gaps = found.families["inter_token_latency_seconds"].samples
    [total] = [one.value for one in gaps if one.name.endswith("_sum")]
    assert 0.009 * (tokens - 4) < total < 0.5 * (tokens - 4)


def test_drafts_are_counted_by_drafter_and_their_sums_are_the_totals():
    names = [f"spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens")]
    names += [
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
    ]
    with metered(script={"acceptance": 0.9}) as server:
        usage = generate(server.channel, prompt_ids=range(1, 40), max_tokens=60).finished().usage
        found = Scrape(server)
    drafts, drafted, *accepted = [found.total(name) for name in names]
    assert (drafted, *accepted) == (usage.drafted_tokens, *[usage.accepted_tokens] * 2)
    assert 0 < drafts < drafted
    for name in names:
        by_drafter = {one: found.total(name, drafter=one) for one in DRAFTERS}
        assert by_drafter["lookup"] == found.total(name), name
        labels = {sample.labels["drafter"] for sample in found.families[name[:-6]].samples}
        assert labels == {*DRAFTERS}, "each is there from the start, so that rates are right"


def test_buckets_grow_and_end_with_the_count():
    with metered() as server:
        assert generate(server.channel, max_tokens=20).error is None
        found = Scrape(server)
    for name, family in found.families.items():
        if family.type != "histogram" or not found.total(name):
            continue
        counts = [one.value for one in family.samples if one.name.endswith("_bucket")]
        assert counts == sorted(counts), name
        assert counts[-1] == found.total(name), name


def test_no_client_can_choose_a_label():
    with metered() as server:
        secret = "made-up-by-a-client"
        assert generate(server.channel, model=secret).error is not None
        assert generate(server.channel, request_id=secret, max_tokens=2).error is None
        unknown = server.channel.unary_unary(f"/triolet.v1.Inference/{secret}")
        with pytest.raises(grpc.RpcError):
            unknown(b"", timeout=SOON_S)
        assert secret not in Scrape(server).text


def test_every_metric_is_explained_in_one_line():
    page = (ROOT / "docs" / "operations.md").read_text()
    rows = dict(re.findall(r"^\| `triolet:(\w+)` \| (.+) \|$", page, re.MULTILINE))
    assert set(rows) == NAMES
    assert all(rows.values())


def test_every_scraper_reads_the_same_names_whatever_it_accepts():
    """A metric's TYPE and its samples have one name, and the alerts and the dashboard have it."""
    with metered() as server:
        assert generate(server.channel, max_tokens=2).error is None
        wait_idle(server.channel)
        read = {who: Scrape(server, accept).series() for who, accept in ACCEPTED.items()}
    wanted = {(metric.name.removesuffix("_total"), metric.kind) for metric in METRICS}
    for who, series in read.items():
        assert set(series) == wanted, who
        assert [key for key in series if series[key] != read["none"][key]] == [], who
    without = {name for (name, _), samples in read["none"].items() if not samples}
    assert without == {name.removesuffix("_total") for name in OF_OTHER_CAUSES}


def test_two_servers_cannot_have_one_port():
    with metered() as server:
        port = WHERE.search(server.log)[1].split(":")[-1].split("/")[0]
        with fake_process(server={"metrics_port": int(port)}, is_command=True) as second:
            assert second.wait() == 1
            assert "choose another --metrics-port or --metrics-host" in "".join(second.sentences())


# ---- the same snapshot elsewhere -------------------------------------------------------------


def test_watch_stats_sends_at_once_and_again():
    with fake() as server:
        wait_serving(server.channel)
        watch = control_of(server).WatchStats(pb.WatchStatsRequest(), timeout=SOON_S)
        assert next(watch).totals.requests_total.finished == 0
        assert generate(server.channel, max_tokens=2).error is None
        started = time.monotonic()
        assert next(watch).totals.requests_total.finished == 1
        assert time.monotonic() - started < 5
        watch.cancel()
        assert server.stop() == 0


def test_a_watcher_that_does_not_read_delays_nobody():
    with fake() as server, connect(server.address, *SMALL_WINDOW) as other:
        wait_serving(server.channel)
        watch = stubs.ControlStub(other).WatchStats(pb.WatchStatsRequest())
        next(watch)
        time.sleep(1.5)
        assert generate(server.channel, max_tokens=2).error is None
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 5


def test_usr1_logs_the_figures_for_a_person():
    with fake() as server:
        wait_serving(server.channel)
        assert generate(server.channel, max_tokens=2).error is None
        server.signal(signal.SIGUSR1)
        wait_until(lambda: "fake/0 READY: 0 running" in server.log, SOON_S)
        assert "requests  1 finished, 0 cancelled" in server.log


def test_nothing_of_prometheus_is_loaded_without_a_port():
    source = (Path(ROOT) / "grpc_service" / "app" / "metrics.py").read_text()
    assert not re.search(r"^(from|import) prometheus", source, re.MULTILINE)
