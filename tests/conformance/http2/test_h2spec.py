"""All of h2spec's cases for servers, with and without TLS: does the server keep HTTP/2's rules?"""

import ssl
from typing import NamedTuple

import pytest
import trio
import trustme
from google.protobuf.wrappers_pb2 import StringValue

from grpc_service.rpc.limits import Limits
from grpc_service.rpc.methods import Dispatcher, Method
from tests.conformance.http2 import (
    connection_cases,
    frame_cases,
    generic_cases,
    hpack_cases,
    message_cases,
)
from tests.conformance.http2.cases import (
    CASES,
    ECHO,
    HELLO,
    WAIT,
    Client,
    UnmetError,
    connection_error,
    data,
    goes_on,
    stream_error,
)
from tests.support.raw_http2 import PING, frame
from tests.support.rpc_thread import serving

MODULES = (generic_cases, connection_cases, frame_cases, message_cases, hpack_cases)
STREAMS = 100  # a client may open this many

# How many cases h2spec has in each section.
COUNTS = {
    **{"generic/1": 1, "generic/2": 5, "generic/3.1": 3, "generic/3.2": 3, "generic/3.3": 5},
    **{"generic/3.4": 1, "generic/3.5": 1, "generic/3.7": 1, "generic/3.8": 1, "generic/3.9": 2},
    **{"generic/3.10": 2, "generic/4": 4, "generic/5": 15},
    **{"http2/3.5": 2, "http2/4.1": 3, "http2/4.2": 3, "http2/4.3": 3, "http2/5.1": 13},
    **{"http2/5.1.1": 2, "http2/5.1.2": 1, "http2/5.3.1": 2, "http2/5.4.1": 2, "http2/5.5": 2},
    **{"http2/6.1": 3, "http2/6.2": 4, "http2/6.3": 2, "http2/6.4": 3, "http2/6.5": 3},
    **{"http2/6.5.2": 5, "http2/6.5.3": 2, "http2/6.7": 4, "http2/6.8": 1, "http2/6.9": 3},
    **{"http2/6.9.1": 3, "http2/6.9.2": 3, "http2/6.10": 6, "http2/7": 2, "http2/8.1": 1},
    **{"http2/8.1.2": 1, "http2/8.1.2.1": 4, "http2/8.1.2.2": 2, "http2/8.1.2.3": 7},
    **{"http2/8.1.2.6": 2, "http2/8.2": 1},
    **{"hpack/2.3.3": 2, "hpack/4.2": 1, "hpack/5.2": 3, "hpack/6.1": 1, "hpack/6.3": 1},
}


class Explanation(NamedTuple):
    """What our server does instead of what a case expects, and why that is right."""

    instead: str
    reason: str


def explained(numbers, instead, reason):
    """Return explanations for these cases, whose numbers are separated by spaces."""
    return {number: Explanation(instead, reason) for number in numbers.split()}


EXPLAINED = {
    **explained(
        "http2/6.5/1",
        "goaway PROTOCOL_ERROR",
        "hyperframe does not tell this fault from others. RFC 9113, 5.4: a generic error can "
        "always be used instead of a specific one.",
    ),
    **explained(
        "http2/8.1/1 http2/8.1.2.1/3",
        "goaway PROTOCOL_ERROR",
        "h2 ends the connection. RFC 9113, 5.4.1: a stream's error may be treated as the "
        "connection's.",
    ),
    **explained(
        "http2/5.3.1/1",
        "goaway PROTOCOL_ERROR",
        "h2 ends the connection. RFC 9113, 5.3.2, has taken this rule out with all priorities.",
    ),
    **explained(
        "http2/5.3.1/2",
        "goes on",
        "RFC 9113, 5.3.2, has taken this rule out with all priorities.",
    ),
    **explained(
        "http2/5.1/8",
        "goes on",
        "DATA on a closed stream is skipped, whoever has closed it. RFC 9113, 5.1: an endpoint can "
        "do so for all streams that are closed. h2spec follows RFC 7540.",
    ),
}


# ---- the servers


async def echo(request, call):
    return StringValue(value=request.value)


async def hello(request, call):
    while await call.read() is not None:
        pass
    return StringValue(value="Hello, h2spec!")


async def wait(request, call):
    await trio.sleep_forever()


METHODS = (
    Method(ECHO[1:], StringValue, echo),
    Method(HELLO[1:], StringValue, hello, takes_stream=True),
    Method(WAIT[1:], StringValue, wait, takes_stream=True),
)


@pytest.fixture(scope="module", params=["plaintext", "tls"])
def connect(request):
    """Yield a function that connects a client, with and without TLS."""
    ours = theirs = None
    if request.param == "tls":
        authority = trustme.CA()
        ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
        authority.issue_cert("localhost").configure_cert(ours)
        authority.configure_trust(theirs)
        for context in (ours, theirs):
            context.set_alpn_protocols(["h2"])
    limits = Limits(streams_per_connection=STREAMS)
    with serving(Dispatcher(METHODS).serve, tls=ours, limits=limits) as ports:
        yield lambda **options: Client(ports[-1], theirs, **options)


# ---- the tests


@pytest.mark.parametrize("is_stepwise", [False, True], ids=["at_once", "stepwise"])
@pytest.mark.parametrize("number", CASES)
def test_the_server_does_what_h2spec_expects(connect, number, is_stepwise):
    """Frames that arrive together are handled by other code than frames that arrive one by one."""
    one, found = CASES[number], ""
    with connect(is_stepwise=is_stepwise) as client:
        if not one.begins:
            client.shake_hands()
        try:
            one.run(client)
        except UnmetError as unmet:
            found = str(unmet)
    allowed = EXPLAINED[number].instead if number in EXPLAINED else ""
    assert found == allowed, f"{one.title}: the server's answer was {found!r}"


def test_every_case_of_h2spec_is_here():
    theirs = {f"{part}/{n}" for part, count in COUNTS.items() for n in range(1, count + 1)}
    assert len(theirs) == sum(COUNTS.values()) == 147
    assert set(CASES) == theirs
    assert set(EXPLAINED) <= set(CASES)
    assert all(one.reason for one in EXPLAINED.values())


SENT = {
    "goes on": lambda client: frame(PING, 0, 0, bytes(8)),
    "reset STREAM_CLOSED": lambda client: client.call(WAIT) + data(1),
    "goaway PROTOCOL_ERROR": lambda client: frame(PING, 0, 1, bytes(8)),
}
EXPECTATIONS = {
    "goes on": goes_on,
    "reset STREAM_CLOSED": lambda client: stream_error(client, "STREAM_CLOSED"),
    "reset CANCEL": lambda client: stream_error(client, "CANCEL"),
    "goaway PROTOCOL_ERROR": lambda client: connection_error(client, "PROTOCOL_ERROR"),
    "goaway NO_ERROR": lambda client: connection_error(client, "NO_ERROR"),
}


@pytest.mark.parametrize("happens", SENT)
@pytest.mark.parametrize("expected", EXPECTATIONS)
def test_an_expectation_is_met_only_by_what_it_says(connect, happens, expected):
    with connect() as client:
        client.shake_hands()
        client.send(SENT[happens](client))
        if happens == expected:
            EXPECTATIONS[expected](client)
        else:
            with pytest.raises(UnmetError, match=f"^{happens}$"):
                EXPECTATIONS[expected](client)
