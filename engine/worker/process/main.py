"""The program of a worker process: `python -m engine.worker.process.main NAME MAIN CONTROL`.

`WorkerProcess` starts it. MAIN and CONTROL are descriptors of sockets. On the main channel this
thread gets a setup, then requests to estimate and load, then one step after another; when the
channel ends, the process ends. The control socket passes side channels, for compiling constraints
and loading adapters during steps; each is served by a thread of its own.

Rule 1: a plan that was received is answered, or the process ends: without an answer, the server
could not know which state the process is in. Rule 2: the process does not outlive its server, and
ignores signals meant for the server (`engine.processes.inside`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from engine import logs
from engine.gc_tuning import freeze_after_load
from engine.limits.memory import own_bytes
from engine.processes.channel import BadMessage, Channel, ChannelClosed
from engine.processes.inside import EXIT_LOST, leave, live_with_the_server, own_socket
from engine.worker.encode.interface import EncoderInfo
from engine.worker.process import messages
from engine.worker.process.messages import Estimated, Loaded, raised
from engine.worker.text.interface import RankRunner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.core.text.types import Constraint
    from engine.worker.process.messages import Compile, Setup

ALIVE_S = 0.5  # seconds between signs of life; far below the shortest sensible --step-timeout

log = logging.getLogger(__name__)


def main() -> NoReturn:
    """Serve until the main channel ends."""
    name, main_fd, control_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    live_with_the_server()
    faulthandler.register(signal.SIGUSR1)  # sent by `WorkerProcess.dump_stacks`
    logs.request_id.set(f"worker {name}")
    code = EXIT_LOST
    try:
        Worker(name, own_socket(main_fd), own_socket(control_fd)).serve()
        code = 0
    except ChannelClosed:  # the server closed the channel, and needs no answer
        code = 0
    except BaseException:
        log.exception("the worker process of %s ends", name)
    finally:
        leave(code)


def make_runner(setup: Setup) -> Any:
    """Return the factory's unloaded runner. Importing the factory may import torch."""
    module, _, function = setup.factory.partition(":")
    return getattr(importlib.import_module(module), function)(setup.spec, setup.capability)


class Worker:
    """Serves one runner on the main channel and on side channels."""

    def __init__(self, name: str, main: socket.socket, control: socket.socket) -> None:
        self._name = name
        self._channel = Channel(main)
        self._control = control
        self._setup: Any = None
        self._runner: Any = None
        self._compiled = _Compiled()
        self._sending = threading.Lock()  # held to send progress and signs of life, never in a step

    def serve(self) -> None:
        """Answer the requests on the main channel until the server closes it."""
        name, setup = self._channel.receive()
        if name != "setup":
            raise BadMessage(f"{name} before setup")
        sys.path.extend(entry for entry in setup.path if entry not in sys.path)
        logs.configure(setup.log_level, "json" if setup.is_json else "human")
        threading.Thread(target=self._accept_channels, name="control", daemon=True).start()
        self._setup = setup
        while True:
            try:
                name, value = self._channel.receive()
            except ChannelClosed:
                if self._runner is not None:
                    self._runner.close()
                return
            self._answer(name, value)

    def _answer(self, name: str, value: Any) -> None:
        if name == "step":
            self._step(value)
            return
        if name not in ("estimate", "load"):
            raise BadMessage(f"{name} is no request")
        is_rank = self._setup.spec.tp > 1
        try:
            with self._signs_of_life() if is_rank else contextlib.nullcontext():
                if self._runner is None:
                    self._runner = make_runner(self._setup)
                answer = self._estimate() if name == "estimate" else self._load()
        except ChannelClosed:
            raise
        except BaseException as error:
            self._channel.send("raised", raised(error))
        else:
            self._channel.send("estimated" if name == "estimate" else "loaded", answer)

    def _estimate(self) -> Estimated:
        return Estimated(self._runner.estimate(), own_bytes())

    def _load(self) -> Loaded:
        runner, before = self._runner, own_bytes()
        info = runner.load(lambda progress: self._send_meanwhile("progress", progress))
        freeze_after_load()
        encoder_tokenizer = runner.encoder_tokenizer if isinstance(info, EncoderInfo) else None
        tokenizer = None if self._setup.spec.rank else runner.tokenizer
        return Loaded(info, before, tokenizer, encoder_tokenizer)

    def _send_meanwhile(self, name: str, value: object) -> None:
        with self._sending:
            self._channel.send(name, value)

    @contextlib.contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """While the block runs, have a thread send a sign of life to the server every `ALIVE_S`
        seconds. The server waits for a load, whose time it does not know, as long as they come."""
        has_ended = threading.Event()

        def tell() -> None:
            with contextlib.suppress(ChannelClosed):
                while not has_ended.wait(ALIVE_S):
                    self._send_meanwhile("alive", None)

        thread = threading.Thread(target=tell, name="signs of life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()

    def _step(self, plain: Any) -> None:
        plan = messages.plan_of(plain)
        try:
            result = self._runner.execute(plan)
        except BaseException as error:
            runner = self._runner
            begun = runner.num_collectives if isinstance(runner, RankRunner) else 0
            self._channel.send("raised", raised(error, begun))
            return
        # Of a group's ranks, only rank 0 has results.
        plain_result = None if self._setup.spec.rank else messages.plain_result(result)
        self._channel.send("done", plain_result)

    # ---- beside the steps

    def _accept_channels(self) -> None:
        """Start a thread for every side channel that the control socket passes. When that socket
        ends, the server has ended, and this process ends."""
        while True:
            data, fds, _, _ = socket.recv_fds(self._control, 1, 1)
            if not data:
                leave(EXIT_LOST)
            for fd in fds:
                channel = Channel(own_socket(fd))
                threading.Thread(target=self._serve_beside, args=(channel,), daemon=True).start()

    def _serve_beside(self, channel: Channel) -> None:
        logs.request_id.set(f"worker {self._name}")
        with contextlib.suppress(ChannelClosed):
            while True:
                name, request = channel.receive()
                try:
                    if name == "adapter":
                        answer = getattr(self._runner.adapters, request.verb)(request.argument)
                    else:
                        answer = self._compile(request)
                except BaseException as error:  # a panic in a library in Rust is no Exception
                    channel.send("raised", raised(error))
                else:
                    channel.send("answered", answer)
        channel.close()

    def _compile(self, request: Compile) -> int:
        for constraint, number in request.forgets:
            if self._compiled.try_forget(constraint, number):
                self._runner.forget(constraint)
        self._compiled.begin(request.constraint, request.number)
        try:
            size: int = self._runner.compile(request.constraint)
        except BaseException:
            self._compiled.try_forget(request.constraint, request.number + 1)
            raise
        return size


class _Compiled:
    """Remembers the number of each constraint's latest compilation. A request to forget that has a
    lower number, but arrives later because of another channel, must not drop that compilation."""

    def __init__(self) -> None:
        self._latest: dict[Constraint, int] = {}
        self._lock = threading.Lock()  # guards the numbers; never taken in a step

    def begin(self, constraint: Constraint, number: int) -> None:
        """Record that the compilation that is request ``number`` begins."""
        with self._lock:
            self._latest[constraint] = max(number, self._latest.get(constraint, 0))

    def try_forget(self, constraint: Constraint, number: int) -> bool:
        """Return whether a request to forget, the ``number``-th request, is to drop the constraint:
        no later compilation of it began. If so, drop the number of its last compilation."""
        with self._lock:
            if self._latest.get(constraint, 0) >= number:
                return False
            self._latest.pop(constraint, None)
            return True


if __name__ == "__main__":
    main()
