"""Clients of two gRPC libraries, which make the interop cases' calls: grpcio and grpc-js."""

import base64
import contextlib
import itertools
import json
import threading
from dataclasses import asdict, dataclass, field, replace

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass

from tests.interop.testing_service import method_of, path_of
from tests.support.http2 import DATA, PREFACE
from tests.support.proxy import Proxy
from tests.support.wire import NO_PROXY

CALL_LIMIT_S = 20.0


@dataclass(frozen=True)
class Call:
    """One call. Requests are in proto's JSON, and bytes of metadata in base64.

    ``compressed``: the client compresses its requests, except those of the numbers ``plain``, if
    its library can choose for each. ``turn_by_turn``: each request waits for the answer to the one
    before. ``cancel_after`` is a number of answers. ``fresh``: the call has a channel of its own.
    """

    method: str
    requests: list
    metadata: dict = field(default_factory=dict)
    timeout_s: float = CALL_LIMIT_S
    compressed: bool = False
    plain: tuple = ()
    turn_by_turn: bool = False
    half_closes: bool = True
    cancel_after: int = -1
    fresh: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a client received. Messages are in proto's JSON, with a length for a body of zeros."""

    messages: list
    code: int
    text: str
    initial: dict
    trailing: dict


class Stack:
    """A library's client of one address."""

    is_hidden = False  # TLS hides the messages from the recorder
    ends_before_it_resets = False

    def __init__(self, address):
        self.address = address

    def begin(self, call, times=1):
        """Begin a call, or several at once; return an object with ``cancel`` and ``outcomes``."""
        raise NotImplementedError

    def at(self, address):
        """Return a context with a stack like this one, of another address."""
        raise NotImplementedError

    def run(self, call, **changes):
        """Make a call, and return its outcome."""
        [outcome] = self.begin(replace(call, **changes)).outcomes()
        return outcome

    @contextlib.contextmanager
    def recorded(self, requests=None, answers=None):
        """Yield a stack like this one. Check at the end which messages were marked as compressed,
        connection by connection, unless TLS hides them."""
        recorder = Recorder(self.address)
        with contextlib.closing(recorder), self.at(recorder.address) as stack:
            yield stack
            if not self.is_hidden:
                assert requests in (None, recorder.requests)
                assert answers in (None, recorder.answers)


class GrpcioStack(Stack):
    """grpcio, in this process."""

    def __init__(self, address, credentials=None):
        super().__init__(address)
        self._credentials = credentials
        self.is_hidden = credentials is not None
        self._channels = {}  # channels by whether they compress

    def _connect(self, call):
        options = [*NO_PROXY, ("grpc.use_local_subchannel_pool", 1)]
        compression = grpc.Compression.Gzip if call.compressed else None
        if self._credentials is None:
            return grpc.insecure_channel(self.address, options, compression)
        return grpc.secure_channel(self.address, self._credentials, options, compression)

    @contextlib.contextmanager
    def at(self, address):
        stack = GrpcioStack(address, self._credentials)
        with contextlib.closing(stack):
            yield stack

    def begin(self, call, times=1):
        channel = None if call.fresh else self._channels.get(call.compressed)
        if channel is None:
            channel = self._connect(call)
        if not call.fresh:
            self._channels[call.compressed] = channel
        return GrpcioCalls(channel, call, times)

    def close(self):
        for channel in self._channels.values():
            channel.close()


