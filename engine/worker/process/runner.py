"""A runner whose model is in a process of its own; the engine uses it like any other `Runner`.

A process has three advantages. If it dies, by a crash of a library or because the kernel needs its
memory, only one replica is lost. A step that hangs can be killed. And the steps of several replicas
do not share the GIL.

Rule 1: imports no torch; the process makes its own runner from a reference (`messages.Setup`).
Rule 2: a step takes no lock of ours and starts no thread: the caller's thread writes the plan and
waits for the answer, with the GIL released. Rule 3: a worker is lost once: the first call that
notices it ends and reaps the process, and every other call raises the same error.

`estimate`, `load` and `execute` use the main channel, one thread at a time. Each `compile` uses a
side channel of its own, so that compilations and steps do not wait for each other. `forget` must
not wait, so it sends nothing: the next `compile` carries its constraint.

The process sends its tokenizers once, pickled, and they run here. Sending each text to the process
instead would take at least 0.05 ms (bench `process`) and wait for the GIL of a step, while encoding
a line takes 0.03 ms; and a dead worker could encode nothing. Tokenizers read here from the model's
files could differ from the model's own, above all an encoder's, which sentence-transformers makes.
A tokenizer of 128,000 tokens is 6 MB and takes 0.1 s to write and 0.4 s to read, as long as from
its file (0.5 s). None of it imports torch or transformers.

Source: D3, D8, D13, D17.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from engine import logs
from engine.errors import EngineBug, ShuttingDown, SpawnFailed, WorkerLost
from engine.limits.memory import CPU
from engine.processes.channel import BadMessage, ChannelClosed
from engine.worker.load.resolve import short_name
from engine.worker.process import messages
from engine.worker.process.group import GroupProcess
from engine.worker.process.messages import AdapterCall, Compile, Loaded, Raised, Setup
from engine.worker.process.worker_process import DEATH_LIMIT_S, WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.text.types import Constraint
    from engine.processes.channel import Channel
    from engine.status import Capability
    from engine.worker.encode.interface import EncoderTokenizer
    from engine.worker.interface import LoadProgress, MemoryEstimate, RunnerSpec, Tokenizer
    from engine.worker.process.group import GroupChannel
    from engine.worker.text.interface import AdapterInfo

RETRY_AFTER_S = 1.0
PATIENCE_S = 60.0  # the default of --step-timeout

log = logging.getLogger(__name__)


class ProcessRunner:
    """An `engine.worker.interface.Runner` of any kind of work, in another process.

    Life: 1. the constructor starts nothing; 2. `estimate`, or else `load`, starts the process; 3.
        `load`; 4. `execute`, any number of times; 5. `close`, after which nothing is held. Once the
        process is dead, only `close` is of use; ``sentinel`` shows its death.

    ``factory`` is ``module:function``. The process calls the function with the spec and the
    capability, and it returns an unloaded runner. The kind of work may be known only there, so
    plans, results and infos have no narrower type here. With a ``tp`` above 1 in the spec, the
    process is a group of processes (`engine.worker.process.group`), one for each rank; a rank that
    sends nothing for ``patience_s`` seconds during a load is considered hung. `close`, `kill`,
    `is_alive` and `rss_bytes` may be called from any thread at any time.
    """

    def __init__(
        self,
        factory: str,
        spec: RunnerSpec,
        capability: Capability | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._factory = factory
        self._spec = spec
        self._capability = capability
        self._patience_s = patience_s
        self._name = short_name(spec.model)
        self._starting = threading.Lock()  # held while the process is started; never in a step
        self._is_closed = False
        self._has_died = False  # whether the process died before `close` was called
        self._process: WorkerProcess | GroupProcess | None = None
        self._channel: Channel | GroupChannel | None = None  # the main channel of the process
        self._loaded: Loaded | None = None
        self._numbers = itertools.count(1)  # serial numbers of requests to compile or forget
        self._to_forget: list[tuple[Constraint, int]] = []

    # ---- methods of every runner

    def estimate(self) -> MemoryEstimate:
        """Start the process and have it estimate; the process stays, for `load`. On the CPU, the
        estimate includes what the process takes beside its model (0.3 GB for torch itself).

        Raises:
            SpawnFailed, ShuttingDown, Exception: For the same reasons as in `load`.
        """
        answer = self._ask_first("estimate", "estimated", lambda progress: None)
        estimate: MemoryEstimate = answer.estimate
        if estimate.device != CPU:
            return estimate
        return replace(estimate, num_bytes=estimate.num_bytes + answer.process_bytes)

    def load(self, progress: Callable[[LoadProgress], None]) -> Any:
        """Have the process load the model; start the process if there was no `estimate`. Returns
        the runner's info, whose memory includes the process's own as in `estimate`.

        Raises:
            SpawnFailed: The model cannot be served, or the process died; one sentence says why.
                ShuttingDown: `close` was called meanwhile. Exception: The load raised it there. The
                process ends in any case.
        """
        if self._loaded is not None:
            raise EngineBug("a worker process is loaded once")
        answer = self._ask_first("load", "loaded", progress)
        self._loaded = answer
        if answer.info.device != CPU:
            return answer.info
        return replace(answer.info, memory_bytes=answer.info.memory_bytes + answer.process_bytes)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. It works in this process, and outlives the worker."""
        tokenizer = self._require_loaded().tokenizer
        assert tokenizer is not None  # rank 0's, if the process is a group
        return tokenizer

    def execute(self, plan: Any) -> Any:
        """Have the process compute a plan, and return its result. The thread waits without the GIL.

        Raises:
            WorkerLost: The process died during the plan or before.
            ShuttingDown: `close` was called. MemoryError, Exception: The runner in the process
                raised it; an exception that is no TrioletError becomes a
                `messages.WorkerProcessError`. The worker can continue.
        """
        channel = self._channel
        if channel is None:
            raise EngineBug("a step before the load")
        try:
            channel.send("step", messages.plain_plan(plan))
            name, value = channel.receive()
            if name == "done":
                return messages.result_of(value)
            failure = _error_of(name, value)
        except Exception as error:
            # After any error here, the state of the process is unknown.
            raise self._give_up(error) from error
        raise failure

    def close(self) -> None:
        """End the process and give everything back. The process has `CLOSE_LIMIT_S` to end its step
        and close its runner, then it is killed; an idle one takes up to 0.1 s. A thread that waits
        in another call raises ShuttingDown at once, and WorkerLost if the process had died before.
        Idempotent."""
        if not self._is_closed and self._process is not None:
            self._has_died = not self._process.is_alive
        self._is_closed = True
        with self._starting:
            process = self._process
        if process is not None:
            process.close()

    # ---- methods of a text model's runner

    def compile(self, constraint: Constraint) -> int:
        """Have the process compile a constraint, beside steps and other compilations.

        Raises:
            InvalidRequest, Unsupported, Exception: The runner in the process raised it.
            WorkerLost, ShuttingDown: as `execute`.
        """
        request = Compile(constraint, next(self._numbers), tuple(self._take_forgets()))
        return _ask_beside(self, "compile", request)

    @property
    def adapters(self) -> ProcessAdapters:
        """The adapters of the process's model."""
        return ProcessAdapters(partial(_ask_beside, self))

    def forget(self, constraint: Constraint) -> None:
        """Have the process drop a constraint before the next `compile`. Never waits."""
        self._to_forget.append((constraint, next(self._numbers)))

    # ---- methods of an encoder's runner

    @property
    def encoder_tokenizer(self) -> EncoderTokenizer:
        """The encoder's tokenizer for inputs. It works as `tokenizer` does."""
        encoder_tokenizer = self._require_loaded().encoder_tokenizer
        if encoder_tokenizer is None:
            raise EngineBug("a text model has no tokenizer for inputs")
        return encoder_tokenizer

    # ---- the process, as an `engine.replica.replica.ProcessWorker`

    @property
    def process(self) -> WorkerProcess | GroupProcess | None:
        """The process, or the group of processes, once `estimate` or `load` has started it."""
        return self._process

    @property
    def is_alive(self) -> bool:
        """Whether the process was started, and neither died nor was given up."""
        return self._process is not None and self._process.is_alive

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process is dead, and not before. `close`
        closes it: stop waiting for it before that."""
        sentinel = -1 if self._process is None else self._process.sentinel
        if sentinel < 0:
            raise EngineBug("there is no process to wait for")
        return sentinel

    def lost(self) -> WorkerLost | ShuttingDown:
        """Return the error with which `execute` fails now. Ends the process if it is not dead yet,
        and reaps it, which takes up to `DEATH_LIMIT_S`."""
        if self._has_died or not self._is_closed:
            how = self._require_process().end(DEATH_LIMIT_S)
            if self._has_died or not self._is_closed:
                return WorkerLost(f"the worker process {how}", retry_after_s=RETRY_AFTER_S)
        return ShuttingDown("the model was closed")

    def kill(self, why: str = "did not answer and was killed") -> None:
        """Kill a process that hangs, without waiting: `execute` raises WorkerLost at once, even if
        the kernel cannot end the process yet. ``why`` continues "the worker process"."""
        if self._process is not None:
            self._process.kill(why)

    def rss_bytes(self) -> int:
        """Return the process's resident memory in bytes; 0 if it is dead or that cannot be read."""
        return 0 if self._process is None else self._process.rss_bytes()

    # ---- the conversation before steps

    def _ask_first(
        self, request: str, answer: str, progress: Callable[[LoadProgress], None]
    ) -> Any:
        """Send ``request`` on the main channel and return the value of ``answer``. Any failure
        closes the runner."""
        try:
            channel = self._start()
            channel.send(request, None)
            name, value = channel.receive()
            while name == "progress":
                progress(value)
                name, value = channel.receive()
            if name != answer:
                raise _error_of(name, value)
            return value
        except (ChannelClosed, BadMessage) as error:
            failure = self._failed_load(error)
            self.close()
            raise failure from error
        except BaseException:
            self.close()
            raise

    def _start(self) -> Channel | GroupChannel:
        """Return the main channel; start the process if there is none.

        Raises:
            SpawnFailed: The system has no process left. ShuttingDown: `close` was called.
        """
        with self._starting:
            if self._is_closed:
                raise ShuttingDown("the model was closed")
            if self._channel is not None:
                return self._channel
            try:
                self._process = self._new_process()
            except OSError as error:
                raise SpawnFailed(
                    f"no process can be started ({error.strerror})", log_detail=repr(error)
                ) from error
            channel = self._channel = self._process.channel
        with contextlib.suppress(ChannelClosed):  # the request that follows raises it again
            channel.send("setup", self._setup())
        return channel

    def _new_process(self) -> WorkerProcess | GroupProcess:
        spec = self._spec
        if spec.tp == 1:
            return WorkerProcess(self._name, spec.threads)
        return GroupProcess(self._name, spec.threads, spec.tp, self._patience_s)

    def _setup(self) -> Setup:
        root = logging.getLogger()
        is_json = any(isinstance(h.formatter, logs.JsonFormatter) for h in root.handlers)
        path = tuple(os.path.abspath(entry) for entry in sys.path)
        level = root.getEffectiveLevel()
        return Setup(self._factory, self._spec, self._capability, path, level, is_json)

    # ---- failures

    def _require_loaded(self) -> Loaded:
        if self._loaded is None:
            raise EngineBug("the tokenizer was asked for before the model was loaded")
        return self._loaded

    def _require_process(self) -> WorkerProcess | GroupProcess:
        if self._process is None:
            if self._is_closed:
                raise ShuttingDown("the model was closed")
            raise EngineBug("there is no worker process yet")
        return self._process

    def _give_up(self, error: Exception) -> WorkerLost | ShuttingDown:
        """Kill the process because of ``error``, and return the error of all later calls."""
        if not isinstance(error, ChannelClosed):
            log.error("the worker process of %s is given up: %r", self._name, error)
            what = "be understood" if isinstance(error, BadMessage) else "be sent its next step"
            self.kill(f"could not {what} and was killed")
        return self.lost()

    def _failed_load(
        self, error: ChannelClosed | BadMessage
    ) -> ShuttingDown | SpawnFailed | WorkerLost:
        """Return the error of a load whose channel failed. For a group it is a WorkerLost, after
        which the load is tried again: a rank may have died for another reason than the model."""
        lost = self._give_up(error)
        if isinstance(lost, ShuttingDown) or self._spec.tp > 1:
            return lost
        how = self._require_process().end(DEATH_LIMIT_S)
        return SpawnFailed(f"its worker process {how}")

    def _take_forgets(self) -> list[tuple[Constraint, int]]:
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._to_forget.pop())
        return taken


