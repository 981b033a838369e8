"""How an image model is loaded: refusals in one sentence, the names and types of published weights,
and the memory estimate (issue 28)."""

import importlib.util
import json
import shutil
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import SpawnFailed
from engine.status import Capability
from engine.worker.factory import runner_of
from engine.worker.image_generation import loading, pipelines, weights
from engine.worker.image_generation.runner import PipelineRunner
from engine.worker.interface import RunnerSpec
from engine.worker.load.capability import capability_of
from tests.checkpoints.image_generation import make
from tests.support.encoder_zoo import edit_json
from tests.support.estimates import check_estimate

UNET, VAE, CLIP = (
    "unet/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "text_encoder/model.safetensors",
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return {arch: make(root / arch, arch) for arch in ("sd", "sdxl")}


@pytest.fixture
def sd(made, tmp_path):
    return Path(shutil.copytree(made["sd"], tmp_path / "sd"))


@pytest.fixture
def sdxl(made, tmp_path):
    return Path(shutil.copytree(made["sdxl"], tmp_path / "sdxl"))


def rewrite(path, change):
    """Change the tensors of a safetensors file: ``change`` gets and returns a dictionary."""
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def loaded(directory, **fields):
    """Return the parameters of a model, by component and name, and its info."""
    with closing(PipelineRunner(RunnerSpec(str(directory), threads=1, **fields))) as runner:
        info = runner.load(lambda progress: None)
        parts = runner._model.parts
        modules = {"unet": parts.unet, "vae": parts.vae, "text_encoder": parts.prompts.encoders[0]}
        return info, {
            f"{name}.{key}": tensor.clone()
            for name, module in modules.items()
            for key, tensor in module.named_parameters()
        }


def refusal(directory, **fields):
    """Return the one sentence with which a model is refused."""

    def load():
        runner_of(RunnerSpec(str(directory), threads=1, **fields), None).load(lambda progress: None)

    with pytest.raises(SpawnFailed) as failed:
        load()
    assert str(directory) not in str(failed.value), "no path is for clients"
    return str(failed.value)


# ---- refusals by the small files, before torch reads a weight

INDEX = {
    "another pipeline": ({"_class_name": "FluxPipeline"}, "FluxPipeline is not served; the pipe"),
    "a refiner": ({"requires_aesthetics_score": True}, "it is a refiner"),
    "another text encoder": (
        {"text_encoder": ["transformers", "T5EncoderModel"]},
        "its text_encoder is T5EncoderModel, of which only CLIPTextModel are served",
    ),
    "another unet": ({"unet": ["evil", "Unet"]}, "its unet is Unet, of which only"),
    "an unknown component": (
        {"controlnet": ["diffusers", "ControlNetModel"]},
        "its component controlnet (ControlNetModel) is not supported",
    ),
    "a component that is left out": ({"unet": [None, None]}, "its unet is None"),
    "an entry without a class": ({"vae": []}, "its vae is None"),
}
CONFIGS = {
    "inpainting": ("unet/config.json", {"in_channels": 9}, "its unet reads 9 channels"),
    "IP-Adapter": (
        "unet/config.json", {"encoder_hid_dim_type": "ip_image_proj"}, "inputs other than prompts",
    ),
    "classes": ("unet/config.json", {"class_embed_type": "timestep"}, "inputs other than prompts"),
    "sizes": (
        "unet/config.json", {"addition_embed_type": "text_time"}, "addition_embed_type is text_tim",
    ),
    "another scheduler": (
        "scheduler/scheduler_config.json", {"_class_name": "HeunDiscreteScheduler"},
        "its noise scheduler HeunDiscreteScheduler is not served; put the config of one of DDIM",
    ),
    "a scheduler that is no name": (
        "scheduler/scheduler_config.json", {"_class_name": ["DDIMScheduler"]}, "is not served",
    ),
    "a config of another module": (
        "unet/config.json", {"block_out_channels": [8]}, "the config.json of its unet does not des",
    ),
    "a text encoder of no shape": (
        "text_encoder/config.json", {"hidden_size": "wide"}, "the config.json of its text_encoder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INDEX)
def test_an_index_that_is_not_served_is_refused(sd, case):
    fields, said = INDEX[case]
    edit_json(sd / "model_index.json", **fields)
    assert said in refusal(sd)


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_is_not_served_is_refused(sd, case):
    name, fields, said = CONFIGS[case]
    edit_json(sd / name, **fields)
    assert said in refusal(sd)


def test_a_refused_class_is_not_imported(sd):
    """No class is imported because a checkpoint names it."""
    edit_json(sd / "model_index.json", unet=["antigravity", "UNet2DConditionModel"])
    loaded(sd)
    assert "antigravity" not in sys.modules


def test_without_diffusers_the_sentence_names_the_extra(sd, monkeypatch):
    plain = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "diffusers" else plain(name),
    )
    assert refusal(sd).endswith(
        ": image models need diffusers, which is not installed: pip install 'triolet[images]'"
    )


def test_an_image_model_is_known_by_its_index_and_not_divided(sd):
    assert capability_of(sd) is Capability.TEXT_TO_IMAGE
    assert "not divided" in refusal(sd, tp=2)


# ---- refusals by the weights


def without(*names):
    return lambda tensors: {key: one for key, one in tensors.items() if key not in names}


def with_value(name, value):
    def change(tensors):
        tensors[name].view(-1)[0] = value
        return tensors

    return change


WEIGHTS = {
    "one is missing": (
        UNET, without("conv_in.weight"), "its unet lacks the tensor conv_in.weight",
    ),
    "two are missing": (
        UNET, without("conv_in.weight", "conv_out.bias"), "conv_in.weight and 1 more",
    ),
    "one too many": (
        VAE, lambda tensors: tensors | {"extra": torch.ones(2)},
        "its vae holds a tensor that the module does not use, extra",
    ),
    "another shape": (
        UNET, lambda tensors: tensors | {"conv_in.bias": torch.ones(3)},
        "the tensor conv_in.bias of its unet has the shape [3], and the config asks for [16]",
    ),
    "integers": (
        UNET, lambda tensors: tensors | {"conv_in.bias": torch.ones(16, dtype=torch.int8)},
        "is stored as I8; plain float weights are needed",
    ),
    "NaN": (
        CLIP, with_value("final_layer_norm.bias", float("nan")),
        "its tensor final_layer_norm.bias in model.safetensors holds NaN",
    ),
    "infinity": (UNET, with_value("conv_in.bias", float("inf")), "holds infinity"),
}  # fmt: skip


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_do_not_fit_are_refused(sd, case):
    name, change, said = WEIGHTS[case]
    rewrite(sd / name, change)
    assert said in refusal(sd)


def test_a_number_that_the_dtype_cannot_hold_is_refused(sd):
    rewrite(sd / UNET, with_value("conv_in.bias", 1e30))
    assert "float16 cannot hold" in refusal(sd, dtype="float16")


@pytest.mark.parametrize("name", [UNET, VAE, CLIP])
def test_a_file_that_was_cut_short_is_refused(sd, name):
    path = sd / name
    path.write_bytes(path.read_bytes()[:1000])
    assert "is cut short or is not a safetensors file" in refusal(sd)


def test_pickled_weights_are_refused_unread(sd):
    (sd / UNET).unlink()
    (sd / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"never read")
    assert "pickled weights (.bin) are not read" in refusal(sd)


@pytest.mark.parametrize("folder", ["unet", "scheduler", "text_encoder"])
def test_a_folder_that_is_missing_is_named(sd, folder):
    shutil.rmtree(sd / folder)
    assert folder in refusal(sd)


def test_a_refused_load_keeps_nothing_and_the_next_one_works(sd):
    whole = (sd / UNET).read_bytes()
    rewrite(sd / UNET, without("conv_in.weight"))
    runner = PipelineRunner(RunnerSpec(str(sd), threads=1))
    with pytest.raises(SpawnFailed):
        runner.load(lambda progress: None)
    assert runner._model is None
    (sd / UNET).write_bytes(whole)
    assert runner.load(lambda progress: None).architecture == "StableDiffusionPipeline"
    runner.close()


# ---- the forms that published checkpoints have


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_names_of_older_files_are_read(made, sd):
    _, expected = loaded(made["sd"])
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def as_before(tensors):
        return {
            next(
                (key.replace(f".{new}.", f".{old}.") for new, old in older.items()
                 if f"attentions.0.{new}." in key), key,
            ): one
            for key, one in tensors.items()
        }  # fmt: skip

    rewrite(sd / VAE, as_before)
    assert any(".proj_attn." in key for key in load_file(sd / VAE))
    positions = {"text_model.embeddings.position_ids": torch.arange(77).unsqueeze(0)}
    rewrite(sd / CLIP, lambda found: {f"text_model.{k}": v for k, v in found.items()} | positions)
    _, found = loaded(sd)
    assert same(expected, found)


def test_sharded_weights_are_read_and_their_names_stay_inside(made, sd):
    _, expected = loaded(made["sd"])
    tensors = load_file(sd / UNET)
    (sd / UNET).unlink()
    keys = sorted(tensors)
    halves = {"a.safetensors": keys[::2], "b.safetensors": keys[1::2]}
    for name, part in halves.items():
        save_file({key: tensors[key] for key in part}, sd / "unet" / name)
    index = sd / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    places = {key: name for name, part in halves.items() for key in part}
    index.write_text(json.dumps({"weight_map": places}))
    _, found = loaded(sd)
    assert same(expected, found)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(keys, "../a.safetensors")}))
    assert "points outside the model's directory" in refusal(sd)
    index.write_text(json.dumps({"weight_map": {}}))
    assert refusal(sd).endswith("safetensors.index.json lists no weights")


