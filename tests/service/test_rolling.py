"""Servers that are restarted one after the other, under clients of stock gRPC that know both.

The clients are grpcio's channels as they come, with pick_first and round_robin: no retry policy, no
wait_for_ready, no code of ours between them and the servers.
"""

import contextlib
import json
import threading

import grpc
import pytest

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.core_driver import expected_tokens
from tests.support.rolling import Servers
from tests.support.wire import NO_PROXY, generate_request, wait_until

TOKENS = 24
FULL = [pytest.mark.full, pytest.mark.timeout(600)]


class Caller(threading.Thread):
    """Calls without pause until ``is_stopping`` is set, by a channel of its own. ``lost`` has the
    errors, and ``num_whole`` counts the calls whose answers were whole."""

    def __init__(self, number, addresses, policy):
        super().__init__(daemon=True)
        self.number, self.num_whole, self.lost = number, 0, []
        self.is_stopping = threading.Event()
        self._target = "ipv4:" + ",".join(addresses)
        config = json.dumps({"loadBalancingConfig": [{policy: {}}]})
        self._options = [
            *NO_PROXY,
            ("grpc.service_config", config),
            ("grpc.use_local_subchannel_pool", 1),
        ]

    def run(self):
        """Call, streams and single answers in turn."""
        with grpc.insecure_channel(self._target, options=self._options) as channel:
            stub = stubs.InferenceStub(channel)
            while not self.is_stopping.is_set():
                try:
                    self._call_once(stub)
                except (grpc.RpcError, AssertionError) as error:
                    self.lost.append(error)
                else:
                    self.num_whole += 1

    def _call_once(self, stub):
        prompt = [self.number, self.num_whole % 50]
        request = generate_request(prompt_ids=prompt, max_tokens=TOKENS, output={"token_ids": True})
        ids = []
        for message in stub.Generate(request, timeout=60):
            ids += message.delta.token_ids
        assert ids == expected_tokens(prompt, count=TOKENS), ids
        stub.Tokenize(pb.TokenizeRequest(text="word"), timeout=60)


@pytest.mark.parametrize(
    ("num_restarts", "num_clients"), [(2, 8), pytest.param(20, 50, marks=FULL)]
)
def test_rolling_restarts_lose_no_call_of_stock_clients(num_restarts, num_clients):
    """When a server leaves, each client's policy takes the other address.

    Red if a draining server accepts connections, refuses calls by a status, or ends a call that was
    already sent when the drain began.
    """
    with contextlib.ExitStack() as stack:
        servers = Servers(stack)
        callers = [
            Caller(number, servers.addresses, ("pick_first", "round_robin")[number % 2])
            for number in range(num_clients)
        ]
        for one in callers:
            one.start()
            stack.callback(one.is_stopping.set)
        wait_until(lambda: all(one.num_whole for one in callers), 60, "a call of each client")
        for number in range(num_restarts):
            servers.restart(number % 2, num_clients // 2)
            before = [one.num_whole for one in callers]
            wait_until(
                lambda before=before: all(
                    one.num_whole > count for one, count in zip(callers, before, strict=True)
                ),
                60,
                "a call of each client",
            )
        for one in callers:
            one.is_stopping.set()
        for one in callers:
            one.join(60)
            assert not one.is_alive()
    lost = [error for one in callers for error in one.lost]
    print(f"{sum(one.num_whole for one in callers)} calls were whole, and {len(lost)} were lost")
    assert lost == []
