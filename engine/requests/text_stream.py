"""The stream of a Generate request: Started, Tokens, and one Finished for each choice."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.core.common.types import RequestId
from engine.core.text.types import Tokens
from engine.requests.choice_parser import ChoiceParser
from engine.requests.stream import RequestStream
from engine.requests.text_values import Started, StreamEvent

if TYPE_CHECKING:
    from engine.core.common.events import Admitted, Finished, OutputEvent
    from engine.core.text.types import TokenLogprob
    from engine.requests.answer_format import AnswerFormat
    from engine.requests.stream import StreamOptions
    from engine.requests.text_values import GenerateRequest


class TextStream(RequestStream[StreamEvent]):
    """A Generate request's life on the Trio thread."""

    def __init__(self, request: GenerateRequest, options: StreamOptions[StreamEvent]) -> None:
        self.request = request
        self.echo_text: str | None = None
        self._num_choices = max(1, request.n or 1)  # n may be out of range, and about to be refused
        self._num_finished = 0
        self._is_renamed = options.core_id != options.request_id
        self.dropped: tuple[int, ...] = ()  # indices of the chat's messages that were left out
        self._parsers: tuple[ChoiceParser, ...] = ()  # one per choice of a chat that has a format
        # Started, the end of each choice, and the text that its parser still holds then have no
        # credit.
        super().__init__(options, num_beside=2 * self._num_choices + 1, credited=(Tokens,))

    # ---- before the request is in the queue

    def echo(self, text: str) -> None:
        """Send the prompt's text before each choice.

        These messages take their slots of the credit now, because once the request is submitted,
        its first step may take all slots.
        """
        if self.echo_text is not None:
            return  # a request that changes its replica has its slots already
        if self.credit.try_reserve(self._num_choices):  # without slots, the core refuses it
            self.credit.fill(self._num_choices)
            self.echo_text = text

    def parse_answers(self, form: AnswerFormat) -> None:
        """Separate reasoning and tool calls from the text of each choice.

        The text that a parser still holds at the end of its choice belongs to no step, so the
        message with it gets a slot of its own.
        """
        if self._parsers:
            return  # a request that changes its replica has its slots already
        choices = range(self._num_choices)
        self._parsers = tuple(ChoiceParser(form, f"{self.core_id}/{choice}") for choice in choices)
        self.credit.widen(self._num_choices)

    # ---- the loop's side

    def push(self, event: OutputEvent) -> None:
        """Take an event of the core; pass tokens on, with the client's own id and parsed."""
        if event.__class__ is not Tokens:
            super().push(event)
            return
        self.phase = "decode"
        self.tokens_done += len(event.token_ids)
        if self._first_result_at is None:
            self._note_first_result()
        if not self._is_begun:
            self._begin(event.prompt_logprobs)
            event = event._replace(prompt_logprobs=())
        if self._is_renamed:
            event = tuple.__new__(Tokens, (self.request_id, *event[1:]))
        if self._parsers:
            event = self._parsers[event.choice].take(event)
        self._reader.push(event)

    def _admit(self, event: Admitted) -> None:
        if self.request.output.prompt_logprobs is None and not self._is_begun:
            self._begin(())

    def _begin(self, prompt_logprobs: tuple[TokenLogprob, ...]) -> None:
        """Send the stream's first events: at admission or, where the prompt's log-probabilities
        are asked for, with the first token."""
        self._is_begun = True
        chat = self.request.chat
        dropped = tuple([chat.messages[index] for index in self.dropped]) if chat else ()
        self._reader.push(
            Started(self.request_id, self.model, self._prompt_tokens, prompt_logprobs, dropped)
        )
        if self.echo_text is not None:
            for choice in range(self._num_choices):
                self._reader.push(Tokens(RequestId(self.request_id), choice, (), self.echo_text))

    def _finish(self, event: Finished) -> None:
        own_id = RequestId(self.request_id)
        if self._parsers:
            rest = self._parsers[event.choice].end(own_id, event.choice)
            if rest is not None:
                self._reader.push(rest)
        self._reader.push(replace(event, request_id=own_id))
        self._num_finished += 1
        if self._num_finished == self._num_choices:
            self.close(None)
