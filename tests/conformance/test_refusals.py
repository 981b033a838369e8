"""A model that cannot be served is refused at load, in one sentence with the reason (D11)."""

from types import SimpleNamespace

import pytest
import torch

from engine.errors import SpawnFailed
from engine.worker.forward.attention import (
    HARMLESS,
    Mask,
    UnsupportedAttention,
    check_keywords,
    paged_attention,
)
from engine.worker.interface import RunnerSpec
from engine.worker.load import architectures
from engine.worker.load.architectures import (
    LONGROPE,
    STATIC_ROPE_TYPES,
    Architecture,
    LayerShape,
    context_limit,
    context_note,
    find,
)
from engine.worker.load.loader import read_config
from engine.worker.load.refusal import Refusal
from engine.worker.load.vision_architectures import (
    VISION,
    find_vision,
    has_vision,
)
from engine.worker.skeleton.config import SkeletonConfig
from engine.worker.text import placed_model as runner_module
from engine.worker.text.runner import TorchRunner
from tests.checkpoints.text import PRESETS, make
from tests.support.model_zoo import LONG_PHI3, load_runner

TINY = PRESETS["tiny"]

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
REFUSED = {
    "recurrent by type": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        "MambaForCausalLM has recurrent layers",
    ),
    "recurrent by layers": (
        {"architectures": ["OlmoHybridForCausalLM"], "layer_types": ["linear_attention"]},
        "OlmoHybridForCausalLM has recurrent layers (linear_attention)",
    ),
    "recurrent layers in a served one": (
        LLAMA | {"layer_types": ["mamba", "full_attention"]},
        "LlamaForCausalLM has recurrent layers (mamba)",
    ),
    "encoder-decoder": (
        {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        "T5ForConditionalGeneration is an encoder-decoder model",
    ),
    "multimodal": (
        {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}},
        "LlavaForConditionalGeneration is a multimodal model",
    ),
    "multimodal Gemma 3": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}},
        "Gemma3ForConditionalGeneration is a multimodal model",
    ),
    **{
        name: (
            {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()},
            f"{name}ForCausalLM cannot have a paged cache, because its module in transformers {why}"
            "; docs/features.md lists the models that are served",
        )
        for name, why in {
            "Bloom": "computes its attention without transformers' attention interface",
            "Falcon": "computes its attention without transformers' attention interface",
            "Nemotron": "does not pass keywords on to its attention",
            "StableLm": "does not pass keywords on to its attention",
        }.items()
    },
    "unknown": (
        {"architectures": ["CTRLLMHeadModel"], "model_type": "ctrl"},
        "the architecture CTRLLMHeadModel is not served; docs/features.md lists those that are",
    ),
    "not a language model": ({"architectures": ["LlamaModel"]}, "LlamaModel is not served"),
    "no architecture": ({"model_type": "llama"}, "names no architecture"),
    "architectures of another kind": ({"architectures": "Llama"}, "names no architecture"),
    "quantised": (
        LLAMA | {"quantization_config": {"quant_method": "bitsandbytes"}},
        "the checkpoint is quantised (bitsandbytes); it needs plain float weights, or those of",
    ),
    "bidirectional": (
        {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
        "attends in both directions",
    ),
    "not causal": (LLAMA | {"is_causal": False}, "attends in both directions"),
    "cross-attention": (
        {"architectures": ["GPT2LMHeadModel"], "add_cross_attention": True},
        "has cross-attention",
    ),
}


@pytest.mark.parametrize(("config", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_config_is_refused_by_name(config, sentence):
    with pytest.raises(Refusal) as refused:
        find(config)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


SEEING = {"vision_config": {}, "text_config": {}}
SERVED_ONES = "; of the models that read images, "
REFUSED_EYES = {
    "a prefix that attends both ways": (
        {"architectures": ["PaliGemmaForConditionalGeneration"]},
        "PaliGemmaForConditionalGeneration is not served, because the tokens of its whole prompt "
        f"see each other{SERVED_ONES}",
    ),
    "cross-attention": (
        {"architectures": ["MllamaForConditionalGeneration"]},
        f"is not served, because it sees its images by cross-attention{SERVED_ONES}",
    ),
    "unknown": (
        {"architectures": ["InternVLForConditionalGeneration"]},
        f"InternVLForConditionalGeneration is not served{SERVED_ONES}",
    ),
    "no architecture": ({"model_type": "paligemma"}, f"paligemma is not served{SERVED_ONES}"),
    "quantised": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "quantization_config": {"quant_method": "bitsandbytes"},
        },
        "the weights of this Gemma3ForConditionalGeneration are quantised",
    ),
    "sounds": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "audio_config": {}},
        "this Gemma3ForConditionalGeneration reads sounds, too, which is not served",
    ),
}


@pytest.mark.parametrize(("config", "sentence"), REFUSED_EYES.values(), ids=REFUSED_EYES)
def test_a_model_that_sees_is_refused_by_name(config, sentence):
    assert has_vision(SEEING | config)
    with pytest.raises(Refusal) as refused:
        find_vision(SEEING | config)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    if SERVED_ONES in sentence:
        assert all(one.label in str(refused.value) for one in VISION.values())


