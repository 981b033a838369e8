"""Events before the first token, in virtual time: what they say, when they come, and what they do
not hold up.
"""

from functools import partial

import pytest
import trio

from engine.core.common.events import Finished, PauseMode
from engine.core.common.prompts import PromptProgress
from engine.core.text.types import Constraint, Tokens
from engine.requests.progress import INTERVAL_S, UNCHANGED_S
from engine.requests.quota import NOWHERE, Origin, Quota
from engine.requests.readers import Leaving
from engine.requests.text.kept_events import ReceivedChoice
from engine.requests.text.values import GenerateRequest, SamplingParams, Started
from engine.worker.fakes.text import FakeRunner, FakeScript
from engine.worker.interface import LoadProgress
from tests.simulator.determinism import run_deterministically
from tests.support.bodies import run_by
from tests.support.virtual_engine import fake_engine, read_all

TOKEN_S = 0.01
PROMPT = 1000  # tokens, which take 10 s
STEP = 100
STEP_S = STEP * TOKEN_S


class LoadingRunner(FakeRunner):
    """A model that tells of its load in parts, as a real one does."""

    def load(self, progress):
        """Load, and report the bytes."""
        info = super().load(lambda stage: None)
        for done in range(20):
            progress(LoadProgress("weights", 100 * done, 2000))
        return info


def run(body, *, script=None, num_blocks=512, max_model_len=2048, make=FakeRunner, **config):
    """Run ``body(engine)`` in a fresh engine whose tokens take `TOKEN_S` each."""
    script = script or FakeScript(token_s=TOKEN_S)
    settings = {
        **{"stall_timeout_s": 1e6, "inter_token_target_s": 0.0, "step_time_target_s": 0.0},
        **{"max_num_batched_tokens": STEP, "max_num_seqs": 8},
    }
    made = partial(make, num_blocks=num_blocks, max_model_len=max_model_len)

    async def main():
        async with fake_engine(script, made, **settings | config) as engine:
            await body(engine)
            engine.resume()
            for _, name in list(engine._supervisor._live):
                engine.abort(name)

    run_deterministically(main, 0)


in_engine = partial(run_by, run)


def ask(engine, name="a", *, prompt=PROMPT, max_tokens=3, progress=True, first=1, **fields):
    buffer, origin = fields.pop("buffer", 64), fields.pop("origin", NOWHERE)
    request = GenerateRequest(
        token_ids=[first + index % 7 for index in range(prompt)],
        request_id=name,
        sampling=SamplingParams(max_tokens=max_tokens),
        output={"progress": progress},
        **fields,
    )
    return engine.submit(request, buffer=buffer, origin=origin)


async def listen(stream):
    """Return the events of a stream, each with its time."""
    heard = []
    while True:
        try:
            event = await stream.receive()
        except trio.EndOfChannel:
            return heard
        heard.append((trio.current_time(), event))


def told(heard):
    """Return the progress among events with their times."""
    return [(at, one) for at, one in heard if isinstance(one, PromptProgress)]


def first_token_at(heard):
    """Return when the first token came."""
    return next(at for at, one in heard if isinstance(one, Tokens))


@in_engine()
async def test_a_long_prompt_is_told_step_by_step_with_a_right_estimate(engine):
    heard = await listen(ask(engine))
    events, first = told(heard), first_token_at(heard)
    assert isinstance(heard[0][1], Started)
    assert 10 <= len(events) <= first / INTERVAL_S
    assert {one.prompt_tokens for _, one in events} == {PROMPT}
    counts = [one.computed_tokens for _, one in events]
    assert counts == sorted(counts)
    assert set(counts) == set(range(0, PROMPT, STEP))
    assert {one.phase for _, one in events} == {"prefill"}
    assert all(at < first for at, _ in events)
    for at, one in events:
        if one.computed_tokens >= 2 * STEP:
            assert one.first_token_s == pytest.approx(first - at, rel=0.2, abs=0.2)
        assert one.prefill_s == pytest.approx(at - heard[0][0], abs=0.01)


@in_engine()
async def test_a_request_that_does_not_ask_hears_nothing_and_has_no_task(engine):
    heard = await listen(ask(engine, progress=None))
    assert not told(heard)
    stream = ask(engine, progress=False)
    await trio.sleep(2.0)
    assert all(
        not serving.reports._num_watched for serving in engine._supervisor._servings.values()
    )
    stream.close_reader()


@in_engine()
async def test_a_short_prompt_has_no_progress(engine):
    heard = await listen(ask(engine, prompt=5))
    assert not told(heard)


