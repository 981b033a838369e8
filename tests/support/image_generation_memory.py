"""`python -m tests.support.image_generation_memory DIR`: loads an image model, draws the largest
drawings that it takes, and prints the estimate of its memory and what was taken, in bytes.

It is a program of its own because memory freed before could hide what a drawing takes.
"""

import sys
import threading
from pathlib import Path

from engine.core.common.types import PlanId, SequenceId
from engine.core.image_generation.types import Drawing, ImageGenerationPlan, Verb
from engine.worker.image_generation.runner import PipelineRunner
from engine.worker.interface import RunnerSpec


def own_bytes() -> int:
    """Return the memory that only this process has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """Watches the process's memory until it is asked for the peak."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self._most = 0
        self.start()

    def run(self) -> None:
        """Measure the memory every millisecond, until `end`."""
        while not self._ended.wait(0.001):
            self._most = max(self._most, own_bytes())

    def end(self) -> int:
        """Stop measuring, and return the largest measurement in bytes."""
        self._ended.set()
        self.join()
        return self._most


def drawings(max_pixels: int) -> list[Drawing]:
    """Return the largest drawings: one of many images, one of a large image from another one."""
    side = int(max_pixels**0.5)
    common = {"prompt": "a", "negative_prompt": "b", "steps": 2, "guidance_scale": 5.0, "seed": 1}
    many = Drawing(width=side // 2, height=side // 2, num_images=4, **common)
    large = Drawing(width=side, height=side, source=bytes(3 * side * side), **common)
    return [many, large]


def main() -> None:
    """Draw, and print the estimate and the memory taken."""
    directory = sys.argv[1]
    runner = PipelineRunner(RunnerSpec(directory, threads=1, max_drawings=2))
    estimate = runner.estimate().num_bytes
    before, peak = own_bytes(), Peak()
    info = runner.load(lambda progress: None)
    for number, drawing in enumerate(drawings(info.max_pixels), 1):
        sequence = SequenceId(number)
        plans = [ImageGenerationPlan(PlanId(1), sequence, Verb.ENCODE, drawing=drawing)]
        plans.append(ImageGenerationPlan(PlanId(1), sequence, Verb.DENOISE))
        tiles = info.num_tiles(drawing) * drawing.num_images
        plans += [
            ImageGenerationPlan(PlanId(1), sequence, Verb.DECODE, tile) for tile in range(tiles)
        ]
        for plan in plans:
            runner.execute(plan)
    print(estimate, peak.end() - before)


if __name__ == "__main__":
    main()
