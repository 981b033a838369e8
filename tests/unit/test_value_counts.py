"""Every list and map of a request has a limit, checked before Python objects are made of values."""

import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import trio
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest, ShuttingDown
from engine.requests.field_types import CheckedFields
from grpc_service._generated.triolet.v1.count_limits import COUNT_LIMITS
from grpc_service.access import policy
from grpc_service.access.decoding import LARGE_BYTES, SMALL_BYTES
from grpc_service.access.interceptor import Interceptor
from grpc_service.client import messages as pb
from grpc_service.rpc.limits import Limits
from grpc_service.rpc.methods import Method, decoder_of
from grpc_service.services import value_counts
from grpc_service.services.error_status import status_of
from grpc_service.services.methods import CONTROL, INFERENCE, MODELS, methods
from grpc_service.services.value_counts import TREES, CountJudge, judges_of
from grpc_service.vllm_engine.count_limits import LIMITS
from grpc_service.vllm_engine.service import SERVICE as VLLM
from tests.support.rpc_calls import serving
from tests.support.rpc_memory import framed
from tests.support.worst_messages import (
    allowed_values,
    delimited,
    paths_of,
    request_with,
    varint,
    worst_request,
    wrapped,
)

SERVICES = (
    (INFERENCE, COUNT_LIMITS),
    (MODELS, COUNT_LIMITS),
    (CONTROL, COUNT_LIMITS),
    (VLLM, LIMITS),
)
CASES = [(path, service, limits) for service, limits in SERVICES for path in paths_of(service)]


def ids(cases):
    return [f"{service.name}.{path}" for path, service, _ in cases]


@pytest.mark.parametrize(("path", "service", "limits"), CASES, ids=ids(CASES))
def test_the_limit_of_every_list_and_map_is_exact(path, service, limits):
    judge = judges_of(service, limits)[path.method]
    name, most = allowed_values(path, limits)
    request = GetMessageClass(service.methods_by_name[path.method].input_type)
    for number in (most - 1, most):
        data = request_with(path, number)
        judge(data)
        request.FromString(data)
    with pytest.raises(InvalidRequest) as refused:
        judge(request_with(path, most + 1))
    [violation] = refused.value.violations
    assert violation.field == name
    assert violation.description.startswith("has more than ")


def test_the_cases_are_all_fields_that_requests_have():
    """Red if the search for lists and maps misses a field, whose limit would then not be tested."""
    found = {str(path) for path, _, _ in CASES}
    assert {
        "Generate chat.messages.tool_calls",
        "Generate sampling.logit_bias",
        "Generate chat.template_args.fields.value.list_value.values",
        "Tokenize chat.tools.parameters.fields",
        "Abort request_ids",
        "LoadAdapter aliases",
    } <= found
    used = {field.full_name for path, _, _ in CASES for field in path.fields}
    assert set(COUNT_LIMITS) | set(LIMITS) <= used, "limits of fields that no request has"


@pytest.mark.parametrize("is_packed", [True, False])
def test_numbers_count_however_they_are_written(is_packed, monkeypatch):
    judge = CountJudge(
        pb.GenerateRequest.DESCRIPTOR, {**COUNT_LIMITS, "triolet.v1.TokenIds.ids": (9, None)}
    )
    path = next(one for one in paths_of(INFERENCE) if str(one) == "Generate token_ids.ids")
    for value in (1, 300, 2**32 - 1):
        *outer, field = path.fields
        one = varint(value)
        for number, refuses in ((9, False), (10, True)):
            data = (
                delimited(field, one * number)
                if is_packed
                else (varint(field.number << 3) + one) * number
            )
            with_refusal = pytest.raises(InvalidRequest) if refuses else nothing()
            with with_refusal:
                judge(wrapped(outer, data))


