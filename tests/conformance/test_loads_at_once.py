"""Models that load beside each other in threads import large libraries one at a time."""

from types import SimpleNamespace

import pytest

from engine.worker import import_lock
from engine.worker.tokenizing import gguf_tokenizer
from tests.checkpoints import encode as encoder
from tests.checkpoints import image_generation as diffusion
from tests.checkpoints import text, vision
from tests.support.gguf_files import write_model
from tests.support.programs import output_of

# The program loads a model, and prints each module that it imports while other threads may import.
WATCH = """
import sys
from engine.worker import import_lock

class Watch:
    def find_spec(self, name, path=None, target=None):
        is_look = sys._getframe(2).f_globals["__name__"] == "importlib.util"  # imports nothing
        if name.partition(".")[0] not in FREE and not is_look and not import_lock.lock._is_owned():
            seen.append(name)

# What has no circles: Python's own modules, ours, and Jinja's.
FREE = {*sys.stdlib_module_names, "engine", "jinja2", "markupsafe"}
seen = []
sys.meta_path.insert(0, Watch())
from engine.config import EngineConfig, ModelConfig
from engine.worker.factory import make_runner
model = ModelConfig(sys.argv[1])
runner = make_runner(model, EngineConfig(models=(model,), kv_cache_memory=8 << 20))
runner.estimate()
runner.load(lambda progress: None)
print(*(name for name in seen if name in sys.modules), sep="\\n", end="")
"""
# The program loads models at once, each in a thread, as a server does, and prints their errors.
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


def make_gguf(path):
    return write_model(text.make(path), path / "model.gguf")


@pytest.mark.slow
def test_no_thread_imports_a_large_library_beside_another():
    assert output_of(WATCH, "demo-see") == ""


@pytest.mark.full
@pytest.mark.parametrize("make", [*KINDS.values(), make_gguf], ids=[*KINDS, "gguf"])
def test_no_thread_imports_a_large_library_beside_another_for_any_kind(make, tmp_path):
    assert output_of(WATCH, make(tmp_path / "model"), limit_s=500) == ""


def test_other_loads_do_not_wait_while_merges_are_generated(monkeypatch):
    def generate(tokens, ranks):
        held.append(import_lock.lock._is_owned())
        return []

    held = []
    monkeypatch.setattr("transformers.tokenization_utils_base.generate_merges", generate)
    vocabulary = SimpleNamespace(merges=None, tokens=("a", "b"), scores=(0.0, -1.0))
    assert gguf_tokenizer._merges(vocabulary, {"a": 0, "b": 1}) == []
    assert held == [False]


@pytest.mark.full
@pytest.mark.timeout(3 * 3600)
def test_eight_models_at_the_start_are_all_ready_in_fifty_starts(tmp_path):
    paths = [make(tmp_path / kind) for kind, make in KINDS.items()]
    for _ in range(50):
        assert output_of(AT_ONCE, *paths, limit_s=500) == ""
