"""Every field of Generate, Classify and EmbedStream that can be invalid, with an invalid value and
its violation.

Each field is in exactly one of three tables: invalid before a model is chosen, invalid only for a
model (`tests/service/test_bad_input.py` sends these, and `test_demo_chat.py` the arguments of chat
templates), and never invalid.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.requests.encode.values import EmbedStreamRequest
from grpc_service.client import messages as pb
from grpc_service.services import classify_codec, encode_codec, text_codec

CALL = {"name": "f", "arguments_json": "{}"}
CHAT = {"messages": [{"role": "user", "content": "x"}]}

INVALID = {
    "token_ids.ids": [{"token_ids": {"ids": []}}],
    "chat.messages": [{"chat": {}}],
    "chat.messages.role": [{"chat": {"messages": [{"content": "x"}]}}],
    "chat.messages.content": [
        {"chat": {"messages": [{"role": "user", "content": "x", "parts": [{"text": "y"}]}]}}
    ],
    "chat.messages.parts": [{"chat": {"messages": [{"role": "user", "parts": [{}]}]}}],
    "chat.tool_choice": [
        {"chat": {"messages": [{"role": "user"}], "tool_choice": "required"}},
        {"chat": {"messages": [{"role": "user"}], "tools": [{"name": "f"}], "tool_choice": "g"}},
        {
            "chat": {"messages": [{"role": "user"}], "tools": [{"name": "f"}], "tool_choice": "f"},
            "constraint": {"regex": "a"},
        },
        {
            "chat": {
                "messages": [{"role": "assistant", "content": "x"}],
                "tools": [{"name": "f"}],
                "tool_choice": "f",
                "continue_final_message": True,
            }
        },
    ],
    "chat.continue_final_message": [
        {"chat": {"messages": messages, "continue_final_message": True}}
        for messages in (
            [{"role": "user", "content": "x"}],
            [{"role": "assistant", "content": ""}],
            [{"role": "assistant", "content": "x", "tool_calls": [CALL]}],
        )
    ],
    "chat.add_generation_prompt": [
        {
            "chat": {
                "messages": [{"role": "assistant", "content": "x"}],
                "add_generation_prompt": True,
                "continue_final_message": True,
            }
        }
    ],
    "continuation.choices": [
        {"continuation": {"choices": [{"token_ids": [1]}] * 2}},
        {"continuation": {"choices": [{"finished": True}]}},
        {"n": 2, "continuation": {"choices": [{"finished": True}] * 2}},
    ],
    "continuation.seed": [{"sampling": {"seed": 1}, "continuation": {"seed": 0}}],
    "resume_window": [{"resume_window": {"seconds": s}} for s in (-1, 0, 3601)],
    "n": [{"n": 0}, {"n": 17}],
    "request_id": [{"request_id": "x" * 129}, {"request_id": "a\nb"}],
    "constraint.json_schema": [{"constraint": {"json_schema": ""}}],
    "constraint.json_object": [{"constraint": {"json_object": False}}],
    "constraint.regex": [
        {"constraint": {"regex": ""}},
        {"constraint": {"regex": "x" * 65_537}},
    ],
    "constraint.lark": [{"constraint": {"lark": ""}}],
    "constraint.choice.choices": [
        {"constraint": {"choice": {}}},
        {"constraint": {"choice": {"choices": ["x" * 70_000]}}},
        {"constraint": {"choice": {"choices": ["a\0b"]}}},
    ],
    "constraint.reasoning": [
        {
            "chat": {
                "messages": [{"role": "assistant", "content": "x"}],
                "continue_final_message": True,
            },
            "constraint": {"regex": "a", "reasoning": True},
        },
        {
            "chat": CHAT,
            "constraint": {"regex": "a", "reasoning": True},
            "reasoning": {"enabled": False},
        },
    ],
    "reasoning.enabled": [{"reasoning": {"enabled": value}} for value in (False, True)],
    "reasoning.budget_tokens": [
        {"chat": CHAT, "reasoning": {"enabled": False, "budget_tokens": 3}},
        {
            "chat": CHAT,
            "constraint": {"regex": "a", "reasoning": False},
            "reasoning": {"budget_tokens": 3},
        },
    ],
    "prompt.truncate_to": [{"prompt": {"truncate_to": 0}}],
    "prompt.add_special_tokens": [
        {"token_ids": {"ids": [1]}, "prompt": {"add_special_tokens": value}}
        for value in (False, True)
    ],
    "output.logprobs": [{"output": {"logprobs": 21}}],
    "output.prompt_logprobs": [{"output": {"prompt_logprobs": 21}}],
} | {
    f"sampling.{name}": [{"sampling": one} for one in ones]
    for name, ones in {
        **{
            name: [{name: value} for value in (low, high, math.nan, math.inf, -math.inf)]
            for name, low, high in (
                ("temperature", -0.1, 100.1),
                ("top_p", 0.0, 1.1),
                ("min_p", -0.1, 1.1),
                ("typical_p", -0.1, 1.1),
                ("repetition_penalty", 0.0, -1.0),
                ("presence_penalty", -2.1, 2.1),
                ("frequency_penalty", -2.1, 2.1),
            )
        },
        "max_tokens": [{"max_tokens": 0}],
        "min_tokens": [{"min_tokens": 3, "max_tokens": 2}],
        "stop": [{"stop": [""]}, {"stop": ["x" * 257]}, {"stop": ["x"] * 17}],
        "bad_words": [{"bad_words": [""]}, {"bad_words": ["x" * 257]}, {"bad_words": ["x"] * 65}],
        "logit_bias": [{"logit_bias": {1: 100.1}}, {"logit_bias": dict.fromkeys(range(1025), 0.0)}],
    }.items()
}
ONLY_THE_MODEL_KNOWS = {
    "model",
    "text",
    "chat.template_args",
    "chat.messages.parts.image",  # only a model that reads images decodes the image
    "sampling.stop_token_ids",
    "sampling.allowed_token_ids",
    "sampling.banned_token_ids",
    "continuation.choices.token_ids",
}
ANY_VALUE = {
    "priority",  # every int32 is valid
    "background",
    "sampling.top_k",  # 0 turns it off, and more than the vocabulary means all
    "sampling.seed",
    "sampling.ignore_eos",
    "sampling.include_stop",
    "sampling.speculation",
    "prompt.truncate_left",
    "prompt.cache_salt",
    "prompt.bypass_prefix_cache",
    "output.token_ids",
    "output.echo",
    "output.skip_special_tokens",
    "output.tool_argument_deltas",
    "output.progress",
    "chat.messages.parts.text",
    "chat.messages.name",
    "continuation.choices.finished",
}
# tests/unit/test_codec_chat.py has invalid tools and tool calls.
NOT_HERE = ("chat.tools", "chat.messages.tool_call")


@dataclass
class Tables:
    """The tables of a message's fields. ``validate`` decodes and checks a message; a field of
    ``not_here`` has its tests elsewhere. A path of ``invalid`` may also be of a whole message."""

    message: Any
    validate: Callable[[Any], None]
    invalid: dict[str, list[dict[str, Any]]]
    only_the_model_knows: set[str]
    any_value: set[str]
    not_here: tuple[str, ...]

    @property
    def name(self):
        return self.message.DESCRIPTOR.name


ENTITIES = {"aggregation": "AGGREGATION_SIMPLE"}
CLASSIFY = Tables(
    pb.ClassifyRequest,
    lambda message: classify_codec.decode_classify(message).validate(),
    invalid={
        "inputs": [{}, {"inputs": [{}]}, {"inputs": [{"text": "a"}] * 2049}],
        "inputs.token_ids.ids": [{"inputs": [{"token_ids": {}}]}],
        "inputs.token_ids": [{"inputs": [{"token_ids": {"ids": [1]}}]} | ENTITIES],
        "inputs.pair": [{"inputs": [{"pair": {"text": "a", "text_pair": "b"}}]} | ENTITIES],
        "activation": [{"activation": 77}, {"activation": "ACTIVATION_SOFTMAX"} | ENTITIES],
        "aggregation": [{"aggregation": 77}],
        "top_k": [{"top_k": 0}, {"top_k": 3} | ENTITIES],
        "request_id": [{"request_id": "x" * 129}, {"request_id": "a\nb"}],
    },
    only_the_model_knows={"model", "inputs.text", "inputs.pair.text", "inputs.pair.text_pair"},
    any_value={"priority", "truncate", "background"},
    not_here=(),
)
SPARSE = {"kind": "VECTOR_KIND_SPARSE"}
BYTES = {"precision": "PRECISION_INT8"}
NO_NUMBERS = (math.nan, math.inf, -math.inf)


def of_stream(message):
    """Check an EmbedStream's first message."""
    EmbedStreamRequest(encode_codec.decode_embed_stream(message).parameters, None).validate()


