"""Clients that flood the HTTP port. Each takes the port, and sends at most for some seconds.

The server may close a connection or stop reading from it: `FULL_S` bounds each wait for room.
"""

import contextlib

from tests.support.openai_calls import CHAT, TEXT, Connection, request

FLOOD = 5_000
FULL_S = 2.0
BODY = {"prompt": [1, 2, 3], "max_tokens": 80, "ignore_eos": True, "stream": True}
ASKED = request(TEXT, BODY)
HEAD = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()


@contextlib.contextmanager
def connected(port, count=1, **options):
    """Yield connections, whose waits are short."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Connection(port, **options)) for _ in range(count)]
        for one in made:
            one.socket.settimeout(FULL_S)
        yield made


def pipelined_requests(port):
    """Send requests one behind the other, and read no answer."""
    with connected(port) as [one]:
        for _ in range(FLOOD):
            one.socket.sendall(ASKED)


def requests_of_clients_that_leave(port):
    """Send requests, and reset their connections at once."""
    for _ in range(FLOOD // 10):
        with Connection(port) as one:
            one.send(ASKED)
            one.reset()


def heads_that_never_end(port):
    """Send headers without an end."""
    with connected(port) as [one]:
        one.socket.sendall(HEAD)
        for number in range(FLOOD):
            one.socket.sendall(b"x-%d: %s\r\n" % (number, b"y" * 100))


def bodies_that_never_come(port):
    """Begin requests whose bodies do not come."""
    with connected(port, 300) as many:
        for one in many:
            one.send(HEAD + b"Content-Length: 50000\r\n\r\n{")
        for one in many:
            one.send(b" ")


def bodies_in_tiny_chunks(port):
    """Send a body byte by byte, each in a chunk of its own."""
    with connected(port) as [one]:
        one.socket.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(4 * FLOOD):
            one.socket.sendall(b"1\r\n \r\n")


def readers_of_single_bytes(port):
    """Read a hundred streams byte by byte."""
    with connected(port, 100, window=1) as many:
        for one in many:
            one.send(ASKED)
        for _ in range(20):
            for one in many:
                one.socket.recv(1)


def refused_requests(port):
    """Send requests that are refused, and read the refusals."""
    with connected(port) as [one]:
        for number in range(FLOOD // 5):
            path = (TEXT, CHAT, "/none")[number % 3]
            one.ask(path, {"colour": "red"})
            one.ask(path, verb="OPTIONS")


def answers_that_nobody_reads(port):
    """Ask for the page again and again on twenty connections, and read nothing."""
    with connected(port, 20, window=1) as many:
        for one in many:
            one.socket.sendall(request("/", verb="GET") * 50)


def words_of_other_protocols(port):
    """Send HTTP/2's preface, upgrades, and TLS's first bytes."""
    upgrade = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40)
    socket = upgrade.replace(b"h2c", b"websocket")
    for word in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", upgrade, socket, hello, b"\r\n" * 1000):
        for _ in range(FLOOD // 50):
            with Connection(port) as one:
                one.send(word)


FLOODS = [pipelined_requests, requests_of_clients_that_leave, heads_that_never_end]
FLOODS += [bodies_that_never_come, bodies_in_tiny_chunks, readers_of_single_bytes]
FLOODS += [refused_requests, answers_that_nobody_reads, words_of_other_protocols]
