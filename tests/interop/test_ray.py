"""Fleets behind Ray Serve's own gRPC port: the same stubs, in several languages.

Two replicas of one thread, on a Ray cluster on this machine. An answer is the same as a server's
with the same seed, whichever replica gave it.
"""

import itertools
import json
import os
import signal
import subprocess
import time

import grpc
import pytest

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support import toolchains
from tests.support.ray_fleet import fleet
from tests.support.server import real
from tests.support.wire import (
    Generation,
    broken_fields,
    details,
    error_of,
    generate,
    reason,
    tokenize,
    wait_until,
)

pytestmark = [
    pytest.mark.interop,
    pytest.mark.full,
    pytest.mark.model,
    pytest.mark.timeout(600),
]

FAKE = "tests.support.ray_fakes:build"
MODELS = [
    {"model": "demo-stories", "name": "stories", "workers": [{"threads": 1}]},
    {"model": "demo-embed", "name": "words", "lazy": True},
    {"model": "demo-rerank", "name": "ranks", "lazy": True},
]
STORY = {"text": "Once upon a time", "sampling": {"seed": 7, "max_tokens": 24}}
TEXTS = ["The dog sleeps.", "A hound naps.", "The ship left."]
STEP_S = 0.2
CANCELLED, INVALID_ARGUMENT = 1, 3


# ---- a real model: what an answer is


@pytest.fixture(scope="module")
def server():
    """Yield a server of the models that the fleet `stories` has."""
    more = ["--model", "demo-embed", "--model", "demo-rerank"]
    with real("--model", "demo-stories", *more) as one:
        yield one


@pytest.fixture(scope="module")
def stories(server):
    """Yield a fleet of two replicas with the shipped models."""
    with fleet(args={"models": MODELS}, num_replicas=2) as one:
        yield one


def test_answers_are_those_of_a_server(stories, server):
    turns = [{"role": "user", "content": "Tell me a story."}]
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    for fields in (
        STORY,
        STORY | {"n": 2},
        {"chat": {"messages": turns}, "sampling": STORY["sampling"]},
        STORY | {"sampling": {"seed": 7, "max_tokens": 40, "stop": ["the"]}},
        STORY | {"output": {"logprobs": 2, "prompt_logprobs": 1, "token_ids": True}},
        STORY | {"constraint": {"json_schema": schema}},
    ):
        found = generate(stories.channel, timeout=60, **fields)
        want = generate(server.channel, timeout=60, **fields)
        assert found.error is None
        assert found.kinds[0] == "started"
        for choice in range(fields.get("n", 1)):
            assert found.text(choice) == want.text(choice) != ""
            assert found.ids(choice) == want.ids(choice)
            assert found.finished(choice).reason == want.finished(choice).reason
            usages = [one.finished(choice).usage for one in (found, want)]
            assert usages[0].completion_tokens == usages[1].completion_tokens
    assert tokenize(stories.channel, "hello") == tokenize(server.channel, "hello")


