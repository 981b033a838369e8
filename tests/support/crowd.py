"""A process of many clients that all do the same: ``python -m tests.support.crowd JSON``.

``streams`` requests at once on one connection, each of a prompt of its own, for ``tokens`` tokens.
``reads``: how many Deltas each takes before it stops reading; None for all. When every one has
stopped or ended, it prints one line of JSON, the ids that each prompt got; those that have stopped
stay until the input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys

import grpc

from grpc_service._generated.triolet.v1 import inference_pb2_grpc
from tests.support.server import ROOT
from tests.support.wire import NO_PROXY, SMALL_WINDOW, generate_request


class Crowd:
    """The process, and what it says."""

    def __init__(self, address, **settings):
        settings = {"address": address} | settings
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.crowd", json.dumps(settings)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def heard(self):
        """The ids by prompt, once every client has stopped reading."""
        line = self.process.stdout.readline()
        assert line, "the clients' process died"
        return {int(first): ids for first, ids in json.loads(line).items()}

    def kill(self):
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def crowd(address, **settings):
    """A `Crowd` that is killed at the end of the block."""
    one = Crowd(address, **settings)
    try:
        yield one
    finally:
        one.kill()
        one.process.stdin.close()
        one.process.stdout.close()


async def listen(channel, first, tokens, reads):
    """One client; the ids it got."""
    stub = inference_pb2_grpc.InferenceStub(channel)
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
    return call, ids


async def main(address, streams, first=1, tokens=20, reads=None):
    options = [*NO_PROXY, *(SMALL_WINDOW if reads is not None else ())]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        firsts = range(first, first + streams)
        heard = await asyncio.gather(*[listen(channel, one, tokens, reads) for one in firsts])
        ids = {one: ids for one, (_, ids) in zip(firsts, heard, strict=True)}
        print(json.dumps(ids), flush=True)
        if reads is not None:
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
