"""VllmEngine's messages: requests decoded, events encoded, ports configured, tokenizers packed."""

import hashlib
import io
import zipfile
from dataclasses import replace

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engine.config import EngineConfig, ModelConfig
from engine.core.common.events import Finished
from engine.core.common.types import EndReason, RequestId, Timings, Usage
from engine.core.text.types import Alternative, Constraint, TokenLogprob, Tokens
from engine.errors import ConfigError, InvalidRequest, RequestTooLarge, Unsupported
from engine.requests.text.values import OutputOptions, SamplingParams, Started
from engine.status import Capability
from engine.worker.encode.interface import EncoderInfo
from engine.worker.text.interface import ModelInfo, SamplingDefaults
from grpc_service.app import gateway_ports
from grpc_service.app.gateway_ports import check_gateways, ports_by_model
from grpc_service.app.server_config import ServerConfig
from grpc_service.vllm_engine import answer_encoder, model_info
from grpc_service.vllm_engine.answer_encoder import GenerateEncoder
from grpc_service.vllm_engine.model_info import encode_info, tokenizer_chunks
from grpc_service.vllm_engine.request_codec import decode_embed, decode_generate

TOKENS = pb.TokenizedInput(original_text="not read", input_ids=[1, 2, 3])


def asked(**fields):
    fields = {"request_id": "r1", "tokenized": TOKENS} | fields
    return decode_generate(pb.GenerateRequest(**fields), "stories", 100, 30.0)


def sampled(**params):
    return asked(sampling_params=pb.SamplingParams(**params))


# ---- requests


def test_a_request_without_options_has_none_but_those_of_zeros_that_switch_off():
    request = asked()
    assert (request.model, request.request_id, request.timeout_s) == ("stories", "r1", 30.0)
    assert (request.token_ids, request.text, request.n) == ((1, 2, 3), None, 1)
    assert request.sampling == SamplingParams(top_k=0, min_p=0.0)
    assert request.output == OutputOptions(skip_special_tokens=False)
    assert asked(text="once").text == "once"


def test_every_option_reaches_the_engine():
    request = sampled(
        temperature=0.0,
        top_p=0.5,
        top_k=4,
        min_p=0.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        max_tokens=7,
        min_tokens=2,
        stop=["x"],
        stop_token_ids=[9],
        skip_special_tokens=True,
        ignore_eos=True,
        n=3,
        logprobs=2,
        prompt_logprobs=0,
        seed=7,
        include_stop_str_in_output=True,
        logit_bias={5: -1.0, 4: 2.0},
        truncate_prompt_tokens=2,
    )
    assert request.sampling == SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=4,
        min_p=0.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        max_tokens=7,
        min_tokens=2,
        stop=("x",),
        stop_token_ids=(9,),
        ignore_eos=True,
        seed=7,
        include_stop=True,
        logit_bias={4: 2.0, 5: -1.0},
    )
    assert request.n == 3
    assert request.output == OutputOptions(logprobs=2, prompt_logprobs=0, skip_special_tokens=True)
    assert (request.prompt.truncate_to, request.prompt.truncate_left) == (2, True)


def test_numbers_that_have_another_meaning_there_are_translated():
    assert sampled(truncate_prompt_tokens=-1).prompt.truncate_to == 99  # the context is 100 tokens
    assert sampled(seed=-1).sampling.seed == 2**64 - 1
    assert sampled(max_tokens=0).sampling.max_tokens == 0  # the engine refuses the value


