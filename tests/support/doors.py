"""The two doors of a server, gRPC and OpenAI's API over HTTP, with the same small client for each.

`DOORS` are for tests that run over both. A request is the fields of `wire.generate_request`; a call
is read at the test's pace, and leaving its context ends it. Rule: every wait is bounded.
"""

import base64
import collections
import contextlib
import json
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import grpc

from grpc_service.openai.errors import STATUSES
from grpc_service.rpc.status import StatusCode
from tests.support.openai_calls import CHAT, TEXT, Connection, events_of, request
from tests.support.proxy import Proxy, SmallProxy
from tests.support.wire import LENGTH, SMALL_WINDOW, STOP, Generation, connect, details

WINDOW = 4096  # bytes of a small receive buffer
ENDS = {"length": LENGTH, "stop": STOP}


@dataclass(frozen=True)
class Failure:
    """What a call ended with: the status that HTTP has for it, which is 200 once a stream has
    begun, our reason, and the message. They are empty if the connection was cut. ``phase`` and
    ``num_done`` tell how far a request came whose deadline passed."""

    status: int = 0
    reason: str = ""
    told: str = ""
    phase: str = ""
    num_done: int | None = None

    @property
    def is_cut(self):
        """Whether the connection ended before the answer."""
        return not self.status

    def has(self, code, reason):
        """Return whether this is the failure ``reason``, which is a gRPC ``code``."""
        statuses = (200, STATUSES[StatusCode(code.value[0])])
        return self.reason == reason and self.status in statuses


class Grpc:
    """gRPC's door. A client is a channel."""

    name = "grpc"

    def address(self, server):
        """Return the address on which a server has this door."""
        return server.address

    def client(self, server):
        """Return the client that a server's tests share."""
        return server.channel

    def connect(self, address, *, is_small=False):
        """Yield a client of its own; with ``is_small`` its window closes after a few KB."""
        return connect(address, *(SMALL_WINDOW if is_small else ()))

    def proxy(self, is_small):
        """Return the proxy for a client, of which only the window is small."""
        return Proxy

    def generate(self, client, **fields):
        """Return a call that streams the tokens of a text request."""
        return Generation(client, **fields)

    def failure(self, error):
        """Return the `Failure` of a call's error."""
        info = details(error).get("ErrorInfo")
        if info is None:
            return Failure()
        done = info.metadata.get("tokens_done")
        return Failure(
            STATUSES[StatusCode(error.code().value[0])],
            info.reason,
            error.details(),
            info.metadata.get("phase", ""),
            None if done is None else int(done),
        )


class Http:
    """The HTTP port. A client keeps the connections of its calls, each of which has its own."""

    name = "http"

    def address(self, server):
        """Return the address on which a server has this door."""
        return f"127.0.0.1:{server.openai_port}"

    def client(self, server):
        """Return a client of a server."""
        return HttpClient(self.address(server))

    @contextlib.contextmanager
    def connect(self, address, *, is_small=False):
        """Yield a client; with ``is_small`` its receive buffers have a few KB."""
        client = HttpClient(address, WINDOW if is_small else None)
        try:
            yield client
        finally:
            client.close()

    def proxy(self, is_small):
        """Return the proxy for a client, which has small buffers if the client has."""
        return SmallProxy if is_small else Proxy

    def generate(self, client, **fields):
        """Return a call that streams the tokens of a text request."""
        return HttpGeneration(client, **fields)

    def failure(self, error):
        """Return the `Failure` of a call's error, which it is."""
        return error


GRPC, HTTP = Grpc(), Http()
DOORS = (GRPC, HTTP)


class HttpClient:
    """A client of the HTTP port at ``HOST:PORT``. Its connections close with it."""

    def __init__(self, address, window=None):
        host, _, port = address.rpartition(":")
        self._options = {"port": int(port), "host": host, "window": window}
        self._opened = []
        # A failed test keeps its calls, and a socket that the collector finds is a failure of the
        # test that runs then.
        weakref.finalize(self, close_all, self._opened)

    def open(self):
        """Return a new connection."""
        self._opened.append(Connection(**self._options))
        return self._opened[-1]

    def close(self):
        """Close every connection."""
        close_all(self._opened)


def close_all(connections):
    for connection in connections:
        connection.close()


