"""The headers of gRPC: timeouts, metadata, whether they are well-formed, and trailers."""

import base64
import contextlib
import math
from urllib.parse import unquote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpc_service.rpc.errors import InvalidHeaders
from grpc_service.rpc.headers import (
    fault_of,
    fault_of_trailers,
    length_of,
    metadata_of,
    timeout_of,
    trailers_of,
)
from grpc_service.rpc.status import StatusCode

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


@pytest.mark.parametrize("value", [b"1 S", b" 1S", b"1S ", b"000000001S"])
def test_spaces_and_more_than_eight_digits_are_taken_as_grpcio_takes_them(value):
    assert timeout_of(value) == 1


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"S", b"1", b"1s", b"1h", b"+1S", b"-1S", b"1.5S", b"1e3S", b"0x1S", b" "),
        *(b"1SS", b"\xb2S", b"\xd9\xa1S", b"1\xff", b"1_0S", b"\x00S"),
    ],
)
def test_a_malformed_timeout_is_an_error(value):
    with pytest.raises(InvalidHeaders, match="grpc-timeout"):
        timeout_of(value)


@given(st.binary(max_size=12))
def test_no_timeout_is_negative(value):
    with contextlib.suppress(InvalidHeaders):
        assert timeout_of(value) >= 0


# ---- well-formed requests

GOOD = [
    *((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a.B/C")),
    *((b":authority", b"localhost"), (b"te", b"trailers"), (b"x-a", b" v ")),
]


def without(name):
    """Return the good headers without the header called ``name``."""
    return [header for header in GOOD if header[0] != name]


def test_good_headers_have_no_fault():
    assert fault_of(GOOD) == ""
    assert fault_of([*without(b":authority"), (b"host", b"a")]) == ""
    assert fault_of([*GOOD, (b"host", b"other")]) == ""
    assert fault_of([*GOOD, (b"content-length", b"7")]) == ""
    assert length_of([*GOOD, (b"content-length", b"7")]) == 7
    assert length_of(GOOD) is None


@pytest.mark.parametrize(
    ("headers", "fault"),
    [
        ([*GOOD, (b"X-A", b"v")], "no name of a header"),
        ([*GOOD, (b"", b"v")], "no name of a header"),
        ([*GOOD, (b"a b", b"v")], "no name of a header"),
        ([*GOOD, (b"a:b", b"v")], "no name of a header"),
        ([*GOOD, (b"a", b"\0")], "NUL"),
        ([*GOOD, (b"a", b"x\ny")], "line break"),
        ([*GOOD, (b":path", b"/")], "twice, or after"),
        ([GOOD[0], *GOOD], "twice, or after"),
        ([(b":status", b"200"), *GOOD], "no header of a request"),
        (without(b":path"), ":path is missing"),
        (without(b":scheme"), ":scheme is missing"),
        (without(b":method"), ":method is missing"),
        (without(b":authority"), ":authority is missing"),
        ([*GOOD, (b"host", b"localhost"), (b"host", b"localhost")], "host comes twice"),
        ([*GOOD, (b"connection", b"close")], "no place in HTTP/2"),
        ([*GOOD, (b"te", b"gzip")], "te is not trailers"),
        ([*GOOD, (b"content-length", b"x")], "content-length"),
        ([*GOOD, (b"content-length", b"1"), (b"content-length", b"2")], "content-length"),
        ([], "is missing"),
    ],
)
def test_a_fault_is_named(headers, fault):
    assert fault in fault_of(headers)


@given(st.lists(st.tuples(st.binary(max_size=12), st.binary(max_size=12)), max_size=8))
def test_no_headers_make_the_check_fail(headers):
    assert isinstance(fault_of(headers), str)


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
def test_metadata_is_bytes_or_text_by_its_name_or_no_base64(name, value):
    with contextlib.suppress(InvalidHeaders):
        found = metadata_of([(name + b"-bin", value), (name, value)])
        assert all(isinstance(one, bytes) == of.endswith("-bin") for of, one in found)


def test_spaces_around_a_value_are_left_out():
    assert metadata_of([(b"x", b" a b\t")]) == (("x", "a b"),)


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


@pytest.mark.parametrize(
    ("name", "value", "is_fault"),
    [
        *((b"x-a", b"b", False), (b"X-A", b"b", True), (b":path", b"/a", True)),
        *((b"connection", b"close", True), (b"x-a", b"a\0", True), (b"", b"b", True)),
    ],
)
def test_headers_after_a_body_must_be_well_formed(name, value, is_fault):
    assert bool(fault_of_trailers([(b"x-first", b"1"), (name, value)])) == is_fault
