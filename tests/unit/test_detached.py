"""Detached streams, whose clients are away: which events are kept, and how many streams may
wait."""

from types import SimpleNamespace

import pytest

from engine.core.common.events import Admitted, Finished
from engine.core.common.types import EndReason, RequestId, Timings, Usage
from engine.core.text.types import ClientCame, ClientLeft, TokenLogprob, Tokens
from engine.errors import InvalidRequest, Overloaded, RequestNotFound
from engine.requests import detached
from engine.requests.detached import DetachedStreams
from engine.requests.quota import Origin, Quota
from engine.requests.readers import Leaving
from engine.requests.stream import StreamOptions
from engine.requests.text import kept_events
from engine.requests.text.chat_values import Chat
from engine.requests.text.continuation import ContinuedChoice
from engine.requests.text.kept_events import KeptEvents, ReceivedChoice
from engine.requests.text.stream import TextStream
from engine.requests.text.values import GenerateRequest, Started

EARLY = "is before what the server keeps; send the request again with a continuation"


class Seen(list):
    """A reader that keeps its events, and the errors with which it was ended."""

    push = list.append
    ends = ()

    def end(self, error):
        self.ends = (*self.ends, error)


def tokens(choice, *ids, **fields):
    return Tokens(RequestId("r"), choice, ids, "x", **fields)


def end(choice):
    usage, timings = Usage(1, 0, 1), Timings(*[0.0] * 5)
    return Finished(RequestId("r"), choice, EndReason.STOP, usage, timings)


def kept(*events, continued=()):
    """Return a `KeptEvents` that has got these events, and its reader."""
    seen = Seen()
    keeping = KeptEvents(seen, continued)
    for event in events:
        keeping.push(event)
    return keeping, seen


STARTED = Started("r", "m", 1)


@pytest.mark.parametrize(
    ("received", "field", "what"),
    [
        ([(1, True), (2, False), (0, False)], "received", "has 3 choices, but n is 2"),
        ([(2, True)], "received[0].tokens", "is 2, but 1 tokens have been generated"),
        (
            [(1, True), (2, True)],
            "received[1].finished",
            "is true, but the choice has not finished",
        ),
        ([(0, False), (9, False)], "received[1].tokens", "is 9, but 2 tokens have been generated"),
    ],
)
def test_what_cannot_have_been_received_is_refused_by_name(received, field, what):
    keeping, _ = kept(STARTED, tokens(0, 5), end(0), tokens(1, 6), tokens(1, 7))
    received = [ReceivedChoice(*one) for one in received]
    [violation] = keeping.violations(received, 2)
    assert (violation.field, violation.description) == (field, what)


def test_a_client_gets_what_it_lacks_and_nothing_else():
    events = (STARTED, tokens(0, 5), end(0), tokens(1, 6), tokens(1, 7))
    keeping, first = kept(*events)
    for received in ([], [(1, False)], [(1, True), (1, False)], [(1, True), (2, False)]):
        second, received = Seen(), [ReceivedChoice(*one) for one in received]
        assert list(keeping.violations(received, 2)) == []
        num_credited = keeping.attach(second, received)
        got = [e for e in second if isinstance(e, Tokens)]
        assert len(got) == num_credited == 3 - sum(one.tokens for one in received)
        assert second[0] == STARTED
        assert (end(0) in second) == (not any(one.finished for one in received))
        assert len(first.ends) == 1  # the former reader is ended, as another one has attached
        first = second


@pytest.mark.parametrize("count", range(6))
def test_a_count_inside_a_message_is_refused(count):
    """A step with drafts sends several tokens in one message, whose text cannot be divided."""
    keeping, _ = kept(STARTED, tokens(0, 5), tokens(0, 6, 7, 8), tokens(0, 9))
    found = [(v.field, v.description) for v in keeping.violations([ReceivedChoice(count)], 1)]
    what = f"is {count}, which is inside a message; count whole messages, or send the request again"
    what += " with a continuation"
    assert found == ([("received[0].tokens", what)] if count in (2, 3) else [])


