"""Fleets behind Ray Serve, on a Ray cluster of their own on this machine.

Ray is installed into a virtual environment in the user's cache, which also has all packages of the
running interpreter. If it cannot be installed, the test fails.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.environments import virtual_environment
from tests.support.gateway import free_ports
from tests.support.programs import ROOT
from tests.support.wire import connect, wait_until

VERSION = "2.60.0"
INSTALL_TIMEOUT_S = 280
READY_LIMIT_S = 180
END_LIMIT_S = 120
STARTED = "Ray runtime started"
STARTS = 4  # on a busy machine, Ray's own limit of 30 s for its start may not suffice
INGRESS = "grpc_service.ray.ingress.add_inference"


def need_ray():
    """Return the interpreter with Ray; make its environment unless it is there."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [wanted] = extras["optional-dependencies"]["ray"]
    pinned = ["-c", ROOT / "constraints.txt", f"ray=={VERSION}", wanted]
    venv = virtual_environment(
        f"ray-{VERSION}", pinned, timeout_s=INSTALL_TIMEOUT_S, sees_ours=True
    )
    return venv / "bin" / "python"


def serve_config(port, import_path, args, **deployment):
    """Return a Serve config file's content, of one application."""
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"port": 0},
        "grpc_options": {"port": port, "grpc_servicer_functions": [INGRESS]},
        "applications": [
            {
                "name": "triolet",
                "import_path": import_path,
                "args": args,
                "deployments": [
                    {"name": "Inference", "ray_actor_options": {"num_cpus": 0.5}, **deployment}
                ],
            }
        ],
    }


class Fleet:
    """A running fleet at ``address``; ``channel`` is one connection to it."""

    def __init__(self, process, address, log, reports):
        self.process, self.address, self._log, self._reports = process, address, log, reports

    @property
    def log(self):
        """Return what the command and the replicas have printed."""
        return self._log.read_text(errors="replace")

    def reports(self):
        """Return the reports of each fake replica that lives, in their order, by its process."""
        found = {}
        for path in self._reports.glob("*.jsonl"):
            lines = path.read_text().splitlines(keepends=True)
            whole = [json.loads(line) for line in lines if line.endswith("\n")]
            if whole and Path(f"/proc/{path.stem}").exists():
                found[int(path.stem)] = whole
        return found

    def last(self):
        """Return the last report of each fake replica that lives."""
        return {pid: lines[-1] for pid, lines in self.reports().items()}

    def is_idle(self):
        """Return whether every block of every fake replica is free."""
        return all(one["free"] == one["total"] for one in self.last().values())


@contextlib.contextmanager
def cluster():
    """Yield the address of a Ray cluster on this machine, without a dashboard, and its folder."""
    # Ray's sockets lie in this folder, and their paths may not be long.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as top:
        for _ in range(STARTS):
            [port] = free_ports(1)
            process = _start(port, Path(top))
            try:
                if _has_started(process, Path(top, "log")):
                    yield f"127.0.0.1:{port}", Path(top)
                    return
            finally:
                process.terminate()
                process.wait(END_LIMIT_S)
        pytest.fail(Path(top, "log").read_text())


def _start(port, top):
    argv = [need_ray().parent / "ray", "start", "--head", "--block", f"--port={port}"]
    argv += ["--include-dashboard=false", f"--temp-dir={top}/ray", "--disable-usage-stats"]
    argv += ["--num-cpus=4", f"--object-store-memory={2**27}"]
    with Path(top, "log").open("wb") as out:
        return subprocess.Popen(
            list(map(str, argv)),
            stdout=out,
            stderr=out,
            cwd=ROOT,
            env=environment(PYTHONUNBUFFERED="1"),
        )


def _has_started(process, log):
    """Return whether Ray has started. It gives up by itself when its processes take too long."""
    wait_until(
        lambda: STARTED in log.read_text() or process.poll() is not None,
        READY_LIMIT_S,
        "a Ray cluster",
    )
    return process.poll() is None


def environment(**own):
    """Return the environment of Ray's processes."""
    # Ray would keep an authentication token in the user's home.
    own |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | own | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextlib.contextmanager
def fleet(import_path="grpc_service.ray.application:build", args=None, **deployment):
    """Yield a fleet on a cluster of its own, once it is ready. ``deployment`` has the fields of
    Serve's deployment."""
    with cluster() as (address, folder):
        yield from _fleet(address, folder, import_path, args, deployment)


def _fleet(address, own, import_path, args, deployment):
    [port] = free_ports(1)
    config, log, reports = own / "fleet.yaml", own / "fleet.log", own / "reports"
    reports.mkdir()
    args = dict(args or {})
    if import_path.startswith("tests."):
        args["reports"] = str(reports)
    config.write_text(yaml.safe_dump(serve_config(port, import_path, args, **deployment)))
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(need_ray()), "-m", "grpc_service.ray", "--config", str(config)],
            stdout=out,
            stderr=out,
            cwd=ROOT,
            env=environment(RAY_ADDRESS=address),
        )
    one = Fleet(process, f"127.0.0.1:{port}", log, reports)
    try:

        def is_ready():
            assert process.poll() is None, one.log[-3000:]
            return "the fleet is ready" in one.log

        wait_until(is_ready, READY_LIMIT_S, "a fleet of Ray Serve")
        with connect(one.address) as one.channel:
            yield one
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_LIMIT_S) == 0, one.log[-3000:]
    finally:
        process.kill()
        process.wait()
