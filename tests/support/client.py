"""A client that is a process of its own: ``python -m tests.support.client ADDRESS JSON``.

It asks for a generation, reads one Delta, says so by a line, and reads on when it gets one. Then it
prints what it heard: the number of tokens, the status and its reason. Its window is small.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

from tests.support.wire import SMALL_WINDOW, Generation, connect, reason


def main(address, fields):
    with connect(address, *SMALL_WINDOW) as channel, Generation(channel, **fields) as call:
        call.read_deltas(1)
        print("reads no more", flush=True)
        sys.stdin.readline()
        heard = call.finish()
        error = heard.error
        code = "OK" if error is None else error.code().name
        said = "" if error is None else reason(error)
        print(json.dumps({"tokens": len(heard.ids()), "code": code, "reason": said}), flush=True)


@contextlib.contextmanager
def stopped_reading(address, **fields):
    """Such a process, after its one Delta."""
    argv = [sys.executable, "-m", "tests.support.client", address, json.dumps(fields)]
    client = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout.readline() == "reads no more\n"
        yield client
    finally:
        client.kill()
        client.wait()
        client.stdin.close()
        client.stdout.close()


def read_on(client, limit_s=20):
    """Let it read to the end; what it heard."""
    out, _ = client.communicate("\n", timeout=limit_s)
    return json.loads(out)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
