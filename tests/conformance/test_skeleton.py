"""A skeleton has transformers' names, shapes and constants, without importing transformers
(D11)."""

import dataclasses
import importlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from engine.worker.forward import native
from engine.worker.forward.decoder import NativeDecoder
from engine.worker.forward.rewrites import MlpParts, take_apart
from engine.worker.load import loader
from engine.worker.load.architectures import SERVED, layer_shapes
from engine.worker.load.loader import read_config
from engine.worker.load.probe import probe
from engine.worker.load.refusal import Refusal
from engine.worker.skeleton.config import SkeletonConfig, Unusual, read_skeleton
from engine.worker.skeleton.families import LISTED, REQUIRED, WITHOUT_EFFECT
from engine.worker.skeleton.modules import Skeleton
from tests.support.model_zoo import (
    COMPILED_ROWS,
    LLAMA3_ROPE,
    YARN_ROPE,
    load_runner,
)
from tests.support.programs import imported_by

DEMO = Path(__file__).parents[2] / "engine" / "demo" / "stories"
CPU = torch.device("cpu")


def published(name, **fields):
    """Return a config in the form in which checkpoints are published, of a small shape."""
    common = {
        "architectures": [name], "model_type": LISTED[name].model_type, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0", "use_cache": True, "initializer_range": 0.02,
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5,
        "hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096,
        "vocab_size": 96, "pad_token_id": None,
    }  # fmt: skip
    return {key: value for key, value in (common | fields).items() if value is not REQUIRED}


