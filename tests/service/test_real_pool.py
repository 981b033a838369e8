"""Real models of three capabilities from one file, loaded, unloaded and evicted side by side."""

import threading

import pytest

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.encode_wire import embed, rerank
from tests.support.server import real
from tests.support.wire import generate, list_models, wait_until

pytestmark = [pytest.mark.model, pytest.mark.slow]

# Each story model takes 42 MiB, each encoder 10: of the four models three fit.
CONFIG = """
memory_limit = "{limit}MiB"
kv_cache_memory = "32MiB"
max_num_batched_tokens = 512
max_num_seqs = 16
[[models]]
model = "demo-stories"
name = "stories"
[[models]]
model = "demo-embed"
name = "embed"
[[models]]
model = "demo-rerank"
name = "rerank"
[[models]]
model = "demo-stories"
name = "more"
lazy = true
"""
LIMIT_MIB = 98
TEXTS = ["The dog sleeps.", "A hound naps.", "The ship left the harbour."]
PROMPT = {"text": "Once upon a time", "model": "stories", "max_tokens": 40, "temperature": 0.0}


class Readers(threading.Thread):
    """Ask the story model again and again, and check that every answer is the same."""

    def __init__(self, channel):
        super().__init__(daemon=True)
        self.channel = channel
        self.answers = []
        self.is_over = threading.Event()
        self.start()

    def run(self):
        while not self.is_over.is_set():
            heard = generate(self.channel, **PROMPT)
            self.answers.append(heard.error or heard.text())

    def stop(self):
        """End the reading, and return the answers."""
        self.is_over.set()
        self.join(60)
        return self.answers


def state(channel, name):
    """Return a model's state."""
    model = next(one for one in list_models(channel) if one.name == name)
    return (
        pb.Model.DESCRIPTOR.fields_by_name["state"]
        .enum_type.values_by_number[model.state]
        .name.removeprefix("MODEL_STATE_")
    )


def vectors(channel):
    """Return the vectors of some texts."""
    heard = embed(channel, TEXTS, model="embed")
    assert heard.error is None
    return [tuple(message.values) for message in heard.by_index()]


def scores(channel):
    """Return the scores of some texts."""
    heard = rerank(channel, "Where is the dog?", TEXTS, model="rerank")
    assert heard.error is None
    return [message.score for message in heard.by_index()]


def test_three_capabilities_at_once_one_unloaded_and_one_evicted_and_back(tmp_path):
    file = tmp_path / "triolet.toml"
    file.write_text(CONFIG.format(limit=LIMIT_MIB))
    with real("--config", str(file), model=None) as server:
        channel = server.channel
        wait_until(lambda: {state(channel, one) for one in ("embed", "rerank")} == {"READY"}, 60)
        expected, close, first = vectors(channel), scores(channel), generate(channel, **PROMPT)
        readers = Readers(channel)
        stub = stubs.ModelsStub(channel)

        stub.UnloadModel(pb.UnloadModelRequest(model="embed"), timeout=60)
        assert state(channel, "embed") == "UNLOADED"
        assert scores(channel) == close
        list(stub.LoadModel(pb.LoadModelRequest(model="embed"), timeout=60))
        assert vectors(channel) == expected

        # the least recently used model leaves first: the reranker was used before the embedder
        assert generate(channel, **PROMPT | {"model": "more"}).text() == first.text()
        assert state(channel, "rerank") == "UNLOADED"
        assert state(channel, "embed") == "READY"
        assert scores(channel) == close  # loaded again, in the embedder's place
        assert vectors(channel) == expected  # loaded again, in the second story model's place
        assert {state(channel, one) for one in ("stories", "embed", "rerank")} == {"READY"}

        answers = readers.stop()
        assert len(answers) > 2
        assert set(answers) == {first.text()}
