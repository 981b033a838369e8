"""gRPC's own interop cases: clients of two other libraries against the RPC library's server.

Every case runs on grpcio, plain and over TLS, and on Node's grpc-js (`clients/interop.js`). A case
says once what the client sends and what it must receive; a stack makes its calls.
Source: grpc/doc/interop-test-descriptions.md, Client.
"""

import base64
import contextlib
import random
import shutil
import ssl
import subprocess
import time
from pathlib import Path

import grpc
import pytest
import trustme

from grpc_service.rpc.limits import Limits
from tests.interop.interop_stacks import Call, GrpcioStack, NodeStack
from tests.interop.testing_service import (
    ECHO_INITIAL,
    ECHO_TRAILING,
    Servicer,
    serving,
)
from tests.support import toolchains
from tests.support.wire import wait_until

CLIENT = Path(__file__).resolve().parent / "clients" / "interop.js"
OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, UNIMPLEMENTED = 0, 1, 2, 3, 4, 12

# ---- the cases

CASES = {}


def case(function):
    """Add a case of gRPC's; the function has gRPC's name of the case."""
    CASES[function.__name__] = function
    return function


def body(size):
    """Return a payload of zeros."""
    return {"body": base64.b64encode(bytes(size)).decode()}


def noise(size):
    """Return a payload of random bytes, which no compression makes smaller."""
    return {"body": base64.b64encode(random.Random(7).randbytes(size)).decode()}


def answers(*sizes):
    """Return messages with payloads of zeros."""
    return [{"payload": {"body": size}} for size in sizes]


def wants(size, *more, **fields):
    """Return a request for one answer or several, in a stream."""
    return {"response_parameters": [{"size": one} for one in (size, *more)], **fields}


CONCURRENT = 50  # gRPC's case has 1000; the answers to 50 fit into `Limits.held_bytes`
# Limits of gRPC's own clients are 10 and 1 s; a busy machine takes longer.
SOAK_ITERATIONS, SOAK_LATENCY_S = 10, 10.0
LARGE = {"response_size": 314159, "payload": body(271828)}
LARGE_UNARY = Call("UnaryCall", [LARGE])
YES, NO = {"value": True}, {"value": False}


def check(outcome, *sizes):
    """Check that a call ended well, with answers of these sizes."""
    assert (outcome.code, outcome.text) == (OK, "")
    assert outcome.messages == answers(*sizes)


@case
def empty_unary(stack, servicer):
    outcome = stack.run(Call("EmptyCall", [{}]))
    assert (outcome.code, outcome.messages) == (OK, [{}])


@case
def large_unary(stack, servicer):
    check(stack.run(LARGE_UNARY), 314159)


@case
def client_compressed_unary(stack, servicer):
    compressed = LARGE | {"expect_compressed": YES}
    plain = LARGE | {"expect_compressed": NO}
    with stack.recorded(requests=[0, 0, 1]) as recorded:
        probe = recorded.run(Call("UnaryCall", [compressed]))
        assert (probe.code, probe.messages) == (INVALID_ARGUMENT, [])
        check(recorded.run(Call("UnaryCall", [compressed], compressed=True)), 314159)
        check(recorded.run(Call("UnaryCall", [plain])), 314159)


@case
def server_compressed_unary(stack, servicer):
    with stack.recorded(answers=[1, 0]) as recorded:
        check(recorded.run(Call("UnaryCall", [LARGE | {"response_compressed": YES}])), 314159)
        check(recorded.run(Call("UnaryCall", [LARGE | {"response_compressed": NO}])), 314159)


@case
def client_streaming(stack, servicer):
    requests = [{"payload": body(size)} for size in (27182, 8, 1828, 45904)]
    outcome = stack.run(Call("StreamingInputCall", requests))
    assert (outcome.code, outcome.messages) == (OK, [{"aggregated_payload_size": 74922}])


