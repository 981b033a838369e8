"""Measures a shipped demo model against its bars; exits with 1 if one is missed.

    python -m tools.lab.measure_demo [stories]     the story model
    python -m tools.lab.measure_demo embed         the embedding model
    python -m tools.lab.measure_demo rerank        the cross-encoder
    python -m tools.lab.measure_demo clip          the model that embeds drawings and texts
    python -m tools.lab.measure_demo see           the model that answers questions about drawings
    python -m tools.lab.measure_demo draw          a model that draws, not shipped

`--json FILE` also writes the figures. `--help` after a model's name lists its options.
"""

from __future__ import annotations

from tools.lab.demo.which import run_chosen

if __name__ == "__main__":
    run_chosen(
        {
            "stories": "tools.lab.demo.measure_stories",
            "embed": "tools.lab.demo.measure_embed",
            "rerank": "tools.lab.demo.measure_rerank",
            "clip": "tools.lab.demo.measure_clip",
            "see": "tools.lab.demo.measure_see",
            "draw": "tools.lab.demo.measure_draw",
        }
    )
