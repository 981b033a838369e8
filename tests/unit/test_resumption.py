"""What a client sends to go on with a stream that broke, and what its program sees."""

import grpc
import pytest

from grpc_service.client import errors
from grpc_service.client import messages as pb
from grpc_service.client.resumption import DELAY_MAX_S, Resumption
from tests.unit.rpc.test_accounts import Clock

REQUEST = pb.GenerateRequest(text="a", n=2, request_id="mine")


def unavailable(retry_after_s=None, reason=""):
    code = grpc.StatusCode.UNAVAILABLE
    return errors.Unavailable(code, "gone", reason=reason, retry_after_s=retry_after_s)


def made(request=REQUEST, *, timeout=None, resume_s=60.0, **options):
    """Return a resumption and its clock."""
    clock = Clock()
    return Resumption(request, timeout=timeout, resume_s=resume_s, now=clock, **options), clock


def started(**fields):
    """Return Started, from a server that knows continuations."""
    return pb.GenerateResponse(started={"request_id": "mine", "seed": 5} | fields)


def delta(choice, ids, text="x"):
    return pb.GenerateResponse(delta={"choice": choice, "token_ids": ids, "text": text})


def finished(choice):
    return pb.GenerateResponse(finished={"choice": choice})


def test_the_next_request_has_what_was_received_and_nothing_else_changes():
    resumption, _ = made()
    assert resumption.request.output.token_ids
    for event in (started(), delta(1, [7, 8]), delta(0, [1]), delta(1, [9]), finished(1)):
        resumption.take(event)
    request = resumption.next_call(unavailable()).request
    assert [list(one.token_ids) for one in request.continuation.choices] == [[1], [7, 8, 9]]
    assert [one.finished for one in request.continuation.choices] == [False, True]
    assert request.continuation.seed == 5
    request.ClearField("continuation")
    request.output.ClearField("token_ids")
    request.ClearField("output")
    assert request == REQUEST


def test_a_program_sees_one_stream_and_no_ids_that_it_did_not_ask_for():
    for asks in (False, True):
        resumption, _ = made(pb.GenerateRequest(text="a", output={"token_ids": asks}))
        seen = [resumption.take(event) for event in (started(), delta(0, [1]), delta(0, [2], ""))]
        resumption.next_call(unavailable())
        seen += [resumption.take(event) for event in (started(), delta(0, [3]), finished(0))]
        kinds = [event.WhichOneof("event") for event in seen if event is not None]
        assert kinds == ["started", *["delta"] * (3 if asks else 2), "finished"]
        ids = [i for event in seen if event is not None for i in event.delta.token_ids]
        assert ids == ([1, 2, 3] if asks else [])
        assert resumption.is_whole


def test_a_continuation_of_the_programs_own_is_continued():
    request = pb.GenerateRequest(text="a", continuation={"choices": [{"token_ids": [1, 2]}]})
    resumption, _ = made(request)
    resumption.take(started())
    resumption.take(delta(0, [3]))
    [choice] = resumption.next_call(unavailable()).request.continuation.choices
    assert list(choice.token_ids) == [1, 2, 3]


@pytest.mark.parametrize(
    "events", [(), (pb.GenerateResponse(started={"request_id": "mine"}), delta(0, [1]))]
)
def test_what_never_began_or_began_at_a_server_that_begins_anew_is_not_continued(events):
    resumption, _ = made()
    for event in events:
        resumption.take(event)
    assert resumption.next_call(unavailable()) is None


def test_a_server_that_begins_anew_is_found_out():
    for other in (pb.GenerateResponse(started={"request_id": "mine"}), started(seed=6)):
        resumption, _ = made()
        resumption.take(started())
        resumption.next_call(unavailable())
        with pytest.raises(errors.Unimplemented, match="cannot go on with it"):
            resumption.take(other)


