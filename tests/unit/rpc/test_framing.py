"""What gRPC adds to HTTP/2: timeouts, metadata, messages in a body, trailers."""

from __future__ import annotations

import base64
import gzip
import math
import tracemalloc
import zlib
from urllib.parse import unquote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpc_service.rpc.errors import InvalidMessage, MessageTooLarge, UnsupportedEncoding
from grpc_service.rpc.framing import (
    MESSAGE_BYTES,
    MessageReader,
    metadata_of,
    timeout_of,
    trailers_of,
)
from grpc_service.rpc.status import StatusCode

LIMIT = 1000
PACKERS = {b"gzip": gzip.compress, b"deflate": zlib.compress}


def framed(data, *, flag=0):
    """Return one framed message."""
    return bytes([flag]) + len(data).to_bytes(4, "big") + data


def read(body, limit=LIMIT, encoding=b"identity"):
    """Return what a reader makes of a body that comes at once."""
    reader = MessageReader(limit, encoding)
    reader.feed(body)
    return reader


def chunks_of(data, cuts):
    """Return the data, cut at these places."""
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


# ---- timeouts


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"1H", 3600),
        (b"2M", 120),
        (b"3S", 3),
        (b"100m", 0.1),
        (b"5u", 5e-6),
        (b"7n", 7e-9),
        (b"0S", 0),
        (b"99999999H", 99999999 * 3600),
        (b"00000001S", 1),
    ],
)
def test_every_unit_of_a_timeout_is_understood(value, seconds):
    assert math.isclose(timeout_of(value), seconds)


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"S", b"1", b"1s", b"1h", b"1 S", b" 1S", b"+1S", b"-1S", b"1.5S", b"1e3S", b"0x1S"),
        *(b"123456789S", b"1SS", b"\xb2S", b"\xd9\xa1S", b"1\xff", b"1_0S", b"\x00S", b"1S "),
    ],
)
def test_a_malformed_timeout_is_ignored(value):
    assert timeout_of(value) is None


@given(st.binary(max_size=12))
def test_no_timeout_raises_or_is_negative(value):
    seconds = timeout_of(value)
    assert seconds is None or 0 <= seconds < math.inf


# ---- metadata


@given(st.binary(max_size=40), st.booleans())
def test_bytes_come_as_they_were_sent_with_padding_and_without(value, has_padding):
    sent = base64.b64encode(value)
    sent = sent if has_padding else sent.rstrip(b"=")
    assert metadata_of([(b"x-bin", sent)]) == (("x-bin", value),)


def test_values_that_a_proxy_has_joined_are_split():
    one, two = base64.b64encode(b"one"), base64.b64encode(b"22").rstrip(b"=")
    found = metadata_of([(b"x-bin", one + b"," + two + b" , " + one)])
    assert found == (("x-bin", b"one"), ("x-bin", b"22"), ("x-bin", b"one"))


def test_text_keeps_its_commas_its_order_and_its_repetitions_and_pseudo_headers_are_left_out():
    headers = [(b":path", b"/a"), (b"x", b"1,2"), (b"y", b"\xe9"), (b"x", b"3"), (b"z", b"")]
    assert metadata_of(headers) == (("x", "1,2"), ("y", "\xe9"), ("x", "3"), ("z", ""))


@given(st.binary(max_size=20), st.binary(max_size=40))
def test_no_metadata_raises(name, value):
    for found_name, found in metadata_of([(name + b"-bin", value), (name, value)]):
        assert isinstance(found, bytes) == found_name.endswith("-bin")


# ---- trailers


@given(st.text())
def test_a_message_comes_back_as_it_was_and_its_header_is_plain_ascii(message):
    trailers = dict(trailers_of(StatusCode.INTERNAL, message))
    assert trailers[b"grpc-status"] == b"13"
    sent = trailers.get(b"grpc-message", b"")
    assert all(0x20 <= byte <= 0x7E for byte in sent)
    assert unquote(sent.decode(), errors="strict") == message


def test_only_printable_ascii_is_sent_unencoded():
    for number in (*range(0x800), 0xFFFD, 0xFFFF, 0x1F600, 0x10FFFF):
        sent = dict(trailers_of(StatusCode.OK, chr(number)))[b"grpc-message"]
        is_plain = 0x20 <= number <= 0x7E and chr(number) != "%"
        assert sent == (chr(number).encode() if is_plain else sent.upper())
        assert unquote(sent.decode(), errors="strict") == chr(number)


def test_half_a_surrogate_pair_ends_a_call_as_any_text_does():
    sent = dict(trailers_of(StatusCode.INTERNAL, "a\ud800b"))[b"grpc-message"]
    assert sent == b"a?b"


def test_without_a_message_there_is_no_header_for_it():
    assert trailers_of(StatusCode.OK) == [(b"grpc-status", b"0")]


def test_the_codes_are_those_of_grpc():
    assert {code.name: int(code) for code in StatusCode} == {
        code.name: code.value[0] for code in grpc.StatusCode
    }


@pytest.mark.parametrize("code", list(StatusCode))
def test_a_code_is_sent_as_its_number(code):
    assert trailers_of(code)[0] == (b"grpc-status", str(int(code)).encode())


@given(st.binary(max_size=40))
def test_bytes_in_trailers_are_base64_without_padding(value):
    trailers = trailers_of(StatusCode.OK, metadata=[("x-bin", value), ("y", "1")])
    assert b"=" not in dict(trailers)[b"x-bin"]
    assert metadata_of(trailers[1:]) == (("x-bin", value), ("y", "1"))


