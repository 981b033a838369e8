"""How a simulated client reads, in process or over the wire, and what it received."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from engine.core.common.events import Finished
from engine.core.common.prompts import PromptProgress
from engine.errors import TrioletError
from engine.requests.encode.classify_values import Classification, ClassifyRequest
from engine.requests.encode.values import EmbedRequest, EncodeEvent, RerankRequest, Score
from engine.requests.stream import RequestStream
from engine.requests.text.values import GenerateRequest, Started, StreamEvent
from engine.worker.fakes.encode import LABELS, TOKEN_LABELS
from grpc_service.access.unread_calls import UNREAD_AGE_S, UnreadCalls
from grpc_service.services.call_writer import FAILURE_PATIENCE_S, CallWriter
from tests.simulator.clients import Client
from tests.simulator.encode_oracle import expected_results, prompt_tokens_of, tokens_of
from tests.simulator.progress import Seen, longest_silence_s
from tests.simulator.watch import Violation

SLACK_S = 0.1  # a status may be late by this without a violation


@dataclass
class Reader:
    """What one client has received. ``error`` is the error of the client's call, over the wire."""

    client: Client
    prompt_tokens: int | None = None
    has_left: bool = False
    error: TrioletError | None = None
    attach_token: str = ""
    num_amid: int = 0  # results of the message that it is taking
    lost_at: float | None = None  # when it lost its connection; its stream then waits for it

    @property
    def num_seen(self) -> int:
        """The number of events so far, tokens one by one."""
        raise NotImplementedError

    @property
    def num_results(self) -> int:
        """The number of tokens, or other results, that came from its request; not those of an
        earlier one."""
        return 0

    def see(self, event: Any) -> None:
        """Record an event, and check that it can come now."""
        raise NotImplementedError

    def check_whole(self) -> None:
        """Check that everything has come. Texts are checked by `Simulation._check_output`."""

    @property
    def leaves_now(self) -> bool:
        """Whether the reader has received all that it stays for."""
        limit = self.client.leave_after
        return limit is not None and self.num_seen >= limit

    @property
    def stalls_now(self) -> bool:
        """Whether the reader stops until the request has ended, and then reads on."""
        limit = self.client.stall_after
        return limit is not None and self.num_seen >= limit


@dataclass
class ListReader(Reader):
    """The reader of a request whose ``expected()`` lists the events that must come."""

    events: list[Any] = field(default_factory=list)

    @property
    def num_seen(self) -> int:
        return len(self.events)

    def see(self, event: Any) -> None:
        self.events.append(event)
        if self.client.request.expected()[: self.num_seen] != self.events:
            raise Violation(f"{self.client.request}: {self.events}")

    def check_whole(self) -> None:
        if self.events != self.client.request.expected():
            raise Violation(f"{self.client.request}: succeeded after {self.events}")


