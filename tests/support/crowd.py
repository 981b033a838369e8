"""Run many equal clients in one process: ``python -m tests.support.crowd JSON``.

The process sends ``streams`` requests at once on one connection, each with a prompt of its own, for
``tokens`` tokens. Each client stops reading after ``reads`` Deltas; None means that it reads all.
When every client has stopped or its stream has ended, the process prints one line of JSON: the
token ids and the seconds of each client, by prompt. Clients that have stopped keep their streams
open until standard input ends.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time

import grpc

from grpc_service.client import stubs
from tests.support.server import ROOT
from tests.support.wire import NO_PROXY, SMALL_WINDOW, generate_request


class Crowd:
    """The process of the clients, and what it prints."""

    def __init__(self, address, **settings):
        settings = {"address": address} | settings
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.crowd", json.dumps(settings)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def heard(self):
        """Return the token ids and the seconds by prompt, once every client has stopped reading."""
        line = self.process.stdout.readline()
        assert line, "the clients' process died"
        heard = {int(first): found for first, found in json.loads(line).items()}
        ids, seconds = ({first: found[at] for first, found in heard.items()} for at in (0, 1))
        return ids, seconds

    def kill(self):
        """Kill the process."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def crowd(address, **settings):
    """Yield a `Crowd`, and kill it at the end of the block."""
    one = Crowd(address, **settings)
    try:
        yield one
    finally:
        one.kill()
        one.process.stdin.close()
        one.process.stdout.close()


async def listen(channel, first, tokens, reads):
    """Send one client's request, and read ``reads`` Deltas. Return the call, the token ids
    received, and the seconds that this took."""
    began = time.monotonic()
    stub = stubs.InferenceStub(channel)
    request = generate_request(
        prompt_ids=[first], max_tokens=tokens, output={"token_ids": True}, sampling={"seed": 1}
    )
    call = stub.Generate(request)
    ids = []
    num_deltas = 0
    while (reads is None or num_deltas < reads) and (message := await call.read()):
        if message.HasField("delta"):
            num_deltas += 1
            ids += message.delta.token_ids
    return call, ids, time.monotonic() - began


async def main(address, streams, first=1, tokens=20, reads=None):
    """Run all clients, and print the token ids and the seconds by prompt."""
    options = [*NO_PROXY, *(SMALL_WINDOW if reads is not None else ())]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        firsts = range(first, first + streams)
        heard = await asyncio.gather(*[listen(channel, one, tokens, reads) for one in firsts])
        found = {one: (ids, took) for one, (_, ids, took) in zip(firsts, heard, strict=True)}
        print(json.dumps(found), flush=True)
        if reads is not None:
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