@case
def client_compressed_streaming(stack, servicer):
    probe = {"expect_compressed": YES, "payload": body(27182)}
    # In a compressed call, grpcio leaves only messages uncompressed that compression would enlarge.
    second = {"expect_compressed": NO, "payload": noise(45904)}
    with stack.recorded(requests=[0, 1, 0]) as recorded:
        outcome = recorded.run(Call("StreamingInputCall", [probe]))
        assert (outcome.code, outcome.messages) == (INVALID_ARGUMENT, [])
        call = Call("StreamingInputCall", [probe, second], compressed=True, plain=(1,))
        outcome = recorded.run(call)
        assert (outcome.code, outcome.messages) == (OK, [{"aggregated_payload_size": 73086}])


@case
def server_streaming(stack, servicer):
    sizes = (31415, 9, 2653, 58979)
    check(stack.run(Call("StreamingOutputCall", [wants(*sizes)])), *sizes)


@case
def server_compressed_streaming(stack, servicer):
    parameters = [{"size": 31415, "compressed": YES}, {"size": 92653, "compressed": NO}]
    request = {"response_parameters": parameters}
    with stack.recorded(answers=[1, 0]) as recorded:
        check(recorded.run(Call("StreamingOutputCall", [request])), 31415, 92653)


@case
def ping_pong(stack, servicer):
    sizes = {31415: 27182, 9: 8, 2653: 1828, 58979: 45904}
    requests = [wants(answer, payload=body(size)) for answer, size in sizes.items()]
    check(stack.run(Call("FullDuplexCall", requests, turn_by_turn=True)), *sizes)


@case
def empty_stream(stack, servicer):
    check(stack.run(Call("FullDuplexCall", [])))


@case
def custom_metadata(stack, servicer):
    sent = {ECHO_INITIAL: "test_initial_metadata_value", ECHO_TRAILING: "q6ur"}
    full_duplex = Call("FullDuplexCall", [wants(314159, payload=body(271828))])
    for call in (LARGE_UNARY, full_duplex):
        outcome = stack.run(call, metadata=sent)
        check(outcome, 314159)
        assert outcome.initial[ECHO_INITIAL] == "test_initial_metadata_value"
        assert outcome.trailing[ECHO_TRAILING] == b"\xab\xab\xab"


def check_echo(stack, message, *methods):
    """Check that a call ends with the code and the message that it asks for."""
    for method in methods:
        echo = {"response_status": {"code": UNKNOWN, "message": message}}
        outcome = stack.run(Call(method, [echo]))
        assert (outcome.code, outcome.text, outcome.messages) == (UNKNOWN, message, [])


@case
def status_code_and_message(stack, servicer):
    check_echo(stack, "test status message", "UnaryCall", "FullDuplexCall")


@case
def special_status_message(stack, servicer):
    message = "\t\ntest with whitespace\r\nand Unicode BMP \u263a and non-BMP \U0001f608\t\n"
    check_echo(stack, message, "UnaryCall")


@case
def unimplemented_method(stack, servicer):
    outcome = stack.run(Call("UnimplementedCall", [{}]))
    assert (outcome.code, outcome.messages) == (UNIMPLEMENTED, [])


@case
def unimplemented_service(stack, servicer):
    outcome = stack.run(Call("UnimplementedService/UnimplementedCall", [{}]))
    assert (outcome.code, outcome.messages) == (UNIMPLEMENTED, [])


def check_cut(stack, servicer):
    """Check that the server ends a call that its client has given up."""
    wait_until(lambda: servicer.num_running == 0)
    assert servicer.num_cancelled or stack.ends_before_it_resets


@case
def cancel_after_begin(stack, servicer):
    calls = stack.begin(Call("StreamingInputCall", [], half_closes=False))
    wait_until(lambda: servicer.num_running == 1)
    calls.cancel()
    [outcome] = calls.outcomes()
    assert (outcome.code, outcome.messages) == (CANCELLED, [])
    check_cut(stack, servicer)


