"""Chats through the whole engine: parsed answers, truncated contexts, reused prefixes."""

import itertools
import traceback
from dataclasses import replace
from functools import partial

import pytest
import trio

from engine.api.handles import Chat
from engine.core.common.events import Finished
from engine.core.text.types import Constraint, Tokens
from engine.errors import InvalidRequest, RequestTooLarge, Unsupported
from engine.requests.text import prepare as prepare_text
from engine.requests.text.chat_values import Chat as Messages
from engine.requests.text.continuation import Continuation, ContinuedChoice
from engine.requests.text.values import (
    AnswerTokens,
    GenerateRequest,
    OutputOptions,
    SamplingParams,
    Started,
    ToolCallDelta,
)
from engine.worker.fakes.text import FakeRunner, FakeScript
from engine.worker.fakes.tokenizer import FakeTokenizer
from tests.simulator.determinism import VirtualThreads, run_deterministically
from tests.support.bodies import run_by
from tests.support.virtual_engine import fake_engine

TOOLS = ({"type": "function", "function": {"name": "add"}},)
ASK = ({"role": "user", "content": "hi"},)
TEMPLATE = "<think></think><tool_call></tool_call>"
CALL = '{"name": "add", "arguments": {"a": 1}}'
WORDS = ["<th", "ink>hm", "</think>", "So", ".\n<tool", "_call>", *CALL, "</tool_call>", " <tool_"]
SHORT = SamplingParams(max_tokens=5)


def run(body, script, *, buffer=4096, max_model_len=2048, tokenizer=None, seed=0):
    """Run ``body(engine)`` in a fresh engine, and check that it is idle afterwards."""
    script.step_s = 0.01
    config = {"in_process_buffer": buffer, "stall_timeout_s": 1e6}

    class Runner(FakeRunner):
        @property
        def tokenizer(self):
            return tokenizer or FakeTokenizer(self.script)

    async def main():
        make = partial(Runner, max_model_len=max_model_len)
        async with fake_engine(script, make, waits=False, **config) as engine:
            await body(engine)
            with trio.fail_after(1):
                await engine.wait_idle()

    run_deterministically(main, seed)


in_engine = partial(run_by, run)


async def events_of(engine, request):
    async with engine.generate(request) as stream:
        return [event async for event in stream]


def told(events, choice=0):
    """Return a choice's text, reasoning and calls."""
    parts = [e for e in events if isinstance(e, Tokens) and e.choice == choice]
    beside = [part for part in parts if isinstance(part, AnswerTokens)]
    return (
        "".join(part.text for part in parts),
        "".join(part.reasoning for part in beside),
        [call for part in beside for call in part.tool_calls],
    )


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("buffer", [3, 4096])
def test_an_answer_is_parsed_in_each_choice_whatever_the_buffer(n, buffer):
    """Text that the parser held back comes before the choice's end, even if the stream is full."""

    async def body(engine):
        request = GenerateRequest(
            chat=Messages(ASK, tools=TOOLS), n=n, sampling=SamplingParams(max_tokens=100)
        )
        events = await events_of(engine, request)
        ids = set()
        for choice in range(n):
            text, reasoning, [call] = told(events, choice)
            assert (text, reasoning) == ("So. <tool_", "hm")
            assert call == ToolCallDelta(0, call.call_id, "add", '{"a": 1}')
            assert len(call.call_id) == 9
            assert call.call_id.isalnum()
            ids.add(call.call_id)
        assert len(ids) == n
        ends = [e.choice for e in events if isinstance(e, Finished)]
        assert sorted(ends) == list(range(n))

    run(body, FakeScript(words=WORDS, chat_template=TEMPLATE), buffer=buffer)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("buffer", [3, 4096])
