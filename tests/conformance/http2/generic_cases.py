"""h2spec's generic cases: what every server has to accept."""

from tests.conformance.http2.cases import (
    ECHO,
    ENABLE_PUSH,
    HEADER_TABLE_SIZE,
    HELLO,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    MESSAGE,
    WAIT,
    WINDOW,
    answers,
    answers_bytes,
    case,
    continuation,
    data,
    dependency,
    framed,
    goaway,
    goes_on,
    headers,
    priority,
    reset,
    settings,
    window_update,
)
from tests.support.raw_http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITIZED,
    SETTINGS,
    frame,
)


@case("generic/1/1 http2/3.5/1", "The server's settings come first", begins=True)
def _(client):
    client.say(PREFACE + settings((INITIAL_WINDOW_SIZE, WINDOW)))
    client.wait_frames(SETTINGS)
    first = client.frames[0]
    assert (first.kind, first.flags) == (SETTINGS, 0)


# ---- streams


@case("generic/2/1", "PRIORITY on a stream that is idle")
def _(client):
    client.send(priority(1))
    goes_on(client)


def wait_for_window(client):
    """Make a call whose stream is half-closed, and whose answer waits for a window."""
    client.send(settings((INITIAL_WINDOW_SIZE, 0)), client.call())
    client.wait_frames(HEADERS)


@case("generic/2/2", "WINDOW_UPDATE on a stream that is half-closed")
def _(client):
    wait_for_window(client)
    client.send(window_update(1, 1))
    answers_bytes(client, 1)


@case("generic/2/3", "PRIORITY on a stream that is half-closed")
def _(client):
    wait_for_window(client)
    client.send(priority(1), window_update(1, 1))
    answers_bytes(client, 1)


@case("generic/2/4", "RST_STREAM on a stream that is half-closed")
def _(client):
    client.send(client.call(WAIT), reset(1))
    goes_on(client)


@case("generic/2/5", "PRIORITY on a stream that is closed")
def _(client):
    client.send(client.call())
    answers(client)
    client.send(priority(1))
    goes_on(client)


# ---- frames


@case("generic/3.1/1", "A request in one DATA frame")
def _(client):
    client.send(client.call(ECHO, is_last=False), data(1))
    assert answers(client).body == MESSAGE


@case("generic/3.1/2", "A request in two DATA frames")
def _(client):
    client.send(client.call(ECHO, is_last=False))
    client.send(data(1, MESSAGE[:4], is_last=False), data(1, MESSAGE[4:]))
    assert answers(client).body == MESSAGE


@case("generic/3.1/3", "DATA with padding")
def _(client):
    body = bytes([5]) + MESSAGE + bytes(5)
    client.send(client.call(ECHO, is_last=False), frame(DATA, PADDED | END_STREAM, 1, body))
    assert answers(client).body == MESSAGE


@case("generic/3.2/1", "A request in one HEADERS frame")
def _(client):
    client.send(client.call())
    answers(client)


@case("generic/3.2/2", "HEADERS with padding")
def _(client):
    body = bytes([8]) + client.encode(client.fields(HELLO)) + bytes(8)
    client.send(frame(HEADERS, END_STREAM | END_HEADERS | PADDED, 1, body))
    answers(client)


@case("generic/3.2/3", "HEADERS with a priority")
def _(client):
    body = dependency() + client.encode(client.fields(HELLO))
    client.send(frame(HEADERS, END_STREAM | END_HEADERS | PRIORITIZED, 1, body))
    answers(client)


def before_a_call(client, stream, body):
    """Expect that PRIORITY with this body does not disturb a later call."""
    client.send(priority(stream, body), client.call())
    answers(client)


@case("generic/3.3/1", "PRIORITY with the smallest weight")
def _(client):
    before_a_call(client, 1, dependency(weight=0))


@case("generic/3.3/2", "PRIORITY with the largest weight")
def _(client):
    before_a_call(client, 1, dependency(weight=255))


@case("generic/3.3/3", "PRIORITY that makes a stream depend on another one")
def _(client):
    before_a_call(client, 3, dependency(1, 0))


@case("generic/3.3/4", "PRIORITY that makes a stream depend on another one alone")
def _(client):
    before_a_call(client, 1, dependency(0, 0, is_exclusive=True))


@case("generic/3.3/5", "PRIORITY on an idle stream, before a call on a lower one")
def _(client):
    before_a_call(client, 3, dependency())


@case("generic/3.4/1", "RST_STREAM on an open stream")
def _(client):
    client.send(client.call(is_last=False), reset(1))
    goes_on(client)


@case("generic/3.5/1", "SETTINGS with every setting that there is")
def _(client):
    client.send(
        settings(
            (HEADER_TABLE_SIZE, 4096),
            (ENABLE_PUSH, 1),
            (MAX_CONCURRENT_STREAMS, 100),
            (INITIAL_WINDOW_SIZE, WINDOW),
            (MAX_FRAME_SIZE, 2**14),
            (MAX_HEADER_LIST_SIZE, 100),
        )
    )
    assert client.wait_frames(SETTINGS, 3)[-1].flags == ACK


