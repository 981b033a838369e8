"""/embed_sparse in TEI's form and /pooling in vLLM's, with fake encoders."""

import pytest

from engine.worker.fakes.encode import rows_of, vector_of, weights_of
from tests.support.encode_wire import ENCODERS
from tests.support.openai_calls import ask
from tests.support.server import fake
from tests.support.wire import SERVING, health, wait_serving, wait_until


@pytest.fixture(scope="module")
def server():
    """Serve fakes of every kind of encoder."""
    with fake(models=ENCODERS, server={"openai_port": 0}) as one:
        wait_serving(one.channel)
        for name in ("emb", "sparse", "multi"):
            wait_until(lambda name=name: health(one.channel, f"model/{name}") == SERVING)
        yield one


def ids_of(text):
    return [byte + 1 for byte in text.encode()]


def test_sparse_vectors_have_teis_form(server):
    texts = ["ab", "a longer text"]
    answer = ask(server.openai_port, "/embed_sparse", {"inputs": texts})
    assert answer.status == 200, answer.body
    assert [{one["index"]: one["value"] for one in vector} for vector in answer.json] == [
        weights_of(ids_of(text)) for text in texts
    ]
    assert all(list(one) == ["index", "value"] for vector in answer.json for one in vector)
    body = {"inputs": "ab", "model": "sparse", "top_k": 1, "truncation_direction": "Right"}
    [vector] = ask(server.openai_port, "/embed_sparse", body).json
    assert {one["index"]: one["value"] for one in vector} == weights_of(ids_of("ab"), 1)


def test_vectors_of_tokens_have_vllms_form(server):
    body = {"model": "multi", "input": ["abc", [5]], "task": "token_embed"}
    answer = ask(server.openai_port, "/pooling", body)
    assert answer.status == 200, answer.body
    assert answer.json["data"] == [
        {"index": 0, "object": "pooling", "data": rows_of(ids_of("abc"))},
        {"index": 1, "object": "pooling", "data": []},
    ]
    assert answer.json["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert answer.json["id"].startswith("pool-")
    assert (answer.json["object"], answer.json["model"]) == ("list", "multi")
    answer = ask(server.openai_port, "/pooling", {"input": "ab", "task": "embed"})
    assert answer.json["data"][0]["data"] == vector_of(ids_of("ab"))


@pytest.mark.parametrize(
    ("path", "body", "status", "name"),
    [
        ("/embed_sparse", {}, 400, "inputs"),
        ("/embed_sparse", {"inputs": ["a", ""]}, 400, "inputs[1]"),
        ("/embed_sparse", {"inputs": "a", "truncation_direction": "Left"}, 400, "truncation_dir"),
        ("/embed_sparse", {"inputs": "a", "top_k": 0}, 400, "top_k"),
        ("/embed_sparse", {"inputs": "a", "normalize": True}, 400, "normalize"),
        ("/pooling", {"input": "a", "task": "score"}, 400, "task"),
        ("/pooling", {"input": "a", "model": "emb"}, 400, "model"),
        ("/pooling", {"input": "a", "dimensions": 99}, 400, "dimensions"),
        ("/pooling", {"input": "a", "encoding_format": "base64"}, 400, "encoding_format"),
    ],
)
def test_a_wrong_field_is_named_as_the_body_has_it(server, path, body, status, name):
    answer = ask(server.openai_port, path, body)
    assert answer.status == status, answer.body
    assert name in answer.json["error"]["message"]