@case
def cancel_after_first_response(stack, servicer):
    request = wants(31415, payload=body(27182))
    outcome = stack.run(Call("FullDuplexCall", [request], half_closes=False, cancel_after=1))
    assert outcome.code == CANCELLED
    assert outcome.messages == answers(31415)
    check_cut(stack, servicer)


@case
def timeout_on_sleeping_server(stack, servicer):
    call = Call("FullDuplexCall", [{"payload": body(27182)}], half_closes=False)
    assert stack.run(call, timeout_s=0.001).code == DEADLINE_EXCEEDED
    # The server may never have seen the cancelled call; it sees this one.
    wait_until(lambda: servicer.num_running == 0)
    servicer.num_cancelled = 0
    assert stack.run(call, timeout_s=0.3).code == DEADLINE_EXCEEDED
    check_cut(stack, servicer)


def check_at_once(stack, times):
    """Check that large calls which run at once on one channel end well."""
    for outcome in stack.begin(LARGE_UNARY, times).outcomes():
        check(outcome, 314159)


@case
def concurrent_large_unary(stack, servicer):
    check_at_once(stack, CONCURRENT)


def soak(stack, **changes):
    """Make calls one after the other, none of which may take long."""
    for _ in range(SOAK_ITERATIONS):
        begun_at = time.monotonic()
        check(stack.run(LARGE_UNARY, **changes), 314159)
        assert time.monotonic() - begun_at < SOAK_LATENCY_S


@case
def rpc_soak(stack, servicer):
    soak(stack)
    assert len(servicer.peers) == 1


@case
def channel_soak(stack, servicer):
    soak(stack, fresh=True)
    assert len(servicer.peers) == SOAK_ITERATIONS


# ---- what the cases cover

OFFICIAL = (
    *("empty_unary", "cacheable_unary", "large_unary", "client_compressed_unary"),
    *("server_compressed_unary", "client_streaming", "client_compressed_streaming"),
    *("server_streaming", "server_compressed_streaming", "ping_pong", "empty_stream"),
    *("compute_engine_creds", "jwt_token_creds", "oauth2_auth_token", "per_rpc_creds"),
    *("google_default_credentials", "compute_engine_channel_credentials", "custom_metadata"),
    *("status_code_and_message", "special_status_message", "unimplemented_method"),
    *("unimplemented_service", "cancel_after_begin", "cancel_after_first_response"),
    *("timeout_on_sleeping_server", "rpc_soak", "channel_soak", "orca_per_rpc", "orca_oob"),
    *("max_concurrent_streams_connection_scaling", "long_lived_channel"),
    *("concurrent_large_unary", "flow control: pushback at client for large messages"),
)
GOOGLE = "It needs an account of Google's cloud, and shows how a client gets its credentials there."
ORCA = "It shows how a client balances its load by what servers report in messages of xDS."
LEFT_OUT = {
    "cacheable_unary": "It needs GET, which PROTOCOL-HTTP2.md does not have, and which clients "
    "have given up (grpc/grpc#28922). Our server answers it with 405 (test_against_grpcio.py).",
    "compute_engine_creds": GOOGLE,
    "jwt_token_creds": GOOGLE,
    "oauth2_auth_token": GOOGLE,
    "per_rpc_creds": GOOGLE,
    "google_default_credentials": GOOGLE,
    "compute_engine_channel_credentials": GOOGLE,
    "orca_per_rpc": ORCA,
    "orca_oob": ORCA,
    "max_concurrent_streams_connection_scaling": "It shows when a client opens another connection. "
    "The server's part, a limit of streams, is tested in tests/unit/rpc/test_bad_clients.py.",
    "long_lived_channel": "It is rpc_soak with pauses of some seconds.",
    "flow control: pushback at client for large messages": "It has no procedure yet. Windows that "
    "close are tested in tests/property/test_http2.py.",
}


