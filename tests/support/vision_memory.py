"""`python -m tests.support.vision_memory DIR`: loads a model that sees, and prints the
estimate of its memory and what was taken, in bytes.

In between it reads as many images as are kept decoded, and computes prompts with large ones. It is
a program of its own because memory freed before could hide what images take.
"""

import importlib
import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from engine.config import EngineConfig, ModelConfig
from engine.requests.text.kept_images import KEPT_BYTES_MAX, KeptImages
from engine.worker.factory import make_runner
from engine.worker.text.vision.parts import read_parts, text_part
from tests.support.image_generation_memory import Peak, own_bytes
from tests.support.mini_planner import MiniPlanner
from tests.support.vision import FILES, VisionModel

MAX_PIXELS = 1_000_000
BUDGET = 2048


def photograph(width: int, height: int, seed: int) -> bytes:
    """Return a WebP, whose decoder takes the most memory."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 16, width // 16, 3), np.uint8)
    file = io.BytesIO()
    image = Image.fromarray(small).resize((width, height))
    image.save(file, "WEBP", quality=50, method=0)
    return file.getvalue()


def import_modules(directory: Path) -> None:
    """Import transformers' modules of the model, whose code is no part of a model's memory."""
    vision, config = read_parts(directory)
    text, _ = text_part(vision, config)
    for name in (vision.module, text.module):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def main() -> None:
    """Load the model and read images; print the estimate and the memory taken."""
    model = ModelConfig(sys.argv[1], dtype="float32")
    sizes = {"kv_cache_memory": 32 << 20, "max_num_seqs": 4, "max_num_batched_tokens": BUDGET}
    config = EngineConfig(models=(model,), max_image_pixels=MAX_PIXELS, **sizes)
    FILES["large"] = photograph(1000, 1000, 1)
    FILES["other"] = photograph(1000, 500, 2)
    small = [photograph(512, 384, seed) for seed in range(8)]
    import_modules(Path(sys.argv[1]))
    runner = make_runner(model, config)
    estimate = runner.estimate().num_bytes
    before, peak = own_bytes(), Peak()
    info = runner.load(lambda progress: None)
    kept, number = KeptImages(), 0
    while kept.num_bytes < KEPT_BYTES_MAX - info.images.max_bytes and number < 2000:
        # A RIFF file may be longer than its header says.
        kept.read(info.images, small[number % len(small)] + number.to_bytes(4, "little"))
        number += 1
    vision_model = VisionModel(Path(sys.argv[1]), runner, info, None, None)
    planner = MiniPlanner(runner, info, chunks=BUDGET)
    for turns in ([("large",)], [("other", "What is this?")]):
        prompt, images = vision_model.prompt(turns)
        planner.add(prompt, 2, images=images)
    planner.run()
    print(estimate, peak.end() - before)


if __name__ == "__main__":
    main()
