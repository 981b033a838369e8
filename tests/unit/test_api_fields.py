"""The documented API, transcribed, against the descriptors: every service, message, field, enum.

A field is written `name:type`, with `?` for explicit presence (proto3 optional), `*` for repeated,
and `oneof/name:type` inside a oneof. Types of google.protobuf are written by their last name. Field
numbers are not in the table.
"""

import keyword

import pytest
from google.protobuf.descriptor import FieldDescriptor

from grpc_service._generated.triolet.v1 import (
    classes_pb2,
    common_pb2,
    control_pb2,
    images_pb2,
    inference_pb2,
    models_pb2,
    vectors_pb2,
)

FILES = (
    *(common_pb2, images_pb2, inference_pb2, models_pb2, control_pb2, vectors_pb2),
    classes_pb2,
)
PACKAGE = "triolet.v1"

SERVICES = {
    "Inference": """
        Generate(GenerateRequest) stream GenerateResponse
        Attach(AttachRequest) stream GenerateResponse
        Embed(EmbedRequest) stream EmbedResponse
        EmbedStream(stream EmbedStreamRequest) stream EmbedStreamResponse
        Rerank(RerankRequest) stream RerankResponse
        Classify(ClassifyRequest) stream ClassifyResponse
        GenerateImage(GenerateImageRequest) stream GenerateImageResponse
        Tokenize(TokenizeRequest) TokenizeResponse
        Detokenize(DetokenizeRequest) DetokenizeResponse
    """,
    "Models": """
        ListModels(ListModelsRequest) ListModelsResponse
        GetModel(GetModelRequest) GetModelResponse
        LoadModel(LoadModelRequest) stream LoadModelResponse
        UnloadModel(UnloadModelRequest) UnloadModelResponse
        LoadAdapter(LoadAdapterRequest) LoadAdapterResponse
        UnloadAdapter(UnloadAdapterRequest) UnloadAdapterResponse
    """,
    "Control": """
        GetStats(GetStatsRequest) GetStatsResponse
        WatchStats(WatchStatsRequest) stream GetStatsResponse
        Pause(PauseRequest) PauseResponse
        Resume(ResumeRequest) ResumeResponse
        Abort(AbortRequest) AbortResponse
        Drain(DrainRequest) DrainResponse
        ResetPrefixCache(ResetPrefixCacheRequest) ResetPrefixCacheResponse
        Explain(ExplainRequest) ExplainResponse
        GetUsage(GetUsageRequest) GetUsageResponse
    """,
}

STATS = """
    running:uint32 waiting:uint32 parked:uint32 ending:uint32 unread_calls:uint32
    free_blocks:uint32 total_blocks:uint32 cached_blocks:uint32
    prefix_queries:uint64 prefix_hits:uint64 step_count:uint64 step_rows_total:uint64
    preemptions:uint64 prompt_tokens_total:uint64 completion_tokens_total:uint64
    requests_total:RequestsTotal memory_reserved:uint64 memory_limit:uint64 peak_waiting:uint32
    free_states:uint32 total_states:uint32 cached_states:uint32
"""

