"""Experts in MXFP4 are read as transformers reads them (D24).

The writer here follows the specification of microscaling formats and the layout of the published
GPT-OSS checkpoints.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Mxfp4Config
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from engine.errors import SpawnFailed
from engine.worker.forward.decoder import NativeDecoder
from engine.worker.interface import RunnerSpec
from engine.worker.load.joined_experts import Joining
from engine.worker.load.loader import read_config, weight_bytes
from engine.worker.quantized import mxfp4_checkpoint
from engine.worker.quantized.mxfp4_checkpoint import Mxfp4Checkpoint
from engine.worker.text.runner import TorchRunner
from tests.checkpoints.text import Shape, make
from tests.conformance.test_parity import ALONE_LENGTHS, assert_red, run_alone, run_packed
from tests.conformance.test_rewrites import Built, check_rounded_alike, round_inputs
from tests.support.adapters import change_tensors
from tests.support.model_zoo import REFERENCE, Loaded, load_runner
from tests.support.parity import Oracle, Tally

# The quantization settings of published GPT-OSS checkpoints.
SETTINGS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
FLOAT_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")
WEIGHTS = (".experts.gate_up_proj", ".experts.down_proj")
LARGE = Shape(2, 256, 4, 2, 768, 512, 1024, tied=False)  # nearly all of its weights are experts
ESTIMATE_OFF_MOST = 0.05


def packed(weight):
    """Return blocks and scales of weights [experts, inputs, outputs]."""
    groups = weight.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponents = groups.abs().amax(3).log2().floor() - 2
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks.contiguous(), (exponents + 127).to(torch.uint8)


def write_packed(plain, directory):
    """Write a float checkpoint of GPT-OSS with its experts in MXFP4."""
    shutil.copytree(plain, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith(WEIGHTS):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed(tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("mxfp4")
    return write_packed(make(root / "plain", "gpt_oss"), root / "packed")


@pytest.fixture(scope="module")
def oracle(checkpoint):
    """Return the stock model, which dequantises the experts."""
    return Oracle(str(checkpoint), quantization_config=Mxfp4Config(dequantize=True))


def write_all_codes(directory):
    """Write a layer's experts with every byte, and scales of every size that float32 has."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, outputs in (("gate_up_proj", 64), ("down_proj", 32)):
        blocks = torch.randint(0, 256, (2, outputs, 4, 16), generator=generator)
        blocks.flatten()[:256] = torch.arange(256)
        scales = torch.randint(0, 250, (2, outputs, 4), generator=generator)
        base = f"model.layers.0.mlp.experts.{name}"
        tensors[f"{base}_blocks"] = blocks.to(torch.uint8)
        tensors[f"{base}_scales"] = scales.to(torch.uint8)
        tensors[f"{base}_bias"] = torch.randn(2, outputs, generator=generator)
    save_file(tensors, directory / "model.safetensors")
    return tensors


