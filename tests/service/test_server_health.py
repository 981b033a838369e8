"""The answers of health and reflection for a whole server, from its start to its end."""

import queue
import re
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engine.limits.cpu import cpu_limit
from grpc_service._generated.grpc_reflection_v1 import reflection_pb2 as v1_pb2
from grpc_service._generated.grpc_reflection_v1 import reflection_pb2_grpc as v1_pb2_grpc
from grpc_service.client import messages as pb
from tests.checkpoints.text import Shape, make
from tests.support.fake_server import BROKEN_STEP
from tests.support.gguf_files import Q4_K, write_model
from tests.support.openai_calls import ask
from tests.support.raw_http2 import RawClient
from tests.support.server import (
    DEMO,
    READY,
    fake,
    fake_process,
    gated_packing,
    listen_until_ready,
    openai_port_of,
    process,
    serve_argv,
)
from tests.support.wire import (
    NOT_SERVING,
    SERVING,
    Generation,
    connect,
    error_of,
    generate,
    health,
    list_models,
    reason,
    replica_states,
    wait_serving,
    wait_until,
)

NAMES = ("", "triolet.v1.Inference", "triolet.v1.Models", "triolet.v1.Control")


class Watch:
    """A health watcher; `next` is the next status that it gets."""

    def __init__(self, channel, name):
        self._heard = queue.Queue()
        stub = health_pb2_grpc.HealthStub(channel)
        self.call = stub.Watch(health_pb2.HealthCheckRequest(service=name))
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self):
        try:
            for response in self.call:
                self._heard.put(response.status)
        except grpc.RpcError as error:
            self._heard.put(error.code())

    def next(self):
        return self._heard.get(timeout=15)

    def close(self):
        self.call.cancel()
        self._thread.join(10)


@pytest.fixture
def watch():
    """Return a function that makes watchers, and end them with the test."""
    made = []

    def make(channel, name):
        made.append(Watch(channel, name))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_watchers_get_the_load_the_drain_and_nothing_else(watch):
    models = [{"name": "a", "script": {"load_s": 1.2}}, {"name": "b"}, {"name": "c", "lazy": True}]
    with (
        fake(models=models, script={"step_s": 0.02}) as server,
        connect(server.address) as own,
        RawClient(server.address) as connected,
    ):
        names = ["", "triolet.v1.Inference", "model/a"]
        watchers = [watch(own, name) for name in names]
        assert [one.next() for one in watchers] == [NOT_SERVING] * 3
        assert health(own, "triolet.v1.Control") == health(own, "model/c") == SERVING
        wait_until(lambda: health(own, "model/b") == SERVING, 1, "b, before a has loaded")
        assert health(own) == NOT_SERVING
        assert [one.next() for one in watchers] == [SERVING] * 3
        with Generation(own, model="b", prompt_ids=[1], max_tokens=40) as call:
            call.read_deltas(1)
            server.signal()
            assert [one.next() for one in watchers] == [NOT_SERVING] * 3
            request = health_pb2.HealthListRequest().SerializeToString()
            answer = connected.ask("/grpc.health.v1.Health/List", request)
            states = health_pb2.HealthListResponse.FromString(answer).statuses
            assert {*NAMES, "model/c"} < states.keys()
            assert all(state.status == NOT_SERVING for state in states.values())
            assert call.finish().error is None
        assert server.wait() == 0
        ends = [one.next() for one in watchers]
        assert set(ends) <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


@pytest.mark.model
@pytest.mark.slow
def test_a_real_server_answers_while_it_imports_and_loads(tmp_path):
    """Neither the import of torch nor the load delays the event loop. The process is not forked
    from one that has imported torch already."""
    path = tmp_path / "socket"
    with process(serve_argv("--model", DEMO, "--uds", path)) as server:
        server.address = f"unix:{path}"
        heard = listen_until_ready(server)
    assert len(heard) > 10
    assert heard[:-1] == [NOT_SERVING] * (len(heard) - 1)


@pytest.mark.model
def test_a_server_says_loading_while_weights_are_packed(tmp_path):
    """Over gRPC and HTTP, and on standard error with the bytes that are packed so far."""
    shape = Shape(layers=4, hidden=256, heads=4, kv_heads=2, mlp=1024, vocab=2000, max_len=256)
    file = write_model(make(tmp_path / "made", "llama", shape), tmp_path / "m.gguf", Q4_K)
    gate, path = tmp_path / "gate", tmp_path / "socket"
    args = ["serve", "--model", file, "--uds", path, "--openai-port", 0]
    args += ["--served-model-name", "m"]
    with gated_packing(gate, *args) as server:
        port = openai_port_of(server)
        line = r"loading m: weights, \d+ s, ([12]) of 3 MB, about \d+ s left\n"
        wait_until(lambda: re.search(line, server.log), 30, "a line halfway")
        with connect(f"unix:{path}") as channel:
            assert health(channel) == health(channel, "model/m") == NOT_SERVING
            assert list_models(channel)[0].state == pb.MODEL_STATE_LOADING
            assert ask(port, "/health", verb="GET").status == 503
            assert "Triolet is ready" not in server.out
            gate.touch()
            wait_until(lambda: health(channel, "model/m") == SERVING, 30)
            assert list_models(channel)[0].state == pb.MODEL_STATE_READY
            assert ask(port, "/health", verb="GET").status == 200
        server.wait_for_output(READY.search, 20)


