"""Drive an `EncodeScheduler` with a `FakeEncoder`, synchronously, and check what comes out.

The oracle is `vector_of`: what an input's values must be, from its own tokens alone. Every plan is
compared with a waiting queue that is kept as a plain sorted list.
"""

from __future__ import annotations

from math import floor
from typing import NamedTuple

from engine.config import EncoderConfig
from engine.core.common.credit import Credit
from engine.core.common.events import (
    Admitted,
    Finished,
    Refused,
    Submit,
)
from engine.core.common.types import RequestId
from engine.core.encode.scheduler import EncodeScheduler
from engine.core.encode.types import Encoded, EncodeInput, EncodeRequest, ImageInput
from engine.images.fit import FittedImage
from engine.worker.fakes.encoder import FakeEncoder, ids_of, vector_of
from tests.support.step_driver import StepDriver


class Picture(NamedTuple):
    """An input that is an image of so many tokens."""

    num_tokens: int


class EncodeDriver(StepDriver):
    """Drives an `EncodeScheduler` with a fake encoder."""

    def __init__(self, *, runner=None, **config):
        self.config = EncoderConfig(**{"max_model_len": 64, **config})
        super().__init__(EncodeScheduler(self.config), runner or FakeEncoder(max_model_len=64))
        self.got = {}
        self.plans = []
        self._next_token = 1

    # ---- inputs

    def submit(self, name, lengths, *, buffer=1000, arrival=None, **fields):
        """Submit a request whose inputs have these numbers of tokens; a `Picture` stands for an
        image. No two inputs are equal."""
        inputs = tuple(map(self._input, lengths))
        arrival = self.now if arrival is None else arrival
        request = EncodeRequest(RequestId(name), inputs, arrival, **fields)
        credit = Credit(buffer)
        if name not in self.requests:
            self.requests[name], self.credits[name] = request, credit
            self.got[name], self.unread[name] = {}, 0
        self.apply(Submit(request, credit))

    def _input(self, length):
        if isinstance(length, Picture):
            pixels = bytes(number % 256 for number in (*self._tokens(1), self._next_token >> 8))
            return ImageInput(FittedImage(1, 1, pixels), length.num_tokens)
        return EncodeInput(tuple(self._tokens(length)))

    def _tokens(self, length):
        self._next_token += 1
        return [self._next_token, *range(length - 1)]

    # ---- steps

    def begin_step(self):
        """Plan a step, check the plan, and return it; None if there is nothing to compute."""
        before = [live for live in self._queue() if live.left]
        suspects = bool(self.scheduler._suspects)
        lefts = {
            id(live): {kind: list(same) for kind, same in live.left.items()} for live in before
        }
        last = self.plans[-1].kind if self.plans else None
        plan, events = self.scheduler.plan(self.now)
        assert events == []
        self.in_flight = plan
        if plan is not None:
            self.plans.append(plan)
            self._check_plan(plan)
            if not suspects:
                self._check_order(before, lefts, plan.kind)
                self._check_turn(before, lefts, plan.kind, last)
        return plan

    def _queue(self):
        """Return the waiting requests, sorted by priority after aging, arrival and submission."""
        waiting = [live for live in self.scheduler._requests.values() if live.parked_since is None]

        def key(live):
            request = live.request
            level = request.priority - floor(max(0.0, self.now - request.arrival) / 10.0)
            return (level, *live.rank)

        return sorted(waiting, key=key)

    def _check_plan(self, plan):
        lengths = [row.input.num_tokens for row in plan.rows]
        assert {row.input.kind for row in plan.rows} == {plan.kind}
        assert lengths == sorted(lengths)
        assert len(lengths) <= self.config.max_num_seqs
        padded = len(lengths) * lengths[-1]
        assert padded <= self.config.max_num_batched_tokens or len(lengths) == 1
        assert plan.num_tokens == padded

    def _check_order(self, before, lefts, kind):
        """Check that the plan follows the queue's order among the inputs of its kind, and each
        request's inputs their length.

        A request that could go on and got no row comes after every request that got one. The inputs
        that are taken of one request are its longest.
        """
        rows = {(id(live), index) for live, index in self.scheduler._step.rows}
        has_ended = False
        for live in before:
            left = lefts[id(live)].get(kind, [])
            taken = [index for index in left if (id(live), index) in rows]
            assert taken == left[: len(taken)], "not longest first"
            is_barred = self._is_barred(live)
            assert not (has_ended and taken), f"{live} overtook another"
            is_short = len(taken) < len(left)
            has_ended |= is_short and not is_barred and live.credit.free > 0

    def _is_barred(self, live):
        is_barred = live.is_late(self.now) or live.parked_since is not None
        return is_barred or self.scheduler._pause is not None  # WAIT holds back what has not begun

    def _check_turn(self, before, lefts, kind, last):
        """Check that a kind has two steps in turn only if no input of the other could go on."""
        if kind is not last:
            return
        rows = {id(live) for live, _ in self.scheduler._step.rows}
        for live in before:
            others = lefts[id(live)].keys() - {kind}
            could = not self._is_barred(live) and live.credit.free + (id(live) in rows) > 0
            assert not (others and could), f"{live} waits for a second step of the other kind"

    # ---- outputs

    def _take(self, events):
        for event in events:
            name = event.request_id
            assert name not in self.finished, f"{event} after the end"
            assert name not in self.refused or isinstance(event, Refused)
            match event:
                case Encoded():
                    assert event.index not in self.got[name], f"{event} came twice"
                    one = self.requests[name].inputs[event.index]
                    assert list(event.values) == vector_of(ids_of(one)), f"{name}: another's values"
                    assert event.tokens == one.num_tokens
                    self.got[name][event.index] = event
                    self.unread[name] += 1
                case Finished():
                    self.finished[name] = event
                    whole = len(self.got[name]) == len(self.requests[name].inputs)
                    assert whole == event.reason.is_success
                case Refused():
                    self.refused[name] = event
                case Admitted():
                    assert event.prompt_tokens == self.requests[name].num_tokens

    def check_counts(self):
        """Check that the statistics agree with what the readers know."""
        stats = self.scheduler.statistics()
        in_flight = 0 if self.in_flight is None else len(self.in_flight.rows)
        assert stats.running + stats.ending == in_flight
        left = sum(
            len(request.inputs) - len(self.got[name])
            for name, request in self.requests.items()
            if name not in self.finished and name not in self.refused
        )
        assert stats.running + stats.waiting + stats.parked == left
        assert stats.waiting <= stats.peak_waiting
        assert stats.step_count == len(self.plans)
        for name, credit in self.credits.items():
            assert credit.filled == self.unread[name]

    def check_idle(self):
        """Check that every request is gone, and every slot given back."""
        self.scheduler.check()
        self.check_counts()
        stats = self.scheduler.statistics()
        assert (stats.running, stats.waiting, stats.parked, stats.ending) == (0, 0, 0, 0)
        assert stats.queued_tokens == 0
        assert self.scheduler.is_idle
