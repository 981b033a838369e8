"""A client's bytes cut into frames, wherever they are cut on the way."""

from hypothesis import given
from hypothesis import strategies as st

from grpc_service.rpc import frames
from grpc_service.rpc.frames import HEAD_BYTES, PREFACE_BYTES, UNCUT, FrameSplitter
from tests.support.raw_http2 import frame

SIZE_MAX = 100
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


drawn = st.builds(
    frame,
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=SIZE_MAX),
)


@given(st.lists(drawn, max_size=12), st.integers(1, 60), st.binary(max_size=HEAD_BYTES - 1))
def test_nothing_is_lost_or_moved_wherever_the_bytes_are_cut(sent, step, rest):
    splitter = FrameSplitter(SIZE_MAX)
    data = PREFACE + b"".join(sent) + rest
    found = []
    for begin in range(0, len(data), step):
        found += splitter.split(data[begin : begin + step])
    assert b"".join(one.data for one in found) == data[: len(data) - len(rest)]
    assert b"".join(one.data for one in found)[:PREFACE_BYTES] == PREFACE
    whole = [one for one in found if one.kind != UNCUT]
    for one in whole:
        assert one.data in sent
        assert (one.kind, one.flags) == (one.data[3], one.data[4])
        assert one.stream_id == int.from_bytes(one.data[5:9], "big") % 2**31
        assert one.size == len(one.data) - HEAD_BYTES


def test_a_frame_that_is_too_long_is_not_waited_for():
    splitter = FrameSplitter(SIZE_MAX)
    list(splitter.split(PREFACE))
    head = frame(frames.DATA, 0, 1, bytes(SIZE_MAX + 1))[:HEAD_BYTES]
    assert [(one.kind, one.data) for one in splitter.split(head)] == [(UNCUT, head)]


def test_whatever_comes_inside_a_block_of_headers_is_for_h2():
    splitter = FrameSplitter(SIZE_MAX)
    list(splitter.split(PREFACE))
    inside = [
        frame(frames.HEADERS, 0, 1, b"a"),
        frame(frames.CONTINUATION, 0, 1, b"b"),
        frame(frames.CONTINUATION, frames.END_HEADERS, 1, b"c"),
    ]
    after = frame(frames.PING, 0, 0, bytes(8))
    kinds = [one.kind for one in splitter.split(b"".join(inside) + after)]
    assert kinds == [frames.HEADERS, UNCUT, UNCUT, frames.PING]
    broken = [inside[0], after, after]
    assert [one.kind for one in splitter.split(b"".join(broken))] == [
        frames.HEADERS,
        UNCUT,
        frames.PING,
    ]
