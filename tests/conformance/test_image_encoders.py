"""CLIP, SigLIP and SigLIP 2 against sentence-transformers' `encode` and transformers, in float32.

Each text and image is computed alone and in a batch. Pixels equal those of transformers' image
processor, to the last bit.
"""

import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from engine.config import EngineConfig, ModelConfig
from engine.core.common.types import PlanId, SequenceId
from engine.core.encode.types import (
    EncodeInput,
    EncodeOptions,
    EncodePlan,
    EncodeRow,
    ImageInput,
    InputKind,
)
from engine.errors import SpawnFailed
from engine.images.decode import BYTES_PER_PIXEL
from engine.images.fit import FittedImage
from engine.status import Capability
from engine.worker.factory import make_runner
from engine.worker.image_reader import ImageReader
from engine.worker.load.capability import capability_of
from tests.checkpoints.encode import IMAGE_ARCHS, make_embedder, make_image_embedder
from tests.conformance.test_encoders import load
from tests.support.images import encoded, picture, pixels

TEXTS = ["the dog", "a cat and the river of gold", "fish", "wind and snow " * 50]
SIZES = [(64, 48), (32, 32), (31, 200), (7, 5), (300, 33)]
FILES = [picture(width, height, seed=seed) for seed, (width, height) in enumerate(SIZES)]
ENOUGH = 1 - 1e-5


def as_layout(directory, layout, root):
    """Return a copy of a model's directory in another layout."""
    if layout == "transformers":
        return directory
    if layout == "old processor":  # as CLIP was first published
        copied = shutil.copytree(directory, root / "old")
        (copied / "processor_config.json").unlink()
        old = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 32, "crop_size": 32}
        old |= {"do_resize": True, "do_center_crop": True, "do_normalize": True, "resample": 3}
        old |= {"image_mean": [0.48145466, 0.4578275, 0.40821073]}
        old |= {"image_std": [0.26862954, 0.26130258, 0.27577711]}
        (copied / "preprocessor_config.json").write_text(json.dumps(old))
        return copied
    where = root / "modules"
    shutil.copytree(directory, where / "0_CLIPModel")
    kind = "sentence_transformers.models.CLIPModel"
    modules = [{"idx": 0, "name": "0", "path": "0_CLIPModel", "type": kind}]
    if layout == "normalised":
        (where / "1_Normalize").mkdir()
        kind = "sentence_transformers.models.Normalize"
        modules.append({"idx": 1, "name": "1", "path": "1_Normalize", "type": kind})
    (where / "modules.json").write_text(json.dumps(modules))
    return where


