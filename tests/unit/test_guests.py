"""Guests: requests whose clients are away cost others nothing, and lose nothing (D25). In the drawn
schedules of `tests/property/test_scheduler.py`, clients leave and come back at any time."""

import pytest

from engine.core.common.events import Pause, PauseMode, Resume
from engine.core.common.types import EndReason, RequestId
from engine.core.text import admission
from engine.core.text.guests import QUIET_S
from engine.core.text.lifecycle import State
from engine.core.text.scheduler import Scheduler
from engine.core.text.types import ClientCame, ClientLeft
from tests.support.core_driver import Driver, make_request

NUM_BLOCKS = 64
HELD_MAX = NUM_BLOCKS // 16
PROMPT, LONG_PROMPT = 12, 40  # tokens: 3 blocks, and 10 blocks
ANSWER = 9


class Line(Driver):
    """A scheduler's driver; readers read nothing while their clients are away."""

    def __init__(self, **config):
        small = {"num_blocks": NUM_BLOCKS, "block_size": 4, "max_model_len": 128}
        small |= {"max_num_seqs": 16, "max_num_batched_tokens": 24, "prepared_plans": False}
        self.away = set()
        super().__init__(**small | config)

    def send(self, name, length=PROMPT, first=1, max_tokens=ANSWER, buffer=1000, **fields):
        prompt = range(first, first + length)
        request = make_request(name, prompt, max_tokens=max_tokens, arrival=self.now, **fields)
        self.submit(request, buffer=buffer)

    def leave(self, *names):
        """Cut the connections of clients."""
        self.away.update(names)
        for name in names:
            self.apply(ClientLeft(RequestId(name)))

    def come(self, *names):
        """Attach clients to their requests: they read what waits for them."""
        self.away.difference_update(names)
        for name in names:
            self.read(name)
            self.apply(ClientCame(RequestId(name)))

    def read(self, name, count=None):
        """Let a request's reader take messages, unless its client is away."""
        if name not in self.away:
            super().read(name, count)

    def state_of(self, name):
        return self.scheduler._ledger.requests[RequestId(name)].parent.state

    def held_by_guests(self):
        lives = self.scheduler._ledger.requests.values()
        parked = [live for live in lives if live.is_guest and live.parked_since is not None]
        return sum(live.num_blocks for live in parked)

    def answers(self, name):
        """Return the number of tokens of each of a request's choices that have ended."""
        return [len(self.tokens[key]) for key in self.finished if key[0] == name]


def queued(line, n):
    line.send("other", max_tokens=4, first=50, n=16)
    line.step()
    line.send("guest", n=n)
    line.leave("guest")


def prefilling(line, n):
    line.send("other", max_tokens=40, first=50)
    line.send("guest", LONG_PROMPT, n=n)
    line.step()
    line.leave("guest")


def decoding(line, n):
    line.send("other", max_tokens=40, first=50)
    line.send("guest", n=n)
    for _ in range(4):
        line.step()
    line.leave("guest")


def in_a_step(line, n):
    decoding(line, n)
    line.come("guest")
    line.begin_step()
    line.leave("guest")


def parked_by_its_reader(line, n):
    line.send("other", max_tokens=40, first=50)
    line.send("guest", n=n, buffer=2 * n)
    line.away.add("guest")
    while not line.scheduler._ledger.parked.unread:
        line.step()
    line.leave("guest")


def parked_as_a_guest(line, n):
    decoding(line, n)
    line.step()
    line.step()  # the first step may have been planned before the client left
    assert line.state_of("guest") is State.PARKED


def evicted(line, n):
    line.send("other", max_tokens=40, first=50)
    line.send("guest", LONG_PROMPT, n=n)
    for _ in range(4):
        line.step()
    line.leave("guest")
    line.step()
    line.step()
    assert line.state_of("guest") is State.PARKED
    assert not line.held_by_guests()


def going_alone(line, n):
    line.send("guest", n=n)
    line.step()
    line.leave("guest")
    line.step()
    assert line.state_of("guest") is State.RUNNING


def gone_on(line, n):
    parked_as_a_guest(line, n)
    line.cancel("other")
    line.tick(QUIET_S)
    line.step()
    assert line.state_of("guest") is State.RUNNING


PHASES = (
    *(queued, prefilling, decoding, in_a_step, parked_by_its_reader, parked_as_a_guest, evicted),
    *(going_alone, gone_on),
)


