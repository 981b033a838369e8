"""Which inputs the next step of an encoder computes.

Rule 1: requests go on in the queue's order, or with several holders in the order of
`WaitingInputs.in_order`, and the first that can go on is in the next step
whatever the length of its input, so that no request starves. Rule 2: an input in a step holds a
message slot of its request's stream. A request without free slots is left out, and no other request
waits for it. Rule 3: a step has inputs of one kind. Where texts and images wait, they take turns,
so that either waits for one step of the other at most; rule 1 holds among the inputs of the kind
whose turn it is. Rule 4: a step has background work only if nothing else that waits can go on.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import EncoderConfig
    from engine.core.encode.live_request import LiveEncode
    from engine.core.encode.types import EncodeInput, InputKind
    from engine.core.encode.waiting_inputs import WaitingInputs


class BatchBuilder:
    """Chooses the inputs of one step, of at most ``budget`` tokens with the padding and with the
    queries beside the inputs, each of which is computed once.

    ``only_begun``: only requests that have been in a step before go on. ``after`` is the kind of
    the previous step. ``chosen`` are the inputs (by index), each with its request. ``starved`` are
    the requests that were left out because their reader has not taken the results that wait for it.
    """

    def __init__(
        self,
        waiting: WaitingInputs,
        config: EncoderConfig,
        now: float,
        budget: int,
        *,
        only_begun: bool,
        after: InputKind | None = None,
    ) -> None:
        self.chosen: list[tuple[LiveEncode, int]] = []
        self.starved: list[LiveEncode] = []
        self._waiting = waiting
        self._max_num_seqs = config.max_num_seqs
        self._now = now
        self._budget = budget
        self._only_begun = only_begun
        self._after = after
        self._longest = 0
        self._queries: set[EncodeInput] = set()
        self._query_tokens = 0

    def build(self) -> None:
        """Choose the inputs and reserve a message slot for each. Remove requests that have no
        inputs left from the queue."""
        others, background = self._waiting.by_class(self._now)
        for lives, kind in product((others, background), self._kinds()):
            for live in lives:
                if kind in live.left and self._may_go_on(live) and not self._take(live, kind):
                    break
            if self.chosen:
                break
        for live in dict.fromkeys(live for live, _ in self.chosen):
            if not live.left:
                self._waiting.remove(live)

    def _kinds(self) -> list[InputKind]:
        """Return the kinds of the waiting inputs; the kind of the previous step comes last."""
        kinds = [kind for kind, number in self._waiting.by_kind.items() if number]
        return sorted(kinds, key=lambda kind: kind is self._after)

    def _may_go_on(self, live: LiveEncode) -> bool:
        """Return whether the request may be in a step, and its deadline has not passed."""
        return (live.started_at is not None or not self._only_begun) and not live.is_late(self._now)

    def _take(self, live: LiveEncode, kind: InputKind) -> bool:
        """Choose inputs of one kind of a request while they fit into the step and the request's
        stream has message slots. Return False if the step is full."""
        while kind in live.left:
            index = live.left[kind][0]
            added = [one for one in live.queries_of(index) if one not in self._queries]
            query_tokens = self._query_tokens + sum(one.num_tokens for one in added)
            if not self._fits(live.length(index), query_tokens):
                return False
            if not live.credit.try_reserve():
                # if no message waits for the reader, this step holds all slots of the stream
                if live.credit.filled and live not in self.starved:
                    self.starved.append(live)
                return True
            self._longest = max(self._longest, live.length(index))
            self._query_tokens = query_tokens
            self._queries.update(added)
            self._waiting.take(live, index)
            self.chosen.append((live, index))
        return True

    def _fits(self, length: int, query_tokens: int) -> bool:
        """Return whether one more row fits beside those chosen, all padded to the longest, if the
        step's queries then have ``query_tokens``. The first row always fits."""
        if not self.chosen:
            return True
        count = len(self.chosen) + 1
        padded = count * max(self._longest, length)
        return count <= self._max_num_seqs and padded + query_tokens <= self._budget
