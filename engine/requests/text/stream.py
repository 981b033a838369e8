"""The stream of a Generate request: Started, Tokens, and one Finished for each choice."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from engine.core.common.phases import Phase
from engine.core.common.types import RequestId
from engine.core.text.types import ClientCame, ClientLeft, Replayed, Tokens
from engine.errors import InvalidRequest
from engine.requests.quota import QuotaCount
from engine.requests.readers import IN_PEACE
from engine.requests.stream import RequestStream, server_deadline
from engine.requests.text.answers.choice_parser import ChoiceParser
from engine.requests.text.kept_events import KeptEvents
from engine.requests.text.values import TOKEN_ID_BYTES, AnswerTokens, Started, StreamEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.common.events import Admitted, Finished, OutputEvent
    from engine.core.common.prompts import PromptProgress
    from engine.core.text.types import TokenLogprob
    from engine.requests.readers import Leaving, Reader
    from engine.requests.stream import StreamOptions
    from engine.requests.text.kept_events import ReceivedChoice
    from engine.requests.text.prepare import PreparedText
    from engine.requests.text.values import GenerateRequest


ATTACH_TOKEN_BYTES = 16  # random bytes: too many to be found by trying
KEPT_BYTES = 2**14  # bytes; larger inputs are dropped once prepared; a guess
SEED_BITS = 53  # bits of a seed that is drawn here: JavaScript's integers have no more


class TextStream(RequestStream[StreamEvent]):
    """A Generate request's life on the Trio thread.

    ``seed`` is the client's, that of the stream which this one continues, or drawn here.
    """

    request: GenerateRequest
    makes_tokens = True
    result_types = (Tokens,)

    def __init__(self, request: GenerateRequest, options: StreamOptions[StreamEvent]) -> None:
        self._is_large = request.num_bytes > KEPT_BYTES
        self._num_choices = max(1, request.n or 1)  # n may be out of range, and about to be refused
        continued = request.continuation.choices if request.continuation is not None else ()
        self._num_left = self._num_choices - sum([choice.finished for choice in continued])
        # Choices whose echo the client has: those of which it has tokens or the end.
        self._echoed = {
            index for index, choice in enumerate(continued) if choice.token_ids or choice.finished
        }
        self._echo = ""
        seed = request.sampling.seed
        if seed is None and request.continuation is not None:
            seed = request.continuation.seed
        self.seed = secrets.randbits(SEED_BITS) if seed is None else seed
        self.operation = "text_completion" if request.chat is None else "chat"
        self._cached_tokens = self._reasoning_tokens = 0
        self._ends: list[str] = []  # reasons of the choices that have ended by themselves
        self._is_renamed = options.core_id != options.request_id
        self.dropped: tuple[int, ...] = ()  # indices of the chat's messages that were left out
        self._prompt_bytes = 0  # memory of the prompt's tokens, once the input is dropped
        self._parsers: tuple[ChoiceParser, ...] = ()  # a parser per choice, if a chat has a format
        self.resume_window_s = request.resume_window_s
        self.counted = QuotaCount(options.origin.quota)
        self._on_loss, self._on_leave = options.on_loss, options.on_leave
        self._kept: KeptEvents | None = None
        if options.reader is not None and self.resume_window_s is not None:
            self._kept = KeptEvents(options.reader, continued)
            options = replace(options, reader=self._kept)
        self.wants_progress = bool(request.output.progress)
        # Started, the progress, and the end of each choice, hold no message slot.
        num_beside = self._num_choices + 1 + self.wants_progress
        super().__init__(request, options, num_beside=num_beside, credited=(Tokens,))
        if self._kept is not None:
            self.attach_token = secrets.token_urlsafe(ATTACH_TOKEN_BYTES)

    # ---- a client that loses its connection and comes again

    @property
    def is_read(self) -> bool:
        """Whether a call reads this stream; False if no client can attach to it."""
        return self._kept is not None and self._kept.is_read

    @property
    def kept_bytes(self) -> int:
        """About how much memory the request takes, and the events that a client may need again."""
        if self._kept is None:
            return 0
        return self._kept.num_bytes + self.request.num_bytes + self._prompt_bytes

    def leave(self, reader: Reader[StreamEvent], left_at: float, gone: Leaving = IN_PEACE) -> None:
        """Note that ``reader``'s client has gone. The stream waits for the client if it lost its
        connection and may come back; otherwise the request ends."""
        kept = self._kept
        if kept is not None:
            if not kept.is_read_by(reader):
                return  # the client has attached by another call
            kept.detach()
            if gone.is_lost and self._on_loss(self):
                self.bill.pass_on(self, gone.num_unread, gone.num_bytes)
                return
            self._on_leave(self)
        super().leave(reader, left_at, gone)

    def has_dropped(self, received: Sequence[ReceivedChoice]) -> bool:
        """Return whether the client lacks events that are not kept any more."""
        return self._kept is not None and self._kept.has_dropped(received)

    def check_kept(self, received: Sequence[ReceivedChoice]) -> None:
        """Check what a client says to have received, and that all that it lacks is kept.

        Raises:
            InvalidRequest: the error names each count that is impossible or too old.
        """
        assert self._kept is not None
        violations = tuple(self._kept.violations(received, self._num_choices))
        if violations:
            raise InvalidRequest(violations)

    def wait_for_client(self, until: float) -> None:
        """Take note that the client has lost its connection, and may attach again ``until`` then,
        on Trio's clock. The stream counts against its key's max_requests meanwhile."""
        self.credit.waits_until = until
        self.counted.hold()
        self.report_client(is_there=False)

    def attach(
        self,
        reader: Reader[StreamEvent],
        received: Sequence[ReceivedChoice],
        timeout_s: float | None = None,
    ) -> None:
        """Let ``reader`` read from now on, after the events that its client lacks. `check_kept` was
        called. The request's deadline becomes that of the client's new call, if that is earlier."""
        assert self._kept is not None
        now = trio.current_time()
        if timeout_s is not None:
            self.scope.deadline = min(self.scope.deadline, server_deadline(now, timeout_s))
            self.client_deadline = now + timeout_s
        self.credit.waits_until = now  # a stall timeout begins now
        self.counted.hold()
        num_sent = self._kept.attach(reader, received)
        loop = None if self.replica is None else self.replica.loop
        num_undelivered = 0 if loop is None else loop.num_undelivered(self.core_id, Tokens)
        if self.credit.send_again(num_sent, num_undelivered):
            self.report_drained()

    def report_client(self, *, is_there: bool) -> None:
        """Let the core know whether the client has its connection. Other requests go before one
        whose client is away, so its tokens count neither as its replica's work then, nor as its
        key's waiting tokens.
        """
        self.queued.note_client(is_there=is_there)
        if self.replica is not None:
            event = ClientCame if is_there else ClientLeft
            self.replica.loop.post(event(self.core_id))
        if self.ahead is not None:
            self.ahead.count(is_there)

    def show(self, progress: PromptProgress, reader: Reader[Any] | None = None) -> None:
        """Hand an event about the wait to the reader. It is not kept for a client that attaches."""
        super().show(progress, self._kept and self._kept.reader)

    # ---- accounting

    def account(self, elapsed_s: float) -> dict[str, str | int | float]:
        """Return the fields of the class, with the seconds until the first tokens, if there are
        any, and what the choices have counted that have ended by themselves."""
        fields = super().account(elapsed_s)
        if self._first_result_at is not None:
            fields["first_s"] = self._first_result_at - self.started_at
        if self._ends:
            fields["cached_tokens"] = self._cached_tokens
            fields["reasoning_tokens"] = self._reasoning_tokens
            fields["finish"] = ",".join(self._ends)
        return fields

    # ---- before the request is in the queue

    def _take(self, prepared: PreparedText) -> None:
        """Keep the echo, and make the answers' parsers. The echo is sent in one message with a
        choice's first token, so that a client without a token of a choice has none of the echo."""
        self._echo, self.dropped = prepared.echo, prepared.dropped
        self.bill.images = len(prepared.request.images)
        chat = self.request.chat
        if prepared.form is not None:
            names = [f"{self.core_id}/{choice}" for choice in range(self._num_choices)]
            self._parsers = tuple([ChoiceParser(prepared.form, name) for name in names])
            if chat is not None and (begun := chat.answer_begun):
                for parser in self._parsers:
                    parser.skip(begun)
        if self._is_large:
            self._drop_input(prepared)

    def _drop_input(self, prepared: PreparedText) -> None:
        """Drop the input, of which few tokens may be left, but no chat with images, whose files are
        counted until the end, and no truncated chat, whose dropped messages Started lists."""
        request, chat = self.request, self.request.chat
        if request.has_images or (chat is not None and chat.truncates):
            return
        self.request = replace(request, text=None, token_ids=None, chat=None, check=False)
        self._prompt_bytes = TOKEN_ID_BYTES * len(prepared.request.prompt)

    # ---- the loop's side

    def push(self, event: OutputEvent) -> None:
        """Take an event of the core. Tokens go to the reader with the client's request id, and in a
        chat as the parser of the model's answers splits them."""
        if event.__class__ is not Tokens:
            if isinstance(event, Replayed):
                self._replay(event)
            else:
                super().push(event)
            return
        self.phase = Phase.DECODE
        self.num_made = self.tokens_done = self.tokens_done + len(event.token_ids)
        if self._first_result_at is None:
            self._note_result(self.phase, self.tokens_done)
        if not self._is_begun:
            self._begin(event.prompt_logprobs)
            event = event._replace(prompt_logprobs=())
        if self._is_renamed:
            event = tuple.__new__(Tokens, (self.request_id, *event[1:]))
        if self._parsers:
            event = self._parsers[event.choice].take(event)
        if self._echo and event.choice not in self._echoed:
            self._echoed.add(event.choice)
            event = _behind(self._echo, event)
        self._reader.push(event)

    def _replay(self, event: Replayed) -> None:
        if self._parsers:
            self._parsers[event.choice].skip(event.text)

    def _admit(self, event: Admitted) -> None:
        if self._kept is not None and not self._kept.is_read:
            self.report_client(is_there=False)  # the client left before the admission
        continuation = self.request.continuation
        has_received = continuation is not None and continuation.has_begun
        if (has_received or self.request.output.prompt_logprobs is None) and not self._is_begun:
            self._begin(())

    def _begin(self, prompt_logprobs: tuple[TokenLogprob, ...]) -> None:
        """Send the stream's first events: at admission or, where the prompt's log-probabilities
        are asked for, with the first token."""
        self._is_begun = True
        chat = self.request.chat
        dropped = tuple([chat.messages[index] for index in self.dropped]) if chat else ()
        self._reader.push(
            Started(
                self.request_id,
                self.model,
                self._prompt_tokens,
                prompt_logprobs,
                dropped,
                self.seed,
                self.attach_token,
            )
        )

    def _finish(self, event: Finished) -> None:
        self._cached_tokens = max(self._cached_tokens, event.usage.cached_tokens)
        self._reasoning_tokens += event.usage.reasoning_tokens
        self._ends.append(event.reason.value)
        self._reader.push(replace(event, request_id=RequestId(self.request_id)))
        self._num_left -= 1
        if self._num_left == 0:
            self.close(None)


def _behind(text: str, event: Tokens) -> Tokens:
    """Return the event with ``text`` before its own text."""
    tokens = Tokens(*event)._replace(text=text + event.text)
    if isinstance(event, AnswerTokens):
        return AnswerTokens.of(tokens, event.reasoning, event.tool_calls)
    return tokens