MODELS = {
    "clip": ("clip", "transformers"),
    "clip, by its module": ("clip", "modules"),
    "clip, normalised": ("clip", "normalised"),
    "clip, with an old processor": ("clip", "old processor"),
    "siglip": ("siglip", "transformers"),
    "siglip2": ("siglip2", "transformers"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """Return a model's architecture, its runner and info, and the library's own model.

    SigLIP's texts are padded to the model's length, as in training. The library does so only with
    ``max_length``; without it, a text's vector depends on the other texts of its batch.
    """
    from sentence_transformers import SentenceTransformer

    arch, layout = MODELS[request.param]
    root = tmp_path_factory.mktemp("images")
    directory = as_layout(make_image_embedder(root / "model", arch), layout, root)
    runner, info = load(directory)
    oracle = SentenceTransformer(str(directory), device="cpu")
    if arch != "clip":
        oracle[0].processing_kwargs = {"text": {"padding": "max_length"}}
    yield arch, runner, info, oracle
    runner.close()


def text_inputs(runner, info, texts):
    """Return texts as inputs, as `InputPreparer` makes them."""
    made = runner.encoder_tokenizer.encode_texts(texts, "")
    return [one.input._replace(width=info.text_width) for one in made]


def image_inputs(info, files):
    """Return image files as inputs, as `InputPreparer` makes them."""
    return [ImageInput(info.images.read(file), info.images.num_tokens) for file in files]


def execute(runner, inputs, **options):
    """Return the vectors of inputs of one kind, computed in one plan."""
    order = sorted(range(len(inputs)), key=lambda at: inputs[at].num_tokens)
    rows = tuple(EncodeRow(SequenceId(at), inputs[at], EncodeOptions(**options)) for at in order)
    made = {row.sequence: row.values for row in runner.execute(EncodePlan(PlanId(1), rows)).rows}
    return np.stack([made[at] for at in range(len(inputs))])


def cosines(one, other):
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return (one * other).sum(axis=1) / lengths


def opened(files):
    """Return image files as the images that the library takes."""
    return [Image.open(io.BytesIO(file)).convert("RGB") for file in files]


def apart(vectors):
    """Return the largest cosine of two different rows."""
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return (units @ units.T - 2 * np.eye(len(units))).max()


@pytest.mark.parametrize("alone", [False, True], ids=["batched", "alone"])
def test_texts_are_the_librarys(model, alone):
    _, runner, info, oracle = model
    want = oracle.encode(TEXTS)
    inputs = text_inputs(runner, info, TEXTS)
    parts = [[one] for one in inputs] if alone else [inputs]
    got = np.concatenate([execute(runner, part) for part in parts])
    assert got.shape == (len(TEXTS), info.dimensions)
    assert cosines(got, want).min() >= ENOUGH
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert apart(want) < 0.999, "texts with similar vectors prove nothing"


@pytest.mark.parametrize("alone", [False, True], ids=["batched", "alone"])
def test_images_are_the_librarys(model, alone):
    _, runner, info, oracle = model
    want = oracle.encode(opened(FILES))
    inputs = image_inputs(info, FILES)
    parts = [[one] for one in inputs] if alone else [inputs]
    got = np.concatenate([execute(runner, part) for part in parts])
    assert got.shape == (len(FILES), info.dimensions)
    assert cosines(got, want).min() >= ENOUGH
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert apart(want) < 0.999, "images with similar vectors prove nothing"


def test_a_text_does_not_depend_on_its_batch(model):
    _, runner, info, _ = model
    inputs = text_inputs(runner, info, TEXTS)
    np.testing.assert_allclose(
        execute(runner, inputs)[0], execute(runner, inputs[:1])[0], atol=1e-5
    )


def test_vectors_are_those_of_transformers_itself(model):
    import torch

    arch, runner, info, oracle = model
    processor, stock = oracle[0].processor, oracle[0].model
    images = processor(images=opened(FILES), return_tensors="pt")
    padding = {"padding": True} if arch == "clip" else {"padding": "max_length"}
    length = {"max_length": info.max_model_len, "truncation": True}
    texts = processor(text=TEXTS, return_tensors="pt", **padding, **length)
    with torch.no_grad():
        of_images = stock.get_image_features(**images).pooler_output.numpy()
        of_texts = stock.get_text_features(**texts).pooler_output.numpy()
    assert cosines(execute(runner, image_inputs(info, FILES)), of_images).min() >= ENOUGH
    assert cosines(execute(runner, text_inputs(runner, info, TEXTS)), of_texts).min() >= ENOUGH


@pytest.mark.parametrize("normalize", [None, True])
def test_dimensions_and_normalisation_of_images_are_the_librarys(model, normalize):
    """A model that normalises does so after the vector is cut, as in test_encoders.py."""
    _, runner, info, oracle = model
    scales = normalize or type(oracle[-1]).__name__ == "Normalize"
    for inputs, given in (
        (image_inputs(info, FILES), opened(FILES)),
        (text_inputs(runner, info, TEXTS), TEXTS),
    ):
        want = oracle.encode(given, truncate_dim=7, normalize_embeddings=scales)
        got = execute(runner, inputs, dimensions=7, normalize=normalize)
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_pixels_are_the_processors_to_the_last_bit(model):
    _, runner, info, oracle = model
    processor = oracle[0].processor.image_processor
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (1, 30), (30, 1), *rng.integers(2, 120, (30, 2)).tolist()]
    for width, height in sizes:
        image = pixels(width, height, seed=width)
        want = processor(images=[image], return_tensors="np")
        got = runner._images.features([info.images.read(encoded(image))], runner._device)
        for name in ("pixel_values", "pixel_attention_mask", "spatial_shapes"):
            assert (name in got) == (name in want), name
            if name in got:
                np.testing.assert_array_equal(got[name].numpy(), want[name], f"{width}×{height}")


@pytest.mark.parametrize("fault", ["resample", "mean", "order", "mask", "padding"])
def test_a_planted_fault_shows_in_the_vectors(tmp_path, fault, monkeypatch):
    """Each fault would turn a test above red: vectors differ by more than `ENOUGH` allows."""
    arch = "siglip2" if fault == "mask" else "siglip" if fault == "padding" else "clip"
    runner, info = load(make_image_embedder(tmp_path, arch))
    inputs = image_inputs(info, FILES)
    want = execute(runner, inputs)
    if fault == "padding":
        texts = text_inputs(runner, info, TEXTS[:3])
        want, inputs = execute(runner, texts), [one._replace(width=0) for one in texts]
    elif fault == "resample":
        object.__setattr__(info.images, "resample", 0)
        inputs = image_inputs(info, FILES)
    elif fault == "mean":
        runner._images._table += 0.02
    elif fault == "order":
        runner._images._table = runner._images._table[::-1]
    else:
        made = ImageReader.features

        def unmasked(self, images, device):
            features = made(self, images, device)
            features["pixel_attention_mask"][:] = 1
            return features

        monkeypatch.setattr(ImageReader, "features", unmasked)
    assert cosines(execute(runner, inputs), want).min() < ENOUGH
    runner.close()


def test_info_says_what_images_cost_and_memory_counts_their_decoding(model):
    arch, _, info, _ = model
    assert info.capability is Capability.IMAGE_EMBEDDING
    assert info.images.num_tokens == {"clip": 17, "siglip": 16, "siglip2": 256}[arch]
    assert info.text_width == (0 if arch == "clip" else 64)
    assert info.memory_bytes > BYTES_PER_PIXEL * info.images.max_pixels == 20 * 2**25


def test_the_estimate_is_about_what_the_load_reports(tmp_path):
    model = ModelConfig(str(make_image_embedder(tmp_path)))
    runner = make_runner(model, EngineConfig(models=(model,)))
    estimate = runner.estimate().num_bytes
    info = runner.load(lambda progress: None)
    assert estimate == pytest.approx(info.memory_bytes, rel=0.01)
    runner.close()


@pytest.mark.parametrize("arch", IMAGE_ARCHS)
def test_a_model_in_bfloat16_is_close_to_float32(tmp_path, arch):
    directory = make_image_embedder(tmp_path, arch)
    exact, info = load(directory)
    rounded, _ = load(directory, dtype="bfloat16")
    inputs = image_inputs(info, FILES)
    assert cosines(execute(exact, inputs), execute(rounded, inputs)).min() > 0.99
    exact.close()
    rounded.close()


# ---- which models are taken


def edit_processor(directory, **fields):
    path = directory / "processor_config.json"
    data = json.loads(path.read_text())
    data["image_processor"] |= fields
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("arch", IMAGE_ARCHS)
def test_the_files_show_that_a_model_embeds_images(tmp_path, arch):
    directory = make_image_embedder(tmp_path / "model", arch)
    assert capability_of(directory) is Capability.IMAGE_EMBEDDING
    assert capability_of(as_layout(directory, "modules", tmp_path)) is Capability.IMAGE_EMBEDDING


REFUSED = {
    "another processor": (
        lambda d: edit_processor(d, image_processor_type="ViTImageProcessor"),
        "its image processor is 'ViTImageProcessor', which is not one of CLIPImageProcessor",
    ),
    "no resizing": (lambda d: edit_processor(d, do_resize=False), "does not resize"),
    "another size": (
        lambda d: edit_processor(d, crop_size={"height": 16, "width": 16}),
        "makes images of (16, 16) pixels, and its model reads 32 × 32",
    ),
    "no size": (
        lambda d: edit_processor(d, size={"longest_edge": 32}),
        "names no size to resize to",
    ),
    "no processor": (lambda d: (d / "processor_config.json").unlink(), "has no image processor"),
    "another method": (
        lambda d: (
            (d / "modules.json").write_text(
                json.dumps(
                    [{"name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
                )
            ),
            (d / "sentence_bert_config.json").write_text(
                json.dumps(
                    {
                        "modality_config": {
                            "text": {"method": "get_text_features", "method_output_name": None},
                            "image": {"method": "save_pretrained", "method_output_name": None},
                        },
                        "module_output_name": "sentence_embedding",
                    }
                )
            ),
        ),
        "does not turn texts and images into vectors as CLIP and SigLIP do",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_reads_images_in_another_way_is_refused(tmp_path, name):
    change, says = REFUSED[name]
    make_image_embedder(tmp_path)
    change(tmp_path)
    with pytest.raises(SpawnFailed) as caught:
        load(tmp_path)
    assert says in str(caught.value)


def test_a_capability_that_does_not_fit_is_refused(tmp_path):
    make_embedder(tmp_path / "bert")
    (tmp_path / "bert" / "modules.json").unlink()
    with pytest.raises(SpawnFailed, match="image-embedding, and its files show text-to-text"):
        load(tmp_path / "bert", capability=Capability.IMAGE_EMBEDDING)
    make_image_embedder(tmp_path / "clip")
    with pytest.raises(SpawnFailed, match="text-embedding, and its files show image-embedding"):
        load(tmp_path / "clip", capability=Capability.TEXT_EMBEDDING)


def test_an_image_that_is_not_finite_fails_alone(tmp_path):
    runner, info = load(make_image_embedder(tmp_path))
    runner._images._table[0, 255] = np.inf
    blank = FittedImage(32, 32, bytes(3 * 32 * 32))
    white = FittedImage(32, 32, b"\xff" * (3 * 32 * 32))
    rows = tuple(
        EncodeRow(SequenceId(at), ImageInput(one, info.images.num_tokens), EncodeOptions())
        for at, one in enumerate((blank, white))
    )
    plan = EncodePlan(PlanId(1), rows)
    assert plan.kind is InputKind.IMAGE
    first, second = runner.execute(plan).rows
    assert np.isfinite(first.values).all()
    assert second.detail == "its values are not finite"
    assert len(execute(runner, [EncodeInput((2, 5, 3))])) == 1
    runner.close()