def read_joined(directory, name, shape):
    joining = Joining(alternating=True)
    with Mxfp4Checkpoint(directory) as opened:
        return joining.join([opened.read(one.name) for one in joining.pieces(name, shape)], shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_weights_are_those_of_transformers_own_conversion(tmp_path, dtype):
    tensors = write_all_codes(tmp_path)
    for base in (name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")):
        blocks, scales = tensors[f"{base}_blocks"], tensors[f"{base}_scales"]
        wanted = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert torch.equal(read_joined(tmp_path, base, wanted.shape).to(dtype), wanted)
        bias = f"{base}_bias"
        assert torch.equal(read_joined(tmp_path, bias, tensors[bias].shape), tensors[bias])


def swapped(blocks):
    """Return the codes of blocks, each byte's high half first."""
    return torch.stack((blocks >> 4, blocks & 15), dim=-1).flatten(1)


FAULTS = {
    "the nibbles of a byte swapped": ("_codes", swapped),
    "the numbers not doubled": ("BIAS", 126),
    "signs left out": ("DOUBLED", tuple(map(abs, mxfp4_checkpoint.DOUBLED))),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_gives_other_weights(tmp_path, monkeypatch, fault):
    tensors = write_all_codes(tmp_path)
    base = "model.layers.0.mlp.experts.down_proj"
    wanted = convert_moe_packed_tensors(
        tensors[f"{base}_blocks"], tensors[f"{base}_scales"], dtype=torch.float32
    )
    monkeypatch.setattr(mxfp4_checkpoint, *fault)
    assert not torch.equal(read_joined(tmp_path, base, wanted.shape), wanted)


def load(checkpoint, oracle):
    """Return the checkpoint, loaded to run by transformers' modules."""
    runner, info = load_runner(checkpoint, way=REFERENCE, dtype="float32")
    return Loaded(checkpoint, runner, info, oracle)


def test_alone_and_packed_are_transformers_own_tokens(checkpoint, oracle):
    loaded = load(checkpoint, oracle)
    tally = Tally()
    loaded.oracle.compare(run_alone(loaded, ALONE_LENGTHS, 24), tally)
    loaded.oracle.compare(run_packed(loaded, 24)[0], tally)
    tally.check()
    loaded.runner.close()


def test_swapped_nibbles_turn_parity_red(checkpoint, oracle, monkeypatch):
    monkeypatch.setattr(mxfp4_checkpoint, "_codes", swapped)
    loaded = load(checkpoint, oracle)
    assert_red(loaded)
    loaded.runner.close()


def test_compiled_experts_compute_what_torch_does_with_the_same_roundings(
    checkpoint, scales_in_halves
):
    """The rows multiplied with experts are rounded to int8, as with other weights of 4 bits."""
    small = Built(checkpoint, torch.float32, is_stock=False, weights=Mxfp4Checkpoint(checkpoint))
    exact = Built(checkpoint, torch.float32, is_stock=True, weights=Mxfp4Checkpoint(checkpoint))
    round_inputs(exact.execution.model.module, but=FLOAT_LAYERS)
    check_rounded_alike(small, exact)


def divergence(exact, other):
    """Return the mean KL divergence of two models' next tokens, in nats."""
    sure, told = (one.logits().log_softmax(1) for one in (exact, other))
    return float((sure.exp() * (sure - told)).sum(1).mean())


def test_compiled_experts_diverge_from_float_rows_as_far_as_rows_of_int8_do(
    checkpoint, scales_in_halves
):
    """Only the rounding of the multiplied rows differs: with it a router near a tie may take
    another expert, which can move a log-probability by 2.5 with random weights."""

    def built(*, is_stock):
        weights = Mxfp4Checkpoint(checkpoint)
        return Built(checkpoint, torch.float32, is_stock=is_stock, weights=weights)

    exact, rounded, small = built(is_stock=True), built(is_stock=True), built(is_stock=False)
    round_inputs(rounded.execution.model.module, but=FLOAT_LAYERS)
    lost = divergence(exact, rounded)
    assert 5e-4 < lost < 5e-3
    assert divergence(exact, small) == pytest.approx(lost, rel=0.2)
    assert divergence(rounded, small) < 0.1 * lost


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Return a checkpoint that is mostly experts, in bfloat16."""
    root = tmp_path_factory.mktemp("large")
    return write_packed(make(root / "plain", "gpt_oss", LARGE, dtype="bfloat16"), root / "packed")


@pytest.mark.parametrize(
    ("dtype", "extra", "is_compiled", "share", "form"),
    [
        ("bfloat16", {}, True, 0.36, "MXFP4"),
        ("bfloat16", {"max_position_embeddings": 2048}, True, 0.36, "MXFP4"),
        ("float16", {}, False, 1.0, "MXFP4 (expanded)"),
        ("bfloat16", {"unheard_of": 1}, True, 1.0, "MXFP4 (experts expanded)"),
    ],
    ids=["compiled", "another YaRN factor", "stock", "compiled from the stock module"],
)
def test_the_memory_is_as_estimated(large, tmp_path, dtype, extra, is_compiled, share, form):
    """Experts stay in 4 bits if a skeleton is compiled; otherwise they are expanded to floats."""
    shutil.copytree(large, tmp_path, dirs_exist_ok=True)
    config = json.loads((large / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | extra))
    fields = {"dtype": dtype, "kv_bytes": 1 << 17, "max_model_len": 64, "max_num_seqs": 1}
    runner, info = load_runner(tmp_path, max_num_batched_tokens=16, **fields)
    assert isinstance(runner._model.module, NativeDecoder) == is_compiled
    assert info.quantization == form
    plain = load_file(large.parent / "plain" / "model.safetensors").values()
    whole = 2 * sum(tensor.numel() for tensor in plain)
    assert runner._model.num_bytes == pytest.approx(share * whole, rel=0.05)
    spec = RunnerSpec(str(tmp_path), threads=1, max_num_batched_tokens=16, **fields)
    with Mxfp4Checkpoint(tmp_path) as opened:
        is_small = form == "MXFP4"
        _, config = read_config(tmp_path)
        told = weight_bytes(opened, config, torch.bfloat16, "none", is_compiled=is_compiled)
    assert told == pytest.approx(runner._model.num_bytes, rel=ESTIMATE_OFF_MOST)
    assert (told < 0.5 * whole) == is_small
    estimate = TorchRunner(spec).estimate().num_bytes
    # A step's own memory is only guessed before the load, and is a large part for so small a model.
    assert abs(info.memory_bytes / estimate - 1) <= 0.2
    runner.close()


def changed(checkpoint, directory, change):
    """Write the checkpoint with other tensors, and return the message of its refusal."""
    shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
    name = "model.layers.1.mlp.experts.down_proj"
    change_tensors(directory / "model.safetensors", lambda tensors: change(tensors, name))
    with pytest.raises(SpawnFailed) as refused:
        load_runner(directory)
    return str(refused.value)


def test_experts_without_scales_are_refused(checkpoint, tmp_path):
    said = changed(checkpoint, tmp_path, lambda tensors, base: tensors.pop(f"{base}_scales"))
    assert "lacks the tensor model.layers.1.mlp.experts.down_proj_scales" in said


def test_a_scale_that_is_no_number_is_refused(checkpoint, tmp_path):
    def change(tensors, base):
        tensors[f"{base}_scales"][0, 3, 1] = 255

    said = changed(checkpoint, tmp_path, change)
    assert "the scales of its model.layers.1.mlp.experts.0.down_proj.weight hold NaN" in said


def test_blocks_of_another_shape_are_refused(checkpoint, tmp_path):
    def change(tensors, base):
        tensors[f"{base}_blocks"] = tensors[f"{base}_blocks"].flatten(2).contiguous()

    assert "which MXFP4 does not have" in changed(checkpoint, tmp_path, change)