def test_tokens_of_a_continuation_are_counted_and_its_ended_choices_left_alone():
    continued = (ContinuedChoice((1, 2)), ContinuedChoice((3,), finished=True))
    keeping, _ = kept(STARTED, tokens(0, 5), continued=continued)
    received = [ReceivedChoice(3), ReceivedChoice(1, finished=True)]
    assert list(keeping.violations(received, 2)) == []
    assert keeping.attach(Seen(), received) == 0
    assert [one.description for one in keeping.violations([ReceivedChoice(1)], 2)] == [EARLY]


@pytest.mark.parametrize("is_scored", [False, True])
def test_what_is_kept_is_bounded(monkeypatch, is_scored):
    """Red if a number of events bounds what is kept: events with log-probabilities are larger."""
    scored = (TokenLogprob(1, "x", -1.0),) * 9 if is_scored else ()
    one = tokens(0, 1, logprobs=scored)
    room = 10 * (301 + 300 * len(scored))
    monkeypatch.setattr(kept_events, "KEPT_BYTES_MAX", room)
    keeping, _ = kept(STARTED, *[one] * 25)
    assert len(keeping._tokens) == 10
    assert keeping.num_bytes == room
    assert list(keeping.violations([ReceivedChoice(15)], 1)) == []
    assert [v.description for v in keeping.violations([ReceivedChoice(14)], 1)] == [EARLY]
    assert keeping.attach(Seen(), [ReceivedChoice(20)]) == 5


def test_a_scored_prompt_that_is_too_large_is_not_kept(monkeypatch):
    monkeypatch.setattr(kept_events, "KEPT_BYTES_MAX", 1000)
    large = Started("r", "m", 9, (TokenLogprob(1, "x", -1.0),) * 9)
    keeping, _ = kept(large, tokens(0, 1))
    assert [v.description for v in keeping.violations([], 1)] == [EARLY]
    seen = Seen()
    keeping.attach(seen, [ReceivedChoice(1)])
    assert seen == [Started("r", "m", 9)]


# ---- the streams that wait


class Tasks:
    """Stands in for the nursery of the requests' tasks, and starts none."""

    is_open = True

    def start(self, *job, name):
        pass


def lost(streams, name, holder=None, num_bytes=0, text="a", address="", chat=None):
    """Return a detached stream: its client is away."""
    request = GenerateRequest(text=text, chat=chat, request_id=name, resume_window_s=9.0)
    options = StreamOptions(
        name,
        RequestId(name),
        1,
        Seen(),
        Origin(quota=holder, address=address),
        on_loss=streams.add,
        on_leave=streams.remove,
    )
    stream = TextStream(request, options)
    streams.register(stream)
    stream._kept._tokens_bytes = num_bytes
    stream.leave(options.reader, 0.0, Leaving(is_lost=True))
    return stream


async def test_a_holder_drives_out_its_own_streams_and_not_others(monkeypatch, autojump_clock):
    """Red if the oldest stream of all holders is given up."""
    monkeypatch.setattr(detached, "DETACHED_MAX", 3)
    streams, ann, ben = DetachedStreams(Tasks()), Quota("ann"), Quota("ben")
    first = lost(streams, "a", ann)
    many = [lost(streams, f"b{number}", ben) for number in range(5)]
    assert streams.attachable("a", first.attach_token, ann) is first
    assert [streams.is_waiting(one) for one in many] == [False, False, False, True, True]
    assert [one.reason for one in many] == [EndReason.CANCELLED] * 3 + [None] * 2
    assert (ann.num_requests, ben.num_requests, streams.count) == (1, 2, 3)
    streams.close()
    assert (ann.num_requests, ben.num_requests, streams.count) == (0, 0, 0)
    assert many[4].reason is EndReason.SHUTDOWN
    late = lost(streams, "late", ann)
    assert (late.reason, ann.num_requests) == (EndReason.CANCELLED, 0)


