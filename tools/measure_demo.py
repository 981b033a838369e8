"""Measures a shipped demo model against its bars; exits with 1 if one is missed.

    python -m tools.measure_demo [stories]     the story model
    python -m tools.measure_demo embed         the embedding model
    python -m tools.measure_demo rerank        the cross-encoder
    python -m tools.measure_demo clip          the model that embeds drawings and texts
    python -m tools.measure_demo see           the model that answers questions about drawings
    python -m tools.measure_demo draw          a model that draws, not shipped

`--json FILE` also writes the figures. `--help` after a model's name lists its options.
"""

from __future__ import annotations

from tools.demo.which import run_chosen

if __name__ == "__main__":
    run_chosen(
        {
            "stories": "tools.demo.measure_stories",
            "embed": "tools.demo.measure_embed",
            "rerank": "tools.demo.measure_rerank",
            "clip": "tools.demo.measure_clip",
            "see": "tools.demo.measure_see",
            "draw": "tools.demo.measure_draw",
        }
    )