def test_a_variant_of_16_bits_is_read_where_there_is_no_other(sd):
    for name in (UNET, VAE, CLIP):
        rewrite(sd / name, lambda tensors: {key: one.half() for key, one in tensors.items()})
        (sd / name).rename(sd / name.replace(".safetensors", ".fp16.safetensors"))
    pipeline = pipelines.read(sd)
    assert {one.variant for one in pipeline.components.values()} == {"fp16"}
    info, found = loaded(sd, dtype="bfloat16")
    assert info.dtype == "bfloat16"
    assert {one.dtype for one in found.values()} == {torch.bfloat16}
    assert loading.weight_bytes(pipeline, torch.bfloat16) < loading.weight_bytes(
        pipeline, torch.float32
    )


def test_a_model_of_few_steps_takes_few_unless_a_request_says_more(sd):
    assert loaded(sd)[0].default_steps == 50
    edit_json(sd / "model_index.json", scheduler=["diffusers", "LCMScheduler"])
    edit_json(sd / "scheduler" / "scheduler_config.json", _class_name="LCMScheduler")
    assert loaded(sd)[0].default_steps == 4


def test_an_autoencoder_that_overflows_in_16_bits_stays_in_32(sd):
    edit_json(sd / "vae" / "config.json", force_upcast=True)
    _, found = loaded(sd, dtype="bfloat16")
    kinds = {key.partition(".")[0]: one.dtype for key, one in found.items()}
    assert (kinds["unet"], kinds["vae"]) == (torch.bfloat16, torch.float32)