@case("generic/3.7/1 http2/6.7/1", "PING")
def _(client):
    client.send(frame(PING, 0, 0, b"h2spec\0\0"))
    answer = client.wait_frames(PING)[0]
    assert (answer.flags, answer.body) == (ACK, b"h2spec\0\0")


@case("generic/3.8/1", "GOAWAY")
def _(client):
    client.send(goaway(0, b"h2spec"))
    goes_on(client)


@case("generic/3.9/1", "WINDOW_UPDATE of the connection")
def _(client):
    client.send(window_update(0, 1))
    goes_on(client)


@case("generic/3.9/2", "WINDOW_UPDATE of a stream")
def _(client):
    client.send(client.call(), window_update(1, 1))
    answers(client)


@case("generic/3.10/1", "A block of headers in two frames")
def _(client):
    block = client.encode(client.fields(HELLO))
    client.send(headers(1, block[:5], is_whole=False), continuation(1, block[5:]))
    answers(client)


@case("generic/3.10/2", "A block of headers in three frames")
def _(client):
    block = client.encode(client.fields(HELLO))
    client.send(
        headers(1, block[:5], is_whole=False),
        continuation(1, block[5:10], is_whole=False),
        continuation(1, block[10:]),
    )
    answers(client)


# ---- requests


def ask(client, method):
    """Send a request of this method, without a body."""
    fields = client.fields(HELLO)
    fields[0] = (b":method", method)
    client.send(headers(1, client.encode(fields)))


@case("generic/4/1", "GET")
def _(client):
    ask(client, b"GET")
    answers(client, how="http 405")


@case("generic/4/2", "HEAD")
def _(client):
    ask(client, b"HEAD")
    answers(client, how="http 405")


@case("generic/4/3", "POST")
def _(client):
    client.send(client.call(ECHO, is_last=False), data(1, framed("test")))
    answers(client)


@case("generic/4/4", "POST with trailers")
def _(client):
    opening = client.encode([*client.fields(ECHO), (b"trailer", b"x-test")])
    trailers = client.encode([(b"x-test", b"ok")])
    client.send(headers(1, opening, is_last=False), data(1, is_last=False), headers(1, trailers))
    assert answers(client).body == MESSAGE


# ---- HPACK

USER_AGENT, HUFFMAN_USER_AGENT = b"\x0auser-agent", bytes.fromhex("87b505b161cc5a93")
X_TEST, HUFFMAN_X_TEST = b"\x06x-test", bytes.fromhex("85f2b24a84ff")
H2SPEC, HUFFMAN_H2SPEC = b"\x06h2spec", bytes.fromhex("849c48aca4")
INDEXED, NOT_INDEXED, NEVER_INDEXED = b"\x40", b"\x00", b"\x10"
# h2spec's titles say that the first cases' names are indexed, but sends them as text, as we do.
REPRESENTATIONS = {
    1: b"\xba",  # user-agent with an empty value, from the static table
    2: INDEXED + HUFFMAN_USER_AGENT + HUFFMAN_H2SPEC,
    3: INDEXED + USER_AGENT + H2SPEC,
    4: INDEXED + X_TEST + H2SPEC,
    5: INDEXED + HUFFMAN_X_TEST + HUFFMAN_H2SPEC,
    6: NOT_INDEXED + USER_AGENT + H2SPEC,
    7: NOT_INDEXED + HUFFMAN_USER_AGENT + HUFFMAN_H2SPEC,
    8: NOT_INDEXED + X_TEST + H2SPEC,
    9: NOT_INDEXED + HUFFMAN_X_TEST + HUFFMAN_H2SPEC,
    10: NEVER_INDEXED + USER_AGENT + H2SPEC,
    11: NEVER_INDEXED + HUFFMAN_USER_AGENT + HUFFMAN_H2SPEC,
    12: NEVER_INDEXED + HUFFMAN_X_TEST + HUFFMAN_H2SPEC,
    13: NEVER_INDEXED + HUFFMAN_X_TEST + HUFFMAN_H2SPEC,
}


def with_block(block):
    """Return a case that expects an answer to a call whose headers end with these bytes."""

    def run(client):
        client.send(headers(1, client.encode(client.fields(HELLO)) + block))
        answers(client)

    return run


for number, representation in REPRESENTATIONS.items():
    case(f"generic/5/{number}", "A representation of a header")(with_block(representation))


@case("generic/5/14", "A smaller table of headers")
def _(client):
    client.encoder.header_table_size = 128
    block = client.encode(client.fields(HELLO))
    assert block.startswith(b"\x3f\x61")
    client.send(headers(1, block))
    answers(client)


@case("generic/5/15", "A smaller table of headers, and the old size again")
def _(client):
    sizes = bytes.fromhex("3f61 3fe11f")  # 128 and 4096 bytes
    client.send(headers(1, sizes + client.encode(client.fields(HELLO))))
    answers(client)
