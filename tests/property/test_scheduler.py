"""The scheduler of each kind of work against plain models of it, on drawn schedules.

Every reader gets its own results, in order, and one end; requests go on in their order and take
turns. The invariants hold after every event, and a watcher judges every plan
(`tests.support.step_driver`).
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.config import SchedulerConfig
from engine.core.common.events import Pause, PauseMode, Resume, StepDone
from engine.core.common.steps import FailureKind, RowFailure
from engine.core.common.types import EndReason
from engine.core.common.waiting_queue import BACKGROUND
from engine.core.text.memory.prefix import extend_keys, root_key
from engine.core.text.prompt_images import contents_of_blocks
from engine.core.text.types import (
    ClientCame,
    ClientLeft,
    ObservePrefixes,
    PromptImage,
    ResetPrefixCache,
    Sampling,
)
from tests.simulator.counting import CountDriver
from tests.simulator.drafters import drafter
from tests.support.core_driver import Driver, expected_tokens, make_request
from tests.support.encode_driver import EncodeDriver, Picture
from tests.support.examples import examples
from tests.support.image_generation_driver import SIZES, ImageGenerationDriver

BUFFERS = st.sampled_from([1, 2, 5, 1000])
QUEUES = st.sampled_from([2, 20])
PRIORITIES = st.integers(-1, 1)
BACKGROUNDS = st.sampled_from([0, 0, BACKGROUND])
CLASSED = st.builds(int.__add__, PRIORITIES, BACKGROUNDS)
WEIGHTS = st.just([1]) | st.lists(st.sampled_from([1, 1, 3]), min_size=2, max_size=8)
DELAYS = st.sampled_from([0.0, 0.015, 12.0])


class Machine(RuleBasedStateMachine):
    """Random readers, cancels, pauses and failures, for any kind of work.

    A subclass draws the driver, the ``buffer`` of readers and the requests, and adds rules.
    """

    driver = None
    count = 0

    def new_name(self):
        self.count += 1
        return f"r{self.count}"

    def deadline(self, timeout):
        return None if timeout is None else self.driver.now + timeout

    @rule(data=st.data(), reason=st.sampled_from([EndReason.CANCELLED, EndReason.DEADLINE]))
    def cancel(self, data, reason):
        if self.driver.requests:
            self.driver.cancel(data.draw(st.sampled_from(sorted(self.driver.requests))), reason)

    @rule()
    def end_late_requests(self):
        """End late requests, as their own scopes do at some time after their deadlines."""
        self.driver.end_late()

    @rule(data=st.data(), count=st.integers(1, 4))
    def read(self, data, count):
        if self.driver.requests:
            self.driver.read(data.draw(st.sampled_from(sorted(self.driver.requests))), count)

    @precondition(lambda self: self.driver.in_flight is None)
    @rule()
    def begin_step(self):
        self.driver.begin_step()

    @precondition(lambda self: self.driver.in_flight is not None)
    @rule(seconds=st.sampled_from([0.01, 0.001, 0.2]))
    def end_step(self, seconds):
        self.driver.now += seconds
        event = self.driver.end_step()
        assert isinstance(event, StepDone), event

    @rule(steps=st.integers(1, 12), reads=st.booleans())
    def run_some_steps(self, steps, reads):
        if self.driver.in_flight is not None:
            self.driver.end_step()
        for _ in range(steps):
            if not self.driver.step(read=reads):
                break

    @rule(kind=st.sampled_from(FailureKind), times=st.integers(1, 3))
    def fail_steps(self, kind, times):
        for _ in range(times):
            if (self.driver.in_flight or self.driver.begin_step()) is not None:
                self.driver.fail_step(kind)

    @rule(index=st.integers(0, 3))
    def fail_a_row(self, index):
        if (self.driver.in_flight or self.driver.begin_step()) is not None:
            rows, is_failed = self.driver.fail_row(index)
            assert any(isinstance(row, RowFailure) for row in rows) == is_failed

    @rule(seconds=st.sampled_from([0.1, 5.0, 31.0]))
    def wait(self, seconds):
        self.driver.tick(seconds)

    @rule(mode=st.sampled_from(PauseMode), stays=st.sampled_from([False, False, True]))
    def pause(self, mode, stays):
        self.driver.apply(Pause(mode))
        if not stays:
            if self.driver.in_flight is None:
                self.driver.step()
            self.driver.apply(Resume())

    @rule()
    def resume(self):
        self.driver.apply(Resume())

    @invariant()
    def invariants_hold(self):
        self.driver.scheduler.check()
        self.driver.check_counts()

    @invariant()
    def everything_live_is_explained_and_explaining_changes_nothing(self):
        driver, scheduler = self.driver, self.driver.scheduler
        before, places = scheduler.statistics(), []
        for name in driver.requests:
            said = scheduler.explain(name, driver.now)
            if said is None:
                assert scheduler.phase_of(name) is None
                continue
            driver.check_explained(name, said)
            assert said.waiting_for or said.state == "RUNNING"
            assert not (said.position and said.state == "RUNNING")
            places += [said.position] if said.position else []
        assert len(set(places)) == len(places)
        assert scheduler.explain("nobody", driver.now) is None
        assert scheduler.statistics() == before
        scheduler.check()

    def teardown(self):
        driver = self.driver
        if driver is None:
            return
        if driver.in_flight is not None:
            driver.end_step()
        driver.apply(Resume())
        driver.end_late()
        for name, request in driver.requests.items():
            driver.apply(ClientCame(name))
            driver.read(name)
            if request.deadline is not None:  # its deadline may pass while other requests run
                driver.cancel(name, EndReason.DEADLINE)
        driver.run()
        driver.check_idle()
        driver.check_ends()


def case_of(machine, num_examples, num_steps):
    """Return a machine's TestCase with these settings."""
    case = machine.TestCase
    case.settings = settings(
        max_examples=examples(num_examples), stateful_step_count=num_steps, deadline=None
    )
    return case


