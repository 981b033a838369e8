"""Deploys a fleet by Ray Serve, and serves until a signal ends it.

The file is a Serve config file, which `serve run` and `serve deploy` take, too. This command checks
what would otherwise be noticed late, waits until the fleet is ready, and says where it serves. It
uses the Ray cluster that ``RAY_ADDRESS`` names or that runs on this machine, and without either
starts one that ends with the command.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, install_command
from grpc_service.cli.flags import engine_config_of

if TYPE_CHECKING:
    from collections.abc import Sequence

FUNCTION = "grpc_service.ray.ingress.add_inference"
BUILD = "grpc_service.ray.application:build"
DEFAULT_PORT = 9000  # Serve's
POLL_S = 0.5  # how often the fleet's state is looked at
EXIT_USAGE = 2
EXIT_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m grpc_service.ray",
        description="Deploy replicas of the engine over a Ray cluster, behind Ray Serve's gRPC "
        "port, until SIGINT or SIGTERM.",
    )
    parser.add_argument("--config", required=True, metavar="FILE.yaml", help="a Serve config file")
    path = parser.parse_args(argv).config
    try:
        return _serve(path, read_fleet(path))
    except ConfigError as error:
        print(f"triolet: {error}", file=sys.stderr)
        return EXIT_USAGE


def read_fleet(path: str) -> dict[str, Any]:
    """Return the content of a Serve config file, after checking it by `check_fleet`.

    Raises:
        ConfigError: the extra is not installed, or the file is wrong; the message names the place.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"this needs Ray Serve; install it with `{install_command('ray')}`")
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            fleet = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    try:
        check_fleet(fleet)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return dict(fleet)


def check_fleet(fleet: Any) -> None:
    """Check the parts of a Serve config that this package needs.

    Raises:
        ConfigError: the message names the place and what to change.
    """
    applications = fleet.get("applications") if isinstance(fleet, dict) else None
    if not isinstance(applications, list) or not applications:
        raise ConfigError("applications must be a list with an application")
    for index, application in enumerate(applications):
        if not isinstance(application, dict) or "import_path" not in application:
            raise ConfigError(f"applications[{index}] must be a table with import_path")
    options = fleet.get("grpc_options") or {}
    if not isinstance(options.get("port", DEFAULT_PORT), int):
        raise ConfigError("grpc_options.port must be a port")
    if FUNCTION not in (options.get("grpc_servicer_functions") or []):
        raise ConfigError(f"grpc_options.grpc_servicer_functions must have {FUNCTION}")
    for index, application in enumerate(applications):
        if application["import_path"] == BUILD:
            try:
                engine_config_of(application.get("args") or {})
            except ConfigError as error:
                raise ConfigError(f"applications[{index}].args: {error}") from None


def _serve(path: str, fleet: dict[str, Any]) -> int:
    """Deploy the fleet, and wait for a signal. Return the exit code."""
    import ray
    from ray import serve
    from ray.serve.scripts import cli

    ray.init(namespace="serve")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # replaces Ray's own handler
    try:
        cli.main(["run", "--non-blocking", path], standalone_mode=False)
        names = [application.get("name", "default") for application in fleet["applications"]]
        if failure := _wait_running(serve, names):
            print(f"triolet: {failure}", file=sys.stderr)
            return EXIT_FAILED
        port = fleet["grpc_options"].get("port", DEFAULT_PORT)
        print(f"the fleet is ready on port {port}", flush=True)
        while True:
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return 0
    finally:
        serve.shutdown()
        ray.shutdown()


def _wait_running(serve: Any, names: Sequence[str]) -> str:
    """Wait until the applications run. Return why one cannot be deployed, and "" if all run."""
    while True:
        running = serve.status().applications
        states = {name: str(running[name].status.value) for name in names if name in running}
        for name, state in states.items():
            if state == "DEPLOY_FAILED":
                return f"{name} was not deployed: {running[name].message}"
        if list(states.values()) == ["RUNNING"] * len(names):
            return ""
        time.sleep(POLL_S)