@dataclass
class TextReader(Reader):
    """The reader of a Generate request. Tokens, text and end are kept by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    progress: Seen = field(default_factory=Seen)
    heard_at: float = field(default_factory=trio.current_time)
    has_grown: bool = False  # its stream has tokens; those before a cut are of another one
    num_had: int = 0  # tokens of the requests that its own continues
    num_clients: int = 0  # of the world; 0: the server may be silent for any time

    @property
    def num_seen(self) -> int:
        tokens = sum(map(len, self.tokens.values()))
        started = self.prompt_tokens is not None
        return self.progress.num_events + started + tokens + len(self.finished)

    @property
    def num_results(self) -> int:
        return sum(map(len, self.tokens.values())) - self.num_had

    def see(self, event: StreamEvent) -> None:
        request = self.client.request
        assert isinstance(request, GenerateRequest)
        name = request.request_id
        self._listen(request)
        if isinstance(event, PromptProgress):
            self.progress.see(request, event, has_token=self.has_grown)
            return
        if isinstance(event, Started):
            continuation = request.continuation
            has_begun = continuation is not None and continuation.has_begun
            if self.prompt_tokens is not None:
                raise Violation(f"{name}: started twice")
            self.prompt_tokens = event.prompt_tokens
            self.attach_token = event.attach_token
            asked = None if has_begun or self.tokens else request.output.prompt_logprobs
            if len(event.prompt_logprobs) != (0 if asked is None else event.prompt_tokens):
                raise Violation(f"{name}: {len(event.prompt_logprobs)} tokens of the prompt scored")
            return
        if self.prompt_tokens is None or event.choice in self.finished:
            raise Violation(f"{name}: {event.journal_line()} out of place")
        self.has_grown = True
        if isinstance(event, Finished):
            self.finished[event.choice] = event
        else:
            if request.output.logprobs is not None:
                scored = [entry.token_id for entry in event.logprobs]
                if scored != list(event.token_ids):
                    raise Violation(f"{name}: {scored} scored of {event.token_ids}")
            self.tokens.setdefault(event.choice, []).extend(event.token_ids)
            self.text[event.choice] = self.text.get(event.choice, "") + event.text

    def _listen(self, request: GenerateRequest) -> None:
        """Check that a client which asked for progress, and reads, was not left alone."""
        silent_s, self.heard_at = trio.current_time() - self.heard_at, trio.current_time()
        reads = not self.client.delay_s and self.client.stall_after is None
        if self.has_grown or not (request.output.progress and reads and self.num_clients):
            return
        if silent_s > longest_silence_s(self.num_clients):
            raise Violation(f"{request.request_id} heard nothing for {silent_s} s")


@dataclass
class EncodeReader(Reader):
    """The reader of a request to an encoder, which compares each result with the oracle's."""

    results: dict[int, list[float]] = field(default_factory=dict)
    finished: Finished | None = None

    def __post_init__(self) -> None:
        request = self.client.request
        assert not isinstance(request, GenerateRequest)
        self._request = request
        self._tokens: list[int] = []
        self._expected: list[list[float]] = []

    @property
    def num_seen(self) -> int:
        return (self.prompt_tokens is not None) + len(self.results) + (self.finished is not None)

    @property
    def num_results(self) -> int:
        return len(self.results)

    def see(self, event: EncodeEvent) -> None:
        name = self._request.request_id
        if isinstance(event, Started):
            if self.prompt_tokens is not None:
                raise Violation(f"{name}: started twice")
            self._tokens = tokens_of(self._request)
            self._expected = expected_results(self._request)
            self.prompt_tokens = event.prompt_tokens
            if event.prompt_tokens != prompt_tokens_of(self._request):
                raise Violation(f"{name}: started with {event.prompt_tokens} tokens")
            return
        if self.prompt_tokens is None or self.finished is not None:
            raise Violation(f"{name}: {event} out of place")
        if isinstance(event, Finished):
            self.finished = event
            return
        index = event.index
        if index in self.results:
            raise Violation(f"{name}: a second result for input {index}")
        self.results[index] = self._values_of(event)
        if not 0 <= index < len(self._expected) or self.results[index] != self._expected[index]:
            raise Violation(f"{name}: a wrong result for input {index}")

    def _values_of(self, event: EncodeEvent) -> list[float]:
        """Return the numbers of a result, which must be of the requested kind."""
        name = self._request.request_id
        if isinstance(event, Score):
            if not isinstance(self._request, RerankRequest):
                raise Violation(f"{name}: a score for no Rerank")
            return [event.score]
        assert not isinstance(event, Started | Finished)
        if isinstance(event, Classification):
            if not isinstance(self._request, ClassifyRequest):
                raise Violation(f"{name}: labels for another request")
            if event.tokens != self._tokens[event.index] or event.names != self._names():
                raise Violation(f"{name}: {event.tokens} tokens of input {event.index}")
            return [*event.ids, *event.scores, *(event.spans or ())]
        if not isinstance(self._request, EmbedRequest):
            raise Violation(f"{name}: a vector for a Rerank")
        if event.tokens != self._tokens[event.index]:
            raise Violation(f"{name}: {event.tokens} tokens of input {event.index}")
        return [*(event.indices or ()), *event.values]

    def _names(self) -> tuple[str, ...]:
        """Return the names of the labels that the request's results have."""
        aggregation = getattr(self._request, "aggregation", "")
        if not aggregation:
            return LABELS
        grouped = tuple(name.removeprefix("B-").removeprefix("I-") for name in TOKEN_LABELS)
        return TOKEN_LABELS if aggregation == "none" else grouped

    def check_whole(self) -> None:
        """Check that all results have come or, of a Rerank with top_n, the best ones in order."""
        name, top_n = self._request.request_id, getattr(self._request, "top_n", None)
        if self.finished is None or self.finished.usage.prompt_tokens != self.prompt_tokens:
            raise Violation(f"{name}: succeeded, and ended by {self.finished}")
        places = range(len(self._expected))
        if top_n is None:
            if set(self.results) != set(places):
                raise Violation(f"{name}: {len(self.results)} of {len(places)} results")
            return
        best = sorted(places, key=lambda index: (-self._expected[index][0], index))[:top_n]
        if list(self.results) != best:
            raise Violation(f"{name}: {list(self.results)} are not the best, {best}")