@in_engine(max_num_seqs=1)
async def test_the_place_in_the_queue_is_told_and_silence_lasts_a_second(engine):
    ask(engine, "first", max_tokens=1500, prompt=10, buffer=4096)
    await trio.sleep(1.0)
    streams = [ask(engine, name, prompt=20, priority=n) for n, name in enumerate(("b", "c"))]
    await trio.sleep(UNCHANGED_S + 2 * INTERVAL_S)
    told_now = []
    for stream in streams:
        assert isinstance(await stream.receive(), Started)
        told_now.append(await stream.receive())
    assert [one.position for one in told_now] == [1, 2]
    assert {one.phase for one in told_now} == {"queued"}
    assert all(one.first_token_s is None for one in told_now), "none has ended yet"
    asked = trio.current_time()
    assert (await streams[1].receive()).position == 2
    assert trio.current_time() - asked <= UNCHANGED_S + INTERVAL_S
    engine.abort("first")
    heard = [event for _, event in told(await listen(streams[0]))]
    assert all(one.position == 0 or one.position == 1 for one in heard)


@in_engine()
async def test_prompts_before_it_count_in_the_estimate(engine):
    ask(engine, "before", prompt=600)
    await trio.sleep(2.84)
    heard = await listen(ask(engine, prompt=400, first=3))
    first = first_token_at(heard)
    at, one = next((at, one) for at, one in told(heard) if one.first_token_s is not None)
    assert one.computed_tokens == 0
    assert one.first_token_s == pytest.approx(first - at, rel=0.2)


@pytest.mark.parametrize("own", [400, 800])
def test_the_prompts_of_another_holder_count_as_far_as_they_take_turns(own):
    async def body(engine):
        streams = [
            ask(engine, name, prompt=prompt, first=first, origin=Origin(quota=Quota(name)))
            for name, prompt, first in (("one", own, 1), ("two", 800, 3))
        ]
        heard = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen, streams[1])
            heard = await listen(streams[0])
        first = first_token_at(heard)
        for at, one in told(heard):
            if one.computed_tokens >= STEP and one.first_token_s is not None:
                assert one.first_token_s == pytest.approx(first - at, rel=0.25, abs=2 * STEP_S)

    run(body)


@in_engine()
async def test_a_reader_that_does_not_read_has_one_event_and_holds_nothing_up(engine):
    silent, other = ask(engine, max_tokens=5), ask(engine, "b", prompt=10)
    heard = await listen(other)
    assert isinstance(heard[-1][1], Finished)
    await trio.sleep(60.0)
    assert silent.is_closed, "it ended by itself"
    assert silent.error is None
    events = await read_all(silent)
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["Started", "PromptProgress", *["Tokens"] * 5, "Finished"]
    assert events[1].computed_tokens >= PROMPT - 2 * STEP, "the newest one"


@in_engine()
async def test_it_takes_no_message_slot(engine):
    stream = ask(engine, buffer=1, max_tokens=2)
    await trio.sleep(5.0)
    assert stream.credit.free == stream.credit.capacity == 1
    events = await read_all(stream)
    assert isinstance(events[-1], Finished)
    assert stream.credit.free == 1


def test_a_preempted_prompt_does_not_go_back():
    """An urgent request takes the blocks of the prompt, which is then computed again."""

    async def body(engine):
        urgent = partial(ask, engine, "urgent", prompt=300, first=2, priority=-9)
        async with trio.open_nursery() as nursery:
            stream = ask(engine, prompt=450)
            nursery.start_soon(call_at, 3.5, urgent)
            events = [one for _, one in told(await listen(stream))]
        assert engine.statistics().totals.preemptions
        counts = [one.computed_tokens for one in events]
        assert counts == sorted(counts)
        assert any(one.position == 1 and one.computed_tokens == 3 * STEP for one in events)

    run(body, num_blocks=33, max_model_len=512, prefix_cache=False)


async def call_at(at, job):
    await trio.sleep_until(at)
    job()


@in_engine()
async def test_a_cached_prefix_is_done_from_the_start(engine):
    await read_all(ask(engine, "before", prompt=800))
    events = [one for _, one in told(await listen(ask(engine)))]
    assert {one.cached_tokens for one in events} == {800}
    assert all(one.computed_tokens >= 800 for one in events)


@in_engine()
async def test_several_choices_share_the_progress_of_their_prompt(engine):
    events = [one for _, one in told(await listen(ask(engine, n=4)))]
    counts = [one.computed_tokens for one in events]
    assert counts == sorted(counts)
    assert max(counts) >= PROMPT - 2 * STEP
    assert max(one.position for one in events) == 0


