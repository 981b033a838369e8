"""Measures one of the shipped demo models against its bars; exits 1 when one is missed.

    python -m tools.measure_demo [stories]     the story model
    python -m tools.measure_demo embed         the embedding model
    python -m tools.measure_demo rerank        the cross-encoder

`--json FILE` also writes the figures; each model's own `--help` tells the rest.
"""

from __future__ import annotations

from tools.demo.which import run_chosen

if __name__ == "__main__":
    run_chosen(
        {
            "stories": "tools.demo.measure_stories",
            "embed": "tools.demo.measure_embed",
            "rerank": "tools.demo.measure_rerank",
        }
    )