EXAONE_ROPE = {
    "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
    "original_max_position_embeddings": 2048,
}  # fmt: skip
MINISTRAL_ROPE = {
    "rope_type": "yarn", "type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16384,
}  # fmt: skip
LFM_2 = {
    "block_auto_adjust_ff_dim": True, "block_dim": 512, "block_ff_dim": 700,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 64,
    "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True,
    "block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 512,
    "conv_dim_out": 512, "conv_use_xavier_init": True, "full_attn_idxs": [1], "norm_eps": 1e-05,
    "num_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0, "theta": 1000000.0,
    "use_pos_enc": True, "rms_norm_eps": REQUIRED,
}  # fmt: skip
SHORT_FACTORS = [1.0 + 0.01 * index for index in range(32)]
# Configs as on the Hub: with fields left out, under older names, or without effect.
PUBLISHED = {
    "Llama 2": published("LlamaForCausalLM", hidden_act="silu", pretraining_tp=1,
                         rope_scaling=None, tie_word_embeddings=False),
    "Llama 3.2": published(
        "LlamaForCausalLM", rope_theta=500000.0, max_position_embeddings=131072, head_dim=64,
        eos_token_id=[2, 3], tie_word_embeddings=True, mlp_bias=False,
        rope_scaling={"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                      "original_max_position_embeddings": 8192, "rope_type": "llama3"}),
    "SmolLM2": published(
        "LlamaForCausalLM", is_llama_config=True, rope_interleaved=False, rope_theta=100000,
        num_key_value_heads=REQUIRED, **{"transformers.js_config": {"dtype": "q4"}}),
    "Llama, yarn of another factor": published(
        "LlamaForCausalLM", rope_scaling=YARN_ROPE | {"factor": 3.0}),
    "Llama, linear": published("LlamaForCausalLM", rope_scaling={"type": "linear", "factor": 2.5}),
    "Qwen2.5": published("Qwen2ForCausalLM", rope_theta=1000000.0, sliding_window=32768,
                         max_window_layers=2, use_sliding_window=False, use_mrope=False),
    "Qwen2.5, yarn": published(
        "Qwen2ForCausalLM", rope_theta=1000000.0, max_position_embeddings=32768,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}),
    "Qwen2, windows": published("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=64,
                                max_window_layers=1),
    "Qwen3, yarn": published(
        "Qwen3ForCausalLM", head_dim=128, rope_theta=1000000, max_position_embeddings=40960,
        rope_scaling={"rope_type": "yarn", "factor": 4.0,
                      "original_max_position_embeddings": 32768}),
    "Qwen3": published("Qwen3ForCausalLM", head_dim=128, attention_bias=False, rope_scaling=None,
                       sliding_window=None, rope_theta=1000000, tie_word_embeddings=True),
    "Qwen3-MoE": published(
        "Qwen3MoeForCausalLM", head_dim=128, attention_bias=False, rope_theta=1000000,
        sliding_window=None, max_window_layers=48, decoder_sparse_step=1, mlp_only_layers=[],
        moe_intermediate_size=96, norm_topk_prob=True, num_experts=16, num_experts_per_tok=4,
        output_router_logits=False, router_aux_loss_coef=0.001, use_sliding_window=False),
    "Qwen3-MoE, some layers dense": published(
        "Qwen3MoeForCausalLM", decoder_sparse_step=2, mlp_only_layers=[1], num_hidden_layers=5,
        num_experts=4, num_experts_per_tok=2, use_sliding_window=True, sliding_window=64),
    "Mistral 7B": published("MistralForCausalLM", sliding_window=4096, rope_theta=10000.0),
    "Mistral Nemo": published("MistralForCausalLM", sliding_window=None, head_dim=128),
    "Mistral, window left out": published("MistralForCausalLM"),
    "Phi-3": published(
        "Phi3ForCausalLM", attention_bias=False, sliding_window=2047, resid_pdrop=0.0,
        embd_pdrop=0.0, original_max_position_embeddings=4096, pad_token_id=32,
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}),
    "Phi-3, 128k": published(
        "Phi3ForCausalLM", max_position_embeddings=131072, sliding_window=262144,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "short_factor": SHORT_FACTORS,
                      "long_factor": [2.0 + 0.5 * index for index in range(32)]}),
    "Phi-4, partly rotated": published(
        "Phi3ForCausalLM", partial_rotary_factor=0.75, interpolate_factor=1, lm_head_bias=False),
    "Gemma": published("GemmaForCausalLM", hidden_act="gelu", hidden_activation=None, head_dim=256,
                       pad_token_id=0, rms_norm_eps=1e-6),
    "Gemma 2": published(
        "Gemma2ForCausalLM", hidden_act="gelu_pytorch_tanh", head_dim=256, pad_token_id=0,
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=144, sliding_window=512,
        sliding_window_size=512, cache_implementation="hybrid"),
    "Gemma 3": published(
        "Gemma3ForCausalLM", head_dim=256, num_hidden_layers=7, sliding_window=512,
        sliding_window_pattern=6, rope_local_base_freq=10000, rope_theta=1000000,
        rope_scaling={"rope_type": "linear", "factor": 8.0}, attn_logit_softcapping=None),
    "Gemma 3, left out": published("Gemma3ForCausalLM"),
    "OLMo 2": published("Olmo2ForCausalLM", rope_theta=500000, attention_bias=False),
    "Granite": published(
        "GraniteForCausalLM", attention_multiplier=0.0078125, embedding_multiplier=12.0,
        logits_scaling=8, residual_multiplier=0.22, attention_bias=False),
    "OLMo 3": published(
        "Olmo3ForCausalLM", rope_theta=500000, max_position_embeddings=65536, sliding_window=4096,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_scaling={"attention_factor": 1.2, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                      "original_max_position_embeddings": 8192, "rope_type": "yarn"}),
    "OLMo 3, left out": published("Olmo3ForCausalLM", num_hidden_layers=5, rope_theta=10000),
    "SmolLM3": published(
        "SmolLM3ForCausalLM", rope_theta=5000000.0, no_rope_layers=[1, 1, 0], layer_types=[
            "full_attention"] * 3, max_window_layers=28, no_rope_layer_interval=4, mlp_bias=False,
        use_sliding_window=False, sliding_window=None, attention_bias=False),
    "SmolLM3, left out": published("SmolLM3ForCausalLM", num_hidden_layers=5),
    "Ministral": published("MinistralForCausalLM", head_dim=64, sliding_window=64,
                           rope_theta=100000000.0),
    "Qwen1.5-MoE": published(
        "Qwen2MoeForCausalLM", decoder_sparse_step=1, max_window_layers=21, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=96, shared_expert_intermediate_size=192,
        norm_topk_prob=False, output_router_logits=False, router_aux_loss_coef=0.001,
        rope_theta=1000000.0, sliding_window=32768, use_sliding_window=False),
    "Qwen2-MoE, layers without": published(
        "Qwen2MoeForCausalLM", num_experts=4, mlp_only_layers=[0], shared_expert_intermediate_size=
        96, intermediate_size=96, norm_topk_prob=True, layer_types=["full_attention"] * 3),
    "Ministral 3": published(
        "Ministral3ForCausalLM", head_dim=64, sliding_window=None, pad_token_id=None,
        max_position_embeddings=262144, rope_parameters=MINISTRAL_ROPE),
    "Ministral 3, left out": published(
        "Ministral3ForCausalLM", sliding_window=None, num_key_value_heads=REQUIRED,
        rope_parameters={k: v for k, v in MINISTRAL_ROPE.items() if k != "mscale"}),
    "Mixtral": published(
        "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
        output_router_logits=False, router_aux_loss_coef=0.02, rope_theta=1000000.0),
    "Mixtral, left out": published("MixtralForCausalLM"),
    "EXAONE 4": published(
        "Exaone4ForCausalLM", head_dim=64, sliding_window=64, sliding_window_pattern="LLG",
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_theta=1000000, rope_scaling=EXAONE_ROPE),
    "EXAONE 4, no windows": published(
        "Exaone4ForCausalLM", head_dim=64, sliding_window=None, sliding_window_pattern=None,
        layer_types=["full_attention"] * 3, rope_theta=1000000, rope_scaling=EXAONE_ROPE),
    "EXAONE 4, left out": published("Exaone4ForCausalLM", head_dim=64, num_hidden_layers=5),
    "Seed-OSS": published(
        "SeedOssForCausalLM", head_dim=128, attention_bias=True, attention_out_bias=False,
        mlp_bias=False, residual_dropout=0.1, rope_theta=10000000.0, pretraining_tp=1,
        rope_scaling={"rope_type": "default"}),
    "GPT-OSS": published(
        "GptOssForCausalLM", attention_bias=True, experts_per_token=4, head_dim=64,
        hidden_act="silu", initial_context_length=4096, num_experts_per_tok=4, sliding_window=128,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=131072, num_local_experts=8, output_router_logits=False,
        router_aux_loss_coef=0.9, swiglu_limit=7.0, rope_theta=150000, pad_token_id=9,
        tie_word_embeddings=False, rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
            "original_max_position_embeddings": 4096, "truncate": False}),
    "LFM2": published("Lfm2ForCausalLM", **LFM_2),
    "LFM2, later": published(
        "Lfm2ForCausalLM", rms_norm_eps=REQUIRED, layer_types=["conv", "conv", "full_attention"],
        block_auto_adjust_ff_dim=False, conv_bias=True, tie_embedding=False,
        rope_parameters={"rope_type": "default", "rope_theta": 5000000.0}),
    "LFM2, left out": published("Lfm2ForCausalLM", rms_norm_eps=REQUIRED,
                                intermediate_size=REQUIRED, full_attn_idxs=[0, 2]),
    "Granite, left out": published("GraniteForCausalLM", num_key_value_heads=REQUIRED),
}  # fmt: skip


