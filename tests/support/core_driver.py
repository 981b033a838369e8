"""Drive a `Scheduler` with a `FakeRunner`, synchronously, and check what comes out.

The oracle is `expected_tokens`: what a sequence's tokens must be, from its prompt, seed and choice
alone. Whatever the schedule, a reader sees exactly these tokens, in order.
"""

import math
from itertools import accumulate

from engine.config import SchedulerConfig
from engine.core.common.steps import RowFailure
from engine.core.common.types import EndReason, RequestId
from engine.core.text.scheduler import Scheduler
from engine.core.text.types import Request, Sampling, Stops, Tokens
from engine.worker.fakes.digests import contents_of, digest_after, next_token
from engine.worker.fakes.text import FakeRunner, FakeScript
from engine.worker.fakes.tokenizer import EOS
from tests.simulator.text_watch import TextWatch
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


NO_TARGETS = {"step_time_target_s": 0.0, "inter_token_target_s": 0.0}


def make_request(name, prompt, *, max_tokens=8, arrival=0.0, **fields):
    """Return a request that is greedy and stops at `EOS`, unless ``fields`` say otherwise."""
    sampling = fields.pop("sampling", Sampling(temperature=0.0))
    stops = Stops(max_tokens, token_ids=frozenset({EOS}))
    return Request(RequestId(name), tuple(prompt), sampling, stops, arrival, **fields)


class Driver(StepDriver):
    """Drives a `Scheduler` with a fake text model. Ends are kept by request and choice."""

    fault = "plan_fault"
    ticks_do_all = False  # a guest's stall timeout has no effect before the next plan

    def __init__(self, *, runner=None, **config):
        self.config = SchedulerConfig(
            **{"num_blocks": 64, "max_model_len": 256, **NO_TARGETS, **config}
        )
        runner = runner or FakeRunner(
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            max_model_len=self.config.max_model_len,
            script=FakeScript(),
            num_states=self.config.num_states,
        )
        scheduler = Scheduler(self.config)
        super().__init__(scheduler, runner, TextWatch(scheduler))
        self.runner.load(lambda progress: None)
        self.tokens: dict[tuple[str, int], list[int]] = {}

    def submit(self, request, *, buffer=1000):
        """Apply Submit. The request's reader holds at most ``buffer`` messages."""
        self.add(request, buffer)

    def begin_step(self):
        """Plan a step, and check that no request is started after its deadline (D18)."""
        plan = super().begin_step()
        starts = set() if plan is None else {admitted.sequence for admitted in plan.admitted}
        for live in self.scheduler._ledger.requests.values():
            if live.parent.sequence_id in starts and live.request.deadline is not None:
                assert live.request.deadline > self.now, f"{live.request} is started too late"
        return plan

    # ---- outputs

    def key(self, event):
        """Return the request and the choice of an event."""
        return getattr(event, "request_id", None), getattr(event, "choice", None)

    def take_result(self, event):
        """Keep tokens for `check_tokens`."""
        if isinstance(event, Tokens):
            self.tokens.setdefault(self.key(event), []).extend(event.token_ids)
            self.unread[event.request_id] += 1

    def is_behind_draft(self, rows, index):
        """Return whether the failed sample ``index`` is missing in a row with fewer tokens than
        were drafted."""
        if any(isinstance(row, RowFailure) for row in rows):
            return False
        ends = accumulate(len(row.tokens) for row in rows)
        return any(
            end == index and 0 < len(row.tokens) <= row.drafted
            for row, end in zip(rows, ends, strict=True)
        )

    def check_explained(self, name, said):
        """Check that the explained state is that of one of the request's choices."""
        live = self.scheduler._ledger.requests[name]
        assert said.state in {seq.state.name for seq in live.sequences}
        assert said.computed_tokens <= self.config.block_size * said.blocks
        has_token = any(seq.has_sampled for seq in live.sequences)
        assert (said.prompt is None) <= (has_token or live.is_over)
        if said.prompt is not None:
            state = said.prompt
            assert 0 <= state.cached <= len(live.request.prompt)
            assert 0 <= state.computed <= len(live.request.prompt)
            assert state.prefill_s >= 0
            assert state.first_token_s is None or 0 <= state.first_token_s < math.inf

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
        """Return the tokens that a choice had when it was submitted."""
        outputs = self.requests[name].outputs
        return list(outputs[choice]) if outputs else []

    def check_counts(self):
        """Check the statistics, and every token that came out."""
        super().check_counts()
        self.check_tokens()

    def check_idle(self):
        """Check also that every block and every state slot is free."""
        super().check_idle()
        stats = self.scheduler.statistics()
        assert stats.free_blocks == stats.total_blocks
        assert stats.free_states == stats.total_states

    def check_ends(self):
        """Check that each choice of a request that was not refused has one end."""
        for name, request in self.requests.items():
            ends = [key for key in self.finished if key[0] == name]
            assert len(ends) == (0 if name in self.refused else request.num_choices), name
