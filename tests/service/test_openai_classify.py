"""/classify over HTTP, in vLLM's form, with fake encoders."""

import pytest

from engine.worker.fakes.encode import (
    LABELS,
    SEPARATOR,
    TOKEN_LABELS,
    entities_of,
    label_scores_of,
)
from tests.support.encode_wire import ENCODERS
from tests.support.openai_calls import CLASSIFY, ask
from tests.support.server import fake
from tests.support.wire import SERVING, health, wait_serving, wait_until


@pytest.fixture(scope="module")
def server():
    """Serve fakes of every kind of encoder."""
    with fake(models=ENCODERS, server={"openai_port": 0}) as one:
        wait_serving(one.channel)
        for name in ("rank", "moods", "names"):
            wait_until(lambda name=name: health(one.channel, f"model/{name}") == SERVING)
        yield one


def tokens_of(text):
    return [byte + 1 for byte in text.encode()]


def in_order(scores):
    """Return the scores of labels in the model's order."""
    return [score for _, score in sorted(scores)]


@pytest.mark.parametrize("path", [CLASSIFY, "/classify"])
def test_labels_have_vllms_form(server, path):
    inputs = ["ab", "a longer text", {"text": "one", "text_pair": "two"}]
    answer = ask(server.openai_port, path, {"model": "moods", "input": inputs})
    assert answer.status == 200, answer.body
    tokens = [tokens_of("ab"), tokens_of("a longer text")]
    tokens.append([*tokens_of("one"), SEPARATOR, *tokens_of("two")])
    for index, (one, ids) in enumerate(zip(answer.json["data"], tokens, strict=True)):
        scores = label_scores_of(ids, "")
        assert one == {
            "index": index,
            "label": LABELS[scores[0][0]],
            "probs": in_order(scores),
            "num_classes": 3,
            "labels": list(LABELS),
        }
    count = sum(map(len, tokens))
    assert answer.json["usage"] == {
        "prompt_tokens": count, "total_tokens": count, "completion_tokens": 0,
    }  # fmt: skip
    assert answer.json["id"].startswith("classify-")
    assert (answer.json["object"], answer.json["model"]) == ("list", "moods")


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("ab", tokens_of("ab")),
        ([1, 2], [1, 2]),
        ([[1, 2]], [1, 2]),
        ({"text": "a", "text_pair": "b"}, [*tokens_of("a"), SEPARATOR, *tokens_of("b")]),
    ],
)
def test_one_input_may_come_alone(server, given, ids):
    [one] = ask(server.openai_port, CLASSIFY, {"model": "moods", "input": given}).json["data"]
    assert one["probs"] == in_order(label_scores_of(ids, ""))


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"use_activation": False}, "none"),
        ({"activation": False}, "none"),
        ({"use_activation": True}, ""),
        ({"function_to_apply": "softmax"}, "softmax"),
        ({"function_to_apply": "sigmoid", "top_k": 1}, "sigmoid"),
    ],
)
def test_fields_of_vllm_and_of_pipelines_choose_the_scores(server, fields, activation):
    body = {"model": "moods", "input": "ab", **fields}
    [one] = ask(server.openai_port, CLASSIFY, body).json["data"]
    scores = label_scores_of(tokens_of("ab"), activation, fields.get("top_k"))
    assert one["probs"] == in_order(scores)
    assert one["labels"] == [LABELS[label] for label, _ in sorted(scores)]


def test_entities_have_their_characters(server):
    body = {"input": ["ab", "aabbcc"], "aggregation_strategy": "none"}
    answer = ask(server.openai_port, CLASSIFY, body)
    assert answer.json["model"] == "names"
    for one, text in zip(answer.json["data"], body["input"], strict=True):
        want = [
            {"label": TOKEN_LABELS[label], "score": score, "start": start, "end": end}
            for label, score, start, end in entities_of(tokens_of(text), "none")
        ]
        assert one["entities"] == want


BAD = {
    "no input": ({"input": []}, "input"),
    "an input that is not there": ({}, "input"),
    "a number among texts": ({"input": ["a", 3]}, "input[1]"),
    "a pair with a third": (
        {"input": {"text": "a", "text_pair": "b", "third": "c"}}, "input.third",
    ),
    "a pair of no texts": ({"input": [{"text": 1}]}, "input[0].text"),
    "ids beside a pair": ({"input": [{"text": "a"}, [1]]}, "input[1]"),
    "an unknown function": ({"input": "a", "function_to_apply": "relu"}, "function_to_apply"),
    "two functions": (
        {"input": "a", "function_to_apply": "softmax", "use_activation": False},
        "function_to_apply",
    ),
    "an unknown strategy": ({"input": "a", "aggregation_strategy": "best"}, "aggregation_strategy"),
    "entities of a pair": (
        {"input": [{"text": "a"}], "aggregation_strategy": "max", "model": "names"}, "input[0]",
    ),
    "no labels": ({"input": "a", "top_k": 0}, "top_k"),
    "an unknown field": ({"input": "a", "colour": 1}, "colour"),
    "a model of vectors": ({"input": "a", "model": "emb"}, "model"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_field_is_refused_by_its_name(server, name):
    body, field = BAD[name]
    answer = ask(server.openai_port, CLASSIFY, {"model": "moods", **body})
    assert answer.status == 400, answer.body
    assert answer.json["error"]["param"] == field
