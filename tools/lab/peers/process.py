"""Starts an engine's process, asks it questions, and suspends it between them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.lab.peers.environments import Peer, PeerError

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[3]
OURS = Peer("triolet", "tools.lab.peers.triolet")
ANSWER_LIMIT_S = 900.0  # guess: a first torch.compile of a large model
END_LIMIT_S = 10.0


def memory_mb(pid: int) -> float:
    """Return the resident memory (PSS) of a process and of all its descendants, in MB. Of a page
    that several processes share, each counts its part; mapped files count, too."""
    found, kilobytes = [pid], 0
    for one in found:  # grows in the loop
        folder = Path("/proc") / str(one)
        pss = re.search(r"^Pss:\s+(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
        kilobytes += int(pss[1]) if pss else 0
        for children in folder.glob("task/*/children"):
            found += map(int, children.read_text().split())
    return kilobytes * 1024 / 1e6


class EngineProcess:
    """The process of an engine with a loaded model. It is suspended (SIGSTOP) between questions, so
    that threads that spin while they wait take no time from another engine's turn. ``variables``
    are environment variables for it.

    Raises:
        PeerError: The process could not be started. Its messages are on standard error.
    """

    def __init__(
        self, peer: Peer, settings: dict[str, Any], variables: Mapping[str, str] | None = None
    ) -> None:
        self.name = peer.name
        self._process = subprocess.Popen(
            [str(peer.python), "-m", peer.module, json.dumps(settings)],
            cwd=ROOT,
            env=(dict(os.environ) if peer is OURS else peer.environment()) | dict(variables or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.load_s: float = self._read()["load_s"]
        self._signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def ask(self, what: str, name: str, batch: int, length: int, steps: int = 0) -> Any:
        """Ask a question (`tools.lab.peers.asked`) and return the answer."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        question = {"what": what, "name": name, "batch": batch, "length": length, "steps": steps}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        try:
            return self._read()
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the process by the end of its input, or kill it after `END_LIMIT_S`."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        killer = threading.Timer(ANSWER_LIMIT_S, self._process.kill)
        killer.start()
        line = self._process.stdout.readline()
        killer.cancel()
        if not line:
            raise PeerError(f"{self.name} ended with {self._process.wait()}")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)


def start(peer: Peer, settings: dict[str, Any]) -> EngineProcess | None:
    """Start the peer's process. If it is not installed or does not start, print why and return
    None.
    """
    if not peer.is_installed:
        print(
            f"{peer.name} is not installed: python -m tools.lab.peers install {peer.name}",
            file=sys.stderr,
        )
        return None
    try:
        return EngineProcess(peer, settings)
    except PeerError as error:
        print(f"{error}; its messages are above", file=sys.stderr)
        return None
