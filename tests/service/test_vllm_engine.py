"""VllmEngine over real gRPC, beside triolet.v1 of the same server: what a gateway asks and gets."""

import contextlib
import re
import time
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from grpc_service.client import messages, stubs
from tests.support.core_driver import expected_tokens
from tests.support.kv_index import Index
from tests.support.raw_http2 import RawClient
from tests.support.server import fake
from tests.support.wire import (
    CALL_LIMIT_S,
    NOT_SERVING,
    SERVING,
    broken_fields,
    connect,
    details,
    ended,
    error_of,
    generate,
    health,
    stats,
    wait_idle,
    wait_serving,
    wait_until,
)

PROMPT = [5, 6, 7]
SERVICE = "vllm.grpc.engine.VllmEngine"
MODELS = [
    {"name": "quick"},
    {"name": "slow", "script": {"step_s": 0.05}},
    {"name": "words", "capability": "text-embedding"},
]
PORTS = [[model["name"], 0] for model in MODELS]


@pytest.fixture(scope="module")
def server():
    """Serve two text models and an encoder, each with a port for gateways."""
    with fake(models=MODELS, server={"vllm_engine_ports": PORTS}) as one:
        wait_serving(one.channel)
        with contextlib.ExitStack() as stack:
            one.gateways = {
                name: stack.enter_context(connect(f"127.0.0.1:{port}"))
                for name, port in one.vllm_engine_ports.items()
            }
            yield one


@pytest.fixture
def engine(server):
    """Return a function from a model's name to its stub, and check that all ends idle."""
    yield lambda name: vllm_engine_pb2_grpc.VllmEngineStub(server.gateways[name])
    wait_idle(server.channel)


DISPATCH = '{"type": "structural_tag", "format": {"type": "dispatch"}}'


def asked(*, ids=PROMPT, stream=True, request_id="", **params):
    """Return a Generate request as the gateway makes it."""
    params = {"max_tokens": 4, "temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0} | params
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(original_text="not read", input_ids=ids),
        sampling_params=pb.SamplingParams(skip_special_tokens=True, **params),
        stream=stream,
    )


def answers(stub, request):
    """Return the chunks and the completes of a call."""
    found = list(stub.Generate(request, timeout=CALL_LIMIT_S))
    chunks = [one.chunk for one in found if one.HasField("chunk")]
    return chunks, [one.complete for one in found if one.HasField("complete")]


def ids_of(chunks, index=0):
    """Return the tokens of a choice."""
    return [one for chunk in chunks if chunk.index == index for one in chunk.token_ids]


