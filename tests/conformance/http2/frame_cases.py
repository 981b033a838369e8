"""h2spec's cases of RFC 9113, section 6: each kind of frame."""

from tests.conformance.http2.cases import (
    ENABLE_PUSH,
    FILLER,
    HELLO,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    WAIT,
    WINDOW_MAX,
    answers,
    answers_bytes,
    case,
    connection_error,
    continuation,
    data,
    goes_on,
    headers,
    priority,
    reset,
    settings,
    stream_error,
    window_update,
)
from tests.support.raw_http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)

# ---- 6.1: DATA


@case("http2/6.1/1", "DATA without a stream")
def _(client):
    client.send(data(0))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/6.1/3", "DATA with more padding than bytes")
def _(client):
    block = client.encode([*client.fields(), (b"content-length", b"4")])
    client.send(headers(1, block, is_last=False))
    client.send(frame(DATA, PADDED | END_STREAM, 1, b"\x06Test"))
    connection_error(client, "PROTOCOL_ERROR")


# ---- 6.2: HEADERS


@case("http2/6.2/3", "HEADERS without a stream")
def _(client):
    client.send(client.call(stream=0))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/6.2/4", "HEADERS with more padding than bytes")
def _(client):
    block = client.encode(client.fields(HELLO))
    body = bytes([len(block) + 2]) + block
    client.send(frame(HEADERS, END_STREAM | END_HEADERS | PADDED, 1, body))
    connection_error(client, "PROTOCOL_ERROR")


# ---- 6.3 and 6.4: PRIORITY and RST_STREAM


@case("http2/6.3/1", "PRIORITY without a stream")
def _(client):
    client.send(priority(0))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/6.3/2", "PRIORITY of a wrong length")
def _(client):
    client.send(client.call(WAIT), priority(1, bytes.fromhex("80000001")))
    stream_error(client, "FRAME_SIZE_ERROR")


@case("http2/6.4/1", "RST_STREAM without a stream")
def _(client):
    client.send(reset(0))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/6.4/3", "RST_STREAM of a wrong length")
def _(client):
    client.send(client.call(WAIT), frame(RST_STREAM, 0, 1, bytes(3)))
    connection_error(client, "FRAME_SIZE_ERROR")


# ---- 6.5: SETTINGS


@case("http2/6.5/1", "SETTINGS that acknowledge, with bytes")
def _(client):
    client.send(frame(SETTINGS, ACK, 0, bytes(1)))
    connection_error(client, "FRAME_SIZE_ERROR")


@case("http2/6.5/2", "SETTINGS on a stream")
def _(client):
    client.send(frame(SETTINGS, 0, 1, bytes.fromhex("000300000064")))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/6.5/3", "SETTINGS of a wrong length")
def _(client):
    client.send(frame(SETTINGS, 0, 0, bytes.fromhex("000300")))
    connection_error(client, "PROTOCOL_ERROR", "FRAME_SIZE_ERROR")


@case("http2/6.5.2/1", "A wrong value of SETTINGS_ENABLE_PUSH")
def _(client):
    client.send(settings((ENABLE_PUSH, 2)))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/6.5.2/2 http2/6.9.2/3", "SETTINGS_INITIAL_WINDOW_SIZE above the largest window")
def _(client):
    client.send(settings((INITIAL_WINDOW_SIZE, WINDOW_MAX + 1)))
    connection_error(client, "FLOW_CONTROL_ERROR")


@case("http2/6.5.2/3", "SETTINGS_MAX_FRAME_SIZE below the initial value")
def _(client):
    client.send(settings((MAX_FRAME_SIZE, 2**14 - 1)))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/6.5.2/4", "SETTINGS_MAX_FRAME_SIZE above what a frame can have")
def _(client):
    client.send(settings((MAX_FRAME_SIZE, 2**24)))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/6.5.2/5", "An unknown setting")
def _(client):
    client.send(settings((0xFF, 1)))
    goes_on(client)


@case("http2/6.5.3/1", "A setting that comes twice in one frame")
def _(client):
    client.send(settings((INITIAL_WINDOW_SIZE, 100), (INITIAL_WINDOW_SIZE, 1)))
    client.wait_frames(SETTINGS, 3)
    client.send(client.call())
    answers_bytes(client, 1)


@case("http2/6.5.3/2", "SETTINGS are acknowledged")
def _(client):
    client.send(settings((ENABLE_PUSH, 0)))
    assert client.wait_frames(SETTINGS, 3)[-1].flags == ACK


# ---- 6.7 and 6.8: PING and GOAWAY


