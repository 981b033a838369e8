"""List the text models that are served, and those that read images, from the tables that decide it.

    python -m tools.list_models            prints the list
    python -m tools.list_models --check    exits 1 if docs/features.md shows another one
    python -m tools.list_models --write    writes it into docs/features.md

Rule 1: the list comes from `SERVED`, `LISTED`, `VISION` and `UNPAGED_TYPES`, and no second list.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.worker.load.architectures import SERVED, UNPAGED_TYPES
from engine.worker.load.vision_architectures import VISION
from engine.worker.skeleton.division_plans import PLANS
from engine.worker.skeleton.families import LISTED
from tools.shown import Shown

FEATURES = Path(__file__).parent.parent / "docs" / "features.md"


def make_list() -> str:
    """Return a table in Markdown: how models run, and their names."""
    compiled = [one.label for one in SERVED.values() if one.name in LISTED]
    stock = [one.label for one in SERVED.values() if one.name not in LISTED]
    whole = [one.label for one in SERVED.values() if one.name not in PLANS]
    rows = (
        ("On a CPU, wholly compiled, also with weights of 8 and 4 bits", compiled),
        ("By transformers' modules, with our attention", stock),
        ("Of both, not divided by `--tensor-parallel-size`", whole),
        ("Read images in chats", [one.label for one in VISION.values()]),
        ("Refused: transformers' modules cannot have our attention", list(UNPAGED_TYPES)),
    )
    lines = [f"| {how} | {', '.join(names)} |" for how, names in rows]
    return "\n".join((f"| {len(SERVED)} kinds of text models are served | |", "|---|---|", *lines))


SHOWN = Shown(
    "models", "tools.list_models", make_list, str(__doc__).splitlines()[0], fence="", page=FEATURES
)

if __name__ == "__main__":
    sys.exit(SHOWN.main())
