"""Run a Triolet server of fake models: ``python -m tests.support.fake_server JSON``.

The server prints one line of JSON with its ports once they are bound. Every line on standard input
is a command: the name of a method of `Faults`, a question of `Counter`, or an empty line. Each is
answered by a line of JSON; for a method or an empty line this says how often tasks and threads ran.
A question wakes the server's loop. The server is killed when standard input ends, as it does when
the test ends. For the fields of JSON see `start`.
"""

import collections
import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import trio

from engine import logs
from engine.api.engine import make_torch_runner
from engine.config import AdapterConfig, EngineConfig, ModelConfig, WorkerConfig
from engine.core.text.plan import RowResult
from engine.kinds import EncodeKind
from engine.requests.supervisor import Supervisor
from engine.status import Capability
from engine.worker.fakes.encode import FakeEncoder, ids_of
from engine.worker.fakes.image_generation import FakeImageGenerationRunner
from engine.worker.fakes.text import FakeRunner, FakeScript
from grpc_service.app.application import serve, serve_forever
from grpc_service.app.server_config import ServerConfig
from grpc_service.rpc.call_tasks import CallTasks
from grpc_service.rpc.reception import Reception
from grpc_service.services.call_writer import CallWriter
from tests.simulator.drafters import drafter
from tests.support.gate import GATE, SleepAtGate, compile_slowly

POISONED_STEP = 901  # every step with a row of a prompt that begins with this token raises
POISONED_ROW = 902  # a prompt that begins with this token fails alone, after its second token
HUNG_STEP = 903  # a step with a row of a prompt that begins with this token hangs until `release`
BROKEN_STEP = 904  # a step with a row of a prompt with this first token returns another's result
OUT_OF_MEMORY_STEP = 905  # steps with a row of a prompt with this first token are out of memory
EXITING_STEP = 906  # steps with a row of a prompt with this first token raise SystemExit
RELEASED = threading.Event()
ENCODER_MAX_LEN = 6000  # tokens of an input; longer than a text that is tokenised in a thread


class Clock(trio.abc.Clock):
    """The system's clock, until it is set. It may be stopped at the moment set."""

    def __init__(self):
        self._ahead_s = 0.0
        self._stands_at = None

    def start_clock(self):
        """Do nothing."""

    def current_time(self):
        """Return the time."""
        return self._stands_at or time.perf_counter() + self._ahead_s

    def deadline_to_sleep_time(self, deadline):
        """Return the seconds until a deadline."""
        return deadline - self.current_time()

    def stand_at(self, moment):
        """Set the clock to ``moment``, and stop it until `go_on`."""
        self._stands_at = moment

    def go_on(self):
        """Let time pass again."""
        if self._stands_at is not None:
            self._ahead_s = self._stands_at - time.perf_counter()
            self._stands_at = None


CLOCK = Clock()


class Poison:
    """Make steps with a poisoned prompt fail or hang, by its first token (`POISONED_STEP` …)."""

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
        """Return the error that the plan's poisoned rows cause, or None."""
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
        """Return whether the plan has a row of a prompt that begins with ``first``."""
        return any(self._first.get(row.sequence) == first for row in plan.rows)


class EncodePoison(Poison):
    """Make the steps of an encoder fail as `Poison` does, by the first token of each input."""

    def __call__(self, plan):
        for row in plan.rows:
            self._first[row.sequence] = first = ids_of(row.input)[0]
            if first == POISONED_ROW:
                self._script.row_faults[row.sequence] = (0, "encode")
        return self.fault_of(plan)


