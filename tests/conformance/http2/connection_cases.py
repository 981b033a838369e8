"""h2spec's cases of RFC 9113, sections 3 to 5: the preface, frames, headers, streams.

h2spec numbers its cases by the sections of RFC 7540, which RFC 9113 has replaced.
"""

from tests.conformance.http2.cases import (
    ECHO,
    FILLER,
    FRAME_BYTES,
    HELLO,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    WAIT,
    answers,
    case,
    connection_error,
    continuation,
    data,
    dependency,
    expect,
    framed,
    goes_on,
    headers,
    outcome,
    priority,
    reset,
    settings,
    stream_error,
    window_update,
)
from tests.support.raw_http2 import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PRIORITIZED,
    frame,
)

UNKNOWN = 0x16  # no frame has this kind, and PING has none of these flags


# ---- 3: the preface


@case("http2/3.5/2", "No preface", begins=True)
def _(client):
    client.say(b"INVALID CONNECTION PREFACE\r\n\r\n")
    expect(outcome(client), "goaway PROTOCOL_ERROR", "closed")  # RFC 9113, section 3.4, allows both


# ---- 4: frames and blocks of headers


@case("http2/4.1/1 http2/5.5/1", "A frame of an unknown kind")
def _(client):
    client.send(frame(UNKNOWN, 0, 0, bytes(8)))
    goes_on(client)


@case("http2/4.1/2", "PING with flags that do not exist")
def _(client):
    client.send(frame(PING, UNKNOWN, 0, b"flagged!"))
    assert client.wait_frames(PING)[0].body == b"flagged!"


@case("http2/4.1/3", "PING with the reserved bit")
def _(client):
    client.send(frame(PING, UNKNOWN, 1 << 31, b"reserved"))
    assert client.wait_frames(PING)[0].body == b"reserved"


@case("http2/4.2/1", "DATA of the largest size")
def _(client):
    message = framed("x" * (FRAME_BYTES - 8))  # 5 bytes come before a message, and 3 in it
    assert len(message) == FRAME_BYTES
    client.send(client.call(ECHO, is_last=False), data(1, message))
    assert answers(client).body == message


@case("http2/4.2/2", "DATA of one byte too much")
def _(client):
    client.send(client.call(ECHO, is_last=False), data(1, bytes(FRAME_BYTES + 1)))
    connection_error(client, "FRAME_SIZE_ERROR")


@case("http2/4.2/3", "HEADERS that are too long")
def _(client):
    block = client.encode([*client.fields(), *[(b"x-%d" % n, FILLER[1]) for n in range(5)]])
    assert len(block) > FRAME_BYTES
    client.send(headers(1, block))
    connection_error(client, "FRAME_SIZE_ERROR")


@case("http2/4.3/1", "A block of headers that breaks off")
def _(client):
    client.send(headers(1, b"\x40"))
    connection_error(client, "COMPRESSION_ERROR")


@case("http2/4.3/2 http2/6.2/1", "PRIORITY amid a block of headers")
def _(client):
    amid_headers(client, priority(1))


@case("http2/4.3/3 http2/6.2/2", "HEADERS of another stream amid a block of headers")
def _(client):
    amid_headers(client, client.call(stream=3))


def amid_headers(client, intruder):
    """Expect an error for the frame ``intruder`` between HEADERS and CONTINUATION."""
    opening = headers(1, client.encode(client.fields()), is_last=False, is_whole=False)
    client.send(opening, intruder, continuation(1, client.encode([FILLER])))
    connection_error(client, "PROTOCOL_ERROR")


# ---- 5.1: the states of a stream


@case("http2/5.1/1", "DATA on an idle stream")
def _(client):
    client.send(data(1))
    connection_error(client, "PROTOCOL_ERROR", "STREAM_CLOSED")


@case("http2/5.1/2 http2/6.4/2", "RST_STREAM on an idle stream")
def _(client):
    client.send(reset(1))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/5.1/3", "WINDOW_UPDATE on an idle stream")
def _(client):
    client.send(window_update(1, 100))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/5.1/4", "CONTINUATION on an idle stream")
