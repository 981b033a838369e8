"""A Triolet server of fake models, as a process: ``python -m tests.support.fake_server JSON``.

It prints one line of JSON with its port once it is bound. Every line on standard input is a
question, answered with one line of JSON: about its idleness, or, asked "tasks", about what lives in
it (which wakes both its loops). The input's end, which is the end of the test that started it,
kills it. What JSON may say: `start` below.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import selectors
import signal
import sys
import threading

import trio

from engine import logs
from engine.config import EngineConfig, ModelConfig
from engine.model.fake import FakeRunner, FakeScript
from grpc_service import asyncio_side
from grpc_service.config import ServerConfig
from grpc_service.server import serve, serve_forever

POISONED_STEP = 901  # a prompt that begins with it makes every step with one of its rows raise
POISONED_ROW = 902  # a prompt that begins with it fails alone, after its second token


class Poison:
    """Makes the steps of poisoned prompts fail, whatever else is in them."""

    def __init__(self, script):
        self._script = script
        self._poisoned = set()

    def __call__(self, plan):
        for admitted in plan.admitted:
            if admitted.prompt[0] == POISONED_STEP:
                self._poisoned.add(admitted.sequence)
            elif admitted.prompt[0] == POISONED_ROW:
                self._script.row_faults[admitted.sequence] = (2, "decode")
        if any(row.sequence in self._poisoned for row in plan.rows):
            return RuntimeError("a scripted secret")
        return None


def make_script(load_error=None, eos_every=None, out_of_memory_steps=(), **fields):
    """A FakeScript; ``eos_every`` k ends a sequence after one digest in k."""
    faults = {step: MemoryError("scripted") for step in out_of_memory_steps}
    script = FakeScript(step_faults=faults, **fields)
    script.plan_fault = Poison(script)
    if load_error is not None:
        script.load_error = RuntimeError(load_error)
    if eos_every is not None:
        script.eos_at = lambda digest: digest % eos_every == 0
    return script


class Counter(trio.abc.Instrument):
    """How often Trio ran a task, and how often asyncio's loop woke up."""

    def __init__(self):
        self.task_steps = 0
        self.loop_turns = 0
        self.token = None
        self.loop = None

    def before_task_step(self, task):
        self.task_steps += 1

    def new_event_loop(self, counts):
        """The asyncio thread's loop: the one that is used in earnest, or one that counts."""
        self.loop = self._counting_loop() if counts else asyncio_side.new_event_loop()
        return self.loop

    def _counting_loop(self):
        """asyncio's own loop over a selector that counts: a turn of the loop asks it once."""
        counter = self

        class CountingSelector(selectors.DefaultSelector):
            def select(self, timeout=None):
                ready = super().select(timeout)
                counter.loop_turns += 1
                return ready

        return asyncio.SelectorEventLoop(CountingSelector())

    def answer(self, question):
        if question == "tasks":
            return self.living()
        return {
            "task_steps": self.task_steps,
            "loop_turns": self.loop_turns,
            "switches": {thread.name: switches(thread) for thread in threading.enumerate()},
        }

    def living(self):
        """Tasks of both worlds and Python's threads; asked on the threads they belong to."""
        asyncio_tasks = concurrent.futures.Future()
        self.loop.call_soon_threadsafe(
            lambda: asyncio_tasks.set_result(len(asyncio.all_tasks(self.loop)))
        )
        statistics = trio.from_thread.run_sync(
            trio.lowlevel.current_statistics, trio_token=self.token
        )
        return {
            "trio_tasks": statistics.tasks_living,
            "asyncio_tasks": asyncio_tasks.result(10),
            "threads": threading.active_count(),
        }


def switches(thread):
    """How often a thread has given its core away because it waited."""
    with open(f"/proc/self/task/{thread.native_id}/status") as status:
        [line] = [line for line in status if line.startswith("voluntary_ctxt_switches")]
    return int(line.split()[1])


def answer_questions(counter):
    for line in sys.stdin:
        print(json.dumps(counter.answer(line.strip())), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def start(
    *,
    models=({"name": "fake"},),
    script=None,
    runner=None,
    engine=None,
    server=None,
    counts=False,
    is_command=False,
):
    """Serve and return the exit code.

    ``models``: ModelConfig's fields, and a model's own ``script``. ``script``, ``runner``,
    ``engine``, ``server``: fields of make_script, FakeRunner, EngineConfig and ServerConfig.
    ``counts``: count what happens, on asyncio's own loop. ``is_command``: as `triolet serve` does.
    """
    scripts = {model["name"]: (script or {}) | model.pop("script", {}) for model in models}
    engine_config = EngineConfig(
        models=tuple(ModelConfig(**{"model": "fake", **model}) for model in models),
        **{"check_level": 2} | (engine or {}),
    )
    server_config = ServerConfig(**{"port": 0} | (server or {}))

    def make_runner(model, config):
        return FakeRunner(
            script=make_script(**scripts[model.name]),
            **{"block_size": config.block_size} | (runner or {}),
        )

    counter = Counter()
    threading.Thread(target=answer_questions, args=(counter,), daemon=True, name="stdin").start()
    if is_command:
        return serve_forever(engine_config, server_config, make_runner=make_runner)
    logs.configure("INFO")

    async def main():
        codes = []
        counter.token = trio.lowlevel.current_trio_token()

        async def run(task_status):
            codes.append(
                await serve(
                    engine_config,
                    server_config,
                    make_runner=make_runner,
                    task_status=task_status,
                    new_event_loop=lambda: counter.new_event_loop(counts),
                )
            )

        async with trio.open_nursery() as nursery:
            bound = await nursery.start(run)
            print(json.dumps({"port": bound.port}), flush=True)
        return codes[0]

    return trio.run(main, instruments=[counter] if counts else [])


if __name__ == "__main__":
    sys.exit(start(**json.loads(sys.argv[1])))
