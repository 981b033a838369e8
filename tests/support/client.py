"""Run one client as a process of its own: ``python -m tests.support.client ADDRESS JSON``.

The client sends a Generate request with a small window, reads one Delta and prints "reads no more".
After a line on standard input it reads to the end. It then prints, as JSON, the number of tokens,
the status code and the status's reason.
"""

import contextlib
import json
import subprocess
import sys

from tests.support.wire import SMALL_WINDOW, Generation, connect, reason


def main(address, fields):
    """Send the request, stop reading after one Delta, and read on after a line of input."""
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
    """Yield the process of such a client, which has read one Delta and has stopped reading."""
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
    """Let the client read to the end, and return what it printed."""
    out, _ = client.communicate("\n", timeout=limit_s)
    return json.loads(out)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
