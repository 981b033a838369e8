"""Channels and messages between a server and a worker process: what arrives, and what is raised."""

import contextlib
import pickle
import socket
import threading
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import errors
from engine.core.common.steps import RowFailure, StepTimings
from engine.core.common.types import EndReason
from engine.core.encode.types import (
    EncodeInput,
    EncodeOptions,
    EncodePlan,
    EncodeResult,
    EncodeRow,
    EncodeRowResult,
)
from engine.core.text.plan import (
    AdmittedSequence,
    BlockDelta,
    ChildFork,
    Logits,
    Row,
    RowResult,
    StepPlan,
    StepResult,
)
from engine.core.text.types import Alternative, Constraint, Sampling, Stops, TokenLogprob
from engine.processes import channel
from engine.processes.channel import (
    HEADER,
    MARK,
    MESSAGE_MAX,
    BadMessage,
    Channel,
    ChannelClosed,
)
from engine.worker.process import messages

NAN = float("nan")


@contextlib.contextmanager
def channels():
    ours, theirs = (Channel(sock) for sock in socket.socketpair())
    with contextlib.closing(ours), contextlib.closing(theirs):
        yield ours, theirs


def sent(value):
    """Send a value over a channel, and return it. A thread sends it, because it may be large."""
    with channels() as (ours, theirs):
        sender = threading.Thread(target=ours.send, args=("value", value))
        sender.start()
        name, received = theirs.receive()
        sender.join()
    assert name == "value"
    return received


PLANS = [
    StepPlan(0, ()),
    StepPlan(
        7,
        (
            Row(3, 0, 5, BlockDelta(0, (1, 2)), Logits.ALL, (ChildFork(4, 1, (9, 8)),)),
            Row(5, 90, 1, None, Logits.LAST),
            Row(6, 0, 9, BlockDelta(3), Logits.PROMPT),
        ),
        copies=((1, 2),),
        admitted=(
            AdmittedSequence(
                3,
                (1, 2, 3, 4, 5),
                Sampling(seed=4, logit_bias=((1, -0.5),)),
                Stops(4, strings=("é",), token_ids=frozenset({0})),
                Constraint("choice", "a\0b"),
            ),
        ),
        released=(1, 2),
    ),
    EncodePlan(2, (EncodeRow(1, EncodeInput((1, 2), (0, 1), 1), EncodeOptions(3, True, True)),)),
]
SCORED = TokenLogprob(7, " a", NAN, (Alternative(1, "é", -1e-300, 0),))
RESULTS = [
    StepResult(0, ()),
    StepResult(
        7,
        (
            RowResult(3, (7,), " wörd", (SCORED,), (SCORED, SCORED), EndReason.STOP, "é"),
            RowResult(5),
            RowFailure(6, "decode", "why", errors.FieldViolation("constraint", "is so")),
            RowResult(8, (1, 2), "", finish=EndReason.LENGTH, matched=3),
        ),
        StepTimings(0.1, NAN, 3.0, 1e-9),
    ),
    EncodeResult(
        2, (EncodeRowResult(1, array("f", [1.0, NAN, -0.0])), RowFailure(2, "encode", ""))
    ),
]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_a_plan_arrives_as_it_was(plan):
    found = messages.plan_of(sent(messages.plain_plan(plan)))
    assert found == plan
    assert repr(found) == repr(plan)
    assert [type(row) for row in found.rows] == [type(row) for row in plan.rows]


@pytest.mark.parametrize("result", RESULTS, ids=repr)
def test_a_result_arrives_as_it_was_with_nan_and_infinities_too(result):
    found = messages.result_of(sent(messages.plain_result(result)))
    assert repr(found) == repr(result)
    assert type(found) is type(result)
    assert [type(row) for row in found.rows] == [type(row) for row in result.rows]


@given(st.recursive(st.none() | st.integers() | st.binary() | st.text(), st.lists, max_leaves=20))
def test_any_value_arrives_as_it_was(value):
    assert sent(value) == value


def test_a_message_larger_than_any_buffer_arrives_whole():
    value = bytes(range(256)) * 40_000
    assert sent(value) == value


def raw(data, *, close=True):
    """Return what `receive` makes of bytes that arrive on a channel."""
    ours, theirs = socket.socketpair()
    with ours, contextlib.closing(Channel(theirs)) as received:
        ours.sendall(data)
        if close:
            ours.shutdown(socket.SHUT_WR)
        return received.receive()


