"""Trains a shipped demo model; each has a file of its own in `tools/lab/demo`.

python -m tools.lab.train_demo [stories] --documents N --threads N   the story model
python -m tools.lab.train_demo embed                                 the embedding model
python -m tools.lab.train_demo rerank                                the cross-encoder, which begins
                                                                     with the embedding model's
                                                                     weights
python -m tools.lab.train_demo draft                                 the story model's draft model
python -m tools.lab.train_demo clip                                  the model that embeds drawings
python -m tools.lab.train_demo see                                   the model that answers
                                                                     questions about drawings, which
                                                                     begins with the tower of the
                                                                     one before
python -m tools.lab.train_demo draw                                  a model that draws, not shipped
"""

from __future__ import annotations

from tools.lab.demo.which import run_chosen

if __name__ == "__main__":
    run_chosen(
        {
            "stories": "tools.lab.demo.train_stories",
            "draft": "tools.lab.demo.train_draft",
            "embed": "tools.lab.demo.train_embed",
            "rerank": "tools.lab.demo.train_rerank",
            "clip": "tools.lab.demo.train_clip",
            "see": "tools.lab.demo.train_see",
            "draw": "tools.lab.demo.train_draw",
        }
    )
