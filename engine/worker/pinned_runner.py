"""Runners whose calls all come from one thread, for backends that keep state by thread.

A model is served this way with `--runner pinned`. `engine.replica.threads` runs each step in any
thread of Trio's cache, because Trio can pin none (its issue 810). A pinned runner takes the call in
such a thread, passes it to a thread of its own, and waits there. So a step still has one way into a
thread, and is joined.

Rule 1: estimating, loading, steps and closing run on the one thread. Compiling a constraint, which
uses no device, stays with its caller, so that it waits for no step. Rule 2: no other file of
`engine.worker` makes a thread for steps.

Source: D3, R55, R56, R57.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

from engine.core.encode.types import EncodePlan, EncodeResult
from engine.core.image.types import ImagePlan, ImageResult
from engine.core.text.plan import StepPlan, StepResult
from engine.errors import EngineBug, ShuttingDown
from engine.worker.image_interface import ImageModelInfo
from engine.worker.interface import EncoderInfo, InfoT, ModelInfo, PlanT, ResultT

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.text.types import Constraint
    from engine.worker.interface import (
        Adapters,
        EncoderTokenizer,
        EncodeRunner,
        LoadProgress,
        MemoryEstimate,
        Runner,
        TextRunner,
        Tokenizer,
    )

STACK_BYTES = 8 << 20  # R56
_making = threading.Lock()  # Python keeps one stack size for all threads to come

P = ParamSpec("P")
T = TypeVar("T")


class _PinnedRunner(Generic[PlanT, ResultT, InfoT]):
    """`engine.worker.interface.Runner` on one thread: what all kinds have in common.

    Life: 1. made around an unloaded runner; 2. `estimate`, or `load`, starts the thread, named
    ``inference-worker-NAME``; 3. `execute`; 4. `close`, which joins it. A step that hangs delays
    the interpreter's end, as every join does; `engine.replica.watchdog` bounds that delay.
    """

    def __init__(self, runner: Runner[PlanT, ResultT, InfoT], name: str) -> None:
        self._inner = runner
        self._name = f"inference-worker-{name}"
        self._thread: ThreadPoolExecutor | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # held while starting and closing; never taken in a step

    def estimate(self) -> MemoryEstimate:
        """Estimate on the thread, which this starts.

        Raises:
            ShuttingDown: `close` was called. Exception: as the runner's own.
        """
        self._start()
        return self._run(self._inner.estimate)

    def load(self, progress: Callable[[LoadProgress], None]) -> InfoT:
        """Load on the thread, which also calls ``progress``.

        Raises:
            ShuttingDown: `close` was called. Exception: as the runner's own; the thread stays for
                `close`, or for another try.
        """
        self._start()
        return self._run(self._inner.load, progress)

    @property
    def tokenizer(self) -> Tokenizer:
        """The runner's own tokenizer."""
        return self._inner.tokenizer

    def execute(self, plan: PlanT) -> ResultT:
        """Compute a step on the thread; wait for it here.

        Raises:
            ShuttingDown: `close` was called. Exception: as the runner's own.
        """
        return self._run(self._inner.execute, plan)

    def close(self) -> None:
        """Close the runner after the step in flight, and join the thread. Idempotent."""
        with self._lock:
            self._is_closed = True
            thread, self._thread = self._thread, None
            if thread is not None:
                try:
                    thread.submit(self._inner.close).result()
                finally:
                    thread.shutdown(wait=True)

    def _start(self) -> None:
        with self._lock:
            if self._is_closed:
                raise ShuttingDown("the model was closed")
            if self._thread is None:
                self._thread = _start_thread(self._name)

    def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        thread = self._thread
        if thread is None:
            if self._is_closed:
                raise ShuttingDown("the model was closed")
            raise EngineBug("a step before the load")
        try:
            job = thread.submit(call, *args, **kwargs)
        except RuntimeError as error:  # `close` was called since we looked
            raise ShuttingDown("the model was closed") from error
        return job.result()


class PinnedTextRunner(_PinnedRunner[StepPlan, StepResult, ModelInfo]):
    """`engine.worker.interface.TextRunner` on one thread, over another one."""

    def __init__(self, runner: TextRunner, name: str) -> None:
        super().__init__(runner, name)
        self._runner = runner

    @property
    def adapters(self) -> Adapters:
        """The runner's own adapters. They are loaded in the caller's thread, beside steps."""
        return self._runner.adapters

    def compile(self, constraint: Constraint) -> int:
        """Compile in the caller's thread, beside steps."""
        return self._runner.compile(constraint)

    def forget(self, constraint: Constraint) -> None:
        """Drop a compiled constraint, in the caller's thread."""
        self._runner.forget(constraint)


class PinnedEncodeRunner(_PinnedRunner[EncodePlan, EncodeResult, EncoderInfo]):
    """`engine.worker.interface.EncodeRunner` on one thread, over another one."""

    def __init__(self, runner: EncodeRunner, name: str) -> None:
        super().__init__(runner, name)
        self._runner = runner

    @property
    def encoder_tokenizer(self) -> EncoderTokenizer:
        """The runner's own tokenizer for inputs."""
        return self._runner.encoder_tokenizer


class PinnedImageRunner(_PinnedRunner[ImagePlan, ImageResult, ImageModelInfo]):
    """`engine.worker.image_interface.ImageRunner` on one thread, over another one."""


def _start_thread(name: str) -> ThreadPoolExecutor:
    """Return an executor of one thread, which has started."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    with _making:
        before = threading.stack_size(STACK_BYTES)
        try:
            executor.submit(lambda: None).result()
        finally:
            threading.stack_size(before)
    return executor
