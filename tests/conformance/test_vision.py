"""Models that read images against transformers' own `generate(pixel_values=…)`, in float32.

Prompts have images before, between and after text. Sequences run alone, in chunks that end at and
inside images, and in batches with texts; some are preempted. With a planted fault, the comparison
fails.
"""

import json
import math
import random
import shutil
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import Sampling
from engine.errors import EngineBug, SpawnFailed
from engine.requests.text import image_prompts
from engine.worker.factory import runner_spec
from engine.worker.forward.decoder import NativeDecoder
from engine.worker.forward.reference_attention import ReferenceBackend
from engine.worker.load.vision_architectures import VISION
from engine.worker.text.sequences import SequenceState
from engine.worker.text.vision import runner as runner_module
from engine.worker.text.vision.positions import positions_of
from tests.checkpoints import vision as vision_checkpoint
from tests.checkpoints.vision import RECIPES
from tests.support.estimates import check_estimate
from tests.support.mini_planner import MiniPlanner
from tests.support.vision import CHATS, load, runner_of

NUM_NEW = 24
TILES = 5  # the image of the chat "before" has four tiles and a copy of the whole image
ESTIMATE_OFF_MOST = 0.02
GRID_TOKENS = 900  # tokens of the largest image in the memory test of a Qwen3-VL


@pytest.fixture(scope="module", params=sorted(RECIPES))
def vision_model(request, tmp_path_factory):
    found = load(tmp_path_factory.mktemp("vision"), request.param)
    yield found
    found.runner.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Yield a Gemma 3, whose images are computed as a whole."""
    found = load(tmp_path_factory.mktemp("whole"), "gemma3")
    yield found
    found.runner.close()


@pytest.fixture(scope="module")
def expected(vision_model):
    """Return transformers' tokens of each chat."""
    return {name: vision_model.expected(turns, NUM_NEW) for name, turns in CHATS.items()}


def run(vision_model, names, *, seed=0, chunks=64, preempts=0.0):
    """Run chats together, and return the output of each."""
    planner = MiniPlanner(vision_model.runner, vision_model.info, seed=seed, chunks=chunks)
    rng = random.Random(seed)
    done = {}
    for name in names:
        prompt, images = vision_model.prompt(CHATS[name])
        done[name] = planner.add(prompt, NUM_NEW, images=images)
    while live := [one for one in planner.sequences.values() if not one.is_done]:
        planner.step(live)
        if rng.random() < preempts:
            planner.preempt(rng.choice(live))
    planner.run()
    failures = [one.failure for one in done.values() if one.failure]
    assert not failures, failures
    return {name: one.output for name, one in done.items()}


def test_every_architecture_is_made_here(vision_model):
    assert vision_model.info.architecture in VISION
    assert len(RECIPES) == len(VISION)
    assert isinstance(vision_model.runner._model.module, NativeDecoder)


@pytest.mark.parametrize("name", CHATS)
def test_the_prompt_is_the_one_of_transformers_own_processor(vision_model, name):
    prompt, images = vision_model.prompt(CHATS[name])
    assert list(prompt) == vision_model.inputs(CHATS[name])["input_ids"][0].tolist()
    count = sum(one.content.num_tokens for one in images)
    assert prompt.count(vision_model.info.images.token_id) == count


@pytest.mark.parametrize("name", CHATS)
def test_greedy_tokens_are_those_of_transformers(vision_model, expected, name):
    assert run(vision_model, [name], chunks=1000)[name] == expected[name]


@pytest.mark.cases(8)
@pytest.mark.parametrize("chunks", [1, 5, 16])
def test_chunks_that_end_anywhere_change_nothing(vision_model, expected, chunks):
    for name in CHATS:
        assert run(vision_model, [name], seed=chunks, chunks=chunks)[name] == expected[name]


def test_batches_with_texts_and_preemptions_change_nothing(vision_model, expected):
    for seed in range(3):
        found = run(vision_model, list(CHATS), seed=seed, chunks=20, preempts=0.2)
        assert found == expected


def test_an_image_is_encoded_once_for_all_its_prompts(vision_model):
    tower = vision_model.runner.tower
    run(vision_model, list(CHATS))
    count = tower.num_encoded
    run(vision_model, list(CHATS), preempts=0.3)
    assert tower.num_encoded == count


def test_a_small_cache_encodes_again_and_changes_nothing(vision_model, expected, monkeypatch):
    tower = vision_model.runner.tower
    count = tower.num_encoded
    monkeypatch.setattr(tower, "max_bytes", 1)
    for name in ("turns", "before", "after"):
        assert run(vision_model, [name], chunks=1000)[name] == expected[name]
    assert tower.num_encoded > count


def shifted(one):
    """Return an image's part with its embeddings shifted by one place."""
    return runner_module.RowImage(one.image, one.places, np.roll(one.embeddings, 1))


def late(images, start, count):
    """Return positions in which the positions of images are one too high."""
    found = positions_of(images, start, count)
    for image in images:
        found[1:, max(0, image.start - start) : max(0, image.end - start)] += 1
    return found