class ImagePoison:
    """Make the steps of drawings with poisoned prompts fail. ``verb_s`` has how many seconds more
    the steps of a verb take."""

    def __init__(self, script, verb_s):
        self._script = script
        self._verb_s = verb_s
        self._prompts = {}

    def __call__(self, plan):
        if plan.drawing is not None:
            self._prompts[plan.sequence] = plan.drawing.prompt
        self._script.sleep(self._verb_s.get(plan.verb.value, 0.0))
        if plan.verb.value != "encode":
            return self._fault_of(self._prompts[plan.sequence])
        return None

    def _fault_of(self, prompt):
        match prompt:
            case "fails":
                return RuntimeError("a scripted secret")
            case "out of memory":
                return MemoryError("a scripted secret")
            case "exits":
                return SystemExit("a scripted secret")
            case "hangs":
                RELEASED.wait()
        return None


class FaultyRunner(FakeRunner):
    """A fake runner whose steps can return another step's result. Loading it calls ``on_load``
    first."""

    def __init__(self, on_load, **fields):
        super().__init__(**fields)
        self._on_load = on_load

    def load(self, progress):
        self._on_load()
        return super().load(progress)

    def execute(self, plan):
        result = super().execute(plan)
        is_broken = self.script.plan_fault.has(BROKEN_STEP, plan)
        return result._replace(plan_id=result.plan_id + 1) if is_broken else result


class CountedRunner:
    """A real runner that counts the token positions it computes; of a draft, only accepted tokens
    count."""

    def __init__(self, runner):
        self._runner = runner
        self.num_computed = 0

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def execute(self, plan):
        result = self._runner.execute(plan)
        drafting = {row.sequence for row in plan.rows if row.drafts}
        right = [
            len(one.tokens) - 1
            for one in result.rows
            if one.sequence in drafting and isinstance(one, RowResult)
        ]
        self.num_computed += plan.num_tokens - plan.num_drafts + sum(right)
        return result


class Faults:
    """Bugs of the server itself, which commands plant in the running process."""

    def __init__(self):
        self.trio_token = None
        self.ballast = b""

    def grow(self):
        """Take 256 MiB more memory."""
        self.ballast = b"x" * 2**28

    def shrink(self):
        """Give the memory of `grow` back."""
        self.ballast = b""

    def release(self):
        """Let every hanging step go on, now and later."""
        RELEASED.set()

    def hold(self):
        """Let fakes wait (`tests.support.gate`)."""
        GATE.hold()

    def let_one_go(self):
        """Let one of the fakes that wait go on."""
        GATE.let_one_go()

    def let_go(self):
        """Let the fakes that wait go on, and the clock run again."""
        GATE.let_go()
        CLOCK.go_on()

    def break_trio(self):
        """Make Trio itself fail, so that none of its tasks is unwound."""
        self.trio_token.run_sync_soon(self._exit)

    def break_supervisor(self):
        """Make the engine's supervisor task fail when the next request ends."""
        Supervisor._end = self._fail

    def break_accepting(self):
        """Make the task that accepts connections fail with the next one."""
        Reception._serve = self._fail

    def break_call(self):
        """Make one call fail when it is next woken by an event."""
        CallWriter._receive = self._fail_once(CallWriter._receive)

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


def make_script(
    load_error=None,
    eos_every=None,
    out_of_memory_steps=(),
    acceptance=None,
    verb_s=None,
    passes=None,
    compile_s=None,
    **fields,
):
    """Return a `FakeScript`. With ``eos_every`` k, a sequence ends after one digest in k. With an
    ``acceptance``, the fake drafts tokens, of which this share is right. ``verb_s`` has the seconds
    of an image model's steps by their verbs. ``passes`` makes `SleepAtGate` the script's sleep, and
    compiling a constraint takes ``compile_s`` of it."""
    faults = {step: MemoryError("scripted") for step in out_of_memory_steps}
    if passes is not None:
        fields["sleep"] = SleepAtGate(passes)
    script = FakeScript(step_faults=faults, **fields)
    if compile_s is not None:
        script.compile = partial(compile_slowly, script.sleep, compile_s)
    script.plan_fault, script.encode_fault = Poison(script), EncodePoison(script)
    script.image_fault = ImagePoison(script, verb_s or {})
    if load_error is not None:
        script.load_error = RuntimeError(load_error)
    if acceptance is not None:
        script.draft = drafter(acceptance)
    if eos_every is not None:
        script.eos_at = lambda digest: digest % eos_every == 0
    return script