EMBED_STREAM = Tables(
    pb.EmbedStreamRequest,
    of_stream,
    invalid={
        f"parameters.{name}": [{"parameters": one} for one in ones]
        for name, ones in {
            "inputs": [{"inputs": [{"text": "a"}]}, {"inputs": [{}]}],
            "dimensions": [{"dimensions": 0}, {"dimensions": 1} | SPARSE],
            "normalize": [{"normalize": value} | SPARSE for value in (False, True)],
            "prompt_name": [{"prompt_name": "x" * 129}],
            "request_id": [{"request_id": "x" * 129}, {"request_id": "a\nb"}],
            "precision": [{"precision": 77}, BYTES | SPARSE],
            "ranges": [
                {"ranges": {"low": [0, 0], "high": [1]}} | BYTES,
                {"ranges": {"low": [0], "high": [1]}},
                {"ranges": {"low": [0], "high": [1]}} | BYTES | {"precision": "PRECISION_BINARY"},
            ],
            "ranges.low": [{"ranges": {"low": [x], "high": [1]}} | BYTES for x in NO_NUMBERS],
            "ranges.high": [
                *({"ranges": {"low": [0], "high": [x]}} | BYTES for x in NO_NUMBERS),
                {"ranges": {"low": [0, 1], "high": [1, 0.5]}} | BYTES,
            ],
            "kind": [{"kind": 77}],
            "top_k": [{"top_k": 0} | SPARSE, {"top_k": 1}],
            "threshold": [{"threshold": x} | SPARSE for x in (-0.1, *NO_NUMBERS)]
            + [{"threshold": 0.5}],
        }.items()
    },
    only_the_model_knows={"parameters.model"},
    any_value={
        *("parameters.truncate", "parameters.priority", "parameters.background", "inputs.index")
    },
    # A wrong input has an error of its own, beside the vectors of others
    # (tests/service/test_embed_stream.py); messages with too many are in test_value_counts.py.
    not_here=("parameters.inputs.", "inputs"),
)
GENERATE = Tables(
    pb.GenerateRequest,
    lambda message: text_codec.decode_generate(message).validate(),
    INVALID,
    ONLY_THE_MODEL_KNOWS,
    ANY_VALUE,
    NOT_HERE,
)
TABLES = (GENERATE, CLASSIFY, EMBED_STREAM)