async def read(generation: RequestStream[Any], reader: Reader) -> None:
    """Read as a Trio program does, event by event, to the end or as long as the client stays.

    Cancellation: ends the reading; no event is lost.
    """
    while not reader.leaves_now:
        if reader.stalls_now:
            await generation.wait_closed()
        try:
            event = await generation.receive()
        except trio.EndOfChannel:
            return
        reader.see(event)
        if reader.client.delay_s:
            await trio.sleep(reader.client.delay_s)
    generation.close_reader()
    reader.has_left = True
    await generation.wait_closed()


class DrawnBug(Exception):
    """A planted bug, raised by a write in the engine's delivery of a step."""


@dataclass(eq=False)
class SimulatedConnection:
    """A client's connection. ``most_unread`` bounds its unread calls, unless the client reads
    slowly (``is_being_read``)."""

    is_being_read: bool
    most_unread: int
    num_unread: int = 0  # unread calls now, as the simulation counts them

    def note_taken(self, call: object) -> None:
        """Do nothing: the simulated server never leaves."""

    def check(self, name: str) -> None:
        """Raise Violation if there are too many unread calls, one of which is ``name``'s."""
        if self.num_unread > self.most_unread and not self.is_being_read:
            raise Violation(f"{name} is one of {self.num_unread} unread calls")