def test_arguments_come_as_they_are_generated_if_the_client_wants_it(n, buffer):
    """The name comes before the arguments are whole; a call that is cut stays a call."""

    async def body(engine):
        asked = GenerateRequest(
            chat=Messages(ASK, tools=TOOLS), n=n, output={"tool_argument_deltas": True}
        )
        for most in (100, 6 + CALL.index("1")):
            sampling = SamplingParams(max_tokens=most)
            events = await events_of(engine, replace(asked, sampling=sampling))
            for choice in range(n):
                text, reasoning, [first, *rest] = told(events, choice)
                assert (text, reasoning) == ("So." + " <tool_" * (most == 100), "hm")
                assert (first.position, first.name, len(first.call_id)) == (0, "add", 9)
                assert len(rest) > 2
                assert {call[:3] for call in rest} == {(0, "", "")}
                written = "".join(call.arguments_json for call in (first, *rest))
                assert written == ('{"a": 1}' if most == 100 else '{"a": ')

    run(body, FakeScript(words=WORDS, chat_template=TEMPLATE), buffer=buffer)


@in_engine(FakeScript(words=WORDS, chat_template=TEMPLATE))
async def test_the_parser_looks_only_for_what_request_and_template_have(engine):
    without_tools = await events_of(engine, GenerateRequest(chat=Messages(ASK)))
    call = f"<tool_call>{CALL}</tool_call> <tool_"
    assert told(without_tools) == (f"So.\n{call}", "hm", [])
    for behind, expected in ((False, ("".join(WORDS), "")), (None, (f"So.\n{call}", "hm"))):
        form = Constraint("regex", ".*", reasoning=behind)
        constrained = GenerateRequest(chat=Messages(ASK, tools=TOOLS), constraint=form)
        assert told(await events_of(engine, constrained)) == (*expected, [])
    plain = await events_of(engine, GenerateRequest(text="hi"))
    assert not any(isinstance(event, AnswerTokens) for event in plain)
    assert "".join(e.text for e in plain if isinstance(e, Tokens)) == "".join(WORDS)


def test_a_call_that_the_request_demands_is_a_constraint_of_its_answer():
    compiled = []

    async def body(engine):
        for choice in ("add", "required"):
            request = GenerateRequest(chat=Messages(ASK, tools=TOOLS, tool_choice=choice))
            text, reasoning, [call] = told(await events_of(engine, request))
            assert (text, reasoning, call.name) == ("So. <tool_", "hm", "add")
        assert [constraint.kind for constraint in compiled] == ["tools", "tools"]
        request = GenerateRequest(chat=Messages(ASK, tools=TOOLS))
        await events_of(engine, request)
        assert len(compiled) == 2

    run(body, FakeScript(words=WORDS, chat_template=TEMPLATE, compile=compiled.append))


def test_a_gateways_structural_tag_is_compiled_as_a_grammar():
    compiled = []
    tag = '{"type": "structural_tag", "format": {"type": "const_string", "value": "ab"}}'
    constraint = Constraint("structural_tag", tag)

    async def body(engine):
        for asked in ({"text": "hi"}, {"token_ids": (1, 2)}, {"chat": Messages(ASK)}):
            for reasoning in (None, True, False):
                form = replace(constraint, reasoning=reasoning)
                await events_of(engine, GenerateRequest(**asked, constraint=form))

    run(body, FakeScript(words=WORDS, chat_template=TEMPLATE, compile=compiled.append))
    assert {one.kind for one in compiled} == {"lark"}
    assert all('"ab"' in one.source for one in compiled)


@pytest.mark.parametrize("num_chars", [1, 9000])
def test_the_grammar_of_large_tools_is_made_in_a_thread(num_chars, monkeypatch):
    """Red if the loop makes it: a megabyte of schemas would stop every stream."""
    jobs, stock = [], prepare_text.tool_constraint

    def make(*arguments):
        jobs.append([frame.f_code.co_name for frame, _ in traceback.walk_stack(None)])
        return stock(*arguments)

    async def body(engine):
        function = {**TOOLS[0]["function"], "description": "a" * num_chars}
        tools = [{**TOOLS[0], "function": function}]
        request = GenerateRequest(chat=Messages(ASK, tools=tools, tool_choice="add"))
        await events_of(engine, request)
        [names] = jobs
        assert ("prepare" in names) == (num_chars == 1)

    monkeypatch.setattr(prepare_text, "tool_constraint", make)
    run(body, FakeScript(words=WORDS, chat_template=TEMPLATE))