def test_an_unknown_name_is_not_found_by_check_and_watched_as_unknown(watch):
    with fake() as server:
        assert health(server.channel, "model/nobody") is None
        watcher = watch(server.channel, "model/nobody")
        assert watcher.next() == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def test_a_lazy_model_is_serving_and_loads_at_the_first_request_once_for_all():
    with fake(models=[{"name": "late", "lazy": True}], script={"load_s": 0.5}) as server:
        channel = server.channel
        wait_serving(channel)
        assert list_models(channel)[0].state == pb.MODEL_STATE_UNLOADED
        calls = [Generation(channel, prompt_ids=[i], max_tokens=2) for i in range(5)]
        wait_until(lambda: list_models(channel)[0].state == pb.MODEL_STATE_LOADING)
        for call in calls:
            assert call.finish().error is None
        [model] = list_models(channel)
        assert model.state == pb.MODEL_STATE_READY
        assert (model.replicas[0].processed, model.leases) == (5, 0)
        assert server.log.count("is ready") == 1


def test_a_model_that_cannot_load_shows_under_its_own_name_and_others_serve():
    models = [{"name": "good"}, {"name": "bad", "script": {"load_error": "a secret"}}]
    with fake(models=models, may_log="model bad failed|Traceback") as server:
        channel = server.channel
        wait_serving(channel)
        wait_until(lambda: health(channel, "model/bad") == NOT_SERVING)
        states = {model.name: (model.state, model.error) for model in list_models(channel)}
        assert states["good"] == (pb.MODEL_STATE_READY, "")
        assert states["bad"][0] == pb.MODEL_STATE_FAILED
        assert "secret" not in states["bad"][1]
        for _ in range(2):
            error = generate(channel, model="bad").error
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert reason(error) == "SPAWN_FAILED"
            assert "secret" not in error.details()
        assert generate(channel, model="good", max_tokens=1).error is None


def test_a_model_is_serving_as_long_as_one_of_its_replicas_lives(watch):
    """GetStats says which replica is DEGRADED; health says whether to send requests."""
    both = [pb.REPLICA_STATE_READY] * 2
    # A replica's second death in a row keeps it away for two seconds.
    with fake(models=[{"name": "fake", "replicas": 2}], may_log=".") as server:
        channel = server.channel
        wait_until(lambda: replica_states(channel) == both)
        watcher = watch(channel, "model/fake")
        assert watcher.next() == SERVING

        def are_both_dead():
            assert generate(channel, prompt_ids=[BROKEN_STEP]).error is not None
            return health(channel, "model/fake") == NOT_SERVING

        wait_until(are_both_dead)
        assert watcher.next() == NOT_SERVING
        assert watcher.next() == SERVING
        wait_until(lambda: replica_states(channel) == both)
        assert generate(channel, prompt_ids=[BROKEN_STEP]).error is not None
        one_left = [pb.REPLICA_STATE_READY, pb.REPLICA_STATE_DEGRADED]
        wait_until(lambda: replica_states(channel) == one_left)
        assert health(channel, "model/fake") == health(channel) == SERVING
        assert generate(channel, max_tokens=2).error is None


def test_the_summary_says_which_models_are_missing():
    bad = {"name": "bad", "script": {"load_error": "a secret"}}
    failures = "model bad failed|Traceback"
    with fake(models=[{"name": "good"}, bad], is_command=True, may_log=failures) as server:
        assert re.match(r"Triolet is ready on \S+ after [\d.]+ s, but without bad\.\n", server.out)
        pool = "0 MiB are its KV pool, for 4 sequences of full length"  # 512 blocks of 16 tokens
        holds = f"0 MiB, of which {pool} (--kv-cache-memory)"
        assert f"  good: fake, none on cpu, context 2048, {holds}\n" in server.out
        assert f"\n  {cpu_limit()}\nTry:\n" in server.out


def test_if_no_text_model_loads_the_server_serves_its_encoders():
    bad = {"name": "bad", "script": {"load_error": "a secret"}}
    vectors = {"name": "vectors", "capability": "text-embedding", "script": {"load_s": 0.5}}
    failures = "failed|Traceback"
    with fake(models=[bad, vectors], is_command=True, may_log=failures) as server:
        assert "but without bad." in server.out
        assert "vectors: fake, none on cpu" in server.out
    vectors["script"]["load_error"] = "another secret"
    with fake_process(models=[bad, vectors], is_command=True, may_log=failures) as server:
        assert server.wait() == 1
        assert "is ready" not in server.out
        assert "triolet: none of the 2 models was loaded; the log says why" in server.log


def test_a_server_whose_models_all_fail_ends_with_one_sentence():
    script, failures = {"load_error": "a secret"}, "model fake failed|Traceback"
    with fake_process(is_command=True, script=script, may_log=failures) as server:
        assert server.wait() == 1
        told = [line for line in server.log.splitlines() if line.startswith("triolet: ")]
        assert len(told) == 1
        assert "fake" in told[0]


@pytest.mark.parametrize(
    ("messages", "stubs"), [(v1_pb2, v1_pb2_grpc), (reflection_pb2, reflection_pb2_grpc)]
)
def test_reflection_lists_every_service(messages, stubs):
    with fake() as server:
        stub = stubs.ServerReflectionStub(server.channel)
        ask = iter([messages.ServerReflectionRequest(list_services="")])
        [answer] = stub.ServerReflectionInfo(ask, timeout=10)
        assert {one.name for one in answer.list_services_response.service} == {
            *NAMES[1:],
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        # all services that reflection lists are served
        for name in NAMES[1:]:
            call = server.channel.unary_unary(f"/{name}/Nothing")
            assert error_of(lambda c=call: c(b"", timeout=5)).code() is (
                grpc.StatusCode.UNIMPLEMENTED
            )