def code_of(call):
    """Return the code with which a call fails."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call()) if callable(call) else list(call)
    return caught.value.code()


# ---- Generate


def test_a_stream_has_the_tokens_of_triolet_v1_for_the_same_seed(server, engine):
    sampling = {"max_tokens": 6, "temperature": 1.0, "seed": 7}
    ours = generate(
        server.channel, model="quick", token_ids={"ids": PROMPT}, sampling=sampling, n=2
    )
    chunks, completes = answers(engine("quick"), asked(n=2, **sampling))
    for index in (0, 1):
        assert ids_of(chunks, index) == ours.ids(index)
        [complete] = [one for one in completes if one.index == index]
        assert not complete.output_ids  # the ids came in chunks
        assert complete.finish_reason == "length"
        assert (complete.prompt_tokens, complete.completion_tokens) == (3, 6)
    assert [one.completion_tokens for one in chunks if one.index == 1] == [1, 2, 3, 4, 5, 6]


def test_without_a_stream_each_choice_has_one_complete_with_all(engine):
    chunks, completes = answers(
        engine("quick"), asked(stream=False, n=2, logprobs=2, prompt_logprobs=1)
    )
    assert chunks == []
    assert sorted(one.index for one in completes) == [0, 1]
    for one in completes:
        assert list(one.output_ids) == expected_tokens(PROMPT, count=4, choice=one.index)
        assert list(one.output_logprobs.token_ids) == list(one.output_ids)
        assert [len(top.token_ids) for top in one.output_logprobs.top_logprobs] == [2] * 4
        assert list(one.input_logprobs.token_ids) == PROMPT
        has_value = [entry.HasField("value") for entry in one.input_logprobs.token_logprobs]
        assert has_value == [False, True, True]


def test_a_stop_is_enforced_by_the_worker(engine):
    tokens = expected_tokens(PROMPT, count=4)
    _, [complete] = answers(engine("quick"), asked(stop=[f"<{tokens[1]}>"], max_tokens=50))
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", f"<{tokens[1]}>")
    assert complete.completion_tokens == 2
    _, [complete] = answers(engine("quick"), asked(stop_token_ids=[tokens[2]], max_tokens=50))
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", tokens[2])
    assert complete.completion_tokens == 3


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (asked(max_tokens=0), "INVALID_ARGUMENT", "sampling.max_tokens"),
        (asked(logprobs=-1), "INVALID_ARGUMENT", "output.logprobs"),
        (asked(ids=[]), "INVALID_ARGUMENT", "token_ids.ids"),
        (asked(ids=[10**6]), "INVALID_ARGUMENT", r"token_ids.ids\[0\]"),
        (asked(structural_tag="{}"), "INVALID_ARGUMENT", "structural_tag"),
        (asked(structural_tag=DISPATCH), "UNIMPLEMENTED", "structural_tag.*'dispatch'"),
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "input"),
        (pb.GenerateRequest(text=""), "INVALID_ARGUMENT", "input: has no tokens"),
        (asked(ids=[1] * 100_000), "INVALID_ARGUMENT", "at most 2047 leave room"),
        (asked(ids=[10**6] * 2_000_000), "RESOURCE_EXHAUSTED", "4194304"),  # as at any gRPC server
    ],
)
def test_a_clients_mistake_is_no_fault_of_the_server(engine, request_, code, text):
    """After faults of a server, the gateway retries, and then gives the server up."""
    with pytest.raises(grpc.RpcError, match=text) as caught:
        list(engine("quick").Generate(request_, timeout=CALL_LIMIT_S))
    assert caught.value.code().name == code
    assert details(caught.value)["ErrorInfo"].domain == "triolet"


def test_an_abort_ends_its_request_whenever_it_comes(server, engine):
    stub = engine("slow")
    abort = lambda *ids: stub.Abort(pb.AbortRequest(request_ids=ids), timeout=10)  # noqa: E731
    call = stub.Generate(asked(max_tokens=200, request_id="one"), timeout=CALL_LIMIT_S)
    next(call)
    abort("one", "unknown", "two")
    assert code_of(call) is grpc.StatusCode.ABORTED
    abort("one")
    late = stub.Generate(asked(request_id="two"), timeout=CALL_LIMIT_S)
    assert code_of(late) is grpc.StatusCode.ABORTED


@pytest.mark.parametrize("ids", [[], ["x" * 129], ["x"] * 10_001])
def test_an_abort_of_what_can_be_no_request_is_not_remembered(engine, ids):
    """The server remembers unknown ids, so their number and their lengths are bounded."""
    request = pb.AbortRequest(request_ids=ids)
    error = error_of(lambda: engine("quick").Abort(request, timeout=10))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert broken_fields(error)[0].startswith("request_ids")


def test_a_call_that_its_client_leaves_frees_its_blocks(server, engine):
    before = ended(server.channel).get("cancelled", 0)
    call = engine("slow").Generate(asked(max_tokens=200), timeout=CALL_LIMIT_S)
    next(call)
    call.cancel()
    wait_until(lambda: ended(server.channel).get("cancelled", 0) == before + 1)
    wait_idle(server.channel)


# ---- Embed


def test_a_vector_is_that_of_triolet_v1(server, engine):
    stub = stubs.InferenceStub(server.channel)
    request = messages.EmbedRequest(model="words", inputs=[{"token_ids": {"ids": PROMPT}}])
    [ours] = stub.Embed(request, timeout=30)
    tokenized = pb.TokenizedInput(input_ids=PROMPT)
    found = engine("words").Embed(pb.EmbedRequest(request_id="e", tokenized=tokenized), timeout=30)
    assert list(found.embedding) == list(ours.values)
    assert (found.prompt_tokens, found.embedding_dim) == (3, len(ours.values))


def test_a_model_that_cannot_do_it_says_what_it_does(engine):
    request = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT))
    error = error_of(lambda: engine("quick").Embed(request, timeout=10))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "quick" in error.details()


def test_bytes_that_are_no_request_and_an_input_without_tokens_are_told_as_the_clients_mistake(
    server, engine
):
    for name, data in (("Generate", b"\x12\xff"), ("Embed", b"\x12\x03\x12\x01")):
        raw = server.gateways["words"].unary_unary(f"/{SERVICE}/{name}")
        error = error_of(lambda raw=raw, data=data: raw(data, timeout=10))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    for tokens in ([], [10**6]):
        request = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=tokens))
        error = error_of(lambda request=request: engine("words").Embed(request, timeout=10))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


# ---- figures


def test_a_gateway_learns_what_it_must_know(engine):
    assert engine("quick").HealthCheck(pb.HealthCheckRequest(), timeout=10).healthy
    info = engine("quick").GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
    assert (info.served_model_name, info.is_generation) == ("quick", True)
    assert info.max_context_length > 0
    assert info.vocab_size == 1000
    assert not engine("words").GetModelInfo(pb.GetModelInfoRequest(), timeout=10).is_generation
    about = engine("quick").GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
    assert (about.block_size, about.kv_role, about.kv_connector) == (16, "", "")
    assert about.constrained_decoding_start == "after_reasoning"


def test_the_load_is_that_of_the_counters(server, engine):
    stub = engine("slow")
    loads = lambda: stub.GetLoads(pb.GetLoadsRequest(include=["core"]), timeout=10)  # noqa: E731
    [idle] = loads().loads
    assert (idle.num_total_reqs, idle.token_usage, idle.num_used_tokens) == (0, 0.0, 0)
    assert idle.max_total_num_tokens == 16 * stats(server.channel).total_blocks // 2
    call = stub.Generate(asked(ids=list(range(1, 33)), max_tokens=200), timeout=CALL_LIMIT_S)
    next(call)
    time.sleep(1.1)  # the rate is counted over a second
    [busy] = loads().loads
    assert (busy.num_running_reqs, busy.num_waiting_reqs) == (1, 0)
    assert busy.num_used_tokens >= 32
    assert 0 < busy.token_usage < 1
    assert 0 < busy.gen_throughput < 21  # a step takes 50 ms
    assert stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10).active_requests == 1
    call.cancel()


# ---- the prefix cache


class Follower:
    """A gateway's subscription; ``index`` has the blocks that it knows."""

    def __init__(self, stub, index=None):
        self.index = index or Index()
        request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=self.index.last)
        self.call = stub.SubscribeKvEvents(request, timeout=CALL_LIMIT_S)
        self.read()

    def read(self):
        self.index.apply(next(self.call).SerializeToString())

    def read_until(self, condition):
        while not condition(self.index.paths):
            self.read()


