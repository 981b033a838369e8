"""The processes of a divided model: N ranks that start, compute, die and end as one worker (D29).

`GroupProcess` has the methods of a `WorkerProcess`, and its channel, `GroupChannel`, those of a
`Channel`, so that `ProcessRunner` drives a group like a single process: a message is sent to every
rank, and one answer is received once all ranks have answered.

Rule 1: all ranks end together. The death of a rank, its silence during a load, or answers that do
not fit together end every rank: other ranks would wait for it in a collective for ever. Rule 2: a
step takes no lock and starts no thread, as in `ProcessRunner`. Rule 3: the ranks find each other by
a file without a name, which only the group's processes have open; it disappears with the last of
them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from engine.limits.memory import CPU
from engine.processes.channel import ChannelClosed, packed, wait_for_any
from engine.worker.process.answers import GRACE_S, Answer, Answers, OutOfStep
from engine.worker.process.messages import Estimated, Loaded
from engine.worker.process.worker_process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.processes.channel import Channel
    from engine.worker.interface import MemoryEstimate
    from engine.worker.process.side_channels import SideChannels

FIRST_REQUESTS = ("estimate", "load")  # during these a rank that is silent counts as lost
SIGNS_OF_LIFE = ("progress", "alive")

log = logging.getLogger(__name__)


class WorkerGroup:
    """The processes of all ranks, from their start until all are reaped. Every method may be called
    from any thread at any time.

    Life: like a `WorkerProcess`; after the death of one rank, `end` ends the others.
    """

    def __init__(self, name: str, ranks: Sequence[WorkerProcess]) -> None:
        """``ranks`` are started processes, in the order of their ranks."""
        self.name = name
        self.ranks = tuple(ranks)
        self._killed_why = ""
        self._end = ""
        self._ending = threading.Lock()  # held while the group is ended; no step takes it
        self._deaths = select.epoll()
        for rank in ranks:
            self._deaths.register(rank.sentinel, select.EPOLLIN)

    @property
    def is_alive(self) -> bool:
        """Whether every rank runs, and the group was not given up."""
        return all(rank.is_alive for rank in self.ranks)

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when a rank is dead, and not before; -1 after
        `close`, which closes it. Stop waiting for it before that."""
        return -1 if self._deaths.closed else self._deaths.fileno()

    def kill(self, why: str) -> None:
        """Kill every rank without waiting (`WorkerProcess.kill`)."""
        self._killed_why = self._killed_why or why
        for rank in self.ranks:
            rank.kill(why)

    def end(self, patience_s: float) -> str:
        """Wait up to ``patience_s`` seconds for the death of a rank, kill the others, reap all, and
        return in words how the dead ranks ended (`WorkerProcess.end`)."""
        with self._ending:
            if not self._end:
                dead = [] if self._killed_why else self._dead_ranks(patience_s)
                hows = [f"of rank {rank} {self.ranks[rank].end(patience_s)}" for rank in dead]
                self.kill("did not answer and was killed")
                for other in self.ranks:
                    other.end(0.0)
                self._end = ", and that ".join(hows) or self._killed_why
            return self._end

    def close(self) -> None:
        """End every rank within `CLOSE_LIMIT_S`, and close every descriptor. Idempotent."""
        for rank in self.ranks:  # all are asked before the first is waited for
            rank.ask_to_end()
        for rank in self.ranks:
            rank.close()
        self._deaths.close()

    def dump_stacks(self) -> None:
        """Have each rank write the stacks of its threads to standard error."""
        for rank in self.ranks:
            rank.dump_stacks()

    def rss_bytes(self) -> int:
        """Return the resident memory of all ranks in bytes."""
        return sum(rank.rss_bytes() for rank in self.ranks)

    def _dead_ranks(self, patience_s: float) -> list[int]:
        """Wait up to ``patience_s`` for the death of a rank, and return all ranks that are dead."""
        with contextlib.suppress(ValueError):  # `close` was called
            self._deaths.poll(patience_s)
        look = select.poll()
        fds = [rank.sentinel for rank in self.ranks]
        for fd in fds:
            if fd >= 0:
                look.register(fd, select.POLLIN)
        ended = {fd for fd, _ in look.poll(0)}
        return [rank for rank, fd in enumerate(fds) if fd in ended]


class GroupProcess(WorkerGroup):
    """A group of worker processes, in the place of a single one. ``channel`` is the main channel to
    all ranks. A rank that sends nothing for ``patience_s`` seconds of a load counts as hung."""

    def __init__(self, name: str, threads: int, size: int, patience_s: float) -> None:
        """Start the processes.

        Raises:
            OSError: The system has no process or no descriptor left. Nothing is held.
        """
        with contextlib.ExitStack() as undo:
            self.meeting = os.memfd_create("triolet-ranks")
            undo.callback(os.close, self.meeting)
            ranks = []
            for rank in range(size):
                process = WorkerProcess(f"{name} rank {rank}", threads, inherits=(self.meeting,))
                undo.callback(process.close)
                ranks.append(process)
            super().__init__(name, ranks)
            undo.pop_all()
        self.channel = GroupChannel(self, patience_s)

    @property
    def side_channels(self) -> SideChannels:
        """The side channels to rank 0, the only rank that compiles constraints."""
        return self.ranks[0].side_channels

    def close(self) -> None:
        """End every rank, and close every descriptor. Idempotent."""
        super().close()
        with self._ending:
            if self.meeting >= 0:
                os.close(self.meeting)
                self.meeting = -1


