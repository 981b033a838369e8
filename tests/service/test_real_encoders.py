"""A real server with a text model and two encoders gives the library's results through gRPC."""

import numpy as np
import pytest

from tests.checkpoints.encode import make_embedder, make_reranker
from tests.support.encode_wire import embed, rerank, wait_all_idle
from tests.support.server import real
from tests.support.wire import SERVING, generate, health, list_models, wait_until

pytestmark = [pytest.mark.model, pytest.mark.slow]

TEXTS = ["the dog", "a cat by the river", "snow on the road to the old house " * 20]


def test_a_text_model_and_two_encoders_side_by_side(tmp_path):
    from sentence_transformers import CrossEncoder, SentenceTransformer

    embedder = make_embedder(tmp_path / "embedder", normalize=True)
    reranker = make_reranker(tmp_path / "reranker")
    with real("--model", embedder, "--model", reranker) as server:
        assert generate(server.channel, max_tokens=3).error is None
        for name in ("embedder", "reranker"):
            wait_until(lambda name=name: health(server.channel, f"model/{name}") == SERVING, 60)
        heard = embed(server.channel, TEXTS)
        assert heard.error is None
        got = np.array([message.values for message in heard.by_index()])
        want = SentenceTransformer(str(embedder), device="cpu").encode(TEXTS)
        np.testing.assert_allclose(got, want, atol=1e-5)
        heard = rerank(server.channel, "which river?", TEXTS)
        want = CrossEncoder(str(reranker), device="cpu").predict(
            [("which river?", text) for text in TEXTS]
        )
        np.testing.assert_allclose([one.score for one in heard.by_index()], want, atol=1e-5)
        listed = {model.name: model for model in list_models(server.channel)}
        assert listed["embedder"].architecture == "BertModel"
        assert listed["reranker"].replicas[0].threads == 1
        wait_all_idle(server.channel)
        # the server printed "ready" before the encoders were imported
        order = [line for line in server.log.splitlines() if "is ready" in line]
        assert "stories" in order[0]


def test_without_a_model_the_shipped_three_are_served_the_story_teller_first():
    with real(model=None) as server:
        # the server printed "ready" before the encoders were imported
        assert "demo-stories: LlamaForCausalLM" in server.out
        assert "demo-embed: loading" in server.out
        assert "demo-rerank: loading" in server.out
        for command in ("generate", "embed", "rerank", "grpcurl"):
            assert sum(line.startswith((f"  triolet {command} ", f"  {command} "))
                       for line in server.out.splitlines()) == 1  # fmt: skip
        # a request waits until its encoder is loaded
        heard = embed(server.channel, TEXTS)
        assert heard.error is None
        assert heard.messages[0].model == "demo-embed"
        assert rerank(server.channel, "which river?", TEXTS, top_n=1).error is None
        assert generate(server.channel, max_tokens=3).error is None
        listed = {model.name: model.demo for model in list_models(server.channel)}
        assert listed == {"demo-stories": True, "demo-embed": True, "demo-rerank": True}


def test_a_server_that_gets_sigterm_while_its_encoders_load_ends():
    with real(model=None) as server:
        assert "demo-embed: loading" in server.out
        assert server.stop() == 0


def test_a_server_of_encoders_alone_is_ready_when_they_are(tmp_path):
    embedder = make_embedder(tmp_path / "embedder")
    with real(model=embedder) as server:
        assert health(server.channel) == SERVING
        assert embed(server.channel, TEXTS).error is None


def test_an_encoder_that_is_refused_costs_the_text_model_nothing(tmp_path):
    embedder = make_embedder(tmp_path / "embedder")
    (embedder / "model.safetensors").rename(embedder / "pytorch_model.bin")
    with real("--model", embedder) as server:
        error = wait_until(lambda: embed(server.channel, TEXTS).error, 60)
        assert "its weights are pickled" in error.details()
        assert str(tmp_path) not in error.details()
        assert generate(server.channel, max_tokens=3).error is None
