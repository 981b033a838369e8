"""Classify over real gRPC, with fake encoders."""

import grpc
import pytest

from engine.requests.encode.values import MAX_INPUTS
from engine.worker.fakes.encode import (
    LABELS,
    SEPARATOR,
    TOKEN_LABELS,
    entities_of,
    label_scores_of,
)
from grpc_service.client import Client
from grpc_service.client import messages as pb
from tests.support.encode_wire import ENCODERS, Encode, classify, classify_request
from tests.support.fake_server import ENCODER_MAX_LEN
from tests.support.server import fake
from tests.support.wire import (
    SERVING,
    broken_fields,
    health,
    list_models,
    reason,
    stats,
    wait_serving,
    wait_until,
)

Code = grpc.StatusCode
TAGS = "AGGREGATION_NONE"


def ids_of(text):
    """Return the fake tokenizer's ids for a text."""
    return [byte + 1 for byte in text.encode()]


@pytest.fixture(scope="module")
def server():
    """Yield a server with a text model and encoders."""
    with fake(models=ENCODERS, engine={"stream_buffer": 16}) as one:
        wait_serving(one.channel)
        for name in ("rank", "moods", "names"):
            wait_until(lambda name=name: health(one.channel, f"model/{name}") == SERVING)
        yield one


def labels_in(message):
    """Return the labels of a message by their numbers, with their scores."""
    assert not message.entities
    return [(LABELS.index(one.label), one.score) for one in message.labels]


def entities_in(message, names=TOKEN_LABELS):
    """Return the entities of a message: label, score, first character and end."""
    assert not message.labels
    return [(names.index(one.label), one.score, one.start, one.end) for one in message.entities]


# ---- values


@pytest.mark.parametrize("top_k", [None, 1, 2, 50])
@pytest.mark.parametrize("activation", ["", "NONE", "SIGMOID", "SOFTMAX"])
def test_labels_come_by_index_the_best_first(server, activation, top_k):
    inputs = ["ab", [1, 2, 3], ("a premise", "its end"), "a longer text"]
    fields = {"activation": f"ACTIVATION_{activation}"} if activation else {}
    heard = classify(server.channel, inputs, model="moods", top_k=top_k, **fields)
    assert heard.error is None
    tokens = [
        ids_of("ab"),
        [1, 2, 3],
        [*ids_of("a premise"), SEPARATOR, *ids_of("its end")],
        ids_of("a longer text"),
    ]
    for message, ids in zip(heard.by_index(), tokens, strict=True):
        assert labels_in(message) == label_scores_of(ids, activation.lower(), top_k)
        assert message.tokens == len(ids)
    assert sorted(message.model for message in heard.messages) == ["", "", "", "moods"]
    assert heard.messages[0].model == "moods"


@pytest.mark.parametrize("aggregation", ["NONE", "SIMPLE", "FIRST", "AVERAGE", "MAX"])
def test_entities_come_by_index_with_their_characters(server, aggregation):
    texts = ["ab", "a longer text with more", "@", "aabbbbcc"]
    heard = classify(server.channel, texts, aggregation=f"AGGREGATION_{aggregation}")
    assert heard.error is None
    assert heard.messages[0].model == "names", "the first model that labels tokens"
    names = TOKEN_LABELS if aggregation == "NONE" else [one.split("-")[-1] for one in TOKEN_LABELS]
    for message, text in zip(heard.by_index(), texts, strict=True):
        want = entities_of(ids_of(text), aggregation.lower())
        if aggregation != "NONE":  # two labels have one name
            want = [(names.index(names[label]), *rest) for label, *rest in want]
        assert entities_in(message, names) == want


def test_a_reranker_classifies_by_its_one_label(server):
    [message] = classify(server.channel, [("q", "a")], model="rank").messages
    [(_, score)] = label_scores_of([*ids_of("q"), SEPARATOR, *ids_of("a")], "", is_ranker=True)
    assert [(one.label, one.score) for one in message.labels] == [("LABEL_0", score)]