@pytest.mark.parametrize(
    ("params", "constraint"),
    [
        ({"json_schema": "{}"}, Constraint("json_schema", "{}")),
        ({"regex": "a+"}, Constraint("regex", "a+")),
        ({"grammar": 'start: "a"'}, Constraint("lark", 'start: "a"')),
        ({"structural_tag": "{}"}, Constraint("structural_tag", "{}")),
        ({"json_object": True}, Constraint("json_object", "")),
        ({"json_object": False}, None),
        ({"choice": pb.ChoiceConstraint(choices=["a", "b"])}, Constraint("choice", "a\0b")),
        ({}, None),
    ],
)
def test_constraints(params, constraint):
    """They begin behind the reasoning, unless the gateway has written rules for it."""
    for from_first in (False, True):
        made = sampled(**params, grammar_from_first_token=from_first).constraint
        wanted = None if constraint is None else replace(constraint, reasoning=not from_first)
        assert made == wanted


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"mm_inputs": {}}, "mm_inputs"),
        ({"extra_mm_inputs": [{}]}, "extra_mm_inputs"),
        ({"media_refs": {}}, "media_refs"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields, field):
    with pytest.raises(Unsupported, match=field) as caught:
        asked(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"tokenized": None}, "input"),
        ({"sampling_params": {"choice": {}}}, "sampling_params.choice.choices"),
    ],
)
def test_what_is_invalid_is_refused_by_name(fields, field):
    with pytest.raises(InvalidRequest) as caught:
        asked(**fields)
    assert [one.field for one in caught.value.violations] == [field]


def test_every_field_of_a_request_is_read_or_refused():
    """Red if a new version of the protos has a field that is neither read nor refused."""
    decided = {
        pb.GenerateRequest: {
            *("request_id", "tokenized", "text", "sampling_params", "stream"),
            *("kv_transfer_params", "kv_transfer_params_json", "data_parallel_rank"),
            *("mm_inputs", "extra_mm_inputs", "media_refs"),
        },
        pb.SamplingParams: {
            *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "n"),
            *("frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos"),
            *("stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
            *("spaces_between_special_tokens", "grammar_from_first_token", "logit_bias"),
            *("logprobs", "prompt_logprobs", "truncate_prompt_tokens"),
            *("json_schema", "regex", "grammar", "structural_tag", "json_object", "choice"),
        },
        pb.EmbedRequest: {"request_id", "tokenized"},
    }
    for message, names in decided.items():
        assert set(message.DESCRIPTOR.fields_by_name) == names


def test_an_embed_request_has_one_input():
    request = decode_embed(pb.EmbedRequest(request_id="r", tokenized=TOKENS), "words", 5.0)
    assert (request.model, request.inputs, request.timeout_s) == ("words", ((1, 2, 3),), 5.0)
    with pytest.raises(InvalidRequest, match="tokenized: is not set"):
        decode_embed(pb.EmbedRequest(), "words", 5.0)


# ---- answers

ID = RequestId("r1")
STARTED = Started("r1", "stories", 3)


def scored(token, *others):
    """Return a token's log-probability with alternatives."""
    alternatives = tuple(
        Alternative(other, "", -float(other), rank) for rank, other in enumerate(others)
    )
    return TokenLogprob(token, "", -float(token), alternatives)


def tokens(*ids, choice=0, logprobs=()):
    return Tokens(ID, choice, ids, "not sent", tuple(logprobs))


def finished(choice=0, matched=None, reason=EndReason.LENGTH):
    """Return a choice's end after two tokens."""
    return Finished(ID, choice, reason, Usage(3, 1, 2), Timings(), matched)


def test_a_stream_has_a_chunk_for_each_event_and_one_complete_for_each_choice():
    encoder = GenerateEncoder(is_stream=True, alternatives=None)
    events = [
        STARTED,
        tokens(7),
        tokens(5, choice=1),
        tokens(8),
        finished(matched="x", reason=EndReason.STOP),
        finished(1, matched=5, reason=EndReason.STOP),
    ]
    chunk, complete = pb.GenerateStreamChunk, pb.GenerateComplete
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1}
    assert [getattr(one, one.WhichOneof("response")) for one in encoder.encode(events)] == [
        chunk(token_ids=[7], prompt_tokens=3, completion_tokens=1),
        chunk(token_ids=[5], prompt_tokens=3, completion_tokens=1, index=1),
        chunk(token_ids=[8], prompt_tokens=3, completion_tokens=2),
        complete(finish_reason="stop", matched_stop_str="x", **usage),
        complete(finish_reason="stop", matched_token_id=5, index=1, **usage),
    ]


