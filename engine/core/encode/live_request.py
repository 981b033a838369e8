"""A live encode request: the mutable state that an encoder's scheduler keeps of it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from engine.core.common.phases import Phase

if TYPE_CHECKING:
    from engine.core.common.credit import Credit
    from engine.core.encode.types import EncodeRequest, InputKind


class LiveEncode:
    """A request that was accepted. Each of its inputs is in ``left``, or in the step in flight
    (``in_step`` of them), or done. ``left`` has the inputs by kind, and no kind without inputs.

    The request is in the waiting queue while inputs are left and it is not parked. ``is_ended``:
    its `Finished` event was emitted; the results of its rows that are still in a step are dropped.
    """

    __slots__ = (
        "credit",
        "in_step",
        "is_ended",
        "left",
        "num_done",
        "num_tokens",
        "parked_s",
        "parked_since",
        "rank",
        "request",
        "started_at",
        "submitted_at",
        "tokens_left",
    )

    def __init__(self, request: EncodeRequest, credit: Credit, now: float, tie: int) -> None:
        self.request = request
        self.credit = credit
        self.rank = (request.arrival, tie)
        self.submitted_at = now
        self.started_at: float | None = None  # when its first row was planned
        self.parked_since: float | None = None
        self.parked_s = 0.0
        self.in_step = 0
        self.num_done = 0
        self.is_ended = False
        # Longest first: neighbours in a batch are then of similar length, and a step that will run
        # out of memory does so early.
        lengths = [one.num_tokens for one in request.inputs]
        self.left: dict[InputKind, deque[int]] = {}
        for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
            self.left.setdefault(request.inputs[index].kind, deque()).append(index)
        self.num_tokens = self.tokens_left = sum(lengths)

    def __repr__(self) -> str:
        return (
            f"<LiveEncode {self.request.request_id} {self.phase.value} {self.num_left} left, "
            f"{self.in_step} in the step, {self.num_done} done>"
        )

    @property
    def phase(self) -> Phase:
        """The request's phase: QUEUED, ENCODE or PARKED."""
        if self.parked_since is not None:
            return Phase.PARKED
        return Phase.QUEUED if self.started_at is None else Phase.ENCODE

    @property
    def is_queued(self) -> bool:
        """Whether the request is in the waiting queue: inputs are left, and it is not parked."""
        return bool(self.left) and self.parked_since is None

    @property
    def num_left(self) -> int:
        """How many inputs are neither in the step nor done."""
        return sum(map(len, self.left.values()))

    def length(self, index: int) -> int:
        """Return the number of tokens of one of its inputs."""
        return self.request.inputs[index].num_tokens

    def is_left(self, index: int) -> bool:
        """Return whether an input is neither in the step nor done."""
        return index in self.left.get(self.request.inputs[index].kind, ())

    def is_late(self, now: float) -> bool:
        """Return whether the deadline has passed; the request is then about to be cancelled."""
        return self.request.deadline is not None and self.request.deadline <= now

    def take(self, index: int, now: float) -> None:
        """Move an input that was left into a step."""
        kind = self.request.inputs[index].kind
        same = self.left[kind]
        if same[0] == index:
            same.popleft()
        else:
            same.remove(index)
        if not same:
            del self.left[kind]
        self.tokens_left -= self.length(index)
        self.in_step += 1
        if self.started_at is None:
            self.started_at = now

    def put_back(self, index: int) -> None:
        """Move an input out of a step that failed. ``left`` stays sorted if the inputs of a step
        are put back in the plan's order, the shortest first."""
        self.in_step -= 1
        self.left.setdefault(self.request.inputs[index].kind, deque()).appendleft(index)
        self.tokens_left += self.length(index)

    def park(self, now: float) -> None:
        """Start counting the time that the request waits for its reader."""
        self.parked_since = now

    def unpark(self, now: float) -> None:
        """Stop counting the time that the request waits for its reader."""
        assert self.parked_since is not None
        self.parked_s += now - self.parked_since
        self.parked_since = None