@pytest.mark.parametrize("by", ["key", "address"])
async def test_each_holder_or_address_has_a_bound_of_its_own(monkeypatch, autojump_clock, by):
    """Red if only the number of all detached streams is bounded: one client could fill all
    places."""
    monkeypatch.setattr(detached, "DETACHED_EACH_MAX", 2)
    streams = DetachedStreams(Tasks())
    ann, ben = [
        {"holder": Quota(name)} if by == "key" else {"address": name} for name in ("ann", "ben")
    ]
    first = lost(streams, "a", **ann)
    many = [lost(streams, f"b{number}", **ben) for number in range(4)]
    assert streams.is_waiting(first)
    assert [streams.is_waiting(one) for one in many] == [False, False, True, True]


async def test_the_core_hears_whose_client_is_away(autojump_clock):
    """The core is told at once, or when the request is submitted if its client left before."""
    streams, posted = DetachedStreams(Tasks()), []
    loop = SimpleNamespace(post=posted.append, num_undelivered=lambda *of: 0)
    early, late = lost(streams, "early"), lost(streams, "late")
    for stream in (early, late):
        stream.replica = SimpleNamespace(loop=loop)
    assert posted == []
    streams.attach(late, reader := Seen(), [])
    early.push(Admitted(RequestId("early"), 1))
    late.push(Admitted(RequestId("late"), 1))
    late.leave(reader, 0.0, Leaving(is_lost=True))
    streams.attach(late, Seen(), [])
    left, came = ClientLeft, ClientCame
    assert posted == [came("late"), left("early"), left("late"), came("late")]


async def test_the_memory_of_streams_that_wait_is_bounded(monkeypatch, autojump_clock):
    monkeypatch.setattr(detached, "DETACHED_BYTES_MAX", 100)
    streams = DetachedStreams(Tasks())
    small = [lost(streams, f"s{number}", num_bytes=30) for number in range(3)]
    large = lost(streams, "l", num_bytes=60)
    assert [streams.is_waiting(one) for one in (*small, large)] == [False, False, True, True]


async def test_a_long_prompt_counts_as_memory_of_its_stream(monkeypatch, autojump_clock):
    """Red if only the tokens of a detached stream count, and its prompt does not."""
    monkeypatch.setattr(detached, "DETACHED_BYTES_MAX", 100)
    streams = DetachedStreams(Tasks())
    first, second = [lost(streams, name, text="a" * 60) for name in "ab"]
    assert (streams.is_waiting(first), streams.is_waiting(second)) == (False, True)


async def test_who_keeps_the_most_bytes_loses_a_stream_if_bytes_are_short(
    monkeypatch, autojump_clock
):
    monkeypatch.setattr(detached, "DETACHED_BYTES_MAX", 100)
    streams, ann, ben = DetachedStreams(Tasks()), Quota("ann"), Quota("ben")
    many = [lost(streams, f"a{number}", ann) for number in range(5)]
    large = [lost(streams, f"b{number}", ben, num_bytes=60) for number in range(2)]
    assert all(streams.is_waiting(one) for one in many)
    assert [streams.is_waiting(one) for one in large] == [False, True]


async def test_a_stream_that_cannot_be_attached_to_any_more_waits_no_longer(autojump_clock):
    """When a stream cannot be attached to any more, its client sends a continuation with the same
    id. Red if that id is in use until the resume window ends."""
    streams, ann = DetachedStreams(Tasks()), Quota("ann")
    stream = lost(streams, "a", ann)
    stream._kept._dropped[0] = 5
    with pytest.raises(InvalidRequest, match=EARLY):
        streams.attach(stream, Seen(), [ReceivedChoice(4)])
    assert (stream.reason, ann.num_requests, streams.count) == (EndReason.CANCELLED, 0, 0)
    with pytest.raises(RequestNotFound):
        streams.attachable("a", stream.attach_token, ann)