def stock_of(raw, directory):
    """Return transformers' module of a config, its config, and the attention calls of its layers.
    The module's weights are zeros."""
    (directory / "config.json").write_text(json.dumps(raw))
    architecture, config = read_config(directory, is_stock=True)
    module = loader._build_empty(architecture, config).eval()
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        zeros = torch.nn.Parameter(torch.zeros(parameter.shape), requires_grad=False)
        loader._set_parameter(module, name, zeros)
    loader._compute_buffers(module, CPU)
    model = loader.LoadedModel(module, config, architecture, torch.float32, CPU, 0)
    return module, config, probe(model, layer_shapes(config))


def named_shapes(module):
    """Return the names and shapes of a module's parameters. A skeleton's experts are joined here,
    as transformers has them; in GPT-OSS, inputs come before outputs."""
    shapes = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        match = re.fullmatch(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.(weight|bias)", name)
        if match is None:
            shapes[name] = parameter.shape
            continue
        whole = f"{match[1]}.{'down' if match[2] == 'down' else 'gate_up'}_proj"
        whole += "_bias" if match[3] == "bias" else ""
        shapes.setdefault(whole, []).append(parameter.shape)
    for name, parts in shapes.items():
        if isinstance(parts, list):
            experts = len(module.get_submodule(name.rpartition(".")[0]))
            outputs = sum(part[0] for part in parts) // experts
            assert {part[1:] for part in parts} == {parts[0][1:]}
            joined = (outputs, *parts[0][1:])
            if f"{name.removesuffix('_bias')}_bias" in shapes:
                joined = joined[::-1]
            shapes[name] = torch.Size((experts, *joined))
    return list(shapes.items())


def numbers_of(layer):
    """Return the constants of a layer: rotary, norm of heads, experts."""
    own = layer.query_rotary, layer.key_rotary, layer.is_norm_of_heads
    if isinstance(layer.mlp, MlpParts):
        return own
    return *own, len(layer.mlp.experts), layer.mlp.chosen, layer.mlp.is_normalised


def compare(raw, directory):
    """Check that the skeleton of a config is transformers' module in all that a compiled decoder
    uses."""
    name = raw["architectures"][0]
    skeleton_config = read_skeleton({k: v for k, v in raw.items() if k != "auto_map"}, name)
    skeleton = Skeleton(skeleton_config)
    stock, config, calls = stock_of(raw, directory)
    for field, value in vars(skeleton_config).items():
        if field not in ("architecture", "head_dim", "hidden_act", "hidden_activation"):
            assert getattr(config, field, value) == value, field
    assert layer_shapes(skeleton_config) == layer_shapes(config)
    assert named_shapes(skeleton) == named_shapes(stock)
    assert skeleton.all_tied_weights_keys == stock.all_tied_weights_keys
    assert skeleton.base_model_prefix == stock.base_model_prefix
    assert skeleton.calls == calls
    for own, other in zip(skeleton.calls, calls, strict=True):
        assert (own.sinks is None) == (other.sinks is None)
    ours, theirs = take_apart(skeleton, calls), take_apart(stock, calls)
    for number in (
        *("heads", "kv_heads", "head_dim", "mlp", "activation", "eps", "embedding_scale"),
        *("residual_scale", "logits_scale", "logits_softcap"),
    ):
        assert getattr(ours, number) == getattr(theirs, number), number
    assert [numbers_of(one) for one in ours.layers] == [numbers_of(one) for one in theirs.layers]
    original = skeleton_config.rope_parameters.get("original_max_position_embeddings")
    most = min(skeleton_config.max_position_embeddings, original or 1 << 30)
    positions = torch.tensor([[*range(300), most // 2, most - 1]])
    assert len(ours.rotaries) == len(theirs.rotaries)
    for own, other in zip(ours.rotaries, theirs.rotaries, strict=True):
        for one, two in zip(own(positions), other(positions), strict=True):
            assert one.dtype == two.dtype
            assert torch.equal(one, two)


@pytest.mark.parametrize("raw", PUBLISHED.values(), ids=PUBLISHED)
def test_a_skeleton_of_a_published_config_is_transformers_module(raw, tmp_path):
    compare(raw, tmp_path)


@pytest.mark.parametrize("name", [*COMPILED_ROWS, "the shipped model"])
def test_a_skeleton_of_a_checkpoint_is_transformers_module(zoo, name, tmp_path):
    directory = DEMO if name == "the shipped model" else zoo.directory(name)
    compare(json.loads((directory / "config.json").read_text()), tmp_path)


def test_every_listed_architecture_is_among_the_published_configs():
    assert {raw["architectures"][0] for raw in PUBLISHED.values()} == set(LISTED)


def config_class(name):
    """Return transformers' config class of an architecture."""
    one = SERVED[name]
    package = f"transformers.models.{one.module}.configuration_{one.module}"
    return getattr(importlib.import_module(package), one.config)


@pytest.mark.parametrize("name", LISTED)
def test_a_field_that_is_left_out_has_the_value_that_transformers_gives_it(name):
    stock = {field.name: field.default for field in dataclasses.fields(config_class(name))}
    own = LISTED[name].fields
    for field in own.keys() & stock.keys():
        if own[field].default is not REQUIRED:
            assert own[field].default == stock[field], field


@pytest.mark.parametrize("name", LISTED)
def test_every_field_of_transformers_config_is_known(name):
    """Red if a newer transformers adds a field to a config."""
    from transformers import PreTrainedConfig

    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    stock = {field.name for field in dataclasses.fields(config_class(name))}
    assert stock - common <= LISTED[name].fields.keys() | WITHOUT_EFFECT.keys()


LLAMA = published("LlamaForCausalLM")
UNUSUAL = {
    "an unknown field": LLAMA | {"layer_scale": 0.5},
    "a field of another architecture": LLAMA | {"sliding_window": 64},
    "a window that cannot be": published("MistralForCausalLM", sliding_window=0),
    "a type of another architecture": LLAMA | {"model_type": "mistral"},
    "a missing field": published("LlamaForCausalLM", hidden_size=REQUIRED),
    "a count that is a flag": LLAMA | {"num_hidden_layers": True},
    "an integer for a real number": LLAMA | {"rms_norm_eps": 1},
    "a text for a number": LLAMA | {"vocab_size": "32000"},
    "no head width": published("Qwen2ForCausalLM", head_dim=None),
    "heads that do not divide the width": LLAMA | {"num_attention_heads": 30},
    "keys that do not divide the heads": LLAMA | {"num_key_value_heads": 5},
    "an odd head": LLAMA | {"head_dim": 33},
    "a padding token outside the vocabulary": LLAMA | {"pad_token_id": 96},
    "another activation": LLAMA | {"hidden_act": "relu"},
    "another dtype": LLAMA | {"torch_dtype": "int8"},
    "layer types of another number": published("Qwen3ForCausalLM", layer_types=["full_attention"]),
    "layer types of another kind": published("Qwen3ForCausalLM", layer_types=["conv"] * 3),
    "a changing rotary": LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "an unknown rotary field": LLAMA | {"rope_scaling": YARN_ROPE | {"mrope_section": [1]}},
    "a rotary without its factor": LLAMA | {"rope_scaling": {"type": "linear"}},
    "a rotary that shrinks": LLAMA | {"rope_scaling": {"type": "linear", "factor": 0.5}},
    "a rotary base of one": LLAMA | {"rope_theta": 1.0},
    "no rotary base": LLAMA | {"rope_theta": None},
    "a partly rotated head": LLAMA | {"partial_rotary_factor": 0.5},
    "llama3's bands in disorder": LLAMA | {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 9.0}},
    "llama3's length too long": LLAMA
    | {"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 4096}},
    "Phi-3's oldest rotary": published(
        "Phi3ForCausalLM",
        rope_scaling={"type": "su", "short_factor": SHORT_FACTORS, "long_factor": SHORT_FACTORS},
    ),
    "too few factors": published(
        "Phi3ForCausalLM",
        rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": SHORT_FACTORS},
    ),
    "Gemma 3's rotary for all layers": published(
        "Gemma3ForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ),
    "GPT-OSS without rotary settings": published("GptOssForCausalLM"),
    "Gemma 3's yarn": published("Gemma3ForCausalLM", rope_scaling=YARN_ROPE),
}


@pytest.mark.parametrize("raw", UNUSUAL.values(), ids=UNUSUAL)
def test_an_unusual_config_is_left_to_transformers(raw):
    with pytest.raises(Unusual, match=r"^(its|it has no) \w+"):
        read_skeleton(raw, raw["architectures"][0])


def test_an_architecture_without_a_compiled_form_is_left_to_transformers(zoo):
    for name in ("gpt2", "opt", "starcoder2"):
        assert not isinstance(read_config(zoo.directory(name))[1], SkeletonConfig)


def test_an_unusual_config_runs_compiled_all_the_same_and_says_so(zoo, tmp_path, caplog):
    caplog.set_level("INFO", "engine.worker.forward.backends")
    directory = shutil.copytree(zoo.directory("llama"), tmp_path / "model")
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"unheard_of": 1}))
    runner, info = load_runner(directory)
    assert isinstance(runner._model.module, NativeDecoder)
    assert info == load_runner(zoo.directory("llama"))[1]
    assert re.fullmatch(
        r"LlamaForCausalLM runs compiled \(.*\), of transformers' module, because of its "
        r"config\.json: its field unheard_of is unusual",
        caplog.messages[0],
    )
    runner.close()


def test_without_kernels_a_listed_model_is_transformers_own(zoo, monkeypatch):
    def load():
        raise native.Unavailable("they are switched off")

    monkeypatch.setattr(native, "load", load)
    runner, _ = load_runner(zoo.directory("llama"))
    assert type(runner._model.module).__name__ == "LlamaForCausalLM"
    runner.close()


def test_a_shape_that_cannot_be_is_refused_as_by_transformers(tmp_path):
    for is_stock in (False, True):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 1 << 62}))
        architecture, config = read_config(tmp_path, is_stock=is_stock)
        with pytest.raises(Refusal, match=r"config\.json does not describe a LlamaForCausalLM \("):
            loader._build_empty(architecture, config)


def test_a_config_is_not_changed_by_reading_it():
    for raw in PUBLISHED.values():
        before = json.dumps(raw)
        read_skeleton({k: v for k, v in raw.items() if k != "auto_map"}, raw["architectures"][0])
        assert json.dumps(raw) == before


SERVES_THE_DEMO = """
import engine, grpc_service.app.application, grpc_service.cli.main
for quantization in ("none", "int4"):
    model = engine.ModelConfig("demo-stories", quantization=quantization)
    with engine.blocking.open_engine(engine.EngineConfig(models=(model,))) as eng:
        assert eng.complete("Once upon a time", max_tokens=5)
        with eng.chat() as chat:
            assert list(chat.ask("Hello."))
"""


@pytest.mark.slow
def test_a_compiled_model_is_served_without_transformers():
    """Torch's compiler, whose import takes as long as torch's own, is not imported either."""
    heavy = {"transformers", "scipy", "sympy", "torch._dynamo", "torch.distributed.tensor"}
    assert not heavy & imported_by(SERVES_THE_DEMO)