# ---- text --------------------------------------------------------------------------------------

PREFIXES = [tuple(range(1, 30)), tuple(range(100, 130)), ()]
# Images of a prompt: for each the tokens before it, its number of tokens, cost and digest, and
# whether it is never cut. Some are equal at the same place, some differ in one of these only.
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
    """A plain mirror of the prefix cache, from the core's reports of stored and removed blocks."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.root = root_key(NAMESPACE, "")
        self.keys = set()

    def stored(self, key, parent, tokens):
        expected = []
        extend_keys(expected, self.root if parent is None else parent, tokens, self.block_size)
        assert expected == [key]  # a key follows from the parent's key and the tokens
        assert key not in self.keys
        self.keys.add(key)

    def removed(self, key):
        self.keys.discard(key)

    def cleared(self):
        self.keys.clear()


class SchedulerMachine(Machine):
    """Random requests over a small, crowded pool."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 16]),
        extra=st.integers(0, 20),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 40),
        prefix_cache=st.booleans(),
        prepared_plans=st.booleans(),
        buffer=BUFFERS,
        ends_every=st.sampled_from([None, 4, 11]),
        acceptance=st.sampled_from([None, 0.0, 0.7, 1.0]),
        spare_states=st.none() | st.integers(0, 4),
        weights=WEIGHTS,
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
        weights,
    ):
        max_model_len = 96
        self.weights = weights
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

    @rule(
        prefix=st.sampled_from(PREFIXES),
        own=st.lists(st.integers(200, 230), min_size=1, max_size=30),
        max_tokens=st.integers(1, 20),
        n=st.integers(1, 4),
        priority=PRIORITIES,
        seed=st.sampled_from([None, 1]),
        bypass=st.booleans(),
        salt=st.sampled_from(["", "a", "b"]),
        timeout=st.sampled_from([None, None, 0.0, 0.02, 10.0]),
        scored=st.sampled_from([None, None, 0]),
        drawn=st.sampled_from([(), [(2, 9, 5, b"a", True)], [(2, 9, 5, b"b", True)]]) | IMAGES,
        heard=st.sampled_from([(), (), ()]) | st.lists(st.integers(-2, 20), min_size=4, max_size=4),
        holder=st.integers(0, 7),
        background=BACKGROUNDS,
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
        holder,
        background,
    ):
        holder %= len(self.weights)
        prompt, most = prefix + tuple(own), min(max_tokens, 96 - len(prefix) - len(own))
        images = self.images_of(prompt, drawn)
        shown = {at for image in images for at in range(image.start, image.end)}
        prompt = tuple([99 if at in shown else token for at, token in enumerate(prompt)])
        if any(image.is_whole for image in images):
            scored = None  # prompts with such images are refused if they are scored
        outputs = self.outputs_of(prompt, most, seed, heard[:n], images)
        request = make_request(
            self.new_name(),
            prompt,
            max_tokens=most,
            arrival=self.driver.now,
            n=n,
            priority=priority + background,
            sampling=Sampling(
                temperature=0.0, seed=seed, prompt_logprobs=None if outputs else scored
            ),
            bypass_prefix_cache=bypass,
            cache_salt=salt,
            deadline=self.deadline(timeout),
            outputs=outputs,
            images=images,
            holder=f"holder {holder}",
            weight=self.weights[holder],
        )
        self.driver.submit(request, buffer=self.buffer)

    def images_of(self, prompt, drawn):
        """Return the drawn images that lie within the prompt. An image that is never cut fits a
        step; otherwise its model would not have loaded."""
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
        """Return the tokens that a client has of each choice after its stream broke: ``heard``
        tokens, perhaps the choice's last one, or None for -1, if it has the choice's end."""
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

    @rule(data=st.data(), event=st.sampled_from([ClientLeft, ClientLeft, ClientCame]))
    def lose_or_find_a_client(self, data, event):
        if self.driver.requests:
            self.driver.apply(event(data.draw(st.sampled_from(sorted(self.driver.requests)))))

    @rule()
    def reset_prefix_cache(self):
        self.driver.apply(ResetPrefixCache())

    @invariant()
    def an_observer_knows_every_cached_block_but_those_of_salts_and_images(self):
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
        ledger, tenants = self.driver.scheduler._ledger, {}
        for live in ledger.requests.values():
            request = live.request
            tenant = (request.cache_salt, request.request_id if request.bypass_prefix_cache else "")
            for block in {block for seq in live.sequences for block in seq.blocks}:
                assert tenants.setdefault(block, tenant) == tenant
                if request.bypass_prefix_cache:
                    assert block not in ledger.cache._key_of

    @invariant()
    def places_follow_the_queues_order(self):
        ledger, places = self.driver.scheduler._ledger, []
        for name, live in ledger.requests.items():
            said = self.driver.scheduler.explain(name, self.driver.now)
            forks = not live.request.outputs  # `explain` may give the place of a resumed choice
            if forks and live.parent in ledger.waiting.items and said.state == "WAITING":
                places.append((live.parent.waiting_key, said.position))
        assert [place for _, place in sorted(places)] == sorted(place for _, place in places)
        assert len(set(places)) == len(places)


