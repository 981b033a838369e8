"""A Triolet server of fake models, as a process: ``python -m tests.support.fake_server JSON``.

It prints one line of JSON with its port once it is bound. Every line on standard input is a
command (`Faults`), or "tasks", or empty, and is answered with one line of JSON: about what lives in
the server (which wakes its loop) or else about its idleness. The input's end, which is the
end of the test that started it, kills it. What JSON may say: `start` below.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from dataclasses import replace

import trio

from engine import logs
from engine.config import EngineConfig, ModelConfig, WorkerConfig
from engine.core.encode_types import EncoderKind
from engine.model.fake import FakeRunner, FakeScript
from engine.model.fake_encoder import FakeEncoder
from engine.status import Capability
from engine.supervisor import Supervisor
from grpc_service.bridge import BridgeCall
from grpc_service.config import ServerConfig
from grpc_service.connections import RpcServer
from grpc_service.server import serve, serve_forever

POISONED_STEP = 901  # a prompt that begins with it makes every step with one of its rows raise
POISONED_ROW = 902  # a prompt that begins with it fails alone, after its second token
HUNG_STEP = 903  # a step with one of its rows hangs until `release`
BROKEN_STEP = 904  # a step with one of its rows gives the result of another: a bug of ours
OUT_OF_MEMORY_STEP = 905  # every step with one of its rows runs out of memory
EXITING_STEP = 906  # a library in a step with one of its rows ends the process, or means to
RELEASED = threading.Event()
ENCODER_MAX_LEN = 6000  # tokens of an input; longer than a text that is tokenised in a thread
KINDS = {
    Capability.TEXT_EMBEDDING: EncoderKind.EMBEDDING,
    Capability.RERANK: EncoderKind.RERANK,
}


class Poison:
    """Makes the steps of poisoned prompts fail, whatever else is in them."""

    def __init__(self, script):
        self._script = script
        self._first = {}

    def __call__(self, plan):
        for admitted in plan.admitted:
            self._first[admitted.sequence] = admitted.prompt[0]
            if admitted.prompt[0] == POISONED_ROW:
                self._script.row_faults[admitted.sequence] = (2, "decode")
        return self.fault_of(plan)

    def fault_of(self, plan):
        if self.has(POISONED_STEP, plan):
            return RuntimeError("a scripted secret")
        if self.has(OUT_OF_MEMORY_STEP, plan):
            return MemoryError("a scripted secret")
        if self.has(EXITING_STEP, plan):
            return SystemExit("a scripted secret")
        if self.has(HUNG_STEP, plan):
            RELEASED.wait()
        return None

    def has(self, first, plan):
        """Is there a row of a prompt that began so?"""
        return any(self._first.get(row.sequence) == first for row in plan.rows)


class EncodePoison(Poison):
    """The same for inputs that begin so, in the steps of an encoder."""

    def __call__(self, plan):
        for row in plan.rows:
            self._first[row.sequence] = row.input.token_ids[0]
            if row.input.token_ids[0] == POISONED_ROW:
                self._script.row_faults[row.sequence] = (0, "encode")
        return self.fault_of(plan)


class FaultyRunner(FakeRunner):
    def execute(self, plan):
        result = super().execute(plan)
        is_broken = self.script.plan_fault.has(BROKEN_STEP, plan)
        return replace(result, plan_id=result.plan_id + 1) if is_broken else result


class Faults:
    """Bugs of the server's own, planted in the running process by commands."""

    def __init__(self):
        self.trio_token = None

    def release(self):
        """Every step that hangs goes on, and none hangs any more."""
        RELEASED.set()

    def break_trio(self):
        """Trio itself fails: none of its tasks is unwound."""
        self.trio_token.run_sync_soon(self._exit)

    def break_supervisor(self):
        """The engine's own task fails when the next request ends."""
        Supervisor._end = self._fail

    def break_accepting(self):
        """The task that takes new connections fails with the next one."""
        RpcServer._serve = self._fail

    def break_call(self):
        """A call fails with its next news."""
        BridgeCall.receive = self._fail_once(BridgeCall.receive)

    @staticmethod
    def _fail_once(method):
        left = [RuntimeError("planted")]

        async def fail(self):
            if left:
                raise left.pop()
            return await method(self)

        return fail

    @staticmethod
    def _fail(*_):
        raise RuntimeError("planted")

    @staticmethod
    def _exit():
        raise SystemExit("planted")


