"""A real Prometheus beside a server: it scrapes, evaluates our rules, and answers queries."""

import contextlib
import json
import re
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from itertools import pairwise

import yaml

from tests.support.toolchains import need_programs
from tests.support.wire import wait_until

INTERVAL_S = 0.5  # seconds between two scrapes, and between two evaluations
START_S = 20.0
# The durations that replace those of our rules. Each is long enough for several scrapes; that for a
# day is longer than what a test does before it causes its alert.
WINDOWS = {"1m": "4s", "2m": "4s", "5m": "5s", "10m": "5s", "15m": "5s", "1h": "20s", "1d": "30s"}
FOR = "1s"


def in_seconds(rules):
    """Return our rules with short durations."""
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["expr"] = re.sub(r"\b\d+[smhd]\b", lambda found: WINDOWS[found[0]], rule["expr"])
            if "for" in rule:
                rule["for"] = FOR
    return rules


class Prometheus:
    """A Prometheus that runs; ``url`` is its address."""

    def __init__(self, url):
        self.url = url

    def ask(self, path, **parameters):
        """Return the data of an answer of its HTTP API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        return told["data"]

    def query(self, expression):
        """Return the series of an instant query."""
        return self.ask("query", query=expression)["result"]

    def has_scraped(self):
        """Return whether its scrapes succeed."""
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            return [one["value"][1] for one in self.query("up")] == ["1"]
        return False

    def firing(self):
        """Return the names of the alerts that fire."""
        alerts = self.ask("alerts")["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    def num_fired(self, name):
        """Return how often the alert began to fire, by the label set that did most often."""
        found = self.query(f'ALERTS{{alertname="{name}", alertstate="firing"}}[10m]')
        times = [[at for at, _ in series["values"]] for series in found]
        return max(
            1 + sum(after - before > 3 * INTERVAL_S for before, after in pairwise(own))
            for own in times
        )


@contextlib.contextmanager
def prometheus(folder, target, rules):
    """Yield a Prometheus that scrapes ``target`` (HOST:PORT) and evaluates ``rules``, once its
    first scrape has succeeded."""
    need_programs("prometheus")
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    interval = f"{INTERVAL_S * 1000:.0f}ms"
    config = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": [
            {"job_name": "triolet", "static_configs": [{"targets": [target]}]},
        ],
    }
    config["global"]["scrape_timeout"] = interval
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    subprocess.run(["promtool", "check", "config", folder / "prometheus.yml"], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        *("prometheus", f"--config.file={folder / 'prometheus.yml'}"),
        *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={where}"),
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            running = Prometheus(f"http://{where}")
            wait_until(running.has_scraped, START_S, "the first scrape")
            yield running
        finally:
            process.kill()
