"""An answer of OpenAI's API is the same however its events come: each alone or many together, from
several prompts in any order, streamed or whole, encoded in threads or not.

The events are drawn. A stream is put together as OpenAI's clients do it, and must be the whole
answer; each choice ends once, and the stream ends with the usage and [DONE].
"""

import json
import random
import time
from functools import partial
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import trio
from hypothesis import given

from engine.core.common.events import Finished
from engine.core.common.types import EndReason, Timings, Usage
from engine.core.text.types import TokenLogprob, Tokens
from engine.requests.text.values import AnswerTokens, Started, ToolCallDelta
from grpc_service.openai import answers, door

ARGUMENTS = ['{"a": 1}', '{"text": "ä, b"}', "{}"]


def tokens_of(draw, choice, at, options):
    """Return an event of one token."""
    text = draw(st.sampled_from(["", "a", " bé", "\n"]))
    logprobs = (TokenLogprob(at, text, -0.5),) if options["with_logprobs"] else ()
    return Tokens("r", choice, (at,), text, logprobs)


def calls_of(draw):
    """Return the parts of one to three tool calls, each cut at drawn places."""
    parts = []
    for position in range(draw(st.integers(1, 3))):
        left = draw(st.sampled_from(ARGUMENTS))
        name = f"f{position}"
        while left or name:
            size = draw(st.integers(0 if name else 1, len(left)))
            parts.append(ToolCallDelta(position, f"id{position}" * bool(name), name, left[:size]))
            name, left = "", left[size:]
    return parts


def choice_of(draw, choice, options, *, is_chat):
    """Return the events of a choice, its end the last."""
    events = [tokens_of(draw, choice, at, options) for at in range(draw(st.integers(0, 5)))]
    if is_chat:
        thoughts = [draw(st.sampled_from(["", "hm "])) for _ in events]
        events = [AnswerTokens.of(*pair) for pair in zip(events, thoughts, strict=True)]
        calls = calls_of(draw) if draw(st.booleans()) else []
        while calls:
            count = draw(st.integers(1, len(calls)))
            together, calls = tuple(calls[:count]), calls[count:]
            events.append(AnswerTokens.of(Tokens("r", choice, (9,), ""), "", together))
    usage = Usage(3, 0, len(events))
    return [*events, Finished("r", choice, EndReason.STOP, usage, Timings(0.0), None)]


def merged(draw, lists):
    """Return the values of several lists in a drawn order, in which each list keeps its own."""
    lists = [list(one) for one in lists if one]
    made = []
    while lists:
        one = draw(st.sampled_from(lists))
        made.append(one.pop(0))
        lists = [one for one in lists if one]
    return made


def parts_of(draw, events):
    """Return the events in drawn parts that are ready together."""
    parts = []
    while events:
        count = draw(st.integers(1, len(events)))
        parts.append(events[:count])
        events = events[count:]
    return parts


@st.composite
def plans(draw, *, is_chat):
    """Draw the parts of the events of each prompt, and the encoder's options."""
    num_sources = 1 if is_chat else draw(st.integers(1, 3))
    num_choices = draw(st.integers(1, 3))
    options = {
        "num_choices": num_choices,
        "num_sources": num_sources,
        "with_usage": draw(st.booleans()),
        "with_logprobs": draw(st.booleans()),
        "with_ids": draw(st.booleans()),
        "is_single_call": is_chat and draw(st.booleans()),
    }
    sources = []
    for _ in range(num_sources):
        made = [choice_of(draw, one, options, is_chat=is_chat) for one in range(num_choices)]
        sources.append(parts_of(draw, [Started("r", "m", 3), *merged(draw, made)]))
    return options, sources


def joined(stream):
    """Return the choices of a stream as clients put them together, and check its form."""
    *parts, last = [one.removeprefix(b"data: ") for one in stream.split(b"\n\n") if one]
    assert last == b"[DONE]"
    chunks = [json.loads(part) for part in parts]
    if "usage" in chunks[0]:
        assert chunks.pop()["usage"]["prompt_tokens"]
        assert all(chunk["usage"] is None for chunk in chunks)
    choices = {}
    for chunk in chunks:
        [one] = chunk["choices"]
        made = choices.setdefault(one["index"], {"calls": {}, "logprobs": [], "ids": []})
        assert "end" not in made
        add(made, one)
        if one["finish_reason"]:
            made["end"] = one["finish_reason"]
    return choices


