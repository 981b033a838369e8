"""A synchronous client of Embed, Rerank and Classify, with the rule of `tests.support.wire`."""

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.wire import StreamingCall, stats, wait_until

ENCODERS = (
    {"name": "fake"},
    {"name": "emb", "capability": "text-embedding"},
    {"name": "rank", "capability": "rerank"},
    {"name": "sparse", "capability": "sparse-embedding"},
    {"name": "multi", "capability": "multi-vector-embedding"},
    {"name": "moods", "capability": "text-classification"},
    {"name": "names", "capability": "token-classification"},
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


def classify_request(inputs, **fields):
    """Return a ClassifyRequest. Each input is a text, a pair of texts, or a list of ids."""
    made = []
    for one in inputs:
        if isinstance(one, str):
            made.append(pb.ClassifyInput(text=one))
        elif one and isinstance(one[0], str):
            made.append(pb.ClassifyInput(pair=dict(zip(("text", "text_pair"), one, strict=True))))
        else:
            made.append(pb.ClassifyInput(token_ids={"ids": one}))
    return pb.ClassifyRequest(inputs=made, **fields)


class Encode(StreamingCall):
    """An Embed, Rerank or Classify call."""

    def __init__(self, channel, request, *, timeout=None, server_timeout=None):
        name = type(request).__name__.removesuffix("Request")
        method = getattr(stubs.InferenceStub(channel), name)
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


def classify(channel, inputs, *, timeout=None, **fields):
    """Make a Classify call, read it to the end, and return what came."""
    with Encode(channel, classify_request(inputs, **fields), timeout=timeout) as call:
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
