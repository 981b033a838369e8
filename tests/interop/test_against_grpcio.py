"""The same bytes to grpcio's server and to ours: the call ends alike, or `RULES` say why not."""

import contextlib
import gzip
import random
import zlib
from concurrent import futures
from dataclasses import dataclass

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from grpc_service.rpc.methods import Dispatcher, Method
from tests.support.raw_http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RawClient,
    frame,
)
from tests.support.rpc_thread import serving

MESSAGE = StringValue(value="hi").SerializeToString()
PIECE_BYTES = 16_000
CALLS_MAX = 50  # attempts for a request, until the two servers end it differently
BASE = (
    *((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/t.Echo/Unary")),
    *((b":authority", b"localhost"), (b"te", b"trailers")),
    (b"content-type", b"application/grpc"),
)


def framed(message=MESSAGE, flag=0):
    """Return a message as it stands in a body."""
    return bytes([flag]) + len(message).to_bytes(4, "big") + message


def with_(name, value):
    """Return a change that sets a header, or removes it (None)."""

    def change(headers):
        if value is None:
            return [header for header in headers if header[0] != name]
        if all(one != name for one, _ in headers):
            return [*headers, (name, value)]
        return [(one, value if one == name else old) for one, old in headers]

    return change


def plus(*added):
    """Return a change that adds headers."""
    return lambda headers: [*headers, *added]


CHANGES = {
    "stream": with_(b":path", b"/t.Echo/Stream"),
    "unknown method": with_(b":path", b"/t.Echo/No"),
    "unknown service": with_(b":path", b"/x"),
    "query": with_(b":path", b"/t.Echo/Unary?x=1"),
    "path without a slash": with_(b":path", b"t.Echo/Unary"),
    "GET": with_(b":method", b"GET"),
    "PUT": with_(b":method", b"PUT"),
    "JSON": with_(b"content-type", b"application/json"),
    "no content type": with_(b"content-type", None),
    "gRPC-Web": with_(b"content-type", b"application/grpc-web"),
    "gRPC and JSON": with_(b"content-type", b"application/grpc+json"),
    "a parameter": with_(b"content-type", b"application/grpc;charset=utf-8"),
    "no te": with_(b"te", None),
    "te gzip": with_(b"te", b"gzip"),
    "no path": with_(b":path", None),
    "empty path": with_(b":path", b""),
    "no scheme": with_(b":scheme", None),
    "https": with_(b":scheme", b"https"),
    "ftp": with_(b":scheme", b"ftp"),
    "no authority": with_(b":authority", None),
    "host alone": lambda headers: with_(b"host", b"localhost")(with_(b":authority", None)(headers)),
    **{
        f"host {host.decode()}": with_(b"host", host)
        for host in (
            *(b"localhost", b"LocalHost", b"localhost:80", b"localhost:50051", b"localhost."),
            *(b"other", b"[::1]", b""),
        )
    },
    "two hosts": plus((b"host", b"localhost"), (b"host", b"localhost")),
    "upper-case name": plus((b"X-A", b"v")),
    "space after a value": plus((b"x-a", b"v ")),
    "NUL": plus((b"x-a", b"a\0b")),
    "line feed": plus((b"x-a", b"a\nb")),
    "no ASCII": plus((b"x-a", b"\xe9")),
    "space in a name": plus((b"x a", b"b")),
    "no name": plus((b"", b"b")),
    "connection": plus((b"connection", b"close")),
    "path twice": plus((b":path", b"/t.Echo/Unary")),
    "status": lambda headers: [headers[0], (b":status", b"200"), *headers[1:]],
    "unknown pseudo-header": lambda headers: [headers[0], (b":foo", b"1"), *headers[1:]],
    "length 3": plus((b"content-length", b"3")),
    "length x": plus((b"content-length", b"x")),
    "bytes": plus((b"x-bin", b"AAE")),
    "bytes without base64": plus((b"x-bin", b"!!!")),
    "1 s": plus((b"grpc-timeout", b"1S")),
    "1 h": plus((b"grpc-timeout", b"1H")),
    "no time": plus((b"grpc-timeout", b"0S")),
    "1 ns": plus((b"grpc-timeout", b"1n")),
    "malformed timeout": plus((b"grpc-timeout", b"x")),
    "negative timeout": plus((b"grpc-timeout", b"-1S")),
    "two timeouts": plus((b"grpc-timeout", b"10S"), (b"grpc-timeout", b"20S")),
    "nine digits": plus((b"grpc-timeout", b"123456789S")),
    "spaced timeout": plus((b"grpc-timeout", b"1 S")),
    "gzip": plus((b"grpc-encoding", b"gzip")),
    "deflate": plus((b"grpc-encoding", b"deflate")),
    "identity": plus((b"grpc-encoding", b"identity")),
    "unknown encoding": plus((b"grpc-encoding", b"br")),
    "20 KB of headers": plus(*[(b"x-%d" % number, b"a" * 1000) for number in range(20)]),
    "40 KB of headers": plus(*[(b"x-%d" % number, b"a" * 1000) for number in range(40)]),
}
BODIES = {
    "a message": framed(),
    "no message": b"",
    "two messages": framed() * 2,
    "a part of a prefix": framed()[:3],
    "a part of a message": framed()[:-1],
    "no protobuf": framed(b"\xff\xff"),
    "a huge size": b"\0\x7f\xff\xff\xff",
    "compressed by gzip": framed(gzip.compress(MESSAGE), 1),
    "compressed by deflate": framed(zlib.compress(MESSAGE), 1),
    "marked as compressed": framed(MESSAGE, 1),
    "an unknown flag": framed(MESSAGE, 2),
}


@dataclass(frozen=True)
class Rule:
    """Requests with one of ``names`` may end as ``ours`` at our server, for ``reason``."""

    names: frozenset[str]
    ours: tuple[str, ...]
    reason: str


def rule(names, ours, reason):
    """Return a rule; names and ends are separated by commas."""
    return Rule(frozenset(names.split(", ")), tuple(ours.split(", ")), reason)


# Our server ignores these headers, so that a call ends as it does without them at grpcio's server.
IGNORED = {
    "no te": "te only tells proxies apart. grpcio resets a call without it.",
    "ftp": "The scheme means nothing to a gRPC server. grpcio refuses unknown ones.",
}
MALFORMED = (
    "te gzip, no path, empty path, no scheme, no authority, two hosts, upper-case name, NUL, "
    "line feed, space in a name, no name, connection, path twice, status, unknown pseudo-header, "
    "length 3, length x"
)
RULES = (
    rule(
        MALFORMED,
        "reset PROTOCOL_ERROR",
        "RFC 9113, 8.1.1: a malformed request is a stream error of this type. grpcio answers some "
        "with a status, resets some with INTERNAL_ERROR, and serves the others.",
    ),
    rule(
        "GET, PUT",
        "http 405",
        "PROTOCOL-HTTP2.md asks for POST. 405 tells a browser or a proxy why; grpcio resets.",
    ),
    rule(
        "JSON, no content type, gRPC-Web",
        "http 415",
        "PROTOCOL-HTTP2.md: another content type should be answered with 415. grpcio takes any.",
    ),
    rule(
        "a part of a prefix, a part of a message",
        "grpc 13",
        "A message that breaks off is no message (statuscodes.md: INTERNAL). grpcio counts it as "
        "none.",
    ),
    rule(
        "an unknown flag", "grpc 13", "Only 0 and 1 are flags. grpcio reads the lowest bit alone."
    ),
    rule(
        "unknown encoding",
        "grpc 12, grpc 0",
        "compression.md: a message whose encoding is not supported is UNIMPLEMENTED, and one that "
        "is not compressed needs none. grpcio refuses the header as INTERNAL.",
    ),
    rule(
        "40 KB of headers",
        "grpc 8",
        "Each server announces how large a request's headers may be (RFC 9113, 6.5.2).",
    ),
    rule("no time, 1 ns", "grpc 4", "Our deadline is looked at before anything else of the call."),
)


@contextlib.contextmanager
def grpcios():
    """Yield the port of grpcio's server."""

    def unary(request, context):
        return StringValue(value=request.value)

    def stream(request, context):
        for _ in range(3):
            yield StringValue(value=request.value)

    ways = (StringValue.FromString, StringValue.SerializeToString)
    methods = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary, *ways),
        "Stream": grpc.unary_stream_rpc_method_handler(stream, *ways),
    }
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Echo", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def our_own():
    """Yield the port of our server, which runs in a thread."""

    async def unary(request, call):
        return StringValue(value=request.value)

    async def stream(request, call):
        for _ in range(3):
            await call.write(StringValue(value=request.value))

    methods = [
        Method("t.Echo/Unary", StringValue, unary),
        Method("t.Echo/Stream", StringValue, stream),
    ]
    with serving(Dispatcher(methods).serve) as (port,):
        yield port