TestScheduler = case_of(SchedulerMachine, 400, 40)


# ---- kinds with one choice ---------------------------------------------------------------------


def machine_of(make_driver, limits, fields, timeouts, num_tokens):
    """Return a machine that draws a driver's ``limits`` and its requests' ``fields``. Its queue
    holds at most ``num_tokens`` tokens."""

    class OneChoiceMachine(Machine):
        @initialize(limits=st.fixed_dictionaries(limits), buffer=BUFFERS, queue=QUEUES)
        def start(self, limits, buffer, queue):
            self.buffer = buffer
            self.driver = make_driver(
                max_queued_requests=queue, max_queued_tokens=num_tokens, **limits
            )

        @rule(
            asked=st.lists(
                st.tuples(st.fixed_dictionaries(fields), timeouts, DELAYS), min_size=1, max_size=4
            )
        )
        def submit(self, asked):
            """Submit requests, each after the delay of its preparation, in which later requests may
            overtake it."""
            for own, timeout, delay in asked:
                self.driver.submit(
                    self.new_name(),
                    buffer=self.buffer,
                    arrival=self.driver.now - delay,
                    deadline=self.deadline(timeout),
                    **own,
                )

    return OneChoiceMachine


TestEncodeScheduler = case_of(
    machine_of(
        EncodeDriver,
        {"max_num_batched_tokens": st.integers(1, 60), "max_num_seqs": st.integers(1, 8)},
        {
            "lengths": st.lists(st.integers(1, 25) | st.just(Picture(4)), min_size=1, max_size=12),
            "priority": CLASSED,
            "holder": st.sampled_from(["", "", "a", "b", "c"]),
        },
        st.sampled_from([None, None, None, 0.0, 0.02, 10.0]),
        500,
    ),
    300,
    50,
)
TestImageScheduler = case_of(
    machine_of(
        ImageGenerationDriver,
        {"max_drawings": st.integers(1, 3)},
        {
            "width": st.sampled_from(SIZES),
            "height": st.sampled_from(SIZES),
            "n": st.integers(1, 3),
            "steps": st.integers(1, 5),
            "scheduler": st.sampled_from(["", "pndm"]),
            "guidance_scale": st.sampled_from([1.0, 7.5]),
            "preview_every": st.sampled_from([0, 0, 1, 2]),
            "priority": PRIORITIES,
        },
        st.sampled_from([None, None, None, 0.0, 0.05, 0.3, 10.0]),
        60,
    ),
    150,
    50,
)
TestCountCore = case_of(
    machine_of(
        CountDriver,
        {"max_seats": st.integers(1, 3)},
        {"start": st.integers(1, 9), "priority": PRIORITIES},
        st.sampled_from([None, None, None, 0.0, 0.05, 10.0]),
        60,
    ),
    150,
    50,
)