@case("http2/6.7/2", "An answer to no PING")
def _(client):
    client.send(frame(PING, ACK, 0, b"invalid\0"), frame(PING, 0, 0, b"h2spec\0\0"))
    client.settle()
    bodies = [one.body for one in client.wait_frames(PING)]
    assert b"h2spec\0\0" in bodies
    assert b"invalid\0" not in bodies


@case("http2/6.7/3", "PING on a stream")
def _(client):
    client.send(frame(PING, 0, 1, bytes(8)))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/6.7/4", "PING of a wrong length")
def _(client):
    client.send(frame(PING, 0, 0, bytes(6)))
    connection_error(client, "FRAME_SIZE_ERROR")


@case("http2/6.8/1", "GOAWAY on a stream")
def _(client):
    client.send(frame(GOAWAY, 0, 1, bytes(8)))
    connection_error(client, "PROTOCOL_ERROR")


# ---- 6.9: WINDOW_UPDATE


@case("http2/6.9/1", "WINDOW_UPDATE of the connection by nothing")
def _(client):
    client.send(window_update(0, 0))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/6.9/2", "WINDOW_UPDATE of a stream by nothing")
def _(client):
    client.send(client.call(WAIT, is_last=False), window_update(1, 0))
    stream_error(client, "PROTOCOL_ERROR")


@case("http2/6.9/3", "WINDOW_UPDATE of a wrong length")
def _(client):
    client.send(frame(WINDOW_UPDATE, 0, 0, bytes.fromhex("000001")))
    connection_error(client, "FRAME_SIZE_ERROR")


@case("http2/6.9.1/1", "A window of one byte")
def _(client):
    client.send(settings((INITIAL_WINDOW_SIZE, 1)))
    client.wait_frames(SETTINGS, 3)
    client.send(client.call())
    answers_bytes(client, 1)


@case("http2/6.9.1/2", "A window of the connection above the largest size")
def _(client):
    client.send(window_update(0, WINDOW_MAX), window_update(0, WINDOW_MAX))
    connection_error(client, "FLOW_CONTROL_ERROR")


@case("http2/6.9.1/3", "A window of a stream above the largest size")
def _(client):
    client.send(client.call(WAIT, is_last=False))
    client.send(window_update(1, WINDOW_MAX), window_update(1, WINDOW_MAX))
    stream_error(client, "FLOW_CONTROL_ERROR")


@case("http2/6.9.2/1", "A window that the client opens after the request")
def _(client):
    client.send(settings((INITIAL_WINDOW_SIZE, 0)), client.call())
    client.wait_frames(HEADERS)
    client.send(settings((INITIAL_WINDOW_SIZE, 1)))
    answers_bytes(client, 1)


@case("http2/6.9.2/2", "A window that becomes negative")
def _(client):
    client.send(settings((INITIAL_WINDOW_SIZE, 3)))
    client.send(client.call())
    answers_bytes(client, 3)
    client.send(settings((INITIAL_WINDOW_SIZE, 2)))
    client.send(window_update(1, 2))
    answers_bytes(client, 1, 2)


# ---- 6.10: CONTINUATION


def opening(client, path=WAIT, *, is_last=True):
    """Return HEADERS that CONTINUATION has to follow."""
    return headers(1, client.encode(client.fields(path)), is_last=is_last, is_whole=False)


def more(client, *, stream=1, is_whole=True):
    return continuation(stream, client.encode([FILLER]), is_whole=is_whole)


@case("http2/6.10/1", "Several CONTINUATION after HEADERS")
def _(client):
    client.send(opening(client, HELLO), more(client, is_whole=False), more(client))
    answers(client)


@case("http2/6.10/2", "DATA after CONTINUATION that is not the last one")
def _(client):
    client.send(opening(client, is_last=False), more(client, is_whole=False), data(1))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/6.10/3", "CONTINUATION without a stream")
def _(client):
    client.send(opening(client), more(client, stream=0))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/6.10/4", "CONTINUATION after HEADERS that were the last ones")
def _(client):
    client.send(client.call(WAIT), more(client))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/6.10/5", "CONTINUATION after the last one")
def _(client):
    client.send(opening(client), more(client), more(client))
    connection_error(client, "PROTOCOL_ERROR")


@case("http2/6.10/6", "CONTINUATION after DATA")
def _(client):
    client.send(
        opening(client, is_last=False),
        data(1),
        more(client, is_whole=False),
        more(client, stream=0),
    )
    connection_error(client, "PROTOCOL_ERROR")
