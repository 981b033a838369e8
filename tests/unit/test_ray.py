"""What the package for Ray Serve decides without Ray: which replica has a prefix cached, how many
replicas there should be, when one is replaced, and whether a fleet's file is valid."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from engine.errors import ConfigError
from engine.status import ModelState, ModelStatus
from grpc_service._generated.triolet.v1 import inference_pb2
from grpc_service.cli.flags import engine_config_of
from grpc_service.ray.answers import trouble_of
from grpc_service.ray.autoscaling import by_queue_depth
from grpc_service.ray.command import check_fleet, main
from grpc_service.ray.prefixes import CHUNK_BYTES, CHUNKS_MAX, Places, Prefixes, keys_of

FLEET = Path(__file__).resolve().parents[2] / "deploy" / "fleet.yaml"
LONG = "The dog sleeps by the fire. " * 20


def text(words, **fields):
    return inference_pb2.GenerateRequest(text=words, **fields)


def chat(*turns, **fields):
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": turn} for at, turn in enumerate(turns)]
    return inference_pb2.GenerateRequest(chat={"messages": messages, **fields})


# ---- keys of prompts


def test_prompts_share_as_many_keys_as_they_share_whole_chunks():
    short, longer = keys_of(text(LONG)), keys_of(text(LONG + "Then it wakes up. " * 10))
    assert len(short) == len(LONG) // CHUNK_BYTES
    assert longer[: len(short)] == short
    assert len(longer) > len(short)
    other = keys_of(text("X" + LONG[1:]))
    assert not {*short} & {*other}
    assert len({*short}) == len(short)


def test_the_next_turn_of_a_chat_begins_with_the_keys_of_the_turn_before():
    first, second = keys_of(chat(LONG)), keys_of(chat(LONG, "Good.", "And then?" * 20))
    assert first
    assert second[: len(first)] == first
    tools = [{"name": "look_up", "parameters": {"type": "object"}}]
    assert not {*first} & {*keys_of(chat(LONG, tools=tools))}


def test_another_model_a_salt_or_another_kind_of_prompt_has_other_keys():
    keys = keys_of(text(LONG))
    for other in (
        text(LONG, model="words"),
        text(LONG, model="m" * 200),
        text(LONG, prompt={"cache_salt": "me"}),
        chat(LONG),
    ):
        assert keys_of(other)
        assert not {*keys} & {*keys_of(other)}


def test_token_ids_have_keys_and_no_prompt_has_more_than_the_most():
    ids = list(range(CHUNK_BYTES // 2))
    found = keys_of(inference_pb2.GenerateRequest(token_ids={"ids": ids}))
    assert len(found) == 2
    ids[-1] += 1
    again = keys_of(inference_pb2.GenerateRequest(token_ids={"ids": ids}))
    assert again[0] == found[0]
    assert again[1] != found[1]
    assert len(keys_of(text("x" * 1_000_000))) == CHUNKS_MAX
    many = inference_pb2.GenerateRequest(token_ids={"ids": [7] * 100_000})
    assert len(keys_of(many)) == CHUNKS_MAX
    assert keys_of(inference_pb2.GenerateRequest()) == ()


# ---- what replicas remember


def test_the_ends_of_prompts_that_came_long_ago_are_forgotten_first():
    known = Prefixes(5)
    known.add([1, 2, 3])
    known.add([11, 12, 13])
    assert known.report() == [2, 1, 13, 12, 11]
    known.add([1, 2])
    known.add([21])
    assert known.report() == [12, 11, 2, 1, 21]


# ---- which replica a router prefers


def test_a_prompt_goes_where_most_of_its_beginning_was_sent():
    places = Places(imbalance_max=4)
    idle = {"a": 0, "b": 0, "c": 0}
    assert places.preferred([1, 2, 3], idle) == []
    places.sent("a", [1, 2, 9])
    places.sent("b", [1])
    assert places.preferred([1, 2, 3], idle) == ["a"]
    assert places.preferred([1, 8], idle) == ["a", "b"]
    assert places.preferred([2], idle) == ["a"]
    assert places.preferred([8], idle) == []
    assert places.preferred([], idle) == []
    assert places.preferred([1], {}) == []


def test_a_replica_with_too_many_requests_is_not_preferred():
    places = Places(imbalance_max=4)
    places.sent("a", [1, 2])
    assert places.preferred([1, 2], {"a": 5, "b": 1}) == ["a"]
    assert places.preferred([1, 2], {"a": 6, "b": 1}) == []


def test_what_a_replica_reports_counts_as_what_was_sent_to_it():
    places = Places(imbalance_max=4)
    idle = {"a": 0, "b": 0}
    places.reported("b", [1, 2])
    assert places.preferred([1, 2], idle) == ["b"]
    places.reported("b", [5])
    assert places.preferred([1, 2], idle) == []
    places.sent("a", [1])
    places.keep({"b"})
    assert places.preferred([1], idle) == []
    assert places.preferred([5], idle) == ["b"]


# ---- how many replicas, and when one is replaced


@pytest.mark.parametrize(
    ("sequences", "queued", "wanted"),
    [({}, 0, 0), ({"a": 8}, 0, 1), ({"a": 9, "b": 0}, 0, 2), ({"a": 8, "b": 8}, 1, 3)],
)
def test_as_many_replicas_are_wanted_as_have_the_target_each(sequences, queued, wanted):
    context = SimpleNamespace(
        aggregated_metrics={"sequences": sequences} if sequences else {},
        total_queued_requests=queued or None,
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 8.0),
    )
    assert by_queue_depth(context) == (wanted, {})


def test_a_replica_is_replaced_when_a_step_hangs_or_a_model_failed():
    ready = ModelStatus("a", ModelState.READY)
    for state in (ModelState.READY, ModelState.LOADING, ModelState.UNLOADED):
        assert trouble_of([ready, ModelStatus("b", state)]) == ""
    hung = ModelStatus("b", ModelState.READY, is_hung=True)
    assert trouble_of([ready, hung]) == "a step of b hangs"
    failed = ModelStatus("b", ModelState.FAILED, error="no such file")
    assert trouble_of([failed]) == "b cannot be loaded: no such file"


# ---- the file


def shipped():
    """Return the fleet's file that Triolet ships, parsed."""
    return yaml.safe_load(FLEET.read_text())