def undiminished(images, start, count):
    """Return positions in which positions behind an image count all its tokens."""
    found = positions_of(images, start, count)
    tokens = np.arange(start, start + count)
    behind = tokens >= images[-1].end if images else tokens < 0
    found[:, behind] = tokens[behind]
    return found


FAULTS = {
    "embeddings off by one": ("_parts", lambda self, rows: tuple(map(shifted, PARTS(self, rows)))),
    "images left out": ("_images_of", lambda self, rows: None),
}
GRID_FAULTS = {
    "positions off by one": late,
    "text behind images not moved": undiminished,
    "positions of a text": lambda images, start, count: positions_of((), start, count),
}
PARTS = runner_module.VisionRunner._parts


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(vision_model, expected, monkeypatch, fault):
    name, planted = FAULTS[fault]
    monkeypatch.setattr(runner_module.VisionRunner, name, planted)
    assert run(vision_model, list(CHATS), chunks=1000) != expected


def test_rows_left_out_behind_layers_are_seen(vision_model, expected, monkeypatch):
    """The fault omits the rows that Qwen3-VL adds to the outputs of its first layers for images."""
    has_rows = vision_model.info.architecture == "Qwen3VLForConditionalGeneration"
    joined = runner_module.joined
    monkeypatch.setattr(runner_module, "joined", lambda parts: joined([one[:1] for one in parts]))
    found = run(vision_model, ["turns"], chunks=1000)
    assert (found["turns"] != expected["turns"]) == has_rows


@pytest.mark.parametrize("fault", GRID_FAULTS)
def test_a_planted_fault_of_positions_is_seen(vision_model, expected, monkeypatch, fault):
    monkeypatch.setattr(runner_module, "positions_of", GRID_FAULTS[fault])
    names = ["before", "turns"] if vision_model.runner.has_grids else ["alone"]
    found = run(vision_model, names, chunks=1000)
    assert (found != {name: expected[name] for name in names}) == vision_model.runner.has_grids


def test_modules_of_transformers_compute_the_same(vision_model, expected):
    """Without compiled kernels, transformers' own module is the text model."""
    model = ModelConfig(str(vision_model.directory), dtype="float32")
    spec = runner_spec(model, EngineConfig(models=(model,), kv_cache_memory=8 << 20))
    with closing(runner_module.VisionRunner(spec, ReferenceBackend())) as stock:
        other = replace(vision_model, runner=stock, info=stock.load(lambda progress: None))
        assert not isinstance(stock._model.module, NativeDecoder)
        names = ["between", "turns", "no image"]
        found = run(other, names, chunks=40, preempts=0.1)
        assert found == {name: expected[name] for name in names}


def test_what_is_loaded_takes_what_was_estimated(vision_model):
    model = ModelConfig(str(vision_model.directory), dtype="float32")
    spec = runner_spec(model, EngineConfig(models=(model,), kv_cache_memory=8 << 20))
    estimate = runner_module.VisionRunner(spec).estimate().num_bytes
    assert abs(vision_model.info.memory_bytes / estimate - 1) <= ESTIMATE_OFF_MOST


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["smolvlm", "qwen3_vl"])
def test_the_estimate_holds_what_images_take(tmp_path, arch, monkeypatch):
    """A process of its own keeps as many decoded images as it may, and reads the largest image that
    a prompt can have. Red if the estimate does not count the decoded images."""
    monkeypatch.setitem(vision_checkpoint.TEXT, "max_position_embeddings", 2048)
    monkeypatch.setitem(vision_checkpoint.GRID_SIZE, "longest_edge", GRID_TOKENS * 16**2)
    directory = vision_checkpoint.make(tmp_path, arch)
    check_estimate("vision_memory", directory)


def test_a_config_of_the_first_kind_is_read_the_same(vision_model, expected, tmp_path):
    """The first config.json of Qwen2-VL has the text model's fields at the top level, and "mrope"
    as the type of its rotary embedding."""
    if not vision_model.info.architecture.startswith("Qwen2"):
        assert vision_model.info.architecture in VISION
        return
    directory = shutil.copytree(vision_model.directory, tmp_path / "flat")
    config = json.loads((directory / "config.json").read_text("utf-8"))
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    for name in ("model_type", "layer_types"):
        del text[name]
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = text | config | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    (directory / "config.json").write_text(json.dumps(flat))
    runner, info = runner_of(directory, kv_cache_memory=8 << 20)
    try:
        other = replace(vision_model, directory=directory, runner=runner, info=info)
        assert run(other, ["turns"]) == {"turns": expected["turns"]}
    finally:
        runner.close()


def test_tiles_of_one_image_that_are_not_told_apart_are_seen(tmp_path, monkeypatch):
    tiled = load(tmp_path, "smolvlm")
    wanted = tiled.expected(CHATS["before"], NUM_NEW)
    assert len(tiled.prompt(CHATS["before"])[1]) == TILES
    assert run(tiled, ["before"])["before"] == wanted
    assert tiled.runner.tower.num_encoded == TILES
    monkeypatch.setattr(image_prompts, "digest_of_piece", lambda digest, number: digest)
    assert run(tiled, ["before"])["before"] != wanted
    tiled.runner.close()