@pytest.fixture(scope="module")
def ports():
    """Yield the ports of both servers: grpcio's and ours."""
    with grpcios() as theirs, our_own() as ours:
        yield theirs, ours


def ask(port, names):
    """Make the request with these changes; return how it ended and the answer's bytes."""
    headers, body = list(BASE), BODIES["a message"]
    for name in names:
        if name in CHANGES:
            headers = CHANGES[name](headers)
        else:
            body = BODIES[name]
    with RawClient(("127.0.0.1", port)) as client:
        block = client.encoder.encode(headers, huffman=False)
        pieces = [block[at : at + PIECE_BYTES] for at in range(0, len(block), PIECE_BYTES)]
        said = b""
        for number, piece in enumerate(pieces):
            flags = END_HEADERS if number == len(pieces) - 1 else 0
            said += frame(CONTINUATION if number else HEADERS, flags, 1, piece)
        client.say(said + frame(DATA, END_STREAM, 1, body))
        end = client.wait(1, 5.0)
        return str(end), end.body if str(end) == "grpc 0" else b""


def check(ports, names):
    """Check that both servers end a request alike, or that a rule says why not."""
    theirs_port, our_port = ports
    theirs, ours = ask(theirs_port, names), ask(our_port, names)
    if theirs == ours:
        return
    seen = [name for name in names if name not in IGNORED]
    if seen != names and ours == ask(theirs_port, seen):
        return
    allowed = {end for one in RULES if one.names & set(names) for end in one.ours}
    assert ours[0] in allowed, f"{names}: grpcio {theirs}, ours {ours}"


@pytest.mark.parametrize("name", [*CHANGES, *BODIES])
def test_each_request_ends_as_at_grpcios_server(ports, name):
    check(ports, [name])


@pytest.mark.parametrize(
    "count",
    [
        50,
        pytest.param(200, marks=pytest.mark.slow),
        pytest.param(2000, marks=pytest.mark.full),
    ],
)
def test_drawn_requests_end_as_at_grpcios_server(ports, count):
    draw = random.Random(7)
    for _ in range(count):
        names = [draw.choice([*BODIES]), *draw.sample([*CHANGES], draw.randint(0, 3))]
        check(ports, names)


def test_every_rule_is_needed(ports):
    """A rule that no request needs must be removed. How grpcio ends a call without time depends on
    how fast the machine is at that moment, so several calls are made until one differs."""
    for names in [*(one.names for one in RULES), *({name} for name in IGNORED)]:
        calls = sorted(names) * CALLS_MAX
        ends = ([ask(port, [name]) for port in ports] for name in calls)
        assert any(theirs != ours for theirs, ours in ends), names