def test_vectors_scores_and_texts_are_those_of_a_server(stories, server):
    ours, theirs = stubs.InferenceStub(stories.channel), stubs.InferenceStub(server.channel)
    embed = pb.EmbedRequest(inputs=[{"text": text} for text in TEXTS])
    rerank = pb.RerankRequest(query="Where is the dog?", documents=TEXTS)
    for stub in (ours, theirs):  # until the models are loaded
        [*stub.Embed(embed, timeout=120)], [*stub.Rerank(rerank, timeout=120)]
    vectors = [
        {one.index: list(one.values) for one in stub.Embed(embed, timeout=120)}
        for stub in (ours, theirs)
    ]
    assert vectors[0].keys() == {0, 1, 2}
    for index, values in vectors[1].items():
        assert vectors[0][index] == pytest.approx(values, abs=1e-5)
    scores = [
        {one.index: one.score for one in stub.Rerank(rerank, timeout=120)}
        for stub in (ours, theirs)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    ids = tokenize(server.channel, "The dog sleeps.")
    text = [stub.Detokenize(pb.DetokenizeRequest(ids=ids)).text for stub in (ours, theirs)]
    assert text[0] == text[1] != ""


def test_a_refusal_has_its_code_and_details(stories):
    refused = generate(stories.channel, text="Once", n=17, sampling={"top_p": 2.0})
    assert refused.error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.messages == []
    assert broken_fields(refused.error) == ["n", "sampling.top_p"]
    kept = generate(stories.channel, resume_window={"seconds": 5})
    assert kept.error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert details(kept.error)["ErrorInfo"].metadata["field"] == "resume_window"
    stub = stubs.InferenceStub(stories.channel)
    lost = error_of(lambda: [*stub.Attach(pb.AttachRequest(request_id="x", attach_token="y"))])
    assert (lost.code(), reason(lost)) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
    unknown = pb.DetokenizeRequest(ids=[10**6])
    broken = error_of(lambda: stub.Detokenize(unknown, timeout=30))
    assert (broken.code(), reason(broken)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_REQUEST",
    )


def test_a_client_in_javascript_reads_cancels_and_is_refused(stories, server, node):
    told, cut, refused = node.calls(
        stories.address,
        {"method": "Generate", "request": STORY},
        {
            "method": "Generate",
            "request": {"text": "Once", "sampling": {"ignore_eos": True, "max_tokens": 1000}},
            "cancel_after": 3,
        },
        {"method": "Generate", "request": STORY | {"n": 17}},
    )
    assert told.code == 0
    assert told.story == generate(server.channel, **STORY).text() != ""
    assert cut.code == CANCELLED
    assert "finished" not in cut.kinds
    assert refused.code == INVALID_ARGUMENT
    assert refused.details["ErrorInfo"]["reason"] == "INVALID_REQUEST"


def test_grpcurl_finds_the_service_by_reflection(stories, server):
    """`buf curl` sends what grpcurl sends."""
    toolchains.need_npm()
    url = f"http://{stories.address}/triolet.v1.Inference/Generate"
    command = [toolchains.BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge"]
    command += ["--reflect-protocol", "grpc-v1alpha", "-d", json.dumps(STORY), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    texts = [part.partition('"text":')[2].strip() for part in done.stdout.splitlines()]
    text = "".join(json.loads(one) for one in texts if one)
    assert text == generate(server.channel, **STORY).text()


# ---- fakes: when something ends


@pytest.fixture(scope="module")
def fakes():
    """Yield a fleet of two fake replicas whose steps take long."""
    args = {"step_s": STEP_S}
    with fleet(FAKE, args, num_replicas=2, max_ongoing_requests=64) as one:
        wait_until(lambda: len(one.last()) == 2, 30, "two replicas")
        yield one


def busy_of(fakes):
    """Return the reports of the one replica that is busy."""
    [busy] = [lines for lines in fakes.reports().values() if lines[-1]["free"] < lines[-1]["total"]]
    return busy


def test_a_clients_cancel_frees_the_blocks_within_two_steps(fakes):
    for _ in range(5):
        wait_until(fakes.is_idle, 30, "idle replicas")
        with Generation(fakes.channel, prompt_ids=range(1, 40), max_tokens=1000) as one:
            one.read_deltas(2)
            steps = busy_of(fakes)[-1]["steps"]
            one.cancel()
            wait_until(fakes.is_idle, 30, "free blocks")
        cancelled = [lines for lines in fakes.reports().values() if lines[-1]["steps"] >= steps]
        ends = [
            line["steps"]
            for lines in cancelled
            for before, line in itertools.pairwise(lines)
            if line["free"] == line["total"] > before["free"] and line["steps"] >= steps
        ]
        assert ends
        assert min(ends) <= steps + 2


def test_a_deadline_ends_the_request_at_the_replica_and_its_status_comes_through(fakes):
    wait_until(fakes.is_idle, 30, "idle replicas")
    before = sum(one["deadline"] for one in fakes.last().values())
    with Generation(fakes.channel, server_timeout=1.5, prompt_ids=[1, 2], max_tokens=1000) as one:
        heard = one.finish()
    assert heard.error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 2 <= len(heard.deltas) <= 1.5 / STEP_S + 1
    wait_until(
        lambda: sum(one["deadline"] for one in fakes.last().values()) == before + 1,
        10,
        "the engine's own end",
    )


def test_a_prompt_goes_to_the_replica_that_has_its_beginning(fakes):
    prompts = [[number] * 200 for number in range(1, 21)]
    for prompt in prompts:
        assert generate(fakes.channel, prompt_ids=prompt, max_tokens=1).error is None
    busy = [sum(line["finished"] for line in lines[-1:]) for lines in fakes.reports().values()]
    assert min(busy) > 0, "both replicas have prompts"
    heard = [
        generate(fakes.channel, prompt_ids=[*prompt, 7, 8], max_tokens=1) for prompt in prompts * 2
    ]
    cached = [one.finished().usage.cached_tokens >= 192 for one in heard]
    print(f"{sum(cached)} of {len(cached)} requests reached the replica with their prefix")
    assert sum(cached) >= 0.95 * len(cached)


def test_a_replica_killed_is_replaced_while_the_other_serves(fakes):
    wait_until(lambda: len(fakes.last()) == 2, 60, "two replicas")
    calls = []
    while len({pid for pid, one in fakes.last().items() if one["free"] < one["total"]}) < 2:
        assert len(calls) < 16
        prompt = [100 + len(calls)] * 100
        calls.append(Generation(fakes.channel, prompt_ids=prompt, max_tokens=40))
        calls[-1].read_deltas(1)
        time.sleep(0.1)
    first, second = fakes.last()
    os.kill(first, signal.SIGKILL)
    started = time.monotonic()
    heard = [one.finish() for one in calls]
    lost = [one.error for one in heard if one.error is not None]
    assert lost
    assert len(lost) < len(heard)
    for error in lost:
        assert (error.code(), reason(error)) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
    for one in heard:
        assert one.error is not None or len(one.ids()) == 40
    for number in range(10):  # the other replica serves meanwhile
        again = generate(fakes.channel, prompt_ids=[number + 1], max_tokens=1, timeout=30)
        assert again.error is None
    wait_until(lambda: len(fakes.last()) == 2, 60, "a replica in the killed one's place")
    print(f"replaced after {time.monotonic() - started:.1f} s")
    assert second in fakes.last()


def test_a_hung_replica_is_replaced():
    """A step that takes longer than the step timeout makes the replica unhealthy."""
    args = {"step_s": 100, "step_timeout_s": 1}
    with fleet(FAKE, args, num_replicas=1, graceful_shutdown_timeout_s=1) as one:
        wait_until(one.last, 30, "a replica")
        [before] = one.last()
        with Generation(one.channel, prompt_ids=[1]):
            wait_until(lambda: one.last() and before not in one.last(), 120, "another replica")


def test_a_fleet_grows_with_its_queue_and_drains_what_it_no_longer_needs():
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 8,
        "upscale_delay_s": 1,
        "downscale_delay_s": 2,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 1,
        "policy": {"policy_function": "grpc_service.ray.autoscaling:by_queue_depth"},
    }
    with fleet(FAKE, {"step_s": 0.05}, autoscaling_config=scaling) as one:
        wait_until(one.last, 30, "a replica")
        many = [
            Generation(one.channel, prompt_ids=[number + 1], max_tokens=1500)
            for number in range(16)
        ]
        wait_until(lambda: len(one.last()) == 2, 90, "a second replica")
        long = []

        def both_have_requests():  # the second replica reports before Serve knows of it
            number = len(long) + 50
            long.append(Generation(one.channel, prompt_ids=[number], max_tokens=200))
            long[-1].read_deltas(1)
            time.sleep(0.5)
            return all(report["free"] < report["total"] for report in one.last().values())

        wait_until(both_have_requests, 30, "requests at both replicas")
        assert len(one.last()) == 2
        for call in many:
            call.cancel()
        wait_until(lambda: len(one.last()) == 1, 120, "one replica")
        for call in long:
            heard = call.finish()
            assert heard.error is None
            assert len(heard.ids()) == 200
