"""Makes OpenAI's answers of a text request's events: streams of chunks, and whole ones.

Rule 1: everything here is pure; an encoder keeps the state of one call. Rule 2: the tokens that are
ready together become one chunk for each choice. A chunk has the fields that OpenAI's have, and of
vLLM's ``stop_reason``, ``token_ids`` and ``reasoning_content``.
"""

from __future__ import annotations

from dataclasses import replace
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

from engine.core.common.events import Finished
from engine.core.common.types import EndReason
from engine.core.text.types import TokenLogprob, Tokens
from engine.errors import RequestTooLarge
from engine.requests.text.values import AnswerTokens, Started
from grpc_service.openai.json_text import encode_json
from grpc_service.openai.work import WholeEncoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from engine.core.common.prompts import PromptProgress
    from engine.core.common.types import Usage
    from engine.requests.text.values import StreamEvent, ToolCallDelta
    from grpc_service.openai.work import Encoder

DONE = b"data: [DONE]\n\n"
REASONS = {EndReason.STOP: "stop", EndReason.LENGTH: "length"}
HEAVY_EVENTS = 64  # with log-probabilities: some milliseconds
# Log-probabilities, with the alternatives, that one answer keeps: some 60 MB of JSON, and five
# times as much before. Guess: as a list of a million tokens has.
SCORES_MAX = 2**21
HEAVY_CHARS = 2**16  # of text, as an echo may have: half a millisecond


class _Answer:
    """What the four encoders share: the answer's head, and the usage of all choices.

    ``num_choices`` are those of each of the ``num_sources`` requests, which are numbered through.
    ``stop_ids`` are the tokens by which the client asked an answer to end. ``asked`` is the model's
    name in the request, which stands in what is sent before the request begins.
    """

    kind = ""
    chunk_kind = ""

    def __init__(
        self,
        answer_id: str,
        created: int,
        *,
        num_choices: int,
        num_sources: int = 1,
        with_usage: bool = False,
        with_logprobs: bool = False,
        with_ids: bool = False,
        is_single_call: bool = False,
        stop_ids: Iterable[int] = (),
        asked: str = "",
    ) -> None:
        self._asked = asked
        self._head: dict[str, Any] = {"id": answer_id, "created": created, "model": ""}
        self._num_choices = num_choices
        self._num_sources = num_sources
        self._num_left = num_choices * num_sources
        self._with_usage = with_usage
        self._with_logprobs = with_logprobs
        self._with_ids = with_ids
        self._is_single_call = is_single_call
        self._stop_ids = frozenset(stop_ids)
        self._prompt_tokens: dict[int, int] = {}  # by source
        self._cached_tokens: dict[int, int] = {}
        self._completion_tokens = self._reasoning_tokens = 0
        self._prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        self._num_scores = 0  # that are kept

    def _keep_scores(self, entries: Iterable[TokenLogprob], times: int = 1) -> None:
        """Count log-probabilities that are kept, and written ``times`` times at the end.

        Raises:
            RequestTooLarge: the answer would have more than `SCORES_MAX`.
        """
        self._num_scores += times * sum([1 + len(entry.alternatives) for entry in entries])
        if self._num_scores > SCORES_MAX:
            what = f"makes an answer of more than {SCORES_MAX} log-probabilities"
            raise RequestTooLarge.of("output.logprobs", f"{what}; ask for fewer at once")

    def _start(self, source: int, event: Started) -> None:
        self._keep_scores(event.prompt_logprobs)
        self._head["model"] = event.model
        self._prompt_logprobs[source] = event.prompt_logprobs
        self._prompt_tokens[source] = event.prompt_tokens

    def _count(self, source: int, usage: Usage) -> None:
        self._num_left -= 1
        self._prompt_tokens[source] = usage.prompt_tokens
        self._cached_tokens[source] = max(self._cached_tokens.get(source, 0), usage.cached_tokens)
        self._completion_tokens += usage.completion_tokens
        self._reasoning_tokens += usage.reasoning_tokens

    def _usage(self) -> dict[str, Any]:
        prompt = sum(self._prompt_tokens.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
        }

    def _calls_of(self, event: Tokens) -> tuple[ToolCallDelta, ...]:
        if not isinstance(event, AnswerTokens):
            return ()
        if self._is_single_call:
            return tuple([call for call in event.tool_calls if call.position == 0])
        return event.tool_calls

    def _end_of(self, event: Finished, *, has_calls: bool = False) -> dict[str, Any]:
        reason, matched = REASONS[event.reason], event.matched
        ended = {"finish_reason": "tool_calls" if has_calls and reason == "stop" else reason}
        if matched is None or (isinstance(matched, int) and matched not in self._stop_ids):
            return ended  # also for the model's own end, as in vLLM
        return ended | {"stop_reason": matched}

    def is_heavy(self, events: Sequence[StreamEvent]) -> bool:
        """Return whether encoding these events takes some milliseconds."""
        if _num_chars(events) > HEAVY_CHARS:
            return True
        return self._with_logprobs and (
            len(events) > HEAVY_EVENTS or any(isinstance(event, Started) for event in events)
        )