def test_a_gateway_knows_which_prefixes_are_cached(server, engine):
    stub = engine("quick")
    stub.FlushCache(common_pb2.FlushCacheRequest(), timeout=10)
    prompt = list(range(100, 140))
    follower = Follower(stub)
    follower.read_until(lambda known: not known)
    _, [first] = answers(stub, asked(ids=prompt))
    paths = {tuple(prompt[:16]), tuple(prompt[:32])}
    follower.read_until(lambda known: set(known.values()) == paths)
    follower.call.cancel()
    _, [second] = answers(stub, asked(ids=[*prompt[:32], 900] * 2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    again = Follower(stub, follower.index)  # goes on where the first one was cut
    again.read_until(lambda known: len(known) == 4)
    fresh = Follower(stub)
    fresh.read_until(lambda known: known == again.index.paths)
    stub.FlushCache(common_pb2.FlushCacheRequest(), timeout=10)
    for one in (again, fresh):
        one.read_until(lambda known: not known)
        one.call.cancel()


def test_an_encoder_has_no_prefixes_and_says_so_once_and_for_all(engine):
    call = engine("words").SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=10)
    assert code_of(call) is grpc.StatusCode.UNIMPLEMENTED


def test_a_fake_has_no_tokenizer_to_send(engine):
    call = engine("quick").GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=10)
    assert code_of(call) is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.RpcError, match="profiler"):
        engine("quick").StartProfile(common_pb2.StartProfileRequest(), timeout=10)