def make_script(load_error=None, eos_every=None, out_of_memory_steps=(), **fields):
    """A FakeScript; ``eos_every`` k ends a sequence after one digest in k."""
    faults = {step: MemoryError("scripted") for step in out_of_memory_steps}
    script = FakeScript(step_faults=faults, **fields)
    script.plan_fault, script.encode_fault = Poison(script), EncodePoison(script)
    if load_error is not None:
        script.load_error = RuntimeError(load_error)
    if eos_every is not None:
        script.eos_at = lambda digest: digest % eos_every == 0
    return script


class Counter(trio.abc.Instrument):
    """How often Trio ran a task."""

    def __init__(self, faults):
        self.faults = faults
        self.task_steps = 0

    def before_task_step(self, task):
        self.task_steps += 1

    def answer(self, question):
        if question == "tasks":
            return self.living()
        return {
            "task_steps": self.task_steps,
            "switches": dict(all_switches()),
        }

    def living(self):
        """Trio's tasks and Python's threads."""
        statistics = trio.from_thread.run_sync(
            trio.lowlevel.current_statistics, trio_token=self.faults.trio_token
        )
        return {"trio_tasks": statistics.tasks_living, "threads": threading.active_count()}


def all_switches():
    """How often each thread has given its core away because it waited."""
    for thread in threading.enumerate():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            yield thread.name, switches(thread)


def switches(thread):
    with open(f"/proc/self/task/{thread.native_id}/status") as status:
        [line] = [line for line in status if line.startswith("voluntary_ctxt_switches")]
    return int(line.split()[1])


def answer_questions(counter):
    for line in sys.stdin:
        command = line.strip()
        if command and command != "tasks":
            getattr(counter.faults, command)()
        print(json.dumps(counter.answer(command)), flush=True)
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

    ``models``: ModelConfig's fields, and a model's own ``script``; with ``capability``
    "text-embedding" or "rerank" it is an encoder, with ``runner`` "process" one of `child_fakes`.
    ``replicas``: how many workers it has;
    ``memory_bytes``: what each needs; ``fails``: how many of its loads fail first. ``script``,
    ``runner``, ``engine``, ``server``: fields of make_script, FakeRunner, EngineConfig and
    ServerConfig.
    ``counts``: count Trio's steps. ``is_command``: as `triolet serve` does.
    """
    scripts = {model["name"]: (script or {}) | model.pop("script", {}) for model in models}
    needs = {model["name"]: model.pop("memory_bytes", None) for model in models}
    failing = {model["name"]: model.pop("fails", 0) for model in models}
    for model in models:
        model["workers"] = (WorkerConfig(count=model.pop("replicas", 1)),)
    models = [
        model | {"capability": Capability(model["capability"])} if "capability" in model else model
        for model in models
    ]
    engine_config = EngineConfig(
        models=tuple(ModelConfig(**{"model": "fake", **model}) for model in models),
        **{"check_level": 2} | (engine or {}),
    )
    server_config = ServerConfig(**{"port": 0, "log_format": "human"} | (server or {}))

    faults = Faults()

    def make_runner(model, config):
        faults.trio_token = trio.from_thread.run_sync(trio.lowlevel.current_trio_token)
        own = dict(scripts[model.name])
        if failing[model.name]:
            failing[model.name] -= 1
            own["load_error"] = "scripted"
        if model.runner == "process":
            from tests.support.child_fakes import child

            return child()
        if model.capability in KINDS:
            return FakeEncoder(
                KINDS[model.capability],
                max_model_len=ENCODER_MAX_LEN,
                script=make_script(**own),
                memory_bytes=needs[model.name] or 1000,
            )
        return FaultyRunner(
            script=make_script(**own),
            memory_bytes=needs[model.name],
            **{"block_size": config.block_size} | (runner or {}),
        )

    counter = Counter(faults)
    threading.Thread(target=answer_questions, args=(counter,), daemon=True, name="stdin").start()

    if is_command:
        return serve_forever(engine_config, server_config, make_runner=make_runner)
    logs.configure(os.environ.get("TRIOLET_LOG", "INFO"), server_config.log_format)

    async def main():
        codes = []

        async def run(task_status):
            codes.append(
                await serve(
                    engine_config,
                    server_config,
                    make_runner=make_runner,
                    task_status=task_status,
                )
            )

        async with trio.open_nursery() as nursery:
            bound = await nursery.start(run)
            print(json.dumps({"port": bound.port}), flush=True)
        return codes[0]

    return trio.run(main, instruments=[counter] if counts else [])


if __name__ == "__main__":
    sys.exit(start(**json.loads(sys.argv[1])))