def test_an_answer_that_is_no_stream_is_one_complete_for_each_choice_with_everything():
    encoder = GenerateEncoder(is_stream=False, alternatives=2)
    started = Started("r1", "stories", 3, (TokenLogprob(1, "", None), scored(2, 4, 5)))
    first, second = (tokens(one, logprobs=[scored(one, 8, 9)]) for one in (7, 8))
    assert encoder.encode([started, first]) == []
    assert encoder.encode_short(second) == b""
    [message] = encoder.encode([finished()])
    assert message.complete == pb.GenerateComplete(
        output_ids=[7, 8],
        finish_reason="length",
        prompt_tokens=3,
        completion_tokens=2,
        cached_tokens=1,
        output_logprobs=pb.OutputLogProbs(
            token_ids=[7, 8],
            token_logprobs=[-7.0, -8.0],
            top_logprobs=[pb.TopLogProbs(token_ids=[8, 9], values=[-8.0, -9.0])] * 2,
        ),
        input_logprobs=pb.InputLogProbs(
            token_ids=[1, 2],
            token_logprobs=[pb.InputTokenLogProb(), pb.InputTokenLogProb(value=-2.0)],
            top_logprobs=[
                pb.TopLogProbs(),
                pb.TopLogProbs(token_ids=[4, 5], values=[-4.0, -5.0]),
            ],
        ),
    )


def test_the_prompts_log_probabilities_come_with_the_first_chunk_of_each_choice():
    encoder = GenerateEncoder(is_stream=True, alternatives=None)
    started = Started("r1", "stories", 2, (TokenLogprob(1, "", None), scored(2)))
    events = [started, tokens(7), tokens(7, choice=1), tokens(8), finished(), finished(1)]
    chunks = [one.chunk for one in encoder.encode(events) if one.HasField("chunk")]
    assert [one.HasField("input_logprobs") for one in chunks] == [True, True, False]
    assert not chunks[0].input_logprobs.top_logprobs


def test_a_short_event_has_the_same_bytes_either_way():
    [first, second] = (GenerateEncoder(is_stream=True, alternatives=1) for _ in range(2))
    event = tokens(7, logprobs=[scored(7, 8)])
    [message] = first.encode([STARTED, event])
    second.encode([STARTED])
    assert pb.GenerateResponse.FromString(second.encode_short(event)) == message
    assert second.encode_short(finished()) is None


def test_no_message_is_too_large_for_the_gateway(monkeypatch):
    monkeypatch.setattr(answer_encoder, "MESSAGE_BYTES_MAX", 64)
    event = tokens(*range(300, 310), logprobs=[scored(one, 1, 2) for one in range(300, 310)])
    stream = GenerateEncoder(is_stream=True, alternatives=2)
    assert stream.encode_short(event) is None
    messages = stream.encode([event])
    assert [one for message in messages for one in message.chunk.token_ids] == list(range(300, 310))
    assert [one.chunk.completion_tokens for one in messages][-1] == 10
    assert all(len(one.chunk.output_logprobs.token_ids) == 1 for one in messages)
    with pytest.raises(RequestTooLarge, match=r"stream: is false, but .* only 1 tokens"):
        GenerateEncoder(is_stream=False, alternatives=2).encode([event])


def test_an_end_without_success_is_left_to_the_status():
    encoder = GenerateEncoder(is_stream=True, alternatives=None)
    assert encoder.encode([finished(reason=EndReason.ABORTED)]) == []


# ---- the model's description