def test_every_official_case_is_here_or_has_a_reason():
    assert not CASES.keys() & LEFT_OUT.keys()
    assert CASES.keys() | LEFT_OUT.keys() == set(OFFICIAL)
    assert len(set(OFFICIAL)) == len(OFFICIAL)


# ---- the tests


@pytest.fixture(scope="module")
def authority():
    """Return a certificate authority."""
    return trustme.CA()


def tls_for(authority):
    """Return a server's TLS, with a certificate of this authority."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    tls.set_alpn_protocols(["h2"])
    return tls


@pytest.fixture(scope="module")
def server(authority):
    """Yield the TestService and the addresses of its server: a plain one and one with TLS."""
    servicer = Servicer()
    with serving(servicer, tls_for(authority)) as (address, tls_address):
        yield servicer, address, tls_address


@pytest.fixture
def servicer(server):
    """Return the TestService, with counts of this test alone; check that it is idle at the end."""
    servicer = server[0]
    servicer.num_cancelled = 0
    servicer.peers.clear()
    yield servicer
    wait_until(lambda: servicer.num_running == 0)


@pytest.fixture(scope="module")
def grpcio(server):
    """Yield grpcio's stack."""
    with contextlib.closing(GrpcioStack(server[1])) as stack:
        yield stack


@pytest.fixture(scope="module")
def grpcio_tls(server, authority):
    """Yield grpcio's stack over TLS."""
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with contextlib.closing(GrpcioStack(server[2], credentials)) as stack:
        yield stack


@pytest.fixture(scope="module")
def node(server):
    """Yield the stack of grpc-js."""
    toolchains.need_npm()
    command = [shutil.which("node") or "node", str(CLIENT)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        yield NodeStack(server[1], process)


@pytest.fixture(params=["grpcio", "grpcio_tls", pytest.param("node", marks=pytest.mark.interop)])
def stack(request):
    """Return each of the stacks in turn."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("name", CASES)
def test_the_case(name, stack, servicer):
    CASES[name](stack, servicer)


@pytest.mark.interop
def test_grpc_js_compresses_a_second_request(node, servicer):
    with node.recorded(requests=[1, 1]) as recorded:
        for _ in range(2):
            check(recorded.run(LARGE_UNARY, compressed=True), 314159)


TENTH = Limits(
    budget=Limits().budget / 10,
    budget_per_s=Limits().budget_per_s / 10,
    overhead_share=Limits().overhead_share / 10,
    overhead_burst_s=Limits().overhead_burst_s / 10,
    held_bytes=Limits().held_bytes // 10,
)
CUT_AT_A_TENTH = {"concurrent_large_unary"}  # with requests and answers of 30 MB


def test_a_tenth_of_every_budget_is_enough_for_all_cases_but_these(authority):
    """With the default budgets no case is cut (`test_the_case`)."""
    cut = {}
    for name, run in CASES.items():
        servicer = Servicer()
        with (
            serving(servicer, tls_for(authority), TENTH) as (address, _),
            contextlib.closing(GrpcioStack(address)) as stack,
        ):
            try:
                run(stack, servicer)
            except AssertionError as error:
                cut[name] = str(error).splitlines()[0]
    assert cut.keys() == CUT_AT_A_TENTH, cut


@pytest.mark.full
def test_a_thousand_large_calls_run_at_once_at_a_server_that_may_keep_their_bytes(authority):
    with (
        serving(Servicer(), tls_for(authority), Limits(held_bytes=2**30)) as (address, _),
        contextlib.closing(GrpcioStack(address)) as stack,
    ):
        check_at_once(stack, 1000)


def test_half_duplex_answers_come_after_the_last_request(stack, servicer):
    """gRPC's cases do not call HalfDuplexCall."""
    call = Call("HalfDuplexCall", [wants(9), wants(2653, 8)])
    waiting = stack.run(call, half_closes=False, timeout_s=0.2)
    assert (waiting.code, waiting.messages) == (DEADLINE_EXCEEDED, [])
    check(stack.run(call), 9, 2653, 8)