def _ask_beside(runner: ProcessRunner, request: str, value: object) -> Any:
    """Send a request on a side channel, beside steps, and return the answer.

    Raises:
        Exception: The runner in the process raised it. WorkerLost, ShuttingDown: as `execute`.
    """
    try:
        with runner._require_process().side_channels.lent() as channel:
            channel.send(request, value)
            name, answer = channel.receive()
            failure = None if name == "answered" else _error_of(name, answer)
    except (ChannelClosed, BadMessage) as error:
        raise runner._give_up(error) from error
    if failure is not None:
        raise failure
    return answer


class ProcessAdapters:
    """The process's `engine.worker.text.interface.Adapters`. ``ask`` sends a request during
    steps."""

    def __init__(self, ask: Callable[[str, object], Any]) -> None:
        self._ask = ask

    def measure(self, directory: str) -> int:
        """Return how many bytes loading the adapter takes at most.

        Raises:
            SpawnFailed, WorkerLost, ShuttingDown: as `engine.worker.text.interface.Adapters`.
        """
        return self._ask("adapter", AdapterCall("measure", directory))

    def load(self, directory: str) -> AdapterInfo:
        """Have the process load an adapter.

        Raises:
            SpawnFailed, WorkerLost, ShuttingDown: as `engine.worker.text.interface.Adapters`.
        """
        return self._ask("adapter", AdapterCall("load", directory))

    def unload(self, digest: str) -> None:
        """Have the process drop an adapter.

        Raises:
            WorkerLost, ShuttingDown: The process has ended, or the model was closed.
        """
        self._ask("adapter", AdapterCall("unload", digest))


def _error_of(name: str, value: object) -> Exception:
    """Return the exception in an answer.

    Raises:
        BadMessage: The answer has no exception.
    """
    if name == "raised" and isinstance(value, Raised):
        return value.error()
    raise BadMessage(f"an answer {name!r}")