def test_a_text_models_description(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    info = ModelInfo(
        "LlamaForCausalLM",
        *("float32", "cpu"),
        vocab_size=100,
        max_model_len=64,
        num_blocks=4,
        block_size=16,
        eos_token_ids=frozenset({3, 2}),
        memory_bytes=1,
        defaults=SamplingDefaults(temperature=0.5, top_k=20, typical_p=0.5),
    )
    assert encode_info("stories", info, tmp_path) == pb.GetModelInfoResponse(
        served_model_name="stories",
        model_path=str(tmp_path),
        tokenizer_path=str(tmp_path),
        model_type="llama",
        is_generation=True,
        max_context_length=64,
        max_req_input_len=63,
        vocab_size=100,
        architectures=["LlamaForCausalLM"],
        eos_token_ids=[2, 3],
        default_sampling_params_json='{"temperature": 0.5, "top_k": 20}',
    )


def test_an_encoders_description_without_files():
    info = EncoderInfo("BertModel", "float32", "cpu", 100, 64, 1, Capability.TEXT_EMBEDDING)
    assert encode_info("words", info, None) == pb.GetModelInfoResponse(
        served_model_name="words",
        max_context_length=64,
        max_req_input_len=64,
        vocab_size=100,
        architectures=["BertModel"],
    )


def test_a_tokenizer_is_sent_as_a_zip_in_parts_the_last_of_which_has_its_hash(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(model_info, "CHUNK_BYTES", 100)
    wanted = {"tokenizer.json": "{}", "chat_template.jinja": "{{ x }}", "config.json": "[]"}
    for name, text in (wanted | {"model.safetensors": "weights", "README.md": "text"}).items():
        (tmp_path / name).write_text(text)
    chunks = list(tokenizer_chunks(tmp_path))
    data = b"".join(one.data for one in chunks)
    assert len(chunks) > 1
    assert all(one.data for one in chunks)
    assert [one.sha256 for one in chunks] == [""] * (len(chunks) - 1) + [
        hashlib.sha256(data).hexdigest()
    ]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {name: archive.read(name).decode() for name in archive.namelist()} == wanted


def test_a_model_without_tokenizer_files_says_so(tmp_path):
    for directory in (None, tmp_path):
        with pytest.raises(Unsupported, match="no tokenizer files"):
            list(tokenizer_chunks(directory))


# ---- ports

TWO = EngineConfig(models=(ModelConfig("a", aliases=("first",)), ModelConfig("b")))
ONE = EngineConfig(models=(ModelConfig("a"),))


def ports(*given):
    """Return a server's configuration with these ports for gateways."""
    return ServerConfig(vllm_engine_ports=given)


def test_a_port_is_of_the_only_model_or_of_the_one_it_names():
    assert ports_by_model(ONE, ports(("", 7001))) == {"a": 7001}
    assert ports_by_model(TWO, ports(("b", 7001), ("first", 0))) == {"b": 7001, "a": 0}


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (TWO, [("", 7001)], "names no model, and there are 2; write MODEL=7001 with one of a, b"),
        (TWO, [("c", 7001)], "c=7001 names no model of this server; it serves a, b"),
        (TWO, [("a", 7001), ("first", 7002)], "gives a two ports; a model has one"),
    ],
)
def test_a_port_without_one_model_of_its_own_is_refused(config, given, message):
    with pytest.raises(ConfigError, match=message):
        ports_by_model(config, ports(*given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("a", 70000)], r"--vllm-engine-port is 70000, outside \[0, 65535\]"),
        ([("a", 7001), ("b", 7001)], "--vllm-engine-port 7001 is taken by"),
        ([("a", 50051)], "--vllm-engine-port 50051 is taken by --port"),
    ],
)
def test_ports_are_different_numbers_in_range(given, message):
    with pytest.raises(ConfigError, match=message):
        ports(*given)
    assert ports(("a", 0), ("b", 0)).vllm_engine_ports == (("a", 0), ("b", 0))
    with pytest.raises(ConfigError, match="--vllm-engine-port 9100 is taken by"):
        ServerConfig(metrics_port=9100, vllm_engine_ports=(("a", 9100),))


def test_gateways_send_no_keys_so_their_ports_are_on_loopback_unless_the_server_is_insecure():
    guarded = ServerConfig(host="0.0.0.0", api_key_file="keys")
    assert guarded.vllm_engine_host == "127.0.0.1"
    assert ServerConfig(host="0.0.0.0", insecure=True).vllm_engine_host == "0.0.0.0"
    assert ServerConfig(host="::1").vllm_engine_host == "::1"


def test_a_server_without_the_protos_says_how_to_install_them(monkeypatch):
    monkeypatch.setattr(gateway_ports, "PROTOS", "smg_grpc_proto_that_is_missing")
    check_gateways(ONE, ServerConfig())
    with pytest.raises(ConfigError, match=r"pip install 'triolet\[smg\]'"):
        check_gateways(ONE, ports(("a", 7001)))