def _num_chars(events: Iterable[StreamEvent]) -> int:
    return sum([len(event.text) for event in events if isinstance(event, Tokens)])


def _reasoning_of(event: Tokens) -> str:
    return event.reasoning if isinstance(event, AnswerTokens) else ""


# ---- streams


class _Stream(_Answer):
    """Chunks of server-sent events."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._starts: dict[int, bytes] = {}  # of a short chunk, by choice
        self._short_end = b'},"logprobs":null,"finish_reason":null}]'
        self._short_end += b',"usage":null}\n\n' if self._with_usage else b"}\n\n"

    def encode(self, source: int, events: Sequence[StreamEvent]) -> list[bytes]:
        """Return the chunks for events that are ready together, as one part."""
        chunks: list[bytes] = []
        pending: dict[int, list[Tokens]] = {}
        first = source * self._num_choices
        for event in events:
            if isinstance(event, Tokens):
                pending.setdefault(event.choice, []).append(event)
            elif isinstance(event, Finished):
                if not event.reason.is_success:
                    continue  # the request's error is sent instead
                choice = first + event.choice
                if tokens := pending.pop(event.choice, None):
                    chunks += self._chunks(choice, tokens)
                self._count(source, event.usage)
                chunks.append(self._chunk([self._end(choice, event)]))
                if not self._num_left:
                    chunks += self._last()
            elif isinstance(event, Started):
                self._start(source, event)
                chunks += self._opening(source)
            else:
                chunks.append(self._progress(source, event))
        for choice, tokens in pending.items():
            chunks += self._chunks(first + choice, tokens)
        return [b"".join(chunks)] if chunks else []

    def encode_short(self, source: int, event: StreamEvent) -> bytes | None:
        """Return the chunk of one event that has text alone; None if `encode` has to make it."""
        if event.__class__ is not Tokens and event.__class__ is not AnswerTokens:
            return None
        assert isinstance(event, Tokens)
        if self._with_logprobs or self._with_ids or self._calls_of(event) or _reasoning_of(event):
            return None
        if not event.text:
            return b""
        if len(event.text) > HEAVY_CHARS:
            return None
        choice = source * self._num_choices + event.choice
        start = self._starts.get(choice)
        if start is None:
            if not self._head["model"]:
                return None
            self._starts[choice] = start = self._short_start(choice)
        text: str = encode_basestring(event.text)
        return start + text.encode("utf-8", "replace") + self._short_end

    def _short_start(self, choice: int) -> bytes:
        """Return what stands before the text in a chunk of text alone."""
        head = encode_json({**self._head, "object": self.chunk_kind})[:-1]
        return b"data: " + head + b',"choices":[{"index":%d,' % choice + self._text_start

    _text_start = b""

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        body = {**self._head, "object": self.chunk_kind, "choices": choices}
        if self._with_usage:
            body["usage"] = None
        return b"data: " + encode_json(body) + b"\n\n"

    def _progress(self, source: int, event: PromptProgress) -> bytes:
        """Return a chunk without choices, as the one with the usage, so that clients which do not
        know it ignore it. The first four values are llama.cpp's."""
        progress: dict[str, Any] = {
            "total": event.prompt_tokens,
            "cache": event.cached_tokens,
            "processed": event.computed_tokens,
            "time_ms": round(1000 * event.prefill_s),
            "phase": event.phase,
            "queue_position": event.position,
            "loaded_bytes": event.loaded_bytes,
            "total_bytes": event.total_bytes,
            "first_token_ms": _milliseconds(event.first_token_s),
        }
        if self._num_sources > 1:
            progress["prompt"] = source
        body = {**self._head, "object": self.chunk_kind, "choices": []}
        body["model"] = self._head["model"] or self._asked
        if self._with_usage:
            body["usage"] = None
        return b"data: " + encode_json(body | {"prompt_progress": progress}) + b"\n\n"

    def _last(self) -> Iterator[bytes]:
        if self._with_usage:
            head = {**self._head, "object": self.chunk_kind, "choices": []}
            yield b"data: " + encode_json({**head, "usage": self._usage()}) + b"\n\n"
        yield DONE

    def _opening(self, source: int) -> Iterator[bytes]:
        """Yield what precedes the tokens of a request."""
        return iter(())

    def _chunks(self, choice: int, tokens: list[Tokens]) -> Iterator[bytes]:
        raise NotImplementedError

    def _end(self, choice: int, event: Finished) -> dict[str, Any]:
        raise NotImplementedError