class GrpcioCalls:
    """Calls of grpcio that run at once."""

    def __init__(self, channel, call, times):
        self._call, self._channel = call, channel
        self._method = method = method_of(call.method)
        kinds = (method.client_streaming, method.server_streaming)
        self._begin = getattr(channel, "_".join("stream" if one else "unary" for one in kinds))(
            f"/{path_of(method)}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        self._begin = self._begin if method.server_streaming else self._begin.future
        self._turns = threading.Semaphore(0)
        self._has_ended = threading.Event()
        request_class = GetMessageClass(method.input_type)
        self._requests = [ParseDict(one, request_class()) for one in call.requests]
        self._running = [self._start() for _ in range(times)]

    def _start(self):
        call = self._call
        bins = {name for name in call.metadata if name.endswith("-bin")}
        return self._begin(
            self._say() if self._method.client_streaming else self._requests[0],
            timeout=call.timeout_s,
            metadata=[
                (name, base64.b64decode(value) if name in bins else value)
                for name, value in call.metadata.items()
            ],
        )

    def _say(self):
        for request in self._requests:
            yield request
            if self._call.turn_by_turn:
                self._turns.acquire()
        if not self._call.half_closes:
            self._has_ended.wait()

    def cancel(self):
        for one in self._running:
            one.cancel()

    def outcomes(self):
        try:
            return [self._outcome(one) for one in self._running]
        finally:
            self._has_ended.set()
            self._turns.release()
            if self._call.fresh:
                self._channel.close()

    def _outcome(self, running):
        messages = []
        with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
            for message in running if self._method.server_streaming else [running.result()]:
                messages.append(told(message))
                self._turns.release()
                if len(messages) == self._call.cancel_after:
                    running.cancel()
        return Outcome(
            messages,
            running.code().value[0],
            running.details(),
            dict(running.initial_metadata() or ()),
            dict(running.trailing_metadata() or ()),
        )


def told(message):
    """Return a message in proto's JSON, with the length of a body of zeros in its place."""
    found = MessageToDict(message, preserving_proto_field_name=True)
    if found.get("payload"):
        body = message.payload.body
        found["payload"]["body"] = body if any(body) else len(body)
    return found


class NodeStack(Stack):
    """grpc-js, in a process that serves all tests of this file."""

    ends_before_it_resets = True  # Node.js reports a stream's end before its reset
    numbers = itertools.count()

    def __init__(self, address, process):
        super().__init__(address)
        self._process = process

    @contextlib.contextmanager
    def at(self, address):
        yield NodeStack(address, self._process)

    def begin(self, call, times=1):
        number = next(self.numbers)
        self.say(asdict(call) | {"id": number, "address": self.address, "times": times})
        return NodeCalls(self, number)

    def say(self, line):
        """Send the process a line."""
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def hear(self):
        """Return the process's next line."""
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)


@dataclass(frozen=True)
class NodeCalls:
    """Calls of grpc-js that run at once."""

    stack: NodeStack
    number: int

    def cancel(self):
        self.stack.say({"cancel": self.number})

    def outcomes(self):
        said = self.stack.hear()
        assert said["id"] == self.number
        return [self._outcome(**one) for one in said["outcomes"]]

    @staticmethod
    def _outcome(initial, trailing, **rest):
        pairs = [
            {
                name: base64.b64decode(value) if name.endswith("-bin") else value
                for name, value in found.items()
            }
            for found in (initial, trailing)
        ]
        return Outcome(initial=pairs[0], trailing=pairs[1], **rest)


class Recorder(Proxy):
    """A proxy that shows which messages were marked as compressed."""

    def __init__(self, target):
        self._said = ([], [])  # sent by clients, and by servers: the bytes of each connection
        super().__init__(target)

    def _forward(self, source, sink):
        said = bytearray()
        self._said[source in self._upstreams].append(said)
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                said += data
                sink.sendall(data)

    @property
    def requests(self):
        """The compression flag of each request, call after call."""
        return [flag for said in self._said[0] for flag in flags_of(said[len(PREFACE) :])]

    @property
    def answers(self):
        """The compression flag of each answer, call after call."""
        return [flag for said in self._said[1] for flag in flags_of(said)]


def flags_of(said):
    """Return the first byte of each message in the frames that one side of a connection sent."""
    bodies = {}
    while len(said) >= 9:
        end = 9 + int.from_bytes(said[:3], "big")
        kind, flags, stream = said[3], said[4], bytes(said[5:9])
        if kind == DATA:
            assert not flags & 8, "the frame is padded"
            bodies.setdefault(stream, bytearray()).extend(said[9:end])
        said = said[end:]
    found = []
    for body in bodies.values():
        while body:
            found.append(body[0])
            body = body[5 + int.from_bytes(body[1:5], "big") :]
    return found