def test_the_client_has_the_call(server):
    with Client(server.address) as client:
        request = {"model": "moods", "inputs": [{"text": "ab"}], "top_k": 1}
        with client.classify(pb.ClassifyRequest(**request)) as stream:
            [message] = stream
    assert labels_in(message) == label_scores_of(ids_of("ab"), "", 1)


def test_models_tell_that_they_classify(server):
    found = {one.name: set(one.capabilities) for one in list_models(server.channel)}
    assert pb.CAPABILITY_TEXT_CLASSIFICATION in found["rank"] & found["moods"]
    assert found["names"] == {pb.CAPABILITY_TOKEN_CLASSIFICATION}
    assert pb.CAPABILITY_TEXT_CLASSIFICATION not in found["emb"] | found["sparse"] | found["fake"]


def test_too_long_inputs_are_cut_unless_that_is_refused(server):
    long = "x" * (ENCODER_MAX_LEN + 5)
    [message] = classify(server.channel, [long], model="moods").messages
    assert message.tokens == ENCODER_MAX_LEN
    assert labels_in(message) == label_scores_of(ids_of(long)[:ENCODER_MAX_LEN], "")
    inputs = ["a", long, [1] * (ENCODER_MAX_LEN + 1), ("a", long)]
    error = classify(server.channel, inputs, model="moods", truncate=False).error
    assert (error.code(), reason(error)) == (Code.INVALID_ARGUMENT, "REQUEST_TOO_LARGE")
    assert broken_fields(error) == ["inputs[1].text", "inputs[2].token_ids", "inputs[3].pair"]


# ---- bad input


def made(inputs, **fields):
    """Return a request for the classifier of texts unless it says otherwise."""
    return classify_request(inputs, **{"model": "moods"} | fields)


def empty():
    """Return a request with an input that is not set."""
    request = made(["a"])
    request.inputs.add()
    return request


BAD = {
    "no inputs": (made([]), ["inputs"]),
    "too many inputs": (made(["a"] * (MAX_INPUTS + 1)), ["inputs"]),
    "an input of nothing": (empty(), ["inputs[1]"]),
    "no ids": (made(["a", []]), ["inputs[1].token_ids.ids"]),
    "an id of nobody's": (made([[1], [2, 1000]]), ["inputs[1].token_ids.ids[1]"]),
    "a text without tokens": (made(["a", ""]), ["inputs[1].text"]),
    "an unknown activation": (made(["a"], activation=99), ["activation"]),
    "an unknown aggregation": (made(["a"], aggregation=99), ["aggregation"]),
    "no labels": (made(["a"], top_k=0), ["top_k"]),
    "entities of labels": (
        made(["a"], model="names", aggregation=TAGS, activation=1, top_k=3),
        ["activation", "top_k"],
    ),
    "entities of ids and of a pair": (
        made(["a", [1], ("a", "b")], model="names", aggregation=TAGS),
        ["inputs[1].token_ids", "inputs[2].pair"],
    ),
    "labels of a model of tokens": (made(["a"], model="names"), ["model"]),
    "entities of a model of texts": (made(["a"], aggregation=TAGS), ["model"]),
    "the model embeds": (made(["a"], model="emb"), ["model"]),
    "the model generates": (made(["a"], model="fake"), ["model"]),
    "everything at once": (
        made([], activation=99, aggregation=98, top_k=0, request_id="x\n"),
        ["activation", "aggregation", "inputs", "request_id", "top_k"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_before_any_result(server, name):
    request, fields = BAD[name]
    before = stats(server.channel).step_count
    with Encode(server.channel, request) as call:
        heard = call.finish()
    assert heard.messages == []
    assert heard.error.code() is Code.INVALID_ARGUMENT
    assert broken_fields(heard.error) == fields
    assert stats(server.channel).step_count == before, "nothing was computed"
    assert classify(server.channel, ["a"], model="moods").error is None


def test_a_server_without_classifiers_says_so():
    with fake() as text_only:
        wait_serving(text_only.channel)
        for fields, what in (
            ({}, "classifies texts"),
            ({"aggregation": TAGS}, "labels the tokens"),
        ):
            error = classify(text_only.channel, ["a"], **fields).error
            assert (error.code(), reason(error)) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")
            assert what in error.details()
