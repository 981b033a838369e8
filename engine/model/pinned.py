"""A runner whose calls all come from one thread, for backends that keep things by thread.

Rule 1: estimating, loading, steps and closing run on the one thread; compiling a constraint, which
asks no device, stays with its caller, so that it waits for no step. Rule 2: this file alone of the
worker's side makes a thread for steps: `engine.threads` gives each step any thread of Trio's cache,
and Trio can pin none (its issue 810). Its job waits here, so a step still has one way in and is
joined.

Source: D3, R55, R56, R57.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, overload

from engine.errors import EngineBug, ShuttingDown

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.encode_types import EncodePlan, EncodeResult, EncoderTokenizer, EncodeRunner
    from engine.core.plan import (
        LoadProgress,
        MemoryEstimate,
        Runner,
        StepPlan,
        StepResult,
        Tokenizer,
    )
    from engine.core.types import Constraint

STACK_BYTES = 8 << 20  # R56
_making = threading.Lock()  # Python keeps one stack size for all threads to come


class PinnedRunner:
    """`engine.core.plan.Runner` or `engine.core.encode_types.EncodeRunner` over another one.

    Life: 1. made around an unloaded runner; 2. `estimate`, or `load`, starts the thread, named
    ``inference-worker-NAME``; 3. `execute`; 4. `close`, which joins it. A step that hangs holds up
    the interpreter's end, as it would any join; `engine.watchdog` does not wait for it.
    """

    def __init__(self, runner: Runner | EncodeRunner, name: str) -> None:
        self._runner: Any = runner
        self._name = f"inference-worker-{name}"
        self._thread: ThreadPoolExecutor | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # of starting and closing; never taken in a step

    def estimate(self) -> MemoryEstimate:
        """As the runner's own, on the thread, which it starts."""
        self._start()
        found: MemoryEstimate = self._run(self._runner.estimate)
        return found

    def load(self, progress: Callable[[LoadProgress], None]) -> Any:
        """As the runner's own; ``progress`` is called on the thread.

        Raises:
            ShuttingDown: it was closed. Exception: as the runner's own; the thread waits for
                `close`, or for another try.
        """
        self._start()
        return self._run(self._runner.load, progress)

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer: Tokenizer = self._runner.tokenizer
        return tokenizer

    @property
    def encoder_tokenizer(self) -> EncoderTokenizer:
        tokenizer: EncoderTokenizer = self._runner.encoder_tokenizer
        return tokenizer

    @overload
    def execute(self, plan: StepPlan) -> StepResult: ...
    @overload
    def execute(self, plan: EncodePlan) -> EncodeResult: ...
    def execute(self, plan: StepPlan | EncodePlan) -> StepResult | EncodeResult:
        result: StepResult | EncodeResult = self._run(self._runner.execute, plan)
        return result

    def compile(self, constraint: Constraint) -> int:
        size: int = self._runner.compile(constraint)
        return size

    def forget(self, constraint: Constraint) -> None:
        self._runner.forget(constraint)

    def close(self) -> None:
        """Close the runner after the step in flight, and join the thread. Idempotent."""
        with self._lock:
            self._is_closed = True
            thread, self._thread = self._thread, None
            if thread is not None:
                try:
                    thread.submit(self._runner.close).result()
                finally:
                    thread.shutdown(wait=True)

    def _start(self) -> None:
        with self._lock:
            if self._is_closed:
                raise ShuttingDown("the model was closed")
            if self._thread is None:
                self._thread = _start_thread(self._name)

    def _run(self, call: Callable[..., Any], *args: Any) -> Any:
        thread = self._thread
        if thread is None:
            if self._is_closed:
                raise ShuttingDown("the model was closed")
            raise EngineBug("a step before the load")
        try:
            job = thread.submit(call, *args)
        except RuntimeError as error:  # it was closed since we looked
            raise ShuttingDown("the model was closed") from error
        return job.result()


def _start_thread(name: str) -> ThreadPoolExecutor:
    """One thread, which exists when this returns."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    with _making:
        before = threading.stack_size(STACK_BYTES)
        try:
            executor.submit(lambda: None).result()
        finally:
            threading.stack_size(before)
    return executor
