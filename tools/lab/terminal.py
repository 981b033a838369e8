"""Draw the README's picture of a terminal: commands, and what they print of a server that runs.

    python -m tools.lab.terminal FILE.svg

The tool starts the server of the shipped models, on its default port, which has to be free.
"""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 100  # columns
READY_LIMIT_S = 300
COMMANDS = (
    "triolet models",
    'triolet generate "Once upon a time" --seed 7 --max-tokens 60',
    'triolet rerank "Where is the dog?" "A hound naps by the fire." "The ship left at dawn."',
    "triolet stats",
)

# An SVG that a page embeds may load nothing: neither a font nor a style of another host.
SVG = """\
<svg class="terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; \
font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def run(command: str) -> str:
    """Return what a command prints.

    Raises:
        CalledProcessError: It failed.
    """
    argv = [sys.executable, "-m", "grpc_service", *shlex.split(command)[1:]]
    return subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def wait_until_ready(server: subprocess.Popen[str]) -> None:
    """Wait until the server has said that it is ready, and every model is READY.

    Raises:
        RuntimeError: The server ended.
        TimeoutError: A model took too long.
    """
    assert server.stdout is not None
    if not any(line.startswith("Ctrl-C") for line in server.stdout):
        raise RuntimeError(f"triolet serve ended with {server.wait()}")
    limit = time.monotonic() + READY_LIMIT_S
    while not all("READY" in line for line in run("triolet models").splitlines()[1:]):
        if time.monotonic() > limit:
            raise TimeoutError("the models are not ready")
        time.sleep(1)


def show(console: Console, command: str, output: str) -> None:
    """Print a command behind a prompt, and its output."""
    console.print(Text.assemble(("$ ", "bright_green"), (command, "bold")))
    console.print(Text(output.strip("\n")))
    console.print()


def draw() -> str:
    """Return the picture as SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    argv = [sys.executable, "-m", "grpc_service", "serve"]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as server:
        try:
            wait_until_ready(server)
            for command in COMMANDS:
                show(console, command, run(command))
        finally:
            server.terminate()
    return console.export_svg(title="triolet", theme=MONOKAI, code_format=SVG, unique_id="terminal")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    Path(sys.argv[1]).write_text(draw() + "\n")