class HttpCall:
    """A request under way, as `wire.StreamingCall` is one over gRPC.

    ``messages`` has the events of a stream, or the whole answer. ``error`` is a `Failure`. With
    ``server_timeout`` or ``timeout`` the request has a deadline in seconds.
    """

    def __init__(self, client, path, body, *, timeout=None, server_timeout=None):
        self.messages = []
        self.error = None
        self.heard = self
        self._status = None
        self._has_whole = False
        self._parts = collections.deque()
        self._rest = b""
        seconds = timeout if server_timeout is None else server_timeout
        headers = {} if seconds is None else {"X-Request-Timeout": f"{seconds:g}"}
        self._client = client  # whose end would close the connection
        self._connection = client.open()
        self._connection.send(request(path, body, headers=headers))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._connection.close()

    def cancel(self):
        """Reset the connection."""
        self._connection.reset()

    def read(self):
        """Return the next message, or None at the end."""
        if self.error is not None or self._has_whole:
            return None
        if self._status is None:
            self._status, headers = self._connection.read_head()
            if "chunked" not in headers.get("transfer-encoding", ""):
                return self._take_whole(headers)
        while not self._parts:
            if not (part := self._connection.read_chunk()):
                self.error = None if part == b"" else Failure()
                return None
            *whole, self._rest = (self._rest + part).split(b"\n\n")
            self._parts += [event for one in whole for event in events_of(one)]
        event = self._parts.popleft()
        if event == "[DONE]":
            return self.read()
        if "error" in event:
            self.error = failure_of(200, event["error"])
            return None
        self.messages.append(event)
        return event

    def _take_whole(self, headers):
        self._has_whole = True
        answer = self._connection.read_body(self._status, headers)
        if answer.is_cut:
            self.error = Failure()
        elif answer.status != 200:
            self.error = failure_of(answer.status, answer.error)
        else:
            self.messages += self.messages_of(answer.json)
            return answer.json
        return None

    def messages_of(self, answer):
        """Return the messages that a whole answer stands for."""
        return [answer]

    def finish(self):
        """Read to the end."""
        while self.read() is not None:
            pass
        return self


def failure_of(status, error):
    """Return the `Failure` of an answer's error."""
    told = error["message"], error.get("phase", ""), error.get("tokens_done")
    return Failure(status, error["code"].upper(), *told)


class HttpGeneration(HttpCall):
    """A text request whose answer is a stream, or whole without ``is_stream``; as `wire.Heard`."""

    def __init__(self, client, *, is_stream=True, timeout=None, server_timeout=None, **fields):
        path, body = text_request(fields)
        body["stream"] = is_stream
        super().__init__(client, path, body, timeout=timeout, server_timeout=server_timeout)

    def _of(self, choice):
        found = [one for message in self.messages for one in message["choices"]]
        return [one for one in found if one["index"] == choice]

    def ids(self, choice=0):
        """Return the token ids of a choice."""
        return [token for one in self._of(choice) for token in one.get("token_ids", ())]

    def text(self, choice=0):
        """Return the text of a choice."""
        return "".join([one["text"] for one in self._of(choice)])

    def finished(self, choice=0):
        """Return why a choice has ended, as an object with ``reason``."""
        [end] = [one["finish_reason"] for one in self._of(choice) if one["finish_reason"]]
        return SimpleNamespace(reason=ENDS[end])

    def read_deltas(self, count):
        """Read until ``count`` tokens have come in all."""
        choices = {one["index"] for message in self.messages for one in message["choices"]}
        while sum([len(self.ids(choice)) for choice in choices]) < count:
            message = self.read()
            assert message is not None, f"ended: {self.error}"
            choices |= {one["index"] for one in message["choices"]}
        return self


def text_request(fields):
    """Return the path and the body of a text request with the fields of `wire.generate_request`."""
    fields = dict(fields)
    fields.pop("output", None)
    body = {"return_token_ids": True, **fields.pop("sampling", {})}
    if "prompt" in fields:
        body["truncate_prompt_tokens"] = fields.pop("prompt")["truncate_to"]
    if "constraint" in fields:
        schema = json.loads(fields.pop("constraint")["json_schema"])
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
        body["response_format"] = form
    if "chat" in fields:
        turns = fields.pop("chat")["messages"]
        body["messages"] = [
            {"role": turn["role"], "content": [part_of(one) for one in turn["parts"]]}
            for turn in turns
        ]
        return CHAT, body | fields
    text = fields.pop("text", "Once")
    body["prompt"] = fields.pop("prompt_ids", text)
    return TEXT, body | fields


def part_of(part):
    """Return a part of a chat's message, a text or an image's bytes, in OpenAI's form."""
    if "text" in part:
        return {"type": "text", "text": part["text"]}
    url = f"data:image/png;base64,{base64.b64encode(part['image']).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def failure_at(door, call):
    """Read a call at ``door`` to its end, and return its `Failure`."""
    error = call.finish().error
    assert isinstance(error, grpc.RpcError | Failure), error
    return door.failure(error)