@pytest.mark.parametrize("has_prepared", [False, True], ids=["planned", "prepared"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_a_client_that_comes_back_gets_every_token_and_others_theirs(phase, n, has_prepared):
    line = Line(prepared_plans=has_prepared)
    phase(line, n)
    if line.in_flight is not None:
        line.end_step()
    line.come("guest")
    line.run()
    assert line.answers("guest") == [ANSWER] * n
    line.check_tokens()
    line.check_idle()


@pytest.mark.parametrize("reason", [EndReason.CANCELLED, EndReason.DEADLINE, EndReason.ABORTED])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_a_guest_whose_window_ends_leaves_nothing_behind(phase, n, reason):
    line = Line(prepared_plans=True)
    phase(line, n)
    line.cancel("guest", reason)
    if line.in_flight is not None:
        line.end_step()
    line.apply(ClientCame(RequestId("guest")))  # the request has ended
    line.run()
    assert [line.finished["guest", choice].reason for choice in range(n)] == [reason] * n
    line.check_tokens()
    line.check_idle()
    assert not len(line.scheduler._ledger.parked)
    assert line.scheduler.next_wakeup(line.now) is None


@pytest.mark.parametrize(
    "num_guests", [100, pytest.param(1000, marks=pytest.mark.slow)], ids=lambda count: f"{count}"
)
def test_hoarded_windows_cost_another_client_nothing(num_guests, monkeypatch):
    """Red if `ClientLeft` does nothing: guests hold all blocks, and others have 1/20 of the
    speed."""
    monkeypatch.setattr(Scheduler, "check", lambda scheduler: None)  # to save time
    alone = speed(Line(num_blocks=512))
    line = Line(num_blocks=512, max_queued_requests=num_guests + 9)
    names = [f"g{number}" for number in range(num_guests)]
    for number, name in enumerate(names):
        line.send(name, first=1 + number % 90)
    line.send("first", max_tokens=4)
    while line.now < 0.1:
        line.step(seconds=cost(line))
    line.leave(*names)
    assert speed(line) >= 0.9 * alone
    line.come(*names)
    line.run()
    monkeypatch.undo()
    assert all(len(line.tokens[name, 0]) == ANSWER for name in names)
    line.check_tokens()
    line.check_idle()


def cost(line):
    return 0.008 + 0.002 * len(line.scheduler._ledger.running)


def speed(line):
    """Return the tokens per second of a client that sends one request after the other, in its third
    and fourth second. Check that guests hold at most a tenth of the blocks in that time."""
    began, count, had = line.now, 0, 0
    while line.now < began + 4.0:
        name = f"own{count}"
        line.send(name, first=100, max_tokens=20)
        while (name, 0) not in line.finished:
            assert line.step(seconds=cost(line))
            if line.now > began + 2.0:
                assert line.held_by_guests() <= line.config.num_blocks / 10
        count += 1
        had += 20 * (line.now > began + 2.0)
    return had / (line.now - began - 2.0)


def test_guests_go_on_when_nobody_else_has_been_there_for_a_while():
    """Guests wait for `QUIET_S`, longer than the gaps between a busy client's requests."""
    line = Line()
    parked_as_a_guest(line, 1)
    line.cancel("other")
    assert not line.step()
    due = line.scheduler.next_wakeup(line.now)
    assert due == pytest.approx(line.now + QUIET_S)
    line.apply(Pause(PauseMode.KEEP))
    assert line.scheduler.next_wakeup(due) is None  # a paused scheduler does not wake up
    line.apply(Pause(PauseMode.WAIT))
    line.now = due
    assert line.step()
    line.away.clear()
    line.run()
    assert line.answers("guest") == [ANSWER]


def test_a_guest_whose_stream_is_full_makes_way_for_the_next():
    """Red if the guest keeps its blocks, or if nothing wakes the scheduler for the next."""
    line = Line()
    for name in ("first", "second", "third"):
        line.send(name, max_tokens=30, buffer=6)
    line.step()
    line.leave("first", "second", "third")
    for _ in range(99):
        if not line.step() and (due := line.scheduler.next_wakeup(line.now)) is not None:
            line.now = due
    assert line.scheduler.next_wakeup(line.now) is None
    assert [line.unread[name] for name in ("first", "second", "third")] == [6, 6, 6]
    assert line.held_by_guests() <= HELD_MAX
    line.come("first", "second", "third")
    line.run()
    assert line.answers("second") == [30]


def test_a_guest_goes_on_to_the_last_free_place_of_its_stream():
    line = Line()
    line.send("other", max_tokens=40, first=50)
    line.send("guest", max_tokens=30, buffer=4)
    line.away.add("guest")
    while line.unread["guest"] < 3:
        line.step()
    line.leave("guest")
    line.step()
    line.cancel("other")
    assert not line.step()
    line.now = line.scheduler.next_wakeup(line.now)
    assert line.step()
    assert line.unread["guest"] == 4
    line.come("guest")
    line.run()
    assert line.answers("guest") == [30]


def test_a_guest_that_comes_back_before_its_start_has_waited_in_the_queue():
    line = Line()
    queued(line, 1)
    line.step()
    line.come("guest")
    line.tick(2.0)
    line.run()
    assert line.finished["guest", 0].timings.queue_s >= 2.0


def test_guests_that_are_alone_have_a_share_of_the_seats():
    line = Line(num_blocks=256)
    names = [f"g{number}" for number in range(9)]
    for name in names:
        line.send(name)
    line.step()
    line.leave(*names)
    while (plan := line.begin_step()) is not None:
        assert len(plan.rows) <= line.config.max_num_seqs // 8
        line.end_step()
    assert all(line.answers(name) == [ANSWER] for name in names)
    line.check_idle()


def test_guests_that_are_not_parked_yet_go_on_up_to_their_share_of_the_seats():
    line = Line(num_blocks=256)
    parked_as_a_guest(line, 1)
    line.cancel("other")
    names = ("g1", "g2", "g3")
    for name in names:
        line.send(name)
    line.leave(*names)
    plan = line.begin_step()
    assert len(plan.rows) == line.config.max_num_seqs // 8
    line.end_step()
    line.come("guest", *names)
    line.run()


def test_guests_that_hold_no_block_are_not_looked_at():
    """A step of other requests takes the same time, however many guests there are."""
    line = Line(max_queued_requests=200)
    line.send("other", max_tokens=40, first=50)
    line.step()
    names = [f"g{number}" for number in range(99)]
    for name in names:
        line.send(name)
    line.leave(*names)
    for _ in range(3):
        line.step()
    parked = line.scheduler._ledger.parked
    assert len(parked) == 99
    assert not parked.holders
    assert not list(parked.residents())
    assert not line.scheduler._ledger.waiting


def test_a_guest_loses_its_blocks_before_a_reader_that_is_slow():
    line = Line()
    parked_as_a_guest(line, 1)
    line.send("slow", first=70, buffer=1)
    line.away.add("slow")
    while not line.scheduler._ledger.parked.unread:
        line.step()
    parked = admission._parked_residents(line.scheduler._ledger)
    assert [seq.request_id for seq in admission.order_victims(parked, [], (0, 0.0, 0))] == [
        "guest",
        "slow",
    ]
    line.send("long", 100, first=100)
    line.send("longer", 120, first=300)
    guest = line.scheduler._ledger.requests[RequestId("guest")]
    while guest.num_blocks:
        assert line.step()
    assert not line.scheduler._ledger.parked.holders


def test_a_queue_of_guests_refuses_nobody():
    """When a connection with many requests is lost, its client may send one of them again at once.
    Red if that request is refused because the lost ones fill the queue until the next plan."""
    line = Line(max_queued_requests=2, max_queued_tokens=2 * PROMPT, max_num_seqs=1)
    line.send("other", max_tokens=40, first=50)
    line.step()
    for name in ("a", "b", "full"):
        line.send(name)
    line.leave("a", "b")
    line.send("again", 2 * PROMPT)
    line.send("late")
    assert set(line.refused) == {"full", "late"}
    line.step()
    assert line.state_of("again") is State.WAITING
    assert line.state_of("a") is line.state_of("b") is State.PARKED


def said(line, name="guest"):
    explained = line.scheduler.explain(RequestId(name), line.now)
    assert explained.state == "PARKED"
    return explained.waiting_for


def test_what_is_said_of_a_guest():
    """Explain gives each reason at a time when it is true."""
    line = Line(max_num_seqs=8)  # guests get one of these 8 seats
    parked_as_a_guest(line, 1)
    others = f"the others: its replica has to compute nobody else for {QUIET_S} s"
    assert said(line) == others
    line.cancel("other")
    line.step()
    assert said(line) == others
    line.send("second")
    line.step()
    line.leave("second")
    line.send("third", max_tokens=1)
    line.step()
    line.step()
    line.apply(Pause(PauseMode.KEEP))
    assert said(line) == "resume: the model is paused (keep)"
    line.apply(Resume())
    line.tick(QUIET_S)
    assert (said(line), said(line, "second")) == ("a step", "other guests")
    line.step()
    assert line.state_of("guest") is State.RUNNING
    assert said(line, "second") == "other guests"


def test_a_guest_whose_stream_is_full_is_said_to_wait_for_its_client():
    line = Line()
    line.send("guest", buffer=2)
    line.step()
    line.leave("guest")
    for _ in range(4):
        line.step()
    assert said(line) == "its client: its stream has no room for what comes next"