async def test_a_full_server_gives_up_a_stream_that_waits_of_whoever_has_the_most(autojump_clock):
    """Red if the oldest of all streams is given up, or one that has ended and holds no place."""
    streams, ann, ben = DetachedStreams(Tasks()), Quota("ann"), Quota("ben")
    first = lost(streams, "a", ann)
    many = [lost(streams, f"b{number}", ben) for number in range(3)]
    many[0].close(None)
    assert [streams.make_place() for _ in range(4)] == [True, True, True, False]
    order = [first, *many]
    assert [one.reason for one in order] == [EndReason.CANCELLED, None, *[EndReason.CANCELLED] * 2]
    assert (streams.count, ann.num_requests, ben.num_requests) == (1, 0, 1)


async def test_memory_for_images_is_given_up_by_a_stream_that_has_some(autojump_clock):
    """Red if a stream is given up whose images still wait for memory, such as the request that
    asks."""
    streams = DetachedStreams(Tasks())
    images = Chat(({"role": "user", "content": [{"type": "image", "image": b"a"}]},))
    plain = lost(streams, "a")
    waiting, holder = [lost(streams, name, chat=images, text=None) for name in "bc"]
    for _ in range(2):
        streams.spare_images({holder.core_id})
        reasons = [stream.reason for stream in (plain, waiting, holder)]
        assert reasons == [None, None, EndReason.CANCELLED]


async def test_a_prompt_whose_client_is_away_is_not_waiting_for_its_key(autojump_clock):
    """Red if it counts for its API key until the resume window ends: the key could not even
    send a continuation. When the client is back, the prompt counts again, and is not refused."""
    streams, ann = DetachedStreams(Tasks()), Quota("ann", max_queued_tokens=100)
    late = lost(streams, "late", ann)
    late.queued.add(60)  # 60 prompt tokens; the client left while they were tokenised
    early = lost(streams, "early", ann)
    streams.attach(early, reader := Seen(), [])
    early.queued.add(60)
    assert ann.queued_tokens == 60
    early.leave(reader, 0.0, Leaving(is_lost=True))
    assert ann.queued_tokens == 0
    for stream in (late, early):
        streams.attach(stream, reader, [])
    assert ann.queued_tokens == 120
    with pytest.raises(Overloaded, match="120 prompt tokens"):
        ann.queue(1)
    late.leave(reader, 0.0, Leaving(is_lost=True))
    for stream in (late, early):
        stream.close(None)
        assert ann.queued_tokens in (0, 60)
    assert ann.queued_tokens == 0


async def test_what_is_aborted_counts_no_more_and_its_client_may_learn_of_it(autojump_clock):
    """Red if an aborted stream counts against `max_requests` until its resume window ends."""
    streams, ann = DetachedStreams(Tasks()), Quota("ann")
    stream = lost(streams, "a", ann)
    streams.abort("a")
    assert (ann.num_requests, streams.count) == (0, 1)
    streams.attach(stream, reader := Seen(), [])
    assert ann.num_requests == 1
    stream.leave(reader, 0.0)
    streams.uncount(stream)
    assert (ann.num_requests, streams.count) == (0, 0)


async def test_nobody_learns_of_anothers_stream(autojump_clock):
    """A wrong id, a wrong token, no token, and a wrong holder get the same error."""
    streams, ann = DetachedStreams(Tasks()), Quota("ann")
    stream = lost(streams, "a", ann)
    right = ("a", stream.attach_token, ann)
    for wrong in (("b", *right[1:]), ("a", "x", ann), ("a", "", ann), (*right[:2], None)):
        with pytest.raises(RequestNotFound, match="can be attached; send the request again with a"):
            streams.attachable(*wrong)
    assert streams.attachable(*right) is stream
    streams.attach(stream, reader := Seen(), [])
    stream.leave(reader, 0.0)
    with pytest.raises(RequestNotFound):
        streams.attachable(*right)
