"""What a Python program may write for the fields of a request, and what any other value raises."""

import math
from pathlib import Path

import numpy as np
import pytest

import engine
from engine import Chat, EmbedRequest, GenerateRequest, ModelConfig, RerankRequest, SamplingParams
from engine.api import arguments
from engine.config import DEMO_MODELS, EngineConfig, engine_config
from engine.errors import InvalidRequest
from engine.requests.text.values import validate_tokenize

USER = {"role": "user", "content": "hi"}


def ranged(low, high, *, precision="uint8"):
    """Return an Embed request with ranges."""
    return EmbedRequest(inputs=["a"], precision=precision, ranges=(low, high))


@pytest.mark.parametrize(
    ("made", "given", "becomes"),
    [
        (SamplingParams, {"stop": "\n"}, {"stop": ("\n",)}),
        (SamplingParams, {"bad_words": ["a", "b"]}, {"bad_words": ("a", "b")}),
        (
            SamplingParams,
            {"stop": None, "stop_token_ids": None},
            {"stop": (), "stop_token_ids": ()},
        ),
        (SamplingParams, {"allowed_token_ids": range(3)}, {"allowed_token_ids": (0, 1, 2)}),
        (SamplingParams, {"logit_bias": {np.int64(7): 1}}, {"logit_bias": {7: 1.0}}),
        (SamplingParams, {"top_p": np.float32(0.5)}, {"top_p": 0.5}),
        (GenerateRequest, {"token_ids": np.array([1, 2])}, {"token_ids": (1, 2)}),
        (Chat, {"messages": [USER]}, {"messages": (USER,)}),
        (EmbedRequest, {"inputs": "one text"}, {"inputs": ("one text",)}),
        (EmbedRequest, {"inputs": ["a", [1, 2]]}, {"inputs": ("a", (1, 2))}),
        (
            EmbedRequest,
            {"inputs": ("a",), "precision": "int8", "ranges": np.array([[0, 1], [2, 3]], "f")},
            {"inputs": ("a",), "precision": "int8", "ranges": ((0.0, 1.0), (2.0, 3.0))},
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_that_can_mean_only_one_thing_is_taken_so(made, given, becomes):
    one = made(**given)
    assert {name: getattr(one, name) for name in given} == becomes


def test_options_may_be_mappings_of_their_fields():
    request = GenerateRequest(
        text="a",
        sampling={"max_tokens": 3, "stop": "."},
        prompt={"truncate_to": 4},
        output={"echo": True},
    )
    assert request == GenerateRequest(
        text="a",
        sampling=SamplingParams(max_tokens=3, stop=(".",)),
        prompt=engine.PromptOptions(truncate_to=4),
        output=engine.OutputOptions(echo=True),
    )


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: GenerateRequest(text=5),
            "GenerateRequest.text takes a text, not 5 (int)",
        ),
        (
            lambda: GenerateRequest(text="a", n="2"),
            "GenerateRequest.n takes a whole number, not '2' (str)",
        ),
        (
            lambda: GenerateRequest(text="a", model=None),
            "GenerateRequest.model takes a text, not None",
        ),
        (
            lambda: GenerateRequest(chat=[USER]),
            "GenerateRequest.chat takes an engine.Chat, not [{",
        ),
        (
            lambda: GenerateRequest(text="a", constraint="a+"),
            "GenerateRequest.constraint takes an engine.Constraint, not 'a+' (str)",
        ),
        (
            lambda: GenerateRequest(token_ids="abc"),
            "GenerateRequest.token_ids takes a list of token ids, not 'abc' (str)",
        ),
        (
            lambda: GenerateRequest(token_ids=(1, 2.5)),
            "GenerateRequest.token_ids takes a list of token ids, not (1, 2.5) (tuple)",
        ),
        (
            lambda: GenerateRequest(text="a", sampling=5),
            "GenerateRequest.sampling takes SamplingParams or a mapping of its fields, not 5 (int)",
        ),
        (
            lambda: GenerateRequest(text="a", sampling={"max_token": 5}),
            "GenerateRequest.sampling has no field 'max_token'; its fields are temperature, top_p,",
        ),
        (
            lambda: GenerateRequest(text="a", sampling={"temperature": "hot"}),
            "SamplingParams.temperature takes a number, not 'hot' (str)",
        ),
        (
            lambda: SamplingParams(max_tokens=40.0),
            "SamplingParams.max_tokens takes a whole number, not 40.0 (float)",
        ),
        (
            lambda: SamplingParams(ignore_eos=1),
            "SamplingParams.ignore_eos takes True or False, not 1 (int)",
        ),
        (
            lambda: SamplingParams(stop=(1,)),
            "SamplingParams.stop takes a list of texts, not (1,) (tuple)",
        ),
        (
            lambda: SamplingParams(logit_bias=((7, 1.0),)),
            "SamplingParams.logit_bias takes a mapping of token ids to numbers, not ((7, 1.0),)",
        ),
        (
            lambda: SamplingParams(logit_bias={"7": 1.0}),
            "SamplingParams.logit_bias takes a mapping of token ids to numbers, not {'7': 1.0}",
        ),
        (
            lambda: Chat("hello"),
            "Chat.messages takes a list of mappings, each with role and content, not 'hello' (str)",
        ),
        (
            lambda: Chat([USER], tools=[print]),
            "Chat.tools takes a list of mappings, each with a function, not [<built-in",
        ),
        (
            lambda: EmbedRequest(inputs=[3]),
            "EmbedRequest.inputs takes a list of texts, lists of token ids, or bytes of images",
        ),
        (
            lambda: EmbedRequest(inputs=["a"], precision="int8", ranges=[[0.0]]),
            "EmbedRequest.ranges takes two lists of numbers, the least and the greatest, not",
        ),
        (
            lambda: RerankRequest(query=["a"], documents="b"),
            "RerankRequest.query takes a text, not ['a'] (list)",
        ),
        (
            lambda: EngineConfig(models=[5]),
            "EngineConfig.models takes names, paths and ModelConfigs, not 5",
        ),
        (
            lambda: engine_config({"models": "x"}),
            "open_engine takes an EngineConfig or a model's name, not dict",
        ),
        (
            lambda: arguments.request_of("generate", [USER]),
            "generate takes a text or an engine.GenerateRequest, not [{",
        ),
        (
            lambda: arguments.request_of("embed", ["a"]),
            "embed takes an engine.EmbedRequest, which has the inputs, not ['a'] (list)",
        ),
        (
            lambda: arguments.request_of("rerank", "a"),
            "rerank takes an engine.RerankRequest, which has query and documents, not 'a' (str)",
        ),
        (
            lambda: arguments.completion_request("a", {"max_token": 5}),
            "complete has no field 'max_token'; its fields are temperature, top_p,",
        ),
        (
            lambda: validate_tokenize(None, [USER]),
            "chat takes an engine.Chat, not [{",
        ),
        (
            lambda: validate_tokenize(5, None),
            "text takes a text, not 5 (int)",
        ),
        (
            lambda: engine.handles.Encoder(None, function=print).embed("one text"),
            "inputs takes a list of texts; for one text, give [text]",
        ),
        (
            lambda: engine.handles.CrossEncoder(None, function=print).rank("q", "one text"),
            "documents takes a list of texts; for one text, give [text]",
        ),
        (
            lambda: engine.handles.Chat(None, sampling=5),
            "sampling takes SamplingParams or a mapping of its fields, not 5 (int)",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_named_with_what_is_wanted(make, sentence):
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: GenerateRequest(), "input"),
        (lambda: GenerateRequest(text="a", n=17), "n"),
        (lambda: GenerateRequest(text="a", sampling={"top_p": 7}), "sampling.top_p"),
        (lambda: GenerateRequest(text="a", output={"logprobs": 21}), "output.logprobs"),
        (lambda: GenerateRequest(chat=Chat([])), "chat.messages"),
        (lambda: EmbedRequest(), "inputs"),
        (lambda: EmbedRequest(inputs=["a"], dimensions=0), "dimensions"),
        (lambda: EmbedRequest(inputs=["a"], precision="int4"), "precision"),
        (lambda: ranged([1.0], [0.5]), "ranges.high[0]"),
        (lambda: ranged([0.0, 1e39], [0.5, 2.0]), "ranges.low[1]"),
        (lambda: ranged([0.0], [math.nan]), "ranges.high[0]"),
        (lambda: ranged([-2e38], [2e38]), "ranges.high[0]"),
        (lambda: ranged([0.0], [1.0, 2.0]), "ranges"),
        (lambda: ranged([0.0], [1.0], precision="binary"), "ranges"),
        (lambda: RerankRequest(documents=["a"]), "query"),
        (lambda: arguments.completion_request("a", {"top_p": 7}), "sampling.top_p"),
        (lambda: arguments.completion_request(GenerateRequest(text="a", n=2), {}), "n"),
    ],
)
def test_a_value_out_of_range_is_named_where_the_request_is_made(make, field):
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert [violation.field for violation in caught.value.violations] == [field]


def test_a_name_or_a_path_stands_for_a_model():
    for given in ("org/a", Path("org/a"), ModelConfig("org/a")):
        assert EngineConfig(models=given).models == (ModelConfig("org/a"),)
        assert EngineConfig(models=[given]).models == (ModelConfig("org/a"),)
        assert engine_config(given) == EngineConfig(models=(ModelConfig("org/a"),))
    assert [model.model for model in engine_config(None).models] == list(DEMO_MODELS)
    assert EngineConfig(models=("a", "b")).models == (ModelConfig("a"), ModelConfig("b"))


def test_the_options_of_complete_override_the_requests():
    request = GenerateRequest(text="a", sampling={"max_tokens": 3, "seed": 7})
    made = arguments.completion_request(request, {"max_tokens": 5})
    assert made == GenerateRequest(text="a", sampling=SamplingParams(max_tokens=5, seed=7))