def test_the_shipped_file_is_right():
    fleet = shipped()
    check_fleet(fleet)
    [application] = fleet["applications"]
    config = engine_config_of(application["args"])
    assert [model.name for model in config.models] == ["stories"]
    assert config.max_num_seqs == 64
    assert [one["name"] for one in application["deployments"]] == ["Inference"]


def with_args(**args):
    """Return the shipped file with these args."""
    fleet = shipped()
    fleet["applications"][0]["args"] = args
    return fleet


@pytest.mark.parametrize(
    ("fleet", "message"),
    [
        (None, "applications must be a list with an application"),
        ({"applications": [1]}, r"applications\[0\] must be a table with import_path"),
        (shipped() | {"grpc_options": {"port": 9000}}, "grpc_servicer_functions must have"),
        (shipped() | {"grpc_options": {"port": "x"}}, "grpc_options.port must be a port"),
        (with_args(port=50051), r"applications\[0\].args: port is not a setting"),
        (with_args(max_num_seq=3), "did you mean max_num_seqs"),
        (with_args(max_num_seqs="many"), "max_num_seqs is 'many', but must be"),
        (with_args(models=[{"name": "a"}]), r"models\[0\].model is missing"),
        (with_args(models=3), "models must be"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(fleet, message):
    with pytest.raises(ConfigError, match=message):
        check_fleet(fleet)


def test_without_ray_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--config", str(FLEET)]) == 2
    assert "pip install 'triolet[ray]'" in capsys.readouterr().err