class nothing:  # the context manager where nothing is raised
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_values_count_over_the_whole_request():
    """Red if each of a chat's thousand messages may have a thousand calls."""
    calls = COUNT_LIMITS["triolet.v1.Message.tool_calls"][0]
    turns = 10
    for more, refuses in ((0, False), (1, True)):
        chat = {"messages": [{"tool_calls": [{}] * (calls // turns + more)} for _ in range(turns)]}
        data = pb.GenerateRequest(chat=chat).SerializeToString()
        with pytest.raises(InvalidRequest) if refuses else nothing():
            judges_of(INFERENCE, COUNT_LIMITS)["Generate"](data)


@pytest.mark.parametrize("field", ["template_args", "parameters"])
@pytest.mark.parametrize("kind", ["objects", "lists"])
def test_the_levels_of_a_tree_have_a_limit(field, kind):
    _, levels = COUNT_LIMITS["triolet.v1.Chat.template_args"]
    for depth, refuses in ((levels, False), (levels + 1, True)):
        value = None
        for _ in range(depth - 1):
            value = {"a": value} if kind == "objects" else [value]
        tree = {"a": value}
        chat = (
            {"template_args": tree}
            if field == "template_args"
            else {"tools": [{"parameters": tree}]}
        )
        data = pb.GenerateRequest(chat=chat).SerializeToString()
        with pytest.raises(InvalidRequest, match="levels deep") if refuses else nothing():
            judges_of(INFERENCE, COUNT_LIMITS)["Generate"](data)
        if not refuses:
            pb.GenerateRequest.FromString(data)


@pytest.mark.parametrize("tag", [b"\x30\x01", b"\xf8\x7f\x01", b"\x5a\x00", b"\x93\x40\x94\x40"])
def test_a_request_of_many_fields_is_refused_whatever_they_are(tag):
    """The fields are set again and again, or are unknown, empty messages, or groups."""
    judge = judges_of(INFERENCE, COUNT_LIMITS)["Generate"]
    judge(tag * 1000)
    with pytest.raises(InvalidRequest, match="the request has more than 327680 values"):
        judge(tag * (value_counts.VALUES_MAX + 1))


def test_the_ids_of_all_fields_count_together():
    """Red if each field may reach its limit: freeing 1.1 million ids stops streams for 45 ms."""
    judge = judges_of(INFERENCE, COUNT_LIMITS)["Generate"]
    most = COUNT_LIMITS["triolet.v1.TokenIds.ids"][0]
    tags = 5  # what the request counts beside ids: one for each of its 2 messages and 3 lists
    for more, refuses in ((0, False), (1, True)):
        rest = value_counts.VALUES_MAX - most - tags - 1000 + more
        message = pb.GenerateRequest(
            token_ids={"ids": bytes(most)},
            sampling={"stop_token_ids": bytes(1000), "banned_token_ids": bytes(rest)},
        )
        told = pytest.raises(InvalidRequest, match="the request has more than 327680 values")
        with told if refuses else nothing():
            judge(message.SerializeToString())


# ---- beside the parser -------------------------------------------------------------------------

SMALL = {name: (2, None if levels is None else 3) for name, (_, levels) in COUNT_LIMITS.items()}
REQUESTS = (pb.GenerateRequest, pb.EmbedRequest, pb.RerankRequest, pb.ClassifyRequest)
JUDGES = {one: CountJudge(one.DESCRIPTOR, SMALL) for one in REQUESTS}
NUMBERS = st.one_of(st.integers(1, 20), st.sampled_from([2**29 - 1, 0, 19]))


def field(number, kind, payload):
    return varint(number << 3 | kind) + payload


@st.composite
def wires(draw, depth=5):
    """Draw bytes that are a message, or nearly one."""
    made = []
    for _ in range(draw(st.integers(0, 4))):
        number = draw(NUMBERS)
        kind = draw(st.sampled_from([0, 1, 2, 2, 2, 2, 3, 5]))
        if kind == 0:
            made.append(
                field(number, 0, draw(st.sampled_from([b"\0", b"\x81\0", b"\xff" * 9 + b"\1"])))
            )
        elif kind in (1, 5):
            made.append(field(number, kind, bytes(8 if kind == 1 else 4)))
        elif kind == 3:
            inner = draw(wires(depth - 1)) if depth else b""
            made.append(field(number, 3, inner) + varint(number << 3 | 4))
        else:
            inner = draw(wires(depth - 1)) if depth else draw(st.binary(max_size=4))
            made.append(field(number, 2, varint(len(inner)) + inner))
    data = b"".join(made)
    return data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 9)) == 0 else data


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(REQUESTS), wires() | st.binary(max_size=60))
def test_what_the_walk_lets_pass_has_no_more_values(request_class, data):
    """Red if the parser finds values that the walk over the bytes has not counted, or if the walk
    refuses a message within the limits, or crashes."""
    counts = {}
    try:
        count_wire(request_class.DESCRIPTOR, data, "", counts, 0)
        is_parsed = request_class.FromString(data) is not None
    except (DecodeError, ValueError):
        is_parsed = False
    try:
        JUDGES[request_class](data)
        refused = None
    except InvalidRequest as error:
        [refused] = error.violations
    if is_parsed:
        over = {path for path, (count, level) in counts.items() if count > 2 or level > 3}
        assert (refused is not None) == bool(over), (refused, counts)
        assert refused is None or refused.field in over


def count_wire(message, data, path, counts, level, tree=None):
    """Count the values of a message's bytes with protobuf's own reader of unknown fields."""
    if message.full_name in ("google.protobuf.Struct", "google.protobuf.ListValue"):
        level += 1
        counts[tree] = (counts.get(tree, (0, 0))[0], max(counts.get(tree, (0, 0))[1], level))
    for one in UnknownFieldSet(Empty.FromString(data)):
        known = message.fields_by_number.get(one.field_number)
        if known is None:
            continue
        name = f"{path}.{known.name}" if path else known.name
        inner = known.message_type
        own = tree
        if own is None and inner is not None and inner.full_name in TREES:
            own = name
        is_number = inner is None and known.type not in (known.TYPE_STRING, known.TYPE_BYTES)
        if one.wire_type == 2:
            number = sum(byte < 0x80 for byte in one.data) if is_number else 1
        elif is_number and one.wire_type == 0:
            number = 1
        else:
            continue
        if known.is_repeated:
            key = own or name
            before, deepest = counts.get(key, (0, 0))
            counts[key] = (before + number, deepest)
        if inner is not None and one.wire_type == 2:
            count_wire(inner, one.data, name, counts, level, own)


# ---- where it happens ---------------------------------------------------------------------------


class Backend:
    """An engine that refuses everything that is submitted."""

    unread_calls = None

    def __init__(self):
        self.engine = SimpleNamespace(
            submit=self.refuse, config=SimpleNamespace(stream_buffer=4), tokenize=self.refuse_later
        )
        self.engine.detokenize = self.refuse_later

    def refuse(self, *_, **__):
        raise ShuttingDown("enough was seen")

    async def refuse_later(self, *_, **__):
        self.refuse()


def recording(method, threads):
    """Return a method whose judge, parser and translator record their threads."""

    class Parsing:
        DESCRIPTOR = method.request.DESCRIPTOR

        @staticmethod
        def FromString(data):
            threads.append(threading.get_ident())
            return method.request.FromString(data)

    def judge(data):
        threads.append(threading.get_ident())
        method.judge(data)

    def translate(call):
        made = method.translate(call)

        def job(message):
            threads.append(threading.get_ident())
            return made(message)

        return job

    return method._replace(
        request=Parsing, judge=judge, translate=translate if method.translate else None
    )


WIDE = Limits(stream_window_bytes=2**20)


def padded(size):
    return varint(1999 << 3 | 2) + varint(size) + bytes(size)


async def ask(client, name, message):
    """Make a call with a large message, wait for its end, and return how it ended."""
    call = client.call(path=f"/{name}", is_last=False)
    data = framed(message)
    for at in range(0, len(data), 2**14):
        client.send(call, data[at : at + 2**14])
    client.end(call)
    await client.settle()
    while call not in client.ends:
        await client.wire.wait_written()
        await client.settle()
    return client.ends[call]


@pytest.mark.parametrize("size", [SMALL_BYTES - 100, SMALL_BYTES + 100, LARGE_BYTES + 100])
async def test_only_what_is_small_is_decoded_in_the_loop(size, monkeypatch):
    """Every method of triolet.v1 gets a request that an unknown field makes large."""
    monkeypatch.setattr(policy, "is_local", lambda peer: True)
    threads, unknown = [], padded(size)
    served = methods(Backend(), 2**20)
    recorded = [recording(one, threads) for one in served]
    async with serving(Interceptor(recorded, None, status_of).serve, WIDE) as server:
        client = await server.connect()
        for method in served:
            threads.clear()
            with trio.move_on_after(10):
                await ask(client, method.name, unknown)
            assert threads, method.name
            in_loop = [one == threading.get_ident() for one in threads]
            assert in_loop == [size <= SMALL_BYTES] * len(threads), method.name


OWN = [case for case in CASES if case[1] is not VLLM]
LOOP_S_MAX = 0.02
LOOP_CALLS_MAX = 15_000  # about 5 ms


@pytest.mark.parametrize(("path", "service", "limits"), OWN, ids=ids(OWN))
def test_the_worst_request_of_a_field_takes_the_loop_milliseconds(path, service, limits):
    """Red if the loop decodes 64 KiB, which not even 10,000 empty tool calls have, or encodes
    20,000 violations although a status holds twenty."""
    served = {one.name: one for one in methods(Backend(), 2**20)}
    method = served[path.full_method.removeprefix("/")]
    largest = request_with(path, allowed_values(path, limits)[1])
    for data in (largest, min(worst_request(path, SMALL_BYTES), largest, key=len)):
        assert min(loop_s(method, data) for _ in range(2)) < LOOP_S_MAX, len(data)


def loop_s(method, data):
    """Return the processor seconds for which a request blocks the event loop, which decodes small
    requests, checks all, and refuses this one."""
    decode = partial(decoder_of(method, SimpleNamespace(time_remaining=lambda: None)), data)
    begin = time.thread_time()
    request = result_of(decode)
    if len(data) > SMALL_BYTES:
        begin = time.thread_time()
    if isinstance(request, CheckedFields):
        request = result_of(request.validate)
    if isinstance(request, InvalidRequest):
        status_of(request)
    return time.thread_time() - begin


@pytest.mark.parametrize(("path", "service", "limits"), OWN, ids=ids(OWN))
def test_the_loop_calls_few_functions_for_the_worst_request_that_it_decodes(path, service, limits):
    """Red if the loop decodes 2 KiB: a chat of a thousand empty messages takes 18,000 calls."""
    served = {one.name: one for one in methods(Backend(), 2**20)}
    method = served[path.full_method.removeprefix("/")]
    largest = request_with(path, allowed_values(path, limits)[1])
    data = min(worst_request(path, SMALL_BYTES), largest, key=len)
    num_calls = 0

    def note(frame, event, argument):
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        loop_s(method, data)
    finally:
        sys.setprofile(None)
    assert num_calls < LOOP_CALLS_MAX


def result_of(job):
    """Return what a job returns, or the refusal that it raises."""
    try:
        return job()
    except InvalidRequest as error:
        return error


async def test_a_shorter_request_does_not_wait_for_a_large_one():
    begun, may_end = threading.Event(), threading.Event()

    def judge(data):
        if len(data) > LARGE_BYTES:
            begun.set()
            may_end.wait(10)

    async def handle(request, rpc):
        return Empty()

    method = Method("a.B/C", Empty, handle, judge=judge)
    served = Interceptor([method], None, status_of).serve
    async with serving(served, WIDE) as server, trio.open_nursery() as nursery:
        client = await server.connect()
        nursery.start_soon(ask, await server.connect(), method.name, padded(LARGE_BYTES))
        await trio.to_thread.run_sync(begun.wait)
        for size in (SMALL_BYTES, LARGE_BYTES // 2):
            with trio.fail_after(5):
                assert await ask(client, method.name, padded(size)) == "0"
        may_end.set()


async def test_a_call_leaves_the_queue_when_its_client_ends_it():
    """While one request is decoded, others wait; those whose clients have gone never begin."""
    begun, has_begun, may_end = [], threading.Event(), threading.Event()

    def judge(data):
        begun.append(data)
        has_begun.set()
        may_end.wait(10)

    async def handle(request, rpc):
        return Empty()

    method = Method("a.B/C", Empty, handle, judge=judge)
    served = Interceptor([method], None, status_of).serve
    async with serving(served, WIDE) as server:
        first, second = await server.connect(), await server.connect()
        large = padded(LARGE_BYTES)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, first, method.name, large)
            await trio.to_thread.run_sync(has_begun.wait)
            with trio.move_on_after(0.05):
                await ask(second, method.name, large)
            second.leave()
            await trio.sleep(0.01)
            may_end.set()
        assert len(begun) == 1
        third = await server.connect()
        assert await ask(third, method.name, large) == "0"
        assert len(begun) == 2
