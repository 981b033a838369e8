"""Rolling restarts under clients of other languages' gRPC; `tests/service/test_rolling.py` has
Python's."""

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import toolchains
from tests.support.rolling import Servers
from tests.support.wire import generate_request

CLIENTS = Path(__file__).resolve().parent / "clients"
NUM_CLIENTS = 50

pytestmark = [pytest.mark.interop, pytest.mark.full, pytest.mark.timeout(900)]


def in_node(folder):
    """Return the command of the clients in JavaScript."""
    toolchains.need_npm()
    return [shutil.which("node") or "node", CLIENTS / "rolling.js"]


def in_go(folder):
    """Compile the clients in Go, and return their command."""
    return [toolchains.compile_go(CLIENTS / "rolling.go", folder / "rolling")]


@pytest.mark.parametrize("make", [in_node, in_go])
def test_rolling_restarts_lose_no_call_of_other_languages_clients(make, tmp_path):
    command = make(tmp_path)
    message = generate_request(prompt_ids=[5, 7], max_tokens=24).SerializeToString()
    with contextlib.ExitStack() as stack:
        servers = Servers(stack)
        args = [",".join(servers.addresses), message.hex(), str(NUM_CLIENTS)]
        clients = stack.enter_context(
            subprocess.Popen(
                [*command, *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={key: one for key, one in os.environ.items() if "proxy" not in key.lower()},
            )
        )
        stack.callback(clients.kill)
        assert clients.stdout.readline() == "begun\n"
        for number in range(20):
            servers.restart(number % 2, NUM_CLIENTS // 2)
        clients.stdin.close()
        told = json.loads(clients.stdout.readline())
    print(f"{told['whole']} calls were whole, and {len(told['lost'])} were lost")
    assert told["lost"] == []
    assert told["whole"] > 20 * NUM_CLIENTS