def test_tools_that_the_request_rules_out_are_kept_from_the_model_and_not_parsed():
    async def body(engine):
        request = GenerateRequest(chat=Messages(ASK, tools=TOOLS, tool_choice="none"))
        call = f"<tool_call>{CALL}</tool_call> <tool_"
        assert told(await events_of(engine, request)) == (f"So.\n{call}", "hm", [])
        assert rendered == [()]

    rendered = []

    class Recorder(FakeTokenizer):
        def render_chat(self, messages, *, tools=(), **others):
            rendered.append(tools)
            return super().render_chat(messages, tools=tools, **others)

    script = FakeScript(words=WORDS, chat_template=TEMPLATE)
    run(body, script, tokenizer=Recorder(script))


@in_engine(FakeScript(words=WORDS, chat_template="{{ tools }}"))
async def test_a_call_cannot_be_demanded_of_a_model_whose_format_is_unknown(engine):
    request = GenerateRequest(chat=Messages(ASK, tools=TOOLS, tool_choice="add"))
    with pytest.raises(Unsupported) as caught:
        await events_of(engine, request)
    assert caught.value.field == "chat.tool_choice"


def test_a_template_may_have_opened_the_reasoning():
    async def body(engine):
        events = await events_of(engine, GenerateRequest(chat=Messages(ASK)))
        assert told(events) == ("So", "hm", [])

    script = FakeScript(words=["hm", "</th", "ink>\n", "So"], chat_template=TEMPLATE)
    script.answer_opening = "<think>\n"
    run(body, script)


def test_a_form_from_the_first_token_is_text_though_the_template_opened_the_reasoning():
    """Such an answer closes no reasoning. Red if all of it counts as reasoning."""

    async def body(engine):
        form = Constraint("json_object", "", reasoning=False)
        request = GenerateRequest(chat=Messages(ASK), constraint=form)
        assert told(await events_of(engine, request)) == ('{"a": 1}', "", [])

    script = FakeScript(words=['{"a"', ": 1}"], chat_template=TEMPLATE)
    script.answer_opening = "<think>\n"
    run(body, script)


@in_engine(FakeScript(words=WORDS, chat_template=TEMPLATE))
async def test_tokens_are_all_there_beside_the_parsed_parts(engine):
    request = GenerateRequest(
        chat=Messages(ASK, tools=TOOLS), output=OutputOptions(logprobs=0, token_ids=True)
    )
    events = [e for e in await events_of(engine, request) if isinstance(e, Tokens)]
    assert sum(len(event.token_ids) for event in events) == len(WORDS) + 1
    assert sum(len(event.logprobs) for event in events) == len(WORDS) + 1


def test_a_chats_reasoning_is_sent_and_not_kept_in_the_conversation():
    async def body(engine):
        async with Chat(engine) as chat:
            answer = chat.ask("hi")
            assert await answer.read() == "So"
            assert answer.reasoning == "hm"
            assert chat.messages[-1] == {"role": "assistant", "content": "So"}

    words = ["<think>", "hm", "</think>", "So"]
    run(body, FakeScript(words=words, chat_template=TEMPLATE))


# ---- answers that are continued


def joined(parts):
    """Return text, reasoning, calls and end of one answer that came in several streams."""
    events = [event for part in parts for event in part]
    text, reasoning, calls = told(events)
    [end] = [event for event in events if isinstance(event, Finished)]
    calls = [(call.position, call.name, call.arguments_json) for call in calls]
    return text, reasoning, calls, end.reason, end.matched, end.usage.completion_tokens


def ids_of(events):
    return tuple(i for event in events if isinstance(event, Tokens) for i in event.token_ids)