def test_a_plan_that_cuts_an_image_is_not_computed(whole):
    prompt, images = whole.prompt(CHATS["before"])
    planner = MiniPlanner(whole.runner, whole.info, chunks=1)
    one = planner.add(prompt, NUM_NEW, images=images)
    one.images = ()  # the planner then cuts the image
    with pytest.raises(EngineBug) as caught:
        planner.run()
    assert "cuts an image that is whole" in caught.value.log_detail
    planner.release(one)
    planner.run()


def test_an_image_whose_tokens_do_not_see_each_other_is_seen(whole, monkeypatch):
    wanted = {name: whole.expected(turns, NUM_NEW) for name, turns in CHATS.items()}
    with monkeypatch.context() as planted:
        planted.setattr(SequenceState, "wholes", lambda self, row, first: [])
        assert run(whole, list(CHATS), chunks=1000) != wanted
    with monkeypatch.context() as planted:
        stock = SequenceState.wholes
        planted.setattr(SequenceState, "wholes", lambda self, row, first: [
            (begin, end - 1) for begin, end in stock(self, row, first)])  # fmt: skip
        assert run(whole, list(CHATS), chunks=1000) != wanted
    assert run(whole, list(CHATS), chunks=1000) == wanted


def cached_differences(vision_model):
    """Return differences of the first token's log-probability between a prompt computed at once and
    the same prompt behind each cached prefix that ends inside an image."""
    found, size = [], vision_model.info.block_size
    for turns in CHATS.values():
        prompt, images = vision_model.prompt(turns)
        for cached in range(size, len(prompt), size):
            if not any(image.is_inside(cached) for image in images):
                continue
            planner = MiniPlanner(vision_model.runner, vision_model.info, chunks=1000)
            asked = Sampling(temperature=0.0, logprobs=0)
            once = planner.add(prompt, 1, sampling=asked, images=images)
            planner.chunks = len(prompt)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(planner.random, "randint", lambda low, high: high)
                planner.step([once])
                again = planner.add(prompt, 1, sampling=asked, images=images)
                again.blocks, again.computed = once.blocks[: cached // size], cached
                planner.step([again])
            difference = abs(again.logprobs[0].logprob - once.logprobs[0].logprob)
            found.append(difference if again.output == once.output else math.inf)
            planner.run()
    return found


def test_a_cached_prefix_may_end_inside_an_image(whole, monkeypatch):
    """Such a prefix's keys and values were computed with the whole image. With a planted fault, the
    image's tokens behind the prefix do not see each other."""
    found = cached_differences(whole)
    assert len(found) > 5
    assert max(found) < 1e-5
    monkeypatch.setattr(SequenceState, "wholes", lambda self, row, first: [
        (image.start + first - row.start, image.end + first - row.start)
        for image in self.admission.images
        if row.start <= image.start < row.start + row.count])  # fmt: skip
    assert max(cached_differences(whole)) > 1e-3


def test_a_checkpoint_with_the_names_of_its_time_gives_the_same_tokens(whole, tmp_path):
    """In Gemma 3's published files, the names of the vision tower's tensors have another part, and
    the image processor's settings are a file of their own, with nulls."""
    shutil.copytree(whole.directory, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    old = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor
           for name, tensor in load_file(path).items()}  # fmt: skip
    save_file(old, path, {"format": "pt"})
    processor = tmp_path / "processor_config.json"
    settings = json.loads(processor.read_text())["image_processor"]
    nulls = dict.fromkeys(("do_convert_rgb", "do_pan_and_scan", "pan_and_scan_max_num_crops"))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | nulls))
    processor.unlink()
    runner, info = runner_of(tmp_path, kv_cache_memory=8 << 20)
    published = replace(whole, runner=runner, info=info)
    for name in ("turns", "no image"):
        assert run(published, [name])[name] == whole.expected(CHATS[name], NUM_NEW)
    runner.close()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"image_token_index": 512}, "its vocabulary lacks the token 512, which its config names"),
        ({"boi_token_index": 511}, "its vocabulary lacks the token 511"),
        ({"mm_tokens_per_image": 25}, "its config makes 25 tokens of the 144 patches of an image"),
        ({"mm_tokens_per_image": 0}, "its config makes 0 tokens"),
    ],
)
def test_a_config_that_does_not_fit_its_images_is_refused(whole, tmp_path, fields, sentence):
    shutil.copytree(whole.directory, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(SpawnFailed, match=sentence):
        runner_of(tmp_path)


def test_a_step_smaller_than_one_image_is_refused_at_load(whole):
    most = whole.info.images.max_tokens
    runner_of(whole.directory, max_num_batched_tokens=most + 4, max_num_seqs=4)[0].close()
    with pytest.raises(SpawnFailed, match="its images have 36 tokens that one step must compute"):
        runner_of(whole.directory, max_num_batched_tokens=most + 3, max_num_seqs=4)