CALL = f"{CallTasks.__module__}.{CallTasks._serve.__qualname__}"  # the name of a call's task


class Counter(trio.abc.Instrument):
    """Count how often Trio runs a task, and answer ``questions`` on Trio's thread.

    "tasks" is the number of Trio's tasks and of threads, "calls" that of the gRPC calls that run.
    "deadlines" is how many requests were ended by their deadline, by phase. "loads" is how many
    loads of each model have begun, "peak" the most memory that was ever reserved at once.
    "image_bytes" is the memory that requests hold for images, as files and decoded.
    "computed" is the number of token positions that the real model has computed. "held" is how many
    threads wait at the gate, "posted" how many commands wait for a step's end. "skip" sets the
    clock (`skip`).
    """

    def __init__(self, faults):
        self.questions = {"tasks": living, "calls": count_calls, "loads": lambda: self.loads}
        self.questions["held"] = lambda: GATE.num_held
        self.faults = faults
        self.task_steps = 0
        self.loads = collections.Counter()

    def watch(self, engine):
        """Answer questions about the engine from now on."""
        self.questions["deadlines"] = lambda: engine.telemetry().deadlines_missed
        self.questions["peak"] = lambda: engine._pool.memory.peak()
        self.questions["image_bytes"] = lambda: image_bytes(engine._supervisor)
        self.questions["posted"] = lambda: posted(engine._supervisor._live.values())
        self.questions["skip"] = lambda: skip(engine._supervisor._live.values())

    def before_task_step(self, task):
        self.task_steps += 1

    def answer(self, question):
        """Return the answer to one line of standard input."""
        if question in self.questions:
            return trio.from_thread.run_sync(
                self.questions[question], trio_token=self.faults.trio_token
            )
        return {
            "task_steps": self.task_steps,
            "switches": dict(all_switches()),
        }


def skip(streams):
    """Stop the clock at the first deadline of a request until `Faults.let_go`, so that the RPC's
    deadline does not pass. If no request has a deadline, advance it by an hour."""
    first = min((stream.scope.deadline for stream in streams), default=math.inf)
    if first < math.inf:
        CLOCK.stand_at(first)
    else:
        CLOCK.stand_at(CLOCK.current_time() + 3600)
        CLOCK.go_on()


def living():
    """Return the numbers of Trio's tasks and of Python's threads."""
    num_tasks = trio.lowlevel.current_statistics().tasks_living
    return {"trio_tasks": num_tasks, "threads": threading.active_count()}


def posted(streams):
    """Return how many commands wait for the end of a step that has a request's model."""
    loops = {stream.replica.loop for stream in streams if stream.replica is not None}
    return sum(len(loop._commands) for loop in loops)


def image_bytes(supervisor):
    """Return the bytes that the requests of an engine hold for images: as files and decoded."""
    preparers = {serving.preparer for serving in supervisor._servings.values()}
    decoded = sum(one.image_memory.num_bytes for one in preparers if hasattr(one, "image_memory"))
    return supervisor.image_files.num_bytes + decoded


def count_calls():
    """Return the number of gRPC calls that run."""
    return sum(task.name == CALL for task in tasks_below(trio.lowlevel.current_root_task()))


def tasks_below(task):
    """Yield ``task`` and all tasks that it and its children have started."""
    yield task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from tasks_below(child)


def all_switches():
    """Yield each thread's name, and how often it gave its core away because it waited."""
    for thread in threading.enumerate():
        # the thread has just ended, before its file was opened or before it was read
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield thread.name, switches(thread)