MESSAGES = {
    # Generate
    "GenerateRequest": """
        model:string input/text:string input/token_ids:TokenIds input/chat:Chat
        sampling:SamplingParams n:uint32? priority:int32? request_id:string
        constraint:Constraint prompt:PromptOptions output:OutputOptions
        continuation:Continuation resume_window:Duration reasoning:Reasoning background:bool
    """,
    "AttachRequest": "request_id:string attach_token:string received:ReceivedChoice*",
    "ReceivedChoice": "tokens:uint32 finished:bool",
    "Continuation": "choices:ContinuedChoice* seed:uint64?",
    "ContinuedChoice": "token_ids:uint32* finished:bool",
    "TokenIds": "ids:uint32*",
    "Chat": (
        "messages:Message* tools:Tool* template_args:Struct add_generation_prompt:bool? "
        "tool_choice:string continue_final_message:bool"
    ),
    "Message": """
        role:string content:string tool_calls:ToolCall* tool_call_id:string name:string
        parts:MessagePart*
    """,
    "MessagePart": "part/text:string part/image:bytes",
    "Tool": "name:string description:string parameters:Struct",
    "ToolCall": "id:string name:string arguments_json:string",
    "SamplingParams": """
        temperature:double? top_p:double? min_p:double? typical_p:double?
        repetition_penalty:double? presence_penalty:double? frequency_penalty:double?
        top_k:uint32? max_tokens:uint32? min_tokens:uint32? seed:uint64? ignore_eos:bool?
        stop:string* stop_token_ids:uint32* include_stop:bool? logit_bias:map<uint32,double>
        allowed_token_ids:uint32* banned_token_ids:uint32* bad_words:string*
        speculation:bool?
    """,
    "Constraint": """
        kind/json_schema:string kind/json_object:bool kind/regex:string kind/lark:string
        kind/choice:Choice reasoning:bool?
    """,
    "Choice": "choices:string*",
    "Reasoning": "enabled:bool? budget_tokens:uint32?",
    "PromptOptions": """
        truncate_to:uint32? truncate_left:bool? cache_salt:string bypass_prefix_cache:bool?
        add_special_tokens:bool?
    """,
    "OutputOptions": """
        logprobs:uint32? prompt_logprobs:uint32? token_ids:bool? echo:bool?
        skip_special_tokens:bool? tool_argument_deltas:bool? progress:bool?
    """,
    "GenerateResponse": """
        event/started:Started event/delta:Delta event/finished:Finished
        event/progress:PromptProgress
    """,
    "PromptProgress": """
        phase:string position:uint32 loaded_bytes:uint64 total_bytes:uint64 prompt_tokens:uint32
        computed_tokens:uint32 cached_tokens:uint32 prefill:Duration first_token:Duration
    """,
    "Started": """
        request_id:string model:string prompt_tokens:uint32 prompt_logprobs:TokenLogprob*
        seed:uint64? attach_token:string
    """,
    "Delta": """
        choice:uint32 text:string token_ids:uint32* logprobs:TokenLogprob* reasoning:string
        tool_calls:ToolCallDelta*
    """,
    "ToolCallDelta": "position:uint32 id:string name:string arguments_json:string",
    "TokenLogprob": "token_id:uint32 text:string logprob:double? alternatives:Alternative*",
    "Alternative": "token_id:uint32 text:string logprob:double rank:uint32",
    "Finished": """
        choice:uint32 reason:FinishReason matched/stop:string matched/stop_token_id:uint32
        usage:Usage timings:Timings
    """,
    "Usage": """
        prompt_tokens:uint32 cached_tokens:uint32 completion_tokens:uint32 resumed_tokens:uint32
        drafted_tokens:uint32 accepted_tokens:uint32 reasoning_tokens:uint32
    """,
    "Timings": """
        queue:Duration load:Duration prefill:Duration decode:Duration parked:Duration
    """,
    # Embed, Rerank, Classify, Tokenize, Detokenize
    "EmbedRequest": """
        model:string inputs:EmbedInput* dimensions:uint32? normalize:bool? prompt_name:string
        truncate:bool? request_id:string priority:int32? precision:Precision ranges:VectorRanges
        kind:VectorKind top_k:uint32? threshold:float? background:bool
    """,
    "SparseVector": "indices:uint32* weights:float*",
    "VectorRanges": "low:float* high:float*",
    "EmbedInput": "input/text:string input/token_ids:TokenIds input/image:bytes",
    "EmbedResponse": """
        index:uint32 values:float* tokens:uint32 model:string packed:bytes sparse:SparseVector
        rows:uint32?
    """,
    "EmbedStreamRequest": "parameters:EmbedRequest inputs:EmbedStreamInput*",
    "EmbedStreamInput": "index:uint32 input:EmbedInput",
    "EmbedStreamResponse": "vectors:EmbedResponse* errors:InputError*",
    "InputError": "index:uint32 reason:string message:string",
    "RerankRequest": """
        model:string query:string documents:string* raw_scores:bool? truncate:bool?
        top_n:uint32? request_id:string priority:int32? background:bool
    """,
    "RerankResponse": "index:uint32 score:double",
    "ClassifyRequest": """
        model:string inputs:ClassifyInput* activation:Activation top_k:uint32?
        aggregation:Aggregation truncate:bool? request_id:string priority:int32?
        background:bool
    """,
    "ClassifyInput": "input/text:string input/token_ids:TokenIds input/pair:TextPair",
    "TextPair": "text:string text_pair:string",
    "ClassifyResponse": """
        index:uint32 labels:LabelScore* entities:Entity* tokens:uint32 model:string
    """,
    "LabelScore": "label:string score:float",
    "Entity": "label:string score:float start:uint32 end:uint32",
    # GenerateImage
    "GenerateImageRequest": """
        model:string prompt:string negative_prompt:string width:uint32? height:uint32?
        steps:uint32? guidance:double? seed:uint64? n:uint32? source:ImageSource strength:double?
        scheduler:string format:ImageFormat quality:uint32? preview_every:uint32?
        request_id:string priority:int32?
    """,
    "ImageSource": "image:bytes",
    "GenerateImageResponse": """
        event/started:ImageStarted event/progress:ImageProgress event/part:ImagePart
        event/finished:ImageFinished
    """,
    "ImageStarted": """
        request_id:string model:string seed:uint64 width:uint32 height:uint32 steps:uint32
        scheduler:string
    """,
    "ImageProgress": "step:uint32 steps:uint32 preview:bytes",
    "ImagePart": "index:uint32 data:bytes last:bool format:ImageFormat",
    "ImageFinished": "seed:uint64 usage:ImageUsage timings:ImageTimings",
    "ImageUsage": "prompt_tokens:uint32 steps:uint32 images:uint32",
    "ImageTimings": """
        queue:Duration load:Duration encode:Duration draw:Duration parked:Duration
    """,
    "TokenizeRequest": """
        model:string input/text:string input/chat:Chat add_special_tokens:bool?
    """,
    "TokenizeResponse": "tokens:Token* max_model_len:uint32",
    "Token": "id:uint32 text:string start:uint32 end:uint32",
    "DetokenizeRequest": "model:string ids:uint32* skip_special_tokens:bool?",
    "DetokenizeResponse": "text:string",
    # Models
    "ListModelsRequest": "",
    "ListModelsResponse": "models:Model*",
    "GetModelRequest": "model:string",
    "GetModelResponse": "model:Model",
    "Model": """
        name:string aliases:string* capability:Capability state:ModelState error:string
        memory_bytes:uint64 replicas:Replica* leases:uint32 last_used:Timestamp
        dtype:string device:string architecture:string max_model_len:uint32 demo:bool
        context_note:string quantization:string base:string adapter_digest:string
        adapter_rank:uint32 capabilities:Capability*
    """,
    "Replica": """
        id:uint32 state:ReplicaState device:string threads:uint32 restarts:uint32
        processed:uint64 failed:uint64 cancelled:uint64 busy:Duration tensor_parallel_size:uint32
    """,
    "LoadModelRequest": "model:string replicas:uint32?",
    "LoadModelResponse": """
        phase:string bytes_done:uint64 bytes_total:uint64 tensors_done:uint32
        tensors_total:uint32 state:ModelState
    """,
    "UnloadModelRequest": "model:string drain:Duration",
    "UnloadModelResponse": "",
    "LoadAdapterRequest": "model:string directory:string aliases:string*",
    "LoadAdapterResponse": "model:Model",
    "UnloadAdapterRequest": "model:string drain:Duration",
    "UnloadAdapterResponse": "",
    # Control
    "GetStatsRequest": "",
    "WatchStatsRequest": "",
    "GetStatsResponse": "totals:Totals replicas:ReplicaStats*",
    "RequestsTotal": """
        finished:uint64 cancelled:uint64 deadline:uint64 aborted:uint64 stalled:uint64
        failed:uint64 refused:uint64
    """,
    "Totals": STATS + "detached:uint32",
    # `pause` tells a replica that is paused from one that serves.
    "ReplicaStats": STATS + "model:string replica:uint32 state:ReplicaState pause:PauseMode",
    "PauseRequest": "mode:PauseMode model:string",
    "PauseResponse": "",
    "ResumeRequest": "model:string",
    "ResumeResponse": "",
    "AbortRequest": "request_ids:string*",
    "AbortResponse": "results:AbortResult*",
    "AbortResult": "request_id:string outcome:AbortOutcome",
    "DrainRequest": "timeout:Duration",
    "DrainResponse": "",
    "ResetPrefixCacheRequest": "model:string",
    "ResetPrefixCacheResponse": "",
    "ExplainRequest": "request_id:string",
    "ExplainResponse": """
        state:string waiting_for:string position:uint32 estimate:Duration
        computed_tokens:uint32 blocks:uint32 parked:Duration drafted_tokens:uint32
        accepted_tokens:uint32 drafts:DraftCounts*
    """,
    "DraftCounts": "drafter:string drafted_tokens:uint32 accepted_tokens:uint32",
    "GetUsageRequest": "holder:string? model:string since:Timestamp",
    "GetUsageResponse": "since:Timestamp sums:UsageSums*",
    "UsageSums": """
        holder:string model:string requests:uint64 succeeded:uint64 usage:RequestUsage
    """,
    "RequestUsage": """
        prompt_tokens:uint64 cached_tokens:uint64 completion_tokens:uint64 results:uint64
        undelivered:uint64 drafted_tokens:uint64 accepted_tokens:uint64 reasoning_tokens:uint64
        images:uint64 queue:Duration step:Duration sent_bytes:uint64
    """,
}

