"""A live encode request: the mutable state that an encoder's scheduler keeps of it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from engine.core.common.one_choice import OneChoice
from engine.core.common.phases import Phase
from engine.core.encode.types import queries_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.core.common.credit import Credit
    from engine.core.common.shares import Share
    from engine.core.encode.types import EncodeInput, EncodeRequest, InputKind


class LiveEncode(OneChoice["EncodeRequest"]):
    """A request that was accepted. Each of its inputs is in ``left``, or in the step in flight
    (``in_step`` of them), or done. ``left`` has the inputs by kind, and no kind without inputs;
    ``tokens_left`` are their tokens.

    The request is in the waiting queue while inputs are left and it is not parked. It has started
    when its first row was planned. ``share`` is its holder's, from its place in the queue on.
    """

    __slots__ = ("left", "share", "tokens_left")

    running_phase = Phase.ENCODE

    def __init__(self, request: EncodeRequest, credit: Credit, now: float, number: int) -> None:
        super().__init__(request, credit, now, number)
        # Longest first: neighbours in a batch are then of similar length, and a step that will run
        # out of memory does so early.
        lengths = [input_.num_tokens for input_ in request.inputs]
        self.left: dict[InputKind, deque[int]] = {}
        for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
            self.left.setdefault(request.inputs[index].kind, deque()).append(index)
        self.tokens_left = sum(lengths)
        self.share: Share

    def __repr__(self) -> str:
        return (
            f"<LiveEncode {self.request.request_id} {self.phase.value} {self.num_left} left, "
            f"{self.in_step} in the step, {self.num_done} done>"
        )

    @property
    def num_parts(self) -> int:
        """How many inputs it has."""
        return len(self.request.inputs)

    @property
    def queued_tokens(self) -> int:
        """The tokens of the inputs that are left."""
        return self.tokens_left

    @property
    def is_queued(self) -> bool:
        """Whether the request is in the waiting queue: inputs are left, and it is not parked."""
        return bool(self.left) and self.parked_since is None

    @property
    def num_left(self) -> int:
        """How many inputs are neither in the step nor done."""
        return sum(map(len, self.left.values()))

    def length(self, index: int) -> int:
        """Return the number of tokens of one of the request's inputs."""
        return self.request.inputs[index].num_tokens

    def queries_of(self, index: int) -> Iterable[EncodeInput]:
        """Return the query beside one of the request's inputs, if there is one."""
        return queries_of([self.request.inputs[index]])

    def is_left(self, index: int) -> bool:
        """Return whether an input is neither in the step nor done."""
        return index in self.left.get(self.request.inputs[index].kind, ())

    def take(self, index: int) -> None:
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

    def put_back(self, index: int) -> None:
        """Move an input out of a step that failed. ``left`` stays sorted if the inputs of a step
        are put back in the plan's order, the shortest first."""
        self.left.setdefault(self.request.inputs[index].kind, deque()).appendleft(index)
        self.tokens_left += self.length(index)