class ChatStream(_Stream):
    """The stream of a chat's answer."""

    chunk_kind = "chat.completion.chunk"
    _text_start = b'"delta":{"content":'

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._calling: set[int] = set()  # choices that have called

    def _opening(self, source: int) -> Iterator[bytes]:
        for choice in range(self._num_choices):
            delta = {"role": "assistant", "content": ""}
            index = source * self._num_choices + choice
            yield self._chunk(
                [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
            )

    def _chunks(self, choice: int, tokens: list[Tokens]) -> Iterator[bytes]:
        delta: dict[str, Any] = {}
        if reasoning := "".join(map(_reasoning_of, tokens)):
            delta["reasoning_content"] = reasoning
        if text := "".join([event.text for event in tokens]):
            delta["content"] = text
        calls: dict[int, dict[str, Any]] = {}  # clients take one part of each call of a chunk
        for call in [call for event in tokens for call in self._calls_of(event)]:
            if call.position in calls:
                calls[call.position]["function"]["arguments"] += call.arguments_json
            else:
                calls[call.position] = _call_delta(call)
        if calls:
            delta["tool_calls"] = list(calls.values())
            self._calling.add(choice)
        logprobs = [entry for event in tokens for entry in event.logprobs]
        if not (delta or logprobs or self._with_ids):
            return
        made = {
            "index": choice,
            "delta": delta,
            "logprobs": {"content": list(map(_chat_logprob, logprobs))} if logprobs else None,
            "finish_reason": None,
        }
        if self._with_ids:
            made["token_ids"] = [one for event in tokens for one in event.token_ids]
        yield self._chunk([made])

    def _end(self, choice: int, event: Finished) -> dict[str, Any]:
        end = self._end_of(event, has_calls=choice in self._calling)
        return {"index": choice, "delta": {}, "logprobs": None, **end}


class TextStream(_Stream):
    """The stream of a text completion."""

    chunk_kind = "text_completion"
    _text_start = b'"text":'

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._short_end = self._short_end.removeprefix(b"}")
        self._offsets: dict[int, int] = {}

    def _chunks(self, choice: int, tokens: list[Tokens]) -> Iterator[bytes]:
        text = "".join([event.text for event in tokens])
        logprobs: list[TokenLogprob] = []
        if choice not in self._offsets:
            logprobs += self._prompt_logprobs.get(choice // self._num_choices, ())
        logprobs += [entry for event in tokens for entry in event.logprobs]
        if not (text or logprobs or self._with_ids):
            return
        made: dict[str, Any] = {"index": choice, "text": text, "logprobs": None}
        at = self._offsets.setdefault(choice, 0)
        if self._with_logprobs:
            made["logprobs"] = _text_logprobs(logprobs, text, at)
        self._offsets[choice] = at + len(text)
        if self._with_ids:
            made["token_ids"] = [one for event in tokens for one in event.token_ids]
        yield self._chunk([made | {"finish_reason": None}])

    def _end(self, choice: int, event: Finished) -> dict[str, Any]:
        return {"index": choice, "text": "", "logprobs": None, **self._end_of(event)}


# ---- whole answers


class _Kept:
    """The parts of one choice's answer that have come so far."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.logprobs: list[TokenLogprob] = []
        self.ids: list[int] = []
        self.end: dict[str, Any] = {}


class _Whole(_Answer):
    """An answer that is sent when every choice has ended."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._kept = [_Kept() for _ in range(self._num_left)]
        self._num_chars = 0  # of the texts that are kept

    def _start(self, source: int, event: Started) -> None:
        super()._start(source, event)
        if self._with_logprobs:
            self._keep_scores(event.prompt_logprobs, self._num_choices - 1)

    encode_short = WholeEncoder.encode_short

    def encode(self, source: int, events: Sequence[StreamEvent]) -> list[bytes]:
        """Keep events; after the last one, return the whole answer."""
        for event in events:
            if isinstance(event, Started):
                self._start(source, event)
                continue
            assert isinstance(event, Tokens | Finished)  # progress needs a stream
            kept = self._kept[source * self._num_choices + event.choice]
            if isinstance(event, Tokens):
                self._keep(kept, event)
            elif event.reason.is_success:
                kept.end = self._end_of(event, has_calls=bool(kept.calls))
                self._count(source, event.usage)
        return [] if self._num_left else [encode_json(self._body())]

    def is_heavy(self, events: Sequence[StreamEvent]) -> bool:
        """Return whether these events make an answer that takes some milliseconds."""
        if not any(isinstance(event, Finished) for event in events):
            return False
        return self._with_logprobs or self._num_chars + _num_chars(events) > HEAVY_CHARS

    def _keep(self, kept: _Kept, event: Tokens) -> None:
        kept.text.append(event.text)
        self._num_chars += len(event.text)
        kept.logprobs += event.logprobs
        self._keep_scores(event.logprobs)
        if self._with_ids:
            kept.ids += event.token_ids
        if reasoning := _reasoning_of(event):
            kept.reasoning.append(reasoning)
        for call in self._calls_of(event):
            if call.position not in kept.calls:
                kept.calls[call.position] = {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": ""},
                }
            kept.calls[call.position]["function"]["arguments"] += call.arguments_json

    def _body(self) -> dict[str, Any]:
        choices = [self._choice(index, kept) for index, kept in enumerate(self._kept)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def _choice(self, index: int, kept: _Kept) -> dict[str, Any]:
        made = {"index": index, **self._content(index, kept), **kept.end}
        return made | ({"token_ids": kept.ids} if self._with_ids else {})

    def _content(self, index: int, kept: _Kept) -> dict[str, Any]:
        raise NotImplementedError


class ChatWhole(_Whole):
    """A chat's answer."""

    kind = "chat.completion"

    def _content(self, index: int, kept: _Kept) -> dict[str, Any]:
        text = "".join(kept.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if kept.reasoning:
            message["reasoning_content"] = "".join(kept.reasoning)
        if kept.calls:
            message["tool_calls"] = [kept.calls[position] for position in sorted(kept.calls)]
            message["content"] = text or None
        entries = list(map(_chat_logprob, kept.logprobs))
        logprobs = {"content": entries} if self._with_logprobs else None
        return {"message": message, "logprobs": logprobs}


class TextWhole(_Whole):
    """A text completion."""

    kind = "text_completion"

    def _content(self, index: int, kept: _Kept) -> dict[str, Any]:
        text, logprobs = "".join(kept.text), None
        if self._with_logprobs:
            entries = [*self._prompt_logprobs[index // self._num_choices], *kept.logprobs]
            logprobs = _text_logprobs(entries, text, 0)
        return {"text": text, "logprobs": logprobs}


class EchoAlone(WholeEncoder):
    """An encoder of text completions that leaves out all that the model generated."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def encode(self, source: int, events: Sequence[StreamEvent]) -> list[bytes]:
        """Return what is to be written for events of a request."""
        return self._encoder.encode(source, list(map(_without_answer, events)))

    def is_heavy(self, events: Sequence[StreamEvent]) -> bool:
        """Return whether encoding these events takes some milliseconds."""
        return self._encoder.is_heavy(events)


def _without_answer(event: StreamEvent) -> StreamEvent:
    if isinstance(event, Tokens):
        return event._replace(token_ids=())
    if isinstance(event, Finished) and event.reason.is_success:
        usage = replace(event.usage, completion_tokens=0)
        return replace(event, reason=EndReason.LENGTH, matched=None, usage=usage)
    return event


# ---- parts


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(1000 * seconds)


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if not call.name:
        return {"index": call.position, "function": {"arguments": call.arguments_json}}
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"index": call.position, "id": call.call_id, "type": "function", "function": function}


def _chat_logprob(entry: TokenLogprob) -> dict[str, Any]:
    others = [_token(other.text, other.logprob) for other in entry.alternatives]
    return _token(entry.text, entry.logprob) | {"top_logprobs": others}


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


def _text_logprobs(entries: Sequence[TokenLogprob], text: str, offset: int) -> dict[str, Any]:
    """Return the log-probabilities of tokens, whose ``text`` begins at ``offset``. A special token
    that the text leaves out takes no place in it."""
    offsets, at = [], 0
    for entry in entries:
        offsets.append(offset + at)
        if text.startswith(entry.text, at):
            at += len(entry.text)
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {other.text: other.logprob for other in entry.alternatives} or None for entry in entries
        ],
        "text_offset": offsets,
    }
