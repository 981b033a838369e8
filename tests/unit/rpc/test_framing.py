"""How the bytes of a request's or response's body are split into gRPC messages."""

import gzip
import random
import subprocess
import sys
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpc_service.rpc.errors import (
    InvalidMessage,
    MessageTooLarge,
    UnsupportedEncoding,
)
from grpc_service.rpc.framing import (
    DECOMPRESSED_PART_BYTES,
    MESSAGE_BYTES,
    MessageReader,
    decompress,
)

LIMIT = 1000
PACKERS = {b"gzip": gzip.compress, b"deflate": zlib.compress}


def framed(data, *, flag=0):
    return bytes([flag]) + len(data).to_bytes(4, "big") + data


class Reading:
    """What a call reads from a body: its messages, decompressed, up to the first error."""

    def __init__(self, reader):
        self.messages = []
        while reader.messages or reader.is_decompressing:
            reader.decompress_part()
            while reader.messages:
                self.messages.append(reader.take()[0])
        self.error = reader.error


def read(body, limit=LIMIT, encoding=b"identity", cuts=()):
    """Return what is read from a body that arrives in these pieces."""
    reader = MessageReader(limit, encoding)
    for chunk in chunks_of(body, cuts):
        reader.feed(chunk)
    return Reading(reader)


def chunks_of(data, cuts):
    """Return the data, cut at these places."""
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


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
        seen += Reading(reader).messages
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
    assert [one for one, _ in reader.messages] == messages[:-1]
    assert reader.is_amid_message
    reader.feed(body[-missing:])
    assert [one for one, _ in reader.messages] == messages
    assert not reader.is_amid_message


@given(st.binary(max_size=300), st.lists(st.integers(0, 300)), st.sampled_from([*PACKERS, b"zstd"]))
def test_any_bytes_are_messages_or_one_error_however_they_are_cut(body, cuts, encoding):
    whole, cut = read(body, 40, encoding), read(body, 40, encoding, cuts)
    assert whole.messages == cut.messages
    assert str(whole.error) == str(cut.error)


@pytest.mark.parametrize("encoding", [b"identity", *PACKERS])
def test_a_message_may_have_exactly_the_limit(encoding):
    message = bytes(LIMIT)
    pack = PACKERS.get(encoding)
    body = framed(pack(message), flag=1) if pack else framed(message)
    assert read(body, encoding=encoding).messages == [message]


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
    assert reader.take() == (b"first", False)


@pytest.mark.parametrize("encoding", list(PACKERS))
def test_a_bomb_is_not_decompressed_beyond_the_limit(encoding):
    packed = PACKERS[encoding](bytes(2**26))
    body = framed(packed, flag=1)
    tracemalloc.start()
    try:
        reader = read(body, 2**17, encoding)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(reader.error, MessageTooLarge)
    assert "decompressed" in str(reader.error)
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
    assert read(framed(b"plain"), encoding=b"zstd").messages == [b"plain"]
    assert read(framed(b"plain"), encoding=b"gzip").messages == [b"plain"]


def test_a_compressed_message_without_an_encoding_is_no_message():
    """Source: compression.md of gRPC, on compressed messages in a call without an encoding."""
    reader = read(framed(gzip.compress(b"a"), flag=1), encoding=b"identity")
    assert isinstance(reader.error, InvalidMessage)
    assert not reader.messages


@pytest.mark.parametrize("flag", [2, 128, 255])
def test_an_unknown_flag_is_no_message(flag):
    assert isinstance(read(framed(b"a", flag=flag)).error, InvalidMessage)


@pytest.mark.parametrize("encoding", [b"zstd", b"", b"GZIP", b"\xff"])
def test_another_compression_is_unsupported(encoding):
    reader = read(framed(gzip.compress(b"a"), flag=1) + framed(b"b"), encoding=encoding)
    assert isinstance(reader.error, UnsupportedEncoding)
    assert not reader.messages


def test_messages_that_nobody_takes_are_bounded():
    """Red if a client can fill the memory by messages to a method that reads one request."""
    reader = MessageReader(LIMIT)
    for _ in range(10_000):
        reader.feed(framed(b""))
    assert len(reader.messages) == LIMIT // MESSAGE_BYTES
    assert isinstance(reader.error, MessageTooLarge)


def test_messages_that_are_taken_are_not_bounded():
    reader = MessageReader(LIMIT)
    for _ in range(10_000):
        reader.feed(framed(b"") + framed(b"ab"))
        assert (reader.take()[0], reader.take()[0]) == (b"", b"ab")
    assert reader.error is None


@given(st.integers(0, 300_000), st.sampled_from([*PACKERS]), st.booleans(), st.booleans())
def test_a_large_message_is_decompressed_in_parts(size, encoding, is_dense, has_rest):
    message = random.Random(size).randbytes(size) if is_dense else bytes(size)
    packed = PACKERS[encoding](message) + b"rest" * has_rest
    parts = []
    try:
        parts += decompress(packed, encoding, size)
    except InvalidMessage:
        assert has_rest
        return
    assert not has_rest
    assert b"".join(parts) == message
    assert max(map(len, parts)) <= DECOMPRESSED_PART_BYTES
    assert len(parts) <= 2 + size // DECOMPRESSED_PART_BYTES + len(packed) // 2**14


def test_a_large_message_takes_no_more_memory_than_its_own_size():
    """The buffer's pieces leave no holes in the heap. Before issue 19 was fixed, the pieces were
    small blocks of which most stayed with the process, so that a message of 16 MiB took 26 MiB."""
    program = """
from grpc_service.rpc.framing import MessageReader

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) / 256

reader, size = MessageReader(2**25), 2**24
body = b"\\0" + size.to_bytes(4, "big") + bytes(size)
before = resident_mib()
for at in range(0, len(body), 2**14):
    reader.feed(body[at : at + 2**14])
    assert reader.num_bytes <= at + 2**15
kept = resident_mib() - before
message, _is_compressed = reader.take()
assert message == body[5:]
print(kept)
"""
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert 15 < float(done.stdout) < 20
