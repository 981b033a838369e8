"""`tools.lab.bench step` compares engines at the same work.

Our engine and one with stock modules, each in a process of its own, give the same tokens for the
same prompts.
"""

import pytest

from tests.checkpoints.text import PRESETS, make
from tools.lab.peers.environments import PEERS
from tools.lab.peers.process import OURS, start

pytestmark = pytest.mark.full

STEPS = 5


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Run our engine and the stock one on the same tiny model."""
    shape = PRESETS["tiny"]
    settings = {
        "model": str(make(tmp_path_factory.mktemp("model"), shape=shape)),
        "gguf": "",
        "vocab": shape.vocab,
        "dtype": "float32",
        "threads": 1,
        "kv_bytes": 1 << 25,
        "max_len": shape.max_len,
        "seqs": 4,
    }
    found = [start(OURS, settings), start(PEERS["transformers"], settings)]
    yield found
    for engine in found:
        engine.close()


def test_engines_decode_the_same_tokens_from_the_same_prompts(engines):
    ours, stock = (engine.ask("decode", "a", 4, 33, STEPS) for engine in engines)
    assert ours["first"] == stock["first"]
    assert ours["last"] == stock["last"]
    assert ours["seconds"] > 0
    assert stock["seconds"] > 0


def test_asking_twice_decodes_from_the_same_place(engines):
    for engine in engines:
        once, again = (engine.ask("decode", "b", 3, 17, STEPS) for _ in range(2))
        assert (once["first"], once["last"]) == (again["first"], again["last"])


def test_engines_prefill_the_same_prompts(engines):
    ours, stock = (engine.ask("prefill", "c", 2, 48) for engine in engines)
    assert ours["first"] == stock["first"]


def test_other_names_are_other_prompts(engines):
    ours = engines[0]
    assert ours.ask("prefill", "d", 4, 32)["first"] != ours.ask("prefill", "e", 4, 32)["first"]