class GroupChannel:
    """The main channels to all ranks as one channel. One thread at a time sends and receives."""

    def __init__(self, group: GroupProcess, patience_s: float) -> None:
        self._group = group
        self._channels: list[Channel] = [rank.channel for rank in group.ranks]
        self._patience_s = patience_s
        self._answers = Answers(len(self._channels), is_step=True)
        self._heard: list[float] = []  # the time of each rank's last message
        self._request = ""

    def send(self, name: str, value: Any) -> None:
        """Send a message to every rank. A setup is changed to the rank's own.

        Raises:
            ChannelClosed, Exception: as `Channel.send`.
        """
        self._request = name
        self._heard = [time.monotonic()] * len(self._channels)
        self._answers = Answers(len(self._channels), is_step=name not in FIRST_REQUESTS)
        if name == "setup":
            for rank, channel in enumerate(self._channels):
                meeting = f"/proc/self/fd/{self._group.meeting}"
                spec = replace(value.spec, rank=rank, rendezvous=meeting)
                channel.send(name, replace(value, spec=spec))
            return
        message = packed(name, value)
        for channel in self._channels:
            channel.send_packed(message)

    def receive(self) -> tuple[str, Any]:
        """Return the progress of rank 0 as it comes, and then the answers of all ranks as one.

        Raises:
            ChannelClosed: A rank is dead, was silent for too long, or is in another state.
            BadMessage: The received bytes are no message.
        """
        answers, heard = self._answers, self._heard
        grace_ends = 0.0
        while not answers.is_over:
            waiting = answers.missing
            ready = wait_for_any(
                [self._channels[rank] for rank in waiting], self._limit_s(grace_ends)
            )
            if not ready:
                self._end_silent()
            for place in ready:
                rank = waiting[place]
                answer = Answer(*self._channels[rank].receive())
                heard[rank] = time.monotonic()
                if answer.name not in SIGNS_OF_LIFE:
                    answers.take(rank, answer)
                elif answer.name == "progress" and rank == 0:
                    return answer
            if answers.has_failure and not grace_ends:
                grace_ends = time.monotonic() + GRACE_S
        return self._joined(answers)

    def _limit_s(self, grace_ends: float) -> float | None:
        """Return how long to wait for a message; None: until the watchdog ends the step."""
        now = time.monotonic()
        if self._request in FIRST_REQUESTS:
            first = min(self._heard[rank] for rank in self._answers.missing)
            return max(0.0, first + self._patience_s - now)
        return max(0.0, grace_ends - now) if grace_ends else None

    def _end_silent(self) -> NoReturn:
        if self._request in FIRST_REQUESTS:
            rank = min(self._answers.missing, key=lambda rank: self._heard[rank])
            why = f"of rank {rank} said nothing for {self._patience_s:g} s while it loaded"
            self._give_up(OutOfStep(f"{why} and was killed"))
        self._give_up(self._answers.give_up())

    def _joined(self, answers: Answers) -> Answer:
        try:
            each = answers.in_order()
        except OutOfStep as error:
            self._give_up(error)
        first = each[0]
        if first.name == "raised" and self._request in FIRST_REQUESTS:
            self._group.kill("was killed, because a rank of its group could not load")
        if first.name == "estimated":
            return Answer(first.name, _joined_estimates([answer.value for answer in each]))
        if first.name == "loaded":
            return Answer(first.name, _joined_loads([answer.value for answer in each]))
        return first

    def _give_up(self, error: OutOfStep) -> NoReturn:
        self._group.kill(str(error))
        raise ChannelClosed(str(error)) from error


def _joined_estimates(each: list[Estimated]) -> Estimated:
    """Return the memory that all ranks need: the sum for each device."""
    needs: dict[str, MemoryEstimate] = {}
    for e in each:
        known = needs.get(e.estimate.device)
        more = known.num_bytes if known is not None else 0
        needs[e.estimate.device] = replace(e.estimate, num_bytes=e.estimate.num_bytes + more)
    first, *others = needs.values()
    process_bytes = sum(need.process_bytes for need in each if need.estimate.device == CPU)
    return Estimated(replace(first, others=tuple(others)), process_bytes)


def _joined_loads(each: list[Loaded]) -> Loaded:
    """Return rank 0's answer, with the memory, the devices and the threads of all ranks."""
    infos: list[Any] = [load.info for load in each]
    info = replace(
        infos[0],
        memory_bytes=sum(info.memory_bytes for info in infos),
        device=", ".join(dict.fromkeys(info.device for info in infos)),
        threads=sum(info.threads for info in infos),
        tp=len(infos),
        num_blocks=min(info.num_blocks for info in infos),
    )
    process_bytes = sum(load.process_bytes for load in each)
    return replace(each[0], info=info, process_bytes=process_bytes)