MESSAGE = pickle.dumps(("name", [1, 2, 3]))
WHOLE = HEADER.pack(MARK, len(MESSAGE)) + MESSAGE


def test_a_message_cut_off_anywhere_has_ended():
    assert raw(WHOLE) == ("name", [1, 2, 3])
    for length in range(len(WHOLE)):
        with pytest.raises(ChannelClosed):
            raw(WHOLE[:length])


@pytest.mark.parametrize(
    "data",
    [
        b"what a library prints",
        b"\0" * 64,
        HEADER.pack(MARK, MESSAGE_MAX + 1) + MESSAGE,
        HEADER.pack(MARK, len(MESSAGE)) + b"\xff" + MESSAGE[1:],
        HEADER.pack(MARK, 4) + pickle.dumps(5)[:4],
        HEADER.pack(MARK, len(pickle.dumps(5))) + pickle.dumps(5),
        HEADER.pack(MARK, 14) + b"cno.such\nname\n.",
    ],
)
def test_malformed_bytes_are_garbled_without_waiting_for_more(data):
    with pytest.raises(BadMessage):
        raw(data, close=False)


@given(st.binary(min_size=HEADER.size, max_size=64))
def test_noise_ends_or_garbles_a_channel_and_nothing_else(data):
    with pytest.raises((ChannelClosed, BadMessage)):
        raw(data.replace(MARK, b"none"))


def test_a_message_that_is_too_large_or_cannot_be_pickled_is_not_sent(monkeypatch):
    monkeypatch.setattr(channel, "MESSAGE_MAX", 1000)
    with channels() as (ours, theirs):
        with pytest.raises(ValueError, match="bytes"):
            ours.send("large", bytes(1001))
        with pytest.raises((AttributeError, pickle.PicklingError)):
            ours.send("function", lambda: None)
        ours.send("small", 1)
        assert theirs.receive() == ("small", 1)


def test_a_close_wakes_waiting_threads_and_frees_the_descriptor_when_they_have_left():
    for _ in range(50):
        with channels() as (ours, theirs):
            caught = []

            def wait(waiting=theirs, caught=caught):
                try:
                    waiting.receive()
                except ChannelClosed as error:
                    caught.append(error)

            waiter = threading.Thread(target=wait)
            waiter.start()
            theirs.close()
            waiter.join(10)
            assert not waiter.is_alive()
            assert len(caught) == 1
            assert theirs.fileno() == -1
            with pytest.raises(ChannelClosed):
                theirs.send("late", 0)
            with pytest.raises(ChannelClosed):
                ours.receive()


# ---- exceptions ------------------------------------------------------------------------------


def own_errors():
    """Return every class of our errors."""
    found = [
        cls
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.TrioletError)
    ]
    assert len(found) > 20
    return found


@pytest.mark.parametrize("cls", own_errors(), ids=lambda cls: cls.__name__)
def test_an_error_of_ours_travels_as_itself(cls):
    if issubclass(cls, errors.InvalidRequest):
        error = cls.of("sampling.top_p", "is 2")
    else:
        error = cls("what happened")
    error.retry_after_s, error.log_detail = 2.5, "for the log"
    found = sent(messages.raised(error)).error()
    assert type(found) is cls
    assert str(found) == str(error)
    state = {key: value for key, value in vars(found).items() if key != "__notes__"}
    assert state == vars(error)


class OfThere(errors.TrioletError):
    """An error whose class the receiving process does not know."""


def test_an_error_of_a_class_that_is_not_known_here_comes_as_text(monkeypatch):
    travelling = messages.raised(OfThere("what happened"))
    assert type(travelling.error()) is OfThere
    monkeypatch.delattr(f"{__name__}.OfThere")
    found = travelling.error()
    assert type(found) is messages.WorkerProcessError
    assert str(found) == "OfThere: what happened"


def test_a_traceback_travels_for_the_log_alone():
    try:
        raise LookupError("a detail")
    except LookupError as error:
        found = sent(messages.raised(error)).error()
    assert str(found) == "LookupError: a detail"
    [note] = found.__notes__
    assert "test_a_traceback_travels" in note


def test_a_memory_error_stays_one_and_a_long_text_is_cut():
    assert type(messages.raised(MemoryError("all")).error()) is MemoryError
    assert len(str(messages.raised(ValueError("x" * 10_000)).error())) < 3000
