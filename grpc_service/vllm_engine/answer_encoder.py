"""Translates the events of a request into VllmEngine's messages.

Rule 1: with ``stream``, each choice gets a chunk for every event with its tokens, and then a
`GenerateComplete` without tokens; otherwise it gets one `GenerateComplete` with all its tokens.
Rule 2: an end without success gives no message; the call's status reports it. Rule 3: a message
stays below 4 MiB, the gateway's limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import vllm_engine_pb2

from engine.core.common.events import Finished
from engine.core.text.types import Tokens
from engine.errors import RequestTooLarge
from engine.requests.encode.values import Embedding
from engine.requests.text.values import Started
from grpc_service.services.text_encoder import MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.core.text.types import TokenLogprob
    from engine.requests.encode.values import EncodeEvent
    from engine.requests.text.values import StreamEvent

# Upper bounds of bytes in a message: a token's id; its log-probability, with another copy of the id
# and the tags; and the same for one of its alternatives.
TOKEN_BYTES = 5
LOGPROB_BYTES = 16
ALTERNATIVE_BYTES = 9


def encode_embeddings(events: Sequence[EncodeEvent]) -> list[Any]:
    """Return the messages of an Embed call for events that are ready together: one for the
    vector."""
    return [
        vllm_engine_pb2.EmbedResponse(
            embedding=event.values, prompt_tokens=event.tokens, embedding_dim=len(event.values)
        )
        for event in events
        if isinstance(event, Embedding)
    ]


class GenerateEncoder:
    """Makes the messages of one Generate call. Keeps what a call's later messages repeat or sum
    up. ``alternatives`` is how many the client wants for each token; None without
    log-probabilities."""

    def __init__(self, *, is_stream: bool, alternatives: int | None) -> None:
        self._is_stream = is_stream
        self._token_bytes = TOKEN_BYTES
        if alternatives is not None:
            self._token_bytes += LOGPROB_BYTES + ALTERNATIVE_BYTES * alternatives
        self._prompt_tokens = 0
        self._input_logprobs: Any = None
        self._parts: dict[int, Any] = {}  # by choice: the message with its tokens so far
        self._counts: dict[int, int] = {}  # by choice: tokens so far
        self._chunk = vllm_engine_pb2.GenerateResponse()  # reused for each event

    def encode_short(self, event: StreamEvent) -> bytes | None:
        """Encode a Tokens event that fits into one message. Return the message's bytes, b"" if
        there is nothing to send, or None if only `encode` can encode the event."""
        if event.__class__ is not Tokens or len(event.token_ids) > self._tokens_max:
            return None
        if not self._is_stream:
            self._add(event)
            return b""
        self._fill_chunk(event)
        data: bytes = self._chunk.SerializeToString()
        return data

    def encode(self, events: Sequence[StreamEvent]) -> list[Any]:
        """Return the messages for events that are ready together.

        Raises:
            RequestTooLarge: the answer does not fit the one message that the client asked for.
        """
        return [message for event in events for message in self._messages_of(event)]

    @property
    def _tokens_max(self) -> int:
        """How many tokens a message holds."""
        return MESSAGE_BYTES_MAX // self._token_bytes

    def _messages_of(self, event: StreamEvent) -> Iterator[Any]:
        if isinstance(event, Started):
            self._prompt_tokens = event.prompt_tokens
            self._input_logprobs = _input_logprobs(event.prompt_logprobs)
        elif isinstance(event, Finished):
            if event.reason.is_success:
                yield self._complete(event)
        elif isinstance(event, Tokens) and not self._is_stream:
            self._add(event)
        elif isinstance(event, Tokens):
            for part in _parts_of(event, self._tokens_max):
                self._fill_chunk(part)
                yield vllm_engine_pb2.GenerateResponse.FromString(self._chunk.SerializeToString())

    def _fill_chunk(self, event: Tokens) -> None:
        """Make ``_chunk`` the message of an event."""
        choice = event.choice
        is_first = choice not in self._counts
        self._counts[choice] = self._counts.get(choice, 0) + len(event.token_ids)
        chunk = self._chunk.chunk
        chunk.Clear()
        chunk.token_ids.extend(event.token_ids)
        chunk.prompt_tokens = self._prompt_tokens
        chunk.completion_tokens = self._counts[choice]
        chunk.index = choice
        if event.logprobs:
            _add_logprobs(chunk.output_logprobs, event.logprobs)
        if is_first and self._input_logprobs is not None:
            chunk.input_logprobs.CopyFrom(self._input_logprobs)

    def _add(self, event: Tokens) -> None:
        """Keep an event's tokens for the last message of its choice."""
        choice = event.choice
        part = self._parts.setdefault(choice, vllm_engine_pb2.GenerateComplete())
        self._counts[choice] = self._counts.get(choice, 0) + len(event.token_ids)
        if self._counts[choice] > self._tokens_max:
            raise RequestTooLarge.of(
                "stream",
                f"is false, but a message of 4 MiB holds only {self._tokens_max} tokens with what "
                "was asked for; set it, or ask for fewer tokens or alternatives",
            )
        part.output_ids.extend(event.token_ids)
        if event.logprobs:
            _add_logprobs(part.output_logprobs, event.logprobs)

    def _complete(self, event: Finished) -> Any:
        """Return the last message of a choice, with all its tokens if no chunk had them."""
        complete = self._parts.pop(event.choice, None) or vllm_engine_pb2.GenerateComplete()
        complete.finish_reason = event.reason.value  # stop and length are the protocol's words
        complete.prompt_tokens = event.usage.prompt_tokens
        complete.completion_tokens = event.usage.completion_tokens
        complete.cached_tokens = event.usage.cached_tokens
        complete.index = event.choice
        if self._input_logprobs is not None and not self._is_stream:
            complete.input_logprobs.CopyFrom(self._input_logprobs)
        if isinstance(event.matched, str):
            complete.matched_stop_str = event.matched
        elif event.matched is not None:
            complete.matched_token_id = event.matched
        return vllm_engine_pb2.GenerateResponse(complete=complete)


def _parts_of(event: Tokens, tokens_max: int) -> Iterator[Tokens]:
    """Yield the event in parts of at most ``tokens_max`` tokens."""
    for begin in range(0, len(event.token_ids), tokens_max):
        end = begin + tokens_max
        yield event._replace(
            token_ids=event.token_ids[begin:end], logprobs=event.logprobs[begin:end]
        )


def _add_logprobs(message: Any, entries: Sequence[TokenLogprob]) -> None:
    for entry in entries:
        message.token_ids.append(entry.token_id)
        message.token_logprobs.append(entry.logprob)
        if entry.alternatives:
            _add_alternatives(message, entry)


def _add_alternatives(message: Any, entry: TokenLogprob) -> None:
    message.top_logprobs.add(
        token_ids=[other.token_id for other in entry.alternatives],
        values=[other.logprob for other in entry.alternatives],
    )


def _input_logprobs(entries: Sequence[TokenLogprob]) -> Any:
    """Return the message for the prompt's log-probabilities; None without them. The first token has
    no log-probability, and an empty list of alternatives if others have some."""
    if not entries:
        return None
    message = vllm_engine_pb2.InputLogProbs()
    has_alternatives = any(entry.alternatives for entry in entries)
    for entry in entries:
        message.token_ids.append(entry.token_id)
        message.token_logprobs.add(value=entry.logprob)
        if has_alternatives:
            _add_alternatives(message, entry)
    return message
