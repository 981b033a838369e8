"""The scheduler against a plain model of it, on drawn schedules.

Every reader gets its own tokens, in order, and one end. The invariants hold after every event.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.config import SchedulerConfig
from engine.core.common.events import (
    ClientCame,
    ClientLeft,
    ObservePrefixes,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    StepDone,
    StepFailed,
)
from engine.core.common.steps import FailureKind, StepFailure
from engine.core.common.types import EndReason
from engine.core.text.prefix import extend_keys, root_key
from engine.core.text.prompt_images import contents_of_blocks
from engine.core.text.types import PromptImage, Sampling
from tests.simulator.drafters import drafter
from tests.support.core_driver import Driver, expected_tokens, make_request
from tests.support.examples import examples

PREFIXES = [tuple(range(1, 30)), tuple(range(100, 130)), ()]
# Images of a prompt: the tokens before each, and its span, its cost, its digest and whether it is
# whole. Some are the same at the same place, some differ in one of these alone.
IMAGES = st.lists(
    st.tuples(
        st.integers(0, 8),
        st.sampled_from([1, 3, 9]),
        st.sampled_from([0, 5, 50]),
        st.sampled_from([b"a", b"b"]),
        st.booleans(),
    ),
    max_size=3,
)
NAMESPACE = SchedulerConfig(num_blocks=1, max_model_len=2).cache_namespace


class Observer:
    """A plain mirror of a prefix cache, from what the core says."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.root = root_key(NAMESPACE, "")
        self.keys = set()

    def stored(self, key, parent, tokens):
        expected = []
        extend_keys(expected, self.root if parent is None else parent, tokens, self.block_size)
        assert expected == [key]  # a parent and tokens determine the key
        assert key not in self.keys
        self.keys.add(key)

    def removed(self, key):
        self.keys.discard(key)

    def cleared(self):
        self.keys.clear()


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, readers, cancels, pauses and failures over a small, crowded pool."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 16]),
        extra=st.integers(0, 20),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 40),
        prefix_cache=st.booleans(),
        prepared_plans=st.booleans(),
        buffer=st.sampled_from([1, 2, 5, 1000]),
        ends_every=st.sampled_from([None, 4, 11]),
        acceptance=st.sampled_from([None, 0.0, 0.7, 1.0]),
        spare_states=st.none() | st.integers(0, 4),
    )
    def start(
        self,
        block_size,
        extra,
        max_num_seqs,
        budget,
        prefix_cache,
        prepared_plans,
        buffer,
        ends_every,
        acceptance,
        spare_states,
    ):
        max_model_len = 96
        self.buffer, self.budget = buffer, budget
        self.driver = Driver(
            block_size=block_size,
            max_model_len=max_model_len,
            num_blocks=-(-max_model_len // block_size) + extra,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + budget,
            max_queued_requests=8,
            prefix_cache=prefix_cache,
            prepared_plans=prepared_plans,
            num_states=0 if spare_states is None else max_num_seqs + spare_states,
        )
        self.observer = Observer(block_size)
        self.driver.apply(ObservePrefixes(self.observer))
        if ends_every is not None:
            self.driver.runner.script.eos_at = lambda digest: digest % ends_every == 0
        if acceptance is not None:
            self.driver.runner.script.draft = drafter(acceptance)
        self.count = 0

    @rule(
        prefix=st.sampled_from(PREFIXES),
        own=st.lists(st.integers(200, 230), min_size=1, max_size=30),
        max_tokens=st.integers(1, 20),
        n=st.integers(1, 4),
        priority=st.integers(-1, 1),
        seed=st.sampled_from([None, 1]),
        bypass=st.booleans(),
        salt=st.sampled_from(["", "a", "b"]),
        timeout=st.sampled_from([None, None, 0.0, 0.02, 10.0]),
        scored=st.sampled_from([None, None, 0]),
        drawn=st.sampled_from([(), [(2, 9, 5, b"a", True)], [(2, 9, 5, b"b", True)]]) | IMAGES,
        heard=st.sampled_from([(), (), ()]) | st.lists(st.integers(-2, 20), min_size=4, max_size=4),
    )
    def submit(
        self,
        prefix,
        own,
        max_tokens,
        n,
        priority,
        seed,
        bypass,
        salt,
        timeout,
        scored,
        drawn,
        heard,
    ):
        self.count += 1
        prompt, most = prefix + tuple(own), min(max_tokens, 96 - len(prefix) - len(own))
        images = self.images_of(prompt, drawn)
        shown = {at for image in images for at in range(image.start, image.end)}
        prompt = tuple([99 if at in shown else token for at, token in enumerate(prompt)])
        if any(image.is_whole for image in images):
            scored = None  # refused before
        outputs = self.outputs_of(prompt, most, seed, heard[:n], images)
        request = make_request(
            f"r{self.count}",
            prompt,
            max_tokens=most,
            arrival=self.driver.now,
            n=n,
            priority=priority,
            sampling=Sampling(
                temperature=0.0, seed=seed, prompt_logprobs=None if outputs else scored
            ),
            bypass_prefix_cache=bypass,
            cache_salt=salt,
            deadline=None if timeout is None else self.driver.now + timeout,
            outputs=outputs,
            images=images,
        )
        self.driver.submit(request, buffer=self.buffer)

    def images_of(self, prompt, drawn):
        """Return the drawn images that lie within the prompt. One that is whole fits a step, or its
        model would not have loaded."""
        found, start = [], 0
        for before, count, cost, digest, is_whole in drawn:
            start += before
            end = start + (min(count, self.budget) if is_whole else count)
            if end > len(prompt):
                break
            digest += bytes([end - start])  # images of one digest have as many tokens
            found.append(PromptImage(start, end - start, cost, digest, is_whole))
            start = end
        return tuple(found)

    def outputs_of(self, prompt, most, seed, heard, images):
        """Return what a client has of each choice whose stream was cut after ``heard`` tokens; None
        for -1, whose end it has. A token that ends the choice may be among them."""
        outputs = [
            None
            if count == -1
            else tuple(
                expected_tokens(
                    prompt,
                    count=min(max(count, 0), most),
                    seed=seed,
                    choice=choice,
                    eos_at=self.driver.runner.script.eos_at,
                    images=images,
                )
            )
            for choice, count in enumerate(heard)
        ]
        return tuple(outputs) if any(outputs) else ()

    @rule(data=st.data(), reason=st.sampled_from([EndReason.CANCELLED, EndReason.DEADLINE]))
    def cancel(self, data, reason):
        if self.driver.requests:
            self.driver.cancel(data.draw(st.sampled_from(sorted(self.driver.requests))), reason)

    @rule()
    def end_late_requests(self):
        """End late requests, as their own scopes do at some time after their deadlines."""
        for name, request in self.driver.requests.items():
            if request.deadline is not None and request.deadline <= self.driver.now:
                self.driver.cancel(name, EndReason.DEADLINE)

    @rule(data=st.data(), count=st.integers(1, 4))
    def read(self, data, count):
        if self.driver.requests:
            name = data.draw(st.sampled_from(sorted(self.driver.requests)))
            self.driver.read(name, count)

    @rule(data=st.data(), event=st.sampled_from([ClientLeft, ClientLeft, ClientCame]))
    def lose_or_find_a_client(self, data, event):
        if self.driver.requests:
            self.driver.apply(event(data.draw(st.sampled_from(sorted(self.driver.requests)))))

    @precondition(lambda self: self.driver.in_flight is None)
    @rule()
    def begin_step(self):
        self.driver.begin_step()

    @precondition(lambda self: self.driver.in_flight is not None)
    @rule()
    def end_step(self):
        self.driver.now += 0.01
        event = self.driver.end_step()
        assert isinstance(event, StepDone), event

    @rule(steps=st.integers(1, 12))
    def run_some_steps(self, steps):
        if self.driver.in_flight is not None:
            self.driver.end_step()
        for _ in range(steps):
            if not self.driver.step():
                break

    @precondition(lambda self: self.driver.in_flight is not None)
    @rule(kind=st.sampled_from(FailureKind))
    def fail_step(self, kind):
        # Of a failed step, only the released and the admitted take effect.
        driver, plan = self.driver, self.driver.in_flight
        driver.runner.script.plan_fault = lambda plan: KeyboardInterrupt()
        try:
            driver.runner.execute(plan)
        except KeyboardInterrupt:
            driver.runner.script.plan_fault = None
        driver.in_flight = None
        driver.apply(StepFailed(StepFailure(plan.plan_id, kind, "drawn")))

    @precondition(lambda self: self.driver.in_flight is not None)
    @rule(index=st.integers(0, 3))
    def fail_a_row(self, index):
        # One row of the step fails, of parents and forked choices alike. A simulation found this
        # case.
        left = iter(range(1000))
        script = self.driver.runner.script
        script.sample_fault = lambda: "sample" if next(left) == index else None
        self.driver.end_step()
        script.sample_fault = None

    @rule(seconds=st.sampled_from([0.1, 5.0, 31.0]))
    def wait(self, seconds):
        self.driver.tick(seconds)

    @rule(mode=st.sampled_from(PauseMode))
    def pause(self, mode):
        self.driver.apply(Pause(mode))

    @rule()
    def resume(self):
        self.driver.apply(Resume())

    @rule()
    def reset_prefix_cache(self):
        self.driver.apply(ResetPrefixCache())

    @invariant()
    def invariants_hold(self):
        if hasattr(self, "driver"):
            self.driver.scheduler.check()
            self.driver.check_tokens()

    @invariant()
    def an_observer_knows_every_cached_block_but_those_of_salts_and_images(self):
        if not hasattr(self, "driver"):
            return
        cached = set(self.driver.scheduler._ledger.cache._block_of)
        assert self.observer.keys <= cached
        if unknown := cached - self.observer.keys:
            salted = self.keys_of(lambda request: request.cache_salt)
            assert not self.observer.keys & salted
            assert unknown <= salted | self.keys_of(lambda request: request.images)

    def keys_of(self, is_own):
        """Return the keys of every block that some requests may have computed."""
        found = set()
        for name, request in self.driver.requests.items():
            if is_own(request):
                size = self.observer.block_size
                contents = contents_of_blocks(request.images, size)
                for choice in range(request.n):
                    heard = (request.outputs[choice] if request.outputs else ()) or ()
                    new = self.driver.tokens.get((name, choice), ())
                    tokens = [*request.prompt, *heard, *new]
                    keys, root = [], root_key(NAMESPACE, request.cache_salt)
                    extend_keys(keys, root, tokens, size, contents)
                    found.update(keys)
        return found

    @invariant()
    def different_salts_share_no_block_and_bypassing_requests_share_none(self):
        if not hasattr(self, "driver"):
            return
        ledger, tenants = self.driver.scheduler._ledger, {}
        for live in ledger.requests.values():
            request = live.request
            tenant = (request.cache_salt, request.request_id if request.bypass_prefix_cache else "")
            for block in {block for seq in live.sequences for block in seq.blocks}:
                assert tenants.setdefault(block, tenant) == tenant
                if request.bypass_prefix_cache:
                    assert block not in ledger.cache._key_of

    @invariant()
    def everything_live_is_explained_and_explaining_changes_nothing(self):
        if not hasattr(self, "driver"):
            return
        scheduler, now = self.driver.scheduler, self.driver.now
        ledger, before = scheduler._ledger, scheduler.statistics()
        size, places = scheduler.config.block_size, []
        for name, live in ledger.requests.items():
            said = scheduler.explain(name, now)
            states = {seq.state.name for seq in live.sequences}
            assert said.state in states
            assert said.computed_tokens <= size * said.blocks
            if said.state in ("WAITING", "PARKED", "ENDING"):
                assert said.waiting_for
            else:
                assert said.position == 0
            forks = not live.request.outputs  # else the parent need not be furthest behind
            if forks and live.parent in ledger.waiting.sequences and said.state == "WAITING":
                places.append((live.parent.waiting_key, said.position))
        assert [place for _, place in sorted(places)] == sorted(place for _, place in places)
        assert len(set(places)) == len(places)
        assert scheduler.explain("nobody", now) is None
        assert scheduler.statistics() == before
        scheduler.check()

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        if driver.in_flight is not None:
            driver.end_step()
        driver.apply(Resume())
        self.end_late_requests()
        for name, request in driver.requests.items():
            driver.apply(ClientCame(name))
            driver.read(name)
            if request.deadline is not None:  # the deadline may pass while the others run on
                driver.cancel(name, EndReason.DEADLINE)
        driver.run()
        driver.check_tokens()
        driver.check_idle()
        for name, request in driver.requests.items():
            ends = [key for key in driver.finished if key[0] == name]
            assert len(ends) == (0 if name in driver.refused else request.num_choices), name


# R80, R82, R85, R151, R191, R192, R195, R197
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=examples(400), stateful_step_count=40, deadline=None)