# The names of each enum's values without their common prefix; the value 0 is UNSPECIFIED in each.
ENUMS = {
    "FinishReason": ("FINISH_REASON", "STOP LENGTH"),
    "VectorKind": ("VECTOR_KIND", "DENSE SPARSE MULTI_VECTOR"),
    "Activation": ("ACTIVATION", "NONE SIGMOID SOFTMAX"),
    "Aggregation": ("AGGREGATION", "NONE SIMPLE FIRST AVERAGE MAX"),
    "Precision": ("PRECISION", "FLOAT32 FLOAT16 INT8 UINT8 BINARY UBINARY"),
    "ImageFormat": ("IMAGE_FORMAT", "PNG JPEG WEBP"),
    "PauseMode": ("PAUSE_MODE", "ABORT WAIT KEEP"),
    "AbortOutcome": ("ABORT_OUTCOME", "ABORTED ALREADY_ENDED REMEMBERED"),
    "ReplicaState": ("REPLICA_STATE", "LOADING READY DRAINING FAILED DEGRADED"),
    "ModelState": ("MODEL_STATE", "UNLOADED LOADING READY DRAINING FAILED"),
    "Capability": (
        "CAPABILITY",
        "TEXT_TO_TEXT TEXT_EMBEDDING RERANK IMAGE_EMBEDDING VISION TEXT_TO_IMAGE "
        "SPARSE_EMBEDDING MULTI_VECTOR_EMBEDDING TEXT_CLASSIFICATION TOKEN_CLASSIFICATION",
    ),
}

