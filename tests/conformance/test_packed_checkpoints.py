"""GPTQ, AWQ and compressed-tensors checkpoints are read as their own packages write them.

The writers here follow the published layouts: AutoGPTQ's `QuantLinear.pack`, AutoAWQ's
`WQLinear_GEMM.from_linear` and compressed-tensors' `pack_to_int32`.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import SpawnFailed
from engine.worker.load.loader import read_config
from engine.worker.quantized import packed_checkpoint
from engine.worker.quantized.packed_checkpoint import PackedCheckpoint, read_layout
from engine.worker.skeleton.config import SkeletonConfig
from tests.checkpoints.text import make
from tests.conformance.test_rewrites import Built, check_rounded_alike, round_inputs
from tests.support.model_zoo import load_runner
from tools.lab.bench import w8a8

GROUP = 32
AWQ_PACKING = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ's order_map


def pack_words(codes, bits, order=None):
    """Return [rows, words] int32 of codes [rows, columns], the first code in the lowest bits."""
    per_word = 32 // bits
    codes = codes.long().reshape(len(codes), -1, per_word)
    if order is not None:
        codes = codes[..., order]
    words = (codes << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def quantised(weight, bits, group, *, is_symmetric):
    """Return codes [outputs, inputs], zeros and scales [outputs, groups], and the values that the
    codes stand for."""
    groups = weight.float().unflatten(1, (-1, group))
    most = (1 << bits) - 1
    if is_symmetric:
        scales = (groups.abs().amax(2) / (most / 2)).half().float()
        zeros = torch.full_like(scales, 1 << bits - 1)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / most).half().float()
        zeros = (-low / scales).round().clamp(0, most)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    values = (codes - zeros[..., None]) * scales[..., None]
    return codes.flatten(1), zeros, scales, values.flatten(1)


def as_gptq(base, weight, bits, zero_offset=1, **kwargs):
    """Return GPTQ's tensors of a weight, and the values that they stand for."""
    codes, zeros, scales, values = quantised(weight, bits, GROUP, **kwargs)
    return {
        f"{base}.qweight": pack_words(codes, bits).T.contiguous(),
        f"{base}.qzeros": pack_words((zeros.T.long() - zero_offset) & (1 << bits) - 1, bits),
        f"{base}.scales": scales.T.half().contiguous(),
        f"{base}.g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }, values


def as_awq(base, weight, bits, **kwargs):
    """Return AWQ's tensors of a weight, and the values that they stand for."""
    codes, zeros, scales, values = quantised(weight, bits, GROUP, is_symmetric=False)
    return {
        f"{base}.qweight": pack_words(codes.T, bits, AWQ_PACKING),
        f"{base}.qzeros": pack_words(zeros.T, bits, AWQ_PACKING),
        f"{base}.scales": scales.T.half().contiguous(),
    }, values


def as_packed(base, weight, bits, *, is_symmetric=True, group=GROUP):
    """Return compressed-tensors' tensors of a weight, and the values that they stand for."""
    group = group or weight.shape[1]
    codes, zeros, scales, values = quantised(weight, bits, group, is_symmetric=is_symmetric)
    tensors = {
        f"{base}.weight_packed": pack_words(codes, bits),
        f"{base}.weight_scale": scales.half(),
        f"{base}.weight_shape": torch.tensor(weight.shape),
    }
    if not is_symmetric:
        tensors[f"{base}.weight_zero_point"] = pack_words(zeros.T, bits).T.contiguous()
    return tensors, values


def as_int8(base, weight, bits):
    """Return the tensors of compressed-tensors' W8A8, and the weight's values."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    numbers = (weight.float() / scales).round()
    scales = scales.half()
    tensors = {f"{base}.weight": numbers.to(torch.int8), f"{base}.weight_scale": scales}
    return tensors, numbers * scales.float()


def compressed(bits, strategy="group", form="pack-quantized", *, symmetric=True, **inputs):
    """Return the settings of compressed-tensors."""
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy,
               "group_size": GROUP if strategy == "group" else None}  # fmt: skip
    scheme = {"weights": weights, "targets": ["Linear"], "input_activations": inputs or None}
    return {"quant_method": "compressed-tensors", "format": form,
            "config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}  # fmt: skip


GPTQ_READER = packed_checkpoint._gptq
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
W8A8 = compressed(8, "channel", "int-quantized", num_bits=8, dynamic=True)
LAYOUTS = {
    "GPTQ": (GPTQ, as_gptq, {"is_symmetric": True}),
    "GPTQ, zeros": (GPTQ | {"sym": False}, as_gptq, {"is_symmetric": False}),
    "GPTQ v2": (
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        as_gptq,
        {"is_symmetric": False, "zero_offset": 0},
    ),
    "GPTQ, 8 bits": (GPTQ | {"bits": 8}, as_gptq, {"is_symmetric": True}),
    "AWQ": (AWQ, as_awq, {}),
    "W4A16": (compressed(4), as_packed, {}),
    "W4A16, zeros": (compressed(4, symmetric=False), as_packed, {"is_symmetric": False}),
    "W4A16, channels": (compressed(4, "channel"), as_packed, {"group": None}),
    "W8A16": (compressed(8), as_packed, {}),
    "W8A8": (W8A8, as_int8, {}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make(tmp_path_factory.mktemp("plain"), "qwen2")


def write_packed(checkpoint, directory, name):
    """Write the checkpoint with its layers packed, and return their values."""
    settings, pack, options = LAYOUTS[name]
    bits = (
        settings.get("bits")
        or next(iter(settings["config_groups"].values()))["weights"]["num_bits"]
    )
    shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    tensors, values = {}, {}
    for one, weight in load_file(checkpoint / "model.safetensors").items():
        if not one.endswith("_proj.weight"):
            tensors[one] = weight
            continue
        parts, values[one] = pack(one.removesuffix(".weight"), weight, bits, **options)
        tensors |= parts
    save_file(tensors, directory / "model.safetensors")
    return values


def open_packed(directory):
    return PackedCheckpoint(
        directory, read_layout(json.loads((directory / "config.json").read_text()))
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_weights_are_the_values_that_were_packed(checkpoint, tmp_path, name):
    """Red if GPTQ's stored zeros are read without adding 1, or AWQ's nibbles in plain order."""
    values = write_packed(checkpoint, tmp_path, name)
    with open_packed(tmp_path) as packed:
        for one, wanted in values.items():
            assert packed.tensors[one].shape == wanted.shape
            found = packed.read(one)
            assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()
            small = packed.small(one)()
            assert (small.bits, small.group) == (packed.form(one).bits, packed.form(one).group)
            assert small.offsets is None or packed.form(one).has_offsets


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("AWQ", ("AWQ_ORDER", tuple(range(8)))),  # AWQ's nibbles are read in plain order
        ("GPTQ, zeros", ("_gptq", lambda told: replace(GPTQ_READER(told), is_zero_less_one=False))),
    ],
)
def test_a_planted_fault_gives_other_values(checkpoint, tmp_path, monkeypatch, name, fault):
    values = write_packed(checkpoint, tmp_path, name)
    monkeypatch.setattr(packed_checkpoint, *fault)
    with open_packed(tmp_path) as packed:
        for one, wanted in values.items():
            assert (packed.read(one) - wanted).abs().max() > 0.01 * wanted.abs().max()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_packed_checkpoint_computes_what_torch_does_with_the_same_roundings(
    checkpoint, tmp_path, name, scales_in_halves
):
    write_packed(checkpoint, tmp_path, name)
    small = Built(tmp_path, torch.float32, is_stock=False, weights=open_packed(tmp_path))
    exact = Built(tmp_path, torch.float32, is_stock=True, weights=open_packed(tmp_path))
    round_inputs(exact.execution.model.module, but=("lm_head",))
    check_rounded_alike(small, exact)


def test_the_benchs_w8a8_has_the_values_of_its_source_within_a_step(checkpoint, tmp_path):
    w8a8.write(checkpoint, tmp_path)
    source = load_file(checkpoint / "model.safetensors")
    with open_packed(tmp_path) as packed:
        rounded = [one for one in source if one.endswith("_proj.weight")]
        assert rounded
        for one in rounded:
            steps = source[one].float().abs().amax(1, keepdim=True) / w8a8.LARGEST
            # Scales in bfloat16 move the largest numbers by up to another half step.
            assert ((packed.read(one) - source[one].float()).abs() <= 1.01 * steps).all()
            assert packed.form(one).bits == 8


def test_a_packed_checkpoint_is_served_by_its_directory(checkpoint, tmp_path):
    write_packed(checkpoint, tmp_path, "AWQ")
    assert isinstance(read_config(tmp_path)[1], SkeletonConfig)
    runner, info = load_runner(tmp_path, dtype="bfloat16")
    assert info.quantization == "AWQ 4-bit"
    plain, _ = load_runner(checkpoint, dtype="bfloat16")
    assert runner._model.num_bytes < 0.6 * plain._model.num_bytes


def change(settings, **fields):
    """Return settings of compressed-tensors with changed fields of "weights"."""
    changed = json.loads(json.dumps(settings))
    changed["config_groups"]["group_0"]["weights"] |= fields
    return changed


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (GPTQ | {"bits": 3}, "GPTQ weights have 3 bits; 4 and 8 are read"),
        (GPTQ | {"group_size": 24}, "groups of 24; multiples of 16"),
        (GPTQ | {"checkpoint_format": "marlin"}, "in the format 'marlin'"),
        (AWQ | {"version": "gemv"}, "version 'gemv'; only gemm"),
        ({"quant_method": "bitsandbytes"}, r"quantised \(bitsandbytes\)"),
        (compressed(4, form="marlin-24"), "in the format 'marlin-24'"),
        (change(compressed(4), type="float"), "of type float; int is read"),
        (change(compressed(4), strategy="block"), "one for each block"),
        (compressed(8, "channel", "int-quantized", num_bits=8, dynamic=False), "dynamic scales"),
    ],
)
def test_a_layout_that_is_not_read_is_named(checkpoint, tmp_path, settings, why):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(SpawnFailed, match=why):
        load_runner(tmp_path)


def test_inputs_in_another_order_are_refused(checkpoint, tmp_path):
    write_packed(checkpoint, tmp_path, "GPTQ")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, path)
    with pytest.raises(SpawnFailed, match=r"layers.1.mlp.down_proj.weight are in another order"):
        load_runner(tmp_path)


@pytest.mark.parametrize("name", ["GPTQ", "AWQ", "W4A16", "W8A8"])
@pytest.mark.parametrize("change", ["fewer groups", "fewer outputs"])
def test_scales_of_another_shape_are_refused(checkpoint, tmp_path, name, change):
    """With fewer scales, the kernels would read behind the end of the scales."""
    write_packed(checkpoint, tmp_path, name)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    end = "scales" if name in ("GPTQ", "AWQ") else "weight_scale"
    key = f"model.layers.1.mlp.down_proj.{end}"
    is_turned = end == "scales"  # GPTQ and AWQ have [groups, outputs]
    axis = int(is_turned == (change == "fewer outputs"))
    tensors[key] = tensors[key].narrow(axis, 0, tensors[key].shape[axis] // 2).contiguous()
    save_file(tensors, path)
    with pytest.raises(SpawnFailed, match=r"scales"):
        load_runner(tmp_path)


def test_a_layer_without_its_scales_is_refused(checkpoint, tmp_path):
    write_packed(checkpoint, tmp_path, "W4A16")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, path)
    with pytest.raises(SpawnFailed, match=r"lacks the tensor .*up_proj\.weight_scale"):
        load_runner(tmp_path)
