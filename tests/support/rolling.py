"""Two servers of fake models that are restarted in turn, each at its own port."""

import contextlib
import re
import time

from tests.support.server import fake
from tests.support.wire import wait_serving, wait_until

SLOW = {"script": {"step_s": 0.002}, "runner": {"max_model_len": 4096, "num_blocks": 8192}}
# How long gRPC waits before it tries a refused address again: 1 s at first, with jitter, and the
# delays of a busy machine. Source: grpc, doc/connection-backoff.md.
BACKOFF_S = 3.0
SERVED = re.compile(r"Inference/\w+ OK .*peer=(\S+)")  # a line of the access log


class Servers:
    """The two servers. ``addresses`` are theirs, from the beginning to the end."""

    def __init__(self, stack):
        self._places = [stack.enter_context(contextlib.ExitStack()) for _ in range(2)]
        self._servers = [self._start(number, 0) for number in range(2)]
        self.addresses = [one.address for one in self._servers]
        self._ports = [int(one.rpartition(":")[2]) for one in self.addresses]

    def _start(self, number, port):
        server = self._places[number].enter_context(fake(**SLOW, server={"port": port}))
        wait_serving(server.channel)
        return server

    def restart(self, number, num_clients):
        """End one server in order, and start it anew. Then wait until it has served ``num_clients``
        clients, and until a client that it refused while it was down would try it again."""
        back_at = time.monotonic() + BACKOFF_S
        assert self._servers[number].stop() == 0
        self._places[number].close()
        port = self._ports[number]
        server = self._servers[number] = self._start(number, port)
        wait_until(lambda: len({*SERVED.findall(server.log)}) >= num_clients, 60, "the clients")
        time.sleep(max(0.0, back_at - time.monotonic()))
