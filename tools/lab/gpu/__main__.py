"""`python -m tools.lab.gpu`; the phases are described in `tools.lab.gpu`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.lab.bench.frame import ROOT, Row, report
from tools.lab.gpu.phases import PHASES
from tools.lab.gpu.wheels import complete, lacking, versions

MEASURES = ("engine",)

# Prints a device's name and properties. It runs in a process of its own, because torch keeps memory
# on a device whose properties it has read.
ABOUT = """
import json, sys, torch
name = sys.argv[1]
about = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}
if name.startswith("cuda"):
    found = torch.cuda.get_device_properties(name)
    about |= {"device": found.name, "memory_mib": found.total_memory >> 20,
              "capability": f"{found.major}.{found.minor}"}
print(json.dumps(about))
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return 1 if a bar was missed or a phase did not end in order."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.lab.gpu", description="Check and measure the engine on a GPU."
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (small shapes)")
    parser.add_argument("--wheels", metavar="DIR", type=Path, help="wheels of missing packages")
    parser.add_argument("--json", metavar="FILE", help="where the result is written")
    parser.add_argument("--minutes", type=float, default=9.5, help="how long all of it may take")
    parser.add_argument("--only", default="", metavar="REGEX", help="select rows by their names")
    args = parser.parse_args(arguments)
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="triolet-gpu-") as name:
        folder = Path(name)
        libraries = folder / "libraries"
        installed = complete(args.wheels, libraries)
        if missing := lacking(libraries):
            print(
                f"tools.lab.gpu: {', '.join(missing)} must be installed, or be among the wheels of "
                "--wheels DIR (pip download --no-deps -d DIR NAME, on a machine with a network)",
                file=sys.stderr,
            )
            return 2
        paths = [str(ROOT), str(libraries), os.environ.get("PYTHONPATH", "")]
        environment = {"GOMP_SPINCOUNT": "10000", **os.environ}  # D13
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        about = subprocess.run(
            [sys.executable, "-c", ABOUT, args.device], env=environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        if about.returncode:
            reason = about.stderr.strip().splitlines()[-1]
            print(
                f"tools.lab.gpu: the device {args.device} is not there: {reason}", file=sys.stderr
            )
            return 2
        rows: list[Row] = []
        for phase in PHASES:
            rows += _run(phase, args.device, folder, args.only, environment, end)
    machine = {**json.loads(about.stdout), "versions": versions(), "wheels": installed}
    code = report("gpu", rows, args.json, MEASURES, about=machine)
    return 1 if code or any(row.unit == "failed" for row in rows) else 0


def _run(
    phase: str, device: str, folder: Path, only: str, environment: dict[str, str], end: float
) -> list[Row]:
    """Run a phase within its share of the time that is left, and return its rows. If it does not
    end in order, one more row says why."""
    names = list(PHASES)
    rest = sum(PHASES[name] for name in names[names.index(phase) :])
    limit = max(1.0, (end - time.monotonic()) * PHASES[phase] / rest)
    out, log = folder / f"{phase}.json", folder / f"{phase}.log"
    argv = [
        sys.executable,
        "-m",
        "tools.lab.gpu.phases",
        phase,
        device,
        str(folder),
        only,
        str(out),
    ]
    trouble = ""
    with log.open("w") as file:
        try:
            done = subprocess.run(
                argv,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=file,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            trouble = f"was stopped after {limit:.0f} s; rows that it had no time for are missing"
        else:
            if done.returncode:
                lines = log.read_text(errors="replace").strip().splitlines()
                trouble = lines[-1] if lines else f"exit code {done.returncode}"
                print("\n".join(lines[-30:]), file=sys.stderr)
    rows = [Row(**row) for row in json.loads(out.read_text())] if out.exists() else []
    return [*rows, Row(phase, None, "failed", note=trouble)] if trouble else rows


if __name__ == "__main__":
    sys.exit(main())
