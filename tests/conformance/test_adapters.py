"""Adapters (LoRA) compute what peft's unmerged model computes.

In float32, logits differ by at most 1e-5 of the largest logit, for any mixture of adapters and the
base model in one step. Both the project's own kernels and the modules of transformers are tested.
"""

import json
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.config import ADAPTER_FILES
from engine.worker.forward.attention import KEYWORD
from engine.worker.forward.backends import pick_backend, prepare
from engine.worker.forward.kv_cache import KvCache
from engine.worker.forward.packing import pack
from engine.worker.forward.reference_attention import ReferenceBackend
from engine.worker.load.adapter import (
    WEIGHTS_NAME,
    LowRank,
    StoredAdapter,
    measure_adapter,
    read_adapter,
)
from engine.worker.load.adapter_config import AdapterForm
from engine.worker.load.architectures import layer_shapes
from engine.worker.load.foreign import ADAPTER_NAME
from engine.worker.load.probe import probe
from engine.worker.load.refusal import Refusal
from engine.worker.text.adapters import LoadedAdapters, group_rows
from tests.conformance.test_rewrites import CPU, load
from tests.support.adapter_files import files_in
from tests.support.adapters import (
    ATTENTION,
    LINEARS,
    change_tensors,
    peft_model,
    write_by_hand,
    write_by_peft,
)
from tests.support.encoder_zoo import edit_json

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # peft warns
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

CONFIG, WEIGHTS = ADAPTER_NAME, WEIGHTS_NAME
ERROR = 1e-5
COUNTS = (40, 1, 3, 70, 1, 9, 2)
COMPILED, PACKED, STOCK = "compiled", "stock with compiled products", "stock"