def _(client):
    client.send(continuation(1, client.encode(client.fields())))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/5.1/5 http2/6.1/2", "DATA on a stream that is half-closed")
def _(client):
    client.send(client.call(WAIT), data(1))
    stream_error(client, "STREAM_CLOSED")


@case("http2/5.1/6", "HEADERS on a stream that is half-closed")
def _(client):
    client.send(client.call(WAIT), client.call(WAIT))
    stream_error(client, "STREAM_CLOSED")


@case("http2/5.1/7", "CONTINUATION on a stream that is half-closed")
def _(client):
    client.send(client.call(WAIT), continuation(1, client.encode(client.fields())))
    connection_error(client, "STREAM_CLOSED", "PROTOCOL_ERROR")


@case("http2/5.1/8", "DATA on a stream that the client has reset")
def _(client):
    for one in (client.call(WAIT, is_last=False), reset(1), data(1)):
        client.settle()
        client.send(one)
    stream_error(client, "STREAM_CLOSED")


@case("http2/5.1/9", "HEADERS on a stream that the client has reset")
def _(client):
    client.send(client.call(WAIT, is_last=False), reset(1), client.call(WAIT))
    stream_error(client, "STREAM_CLOSED")


@case("http2/5.1/10", "CONTINUATION on a stream that the client has reset")
def _(client):
    client.send(client.call(WAIT, is_last=False), reset(1))
    client.settle()
    client.send(continuation(1, client.encode([FILLER])))
    connection_error(client, "STREAM_CLOSED", "PROTOCOL_ERROR")


def close(client):
    """Make a call, and wait until its stream is closed."""
    client.send(client.call())
    answers(client)


@case("http2/5.1/11", "DATA on a stream that is closed")
def _(client):
    close(client)
    client.send(data(1))
    stream_error(client, "STREAM_CLOSED")


@case("http2/5.1/12", "HEADERS on a stream that is closed")
def _(client):
    close(client)
    client.send(client.call())
    connection_error(client, "STREAM_CLOSED")


@case("http2/5.1/13", "CONTINUATION on a stream that is closed")
def _(client):
    close(client)
    client.send(continuation(1, client.encode([FILLER])))
    connection_error(client, "STREAM_CLOSED", "PROTOCOL_ERROR")


@case("http2/5.1.1/1", "A stream with an even number")
def _(client):
    client.send(client.call(stream=2))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/5.1.1/2", "A stream with a smaller number than the one before")
def _(client):
    client.send(client.call(stream=5), client.call(stream=3))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/5.1.2/1", "One stream too many")
def _(client):
    count = client.settings[MAX_CONCURRENT_STREAMS]
    streams = range(1, 2 * count + 2, 2)
    client.send(settings((INITIAL_WINDOW_SIZE, 0)))
    client.send(*[client.call(WAIT, stream=stream) for stream in streams])
    stream_error(client, "PROTOCOL_ERROR", "REFUSED_STREAM", stream=streams[-1])
    over = {stream for stream, end in client.ends.items() if end.is_over}
    assert over == {streams[-1]}  # the streams before the last one go on


# ---- 5.3 to 5.5: priorities, errors, extensions


@case("http2/5.3.1/1", "HEADERS that make a stream depend on itself")
def _(client):
    body = dependency(1) + client.encode(client.fields(HELLO))
    client.send(frame(HEADERS, END_STREAM | END_HEADERS | PRIORITIZED, 1, body))
    stream_error(client, "PROTOCOL_ERROR")


@case("http2/5.3.1/2", "PRIORITY that makes a stream depend on itself")
def _(client):
    client.send(priority(1, dependency(1)))
    stream_error(client, "PROTOCOL_ERROR")


@case("http2/5.4.1/1 http2/5.4.1/2", "GOAWAY, and the connection's end, after an error")
def _(client):
    client.send(frame(PING, 0, 3, bytes(8)))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/5.5/2", "A frame of an extension amid a block of headers")
def _(client):
    client.send(headers(1, client.encode(client.fields()), is_whole=False))
    client.send(frame(UNKNOWN, 0, 0, bytes(8)))
    connection_error(client, "PROTOCOL_ERROR")
