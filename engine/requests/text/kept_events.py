"""Keeps the events of one Generate stream, so that its client can take the stream up again.

Rule 1: a `KeptEvents` passes a stream's events on to a reader. It keeps the newest events with
tokens, about `KEPT_BYTES_MAX` bytes, and the events that come once. Rule 2: nothing here waits.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.core.common.events import Finished
from engine.core.text.types import Tokens
from engine.errors import FieldViolation, RequestCancelled
from engine.requests.text.values import AnswerTokens, Started

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.core.text.types import TokenLogprob
    from engine.errors import TrioletError
    from engine.requests.readers import Reader
    from engine.requests.text.continuation import ContinuedChoice
    from engine.requests.text.values import StreamEvent

# Bytes of events: the last 3,400 tokens of a plain stream. A client that lacks more tokens, because
# its windows were large or each token had many alternatives, goes on with a continuation.
KEPT_BYTES_MAX = 2**20
EVENT_BYTES = 300  # memory of an event, a log-probability or an alternative, beside its text


@dataclass(frozen=True, slots=True)
class ReceivedChoice:
    """What a client has received of one choice: this many tokens, and perhaps its end."""

    tokens: int = 0
    finished: bool = False


NOTHING = ReceivedChoice()


class _Nobody:
    """Drops the events that come while no client reads."""

    def push(self, event: object) -> None:
        pass

    def end(self, error: TrioletError | None) -> None:
        pass


NOBODY = _Nobody()


class KeptEvents:
    """The reader of a stream that can be attached to; it passes everything on to a ``reader``."""

    def __init__(
        self, reader: Reader[StreamEvent], continued: Sequence[ContinuedChoice] = ()
    ) -> None:
        self._reader: Reader[StreamEvent] = reader
        self._started: list[Started] = []
        self._started_bytes = 0
        self._is_started_whole = True
        self._tokens: deque[Tokens] = deque()
        self._tokens_bytes = 0
        # How many tokens of each choice are not kept: the oldest, and those of ``continued``.
        self._dropped: Counter[int] = Counter(
            {i: len(choice.token_ids) for i, choice in enumerate(continued) if not choice.finished}
        )
        self._ended_before = {i for i, choice in enumerate(continued) if choice.finished}
        self._ends: dict[int, Finished] = {}
        self._has_ended = False
        self._error: TrioletError | None = None

    @property
    def num_bytes(self) -> int:
        """About how many bytes of memory the kept events take."""
        return self._started_bytes + self._tokens_bytes

    @property
    def is_read(self) -> bool:
        """Whether a client reads."""
        return self._reader is not NOBODY

    @property
    def reader(self) -> Reader[StreamEvent]:
        """What reads now; after a loss, something that drops all events."""
        return self._reader

    def is_read_by(self, reader: object) -> bool:
        """Return whether ``reader`` gets the events."""
        return self._reader is reader

    def push(self, event: StreamEvent) -> None:
        """Keep an event and pass it on."""
        if isinstance(event, Tokens):
            self._tokens.append(event)
            self._tokens_bytes += _bytes_of(event)
            while self._tokens_bytes > KEPT_BYTES_MAX and len(self._tokens) > 1:
                oldest = self._tokens.popleft()
                self._tokens_bytes -= _bytes_of(oldest)
                self._dropped[oldest.choice] += len(oldest.token_ids)
        elif isinstance(event, Started):
            self._is_started_whole = _size_of(event.prompt_logprobs) <= KEPT_BYTES_MAX
            kept = event if self._is_started_whole else replace(event, prompt_logprobs=())
            self._started.append(kept)
            self._started_bytes += _size_of(kept.prompt_logprobs)
        elif isinstance(event, Finished):
            self._ends[event.choice] = event
        self._reader.push(event)

    def end(self, error: TrioletError | None) -> None:
        """Take note of the end and pass it on."""
        self._has_ended, self._error = True, error
        self._reader.end(error)

    def detach(self) -> None:
        """Keep events without passing them on until a client attaches."""
        self._reader = NOBODY

    def violations(
        self, received: Sequence[ReceivedChoice], num_choices: int
    ) -> Iterator[FieldViolation]:
        """Yield the violations of the counts that a client has ``received``, by the paths of
        AttachRequest: more tokens than were generated, fewer than were dropped here, or a count
        inside an event, whose text cannot be cut there."""
        if len(received) > num_choices:
            what = f"has {len(received)} choices, but n is {num_choices}"
            yield FieldViolation("received", what)
            return
        made = self._dropped.copy()
        ends = {(choice, made[choice]) for choice in range(num_choices)}  # ends of events
        for tokens in self._tokens:
            made[tokens.choice] += len(tokens.token_ids)
            ends.add((tokens.choice, made[tokens.choice]))
        for choice in {*range(num_choices)} - self._ended_before:
            has = received[choice] if choice < len(received) else NOTHING
            lacks_start = not self._is_started_whole and not any(c.tokens for c in received)
            if has.tokens > made[choice]:
                what = f"is {has.tokens}, but {made[choice]} tokens have been generated"
                yield FieldViolation(f"received[{choice}].tokens", what)
            elif has.tokens < self._dropped[choice] or lacks_start:
                what = "is before what the server keeps; send the request again with a continuation"
                yield FieldViolation(f"received[{choice}].tokens", what)
            elif (choice, has.tokens) not in ends:
                what = f"is {has.tokens}, which is inside a message; count whole messages, or "
                what += "send the request again with a continuation"
                yield FieldViolation(f"received[{choice}].tokens", what)
            if has.finished and choice not in self._ends:
                yield FieldViolation(
                    f"received[{choice}].finished", "is true, but the choice has not finished"
                )

    def has_dropped(self, received: Sequence[ReceivedChoice]) -> bool:
        """Return whether a client that has ``received`` so much lacks tokens that are not kept."""
        return any(
            (received[choice].tokens if choice < len(received) else 0) < count
            for choice, count in self._dropped.items()
        )

    def attach(self, reader: Reader[StreamEvent], received: Sequence[ReceivedChoice]) -> int:
        """Let ``reader`` read from now on. It gets Started again, without the prompt's
        log-probabilities if its client has tokens, and then the events that its client lacks. The
        former reader is ended. Return how many events with tokens ``reader`` gets."""
        former, self._reader = self._reader, reader
        former.end(RequestCancelled("the client has taken up the stream by another call"))
        has_begun = any(choice.tokens or choice.finished for choice in received)
        for event in self._started:
            reader.push(replace(event, prompt_logprobs=()) if has_begun else event)
        counts, num_sent = self._dropped.copy(), 0
        for tokens in self._tokens:
            counts[tokens.choice] += len(tokens.token_ids)
            has = received[tokens.choice] if tokens.choice < len(received) else NOTHING
            if counts[tokens.choice] > has.tokens:
                reader.push(tokens)
                num_sent += 1
        for choice, end in self._ends.items():
            if choice >= len(received) or not received[choice].finished:
                reader.push(end)
        if self._has_ended:
            reader.end(self._error)
        return num_sent


def _bytes_of(event: Tokens) -> int:
    """Return about how much memory an event takes."""
    size = EVENT_BYTES + len(event.text) + _size_of(event.logprobs)
    if isinstance(event, AnswerTokens):
        size += len(event.reasoning)
        size += sum([EVENT_BYTES + len(call.arguments_json) for call in event.tool_calls])
    return size


def _size_of(logprobs: Sequence[TokenLogprob]) -> int:
    return EVENT_BYTES * sum([1 + len(entry.alternatives) for entry in logprobs])