# ---- the port


def test_a_port_serves_its_model_health_and_reflection_and_nothing_else(server):
    channel = server.gateways["quick"]
    assert health(channel) == health(channel, SERVICE) == SERVING
    assert health(channel, "triolet.v1.Inference") is None
    unknown = channel.unary_unary("/sglang.grpc.scheduler.SglangScheduler/HealthCheck")
    assert code_of(lambda: [unknown(b"", timeout=5)]) is grpc.StatusCode.UNIMPLEMENTED
    error = error_of(lambda: stubs.ModelsStub(channel).ListModels(messages.ListModelsRequest()))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    [answer] = reflection.ServerReflectionInfo(iter([request]), timeout=10)
    names = {one.name for one in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} < names


def test_a_server_with_keys_needs_none_there_and_counts_bounds_and_drains_alike(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("someone " + "k" * 32 + "\n")
    keys.chmod(0o600)
    options = {"api_key_file": str(keys), "metrics_port": 0, "vllm_engine_ports": [["", 0]]}
    models = [{"name": "slow", "script": {"step_s": 0.05}}]
    with fake(models=models, server=options, engine={"default_deadline_s": 0.5}) as server:
        wait_serving(server.channel)
        with connect(f"127.0.0.1:{server.vllm_engine_ports['slow']}") as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            late = stub.Generate(asked(max_tokens=200))  # without a deadline, as from a gateway
            assert code_of(late) is grpc.StatusCode.DEADLINE_EXCEEDED
            where = re.search(r"metrics are served on (\S+)", server.log)[1]
            with urllib.request.urlopen(where) as answer:
                counted = answer.read().decode()
            method = f'method="{SERVICE}/Generate"'
            assert re.search(rf'rpcs_total{{code="DEADLINE_EXCEEDED",{method}}} 1', counted)
            assert f"{SERVICE}/Generate DEADLINE_EXCEEDED" in server.log
            _drained_while_a_call_runs(server, channel, stub)


def _drained_while_a_call_runs(server, channel, stub):
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == SERVING
    events = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    next(events)
    running = stub.Generate(asked(max_tokens=20), timeout=20)
    next(running)
    path = f"/{SERVICE}/HealthCheck"
    with RawClient(f"127.0.0.1:{server.vllm_engine_ports['slow']}") as connected:
        connected.ask(path)
        server.signal()
        assert next(watch).status == NOT_SERVING
        answer = pb.HealthCheckResponse.FromString(connected.ask(path))
    assert (answer.healthy, answer.message) == (False, "slow takes no requests")
    assert code_of(stub.Generate(asked(), timeout=5)) is grpc.StatusCode.UNAVAILABLE
    assert [one.complete.completion_tokens for one in running][-1] == 20  # running ones may finish
    assert code_of(events) is grpc.StatusCode.UNAVAILABLE
    assert server.process.wait(20) == 0
