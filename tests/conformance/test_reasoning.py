"""Reasoning with a budget, and forms behind it, by the shipped model with templates that think.

It writes stories for thoughts. In "tokens" the markers are tokens of their own, in "text" they are
made of several, and in "channels" the answer is messages in channels.
"""

import json
import random
import re
from dataclasses import replace
from functools import partial

import jsonschema
import pytest
import trio
from tokenizers import Tokenizer

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.common.events import Finished
from engine.core.common.types import EndReason
from engine.core.text.types import MARGIN_MAX, Constraint
from engine.errors import InvalidRequest, Unsupported
from engine.requests.text.chat_values import Chat
from engine.requests.text.continuation import Continuation, ContinuedChoice
from engine.requests.text.values import AnswerTokens, GenerateRequest, Tokens
from tests.support.thinkers import KINDS, make_thinker

ASK = [{"role": "user", "content": "Tell me a story."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS = {
    "schema": (Constraint("json_schema", json.dumps(SCHEMA)), SCHEMA),
    "object": (Constraint("json_object", ""), {"type": "object"}),
    "regex": (Constraint("regex", "[a-f]{3,9}/[0-9]+x"), re.compile("[a-f]{3,9}/[0-9]+x")),
    "lark": (Constraint("lark", 'start: "yes" tail\ntail: /[!?]{2}/'), re.compile("yes[!?]{2}")),
    "choice": (Constraint("choice", "red\0green <b>"), re.compile("red|green <b>")),
}


@pytest.fixture(scope="module", params=KINDS)
def directory(request, tmp_path_factory):
    """Return the shipped model with a template that thinks."""
    return make_thinker(tmp_path_factory.mktemp("thinker"), request.param)


def engine(directory, **config):
    model = ModelConfig(str(directory), threads=1, **config.pop("model", {}))
    return open_engine(EngineConfig(models=(model,), check_level=2, **config))


async def answer(eng, n=1, *, begun=0, **fields):
    """Return each choice's reasoning, text, tokens, end and usage."""
    fields = {"chat": Chat(ASK)} | fields
    sampling = {"max_tokens": 200, "temperature": 0.0} | fields.pop("sampling", {})
    request = GenerateRequest(sampling=sampling, n=n, output={"token_ids": True}, **fields)
    found = [["", "", [], None] for _ in range(n)]
    async with eng.generate(request) as stream:
        async for event in stream:
            if isinstance(event, Finished):
                found[event.choice][3] = event
            elif isinstance(event, Tokens):
                own = found[event.choice]
                own[0] += event.reasoning if isinstance(event, AnswerTokens) else ""
                own[1] += event.text
                own[2] += event.token_ids
    return found


def is_valid(text, judge):
    if isinstance(judge, dict):
        jsonschema.validate(json.loads(text), judge)
        return True
    return judge.fullmatch(text) is not None


def opened(directory):
    """Return the settings with which the answer begins with reasoning."""
    template = (directory / "tokenizer_config.json").read_text()
    return {"reasoning": {"enabled": True}} if "{#</think>#}" in template else {}


async def test_a_greedy_thought_is_the_same_up_to_its_budget(directory):
    form = Constraint("regex", "[a-z ]{2,4}")  # it makes the model think where nothing else does
    begins = opened(directory)
    async with engine(directory) as eng:
        [[free, *_]] = await answer(eng, constraint=form, **begins)
        for budget in (0, 1, 9, 40):
            reasoning = {"budget_tokens": budget} | begins.get("reasoning", {})
            [[thought, text, tokens, end]] = await answer(eng, constraint=form, reasoning=reasoning)
            assert free.startswith(thought.rstrip())
            most = budget + min(MARGIN_MAX, budget // 4)
            assert end.usage.reasoning_tokens <= most
            assert free == thought or end.usage.reasoning_tokens >= budget
            assert budget > 9 or len(free) > len(thought)
            assert end.usage.completion_tokens == len(tokens)
            assert re.fullmatch("[a-z ]{2,4}", text)
            assert end.reason is EndReason.STOP
            # without a form, too, and for each of several choices with seeds of their own
            drawn = {"temperature": 1.0, "seed": 5, "max_tokens": 100}
            for thought, text, _, end in await answer(eng, 3, reasoning=reasoning, sampling=drawn):
                assert end.usage.reasoning_tokens <= most
                assert "think>" not in thought
                assert thought == "" or text


async def test_a_form_is_valid_behind_the_reasoning(directory):
    begins = opened(directory).get("reasoning", {})
    async with engine(directory) as eng:
        for form, judge in FORMS.values():
            ends = []
            for budget in (0, 17):
                reasoning = {"budget_tokens": budget} | begins
                drawn = {"temperature": 2.0, "seed": 9 + budget}
                found = await answer(eng, 4, constraint=form, reasoning=reasoning, sampling=drawn)
                for thought, text, _, end in found:
                    assert bool(thought.strip()) == bool(end.usage.reasoning_tokens)
                    ends.append(end.reason)
                    assert end.reason is EndReason.LENGTH or is_valid(text, judge)
            assert EndReason.STOP in ends
            first = replace(form, reasoning=False)
            for thought, text, _, end in await answer(eng, 2, constraint=first, sampling=drawn):
                assert thought == ""
                assert end.reason is EndReason.LENGTH or is_valid(text, judge)


async def test_drafts_preemptions_and_continuations_change_no_token(directory):
    form, _ = FORMS["schema"]
    begins = opened(directory).get("reasoning", {})
    drawn = {"temperature": 0.9, "seed": 3, "max_tokens": 90}
    requests = [
        {"reasoning": {"budget_tokens": budget} | begins, "constraint": constraint}
        for budget in (0, 3, 12, 33)
        for constraint in (form, None)
    ]
    ask = partial(answer, sampling=drawn)
    async with engine(directory, model={"speculation": "off"}, prefix_cache=False) as eng:
        expected = [await ask(eng, 2, **fields) for fields in requests]
        for fields, [first, second] in zip(requests, expected, strict=True):
            for cut in random.Random(1).sample(range(1, len(first[2]) - 1), 4):
                got = [ContinuedChoice(tuple(one)) for one in (first[2][:cut], second[2][:3])]
                rest = await ask(eng, 2, continuation=Continuation(tuple(got)), **fields)
                assert (rest[0][2], rest[1][2]) == (first[2][cut:], second[2][3:])
                counts = [own[3].usage.reasoning_tokens for own in (*rest, first, second)]
                assert counts[:2] == counts[2:]
                assert first[0].endswith(rest[0][0])
                assert first[1].endswith(rest[0][1])
    for config in ({}, {"max_model_len": 192, "kv_cache_memory": 0, "max_num_seqs": 16}):
        async with engine(directory, **config) as eng:
            found = [None] * len(requests)

            async def one(index, eng=eng, found=found):
                found[index] = await ask(eng, 2, **requests[index])

            async with trio.open_nursery() as nursery:
                for index in range(len(requests)):
                    nursery.start_soon(one, index)
            for got, wanted in zip(found, expected, strict=True):
                assert [one[:3] for one in got] == [one[:3] for one in wanted]


async def test_a_continuation_that_exceeds_its_budget_is_refused(directory):
    fields = {"reasoning": {"budget_tokens": 4} | opened(directory).get("reasoning", {})}
    fields["constraint"] = FORMS["regex"][0]
    async with engine(directory) as eng:
        [[_, _, tokens, _]] = await answer(eng, **fields)
        wrong = ContinuedChoice((*tokens[:4], *tokens[:4], *tokens[:4]))
        with pytest.raises(
            InvalidRequest, match=r"choices\[0\]\.token_ids\[\d+\]: does not follow"
        ):
            await answer(eng, continuation=Continuation((wrong,)), **fields)


async def test_reasoning_that_is_switched_off_is_empty(directory):
    async with engine(directory) as eng:
        for constraint in (None, FORMS["schema"][0]):
            off = {"reasoning": {"enabled": False}, "constraint": constraint}
            for thought, text, _, end in await answer(eng, 3, sampling={"temperature": 1.5}, **off):
                assert (thought, end.usage.reasoning_tokens) == ("", 0)
                assert text


async def test_a_budget_needs_the_marker_that_ends_the_reasoning(directory):
    end = "<|end|>" if directory.name == "channels" else "</think>"
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = backend.encode(end, add_special_tokens=False).ids
    cases = {
        "sampling.banned_token_ids": {"banned_token_ids": [40, ids[0]]},
        "sampling.allowed_token_ids": {"allowed_token_ids": [40, 41, *ids[1:]]},
        "sampling.bad_words[1]": {"bad_words": ["fine", end]},
    }
    async with engine(directory) as eng:
        for field, sampling in cases.items():
            for fields in ({"reasoning": {"budget_tokens": 9}}, {"constraint": FORMS["regex"][0]}):
                with pytest.raises(InvalidRequest) as caught:
                    await answer(eng, sampling=sampling, **fields)
                assert [violation.field for violation in caught.value.violations] == [field]
            await answer(eng, sampling=sampling | {"max_tokens": 3})


async def test_a_budget_beside_a_form_without_free_reasoning_is_refused(directory):
    """Where the form's grammar says where reasoning ends, or the chat has begun the answer."""
    end = "<|channel|>" if directory.name == "channels" else "</think>"
    spelled = Constraint("lark", f'start: /[a-z ]+/ "{end}" /[0-9]/')
    begun = Chat([*ASK, {"role": "assistant", "content": "Once"}], continue_final_message=True)
    cases = [{"constraint": spelled}, {"constraint": FORMS["regex"][0], "chat": begun}]
    async with engine(directory) as eng:
        for fields in cases:
            with pytest.raises(InvalidRequest) as caught:
                await answer(eng, reasoning={"budget_tokens": 9}, **fields)
            named = [violation.field for violation in caught.value.violations]
            assert named == ["reasoning.budget_tokens"]


async def test_a_model_that_does_not_reason_refuses_a_budget_and_begins_forms_at_once():
    form = Constraint("choice", "red\0green", reasoning=True)
    async with engine("demo-stories") as eng:
        for reasoning in ({"budget_tokens": 9}, {"enabled": True}):
            with pytest.raises(Unsupported, match="marks no reasoning") as caught:
                await answer(eng, reasoning=reasoning)
            assert caught.value.field == f"reasoning.{next(iter(reasoning))}"
        [[_, text, _, end]] = await answer(eng, constraint=form)
        assert (text in ("red", "green"), end.usage.reasoning_tokens) == (True, 0)
        await answer(eng, reasoning={"enabled": False}, sampling={"max_tokens": 3})


async def test_a_prompt_that_ends_within_reasoning_goes_on_with_it(directory):
    prompt = "<think>Hm </think> no. <think>Once upon a time"
    if directory.name == "channels":
        prompt = "<|start|>assistant<|channel|>analysis<|message|>Once upon a time"
    form = Constraint("regex", "[xyz]{3}", reasoning=True)
    fields = {"chat": None, "constraint": form, "reasoning": {"budget_tokens": 12}}
    async with engine(directory) as eng:
        [[_, text, tokens, end]] = await answer(eng, text=prompt, **fields)
        assert re.search(r"\w+ .*[xyz]{3}$", text, re.DOTALL)
        assert 12 <= end.usage.reasoning_tokens <= 15
        spans, _ = await eng.tokenize("", text=prompt)
        prompt_ids = [span.token_id for span in spans]
        [[_, *again, end_too]] = await answer(eng, token_ids=prompt_ids, **fields)
        assert again == [text, tokens]
        assert end_too.usage.reasoning_tokens == end.usage.reasoning_tokens