def test_the_progress_ends_with_all_bytes(made):
    seen = []
    runner = PipelineRunner(RunnerSpec(str(made["sdxl"]), threads=1))
    runner.load(seen.append)
    runner.close()
    last = [one for one in seen if one.phase == "weights"][-1]
    assert last.bytes_done == last.bytes_total > 10**6


def test_other_threads_may_build_modules_meanwhile(made, monkeypatch):
    """Rule 2 of the loader: diffusers' `from_pretrained` would change modules of other threads."""
    plain = weights.MODULES["unet"]
    beside = []

    class Watched:
        @staticmethod
        def from_config(config):
            thread = threading.Thread(target=lambda: beside.append(torch.nn.Linear(2, 2)))
            thread.start()
            thread.join()
            return plain.from_config(config)

    monkeypatch.setitem(weights.MODULES, "unet", Watched)
    loaded(made["sd"], dtype="bfloat16")
    assert not beside[0].weight.is_meta
    assert beside[0].weight.dtype == torch.float32


# ---- memory


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sd", "sdxl"])
def test_the_estimate_holds_what_a_drawing_takes(tmp_path, arch):
    """A process of its own draws the largest image, from an image, with guidance."""
    directory = make(tmp_path / arch, arch, size=32, width=64)
    check_estimate("image_generation_memory", directory)