# ---- messages

bodies = st.lists(st.binary(max_size=60), max_size=8)


@given(
    bodies, st.lists(st.integers(0, 600)), st.sampled_from([b"identity", *PACKERS]), st.booleans()
)
def test_messages_are_the_same_however_the_body_is_cut(messages, cuts, encoding, is_packed):
    pack = PACKERS.get(encoding) if is_packed else None
    body = b"".join(framed(pack(one), flag=1) if pack else framed(one) for one in messages)
    reader, seen = MessageReader(LIMIT, encoding), []
    for chunk in chunks_of(body, cuts):
        reader.feed(chunk)
        while reader.messages:
            seen.append(reader.take())
    assert seen == messages
    assert reader.error is None
    assert not reader.is_amid_message


@given(bodies.filter(bool), st.integers(1, 64), st.lists(st.integers(0, 600)))
def test_a_body_that_breaks_off_is_noticed(messages, missing, cuts):
    body = b"".join(map(framed, messages))
    missing = min(missing, len(framed(messages[-1])) - 1)
    reader = MessageReader(LIMIT)
    for chunk in chunks_of(body[:-missing], cuts):
        reader.feed(chunk)
    assert list(reader.messages) == messages[:-1]
    assert reader.is_amid_message
    reader.feed(body[-missing:])
    assert list(reader.messages) == messages
    assert not reader.is_amid_message


@given(st.binary(max_size=300), st.lists(st.integers(0, 300)), st.sampled_from([*PACKERS, b"zstd"]))
def test_any_bytes_are_messages_or_one_error_however_they_are_cut(body, cuts, encoding):
    whole, cut = read(body, 40, encoding), MessageReader(40, encoding)
    for chunk in chunks_of(body, cuts):
        cut.feed(chunk)
    assert list(whole.messages) == list(cut.messages)
    assert str(whole.error) == str(cut.error)
    assert whole.is_amid_message == cut.is_amid_message


@pytest.mark.parametrize("encoding", [b"identity", *PACKERS])
def test_a_message_may_have_exactly_the_limit(encoding):
    message = bytes(LIMIT)
    pack = PACKERS.get(encoding)
    body = framed(pack(message), flag=1) if pack else framed(message)
    assert list(read(body, encoding=encoding).messages) == [message]


@pytest.mark.parametrize("encoding", [b"identity", *PACKERS])
def test_one_byte_more_than_the_limit_is_too_large(encoding):
    message = bytes(LIMIT + 1)
    pack = PACKERS.get(encoding)
    reader = read(framed(pack(message), flag=1) if pack else framed(message), encoding=encoding)
    assert isinstance(reader.error, MessageTooLarge)
    assert not reader.messages


def test_a_too_large_message_is_refused_before_its_body_comes_and_not_kept():
    reader = MessageReader(LIMIT)
    reader.feed(framed(b"first"))
    reader.feed(b"\0" + (LIMIT + 1).to_bytes(4, "big"))
    assert isinstance(reader.error, MessageTooLarge)
    assert str(LIMIT + 1) in str(reader.error)
    assert not reader.is_amid_message
    tracemalloc.start()
    try:
        for _ in range(100):
            reader.feed(bytes(2**16))
        assert tracemalloc.get_traced_memory()[0] < 2**16
    finally:
        tracemalloc.stop()
    assert reader.take() == b"first"


@pytest.mark.parametrize("encoding", list(PACKERS))
def test_a_bomb_is_not_unpacked_beyond_the_limit(encoding):
    packed = PACKERS[encoding](bytes(2**26))
    body = framed(packed, flag=1)
    tracemalloc.start()
    try:
        reader = read(body, 2**17, encoding)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(reader.error, MessageTooLarge)
    assert "unpacked" in str(reader.error)
    assert peak < 2**20


@pytest.mark.parametrize("encoding", list(PACKERS))
def test_malformed_or_incomplete_compressed_data_is_refused(encoding):
    packed = PACKERS[encoding](b"some text" * 20)
    for end in range(len(packed)):
        assert isinstance(
            read(framed(packed[:end], flag=1), encoding=encoding).error, InvalidMessage
        )
    for other in (b"garbage", bytes(30), packed[::-1]):
        assert isinstance(read(framed(other, flag=1), encoding=encoding).error, InvalidMessage)


def test_an_uncompressed_message_may_come_with_any_encoding():
    assert list(read(framed(b"plain"), encoding=b"zstd").messages) == [b"plain"]
    assert list(read(framed(b"plain"), encoding=b"gzip").messages) == [b"plain"]


@pytest.mark.parametrize("encoding", [b"zstd", b"identity", b"", b"GZIP", b"\xff"])
def test_another_compression_is_unsupported(encoding):
    reader = read(framed(gzip.compress(b"a"), flag=1) + framed(b"b"), encoding=encoding)
    assert isinstance(reader.error, UnsupportedEncoding)
    assert not reader.messages


def test_messages_that_nobody_takes_are_bounded():
    """A client might go on sending to a call that takes one request."""
    reader = MessageReader(LIMIT)
    for _ in range(10_000):
        reader.feed(framed(b""))
    assert len(reader.messages) == LIMIT // MESSAGE_BYTES
    assert isinstance(reader.error, MessageTooLarge)


def test_messages_that_are_taken_are_not_bounded():
    reader = MessageReader(LIMIT)
    for _ in range(10_000):
        reader.feed(framed(b"") + framed(b"ab"))
        assert (reader.take(), reader.take()) == (b"", b"ab")
    assert reader.error is None
