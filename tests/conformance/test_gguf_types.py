"""GGUF files whose tensors are of many types, or of types that are not read."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.worker.forward import packed_cache
from engine.worker.forward.decoder import NativeDecoder
from engine.worker.load import devices
from engine.worker.load.gguf.file import GgufFile
from engine.worker.load.refusal import Refusal
from engine.worker.quantized.gguf_blocks import BLOCK_TYPES, OTHER_TYPES
from engine.worker.quantized.mxfp4_checkpoint import Mxfp4Checkpoint
from tests.checkpoints.text import Shape, make
from tests.conformance.test_mxfp4 import WEIGHTS, packed, write_packed
from tests.conformance.test_packed_cache import alike, files, weights_of
from tests.conformance.test_rewrites import Built, check_rounded_alike, distance, round_inputs
from tests.support.gguf_files import (
    BF16,
    F16,
    F32,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_K,
    Q6_K,
    Q8_0,
    write_file,
    write_model,
)
from tests.support.model_zoo import load_runner
from tools.lab.measure_quantization import Model, compare
from tools.lab.peers.asked import prompts

SHAPE = Shape(2, 256, 4, 2, 512, 500, 256, tied=False)
# As in files whose makers choose each tensor's type by its effect.
DYNAMIC = {
    "attn_q.weight": IQ4_XS,
    "attn_k.weight": Q2_K,
    "attn_v.weight": BF16,
    "attn_output.weight": Q3_K,
    "ffn_gate.weight": MXFP4,
    "ffn_up.weight": Q8_0,
    "ffn_down.weight": F16,
    "token_embd.weight": Q6_K,
    "output.weight": IQ4_NL,
}
# The mean KL divergence of llama.cpp's logits from those of the same file's weights in float32, in
# nats, of 96 tokens of four drawn texts (`tools.lab.peers.logits`, llama-cpp-python 0.3.36).
LLAMA_CPP = {
    Q2_K: 0.0288, Q3_K: 0.0238, Q4_K: 0.0246, IQ4_NL: 0.0111, IQ4_XS: 0.0220, MXFP4: 0.0111,
}  # fmt: skip
FLOATS = ("q_proj", "k_proj", "v_proj", "down_proj")  # layers with a float tensor among them


def test_gpt_oss_in_mxfp4_is_its_checkpoint_in_mxfp4(tmp_path):
    """The experts' tensors have the same numbers, in another order of nibbles, with gates and ups
    apart. They are kept in 4 bits, as those of the checkpoint."""
    plain = make(tmp_path / "plain", "gpt_oss", extra={"swiglu_limit": 7.0})
    checkpoint = write_packed(plain, tmp_path / "packed")
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(WEIGHTS):
            blocks, scales = packed(tensor)
            tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    path = write_model(plain, tmp_path / "model.gguf", types={"_exps.weight": MXFP4})
    with GgufFile(path) as file, Mxfp4Checkpoint(checkpoint) as wanted:
        assert file.tensors.keys() == wanted.tensors.keys()
        assert all(torch.equal(file.read(name), wanted.read(name)) for name in file.tensors)
        assert file.quantization == wanted.quantization == "MXFP4"
        file.write_config(tmp_path)
    ours = Built(tmp_path, torch.float32, is_stock=False, weights=GgufFile(path))
    theirs = Built(checkpoint, torch.float32, is_stock=False, weights=Mxfp4Checkpoint(checkpoint))
    assert isinstance(ours.execution.model.module, NativeDecoder)
    assert ours.execution.model.num_bytes == theirs.execution.model.num_bytes
    assert distance(ours.logits(), theirs.logits()) == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made"), "llama", SHAPE)


def test_a_file_of_many_types_computes_what_torch_does_with_the_same_roundings(
    checkpoint, tmp_path, scales_in_halves
):
    """Joined with a tensor of 16 bits, those in blocks are expanded; of two types in blocks, both
    get 8 bits."""
    path = write_model(checkpoint, tmp_path / "model.gguf", Q4_K, types=DYNAMIC)
    with GgufFile(path) as file:
        file.write_config(tmp_path)
        assert {stored.dtype for stored in file.tensors.values()} == {
            *(BLOCK_TYPES[kind][0] for kind in DYNAMIC.values() if kind in BLOCK_TYPES),
            *("BF16", "F16", "F32"),
        }
    small = Built(tmp_path, torch.float32, is_stock=False, weights=GgufFile(path))
    assert isinstance(small.execution.model.module, NativeDecoder)
    exact = Built(tmp_path, torch.float32, is_stock=True, weights=GgufFile(path))
    round_inputs(exact.execution.model.module, ("o_proj",), but=FLOATS)
    check_rounded_alike(small, exact, most=0.05)  # 0.029 to 0.031 by four seeds: types are coarse


def test_packed_weights_of_many_types_are_kept(checkpoint, tmp_path, monkeypatch):
    for name in ("WORTH", "FREE_LEAST"):
        monkeypatch.setattr(packed_cache, name, 0)
    path = write_model(checkpoint, tmp_path / "m.gguf", Q4_K, types=DYNAMIC, parts=(3, 9))
    plain = weights_of(path, "off")
    for _ in range(2):
        assert alike(weights_of(path, tmp_path / "cache"), plain)
    assert len(files(tmp_path / "cache")) == 1


@pytest.mark.parametrize("native", [torch.bfloat16, torch.float32], ids=str)
def test_auto_computes_blocks_in_float32_over_a_pool_of_16_bits(
    checkpoint, tmp_path, monkeypatch, native
):
    """Red if inputs are rounded to bfloat16 before they are rounded to int8. Where many weights are
    floats, and without the kernels, bfloat16 is faster."""
    monkeypatch.setattr(devices, "has_bfloat16", lambda _device: native is torch.bfloat16)
    pool = torch.bfloat16 if native is torch.bfloat16 else torch.float16
    path = tmp_path / "model.gguf"

    def loaded(**fields):
        runner, info = load_runner(path, **fields)
        runner.close()
        return tuple(getattr(torch, name) for name in (info.dtype, info.kv_dtype))

    write_model(checkpoint, path, Q4_K)
    assert loaded() == (torch.float32, pool)
    assert loaded(kv_cache_dtype="int8") == (torch.float32, torch.int8)
    assert loaded(dtype="bfloat16") == (torch.bfloat16, torch.bfloat16)
    assert loaded(dtype="float32") == (torch.float32, torch.float32)
    with monkeypatch.context() as patch:
        patch.setenv("ENGINE_KERNELS", "off")
        assert loaded() == (native, pool)
    for kind, types in ((Q4_K, DYNAMIC), (F16, {})):
        write_model(checkpoint, path, kind, types=types)
        assert loaded() == (native, pool)


def test_a_mixtures_router_is_no_reason_to_compute_in_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "has_bfloat16", lambda _device: True)
    mixture = make(tmp_path / "made", "qwen3_moe")
    runner, info = load_runner(write_model(mixture, tmp_path / "model.gguf", Q4_0))
    runner.close()
    assert (info.dtype, info.kv_dtype) == ("float32", "bfloat16")


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    return make(tmp_path_factory.mktemp("larger"), "llama", Shape(4, 512, 8, 4, 1024, 2048, 512))


@pytest.mark.slow
@pytest.mark.parametrize("kind", LLAMA_CPP, ids=lambda kind: BLOCK_TYPES[kind][0])
def test_products_of_every_type_are_as_near_those_of_its_weights_as_llama_cpps(
    larger, tmp_path, kind
):
    """As it is served, over keys and values in float16, as llama.cpp has them, and in bfloat16, in
    which attention rounds queries and shares, too. (In a model of q05's size that costs 0.03.)"""
    name = BLOCK_TYPES[kind][0]
    path = str(write_model(larger, tmp_path / f"{name}.gguf", kind))
    texts, logits = prompts(name, 4, 96, 2048), []
    for dtype, pool in (("float32", "float32"), ("auto", "float16"), ("auto", "bfloat16")):
        is_stock = dtype == "float32"
        model = Model(path, dtype, "none", is_stock=is_stock, kv_cache_dtype=pool)
        logits.append([model.logits(text) for text in texts])
        model.close()
    exact, *own = logits
    found, wide = (compare(one, exact, texts)["mean_kl_nats"] for one in own)
    print(f"{name}: {found:.4f} nats; {wide:.4f} over bfloat16")
    assert 0 < found <= 1.05 * LLAMA_CPP[kind]
    assert wide <= 1.1 * LLAMA_CPP[kind]


@pytest.mark.parametrize("kind", [*OTHER_TYPES, 99])
def test_a_type_that_is_not_read_is_named_with_what_to_download(tmp_path, kind):
    path = tmp_path / "model.gguf"
    write_file(
        path,
        {"general.architecture": "llama"},
        {
            "blk.0.attn_norm.weight": (F32, (256,), bytes(1024)),
            "blk.0.attn_q.weight": (kind, (64, 256), bytes(9)),
        },
    )
    name = OTHER_TYPES.get(kind, "number 99")
    best = "the model's Q3_K_S file instead, or another of" if "IQ3" in name else "a file of"
    if name.startswith(("IQ1", "IQ2", "TQ")):
        best = "the model's Q2_K file instead, or another of"
    with pytest.raises(Refusal) as refused, GgufFile(path):
        pass
    told = f"its tensor blk.0.attn_q.weight has the type {name}, which is not read; download {best}"
    assert str(refused.value).startswith(f"{told} F32, F16, BF16, Q4_0, ")
