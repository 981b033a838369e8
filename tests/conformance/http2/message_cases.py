"""h2spec's cases of RFC 9113, sections 7 and 8: error codes and requests."""

from tests.conformance.http2.cases import (
    WAIT,
    case,
    connection_error,
    data,
    goaway,
    goes_on,
    headers,
    reset,
    stream_error,
)
from tests.support.raw_http2 import END_HEADERS, PUSH_PROMISE, frame

UNKNOWN_CODE = 0xFF


@case("http2/7/1", "GOAWAY with an unknown error")
def _(client):
    client.send(goaway(UNKNOWN_CODE))
    goes_on(client)


@case("http2/7/2", "RST_STREAM with an unknown error")
def _(client):
    client.send(client.call(WAIT, is_last=False), reset(1, UNKNOWN_CODE))
    goes_on(client)


@case("http2/8.1/1", "Headers after DATA that do not end the request")
def _(client):
    client.send(client.call(WAIT, is_last=False), data(1, is_last=False))
    client.send(headers(1, client.encode([(b"x-test", b"ok")]), is_last=False))
    stream_error(client, "PROTOCOL_ERROR")


def plus(name, value):
    """Return a change that adds a header."""
    return lambda fields: [*fields, (name, value)]


def without(name):
    """Return a change that removes a header."""
    return lambda fields: [field for field in fields if field[0] != name]


def twice(name):
    """Return a change that repeats a header."""
    return lambda fields: [*fields, *[field for field in fields if field[0] == name]]


def empty(name):
    """Return a change that empties the value of a header."""
    return lambda fields: [(name, b"") if field[0] == name else field for field in fields]


MALFORMED = {
    "http2/8.1.2/1": ("a name with capital letters", plus(b"X-TEST", b"ok")),
    "http2/8.1.2.1/1": ("an unknown pseudo-header", plus(b":test", b"ok")),
    "http2/8.1.2.1/2": ("a pseudo-header of answers", plus(b":status", b"200")),
    "http2/8.1.2.1/4": (
        "pseudo-headers after a header",
        lambda fields: [(b"x-test", b"ok"), *fields],
    ),
    "http2/8.1.2.2/1": ("a header of HTTP/1's connections", plus(b"connection", b"keep-alive")),
    "http2/8.1.2.2/2": (
        "te with more than trailers",
        lambda fields: [
            *without(b"te")(fields),
            (b"trailers", b"test"),
            (b"te", b"trailers, deflate"),
        ],
    ),
    "http2/8.1.2.3/1": ("an empty path", empty(b":path")),
    "http2/8.1.2.3/2": ("no method", without(b":method")),
    "http2/8.1.2.3/3": ("no scheme", without(b":scheme")),
    "http2/8.1.2.3/4": ("no path", without(b":path")),
    "http2/8.1.2.3/5": ("two methods", twice(b":method")),
    "http2/8.1.2.3/6": ("two schemes", twice(b":scheme")),
    "http2/8.1.2.3/7": ("two paths", twice(b":path")),
}


def malformed(change):
    """Return a case whose request has changed headers."""

    def run(client):
        client.send(headers(1, client.encode(change(client.fields()))))
        stream_error(client, "PROTOCOL_ERROR")

    return run


for number, (title, change) in MALFORMED.items():
    case(number, f"A request with {title}")(malformed(change))


@case("http2/8.1.2.1/3", "A pseudo-header after the request's body")
def _(client):
    client.send(client.call(WAIT, is_last=False), data(1, is_last=False))
    client.send(headers(1, client.encode([(b":method", b"POST")]), is_last=False))
    stream_error(client, "PROTOCOL_ERROR")


def announce(client, length):
    """Begin a request whose headers announce the length of its body."""
    block = client.encode([*client.fields(WAIT), (b"content-length", length)])
    client.send(headers(1, block, is_last=False))


@case("http2/8.1.2.6/1", "A body that is longer than announced, in one frame")
def _(client):
    announce(client, b"1")
    client.send(data(1))
    stream_error(client, "PROTOCOL_ERROR")


@case("http2/8.1.2.6/2", "A body that is longer than announced, in two frames")
def _(client):
    announce(client, b"1")
    client.send(data(1, is_last=False), data(1))
    stream_error(client, "PROTOCOL_ERROR")


@case("http2/8.2/1", "PUSH_PROMISE from a client")
def _(client):
    promise = (3).to_bytes(4, "big") + client.encode(client.fields())
    client.send(frame(PUSH_PROMISE, END_HEADERS, 1, promise))
    connection_error(client, "PROTOCOL_ERROR")
