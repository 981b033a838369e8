"""What a turn of a replica's loop does, and in which order, in virtual time."""

from collections import Counter

import pytest
import trio

from engine.core.common.events import PauseMode, StepDone
from engine.core.common.types import EndReason
from engine.core.text.scheduler import Scheduler
from engine.replica.loop import EVENTS_TO_SEND_FIRST, EngineLoop, Unbatched
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.fakes.text import FakeScript
from tests.simulator.determinism import VirtualThreads, run_deterministically
from tests.support.virtual_engine import fake_engine

STEP_S = 1.0


class CountedThreads(VirtualThreads):
    """Threads that count how many jobs were started in them."""

    num_started = 0

    def start(self, job, *, reports_begin):
        self.num_started += 1
        return super().start(job, reports_begin=reports_begin)


def request(name, max_tokens=20):
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(token_ids=(5, 6), request_id=name, sampling=sampling)


def inputs_and_plans(journal):
    """Return a journal's inputs, by verb and request, and its plans, by their numbers of rows."""
    found = []
    for line in journal:
        verb, *words = line.replace("\x1f", " ").split()
        if verb == "plan":
            found.append(f"plan of {len(words) - 1}")
        elif not line.startswith(" "):
            found.append(f"{verb} {words[0]}" if verb in ("submit", "cancel") else verb)
    return found


@pytest.mark.parametrize("prepared_plans", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_steps_result_comes_before_the_commands_that_came_during_it_and_these_in_order(
    seed, prepared_plans
):
    """Here the next plan is made anew even if one was prepared (D9), because the
    only row of the prepared one is gone."""
    journal = []

    async def main():
        async with fake_engine(
            FakeScript(step_s=STEP_S),
            on_event=lambda event: journal.append(event.journal_line()),
            prepared_plans=prepared_plans,
        ) as engine:
            first = engine.submit(request("a"), buffer=99)
            await trio.sleep(0.2 * STEP_S)
            engine.submit(request("b"), buffer=99)
            await trio.sleep(0.2 * STEP_S)
            first.cancel(EndReason.CANCELLED)
            await trio.sleep(0.2 * STEP_S)
            engine.submit(request("c"), buffer=99)
            await trio.sleep(2.5 * STEP_S)
            cut = inputs_and_plans(journal)
            await engine.drain(0.0)
        return cut

    found = run_deterministically(main, seed)
    assert found[:6] == ["submit a", "plan of 1", "done", "submit b", "cancel a", "submit c"]
    assert found[6:] == ["plan of 2", "done", "plan of 2", "done", "plan of 2"]


def test_a_step_is_one_job_in_a_thread():
    threads = CountedThreads()

    async def main():
        async with fake_engine(FakeScript(step_s=STEP_S), threads=threads) as engine:
            for name in "abc":
                await engine.submit(request(name, 7), buffer=99).wait_closed()
            await engine.wait_idle()

    run_deterministically(main, 0)
    assert threads.num_started == 21


def turns_of_loops(monkeypatch):
    """Return a list that gets the instant of each turn of an engine's loop."""
    turns, turn = [], EngineLoop._turn

    async def counted(loop, began):
        turns.append(trio.current_time())
        return await turn(loop, began)

    monkeypatch.setattr(EngineLoop, "_turn", counted)
    return turns


def test_a_paused_engine_takes_no_turn_and_starts_no_step(monkeypatch):
    """The engine is paused in the middle of a request's tokens."""
    turns = turns_of_loops(monkeypatch)
    threads = CountedThreads()

    async def main():
        async with fake_engine(FakeScript(step_s=STEP_S), threads=threads) as engine:
            asked = engine.submit(request("a"), buffer=99)
            await trio.sleep(2.5 * STEP_S)
            engine.pause(PauseMode.KEEP)
            await trio.sleep(STEP_S)
            before = len(turns), threads.num_started
            await trio.sleep(1000)
            assert (len(turns), threads.num_started) == before
            engine.resume()
            await asked.wait_closed()
            assert asked.error is None
            assert threads.num_started == 20

    run_deterministically(main, 0)


TOOK_S = {"commands": 0.001, "plan": 0.002, "prepare": 0.004, "deliver": 0.008, "commit": 0.016}


@pytest.mark.parametrize("num_requests", [1, EVENTS_TO_SEND_FIRST + 1])
def test_each_phase_of_a_turn_is_timed(monkeypatch, num_requests):
    """The clock advances by another amount in each phase."""
    num_times = Counter()

    def spend(phase):
        num_times[phase] += 1
        trio.lowlevel.current_clock().jump(TOOK_S[phase])

    def slow_down(name, phase_of):
        stock = getattr(Scheduler, name)

        def slow(scheduler, *args):
            spend(phase_of(*args))
            return stock(scheduler, *args)

        monkeypatch.setattr(Scheduler, name, slow)

    class SlowWrites(Unbatched):
        def release(self):
            spend("deliver")

    slow_down("apply", lambda event, now: "commit" if isinstance(event, StepDone) else "commands")
    slow_down("plan", lambda now: "plan")
    slow_down("prepare", lambda now: "prepare")

    async def main():
        async with fake_engine(FakeScript(step_s=STEP_S), batch=SlowWrites()) as engine:
            for number in range(num_requests):
                engine.submit(request(f"r{number}", 7), buffer=99)
            await engine.wait_idle()
            [replica] = engine.telemetry().replicas
            num_steps = engine.statistics().totals.step_count
            took = {phase: num * TOOK_S[phase] for phase, num in num_times.items()}
            return replica.telemetry.loop_s, took, num_steps

    spent, took, num_steps = run_deterministically(main, 0)
    assert took.keys() == TOOK_S.keys()
    assert num_times["commit"] == num_steps >= 7
    assert spent == pytest.approx(took)
