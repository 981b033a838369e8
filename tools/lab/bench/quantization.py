"""Measures what a dtype, weights of 8 or 4 bits and narrow KV pools cost the story model in
accuracy, against the stock model in float32, and the bytes of its weights.

`tools.lab.measure_quantization` says what each figure is, and measures other models. The figures do
not depend on the machine's speed, so they are measured once.
"""

from __future__ import annotations

from tools.lab import measure_quantization
from tools.lab.bench.frame import Row

MEASURES = (
    "engine/worker",
    "engine/kernels",
    "engine/demo/stories",
    "tools/lab/measure_quantization.py",
)

SHOWN = {  # the rows of each figure: name, unit, and the factor into that unit
    "mean_kl_nats": ("mean KL", "nats", 1.0),
    "top1_agreement": ("same likeliest token", "%", 100.0),
    "perplexity_growth": ("growth of perplexity", "%", 100.0),
    "weight_bytes": ("weights", "MB", 1e-6),
    "sentences_accepted": ("sentences accepted", "%", 100.0),
}


def run() -> list[Row]:
    """Return the bench's rows."""
    text = measure_quantization.story_text()
    rows = []
    for way, found in measure_quantization.measure(str(measure_quantization.STORIES), text):
        for figure, value in found.items():
            name, unit, factor = SHOWN[figure]
            rows.append(Row(f"{name}: {way}", factor * value, unit, n=1))
    return rows
