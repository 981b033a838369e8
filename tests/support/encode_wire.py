"""A synchronous client of Embed and Rerank, with the rule of `tests.support.wire`."""

from __future__ import annotations

import threading

import grpc

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.wire import CALL_LIMIT_S, stats, timeout_metadata, wait_until

ENCODERS = (
    {"name": "fake"},
    {"name": "emb", "capability": "text-embedding"},
    {"name": "rank", "capability": "rerank"},
)


def embed_request(inputs, **fields):
    """Return an EmbedRequest. Each input is a text, a list of ids, or fields of EmbedInput."""
    made = []
    for one in inputs:
        if isinstance(one, str):
            one = {"text": one}
        elif isinstance(one, list):
            one = {"token_ids": {"ids": one}}
        made.append(pb.EmbedInput(**one))
    return pb.EmbedRequest(inputs=made, **fields)


def rerank_request(query, documents, **fields):
    """Return a RerankRequest."""
    return pb.RerankRequest(query=query, documents=documents, **fields)


class Encode:
    """An Embed or Rerank call that the test reads at its pace. Leaving its context cancels it.

    ``server_timeout`` is a timeout for the server alone (`tests.support.wire.timeout_metadata`).
    """

    def __init__(self, channel, request, *, timeout=None, server_timeout=None):
        stub = stubs.InferenceStub(channel)
        method = stub.Embed if isinstance(request, pb.EmbedRequest) else stub.Rerank
        self.call = method(request, timeout=timeout, metadata=timeout_metadata(server_timeout))
        self.messages = []
        self.error = None
        self._limit = threading.Timer(CALL_LIMIT_S, self.call.cancel)
        self._limit.daemon = True
        self._limit.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.call.cancel()
        self._limit.cancel()
        self._limit.join()

    def read(self):
        """Return the next message, or None at the end."""
        try:
            message = next(self.call)
        except StopIteration:
            return None
        except grpc.RpcError as error:
            self.error = error
            return None
        self.messages.append(message)
        return message

    def finish(self):
        """Read to the end."""
        while self.read() is not None:
            pass
        return self

    def by_index(self):
        """Return the messages in the order of their inputs, of which each has exactly one."""
        found = {message.index: message for message in self.messages}
        assert len(found) == len(self.messages)
        return [found[index] for index in sorted(found)]


def embed(channel, inputs, *, timeout=None, **fields):
    """Make an Embed call, read it to the end, and return what came."""
    with Encode(channel, embed_request(inputs, **fields), timeout=timeout) as call:
        return call.finish()


def rerank(channel, query, documents, *, timeout=None, **fields):
    """Make a Rerank call, read it to the end, and return what came."""
    with Encode(channel, rerank_request(query, documents, **fields), timeout=timeout) as call:
        return call.finish()


def wait_all_idle(channel, timeout_s=10.0):
    """Poll until no request lives in any scheduler, and return the totals."""
    found = []

    def look():
        found[:] = [stats(channel)]
        now = found[0]
        return not (now.running + now.waiting + now.parked + now.ending)

    wait_until(look, timeout_s, f"idle: {found}")
    return found[0]
