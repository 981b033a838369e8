"""Models that load beside each other in threads import large libraries one at a time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.checkpoints import diffusion, encoder, text, vision

pytestmark = pytest.mark.model

# Loads a model, and prints each module that is imported while other threads may import, too.
WATCH = """
import sys
from engine.worker import importing

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HEAVY and not importing.lock._is_owned():
            print(name)

HEAVY = {"torch", "transformers", "sentence_transformers", "diffusers", "huggingface_hub"}
sys.meta_path.insert(0, Watch())
from engine.config import EngineConfig, ModelConfig
from engine.worker.factory import make_runner
model = ModelConfig(sys.argv[1])
runner = make_runner(model, EngineConfig(models=(model,), kv_cache_memory=8 << 20))
runner.estimate()
runner.load(lambda progress: None)
"""
# Loads models at once, each in a thread, as at a server's start, and prints what failed.
AT_ONCE = """
import sys, threading
from engine.config import EngineConfig, ModelConfig
from engine.worker.factory import make_runner

def load(path):
    model = ModelConfig(path)
    begin.wait()
    try:
        runner = make_runner(model, EngineConfig(models=(model,), kv_cache_memory=8 << 20))
        runner.estimate()
        runner.load(lambda progress: None)
    except Exception as error:
        print(path, repr(error), repr(error.__cause__))

begin = threading.Barrier(len(sys.argv) - 1)
threads = [threading.Thread(target=load, args=(path,)) for path in sys.argv[1:]]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
KINDS = {
    "idefics3": lambda path: vision.make(path, "idefics3"),
    "smolvlm": vision.make,
    "gpt2": lambda path: text.make(path, "gpt2"),
    "llama": text.make,
    "embedding": encoder.make_embedder,
    "rerank": encoder.make_reranker,
    "clip": encoder.make_image_embedder,
    "diffusion": diffusion.make,
}


def said(program, *paths):
    """Return what a program prints, in an interpreter of its own that must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, paths)],
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
    )
    return done.stdout.split("\n")[:-1]


@pytest.mark.slow
def test_no_thread_imports_a_large_library_beside_another():
    assert said(WATCH, "demo-see") == []


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_no_thread_imports_a_large_library_beside_another_for_any_kind(kind, tmp_path):
    assert said(WATCH, KINDS[kind](tmp_path / "model")) == []


@pytest.mark.full
@pytest.mark.timeout(3 * 3600)
def test_eight_models_at_the_start_are_all_ready_in_fifty_starts(tmp_path):
    paths = [make(tmp_path / kind) for kind, make in KINDS.items()]
    for _ in range(50):
        assert said(AT_ONCE, *paths) == []