def rotary(kind, **fields):
    """Return a config with this kind of rotary embedding."""
    return SimpleNamespace(
        max_position_embeddings=1024, rope_parameters={"rope_type": kind, **fields}
    )


@pytest.mark.parametrize("kind", ["dynamic", "proportional", "mrope"])
def test_a_rotary_that_depends_on_the_batch_or_is_untested_is_refused(kind):
    with pytest.raises(Refusal, match=f"rotary embedding is of type '{kind}'"):
        context_limit(rotary(kind), None)


def test_one_layer_types_rotary_is_enough_to_refuse():
    layers = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {}}
    with pytest.raises(Refusal, match="'dynamic'"):
        context_limit(SimpleNamespace(max_position_embeddings=9, rope_parameters=layers), None)


def test_longrope_serves_its_original_length_and_refuses_more():
    config = rotary("longrope", original_max_position_embeddings=600)
    assert context_limit(config, None) == 600
    assert context_limit(config, 600) == 600
    with pytest.raises(Refusal) as refused:
        context_limit(config, 601)
    assert str(refused.value) == (
        "max_model_len 601 is more than the original length of its longrope embedding, 600; give "
        "--max-model-len 600 or less, or leave it out"
    )


ORIGINAL = "original_max_position_embeddings"
# Kinds of rotary embeddings: their settings, and the longest sequence with 1024 positions in the
# config. Source: vLLM's `_get_and_verify_max_len`; if yarn's product is smaller than the config's
# positions, vLLM takes the product.
LENGTHS = {
    "default": ({"rope_type": "default"}, 1024),
    "yarn, as Qwen's card": ({"rope_type": "yarn", "factor": 4.0, ORIGINAL: 1024}, 4096),
    "yarn, as Qwen 3's card": ({"rope_type": "yarn", "factor": 4.0, ORIGINAL: 816}, 3264),
    "yarn, stretched already": ({"rope_type": "yarn", "factor": 4.0, ORIGINAL: 256}, 1024),
    "yarn, of half a length": ({"rope_type": "yarn", "factor": 1.5, ORIGINAL: 1023}, 1534),
    "yarn, without its original": ({"rope_type": "yarn", "factor": 2.0}, 2048),
    "yarn, without a factor": ({"rope_type": "yarn", "factor": None, ORIGINAL: 256}, 1024),
    "yarn, shorter": ({"rope_type": "yarn", "factor": 2.0, ORIGINAL: 256}, 1024),
    "linear": ({"rope_type": "linear", "factor": 2.5}, 2560),
    "llama3": ({"rope_type": "llama3", "factor": 8.0, ORIGINAL: 256}, 1024),
    "longrope": ({"rope_type": "longrope", "factor": 4.0, ORIGINAL: 256}, 256),
    "of each layer type": (
        {
            "sliding_attention": {"rope_type": "default"},
            "full_attention": {"rope_type": "yarn", "factor": 8.0, ORIGINAL: 1024},
        },
        8192,
    ),
}


@pytest.mark.parametrize(("settings", "length"), LENGTHS.values(), ids=LENGTHS)
def test_a_sequence_may_be_as_long_as_the_rotary_embedding_is_stretched(settings, length):
    config = SimpleNamespace(max_position_embeddings=1024, rope_parameters=settings)
    assert context_limit(config, None) == length
    with pytest.raises(Refusal, match=f"{length + 1} is more than .*, {length}; give"):
        context_limit(config, length + 1)
    if length >= 1024:
        assert context_note(config, None, length) == ""
        assert "its KV pool holds no more" in context_note(config, None, length - 1)


def test_the_table_of_lengths_has_every_kind_of_rotary_embedding_that_is_served():
    assert STATIC_ROPE_TYPES | {LONGROPE} <= {name.partition(",")[0] for name in LENGTHS}


def test_gemma_3s_positions_are_stretched_already():
    layers = {"full_attention": {"rope_type": "linear", "factor": 8.0}}
    for name in ("gemma3_text", "gemma3"):
        config = SimpleNamespace(
            max_position_embeddings=1024, rope_parameters=layers, model_type=name
        )
        assert context_limit(config, None) == 1024


@pytest.mark.parametrize("is_stock", [False, True])
def test_a_checkpoint_with_yarn_has_the_stretched_length_compiled_and_stock(zoo, is_stock):
    _, config = read_config(zoo.directory("llama, yarn"), is_stock=is_stock)
    assert isinstance(config, SkeletonConfig) is not is_stock
    assert (config.max_position_embeddings, context_limit(config, None)) == (320, 1024)


def test_a_length_beyond_the_models_is_refused():
    assert context_limit(rotary("default"), 1024) == 1024
    with pytest.raises(Refusal, match="1025 is more than the model's max_position_embeddings"):
        context_limit(rotary("default"), 1025)