SCALARS = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_FLOAT: "float",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
}


def declared(kind):
    """Return all messages or enums that the protos declare at file level, by name."""
    return {
        name: descriptor
        for file in FILES
        for name, descriptor in getattr(file.DESCRIPTOR, f"{kind}_types_by_name").items()
    }


def type_of(field):
    """Return the type of a field as the table writes it, without `?`, `*` and oneof."""
    named = field.message_type or field.enum_type
    if named is None:
        return SCALARS[field.type]
    package = named.file.package
    assert package in (PACKAGE, "google.protobuf")
    return named.full_name.removeprefix(f"{package}.")


def written(field):
    """Return a field as the table writes it."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (type_of(field.message_type.fields_by_name[part]) for part in ("key", "value"))
        return f"{field.name}:map<{key},{value}>"
    if field.is_repeated:
        return f"{field.name}:{type_of(field)}*"
    oneof = field.containing_oneof
    if oneof is None:
        return f"{field.name}:{type_of(field)}"
    if len(oneof.fields) == 1 and oneof.name == f"_{field.name}":  # a proto3 optional
        return f"{field.name}:{type_of(field)}?"
    return f"{oneof.name}/{field.name}:{type_of(field)}"


def method_written(method):
    """Return an RPC as `SERVICES` writes it: name, request and answer."""
    asked, answered = (
        "stream " * is_stream for is_stream in (method.client_streaming, method.server_streaming)
    )
    return f"{method.name}({asked}{method.input_type.name}) {answered}{method.output_type.name}"


def test_there_is_no_other_message_enum_or_service():
    assert declared("message").keys() == MESSAGES.keys()
    assert declared("enum").keys() == ENUMS.keys()
    services = [name for file in FILES for name in file.DESCRIPTOR.services_by_name]
    assert sorted(services) == sorted(SERVICES)
    nested = [
        inner.full_name
        for message in declared("message").values()
        for inner in (*message.nested_types, *message.enum_types)
        if not inner.GetOptions().map_entry
    ]
    assert nested == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.DESCRIPTOR.name)
def test_descriptors_keep_package_and_file_name(file):
    assert file.DESCRIPTOR.package == PACKAGE
    assert file.DESCRIPTOR.name == f"triolet/v1/{file.__name__.rpartition('.')[2][:-4]}.proto"
    assert file.__name__ == f"grpc_service._generated.{PACKAGE}.{file.__name__.rpartition('.')[2]}"


@pytest.mark.parametrize("name", SERVICES)
def test_rpcs(name):
    [service] = [
        file.DESCRIPTOR.services_by_name[name]
        for file in FILES
        if name in file.DESCRIPTOR.services_by_name
    ]
    documented = [line.strip() for line in SERVICES[name].strip().splitlines()]
    assert [method_written(method) for method in service.methods] == documented


@pytest.mark.parametrize("name", MESSAGES)
def test_fields(name):
    fields = declared("message")[name].fields
    assert sorted(map(written, fields)) == sorted(MESSAGES[name].split())


@pytest.mark.parametrize("name", ENUMS)
def test_enum_values(name):
    prefix, values = ENUMS[name]
    documented = [f"{prefix}_{value}" for value in ("UNSPECIFIED", *values.split())]
    enum = declared("enum")[name]
    assert [value.name for value in enum.values] == documented
    assert [value.number for value in enum.values] == list(range(len(documented)))


def test_vectors_are_packed():
    assert vectors_pb2.EmbedResponse.DESCRIPTOR.fields_by_name["values"].is_packed


def test_no_field_name_is_a_keyword_of_python():
    names = {field.name for message in declared("message").values() for field in message.fields}
    assert not {name for name in names if keyword.iskeyword(name)}
