"""An image model's runner on a thread of its own and in a process of its own: the same bytes."""

import os
import pickle
import signal
from dataclasses import replace

import pytest

from engine.config import EngineConfig, ModelConfig
from engine.core.common.types import PlanId, SequenceId
from engine.core.image_generation.types import Drawing, ImageGenerationPlan, Verb
from engine.errors import EngineBug, SpawnFailed, WorkerLost
from engine.worker.factory import make_process_runner, make_runner
from tests.checkpoints.image_generation import make

DRAWING = Drawing("a red circle", "", 64, 64, steps=3, guidance_scale=5.0, seed=7, num_images=2)
SEQUENCE = SequenceId(1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made") / "sd")


@pytest.fixture
def started():
    """Return a list of runners; they are closed when the test ends."""
    runners = []
    yield runners
    for one in runners:
        one.close()


def model(directory, **fields):
    return ModelConfig(str(directory), name="tiny", threads=1, **fields)


def load(runner, started):
    started.append(runner)
    return runner.load(lambda progress: None)


@pytest.fixture(scope="module")
def loaded(directory):
    """Return a runner in a thread and one in a process, each with its info. The last test that uses
    the fixture kills the process."""
    found = {}
    for where in ("thread", "process"):
        one = model(directory, runner=where)
        runner = make_runner(one, EngineConfig(models=(one,)))
        found[where] = runner, runner.load(lambda progress: None)
    yield found
    for runner, _ in found.values():
        runner.close()


def plans(info, drawing=DRAWING):
    yield ImageGenerationPlan(PlanId(1), SEQUENCE, Verb.ENCODE, drawing=drawing)
    for index in range(info.num_steps(drawing)):
        yield ImageGenerationPlan(PlanId(1), SEQUENCE, Verb.DENOISE, index, preview=index == 1)
    for index in range(info.num_tiles(drawing) * drawing.num_images):
        yield ImageGenerationPlan(PlanId(1), SEQUENCE, Verb.DECODE, index)


def images(runner, info):
    """Return the images of the drawing's results, the preview first."""
    found = [runner.execute(plan).row.image for plan in plans(info)]
    return [image for image in found if image is not None]


@pytest.mark.slow
def test_the_bytes_are_the_same_in_a_thread_and_in_a_process(loaded):
    infos = {where: info for where, (_, info) in loaded.items()}
    drawn = {where: images(*one) for where, one in loaded.items()}
    assert len(drawn["thread"]) == 3
    assert drawn["thread"] == drawn["process"]
    apart = infos["process"].memory_bytes - infos["thread"].memory_bytes
    assert 20 << 20 < apart < 1000 << 20, "torch in a process of its own"
    assert replace(infos["process"], memory_bytes=infos["thread"].memory_bytes) == infos["thread"]
    assert pickle.loads(pickle.dumps(infos["thread"])) == infos["thread"]
    texts = [runner.tokenizer.encode("a red circle") for runner, _ in loaded.values()]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_an_image_of_many_tiles_crosses_the_channel(loaded):
    runner, info = loaded["process"]
    large = replace(DRAWING, width=512, height=256, num_images=1, steps=1, source=None)
    from_image = replace(large, source=bytes(range(256)) * (512 * 256 * 3 // 256))
    for drawing in (large, from_image):
        for plan in plans(info, drawing):
            row = runner.execute(plan).row
        assert (row.image.width, row.image.height, len(row.image.pixels)) == (512, 256, 393216)


@pytest.mark.slow
def test_a_process_that_dies_loses_the_drawing_and_nothing_hangs(loaded):
    runner, info = loaded["process"]
    first, *others = plans(info)
    runner.execute(first)
    os.kill(runner.process.pid, signal.SIGKILL)
    for plan in others[:2]:
        with pytest.raises(WorkerLost):
            runner.execute(plan)


def test_a_refusal_is_the_same_sentence_from_a_process(directory, started, tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    said = []
    for where in (make_runner, make_process_runner):
        with pytest.raises(SpawnFailed) as failed:
            load(where(model(tmp_path), EngineConfig(models=(model(tmp_path),))), started)
        said.append(str(failed.value))
    assert said[0] == said[1]
    assert "FluxPipeline is not served" in said[0]


def test_a_step_that_fails_leaves_the_other_drawings(directory, started):
    """A plan for a drawing that was never encoded is an engine bug; other plans still work."""
    runner = make_runner(model(directory), EngineConfig(models=(model(directory),)))
    info = load(runner, started)
    alone = images(runner, info)
    first, *others = plans(info)
    runner.execute(first)
    with pytest.raises(EngineBug):
        runner.execute(ImageGenerationPlan(PlanId(2), SequenceId(9), Verb.DENOISE, 0))
    found = [runner.execute(plan).row.image for plan in others]
    assert [image for image in found if image is not None] == alone
