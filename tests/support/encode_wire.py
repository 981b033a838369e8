"""A synchronous client of Embed and Rerank, with the rule of `tests.support.wire`."""

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.wire import StreamingCall, stats, wait_until

ENCODERS = (
    {"name": "fake"},
    {"name": "emb", "capability": "text-embedding"},
    {"name": "rank", "capability": "rerank"},
    {"name": "sparse", "capability": "sparse-embedding"},
    {"name": "multi", "capability": "multi-vector-embedding"},
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


class Encode(StreamingCall):
    """An Embed or Rerank call."""

    def __init__(self, channel, request, *, timeout=None, server_timeout=None):
        stub = stubs.InferenceStub(channel)
        method = stub.Embed if isinstance(request, pb.EmbedRequest) else stub.Rerank
        super().__init__(method, request, timeout=timeout, server_timeout=server_timeout)

    def by_index(self):
        """Return the messages in the order of their inputs. Each input must have one."""
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