class Adapted:
    """A checkpoint's model with adapters, over a cache of its own."""

    def __init__(self, directory, way=COMPILED, dtype=torch.float32, quantization="none"):
        model = load(directory, dtype, quantization, is_stock=way != COMPILED)
        shapes = layer_shapes(model.config)
        self.cache = KvCache(shapes, 64, 16, dtype=dtype, device=CPU)
        calls = probe(model, shapes)
        backend, why = ReferenceBackend(), "it was chosen"
        if way != STOCK:
            backend, why = pick_backend(CPU, dtype, shapes, calls)
        self.execution = prepare(model, backend, why, calls, self.cache, quantization=quantization)
        self.vocab = model.config.vocab_size

    def place(self, directory):
        """Return the adapter in a directory, placed in memory as the model computes with it."""
        host = self.execution.adapters
        return host.place(read_adapter(str(directory), host.places, host.head))

    def ids(self, counts=COUNTS):
        """Return random tokens for each row."""
        rng = np.random.default_rng(7)
        return [rng.integers(1, self.vocab, count) for count in counts]

    def logits(self, adapters, counts=COUNTS, keep=None):
        """Return the logits of every row, [count, vocab] float32 each. ``adapters`` has a placed
        adapter or None for each row; equal adapters follow one another."""
        rng = np.random.default_rng(8)
        blocks = iter(rng.permutation(64))
        tables = [np.array([next(blocks) for _ in range(-(-c // 16))]) for c in counts]
        rows = pack([0] * len(counts), counts, tables, 16)
        keep = np.arange(rows.num_tokens) if keep is None else keep
        inputs = {
            "input_ids": torch.from_numpy(np.concatenate(self.ids(counts)))[None],
            "position_ids": torch.from_numpy(rows.positions)[None],
            "use_cache": False,
            "logits_to_keep": torch.from_numpy(keep),
            KEYWORD: self.execution.backend.prepare(rows, self.cache),
        }
        groups = group_rows(adapters, counts, keep)
        with torch.inference_mode():
            if groups:
                output = self.execution.adapters.forward(groups, inputs)
            else:
                output = self.execution.model.module(**inputs)
        found = output.logits[0].float().clone()
        return found if len(found) != rows.num_tokens else found.split(list(counts))


def error_of(found, wanted):
    """Return the largest difference, relative to the largest number of ``wanted``."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def expected(base, directory, rows):
    """Return what peft's unmerged model computes for each row."""
    with peft_model(base, directory) as model:
        return [model(torch.from_numpy(row)[None]).logits[0] for row in rows]


CONFIGS = {
    "rank 1": {"r": 1, "lora_alpha": 3, "target_modules": list(LINEARS)},
    "rank 8, attention": {"r": 8, "target_modules": list(ATTENTION), "use_rslora": True},
    "rank 16, all linears": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
    "rank 64": {"r": 64, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj", "down_proj"]},
    "head and values": {"r": 5, "target_modules": ["v_proj", "lm_head"]},
    "patterns": {
        "r": 8,
        "target_modules": r"model\.layers\.\d+\.(self_attn\.[qkv]|mlp\.(gate|down))_proj",
        "exclude_modules": ["layers.1.self_attn.k_proj"],
        "rank_pattern": {"q_proj": 3, r"layers\.2\.mlp\..*": 20},
        "alpha_pattern": {"down_proj": 40, r"layers.0.self_attn.v_proj": 5},
    },
    "two layers": {"r": 7, "target_modules": list(LINEARS), "layers_to_transform": [0, 2]},
}


@pytest.mark.parametrize("way", [COMPILED, STOCK])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_of_peft_gives_the_logits_of_pefts_unmerged_model(zoo, tmp_path, name, way):
    """Here every row of the step has the adapter."""
    base = zoo.directory("llama")
    directory = write_by_peft(tmp_path, base, **CONFIGS[name])
    model = Adapted(base, way)
    placed = model.place(directory)
    found = model.logits([placed] * len(COUNTS))
    wanted = expected(base, directory, model.ids())
    plain = model.logits([None] * len(COUNTS))
    assert max(map(error_of, found, wanted)) <= ERROR
    assert min(map(error_of, plain, wanted)) > 100 * ERROR, "the adapter changes nothing"


@pytest.mark.parametrize(
    ("arch", "way", "targets"),
    [
        ("qwen2", COMPILED, "all-linear"),
        ("qwen3_moe", COMPILED, ["q_proj", "o_proj", "lm_head"]),
        ("qwen2_moe", COMPILED, ["q_proj", "gate_proj", "up_proj", "down_proj"]),
        ("phi3", COMPILED, ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]),
        ("gemma2", COMPILED, "all-linear"),
        ("granite", COMPILED, "all-linear"),
        ("llama, untied, biases", COMPILED, ["q_proj", "gate_proj", "lm_head"]),
        ("starcoder2", PACKED, ["q_proj", "c_fc", "c_proj"]),
        ("gpt2", PACKED, ["c_attn", "c_fc", "c_proj"]),
        ("opt", STOCK, ["q_proj", "fc1", "fc2", "out_proj"]),
        ("phi3", STOCK, ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]),
    ],
)
def test_three_adapters_and_the_base_share_one_step(zoo, tmp_path, arch, way, targets):
    """Each row has the logits of peft's model with its adapter, for models with each form of
    layers."""
    base = zoo.directory(arch)
    ranks = (4, 16, 33)
    written = [
        write_by_peft(tmp_path / str(rank), base, seed=rank, r=rank, target_modules=targets)
        for rank in ranks
    ]
    model = Adapted(base, way)
    placed = [model.place(directory) for directory in written]
    of_rows = [0, 0, None, 1, 1, 2, None]
    found = model.logits([None if one is None else placed[one] for one in of_rows])
    ids = model.ids()
    for index, directory in enumerate([*written, None]):
        rows = [i for i, one in enumerate(of_rows) if (3 if one is None else one) == index]
        wanted = expected(base, directory, [ids[i] for i in rows])
        assert max(error_of(found[i], own) for i, own in zip(rows, wanted, strict=True)) <= ERROR


def test_only_the_kept_rows_get_their_adapters_logits(zoo, tmp_path):
    """In the last layer and the head, only rows whose logits are computed get adapters."""
    base = zoo.directory("llama")
    model = Adapted(base)
    placed = [
        model.place(write_by_hand(tmp_path / str(i), base, seed=i, targets=(*LINEARS, "lm_head")))
        for i in range(2)
    ]
    adapters = [None, placed[0], placed[0], placed[0], placed[1], None, placed[1]]
    adapters = [*adapters[:5], placed[1], None]
    whole = torch.cat(model.logits(adapters))
    keep = np.array([39, 42, 43, 113, 114, 125])
    assert torch.equal(model.logits(adapters, keep=keep), whole[keep])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_over_quantized_weights_adds_what_it_adds_over_floats(
    zoo, tmp_path, quantization, dtype
):
    """Only the base's weights are rounded; the adapter is computed in the model's dtype."""
    base = zoo.directory("llama")
    directory = write_by_hand(tmp_path, base, targets=("lm_head",), fields={"r": 4})
    small = Adapted(base, dtype=dtype, quantization=quantization)
    plain = torch.cat(small.logits([None] * len(COUNTS)))
    found = torch.cat(small.logits([small.place(directory)] * len(COUNTS)))
    # The head's inputs are the same with and without adapter, so the difference is its product.
    exact = Adapted(base)
    head = read_adapter(str(directory), exact.execution.adapters.places, "lm_head").parts["lm_head"]
    delta = head.scale * head.expand.double() @ head.shrink.double()
    hidden = hidden_states(small)
    wanted = hidden.double() @ delta.T
    bound = 1e-4 if dtype is torch.float32 else 0.02
    assert error_of((found - plain).double(), wanted) < bound


def hidden_states(model):
    """Return the inputs of a compiled model's head for all rows, [num_tokens, hidden] float32. An
    adapter whose expansion is the identity adds them to the logits."""
    hidden = model.execution.adapters.places["lm_head"][0]
    expand = torch.zeros(model.vocab, hidden)
    expand[:hidden] = torch.eye(hidden)
    stored = StoredAdapter("", {"lm_head": LowRank(torch.eye(hidden), expand, 1.0)})
    rows, placed = len(COUNTS), model.execution.adapters.place(stored)
    found = torch.cat(model.logits([placed] * rows)) - torch.cat(model.logits([None] * rows))
    return found[:, :hidden]


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"kasa_config": {"beta": 1}}, "kasa_config"),
        ({"r": 0}, "its r has the rank 0"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"rank_pattern": {"q_proj": 9}}, "q_proj.lora_A.weight has the shape"),
        ({"rank_pattern": {"(": 9}}, "no regular expression"),
        ({"target_modules": ["q_proj", "embed"]}, "has no place"),
        ({"target_modules": [*LINEARS, "lm_head"]}, "lacks the tensor"),
        ({"target_modules": ["nothing"]}, "name no linear layer"),
        ({"target_modules": []}, "names no target_modules"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(zoo, tmp_path, fields, said):
    """Red if a field is ignored: a part of the adapter would be missing from each answer."""
    base = zoo.directory("llama")
    directory = write_by_hand(tmp_path, base)
    edit_json(directory / "adapter_config.json", **fields)
    host = Adapted(base).execution.adapters
    with pytest.raises(Refusal, match=re.escape(said)):
        read_adapter(str(directory), host.places, host.head)


def test_a_tensor_without_a_place_or_a_place_without_its_tensor_is_refused(zoo, tmp_path):
    """Tensors of another shape or with infinite numbers, and damaged files, are refused, too."""
    base = zoo.directory("llama")
    host = Adapted(base).execution.adapters
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    cases = {
        "lacks the tensor": lambda tensors: tensors.pop(name),
        "has no place": lambda tensors: tensors.update({"base_model.model.x": torch.ones(1)}),
        "has the shape": lambda tensors: tensors.update({name: torch.ones(3, 4)}),
        "not finite": lambda tensors: tensors[name].fill_(float("nan")),
        "floats are needed": lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}),
        "lora_magnitude_vector": lambda tensors: tensors.update(
            {name.replace("lora_B", "lora_magnitude_vector"): torch.ones(64)}
        ),
        "save_embedding_layers": lambda tensors: tensors.update(
            {"base_model.model.lm_head.base_layer.weight": torch.ones(512, 64)}
        ),
    }
    for said, change in cases.items():
        directory = write_by_hand(tmp_path / said.replace(" ", "-"), base)
        change_tensors(directory / WEIGHTS, change)
        with pytest.raises(Refusal, match=said):
            read_adapter(str(directory), host.places, host.head)
    weights = directory / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-5])
    with pytest.raises(Refusal, match="cut short"):
        read_adapter(str(directory), host.places, host.head)
    weights.unlink()
    (directory / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(Refusal, match="pickled"):
        read_adapter(str(directory), host.places, host.head)
    with pytest.raises(Refusal, match="does not exist"):
        read_adapter(str(tmp_path / "nowhere"), host.places, host.head)


def test_only_regular_files_are_read(tmp_path):
    """Reading a pipe or a device would never end. A large config is refused, too."""
    for file in (CONFIG, WEIGHTS):
        directory = files_in(tmp_path / file)
        (directory / file).unlink()
        os.mkfifo(directory / file)
        with pytest.raises(Refusal, match=f"{file} cannot be read .it is not a regular file"):
            measure_adapter(str(directory))
    with pytest.raises(Refusal, match="more than 1 MiB"):
        measure_adapter(str(files_in(tmp_path / "large", base_model_name_or_path="x" * (1 << 20))))


@pytest.mark.parametrize("shape", [[-(1 << 40)], [1.5], [True], ["x"], 3])
def test_a_shape_has_sizes_only(tmp_path, shape):
    """A negative size would make a load reserve too little, and take memory that is not free."""
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    with pytest.raises(Refusal, match="cut short or is not"):
        measure_adapter(str(files_in(tmp_path, header)))


@pytest.mark.parametrize("shape", [[1 << 40, 1], [10**400, 10**400], [1 << 20, 1 << 20]])
def test_a_header_names_no_more_numbers_than_the_file_has_bytes(tmp_path, shape):
    """Red if a damaged file can reserve so much memory that its base model cannot load."""
    header = {"x.lora_A.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}
    with pytest.raises(Refusal, match="cut short or is not a safetensors file"):
        measure_adapter(str(files_in(tmp_path, json.dumps(header).encode() + b" " * 4)))


def test_what_python_cannot_parse_is_refused(tmp_path):
    """Deeply nested JSON, and numbers too large for a float, are refused."""
    deep = b"[" * 200_000
    with pytest.raises(Refusal, match="cut short or is not"):
        measure_adapter(str(files_in(tmp_path, deep)))
    for alpha in (10**400, float("inf")):
        with pytest.raises(Refusal, match="lora_alpha"):
            measure_adapter(str(files_in(tmp_path, lora_alpha=alpha)))


@pytest.mark.parametrize("arch", ["llama", "phi3", "starcoder2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 33])
def test_a_loaded_adapter_takes_at_most_what_was_measured(zoo, tmp_path, arch, dtype, rank):
    """The padding of small ranks counts, too."""
    base = zoo.directory(arch)
    targets = {"phi3": ("qkv_proj", "gate_up_proj"), "starcoder2": ("q_proj", "c_fc")}
    directory = write_by_hand(
        tmp_path, base, rank=rank, targets=targets.get(arch, (*LINEARS, "lm_head"))
    )
    loaded = LoadedAdapters(SimpleNamespace(max_num_batched_tokens=64))
    loaded.open(Adapted(base, dtype=dtype).execution.adapters, dtype, CPU)
    measured, info = loaded.measure(str(directory)), loaded.load(str(directory))
    assert info.num_bytes <= measured


def test_the_digest_is_that_of_the_content(zoo, tmp_path):
    """Copies have equal digests; another tensor or another scale gives another digest."""
    base = zoo.directory("llama")
    host = Adapted(base).execution.adapters

    def digest(name, **given):
        directory = write_by_hand(tmp_path / name, base, **given)
        return read_adapter(str(directory), host.places, host.head).digest

    assert digest("a") == digest("b")
    others = [digest("seed", seed=1), digest("scale", fields={"lora_alpha": 3})]
    assert len({digest("a"), *others}) == 3


def test_the_server_looks_at_the_files_that_are_read():
    """LoadAdapter checks these files before the worker reads them."""
    assert ADAPTER_FILES == (CONFIG, WEIGHTS)


# ---- faults that the comparisons above must find


def test_a_wrong_scale_and_swapped_groups_show(zoo, tmp_path, monkeypatch):
    """Each fault exceeds the bound a hundred times, so the comparison with peft would fail."""
    base = zoo.directory("llama")
    written = [write_by_peft(tmp_path / str(i), base, seed=i, r=8, target_modules=["v_proj"])
               for i in range(2)]  # fmt: skip
    model = Adapted(base)
    placed = [model.place(directory) for directory in written]
    half = len(COUNTS) // 2
    right = [placed[0]] * half + [placed[1]] * (len(COUNTS) - half)
    swapped = [placed[1]] * half + [placed[0]] * (len(COUNTS) - half)
    wanted = expected(base, written[0], model.ids()[:half])
    wanted += expected(base, written[1], model.ids()[half:])
    assert max(map(error_of, model.logits(right), wanted)) <= ERROR
    assert min(map(error_of, model.logits(swapped), wanted)) > 100 * ERROR
    monkeypatch.setattr(AdapterForm, "scale_of", lambda self, name: self.alpha / self.rank * 1.1)
    wrong = [model.place(directory) for directory in written]
    wrong = [wrong[0]] * half + [wrong[1]] * (len(COUNTS) - half)
    assert min(map(error_of, model.logits(wrong), wanted)) > 100 * ERROR
