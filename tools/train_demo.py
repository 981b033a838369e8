"""Trains a shipped demo model; each has a file of its own in `tools/demo`.

python -m tools.train_demo [stories] --documents N --threads N   the story model
python -m tools.train_demo embed                                 the embedding model
python -m tools.train_demo rerank                                the cross-encoder, which begins
                                                                 with the embedding model's weights
python -m tools.train_demo draft                                 the story model's draft model
python -m tools.train_demo clip                                  the model that embeds drawings
python -m tools.train_demo see                                   the model that answers questions
                                                                 about drawings, which begins with
                                                                 the tower of the one before
python -m tools.train_demo draw                                  a model that draws, not shipped
"""

from __future__ import annotations

from tools.demo.which import run_chosen

if __name__ == "__main__":
    run_chosen(
        {
            "stories": "tools.demo.train_stories",
            "draft": "tools.demo.train_draft",
            "embed": "tools.demo.train_embed",
            "rerank": "tools.demo.train_rerank",
            "clip": "tools.demo.train_clip",
            "see": "tools.demo.train_see",
            "draw": "tools.demo.train_draw",
        }
    )