def test_longrope_is_capped_at_load_and_the_model_says_why(tmp_path):
    make(tmp_path, "phi3", TINY, extra=LONG_PHI3)
    _, info = load_runner(tmp_path)
    assert info.max_model_len == 600
    assert info.context_note == (
        "of 1024, because beyond 600 its longrope embedding would change every sequence of a batch"
    )
    # with the operator's length no note is needed
    assert load_runner(tmp_path, max_model_len=500)[1].context_note == ""
    with pytest.raises(SpawnFailed, match="601 is more than the original length"):
        load_runner(tmp_path, max_model_len=601)


# --- the probe: the calls that layers make are refused, not names ---------------------------


def serve_anyway(monkeypatch, name, module, config):
    """Treat the architecture as a served one."""
    entry = Architecture(name, module, module, config)
    monkeypatch.setitem(architectures.SERVED, name, entry)
    monkeypatch.setattr(architectures, "UNPAGED_TYPES", {})


def refusal_of(directory):
    """Return the message with which a load is refused."""
    runner = TorchRunner(RunnerSpec(str(directory), kv_bytes=1 << 24, threads=1))
    with pytest.raises(SpawnFailed) as failed:
        runner.load(lambda _progress: None)
    return str(failed.value)


def test_the_probe_refuses_a_model_for_a_keyword_that_is_not_listed(monkeypatch, tmp_path):
    monkeypatch.delitem(HARMLESS, "dropout")
    make(tmp_path, "starcoder2", TINY)
    said = refusal_of(tmp_path)
    assert "Starcoder2ForCausalLM is not served: it needs the attention keyword 'dropout'" in said


@pytest.mark.parametrize("name", ["StableLm", "Nemotron"])
def test_the_probe_refuses_a_model_that_drops_keywords(monkeypatch, tmp_path, name):
    serve_anyway(monkeypatch, f"{name}ForCausalLM", name.lower(), f"{name}Config")
    make(tmp_path, name.lower(), TINY, extra={"head_dim": 16})
    assert "does not pass keywords on" in refusal_of(tmp_path)


def test_hunyuans_rotary_is_called_dynamic_and_is_not():
    """Hunyuan's alpha fixes the frequencies; a "dynamic" rotary embedding without it is refused."""
    fixed = {"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 10000.0}
    hunyuan = {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense"}
    assert find(hunyuan | {"rope_scaling": fixed}).module == "hunyuan_v1_dense"
    for other in (
        hunyuan | {"rope_scaling": fixed | {"alpha": None}},
        LLAMA | {"rope_scaling": fixed},
    ):
        with pytest.raises(Refusal, match="'dynamic'"):
            find(other)


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ((LayerShape(2, 16),) * 4, "its 4 layers called the attention 3 times"),
        ((LayerShape(4, 8),) * 3, "layer 0 keeps 2 keys of 16 and values of 16 for a token"),
    ],
)
def test_the_probe_refuses_layers_that_are_not_as_the_config_says(
    monkeypatch, tmp_path, shapes, sentence
):
    make(tmp_path, "starcoder2")  # the layers of compiled architectures would not be run
    monkeypatch.setattr(runner_module, "layer_shapes", lambda _config: shapes)
    assert sentence in refusal_of(tmp_path)


def test_an_unknown_keyword_is_refused_by_name():
    with pytest.raises(UnsupportedAttention, match="'moon_phase'"):
        check_keywords({"position_ids": 1, "moon_phase": 0.5})


def test_a_known_keyword_with_a_value_that_changes_the_maths_is_refused():
    check_keywords({"dropout": 0.0, "is_causal": True, "moon_phase": None})
    with pytest.raises(UnsupportedAttention, match=r"'dropout' as 0\.1"):
        check_keywords({"dropout": 0.1})
    with pytest.raises(UnsupportedAttention, match="'is_causal' as False"):
        check_keywords({"is_causal": False})


def test_no_keyword_is_both_honoured_and_ignored():
    named = paged_attention.__annotations__
    assert not HARMLESS.keys() & named.keys()


@pytest.mark.parametrize(
    ("module", "keywords", "sentence"),
    [
        (SimpleNamespace(layer_idx=0), {}, "does not pass keywords on"),
        (SimpleNamespace(layer_idx=0, is_causal=False), {"triolet_step": 1}, "both directions"),
        (SimpleNamespace(), {"triolet_step": 1}, "carry no layer_idx"),
        (
            SimpleNamespace(layer_idx=0),
            {"triolet_step": 1, "sliding_window": 8},
            "ask for a sliding window of 8, and their masks for None",
        ),
    ],
)
def test_a_layer_that_cannot_be_paged_is_refused(module, keywords, sentence):
    tensor = torch.zeros(1, 1, 1, 4)
    with pytest.raises(UnsupportedAttention, match=sentence):
        paged_attention(module, tensor, tensor, tensor, Mask(), **keywords)


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [(None, "or none"), (torch.zeros(1), "mask of its own"), (Mask(0), "window of 0 keys")],
)
def test_a_mask_that_is_not_followed_is_refused(mask, sentence):
    tensor, module = torch.zeros(1, 1, 1, 4), SimpleNamespace(layer_idx=0)
    with pytest.raises(UnsupportedAttention, match=sentence):
        paged_attention(module, tensor, tensor, tensor, mask, triolet_step=1)