class SimulatedCall:
    """A gRPC call whose messages are the events themselves (`grpc_service.rpc`).

    Its writes take as long as its client lets them. ``is_window_closed`` may raise `DrawnBug`.
    """

    def __init__(
        self,
        connection: SimulatedConnection,
        reader: Reader,
        unread_calls: UnreadCalls,
        is_window_closed: Callable[[], bool],
    ) -> None:
        self.connection = connection
        self.reader = reader
        self.stream: RequestStream[Any]
        self.writer: CallWriter
        self._unread_calls = unread_calls
        self._is_window_closed = is_window_closed
        self.leaving = trio.CancelScope()
        self.is_part = False  # what is written is a part of a message, and not its end
        self.is_abandoned = False  # another call of the client has taken over the stream
        self._busy_until = -math.inf
        self.code = None  # None until the server has ended the call
        self.scope = trio.CancelScope()  # cancelled when the client has ended the call
        self.is_lost = False
        self._opened_at = trio.current_time()
        self._violation: Violation | None = None

    def encode(self, events: Sequence[Any]) -> Sequence[Any]:
        """Return the events as they are."""
        return events

    def encode_short(self, event: Any) -> Any:
        """Return the event as it is."""
        return event

    def try_write(self, event: Any) -> bool:
        """Take an event unless the client leaves, is slow, or has stalled."""
        reader = self.reader
        client = reader.client
        if client.leave_after is not None or reader.stalls_now or self._is_window_closed():
            return False
        if trio.current_time() < self._busy_until or not isinstance(event, self.stream.credited):
            return False
        self._see(event)
        self._busy_until = trio.current_time() + client.delay_s
        return True

    async def write(self, event: Any) -> None:
        """Take an event when the client does. Cancellation: the event is not taken."""
        reader = self.reader
        if reader.leaves_now:
            return
        if reader.stalls_now:
            await self.stream.wait_closed()
            await self._linger()
        before = reader.num_results - reader.num_amid
        self._see(event)
        reader.num_amid = reader.num_results - before
        if reader.client.delay_s:
            await trio.sleep(reader.client.delay_s)
        if not self.is_part:
            reader.num_amid = 0
        if reader.leaves_now:
            self.leave()

    def leave(self) -> None:
        """Let the client reset the call or, with a resume window, lose its connection."""
        request = self.reader.client.request
        if getattr(request, "resume_window_s", None) is None:
            self.scope.cancel()
        else:
            self.reader.lost_at = trio.current_time()
        self.leaving.cancel(reason="the client leaves")

    async def end(self, *status: object) -> None:
        """Take the status of a call that failed."""
        stream = self.stream
        if self.is_abandoned:
            return
        if stream.error is None or stream.closed_at is None:
            self.reader.has_left = True  # a drawn bug
            return
        self.reader.error = stream.error
        client = self.reader.client
        reads_at_once = client.stall_after is None and not client.delay_s
        # The stream may have ended before this call attached to it.
        late_s = trio.current_time() - max(stream.closed_at, self._opened_at)
        if late_s > (0.0 if reads_at_once else FAILURE_PATIENCE_S) + SLACK_S:
            raise Violation(f"{client.request.request_id} got its status {late_s} s late")

    async def wait_received(self) -> None:
        """Wait until the client has the last event. Cancellation: at once."""
        await trio.sleep(self.reader.client.delay_s)

    def evict(self) -> None:
        """Reset the call."""
        self.leaving.cancel(reason="the client does not read")

    def _see(self, event: Any) -> None:
        if self.is_abandoned:
            return
        try:
            self.reader.see(event)
        except Violation as violation:
            self._violation = violation
            raise

    async def _linger(self) -> None:
        """Wait for the client's ``linger_s`` after its request's end; check unread calls."""
        client, connection = self.reader.client, self.connection
        name = client.request.request_id
        if client.linger_s <= UNREAD_AGE_S + SLACK_S:
            await trio.sleep(client.linger_s)
            return
        await trio.sleep(UNREAD_AGE_S + SLACK_S)
        connection.num_unread += 1
        try:
            await trio.sleep(client.linger_s - UNREAD_AGE_S - SLACK_S)
            self._unread_calls.count()
            await trio.sleep(SLACK_S)  # `count` may have reset calls, which now end
            if not self._unread_calls.count():
                raise Violation(f"{name} is no unread call")
            connection.check(name)
        except Violation as violation:
            self._violation = violation
        finally:
            connection.num_unread -= 1

    def check(self) -> None:
        """Raise the violation that a write has found, which the writer treated as a call's bug."""
        if self._violation is not None:
            raise self._violation


async def serve(writer: CallWriter, call: SimulatedCall) -> None:
    """Serve a call as a handler does. Cancellation: the client has left."""
    reader = call.reader
    if reader.leaves_now:
        call.leave()
    try:
        with call.leaving:
            await writer.run(call.stream)
    except BaseException:
        reader.has_left = True
        raise
    finally:
        call.check()
    reader.has_left = reader.has_left or call.leaving.cancelled_caught