def add(made, one):
    """Add a chunk's choice to what came of it before."""
    delta = one.get("delta", one)
    for name, field in (("text", "text"), ("text", "content"), ("thought", "reasoning_content")):
        made[name] = made.get(name, "") + (delta.get(field) or "")
    calls = delta.get("tool_calls", [])
    assert len({call["index"] for call in calls}) == len(calls)
    for call in calls:
        old = made["calls"].get(call["index"])
        if old is None:
            assert call["id"]
            assert call["function"]["name"]
            made["calls"][call["index"]] = call
        else:
            assert "id" not in call
            old["function"]["arguments"] += call["function"]["arguments"]
    made["logprobs"] += entries_of(one)
    made["ids"] += one.get("token_ids", [])


def entries_of(one):
    """Return the tokens of a choice's log-probabilities."""
    logprobs = one["logprobs"] or {}
    return [entry["token"] for entry in logprobs.get("content") or ()] or logprobs.get("tokens", [])


def whole_of(body):
    """Return the choices of a whole answer in the form of `joined`."""
    choices = {}
    for one in json.loads(body)["choices"]:
        message = one.get("message", one)
        calls = [
            {"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))
        ]
        choices[one["index"]] = {
            "calls": dict(enumerate(calls)),
            "text": message.get("content", message.get("text")) or "",
            "thought": message.get("reasoning_content", ""),
            "logprobs": entries_of(one),
            "ids": one.get("token_ids", []),
            "end": one["finish_reason"],
        }
    return choices


ENCODERS = {
    True: (answers.ChatStream, answers.ChatWhole),
    False: (answers.TextStream, answers.TextWhole),
}


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "text"])
@given(data=st.data())
def test_a_stream_put_together_is_the_whole_answer(is_chat, data):
    options, sources = data.draw(plans(is_chat=is_chat))
    stream, whole = (made("id", 0, **options) for made in ENCODERS[is_chat])
    numbered = [[(number, part) for part in parts] for number, parts in enumerate(sources)]
    written, bodies = [], []
    for number, part in merged(data.draw, numbered):
        short = stream.encode_short(number, part[0]) if len(part) == 1 else None
        written += stream.encode(number, part) if short is None else [short]
        bodies += whole.encode(number, part)
    [body] = bodies
    assert joined(b"".join(written)) == whole_of(body)


class Written:
    """A call that keeps what is written to it."""

    def __init__(self):
        self.parts = []

    async def write(self, message):
        """Write a part, behind a drawn number of other tasks' turns."""
        for _ in range(random.randrange(3)):
            await trio.lowlevel.checkpoint()
        self.parts.append(message)


def writer_of(call, encoder, source, turns):
    """Return the writer of one prompt, each of whose events is encoded in a thread."""
    record, encode = SimpleNamespace(call=call), partial(encoder.encode, source)
    made = door.HttpWriter(record, None, encode, is_heavy=lambda events: True, turns=turns)
    made._stream = SimpleNamespace(note_taken=lambda: None)
    return made


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
@given(plan=plans(is_chat=False), seed=st.integers(0, 2**32))
def test_prompts_that_are_encoded_in_threads_make_one_answer(is_stream, plan, seed):
    """Without turns, two threads take the last event for theirs: two answers, or a part behind
    [DONE]."""
    (options, sources), drawn = plan, random.Random(seed)
    call, turns = Written(), trio.Lock()

    class Slow(ENCODERS[False][not is_stream]):
        """An encoder that is as slow as one of long answers, where a choice ends."""

        def _count(self, source, usage):
            super()._count(source, usage)
            time.sleep(drawn.random() * 0.002)

    encoder = Slow("id", 0, **options)

    async def write_all(source):
        writer = writer_of(call, encoder, source, turns)
        for part in sources[source]:
            await writer._write(part)

    async def main():
        async with trio.open_nursery() as nursery:
            for source in range(len(sources)):
                nursery.start_soon(write_all, source)

    trio.run(main)
    if is_stream:
        choices = joined(b"".join(call.parts))
    else:
        [body] = call.parts
        choices = whole_of(body)
    assert sorted(choices) == list(range(options["num_sources"] * options["num_choices"]))
    assert all(choice["end"] == "stop" for choice in choices.values())