def test_without_resumption_nothing_is_changed():
    resumption, _ = made(resume_s=0)
    assert resumption.request == REQUEST
    events = [started(), delta(0, []), finished(0)]
    assert [resumption.take(event) for event in events] == events
    assert resumption.next_call(unavailable()) is None


def test_a_program_sees_the_progress_of_the_first_stream_alone():
    resumption, _ = made()
    progress = pb.GenerateResponse(progress={"phase": "prefill", "computed_tokens": 9})
    assert resumption.take(progress) == progress
    resumption.take(started())
    assert resumption.take(progress) == progress
    resumption.next_call(unavailable())
    assert resumption.take(progress) is None


def test_tries_have_growing_delays_and_end_when_nothing_new_comes():
    """Red if a stream that gets no new token is retried for ever."""
    told = []
    resumption, clock = made(on_break=lambda error, delay_s: told.append(delay_s))
    resumption.take(started())
    while (next_call := resumption.next_call(unavailable())) is not None:
        clock.now += next_call.delay_s
    assert clock.now <= 65
    assert 8 < len(told) < 30
    assert told[0] < 0.4 < told[3]
    assert max(told) <= 1.5 * DELAY_MAX_S
    resumption.take(delta(0, [1]))  # a new token resets the delays and the time limit
    assert resumption.next_call(unavailable()).delay_s < 0.4


def test_a_servers_advice_and_the_deadline_are_kept():
    resumption, clock = made(timeout=10.0)
    resumption.take(started())
    next_call = resumption.next_call(unavailable(5.0, "SHUTTING_DOWN"))
    assert 5.0 <= next_call.delay_s <= 7.5
    assert next_call.timeout == pytest.approx(10.0 - next_call.delay_s)
    clock.now += 9.9
    assert resumption.next_call(unavailable()) is None


def test_which_errors_are_resumable():
    """After a break, "already exists" and "the queue is full" may be true for a moment only. Before
    a break they are the final answer."""
    taken = errors.AlreadyExists(grpc.StatusCode.ALREADY_EXISTS, "in use")
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    full = errors.ResourceExhausted(code, "full", retry_after_s=1.0)
    wrong = errors.InvalidArgument(grpc.StatusCode.INVALID_ARGUMENT, "wrong")
    resumption, _ = made()
    resumption.take(started())
    assert [resumption.next_call(error) for error in (taken, full, wrong)] == [None] * 3
    assert resumption.next_call(unavailable()) is not None
    assert resumption.next_call(taken) is not None
    assert resumption.next_call(full) is not None
    assert resumption.next_call(wrong) is None


def test_a_stream_that_the_server_may_keep_is_attached_to_and_otherwise_continued():
    """Red if the tokens of the request's own continuation are missing in the next one."""
    request = pb.GenerateRequest(text="a", continuation={"choices": [{"token_ids": [1, 2]}]})
    resumption, _ = made(request)
    resumption.take(started(attach_token="secret", request_id="made"))
    resumption.take(delta(0, [3]))
    next_call = resumption.next_call(unavailable()).request
    assert next_call == pb.AttachRequest(
        request_id="made", attach_token="secret", received=[{"tokens": 3}]
    )
    gone = errors.NotFound(grpc.StatusCode.NOT_FOUND, "the window has ended")
    [choice] = resumption.next_call(gone).request.continuation.choices
    assert list(choice.token_ids) == [1, 2, 3]


def test_a_large_message_that_came_in_part_counts_as_not_received():
    """Red if a program gets parts at once: after a break the server sends them again."""
    resumption, _ = made()
    resumption.take(started())
    assert resumption.take(delta(0, [], "one ")) is None
    assert resumption.take(delta(0, [7], "two")).delta.text == "one two"
    assert resumption.take(delta(1, [], "lost")) is None
    [first, second] = resumption.next_call(unavailable()).request.continuation.choices
    assert (list(first.token_ids), list(second.token_ids)) == ([7], [])
    resumption.take(started())
    assert resumption.take(delta(1, [8], "come")).delta.text == "come"
