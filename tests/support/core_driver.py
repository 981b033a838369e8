"""Drive a `Scheduler` with a `FakeRunner`, synchronously, and check what comes out.

The oracle is `expected_tokens`: what a sequence's tokens must be, from its prompt, seed and choice
alone. Whatever the schedule, a reader sees exactly these tokens, in order.
"""

from __future__ import annotations

from engine.config import SchedulerConfig
from engine.core.common.credit import Credit
from engine.core.common.events import (
    Admitted,
    Finished,
    Refused,
    Submit,
)
from engine.core.common.types import EndReason, RequestId
from engine.core.text.scheduler import Scheduler
from engine.core.text.types import Request, Sampling, Stops, Tokens
from engine.worker.fakes.digests import contents_of, digest_after, next_token
from engine.worker.fakes.text import FakeRunner, FakeScript
from engine.worker.fakes.tokenizer import EOS
from tests.simulator.guest_watch import GuestWatch
from tests.simulator.watch import gave_way_for_nobody
from tests.support.step_driver import StepDriver


def expected_tokens(prompt, *, count, seed=None, choice=0, eos_at=None, images=()):
    """Return the fake model's output for a prompt.

    It has ``count`` tokens, or fewer if ``eos_at(digest)`` ends the sequence before.
    """
    digest, contents = 0, contents_of(images)
    for position, token in enumerate(prompt):
        digest = digest_after(digest, token, contents.get(position, b""))
    tokens = []
    while len(tokens) < count and EOS not in tokens:
        ends = eos_at is not None and eos_at(digest)
        tokens.append(EOS if ends else next_token(digest, seed, choice))
        digest = digest_after(digest, tokens[-1])
    return tokens


def make_request(name, prompt, *, max_tokens=8, arrival=0.0, **fields):
    """Return a request that is greedy and stops at `EOS`, unless ``fields`` say otherwise."""
    sampling = fields.pop("sampling", Sampling(temperature=0.0))
    stops = Stops(max_tokens, token_ids=frozenset({EOS}))
    return Request(RequestId(name), tuple(prompt), sampling, stops, arrival, **fields)


class Driver(StepDriver):
    """Drives a `Scheduler` with a fake text model."""

    def __init__(self, *, runner=None, **config):
        self.config = SchedulerConfig(**{"num_blocks": 64, "max_model_len": 256, **config})
        runner = runner or FakeRunner(
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            max_model_len=self.config.max_model_len,
            script=FakeScript(),
            num_states=self.config.num_states,
        )
        super().__init__(Scheduler(self.config), runner)
        self.runner.load(lambda progress: None)
        self.guest_watch = GuestWatch()
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.log: list[object] = []

    # ---- inputs

    def submit(self, request, *, buffer=1000):
        """Apply Submit. The request's reader holds at most ``buffer`` messages."""
        credit = Credit(buffer)
        if request.request_id not in self.requests:
            self.requests[request.request_id] = request
            self.credits[request.request_id] = credit
            self.unread[request.request_id] = 0
        self.apply(Submit(request, credit))

    # ---- steps

    def begin_step(self):
        """Plan a step, check the plan, and return it; None if there is nothing to compute."""
        plan, events = self.scheduler.plan(self.now)
        self._take(events)
        self.in_flight = plan
        if plan is not None:
            self._check_starts(plan)
            assert plan.num_tokens <= self.config.max_num_batched_tokens
            assert not gave_way_for_nobody(plan, events)
            assert not self.guest_watch.planned(self.scheduler, plan, self.now)
            self.scheduler.prepare(self.now)  # as the loop does while the step runs
            self.scheduler.check()
        return plan

    def _check_starts(self, plan):
        """Check that no request is started after its deadline (D18)."""
        starts = {admitted.sequence for admitted in plan.admitted}
        for live in self.scheduler._ledger.requests.values():
            if live.parent.sequence_id in starts and live.request.deadline is not None:
                assert live.request.deadline > self.now, f"{live.request} is started too late"

    # ---- outputs

    def _take(self, events):
        for event in events:
            self.log.append(event)
            match event:
                case Tokens():
                    key = (event.request_id, event.choice)
                    assert key not in self.finished, f"{event} after its end"
                    self.tokens.setdefault(key, []).extend(event.token_ids)
                    self.unread[event.request_id] += 1
                case Finished():
                    key = (event.request_id, event.choice)
                    assert key not in self.finished, f"a second end: {event}"
                    self.finished[key] = event
                case Refused():
                    self.refused[event.request_id] = event
                case Admitted():
                    assert event.request_id not in self.refused

    def check_tokens(self):
        """Check that every token that came out is the right one, and that finished outputs are
        whole.
        """
        for (name, choice), got in self.tokens.items():
            request, had = self.requests[name], self.had(name, choice)
            want = expected_tokens(
                request.prompt,
                count=len(had) + len(got),
                seed=request.sampling.seed,
                choice=choice,
                eos_at=self.runner.script.eos_at,
                images=request.images,
            )
            assert had + got == want, f"{name}/{choice}"
        for (name, choice), end in self.finished.items():
            had = self.had(name, choice)
            got = had + self.tokens.get((name, choice), [])
            assert (end.usage.completion_tokens, end.usage.resumed_tokens) == (len(got), len(had))
            if end.reason is EndReason.LENGTH:
                assert len(got) == self.requests[name].stops.max_tokens
                assert got[-1] != EOS
            elif end.reason is EndReason.STOP:
                assert got[-1] == EOS

    def had(self, name, choice):
        """Return the tokens with which a choice came."""
        outputs = self.requests[name].outputs
        return list(outputs[choice]) if outputs else []

    def check_idle(self):
        """Check that every block and every request is gone."""
        self.scheduler.check()
        stats = self.scheduler.statistics()
        assert stats.free_blocks == stats.total_blocks
        assert stats.free_states == stats.total_states
        assert (stats.running, stats.waiting, stats.parked, stats.ending) == (0, 0, 0, 0)
        assert self.scheduler.is_idle
