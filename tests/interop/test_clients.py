"""Clients in JavaScript and Ruby, against a real server with a text model and two encoders."""

import numpy as np
import pytest

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.checkpoints.encode import make_embedder, make_reranker
from tests.support import encode_wire
from tests.support.server import real
from tests.support.wire import SERVING, ended, generate, health, wait_idle, wait_until

pytestmark = [pytest.mark.interop, pytest.mark.model]

CANCELLED, INVALID_ARGUMENT, DEADLINE_EXCEEDED, UNAVAILABLE = 1, 3, 4, 14
TEXTS = ["the dog", "a cat by the river: ein Fluß, 川", "snow on the road to the old house"]
STORY = {"text": "Once upon a time", "sampling": {"seed": 7, "max_tokens": 40}}
ENDLESS = {  # takes any machine seconds, unless the reader leaves
    "text": "Once",
    "n": 16,
    "sampling": {"ignore_eos": True, "max_tokens": 2000},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Yield a server with the story model and two random encoders."""
    folder = tmp_path_factory.mktemp("encoders")
    embedder = make_embedder(folder / "embedder", normalize=True)
    reranker = make_reranker(folder / "reranker")
    with real("--model", embedder, "--model", reranker) as one:
        for name in ("embedder", "reranker"):
            wait_until(lambda name=name: health(one.channel, f"model/{name}") == SERVING, 90)
        yield one


def test_a_story_streams(caller, server):
    told = caller.call(server.address, "Generate", STORY)
    want = generate(server.channel, text="Once upon a time", seed=7, max_tokens=40)
    assert (told.code, told.kinds[0], told.kinds[-1]) == (0, "started", "finished")
    assert told.kinds.count("delta") > 5
    assert told.story == want.text() != ""
    assert told.messages[0]["started"]["model"] == "stories"
    finished = told.messages[-1]["finished"]
    assert finished["usage"]["completion_tokens"] == want.finished().usage.completion_tokens
    assert finished["reason"] in ("FINISH_REASON_STOP", "FINISH_REASON_LENGTH")


def test_a_cancel_ends_the_servers_work(caller, server):
    before = ended(server.channel).get("cancelled", 0)
    told = caller.call(server.address, "Generate", ENDLESS, cancel_after=4)
    assert told.code == CANCELLED
    assert told.kinds[:1] == ["started"]
    assert "finished" not in told.kinds
    wait_until(lambda: ended(server.channel).get("cancelled", 0) == before + 1)
    wait_idle(server.channel)


def test_a_deadline_ends_both_sides_and_the_status_has_the_progress(caller, server):
    """Three of four deadlines are known to the server alone: no client's timer hides its status.

    Red if such a status lacks its details, or has another number of tokens than came (`status_of`).
    """
    before = ended(server.channel)
    endless = {"method": "Generate", "request": ENDLESS | {"output": {"token_ids": True}}}
    servers = endless | {"metadata": {"grpc-timeout": "600m"}}
    # The first call, without a deadline, connects the client before any deadline can pass.
    calls = [
        {"method": "Generate", "request": STORY},
        endless | {"deadline_s": 0.6},
        *[servers] * 3,
    ]
    first, own, *all_told = caller.calls(server.address, *calls)
    assert first.code == 0
    assert [told.code for told in (own, *all_told)] == [DEADLINE_EXCEEDED] * 4
    # The RPC library ends a call 20 ms after the engine. On a very busy machine its status, which
    # has no details, may come first; the engine counts the deadline all the same.
    wait_until(lambda: num_ended(server) == sum(before.values()) + 5)
    assert ended(server.channel)["deadline"] >= before.get("deadline", 0) + 3
    wait_idle(server.channel)
    engines = [told for told in all_told if told.text != "the deadline passed"]
    assert engines
    for told in engines:
        info = told.details["ErrorInfo"]
        assert info["reason"] == "DEADLINE_EXCEEDED"
        assert info["metadata"].keys() == {"phase", "tokens_done"}
        assert int(info["metadata"]["tokens_done"]) == told.num_tokens


def num_ended(server):
    """Return how many requests have ended, however they did."""
    return sum(ended(server.channel).values())


def test_a_refusal_names_every_field_and_the_next_request_works(caller, server):
    broken = STORY | {"n": 17, "sampling": {"top_p": 2}}
    refused, told = caller.calls(
        server.address,
        {"method": "Generate", "request": broken},
        {"method": "Generate", "request": STORY},
    )
    assert (refused.code, refused.messages) == (INVALID_ARGUMENT, [])
    assert refused.details["ErrorInfo"]["reason"] == "INVALID_REQUEST"
    assert refused.details["ErrorInfo"]["domain"] == "triolet"
    fields = [one["field"] for one in refused.details["BadRequest"]["field_violations"]]
    assert fields == ["n", "sampling.top_p"]
    assert told.code == 0
    assert told.story


def test_a_refusal_that_will_pass_says_when_to_try_again(caller, server):
    control = stubs.ControlStub(server.channel)
    pause = pb.PauseRequest(mode=pb.PAUSE_MODE_ABORT, model="stories")
    control.Pause(pause, timeout=10)
    try:
        told = caller.call(server.address, "Generate", STORY)
    finally:
        control.Resume(pb.ResumeRequest(model="stories"), timeout=10)
    assert told.code == UNAVAILABLE
    assert told.details["ErrorInfo"]["reason"] == "PAUSED"
    delay = told.details["RetryInfo"]["retry_delay"]
    assert delay in ({"seconds": "5"}, "5s")  # a Duration, as message or JSON
    assert caller.call(server.address, "Generate", STORY).code == 0


def test_vectors_are_those_that_python_gets(caller, server):
    told = caller.call(server.address, "Embed", {"inputs": [{"text": one} for one in TEXTS]})
    want = encode_wire.embed(server.channel, TEXTS).by_index()
    assert told.code == 0
    assert [one["tokens"] for one in told.by_index()] == [one.tokens for one in want]
    assert [one.get("model", "") for one in told.messages] == ["embedder", "", ""]
    got = np.array([one["values"] for one in told.by_index()])
    np.testing.assert_allclose(got, [one.values for one in want], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)


def test_a_broken_input_is_named_before_any_vector(caller, server):
    inputs = [{"text": "a"}, {"token_ids": {"ids": [1_000_000]}}]
    told = caller.call(server.address, "Embed", {"inputs": inputs})
    assert (told.code, told.messages) == (INVALID_ARGUMENT, [])
    [broken] = told.details["BadRequest"]["field_violations"]
    assert broken["field"].startswith("inputs[1].token_ids")


def test_a_cancelled_embed_leaves_nothing_behind(caller, server):
    request = {"inputs": [{"text": f"{TEXTS[2]} {number}" * 8} for number in range(2000)]}
    told = caller.call(server.address, "Embed", request, cancel_after=1)
    assert told.code == CANCELLED
    assert 1 <= len(told.messages) < 2000
    encode_wire.wait_all_idle(server.channel)


def test_the_best_documents_come_sorted(caller, server):
    query = "which river?"
    every, best = caller.calls(
        server.address,
        {"method": "Rerank", "request": {"query": query, "documents": TEXTS}},
        {"method": "Rerank", "request": {"query": query, "documents": TEXTS, "top_n": 2}},
    )
    want = [one.score for one in encode_wire.rerank(server.channel, query, TEXTS).by_index()]
    scores = [one["score"] for one in every.by_index()]
    np.testing.assert_allclose(scores, want, atol=1e-6)
    ranked = sorted(range(len(TEXTS)), key=lambda index: -want[index])
    assert [one.get("index", 0) for one in best.messages] == ranked[:2]