def switches(thread):
    """Return how often a thread gave its core away because it waited."""
    with open(f"/proc/self/task/{thread.native_id}/status") as status:
        [line] = [line for line in status if line.startswith("voluntary_ctxt_switches")]
    return int(line.split()[1])


def answer_questions(counter):
    """Answer standard input line by line, and kill the process at its end."""
    for line in sys.stdin:
        command = line.strip()
        if command and command not in counter.questions:
            getattr(counter.faults, command)()
        try:
            answer = counter.answer(command)
        except trio.RunFinishedError:
            return  # the server has ended before the question
        print(json.dumps(answer), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def model_config_of(settings):
    """Return the `ModelConfig` of a fake model, from JSON: its adapters are given as mappings."""
    adapters = tuple(AdapterConfig(**one) for one in settings.get("adapters", ()))
    return ModelConfig(**{"model": "fake", **settings, "adapters": adapters})


def start(
    *,
    models=({"name": "fake"},),
    script=None,
    runner=None,
    engine=None,
    server=None,
    counts=False,
    is_command=False,
    toy=False,
):
    """Serve, and return the exit code.

    ``models`` has fields of ModelConfig and each model's own ``script``. A model with
    ``capability`` "text-embedding", "image-embedding" or "rerank" is an encoder, one with "vision"
    reads images in chats, and one with "text-to-image" draws; one with ``runner`` "process" is one
    of `process_fakes`; one whose ``model`` is a directory is a real model, in a `CountedRunner`.
    ``replicas`` is a model's number of workers, ``memory_bytes`` the memory of each, and ``fails``
    how many of its loads fail first. ``script``, ``runner``, ``engine`` and ``server`` are fields
    of `make_script`, FakeRunner, EngineConfig and ServerConfig. With ``counts`` Trio's steps are
    counted. With ``is_command`` the server behaves as `triolet serve`. With ``toy``, a model
    that makes images serves the toy kind of work instead (`tests.support.counting_calls`).
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
        models=tuple(model_config_of(model) for model in models),
        **{"check_level": 2} | (engine or {}),
    )
    server_config = ServerConfig(**{"port": 0, "log_format": "human"} | (server or {}))

    if toy:
        from tests.simulator.counting import CountRunner
        from tests.support.counting_calls import register

        register()
    faults = Faults()

    def make_runner(model, config):
        faults.trio_token = trio.from_thread.run_sync(trio.lowlevel.current_trio_token)
        if Path(model.model).is_dir():
            counted = CountedRunner(make_torch_runner(model, config))
            counter.questions["computed"] = lambda: counted.num_computed
            return counted
        own = dict(scripts[model.name])
        if failing[model.name]:
            failing[model.name] -= 1
            own["load_error"] = "scripted"
        if model.runner == "process":
            from tests.support.process_fakes import process_runner

            return process_runner()
        if model.capability in EncodeKind.capabilities:
            return FakeEncoder(
                model.capability,
                max_model_len=ENCODER_MAX_LEN,
                script=make_script(**own),
                memory_bytes=needs[model.name] or 1000,
            )
        if model.capability is Capability.TEXT_TO_IMAGE:
            script, make = make_script(**own), FakeImageGenerationRunner
            if toy:
                script.image_fault, make = None, CountRunner
            return make(script=script)
        return FaultyRunner(
            lambda: counter.loads.update([model.name]),
            script=make_script(**own),
            memory_bytes=needs[model.name],
            sees=model.capability is Capability.VISION,
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
            counter.watch(bound.engine)
            ports = {
                "port": bound.port,
                "openai_port": bound.openai_port,
                "vllm_engine_ports": dict(bound.vllm_engine_ports),
            }
            print(json.dumps(ports), flush=True)
        return codes[0]

    return trio.run(main, clock=CLOCK, instruments=[counter] if counts else [])


if __name__ == "__main__":
    sys.exit(start(**json.loads(sys.argv[1])))