def test_the_bytes_of_a_load_are_told_before_started():
    async def body(engine):
        heard = await listen(ask(engine, prompt=10))
        events = [one for _, one in told(heard)]
        assert [type(one) for _, one in heard[:4]] == [PromptProgress] * 3 + [Started]
        assert {(one.phase, one.loaded_bytes, one.total_bytes) for one in events} == {
            ("load", 1900, 2000)
        }
        assert {one.first_token_s for one in events} == {None}

    script = FakeScript(token_s=TOKEN_S, load_s=3.0)
    run(body, script=script, make=LoadingRunner, waits=False)


@pytest.mark.parametrize(
    "others",
    [
        [(0, 300), (300, 300)],
        [(0, 2000), (1000, 2000)],
        [(0, 9), (0, 1)],
        [(0, 5000), (3000, 5000)],
    ],
    ids=["a draft model", "again", "small ones", "a larger one"],
)
def test_loads_one_after_the_other_are_counted_together(others):
    """Red if the bytes of a second load take the place of the first one's."""
    stages = [(100, 2000), (1900, 2000), *others]

    async def load(engine):
        [entry] = engine.registry.entries.values()
        for stage in stages:
            entry.note_progress(LoadProgress("weights", *stage))
            await trio.sleep(1.0)

    async def body(engine):
        async with trio.open_nursery() as nursery:
            stream = ask(engine, prompt=10)
            nursery.start_soon(call_at, 0.1, partial(nursery.start_soon, load, engine))
            events = [one for _, one in told(await listen(stream))]
        counts = [(one.loaded_bytes, one.total_bytes) for one in events]
        assert counts[0] == stages[0]
        assert counts == sorted(counts)
        totals = [total for _, total in counts]
        assert totals == sorted(totals)
        done, total = counts[-1]
        assert 1900 + others[-1][0] == done <= total

    script = FakeScript(token_s=TOKEN_S, load_s=0.5 + len(stages))
    run(body, script=script, waits=False)


def test_a_request_is_heard_of_while_it_is_tokenised_and_its_form_is_compiled():
    async def body(engine):
        script.encode_s = 2.0
        form = Constraint("regex", "a")
        request = GenerateRequest(
            text="x" * 5000,
            constraint=form,
            output={"progress": True},
            prompt={"truncate_to": 50},
            sampling={"max_tokens": 2},
        )
        heard = told(await listen(engine.submit(request, buffer=8)))
        assert next(one.phase for _, one in heard) == "tokenize"
        assert "compile" in {one.phase for _, one in heard}

    script = FakeScript(compile=lambda constraint: script.sleep(2.0), token_s=TOKEN_S)
    run(body, script=script)


@in_engine()
async def test_a_pause_is_heard_and_has_no_estimate(engine):
    stream = ask(engine)
    await trio.sleep(3.0)
    engine.pause(PauseMode.KEEP)
    await trio.sleep(3.0)
    await stream.receive()
    one = await stream.receive()
    assert one.first_token_s is None
    stream.close_reader()


@pytest.mark.parametrize("after_s", [0.1, 0.6, 3.0])
@pytest.mark.parametrize("how", ["cancel", "deadline", "abort"])
def test_it_ends_with_its_request_in_every_phase(after_s, how):
    async def body(engine):
        ask(engine, "before", prompt=100)
        stream = ask(engine, first=4, timeout_s=after_s if how == "deadline" else None)
        reports = next(iter(engine._supervisor._servings.values())).reports
        if how != "deadline":
            await trio.sleep(after_s)
            stream.close_reader() if how == "cancel" else engine.abort("a")
        await stream.wait_closed()
        await trio.testing.wait_all_tasks_blocked()
        assert reports._num_watched <= 1, "only the other request's"

    run(body)


def test_an_attach_gets_what_comes_after_it():
    class Seen:
        """A reader that keeps what it gets."""

        def __init__(self):
            self.events = []

        def push(self, event):
            self.events.append(event)

        def end(self, error):
            pass

    async def body(engine):
        first, second = Seen(), Seen()
        request = GenerateRequest(
            token_ids=[1 + n % 7 for n in range(PROMPT)],
            output={"progress": True},
            resume_window_s=60.0,
            sampling={"max_tokens": 2},
        )
        stream = engine.submit(request, buffer=8, reader=first)
        await trio.sleep(3.0)
        stream.leave(first, trio.current_time(), Leaving(is_lost=True))
        await trio.sleep(2.0)
        stream.attach(second, (ReceivedChoice(),))
        assert [type(event).__name__ for event in second.events] == ["Started"]
        await trio.sleep(1.5)
        [_, place], [_, former] = second.events, first.events
        assert 0 < former.take().computed_tokens < place.take().computed_tokens

    run(body)