@in_engine(FakeScript(words=WORDS, chat_template=TEMPLATE))
async def test_reasoning_and_calls_are_parsed_across_a_cut_after_any_token(engine):
    """Red without the event `Replayed`, from which the parser first reads the text that the stream
    had sent before the cut."""
    request = GenerateRequest(chat=Messages(ASK, tools=TOOLS))
    whole = await events_of(engine, request)
    count = len(ids_of(whole))
    assert count == len(WORDS) + 1
    for at in range(1, count + 1):
        had, taken = [], 0
        for event in whole:
            taken += len(event.token_ids) if isinstance(event, Tokens) else 0
            if taken > at or isinstance(event, Finished):
                break
            had.append(event)
        heard = Continuation((ContinuedChoice(ids_of(had)),))
        rest = await events_of(engine, replace(request, continuation=heard))
        assert joined([had, rest]) == joined([whole])
        assert rest[-1].usage.resumed_tokens == at
        assert len(ids_of(rest)) == count - at


@pytest.mark.parametrize(("begun", "has_reasoning"), [("<think>h", True), ("So <tool", False)])
def test_a_final_message_is_continued_and_its_beginning_is_parsed(begun, has_reasoning):
    """Red if the parser does not read the message's content first (`ChoiceParser.skip`)."""
    prompts = []

    async def body(engine):
        final = {"role": "assistant", "content": begun}
        chat = Messages((*ASK, final), tools=TOOLS, continue_final_message=True)
        events = await events_of(engine, GenerateRequest(chat=chat))
        text, reasoning, calls = told(events)
        if has_reasoning:
            assert (text, reasoning, calls) == ("So", "m", [])
        else:
            assert (text, reasoning) == ("", "")
            assert [(call.name, call.arguments_json) for call in calls] == [("add", '{"a": 1}')]
        assert prompts == [f"user: hi\nassistant: {begun}"]

    words = ["m", "</think>", "So"] if has_reasoning else ["_call>", CALL, "</tool_call>"]
    script = FakeScript(words=words, chat_template=TEMPLATE, answer_opening="\nassistant: ")

    class Recorder(FakeTokenizer):
        def encode(self, text, **options):
            prompts.append(text)
            return super().encode(text, **options)

    run(body, script, tokenizer=Recorder(script))


# ---- the context


@in_engine(FakeScript(), max_model_len=256)
async def test_a_full_chat_drops_its_middle_turns_and_reports_them(engine):
    async with Chat(engine, system="sys", sampling=SHORT) as chat:
        told_by_events, dropped = [], []
        for number in range(12):
            answer = chat.ask(f"question {number} {'x' * 20}")
            async for event in answer:
                if isinstance(event, Started):
                    told_by_events += event.dropped
            dropped += answer.dropped
        questions = [m["content"] for m in chat.messages if m["role"] == "user"]
        assert dropped
        assert told_by_events == dropped
        assert chat.messages[0] == {"role": "system", "content": "sys"}
        assert questions[0].startswith("question 0 ")
        assert questions[-1].startswith("question 11 ")
        everything = [m["content"] for m in dropped if m["role"] == "user"] + questions
        assert sorted(everything) == sorted(f"question {n} {'x' * 20}" for n in range(12))
        pairs = itertools.pairwise(m["role"] for m in chat.messages[1:])
        assert all(a != b for a, b in pairs)  # only whole turns were dropped


@in_engine(FakeScript(), max_model_len=256)
async def test_a_truncation_makes_room_for_several_turns(engine):
    async with Chat(engine, sampling=SHORT) as chat:
        truncations = []
        for number in range(20):
            answer = chat.ask(f"question {number}")
            await answer.read()
            truncations.append(bool(answer.dropped))
        assert sum(truncations) >= 2
        assert not any(a and b for a, b in itertools.pairwise(truncations))


@in_engine(FakeScript(), max_model_len=256)
async def test_an_answer_that_fails_leaves_the_conversation_whole(engine):
    async with Chat(engine, sampling=SHORT) as chat:
        for _ in range(2):
            await chat.ask("y" * 30).read()
        before = chat.messages
        answer = chat.ask("z" * 300)  # exceeds the context alone
        with pytest.raises(RequestTooLarge):
            await answer.read()
        assert chat.messages == before
        assert len(await chat.ask("w").read()) > 0


