"""Tiny checkpoints of every served architecture, made once for a test run.

The shapes are those of `tests.checkpoints.text`: three layers, hidden 64, windows of 24 tokens and
soft caps and limits low enough that dropping one shows.
"""

import gc
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from engine.worker import torch_runner
from engine.worker.forward.reference_attention import ReferenceBackend
from engine.worker.interface import RunnerSpec
from engine.worker.skeleton.families import LISTED
from engine.worker.text.interface import ModelInfo
from engine.worker.text.runner import TorchRunner
from tests.checkpoints.text import PRESETS, Shape, make
from tests.support.parity import Oracle

TINY = PRESETS["tiny"]


def prompt_of(rng: random.Random, length: int) -> list[int]:
    """Return random token ids."""
    return [rng.randrange(1, TINY.vocab) for _ in range(length)]


def seeded_prompt(length: int, seed: int = 0) -> list[int]:
    """Return a random prompt, the same for the same arguments."""
    return prompt_of(random.Random(f"{seed} {length}"), length)


@dataclass(frozen=True)
class Entry:
    """A model of `ZOO`: its model type in transformers, further fields of its config, its shape."""

    arch: str
    extra: dict[str, Any] = field(default_factory=dict)
    shape: Shape = TINY


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}  # fmt: skip
# As in Hunyuan's checkpoints, whose scaling is not dynamic in spite of the name.
ALPHA_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}
# Phi-3 has original_max_position_embeddings at the config's top level, not in rope_scaling.
LONG_PHI3 = {
    "rope_parameters": LONG_ROPE,
    "original_max_position_embeddings": 600,
    "sliding_window": None,
}

ZOO: dict[str, Entry] = {
    "llama": Entry("llama"),
    "llama, untied, biases": Entry(
        "llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}
    ),
    "llama, llama3 rotary": Entry("llama", {"rope_parameters": LLAMA3_ROPE}),
    # As on Qwen 3's card, whose config does not name the stretched length.
    "llama, yarn": Entry("llama", {"rope_parameters": YARN_ROPE, "max_position_embeddings": 320}),
    "llama, linear rotary": Entry("llama", {"rope_parameters": LINEAR_ROPE}),
    "qwen2": Entry("qwen2"),
    "qwen2, windows above": Entry(
        "qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    ),
    "qwen3": Entry("qwen3"),
    "qwen3_moe": Entry("qwen3_moe"),
    "qwen3_moe, a layer without": Entry(
        "qwen3_moe",
        {
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "moe_intermediate_size": 40,
            "num_experts": 5,
            "num_experts_per_tok": 3,
        },
    ),
    "mistral": Entry("mistral"),
    "mistral, no window": Entry("mistral", {"sliding_window": None}),
    "phi3": Entry("phi3"),
    "phi3, longrope": Entry("phi3", LONG_PHI3),
    "gemma": Entry("gemma"),
    "gemma2": Entry("gemma2"),
    "gemma3": Entry("gemma3_text"),
    "olmo2": Entry("olmo2"),
    "gpt2": Entry("gpt2"),
    "gpt2, layer-scaled": Entry(
        "gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
    ),
    "opt": Entry("opt"),
    "opt, projected": Entry("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "granite": Entry("granite"),
    "starcoder2": Entry("starcoder2"),
    "smollm3": Entry("smollm3"),
    "ministral": Entry("ministral"),
    "ministral3": Entry("ministral3"),
    "mixtral": Entry("mixtral"),
    "qwen2_moe": Entry("qwen2_moe"),
    "olmo": Entry("olmo"),
    "olmo3": Entry("olmo3"),
    "cohere": Entry("cohere"),
    "cohere2": Entry("cohere2"),
    "glm": Entry("glm"),
    "glm4": Entry("glm4"),
    "phi": Entry("phi"),
    "phi, normed heads": Entry("phi", {"qk_layernorm": True}),
    "gpt_neox": Entry("gpt_neox"),
    "gpt_neox, in sequence": Entry(
        "gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": False}
    ),
    "exaone4": Entry("exaone4"),
    "hunyuan": Entry("hunyuan_v1_dense"),
    "hunyuan, alpha": Entry(
        "hunyuan_v1_dense",
        {"rope_parameters": ALPHA_ROPE},
    ),
    "ernie4_5": Entry("ernie4_5"),
    "seed_oss": Entry("seed_oss"),
    "gpt_oss": Entry("gpt_oss"),
    "lfm2": Entry("lfm2"),
    "qwen3_next": Entry("qwen3_next"),
    "qwen3_5": Entry("qwen3_5_text"),
    "granite, hybrid": Entry("granitemoehybrid"),
    "granite, hybrid, no positions": Entry("granitemoehybrid", {"position_embedding_type": None}),
    "bamba": Entry("bamba"),
    "falcon_h1": Entry("falcon_h1"),
}


COMPILED_ROWS = [
    name
    for name, entry in ZOO.items()
    if entry.arch in {family.model_type for family in LISTED.values()}
]


@dataclass(slots=True)
class Loaded:
    """A runner with its model, and the oracle of the same checkpoint."""

    directory: Path
    runner: TorchRunner
    info: ModelInfo
    oracle: Oracle


# The two ways to run a model: compiled, and as on a machine without a compiler.
COMPILED, REFERENCE = "compiled", "reference"
WAYS = (COMPILED, REFERENCE)


def load_runner(
    directory: Path, *, way: str = COMPILED, **fields: Any
) -> tuple[TorchRunner, ModelInfo]:
    """Return a loaded runner. It has one thread: the shapes are too small for two to help."""
    spec = RunnerSpec(**({"model": str(directory), "kv_bytes": 1 << 24, "threads": 1} | fields))
    runner = TorchRunner(spec, ReferenceBackend() if way == REFERENCE else None)
    return runner, runner.load(lambda _progress: None)


class Zoo:
    """Makes the checkpoint of an `Entry`, and loads it, when a test first uses the entry."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._loaded: dict[tuple[str, str], Loaded] = {}
        self._oracles: dict[str, Oracle] = {}

    def directory(self, name: str) -> Path:
        """Return the folder of an entry's checkpoint."""
        path = self._root / name.replace(",", "").replace(" ", "-")
        if not path.exists():
            entry = ZOO[name]
            make(path, entry.arch, entry.shape, extra=entry.extra)
        return path

    def load(self, name: str, way: str = COMPILED) -> Loaded:
        """Return an entry's runner and oracle."""
        if (name, way) not in self._loaded:
            directory = self.directory(name)
            runner, info = load_runner(directory, way=way)
            self._loaded[name, way] = Loaded(directory, runner, info, self.oracle(name))
        return self._loaded[name, way]

    def oracle(self, name: str) -> Oracle:
        """Return an entry's oracle."""
        if name not in self._oracles:
            self._oracles[name] = Oracle(str(self.directory(name)))
        return self._oracles[name]

    def close(self) -> None:
        """Close all runners, and collect once for all of them."""
        with mock.patch.object(torch_runner, "collect_after_close"):
            for loaded in self._loaded.values():
                loaded.runner.close()
        gc.collect()