def leaves(descriptor, prefix=""):
    """Yield the paths of all fields that are no messages."""
    for field in descriptor.fields:
        path, inner = f"{prefix}{field.name}", field.message_type
        is_ours = inner is not None and inner.file.package == "triolet.v1"
        if not is_ours or inner.GetOptions().map_entry:
            yield path
        else:
            if field.is_repeated:
                yield path
            yield from leaves(inner, f"{path}.")


@pytest.mark.parametrize("tables", TABLES, ids=lambda tables: tables.name)
def test_every_field_is_in_exactly_one_table(tables):
    paths = {*leaves(tables.message.DESCRIPTOR)} - tables.any_value
    every = tables.any_value | {one for one in paths if not one.startswith(tables.not_here)}
    wholes = {path for path in tables.invalid if any(one.startswith(f"{path}.") for one in paths)}
    known = [{*tables.invalid} - (wholes - every), tables.only_the_model_knows, tables.any_value]
    assert set().union(*known) == every
    assert sum(map(len, known)) == len(every)


CASES = [
    pytest.param(tables, path, fields, id=f"{tables.name}-{path}-{str(fields)[:50]}")
    for tables in TABLES
    for path, several in tables.invalid.items()
    for fields in several
]


@pytest.mark.parametrize(("tables", "path", "fields"), CASES)
def test_an_invalid_value_is_named_and_nothing_else_is(tables, path, fields):
    given = fields
    if tables is GENERATE and not fields.keys() & {"chat", "token_ids"}:
        given = {"text": "a"} | fields
    elif tables is CLASSIFY and path != "inputs":
        given = {"inputs": [{"text": "a"}]} | fields
    with pytest.raises(InvalidRequest) as caught:
        tables.validate(tables.message(**given))
    [violation] = caught.value.violations
    assert re.sub(r"\[[^]]*\]", "", violation.field) == path
    assert violation.description
