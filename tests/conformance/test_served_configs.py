"""Every served architecture, with configs beyond those of the model zoo.

Windows are on or off, sizes are odd, mixtures have more or fewer experts. Checkpoints are written
by transformers' ``save_pretrained``, and log-probabilities are compared with its own.
"""

import random

import pytest
import torch

from engine.core.text.types import Sampling
from engine.worker.load.checkpoint import current_name
from engine.worker.load.joined_experts import Joining
from tests.checkpoints.text import EXTRA, make, make_config
from tests.support.mini_planner import MiniPlanner
from tests.support.model_zoo import TINY, ZOO, load_runner, prompt_of
from tests.support.parity import Oracle

TOLERANCE = 1e-4
NEAR_TIE = 1e-4  # a router's scores this close are a tie; later tokens are not compared
LENGTH = 90  # several times the window

# A checkpoint of every architecture, by model type; Granite 4 also with experts.
KINDS = {entry.arch: {} for entry in ZOO.values()} | {
    "granitemoehybrid, experts": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
TYPED = (
    *("qwen2", "qwen3", "qwen2_moe", "gemma2", "gemma3_text", "ministral", "olmo3", "cohere2"),
    *("exaone4", "gpt_oss"),
)
QUICK = {
    ("qwen2_moe", True),
    ("qwen2_moe", False),
    ("granitemoehybrid, experts", True),
}


def drawn(kind, *, windows):
    """Return the fields of a config: with windows, and then also odd sizes, or without."""
    rng = random.Random(f"{kind} {windows}")
    arch = kind.partition(",")[0]
    own = EXTRA.get(arch, {}) | KINDS[kind]
    fields = dict(KINDS[kind])
    if not windows and arch in TYPED:
        return fields | {"use_sliding_window": False, "layer_types": ["full_attention"] * 3}
    if not windows:
        return fields | {"use_sliding_window": False, "sliding_window": None}
    fields |= {
        "use_sliding_window": True,
        "sliding_window": rng.randint(3, 40),
        "max_window_layers": rng.randint(0, 2),
    }
    if arch in TYPED:
        fields["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
        rng.shuffle(fields["layer_types"])
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if name in own:
            fields[name] = rng.randrange(33, 80, 2)
    if own.get("num_local_experts") or arch == "ernie4_5":
        fields["intermediate_size"] = rng.randrange(65, 130, 2)
    for name in ("num_experts", "num_local_experts"):
        if own.get(name):
            fields[name] = rng.choice([3, 5, 7])
    return fields


def log_probabilities(directory, **fields):
    """Return a prompt's log-probabilities, ours and transformers', up to the first token whose
    experts are nearly a tie."""
    runner, info = load_runner(directory, **fields)
    planner = MiniPlanner(runner, info, chunks=33)
    prompt = prompt_of(random.Random(5), LENGTH)
    one = planner.add(prompt, 1, sampling=Sampling(temperature=0.0, prompt_logprobs=0))
    planner.run()
    runner.close()
    assert one.failure is None, one.failure
    logits, margins = Oracle(str(directory)).next_logits(prompt)
    wanted = logits[:-1].double().log_softmax(1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    ours = [entry.logprob for entry in one.prompt_logprobs[1:]]
    ties = (margins[:-1] < NEAR_TIE).nonzero()
    end = int(ties[0]) if len(ties) else len(wanted)
    assert end > LENGTH // 2
    return torch.tensor(ours[:end], dtype=torch.float64), wanted[:end]


CASES = [
    pytest.param(
        kind,
        windows,
        marks=[] if (kind, windows) in QUICK else pytest.mark.full,
        id=f"{kind}, {'with' if windows else 'without'} windows",
    )
    for kind in KINDS
    for windows in (True, False)
]


@pytest.mark.parametrize(("kind", "windows"), CASES)
def test_a_saved_checkpoint_gives_transformers_log_probabilities(tmp_path, kind, windows):
    make(tmp_path, kind.partition(",")[0], TINY, extra=drawn(kind, windows=windows))
    ours, wanted = log_probabilities(tmp_path)
    torch.testing.assert_close(ours, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("width", [44, 41])
def test_experts_of_rows_that_torch_cannot_group_run_in_bfloat16(tmp_path, width):
    """Torch groups rows of whole multiples of 16 bytes; 44 or 41 numbers of bfloat16 are none."""
    make(tmp_path, "qwen2_moe", TINY, extra={"moe_intermediate_size": width})
    ours, wanted = log_probabilities(tmp_path, dtype="bfloat16")
    assert (ours - wanted).abs().median() < 0.3  # a wrong model differs by 3 and more


# --- the names that checkpoints give their tensors --------------------------------------------

# For every conversion of transformers for a served architecture, the name of a stored tensor.
EXAMPLES = {
    "mlp.experts.*.gate_proj.weight": "model.layers.3.mlp.experts.2.gate_proj.weight",
    "mlp.experts.*.up_proj.weight": "model.layers.3.mlp.experts.2.up_proj.weight",
    "mlp.experts.*.down_proj.weight": "model.layers.3.mlp.experts.2.down_proj.weight",
    ".block_sparse_moe.": "model.layers.3.block_sparse_moe.gate.weight",
    ".experts.*.w1.weight": "model.layers.3.block_sparse_moe.experts.2.w1.weight",
    ".experts.*.w3.weight": "model.layers.3.block_sparse_moe.experts.2.w3.weight",
    ".experts.*.w2.weight": "model.layers.3.block_sparse_moe.experts.2.w2.weight",
    r"^embed_out\.": "embed_out.weight",
    r"^model\.language_model\.(.+)": "model.language_model.layers.3.mlp.up_proj.weight",
    **{
        rf"block_sparse_moe\.{pattern}\.weight": f"model.layers.3.block_sparse_moe.{name}.weight"
        for pattern, name in (
            ("input_linear", "input_linear"),
            ("output_linear", "output_linear"),
            (r"router\.layer", "router.layer"),
        )
    },
}


def conversions(arch):
    """Return transformers' conversions of an architecture's checkpoints."""
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(arch, TINY, {}))
    return get_model_conversion_mapping(model, add_legacy=False)


@pytest.mark.parametrize("arch", dict.fromkeys(entry.arch for entry in ZOO.values()))
def test_a_stored_tensor_has_the_name_that_transformers_gives_it(arch):
    rules = conversions(arch)
    for pattern in [one for rule in rules for one in rule.source_patterns]:
        stored = wanted = EXAMPLES[pattern]
        for rule in rules:
            wanted = rule.rename_source_key(wanted)[0]
        pieces = [wanted]
        if wanted.endswith("_proj"):  # joined experts; ours are separate
            pieces += [one.name for one in Joining().pieces(wanted, (4, 8, 8))]
        assert current_name(stored) in pieces, pattern


def test_every_example_is_of_a_conversion_that_transformers_has():
    archs = {entry.arch for entry in ZOO.values()}
    known = {one for arch in archs for rule in conversions(arch) for one in rule.source_patterns}
    assert set(EXAMPLES) == known