@in_engine(FakeScript(words=["a"]), max_model_len=256)
async def test_too_long_requests_without_truncation_are_refused(engine):
    long = tuple({"role": "user", "content": "x" * 50} for _ in range(10))
    with pytest.raises(RequestTooLarge):
        await events_of(engine, GenerateRequest(chat=Messages(long)))
    events = await events_of(engine, GenerateRequest(chat=Messages(long, truncates=True)))
    assert all(message["content"] == "x" * 50 for message in events[0].dropped)


@in_engine(FakeScript(answer_opening="\nassistant: "))
async def test_a_second_turn_computes_only_its_own_tokens(engine):
    """The second turn reuses all full blocks of the first one's prompt and answer."""
    async with Chat(engine, sampling=SHORT) as chat:
        ends = []
        for question in ("x" * 1000, "and then?"):
            events = [event async for event in chat.ask(question)]
            ends.append(events[-1].usage)
    first, second = ends
    known = first.prompt_tokens + first.completion_tokens - 1  # the last token is not computed
    assert first.cached_tokens == 0
    assert second.cached_tokens == known // 16 * 16


# ---- slow templates


class Slow(FakeTokenizer):
    def __init__(self, threads):
        self._threads = threads
        self._script = None

    def render_chat(self, messages, **options):
        self._threads.note_sleep(5.0)
        return super().render_chat(messages, **options)


@run_by(run_deterministically, 0)
async def test_a_slow_template_delays_neither_the_loop_nor_texts():
    threads = VirtualThreads()

    class Runner(FakeRunner):
        tokenizer = Slow(threads)

    make = partial(Runner, num_blocks=600, max_model_len=9000)
    async with fake_engine(FakeScript(step_s=0.01), make, threads=threads) as engine:
        began = trio.current_time()
        slow = engine.submit(GenerateRequest(chat=Messages(ASK), sampling=SHORT), buffer=9)
        await events_of(engine, GenerateRequest(text="hi" * 4000, sampling=SHORT))
        assert trio.current_time() - began < 1
        assert not slow.is_closed
        await slow.wait_closed()
        assert slow.error is None


@in_engine(FakeScript())
async def test_a_tokenizers_refusal_of_a_chat_names_the_chat(engine):
    lone = ({"role": "user", "content": "\ud800"},)
    with pytest.raises(InvalidRequest) as caught:
        await events_of(engine, GenerateRequest(chat=Messages(lone)))
    assert [violation.field for violation in caught.value.violations] == ["chat"]
    with pytest.raises(InvalidRequest) as caught:
        await engine.tokenize("", chat=Messages(lone))
    assert [violation.field for violation in caught.value.violations] == ["chat"]


@pytest.mark.parametrize("num_read", range(9))
@pytest.mark.parametrize("budget", [0, 3])
def test_a_cancel_in_any_phase_of_the_reasoning_frees_everything(num_read, budget):
    """While the form compiles, in the reasoning, at its forced end, and in the form."""
    script = FakeScript(chat_template=TEMPLATE, answer_opening="<think>")
    script.markers = {900: "<think>", 901: "</think>"}
    script.compile = lambda constraint: script.sleep(0.05)
    request = GenerateRequest(
        chat=Messages(ASK),
        n=2,
        constraint=Constraint("regex", "form"),
        reasoning={"budget_tokens": budget},
        sampling=SamplingParams(max_tokens=12, seed=1),
    )

    async def body(engine):
        tokens = ([], [])
        with trio.move_on_after(0.04 if num_read == 0 else 9):
            async with engine.generate(request) as stream:
                async for event in stream:
                    if isinstance(event, Tokens):
                        tokens[event.choice].extend(event.token_ids)
                    if sum(map(len, tokens)) >= num_read > 0:
                        break
        await engine.wait_idle()
        for own in tokens:
            assert 901 not in own[:budget]
            assert own[budget : budget + 1] in ([], [901])
        events = await events_of(engine, request)
        ends = [event for event in events if isinstance(event, Finished)]
        assert [end.usage.reasoning_tokens for end in ends] == [budget] * 2

    run(body, script)
